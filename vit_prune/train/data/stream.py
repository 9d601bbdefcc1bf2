"""Data sets that are read from beginning to end, by timm's readers: each process of a loader reads a part of its own."""

from collections.abc import Callable, Iterator, Sequence

from PIL import Image
from timm.data.dataset import IterableImageDataset
from timm.data.readers.reader import Reader

from vit_prune.train.data.images import read_bytes


class Stream(IterableImageDataset):
    """(RGB image, class) from one of timm's streaming readers; timm's loaders tell it the number of workers.

    `prepare(reader)` is called in the process that reads, once timm has set up its reader there; for training in each epoch, so that the
    order is a function of seed and epoch, and not of the epochs that this process has seen.
    """

    def __init__(self, name: str, reader: Reader, classes: Sequence[str], prepare: Callable[[Reader], None]) -> None:
        super().__init__(None, reader=reader)
        self.name = name
        self.classes = list(classes)
        self.class_to_idx = {name: index for index, name in enumerate(self.classes)}
        self.prepare = prepare

    def __len__(self) -> int:
        """Images per epoch in this process; training rounds up to whole batches of each worker."""
        whole = not self.reader.is_training and self.reader.dist_num_replicas == 1
        return self.reader.num_samples if whole else len(self.reader)

    def __iter__(self) -> Iterator[tuple]:
        """Raises: UnreadableImage, which names the image; ValueError for a class that has no name."""
        if self.reader.is_training:
            self.reader.ds = None
        if self.reader.ds is None:
            self.reader._lazy_init()
            self.prepare(self.reader)
        for number, (image, target) in enumerate(self.reader):
            if not 0 <= target < len(self.classes):
                raise ValueError(f"the data set {self.name} holds an image of the class {target}, and has the classes 0 to {len(self.classes) - 1}")
            if not isinstance(image, Image.Image):
                image = read_bytes(image, f"number {number} that this process read of {self.name}")
            yield (image if self.transform is None else self.transform(image)), target
