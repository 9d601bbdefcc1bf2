"""Small texts and small configs."""

import pytest

from tests.helpers import single_thread
from tests.text.helpers import rows, write_jsonl
from vit_prune.text.config import TextConfig


@pytest.fixture(autouse=True, scope="package")
def one_thread():
    with single_thread():
        yield


@pytest.fixture(scope="session")
def tiny_files(tmp_path_factory) -> dict[str, str]:
    """24 texts to train on and 9 to evaluate, of 3 classes."""
    folder = tmp_path_factory.mktemp("texts")
    return {f"{split}_file": str(write_jsonl(folder / f"{split}.jsonl", rows(count, start))) for split, count, start in (("train", 8, 0), ("test", 3, 2))}


@pytest.fixture
def tiny_text(tmp_path, tiny_files):
    """A function that makes a config for a moment: 2 steps, 1 epoch, a model of 2 blocks; keywords override."""

    def make(**overrides) -> TextConfig:
        settings = {
            "model": "text_mini",
            "model_kwargs": {"depth": 2, "embed_dim": 16, "num_heads": 2},
            "vocab_size": 60,
            "max_length": 16,
            "epochs": 1,
            "batch_size": 12,
            "lr": 0.01,
            "device": "cpu",
            "output": str(tmp_path / "output"),
            "experiment": "run",
        }
        return TextConfig(**settings | tiny_files | overrides)

    return make
