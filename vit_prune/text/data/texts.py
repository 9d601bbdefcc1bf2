"""A data set of encoded texts, and its batches.  B batch, L the tokens of its longest text, rounded up to a multiple of LENGTHS."""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vit_prune.text.encoder import PAD
from vit_prune.train.distributed import rank, world_size
from vit_prune.train.draws import Draw, EpochSampler

LENGTHS = 8  # few different shapes, and those that half precision is fast at


class Texts(Dataset):
    """(numbers of its tokens, class) of each text, held as one array.

    Args: ids: of each text. targets: [n] classes. classes: their names, in the order of their numbers.
    """

    def __init__(self, ids: Sequence[Sequence[int]], targets: np.ndarray, classes: list[str]) -> None:
        self.flat = np.fromiter((number for text in ids for number in text), dtype=np.int32)
        self.ends = np.cumsum([len(text) for text in ids])
        self.targets, self.classes = targets, classes
        self.digest = hashlib.sha256(self.flat.tobytes() + self.ends.tobytes() + targets.tobytes()).hexdigest()
        self.class_to_idx = {name: number for number, name in enumerate(classes)}

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int | Draw) -> tuple[np.ndarray, int]:
        place = index.index if isinstance(index, Draw) else index
        if not 0 <= place < len(self):
            raise IndexError(f"text {place} of {len(self)}")
        start = self.ends[place - 1] if place else 0
        return self.flat[start : self.ends[place]], int(self.targets[place])


class Collate:
    """(ids [B, L] padded on the right, classes [B]) of a batch; L is at most max_length."""

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length

    def __call__(self, batch: list[tuple[np.ndarray, int]]) -> tuple[Tensor, Tensor]:
        longest = max(len(ids) for ids, _ in batch)
        length = min(self.max_length, -(-longest // LENGTHS) * LENGTHS)
        padded = np.full((len(batch), length), PAD, dtype=np.int64)
        for row, (ids, _) in zip(padded, batch, strict=True):
            row[: len(ids)] = ids
        return torch.from_numpy(padded), torch.tensor([target for _, target in batch])


def train_loader(texts: Texts, *, batch_size: int, seed: int, batches: int, max_length: int, workers: int, device: torch.device) -> DataLoader:
    """Shuffled batches of this process, in an order that seed and epoch decide. Args: batches: of each process in an update.

    Raises: ValueError where not even one batch is there.
    """
    if len(texts) < batch_size * world_size():
        raise ValueError(f"{len(texts)} texts to train on are fewer than one batch of {batch_size * world_size()}: lower --batch-size")
    sampler = EpochSampler(len(texts), batch_size=batch_size, seed=seed, batches=batches)
    return loader(texts, sampler, batch_size, max_length, workers, device, drop_last=True)


def eval_loader(texts: Texts, *, batch_size: int, max_length: int, workers: int, device: torch.device) -> DataLoader:
    """Every text once over all processes, in order."""
    return loader(texts, range(rank(), len(texts), world_size()), batch_size, max_length, workers, device, drop_last=False)


def loader(texts: Texts, sampler: object, batch_size: int, max_length: int, workers: int, device: torch.device, *, drop_last: bool) -> DataLoader:
    return DataLoader(
        texts,
        batch_size,
        sampler=sampler,
        num_workers=workers,
        collate_fn=Collate(max_length),
        pin_memory=device.type == "cuda",
        drop_last=drop_last,
        persistent_workers=workers > 0,
        generator=torch.Generator(),  # its draws are not the main process's
    )
