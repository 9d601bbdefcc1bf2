"""Measure latency, memory and MACs, paired in one process:

python tools/latency.py --model deit_s_bias --keep 0.5 --device cpu --threads 1 --backend auto math

The models run in turn within each round; speedups are medians of paired ratios, beside what the MACs predict and the ceiling.
"""

import argparse
import sys

import torch

from vit_prune.measure.config import LatencyConfig, load_config
from vit_prune.measure.environment import environment_text, machine_warnings
from vit_prune.measure.run import environment_of, new_folder, run_latency, write_files
from vit_prune.measure.tables import Results, as_report, warnings_of
from vit_prune.train.build import pick_device
from vit_prune.train.cli import main, parse_flags


def parse(argv: list[str]) -> LatencyConfig:
    """Raises: ValueError for a wrong value, OSError for a recipe that is not there; an unknown flag ends the program."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config")
    files, rest = first.parse_known_args(argv)
    default = None if files.config is None else load_config(files.config)
    return parse_flags(LatencyConfig, default=default, args=rest)


def latency() -> None:
    config = parse(sys.argv[1:])
    device = torch.device("cpu") if config.is_owed else pick_device(config.device)
    found = environment_of(config, device)
    warnings = machine_warnings(threads=found["threads"])
    print(environment_text(found))
    print("\n".join(f"warning: {text}" for text in warnings), end="\n" if warnings else "", flush=True)
    folder = None

    def save(results: Results) -> None:
        nonlocal folder
        folder = folder or new_folder(config)
        write_files(folder, config, results, found | {"warnings": warnings + warnings_of(results.rows)}, as_report(results))

    results = run_latency(config, device, save)
    print(f"\n{as_report(results)}\n\nresults: {folder}")


if __name__ == "__main__":
    main(latency)
