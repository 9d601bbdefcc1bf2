"""Training images, in an order that is a function of the seed and the iteration alone."""

from collections.abc import Iterator

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from vit_prune.detection.data.augment import large_scale_jitter
from vit_prune.detection.data.coco import CocoImages
from vit_prune.detection.evaluate import columns
from vit_prune.detection.train.config import DetectTrainConfig
from vit_prune.train.distributed import rank, world_size
from vit_prune.train.draws import Augmented, Draw


class JitteredImages(Dataset):
    """(image [3, h, w] uint8, target) by number, jittered with torch's random numbers."""

    def __init__(self, data: CocoImages, config: DetectTrainConfig) -> None:
        self.data, self.size, self.scale = data, config.image_size, config.scale
        self.used = [number for number in range(len(data)) if data.learnt(number) or not config.skip_empty]
        if not self.used:
            raise ValueError(f"no image of {data.path} has an object to learn")

    def __len__(self) -> int:
        return len(self.used)

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        number = self.used[index]
        return large_scale_jitter(self.data.image(number), self.data.target(number), self.size, self.scale)


class Order(Sampler[Draw]):
    """Epoch after epoch without a seam, each in an order of its own, from an iteration on; every process takes every world_size-th draw."""

    def __init__(self, num_images: int, config: DetectTrainConfig, start: int) -> None:
        self.num_images, self.seed, self.rank, self.world_size = num_images, config.seed, rank(), world_size()
        self.first, self.end = (iteration * config.batch_size * self.world_size for iteration in (start, config.iterations))

    def __len__(self) -> int:
        return (self.end - self.first) // self.world_size

    def __iter__(self) -> Iterator[Draw]:
        held, order = -1, None
        for place in range(self.first + self.rank, self.end, self.world_size):
            epoch, which = divmod(place, self.num_images)
            if epoch != held:
                held, order = epoch, np.random.default_rng((self.seed, epoch)).permutation(self.num_images)
            yield Draw(int(order[which]), epoch, 0)


def train_batches(images: JitteredImages, config: DetectTrainConfig, start: int) -> DataLoader:
    """Batches (images, targets) of the iterations from `start` on."""
    order = Order(len(images), config, start)
    augmented = Augmented(images, config.seed)
    return DataLoader(augmented, batch_size=config.batch_size, sampler=order, num_workers=config.workers, collate_fn=columns, drop_last=True)
