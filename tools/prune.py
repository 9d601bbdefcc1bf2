"""Remove heads and MLP channels of a ViT for good, and save what is left; `tools/train.py --model FOLDER` trains it on.

python tools/prune.py --model deit_small_patch16_224 --pretrained --heads .25 --mlp .5 --output output/prune/deit_s_l1
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import tyro
from torch import Tensor, nn

from vit_prune import checkpoint
from vit_prune.measure.compare import closed_form
from vit_prune.measure.report import GIGA, MEGA, text_table, write_json
from vit_prune.methods.l1 import L1, PrunePlan, Taylor
from vit_prune.prune import prune
from vit_prune.train.build import build_model, check_saveable, pick_device
from vit_prune.train.cli import main
from vit_prune.train.config import TrainConfig
from vit_prune.train.data import create_dataset
from vit_prune.train.labels import check_classes, label_names
from vit_prune.train.loaders import data_config, train_loader


@dataclass(frozen=True)
class Flags:
    model: str  # a dense model of timm by name; or a folder of vp.save, which may have been pruned before
    output: Path  # a new folder for model.safetensors, config.json and plan.json
    heads: float = 0.25  # share of the heads that is removed, rounded down to whole heads
    mlp: float = 0.5  # share of the MLP channels that is removed, rounded down to multiples of 8
    criterion: Literal["l1", "taylor"] = "l1"  # the size of the weights; or gradients on the images of --dataset
    ranking: Literal["uniform", "global"] = "uniform"  # that share in each block; or the weakest over all blocks
    checkpoint: Path | None = None  # weights for a name: a file, or a folder of vp.save
    pretrained: bool = False  # timm's weights for a name
    img_size: int | None = None  # pixels per side, for a name (None: the model's own)
    num_classes: int | None = None  # outputs of the head, for a name (None: the model's own)
    dataset: str | None = None  # of taylor, as in tools/train.py
    data_dir: str | None = None  # where the data lies
    batches: int = 16  # of taylor; fewer where the data has fewer
    batch_size: int = 32  # images per batch
    device: str | None = None  # of taylor, e.g. cpu, cuda:1 (None: cuda where there is one)


def build(flags: Flags) -> nn.Module:
    """The model with its weights. Raises: ValueError, OSError for what cannot be had."""
    given = {name: value for name in ("checkpoint", "pretrained", "img_size", "num_classes") if (value := getattr(flags, name)) not in (None, False)}
    if Path(flags.model).is_dir():
        if given:
            raise ValueError(f"{flags.model} is a saved model, which is built as it was saved: leave out {', '.join(given)}")
        return checkpoint.load(flags.model)
    weights = given.pop("checkpoint", None)
    model = build_model(flags.model, **given)
    if weights is not None:
        print(checkpoint.load_weights(model, weights, purpose="evaluate"))
    elif not flags.pretrained:
        print("no checkpoint: the weights are random")
    return model


def batches(flags: Flags, model: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """Shuffled images of the training set, resized and not augmented, on the model's device, and their classes."""
    config = TrainConfig(dataset=flags.dataset, data_dir=flags.data_dir, batch_size=flags.batch_size, workers=0, no_aug=True)
    dataset = create_dataset(flags.dataset, flags.data_dir, "train", batch_size=flags.batch_size)
    check_classes(flags.model, model, tuple(map(str, dataset.classes)), label_names(model))
    return islice(train_loader(dataset, config, data_config(model), next(model.parameters()).device), flags.batches)


def cost(model: nn.Module) -> tuple[str, str, str]:
    count, parameters = closed_form(model, None), sum(parameter.numel() for parameter in model.parameters())
    return *(("?", "?") if count is None else (f"{count.total / GIGA:.3f}", f"{count.flops / GIGA:.3f}")), f"{parameters / MEGA:.2f}"


def kept_table(plan: PrunePlan) -> str:
    kept = [(f"{len(block.heads)} of {block.num_heads}", f"{len(block.channels)} of {block.num_channels}") for block in plan.blocks]
    return text_table(("kept of the original", "heads", "MLP channels"), [(f"blocks.{index}", *cells) for index, cells in enumerate(kept)])


def run() -> None:
    flags = tyro.cli(Flags, description=__doc__)
    is_taylor = flags.criterion == "taylor"
    how = (Taylor if is_taylor else L1)(flags.heads, flags.mlp, flags.ranking)
    if (flags.dataset is not None) != is_taylor:
        raise ValueError("--criterion taylor ranks by the images of --dataset, and --criterion l1 takes none")
    if flags.output.exists() and (not flags.output.is_dir() or any(flags.output.iterdir())):
        raise FileExistsError(f"{flags.output} is there already, and pruning cannot be undone: give another --output")
    model = build(flags)
    check_saveable(model)
    before = ("before", *cost(model))
    plan = prune(model, how, batches(flags, model.to(pick_device(flags.device))) if is_taylor else None)
    checkpoint.save(model, flags.output)
    write_json(flags.output / "plan.json", plan.to_dict())
    print(f"{text_table(('', 'GMACs', 'GFLOPs', 'M parameters'), [before, ('after', *cost(model))])}\n\n{kept_table(plan)}\n\nsaved: {flags.output}")


if __name__ == "__main__":
    main(run)
