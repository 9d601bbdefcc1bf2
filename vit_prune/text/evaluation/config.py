"""What `tools/evaluate_text.py` takes: one dataclass, its values checked at birth."""

from dataclasses import dataclass

from vit_prune.measure.energy import check_country
from vit_prune.text.config import check_columns, numbers_as_text
from vit_prune.text.data.files import kind_of
from vit_prune.train.checks import check_device, check_ranges, conform_fields
from vit_prune.train.evaluation.candidates import Candidate, parse_candidates
from vit_prune.train.evaluation.config import check_output


@dataclass(frozen=True)
class EvaluateTextConfig:
    """Evaluate one text encoder or several on the same texts.

    Args:
        checkpoint: folders of vp.save with a tokenizer.json beside the model (best/ or last/ of a run); NAME=PATH,PATH,... is several seeds of one model
        test_file: the texts: FILE.csv or FILE.jsonl, with .gz or without
        dataset_dir: in its place, a Hugging Face data set on this machine: a folder of save_to_disk, or of parquet files
        test_split: of dataset_dir (None: test, or validation where there is none)
        text_columns: one column, or two whose texts are joined by [SEP]; numbers, from 1, for a CSV without a header
        label_column: the class, a name or a whole number
        skip_label: texts with this label are left out and counted (SNLI's -1: the annotators disagree)
        batch_size: texts per step
        device: e.g. cpu, cuda, cuda:1 (None: cuda where there is one)
        json: write the results to this file too
        csv: write the results to this file too
        energy: meter energy and CO2 with codecarbon; the country whose electricity it is, e.g. FRA (None: no metering)
    """

    checkpoint: tuple[str, ...]
    test_file: str | None = None
    dataset_dir: str | None = None
    test_split: str | None = None
    text_columns: tuple[str, ...] = ("text",)
    label_column: str = "label"
    skip_label: str | None = "-1"
    batch_size: int = 64
    device: str | None = None
    json: str | None = None
    csv: str | None = None
    energy: str | None = None

    def __post_init__(self) -> None:
        for name in ("label_column", "skip_label", "text_columns"):
            object.__setattr__(self, name, numbers_as_text(getattr(self, name)))
        conform_fields(self)
        check_ranges(self)
        check_device(self.device)
        check_source(self.test_file, self.dataset_dir, self.test_split)
        check_columns(self.text_columns, self.label_column)
        for path in (self.json, self.csv):
            check_output(path)
        check_country(self.energy)
        parse_candidates(self.checkpoint)

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """The checkpoints by name."""
        return parse_candidates(self.checkpoint)


def check_source(test_file: str | None, dataset_dir: str | None, test_split: str | None) -> None:
    """Raises: ValueError for no texts or two sources of them, a file of another kind, and a split of a file."""
    if (test_file is None) == (dataset_dir is None):
        raise ValueError("give the texts: --test-file, or --dataset-dir" + ("" if test_file is None else ", not both"))
    if test_file is None:
        return
    kind_of(test_file)
    if test_split is not None:
        raise ValueError(f"test_split goes with --dataset-dir: {test_file} has no splits")
