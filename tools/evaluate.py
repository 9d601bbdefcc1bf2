"""Evaluate checkpoints: `python tools/evaluate.py --checkpoint output/train/RUN/best --data-dir DIR --eval-keep 1 0.5 linear:1.0:0.3`."""

from vit_prune.train.build import pick_device
from vit_prune.train.cli import main, parse_flags
from vit_prune.train.distributed import is_primary, process_group
from vit_prune.train.evaluation.config import EvaluateConfig
from vit_prune.train.evaluation.run import run_evaluation
from vit_prune.train.evaluation.tables import as_text


def evaluate() -> None:
    config = parse_flags(EvaluateConfig)
    with process_group(str(pick_device(config.device))) as device:
        report = run_evaluation(config, device)
        if is_primary():
            print(as_text(report))


if __name__ == "__main__":
    main(evaluate)
