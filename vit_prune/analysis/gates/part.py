"""A few images out of a data set."""

from collections.abc import Callable

from torch.utils.data import Dataset, IterableDataset, Subset


class Part(Subset):
    """Some images of a set, whose transform is the set's own: `eval_loader` sets it."""

    @property
    def transform(self) -> Callable | None:
        return self.dataset.transform

    @transform.setter
    def transform(self, transform: Callable | None) -> None:
        self.dataset.transform = transform


def spread(dataset: Dataset, count: int | None) -> Dataset:
    """`count` images at even distances (a folder is sorted by class), or all where there are fewer. Raises: ValueError for a stream."""
    if count is None:
        return dataset
    if isinstance(dataset, IterableDataset):
        raise ValueError("--images picks from numbered images, and this data set is read as a stream; leave it out")
    n = len(dataset)
    return Part(dataset, [n * place // count for place in range(count)]) if count < n else dataset
