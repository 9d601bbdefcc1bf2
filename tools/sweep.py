"""Compare methods at many strengths on one model: `python tools/sweep.py --config configs/sweeps/vit_s_photographs.yaml --checkpoint FILE`.

Writes points.csv, a point at a time, and frontier.png into the output folder. It can be stopped and started again: a point that is there is not run again.
"""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from vit_prune.sweep.config import load_sweep
from vit_prune.sweep.picture import draw_frontier
from vit_prune.sweep.run import run_sweep
from vit_prune.sweep.tables import sweep_table
from vit_prune.train.cli import main, parse_flags


@dataclass(frozen=True)
class Flags:
    """Compare methods at many strengths; what is given here goes before the file.

    Args:
        config: the sweep, a YAML file: model, methods, shares, ...
        checkpoint: weights of the model
        data_dir: where the data lies
        img_size: pixels per side, one or several
        shares: of the unpruned model's MACs
        latency: measure time, paired with the unpruned model
        memory: measure peak memory, in a process of its own
        runs: rounds that are timed, at the first size
        threads: of the CPU
        output: the folder of the sweep
    """

    config: str
    checkpoint: str | None = None
    data_dir: str | None = None
    img_size: tuple[int, ...] | None = None
    shares: tuple[float, ...] | None = None
    latency: bool | None = None
    memory: bool | None = None
    runs: int | None = None
    threads: int | None = None
    output: str | None = None


def sweep() -> None:
    flags = vars(parse_flags(Flags))
    config = load_sweep(flags.pop("config"), **flags)
    rows = run_sweep(config)
    print(sweep_table(rows))
    if importlib.util.find_spec("matplotlib") is None:
        print("no picture: matplotlib is not installed (pip install 'vit_prune[analysis]')")
    else:
        title = f"{config.model or 'trained models'}, {config.data}, float32, {config.threads} thread(s), batch 1"
        print(f"drawn: {draw_frontier(rows, Path(config.output) / 'frontier.png', title)}")


if __name__ == "__main__":
    main(sweep)
