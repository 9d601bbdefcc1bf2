"""Tokenizers of the package tokenizers: trained on the training texts, or read from a tokenizer.json. The padding is number 0."""

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vit_prune.text.data.rows import Parts
from vit_prune.text.encoder import PAD

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FILE = "tokenizer.json"
KINDS = ("wordpiece", "bpe")
SPECIAL = ("[PAD]", "[UNK]", "[SEP]")  # numbers 0, 1, 2 of a trained tokenizer
CHUNK = 10_000  # texts in the hand of the tokenizer at once


def need_tokenizers() -> None:
    """Raises: ValueError where the package is not installed."""
    if importlib.util.find_spec("tokenizers") is None:
        raise ValueError("texts need the package tokenizers: pip install 'vit_prune[text]'")


def train_tokenizer(kind: str, texts: Sequence[str], vocab_size: int) -> "Tokenizer":
    """A lower-casing WordPiece or BPE tokenizer of vocab_size entries, or of the characters alone where they are more; the same for the same texts.

    The package numbers the characters that carry a mark (##x, x</w>) as its hash table has them, anew in each process, and equal pairs are merged by
    number. So they are found first, and their order is given. Raises: ValueError for an unknown kind.
    """
    need_tokenizers()
    if kind not in KINDS:
        raise ValueError(f"tokenizer must be {' or '.join(KINDS)} or a tokenizer.json, got {kind!r}")
    characters = learn(kind, texts, 0, SPECIAL).get_vocab()
    marked = sorted(token for token in characters if len(token) > 1 and token not in SPECIAL)
    return with_special_alone(learn(kind, texts, vocab_size, (*SPECIAL, *marked)))


def learn(kind: str, texts: Sequence[str], vocab_size: int, first: Sequence[str]) -> "Tokenizer":
    """Train one whose first entries are given."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    wordpiece = kind == "wordpiece"
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]") if wordpiece else models.BPE(unk_token="[UNK]", end_of_word_suffix="</w>"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    settings = {"vocab_size": vocab_size, "special_tokens": list(first), "show_progress": False}
    trainer = trainers.WordPieceTrainer(**settings) if wordpiece else trainers.BpeTrainer(**settings, end_of_word_suffix="</w>")
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def with_special_alone(tokenizer: "Tokenizer") -> "Tokenizer":
    """The same, with no other special tokens than SPECIAL."""
    from tokenizers import Tokenizer

    described = json.loads(tokenizer.to_str())
    described["added_tokens"] = [token for token in described["added_tokens"] if token["content"] in SPECIAL]
    return Tokenizer.from_str(json.dumps(described))


def load_tokenizer(path: str | Path) -> "Tokenizer":
    """Raises: FileNotFoundError; ValueError for a file of anything else, or one whose numbers are not ours."""
    need_tokenizers()
    from tokenizers import Tokenizer

    if not Path(path).is_file():
        raise FileNotFoundError(f"no tokenizer {path}")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing narrower
        raise ValueError(f"{path} is no tokenizer.json: {error}") from None
    if tokenizer.token_to_id("[PAD]") != PAD:
        raise ValueError(f"{path} gives [PAD] the number {tokenizer.token_to_id('[PAD]')}, expected {PAD}")
    if max(tokenizer.get_vocab().values()) >= tokenizer.get_vocab_size():
        raise ValueError(f"{path} numbers its {tokenizer.get_vocab_size()} tokens with gaps: they must be 0, 1, 2, ...")
    if missing := [token for token in SPECIAL if tokenizer.token_to_id(token) is None]:
        raise ValueError(f"{path} has no {', '.join(missing)}")
    return tokenizer


def encode(tokenizer: "Tokenizer", rows: Sequence[Parts], max_length: int) -> list[list[int]]:
    """The numbers of each row's tokens, at most max_length, never none, never the padding's.

    A pair is joined by [SEP] unless the tokenizer has a template of its own; where it is too long the longer text is cut. An empty text is one [UNK].
    """
    prepared = prepare(tokenizer, max_length)
    unknown = [prepared.token_to_id("[UNK]")]
    numbers = []
    for start in range(0, len(rows), CHUNK):
        chunk = [row[0] if len(row) == 1 else row for row in rows[start : start + CHUNK]]
        numbers += [encoding.ids or unknown for encoding in prepared.encode_batch(chunk)]
    return numbers


def prepare(tokenizer: "Tokenizer", max_length: int) -> "Tokenizer":
    """A copy that cuts texts, and takes a text that reads "[PAD]" as the text that it is."""
    from tokenizers import Tokenizer, processors

    copy = Tokenizer.from_str(tokenizer.to_str())
    copy.no_padding()
    if copy.post_processor is None:
        copy.post_processor = processors.TemplateProcessing(single="$A", pair="$A [SEP] $B", special_tokens=[("[SEP]", copy.token_to_id("[SEP]"))])
    copy.enable_truncation(max_length, strategy="longest_first")
    copy.encode_special_tokens = True
    return copy
