"""Small data and small configs."""

from pathlib import Path

import pytest

from tests.helpers import single_thread
from tests.train.helpers import write_image
from vit_prune.train.config import TrainConfig

TINY = {"depth": 2, "embed_dim": 16, "num_heads": 2}


@pytest.fixture(autouse=True, scope="package")
def one_thread():
    with single_thread():
        yield


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> Path:
    """8 images to train on and 4 to evaluate, of 2 classes."""
    return fill(tmp_path_factory.mktemp("tiny"), {"train/a": 4, "train/b": 4, "val/a": 2, "val/b": 2})


@pytest.fixture
def tiny_config(tmp_path, tiny_folder):
    """A function that makes a config for a moment: 2 steps, 1 epoch, a model of 2 blocks; keywords override."""

    def make(**overrides) -> TrainConfig:
        settings = {
            "model": "vit_mini28_bias",
            "model_kwargs": TINY,
            "img_size": 8,
            "data_dir": str(tiny_folder),
            "epochs": 1,
            "warmup_epochs": 0,
            "batch_size": 4,
            "workers": 0,
            "device": "cpu",
            "output": str(tmp_path / "output"),
            "experiment": "run",
        }
        return TrainConfig(**settings | overrides)

    return make


@pytest.fixture
def image_folder(tmp_path):
    """A function that makes data_dir/SPLIT/CLASS/IMAGE.png from {"train/a": 3, "val/a": 2}."""

    def make(counts: dict[str, int]) -> Path:
        return fill(tmp_path / "data", counts)

    return make


def fill(root: Path, counts: dict[str, int]) -> Path:
    for number, (folder, count) in enumerate(counts.items()):
        (root / folder).mkdir(parents=True, exist_ok=True)
        for index in range(count):
            write_image(root / folder / f"{index}.png", seed=100 * number + index)
    return root
