"""The whole idea in minutes, on a laptop: train a small ViT with token bias on real images, dense and pruned, and compare.

python tools/quickstart.py            (make quickstart)

scikit-learn's digits, three seeds. `dense` is trained and tested with all columns, `pruned` with half of them gone on average.
"""

import os
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from statistics import mean

import torch

import vit_prune as vp
from vit_prune.analysis.pictures import draw_kept
from vit_prune.measure.latency import PairedLatency, paired_latency
from vit_prune.measure.macs import ModelMacs, macs
from vit_prune.measure.report import text_table, write_json
from vit_prune.methods.schedules import parse_keep
from vit_prune.train.cli import main, parse_flags
from vit_prune.train.data import create_dataset
from vit_prune.train.loaders import data_config, eval_loader
from vit_prune.train.recipe import load_recipe
from vit_prune.train.study import StudyRun, train_all, with_run_folder

ROOT = Path(__file__).parents[1]
DEPTH = 6  # of vit_mini28_bias


@dataclass(frozen=True)
class Quickstart:
    seeds: int = 3
    keep: str = "1,.5,.5,.375,.25,.1875"  # one ratio per block: 51 of 102 columns, class token included
    epochs: int | None = None  # the recipe's own if left out
    output: Path = Path("output/quickstart")
    processes: int = min(2, os.cpu_count() or 1)  # trainings at once, one thread each: faster than one training on two threads


def table(top1: dict[str, list[float]], cost: dict[str, ModelMacs], latency: PairedLatency) -> str:
    rows = []
    for label, values in top1.items():
        seeds = " ".join(f"{value:.2f}" for value in values)
        speedup = latency.ratio("dense", label)
        rows.append((label, f"{mean(values):.2f}", seeds, f"{cost[label].total / 1e6:.2f}", f"{cost[label].saved:.1%}"))
        rows[-1] += (f"{cost[label].ceiling_saved:.1%}", f"{latency.medians_ms[label]:.2f}", f"{speedup.median:.2f}x")
    headers = ("", "top-1 %", "of each seed", "MMACs", "saved", "of at most", "median ms", "measured speedup")
    return text_table(headers, rows)


def compare(flags: Quickstart) -> None:
    parse_keep(flags.keep).ratios(DEPTH)
    folder = flags.output / f"{datetime.now():%Y%m%d-%H%M%S}"
    recipe = load_recipe(ROOT / "configs" / "digits.yaml")
    recipe = replace(recipe, epochs=flags.epochs or recipe.epochs)
    keeps = {"dense": "1", "pruned": flags.keep}
    runs = [StudyRun(label, seed, replace(recipe, keep=keep, seed=seed)) for seed in range(flags.seeds) for label, keep in keeps.items()]
    results = train_all([with_run_folder(one, data_dir=None, output=folder) for one in runs], processes=flags.processes)
    top1 = {label: [result["last"]["eval_top1"] for result in seeds.values()] for label, seeds in results.items()}
    models = {label: vp.load(Path(seeds[0]["folder"]) / "last").eval() for label, seeds in results.items()}
    report(flags, folder, top1, models)


@torch.no_grad()
def report(flags: Quickstart, folder: Path, top1: dict[str, list[float]], models: dict[str, torch.nn.Module]) -> None:
    """The table, the picture, and both for machines."""
    torch.set_num_threads(1)
    loader = eval_loader(create_dataset("digits", None, "val"), batch_size=8, workers=0, data=data_config(models["pruned"]), device=torch.device("cpu"))
    images = next(iter(loader))[0]
    cost = {label: macs(model) for label, model in models.items()}
    latency = paired_latency({label: lambda model=model: model(images[:1]) for label, model in models.items()}, runs=100, warmup=20)
    print(f"\nscikit-learn's digits, vit_mini28_bias, {flags.seeds} seeds, keep {flags.keep}; latency: CPU, 1 thread, float32, batch 1, eager\n")
    print(table(top1, cost, latency))
    print("\n`of at most`: what pruning every column would save. At 17 tokens the time goes into calls, not products: see docs/counting.md.")
    write_json(folder / "results.json", {"top1": top1, "keep": flags.keep, "macs": {k: v.to_dict() for k, v in cost.items()}, "latency": latency.to_dict()})
    picture = draw_kept(models["pruned"], images[:6], folder / "kept.png")
    print(f"\nwhich columns each block kept: {picture}\nresults: {folder / 'results.json'}")


if __name__ == "__main__":
    main(lambda: compare(parse_flags(Quickstart)))
