"""What each head of one block looks at in a text: token by token.  L tokens, H heads."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from vit_prune.analysis.gates.heads import head_maps
from vit_prune.analysis.gates.pictures import head_title, new_figure, save
from vit_prune.analysis.gates.record import gated_blocks
from vit_prune.text.data.tokenizer import encode

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SHOWN_TOKENS, SHOWN_LETTERS = 24, 14  # more cannot be read beside a panel
PANELS_PER_ROW, LEAST_INCHES, INCHES_PER_TOKEN = 4, 1.8, 0.11
LABELS = {"fontsize": 5, "parse_math": False}  # a text may hold dollar signs


class Sentence(NamedTuple):
    ids: Tensor  # [1, L] int64
    tokens: tuple[str, ...]  # L of them


def sentence(tokenizer: "Tokenizer", parts: tuple[str, ...], max_length: int) -> Sentence:
    """One text, or a pair, as the model reads it."""
    [ids] = encode(tokenizer, [parts], max_length)
    return Sentence(torch.tensor([ids]), tuple(map(tokenizer.id_to_token, ids)))


def draw_text_maps(model: nn.Module, text: Sentence, path: Path, *, block: int | None = None) -> Path:
    """Attention of each token (row) over all tokens (columns), a panel per head, by falling p, each from 0 to its own largest weight.

    Args: block: its number (None: the last). Raises: as `head_maps`.
    """
    maps, block = head_maps(model, text.ids, block), max(gated_blocks(model)) if block is None else block
    shown, labels = min(len(text.tokens), SHOWN_TOKENS), [short(token) for token in text.tokens[:SHOWN_TOKENS]]
    across = min(PANELS_PER_ROW, len(maps.heads))
    down, inches = math.ceil(len(maps.heads) / across), LEAST_INCHES + INCHES_PER_TOKEN * shown
    figure = new_figure(inches * across, inches * down + 0.5)
    for place, panel in enumerate(figure.subplots(down, across, squeeze=False).flat):
        if place < len(maps.heads):
            draw_panel(panel, head_title(maps, place), maps.weights[place, :shown, :shown], labels)
        else:
            panel.axis("off")
    figure.suptitle(caption(block, shown, len(text.tokens)), fontsize=8)
    return save(figure, path)


def draw_panel(panel, title: str, weights: Tensor, labels: Sequence[str]) -> None:
    """weights [L, L]."""
    panel.imshow(weights.numpy(), cmap="inferno", vmin=0)
    panel.set_xticks(range(len(labels)), labels, rotation=90, **LABELS)
    panel.set_yticks(range(len(labels)), labels, **LABELS)
    panel.set_title(title, fontsize=7)


def caption(block: int, shown: int, tokens: int) -> str:
    cut = f"; the first {shown} of {tokens} tokens" if shown < tokens else ""
    return f"block {block}: rows are queries, columns are keys{cut}"


def short(token: str) -> str:
    return token if len(token) <= SHOWN_LETTERS else token[: SHOWN_LETTERS - 1] + "…"
