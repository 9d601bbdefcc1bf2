"""The layouts of an evaluation, from rows made by hand."""

import csv
import io

import pytest

from vit_prune.train.evaluation.results import UNITS
from vit_prune.train.evaluation.tables import as_text, csv_text


def row(name, top1, **fields):
    known = {"top5": 99.0, "loss": 0.5, "macs": 8_000_000, "dense_macs": 10_000_000, "saved": 20.0, "columns": 25.5, "columns_spread": 0.0, "heads": None}
    settings = {"keep": "0.5", "rule": "topk", "importance": "logit", "sampling": "topk", "dropped": "drop", "tau": None, "query_key_free": 0}
    spread = {"top1_std": None, "top5_std": None, "loss_std": None, "columns_per_block": [25.0, 26.0]}
    energy = dict.fromkeys(("energy_wh", "co2_g", "energy_meter"))
    return {"checkpoint": name, "paths": [name], "dtype": "float32", "top1": top1, **known, **settings, **spread, **energy, **fields}


@pytest.fixture
def report():
    """A function that puts rows into a report."""

    def make(*rows, table="schedules", **fields):
        context = {"dataset": "folder", "split": "val", "images": 1000, "broken_images": 0, "device": "cpu", "autocast": None, "batch_size": 256, "ranks": 1}
        return {"table": table, **context, "units": UNITS, "results": list(rows), **fields}

    return make


def cells(text, line):
    return text.splitlines()[line].split()


def test_schedules_put_macs_in_millions_and_percent_beside_the_accuracy(report):
    text = as_text(report(row("a", 91.234), row("longer", 9)))
    assert cells(text, 2) == ["a", "0.5", "91.23", "99.00", "0.5000", "8.0", "20.0", "25.5"]
    lines = text.splitlines()
    assert len({len(line) for line in lines[:4]}) == 1  # aligned to the right edge
    assert "1,000 images of folder (val); cpu, float32, batch size 256, 1 process" in lines


def test_unknown_macs_are_said_not_shown_as_zero(report):
    text = as_text(report(row("a", 91, macs=None, saved=None, dense_macs=None, columns=None)))
    assert cells(text, 2)[-3:] == ["unknown"] * 3


def test_small_macs_are_not_rounded_to_zero(report):
    assert "0.0332" in as_text(report(row("a", 91, macs=33_184)))


@pytest.mark.parametrize(("broken", "sentence"), [(1, "1 image could not be read and is left out"), (2, "2 images could not be read and are left out")])
def test_images_that_are_left_out_are_said(report, broken, sentence):
    assert sentence in as_text(report(row("a", 91), broken_images=broken))
    assert "could not be read" not in as_text(report(row("a", 91)))


def test_seeds_show_their_spread_and_how_many_they_are(report):
    text = as_text(report(row("a", 91, paths=["x", "y"], top1_std=0.126, top5_std=0.0, loss_std=0.01), row("b", 90)))
    assert "91.00 ± 0.13" in text
    assert "mean ± standard deviation over seeds: 2 of a" in text.splitlines()


def test_autocast_dtypes_and_processes_are_said(report):
    text = as_text(report(row("a", 91), row("b", 91, dtype="bfloat16"), autocast="float16", ranks=4))
    assert "cpu, float32, bfloat16 with autocast to float16, batch size 256, 4 processes" in text


def two_by_two(macs_of_second=(10_000_000, 8_000_000)):
    labels = [(name, trained, inference) for name, trained in (("A", "dense"), ("B", "pruned")) for inference in ("dense", "pruned")]
    macs = (10_000_000, 8_000_000, *macs_of_second)
    return [
        row(name, 90 + index, keep="1" if inference == "dense" else "0.5", trained=trained, inference=inference, macs=macs[index])
        for index, (name, trained, inference) in enumerate(labels)
    ]


def test_training_is_the_row_and_inference_the_column(report):
    text = as_text(report(*two_by_two(), table="training-inference"))
    assert "dense inference (keep 1)  pruned inference (keep 0.5)" in text
    assert cells(text, 2) == ["trained", "dense", "90.00", "(99.00)", "91.00", "(99.00)"]
    assert cells(text, 3) == ["trained", "pruned", "92.00", "(99.00)", "93.00", "(99.00)"]
    assert cells(text, 4) == ["MMACs", "per", "image", "10.0", "8.0"]
    assert {"trained dense: A", "trained pruned: B"} < set(text.splitlines())


def test_two_models_of_other_costs_get_a_line_of_macs_each(report):
    text = as_text(report(*two_by_two((20_000_000, 16_000_000)), table="training-inference"))
    assert "MMACs per image, trained dense" in text
    assert cells(text, 5)[-2:] == ["20.0", "16.0"]


def test_the_macs_of_a_mean_are_marked_as_such(report):
    mass = row("m", 90, rule="mass", tau=0.9, importance="prob", keep="mass 0.9", columns_spread=3.456)
    text = as_text(report(row("a", 91), mass, table="rules"))
    assert cells(text, 3) == ["m", "prob", "mass", "topk", "drop", "0.9", "25.5", "3.46", "8.0", "90.00", "99.00"]
    assert "MACs at the mean M" in text
    assert "MACs at the mean M" not in as_text(report(row("a", 91), table="rules"))


def test_the_difference_of_top1_has_a_sign(report):
    rows = [row("a", 91, top1_difference=0.0), row("b", 90, query_key_free=2, top1_difference=-1.0), row("c", 92, top1_difference=1.0)]
    text = as_text(report(*rows, table="query-key-free"))
    assert [cells(text, line)[-1] for line in (2, 3, 4)] == ["+0.00", "-1.00", "+1.00"]
    assert cells(text, 3)[1] == "2"


def test_csv_leaves_unknown_cells_empty_and_reads_back_exactly(report):
    rows = list(csv.DictReader(io.StringIO(csv_text(report(row("a,b", 100 / 3, macs=None), row("c", 1))))))
    assert (rows[0]["checkpoint"], float(rows[0]["top1"]), rows[0]["macs"]) == ("a,b", 100 / 3, "")
    assert (rows[1]["macs"], rows[1]["columns_per_block"], rows[1]["dataset"]) == ("8000000", "25.0 26.0", "folder")


@pytest.mark.parametrize("table", ["schedules", "rules", "query-key-free"])
def test_energy_has_columns_only_where_it_was_metered(report, table):
    rows = [row("a", 91, top1_difference=0.0), row("b", 90, top1_difference=-1.0)]
    assert "CO2" not in as_text(report(*rows, table=table, energy=None))
    metered = [one | {"energy_wh": 0.01234, "co2_g": 1234.5, "energy_meter": "codecarbon 9.9"} for one in rows]
    text = as_text(report(*metered, table=table, energy="FRA"))
    assert cells(text, 3)[-2:] == ["0.0123", "1,234"]
    assert "electricity of FRA; codecarbon 9.9" in text
