"""Evaluate text encoders side by side: from an EvaluateTextConfig to a report of rows, and to files. In one process."""

import json
from dataclasses import asdict

import torch
from torch import nn

from vit_prune.measure.environment import environment
from vit_prune.text.data.rows import Rows
from vit_prune.text.data.texts import Texts
from vit_prune.text.data.tokenizer import need_tokenizers
from vit_prune.text.evaluation.config import EvaluateTextConfig
from vit_prune.text.evaluation.models import TextsOf, load_encoder
from vit_prune.text.evaluation.results import COSTS, PER_BLOCK, UNITS, measure
from vit_prune.text.evaluation.tables import csv_text
from vit_prune.text.job import read_rows
from vit_prune.train.evaluation.candidates import Candidate, check_seeds
from vit_prune.train.evaluation.results import combine
from vit_prune.train.state import write_atomically

Seeds = list[tuple[nn.Module, Texts]]  # of one checkpoint: each seed's model, and the texts as it reads them


def run_evaluation(config: EvaluateTextConfig, device: torch.device) -> dict:
    """Every checkpoint on the same texts.

    Returns: what the numbers depend on, "units", and "results": a row per checkpoint. JSON-able.
    Raises: ValueError or OSError before the first batch for what can be known then.
    """
    need_tokenizers()
    rows = read_rows(config, config.test_file, config.test_split)
    texts_of = TextsOf(rows)
    loaded = [load_seeds(candidate, texts_of) for candidate in config.candidates]
    results = [evaluate_seeds(candidate, seeds, config, device) for candidate, seeds in zip(config.candidates, loaded, strict=True)]
    report = make_report(config, rows, results, device)
    if config.json is not None:
        write_atomically(config.json, json.dumps(report, indent=2) + "\n")
    if config.csv is not None:
        write_atomically(config.csv, csv_text(report))
    return report


def load_seeds(candidate: Candidate, texts_of: TextsOf) -> Seeds:
    """On the CPU. Raises: ValueError or OSError for what is no text encoder with its tokenizer, of other classes, or not another seed of the first."""
    models = [load_encoder(path) for path in candidate.paths]
    seeds = [(model, texts_of(path, model)) for path, model in zip(candidate.paths, models, strict=True)]
    check_seeds(candidate, models)
    return seeds


def evaluate_seeds(candidate: Candidate, seeds: Seeds, config: EvaluateTextConfig, device: torch.device) -> dict:
    """One row."""
    how = {"batch_size": config.batch_size, "country": config.energy}
    measured = [measure(path, model, texts, device, **how) for path, (model, texts) in zip(candidate.paths, seeds, strict=True)]
    return combine(candidate, [model for model, _ in seeds], measured, costs=COSTS, per_block=PER_BLOCK)


def make_report(config: EvaluateTextConfig, rows: Rows, results: list[dict], device: torch.device) -> dict:
    """The rows with what they depend on."""
    settings = {name: value for name, value in asdict(config).items() if name not in ("checkpoint", "device", "json", "csv")}
    dtypes = list(dict.fromkeys(row["dtype"] for row in results))
    return {
        "source": rows.source,
        "texts": len(rows.labels),
        "skipped": rows.skipped,
        **settings,
        "text_columns": list(config.text_columns),
        "device": str(device),
        "environment": environment(device, threads=torch.get_num_threads(), dtypes=dtypes),
        "units": UNITS,
        "results": results,
    }
