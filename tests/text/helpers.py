"""Small texts on the disk."""

import csv
import gzip
import json
from pathlib import Path

import timm
import torch

from vit_prune import checkpoint
from vit_prune.methods.base import set_progress

WORDS = {"animals": "cat dog horse cow sheep mouse", "plants": "oak rose moss fern tulip pine", "tools": "saw hammer nail file drill vice"}


def rows(per_class: int, start: int = 0) -> list[dict]:
    """{"text", "label"} of three classes, each with words of its own, in turn."""
    return [
        {"text": " ".join(words.split()[(start + number + step) % 6] for step in range(1 + number % 4)), "label": label}
        for number in range(per_class)
        for label, words in WORDS.items()
    ]


def write_text(path: Path, text: str) -> Path:
    """Gzipped where the path ends in .gz."""
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def write_jsonl(path: Path, values: list[dict]) -> Path:
    return write_text(path, "".join(json.dumps(value) + "\n" for value in values))


def write_csv(path: Path, lines: list[list]) -> Path:
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(lines)
    return path


TINY_GATED = {"depth": 2, "embed_dim": 16, "num_heads": 4, "vocab_size": 60, "max_length": 16, "num_classes": 3}


def hand_macs(length: int, heads: list[int] | None, *, projected: int | None = None) -> int:
    """MACs of a text under the model of TINY_GATED: D 16, H 4, d 4; heads: k of each block (None: no gates). projected: heads in all projections."""
    D, H, d, N = 16, 4, 4, length
    total = D * 3  # the head
    for k in heads or [H] * 2:
        k_projected = projected or k
        total += 4 * N * D * k_projected * d  # q, k, v and the way back
        total += 2 * N * N * k * d  # logits, and their sum over the values
        total += 2 * N * D * 4 * D  # MLP
        total += 0 if heads is None else D * D + D + D * H  # the gate: f and g of the mean
    return total


def save_encoder(folder: Path, model: str = "text_mini", *, seed: int = 0, labels: tuple[str, ...] | None = tuple(sorted(WORDS)), **kwargs) -> Path:
    """A folder as tools/train_text.py leaves it: a tiny model with random weights, and a tokenizer of WORDS."""
    from vit_prune.text.data.tokenizer import FILE, train_tokenizer

    tokenizer = train_tokenizer("wordpiece", [*WORDS.values()], TINY_GATED["vocab_size"])
    torch.manual_seed(seed)
    built = timm.create_model(model, **TINY_GATED | {"vocab_size": tokenizer.get_vocab_size()} | kwargs)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter += 0.5 * torch.randn_like(parameter)
    set_progress(built, 1.0)  # gates that were never trained let all heads run
    if labels is not None:
        built.pretrained_cfg = {**built.pretrained_cfg, "label_names": labels}
    checkpoint.save(built, folder)
    tokenizer.save(str(folder / FILE))
    return folder
