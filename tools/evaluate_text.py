"""Evaluate text encoders: `python tools/evaluate_text.py --checkpoint dense=RUN0/last,RUN1/last budget=... --test-file FILE`."""

from vit_prune.text.evaluation.config import EvaluateTextConfig
from vit_prune.text.evaluation.run import run_evaluation
from vit_prune.text.evaluation.tables import as_text
from vit_prune.train.build import pick_device
from vit_prune.train.cli import main, parse_flags


def evaluate() -> None:
    config = parse_flags(EvaluateTextConfig)
    print(as_text(run_evaluation(config, pick_device(config.device))))


if __name__ == "__main__":
    main(evaluate)
