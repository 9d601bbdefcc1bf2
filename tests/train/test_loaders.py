"""Loaders: what they give, what is refused before the workers start, and what is said when one dies."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image

from tests.train.helpers import write_image
from vit_prune.train import loaders
from vit_prune.train.data import UnreadableImage, create_dataset, digits
from vit_prune.train.job import resolve
from vit_prune.train.loaders import data_config, eval_loader, train_loader, worker_deaths_explained
from vit_prune.train.run import run
from vit_prune.train.state import RunFolder

DATA = {"input_size": (3, 8, 8), "interpolation": "bicubic", "mean": (0.5,) * 3, "std": (0.5,) * 3, "crop_pct": 1.0, "crop_mode": "center"}
CPU = torch.device("cpu")


def train_images(config) -> list[torch.Tensor]:
    loader = train_loader(create_dataset("folder", config.data_dir, "train"), config, DATA, CPU)
    loaders.set_epoch(loader, 0)
    return [images for images, _ in loader]


def test_workers_that_do_not_fit_into_shared_memory_are_refused_with_what_to_do(tiny_config, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**6, 10**6 - 1000, 1000))
    message = r"4 workers on this machine hold 0 MiB of images in shared memory, and /dev/shm has 0 MiB free: lower --workers \(0 needs none\)"
    with pytest.raises(ValueError, match=message):
        train_images(tiny_config(workers=2))
    assert train_images(tiny_config(workers=0))


class Dying(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, _):
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_dies_is_an_error_with_the_usual_reason_instead_of_a_traceback():
    with pytest.raises(OSError, match=r"a process that loads images died, mostly for want of .* memory: lower --workers"), worker_deaths_explained():
        list(torch.utils.data.DataLoader(Dying(), num_workers=1))


def test_another_runtime_error_is_not_taken_for_a_dead_worker():
    with pytest.raises(RuntimeError, match="shapes"), worker_deaths_explained():
        raise RuntimeError("shapes")


def test_augmentation_is_the_same_with_and_without_workers(tiny_config):
    plain, workers = (train_images(tiny_config(workers=count, aa="rand-m9")) for count in (0, 2))
    assert all(torch.equal(one, two) for one, two in zip(plain, workers, strict=True))
    assert not torch.equal(plain[0], plain[1])


def test_images_are_normalised_as_the_model_wants_them(tiny_config, image_folder):
    root = image_folder({"train/a": 4})
    for path in (root / "train/a").iterdir():
        Image.new("RGB", (8, 8), (0, 255, 51)).save(path)
    images = train_images(tiny_config(data_dir=str(root), no_aug=True))[0]
    torch.testing.assert_close(images[0, :, 0, 0], torch.tensor([-1.0, 1.0, -0.6]))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_truncated_image_is_named_instead_of_skipped(image_folder, workers):
    root = image_folder({"val/a": 2})
    broken = write_image(root / "val/a/broken.jpg")
    broken.write_bytes(broken.read_bytes()[:-200])
    dataset = create_dataset("folder", str(root), "val")
    loader = eval_loader(dataset, batch_size=2, workers=workers, data=DATA, device=CPU)
    with pytest.raises(UnreadableImage) as caught:
        list(loader)
    assert str(caught.value).startswith(f"cannot read the image {broken}: ")
    assert "Traceback" not in str(caught.value)


def test_a_set_smaller_than_one_batch_is_refused_instead_of_training_on_nothing(image_folder, tiny_config):
    dataset = create_dataset("folder", str(image_folder({"train/a": 7})), "train")
    with pytest.raises(ValueError, match="7 images to train on are fewer than one batch of 8"):
        train_loader(dataset, tiny_config(batch_size=8), DATA, CPU)


def test_evaluation_sees_every_image_once_and_in_order(image_folder):
    dataset = create_dataset("folder", str(image_folder({"val/a": 3, "val/b": 2})), "val")
    loader = eval_loader(dataset, batch_size=2, workers=0, data=DATA, device=CPU)
    assert torch.cat([targets for _, targets in loader]).tolist() == [0, 0, 0, 1, 1]
    assert next(iter(loader))[0].shape == (2, 3, 8, 8)


def test_a_run_without_augmentation_can_be_written_down_and_run_again(tiny_config):
    resolved = resolve(tiny_config(no_aug=True), digits("train"))
    assert (resolved.no_aug, resolved.hflip, resolved.scale) == (True, None, None)


def test_digits_are_never_mirrored_unless_the_user_says_so(tiny_config):
    assert resolve(tiny_config(dataset="digits"), digits("train")).hflip == 0
    assert resolve(tiny_config(dataset="digits", hflip=0.5), digits("train")).hflip == 0.5


def test_the_images_have_the_size_that_the_model_was_built_with_not_the_size_of_its_weights():
    assert data_config(timm.create_model("vit_mini28_bias", img_size=16))["input_size"] == (3, 16, 16)


@pytest.fixture
def shards(tmp_path) -> Path:
    """12 images to train on in two shards, 4 to evaluate."""
    webdataset = pytest.importorskip("webdataset")
    counts, splits = {"train": (6, 6), "validation": (4,)}, {}
    for split, lengths in counts.items():
        files = [f"{split}-{number}.tar" for number in range(len(lengths))]
        for number, (file, length) in enumerate(zip(files, lengths, strict=True)):
            with webdataset.TarWriter(str(tmp_path / file)) as tar:
                for index in range(length):
                    image = write_image(tmp_path / "image.png", seed=100 * number + index).read_bytes()
                    tar.write({"__key__": f"{number}-{index}", "png": image, "cls": index % 2})
        splits[split] = {"name": split, "filenames": files, "shard_lengths": lengths, "num_samples": sum(lengths)}
    (tmp_path / "_info.json").write_text(json.dumps({"name": "x", "class_names": ["a", "b"], "splits": splits}))
    return tmp_path


@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_on_a_stream_that_is_resumed_equals_the_whole_run(tiny_config, shards, workers):
    settings = {"dataset": "wds/x", "data_dir": str(shards), "workers": workers, "aa": "rand-m9", "epochs": 3, "sched": "constant"}
    whole = run(tiny_config(experiment="whole", **settings))
    run(tiny_config(experiment="halves", **settings | {"epochs": 2}))
    halves = run(tiny_config(experiment="halves", resume="auto", **settings))
    one, two = (RunFolder(result["folder"]).read()["model"] for result in (whole, halves))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert whole["last"]["eval_images"] == 4


def test_a_stream_is_augmented_anew_in_each_epoch_by_its_workers_too(tiny_config, shards):
    config = tiny_config(dataset="wds/x", data_dir=str(shards), workers=1, aa="rand-m9")
    loader = train_loader(create_dataset(config.dataset, config.data_dir, "train", batch_size=4), config, DATA, CPU)
    epochs = []
    for epoch in (0, 1, 0):
        loaders.set_epoch(loader, epoch)
        epochs.append(torch.cat([images for images, _ in loader]))
    assert len(epochs[0]) == 12
    assert not torch.equal(epochs[0], epochs[1])
