"""Train the variants of a study and compare them: `python tools/study.py --config configs/studies/fashion_mnist.yaml --data-dir DIR`.

It can be stopped and started again: finished runs are read, an interrupted one goes on.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

from torch import nn

import vit_prune as vp
from vit_prune.measure.inputs import takes_texts
from vit_prune.measure.report import text_table, write_json
from vit_prune.methods.stack import columns_methods
from vit_prune.train.cli import main, parse_flags
from vit_prune.train.evaluation.kept import of_first_batch
from vit_prune.train.evaluation.results import cost
from vit_prune.train.study import MACS_UNITS, load_study, train_all, with_run_folder

MILLION = 1_000_000


@dataclass(frozen=True)
class Flags:
    """Train the variants of a study, several seeds of each, and compare them.

    Args:
        config: the study, a YAML file: recipe, seeds, variants
        data_dir: where the data lies
        output: where the run folders go, and where those of an earlier start are found
        processes: trainings at once
        threads: CPU threads of each
    """

    config: str
    data_dir: str | None = None
    output: str = "output/study"
    processes: int = min(2, os.cpu_count() or 1)
    threads: int = 1


def summarise(results: dict[int, dict]) -> dict:
    """One variant: {"top1": of each seed after the last epoch, in percent, "mean", "std", "macs", "seconds": of all its epochs, ...}.

    Columns and heads are those of the evaluation's first batch; "macs" is None where M depends on the text: its mean is over many lengths.
    """
    top1 = {seed: result["last"]["eval_top1"] for seed, result in results.items()}
    first = next(iter(results.values()))
    model = vp.load(Path(first["folder"]) / "last")
    kept = of_first_batch(first["layers"])
    return {
        "top1": top1,
        "top1_mean": mean(top1.values()),
        "top1_std": stdev(top1.values()) if len(top1) > 1 else None,
        "top5": {seed: result["last"]["eval_top5"] for seed, result in results.items()},
        **{name: kept[name] for name in ("columns_per_block", "heads_per_block")},
        "macs": None if by_mean(model) and takes_texts(model) else cost(model, kept, by_mean=by_mean(model))["macs"],
        "seconds": {seed: result["seconds"] for seed, result in results.items()},
        "folders": {seed: result["folder"] for seed, result in results.items()},
    }


def by_mean(model: nn.Module) -> bool:
    """Whether the number of columns depends on the image."""
    return any(method.config.rule != "topk" for method in columns_methods(model))


def table(rows: dict[str, dict]) -> str:
    first = next(iter(rows.values()))["top1_mean"]
    cells = [
        (
            name,
            f"{row['top1_mean']:.2f}",
            "" if row["top1_std"] is None else f"{row['top1_std']:.2f}",
            f"{row['top1_mean'] - first:+.2f}",
            " ".join(f"{value:.2f}" for value in row["top1"].values()),
            "unknown" if row["macs"] is None else f"{row['macs'] / MILLION:.2f}",
            f"{mean(row['seconds'].values()) / 60:.1f}",
        )
        for name, row in rows.items()
    ]
    return text_table(("variant", "top-1 %", "std", "to the first", "of each seed", "MMACs", "minutes"), cells)


def study() -> None:
    flags = parse_flags(Flags)
    runs = [with_run_folder(one, data_dir=flags.data_dir, output=flags.output) for one in load_study(flags.config)]
    results = train_all(runs, processes=flags.processes, threads=flags.threads)
    rows = {variant: summarise(seeds) for variant, seeds in results.items()}
    print(f"{table(rows)}\nMMACs: 10^6 {MACS_UNITS[runs[0].task]}")
    path = Path(flags.output) / "study.json"
    units = {"top1": "percent", "macs": MACS_UNITS[runs[0].task]}
    write_json(path, {"study": Path(flags.config).name, "processes": flags.processes, "threads": flags.threads, "units": units, "variants": rows})
    print(f"results: {path}")


if __name__ == "__main__":
    main(study)
