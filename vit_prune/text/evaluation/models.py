"""The encoders that an evaluation compares, and the texts as each of them reads them: with its own tokenizer and numbers of the classes."""

from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from vit_prune import checkpoint
from vit_prune.text.data.labels import classes_of, numbered
from vit_prune.text.data.rows import Rows
from vit_prune.text.data.texts import Texts
from vit_prune.text.data.tokenizer import FILE, encode, load_tokenizer
from vit_prune.text.encoder import TextTransformer
from vit_prune.train.labels import check_classes, label_names

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def load_encoder(path: str, *, of_images: str = "tools/evaluate.py evaluates models of images") -> nn.Module:
    """What vp.save wrote. Raises: OSError; ValueError for a checkpoint that is broken, or no text encoder. Args: of_images: what the message says of them."""
    model = checkpoint.load(path)
    if not isinstance(model, TextTransformer):
        raise ValueError(f"{path} is a {type(model).__name__}, which takes no texts: {of_images}")
    return model


class TextsOf:
    """The texts of one file for every model: those with the same tokenizer, length and classes share them."""

    def __init__(self, rows: Rows) -> None:
        self.rows, self.made = rows, {}

    def __call__(self, path: str, model: TextTransformer) -> Texts:
        """Raises: FileNotFoundError where the checkpoint has no tokenizer; ValueError for one of another model, and for classes that the model has not."""
        tokenizer, classes = tokenizer_for(path, model), classes_for(path, model, self.rows)
        key = (tokenizer_of(path).read_bytes(), model.max_length, tuple(classes))
        if key not in self.made:
            self.made[key] = Texts(encode(tokenizer, self.rows.parts, model.max_length), numbered(self.rows, classes), classes)
        return self.made[key]


def tokenizer_for(path: str, model: TextTransformer) -> "Tokenizer":
    """The one beside a checkpoint. Raises: FileNotFoundError where there is none; ValueError for one of another model."""
    tokenizer = load_tokenizer(tokenizer_of(path))
    if tokenizer.get_vocab_size() != model.vocab_size:
        raise ValueError(f"{path} knows {model.vocab_size} tokens, its {FILE} {tokenizer.get_vocab_size()}: give the one that it was trained with")
    return tokenizer


def tokenizer_of(path: str) -> Path:
    """Raises: FileNotFoundError."""
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    if not (folder / FILE).is_file():
        raise FileNotFoundError(f"{path} has no {FILE} beside it, which tools/train_text.py writes: put the model's own there")
    return folder / FILE


def classes_for(path: str, model: nn.Module, rows: Rows) -> list[str]:
    """The model's class names, or the data's sorted labels where it has none. Raises: ValueError for labels that are not among them, or another number."""
    names = label_names(model)
    if names is None:
        classes = classes_of(rows)
        check_classes(path, model, tuple(classes), None)
        return classes
    there = set(rows.labels)
    check_classes(path, model, names if there <= set(names) else tuple(sorted(there)), names)  # a part of the classes will do
    return list(names)
