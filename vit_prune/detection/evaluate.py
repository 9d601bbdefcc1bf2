"""Run a detector over a data set, in one process or several, and judge what it found."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from vit_prune.detection.data.augment import fit
from vit_prune.detection.data.coco import CocoImages
from vit_prune.detection.metrics import coco_metrics, to_results
from vit_prune.detection.model import MaskRCNN
from vit_prune.train.distributed import is_primary, rank, world_size
from vit_prune.train.progress import progress_bar


class FittedImages(Dataset):
    """Each image with its longer side at `size` pixels: (tensor, its id, its own (height, width))."""

    def __init__(self, data: CocoImages, size: int) -> None:
        self.data, self.size = data, size

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, tuple[int, int]]:
        image = self.data.image(index)
        return fit(image, self.size), self.data.images[index]["id"], (image.height, image.width)


@torch.no_grad()
def detect(model: MaskRCNN, data: CocoImages, size: int, device: torch.device, *, batch_size: int = 1, workers: int = 0, autocast_dtype=None) -> list[dict]:
    """What the model finds in all images, in COCO's result format; of all processes, in the first one (the others get nothing).

    Each process takes every world_size-th image, so that each image is seen once.
    """
    model.eval()
    found = []
    for images, ids, sizes in batches(FittedImages(data, size), batch_size, workers):
        with torch.autocast(device.type, autocast_dtype, enabled=autocast_dtype is not None):
            detections = model([image.to(device) for image in images], output_sizes=sizes)
        for one, number in zip(detections, ids, strict=True):
            found += to_results(one, number, data)
    return gathered(found)


def batches(images: FittedImages, batch_size: int, workers: int) -> Iterator[tuple]:
    own = range(rank(), len(images), world_size())
    loader = DataLoader(images, batch_size=batch_size, sampler=own, num_workers=workers, collate_fn=columns)
    with progress_bar("detecting", loader) as bar:
        for batch in loader:
            yield batch
            bar.update(len(batch[0]) * world_size())


def columns(batch: list[tuple]) -> tuple:
    """Images of several sizes are a list, not a tensor."""
    return tuple(zip(*batch, strict=True))


def gathered(found: list[dict]) -> list[dict]:
    """Of all processes, in the first one, by image."""
    parts: list = [found]
    if dist.is_initialized():
        parts = [None] * world_size() if is_primary() else None
        dist.gather_object(found, parts)
    return sorted((one for part in parts or () for one in part), key=lambda one: (one["image_id"], -one["score"]))


def evaluate(model: MaskRCNN, data: CocoImages, size: int, device: torch.device, **settings) -> dict | None:
    """Average precision of boxes and masks in percent, as `coco_metrics` gives it; None in the other processes. settings: as of `detect`."""
    results = detect(model, data, size, device, **settings)
    return coco_metrics(data, results) if is_primary() else None
