import pytest

from vit_prune.measure.pictures import draw_speedups
from vit_prune.measure.setting import Row, Setting
from vit_prune.measure.tables import Results, as_text, warnings_of

MATH, EFFICIENT = Setting(backend="math"), Setting(backend="efficient")
TIMES = {"mean_ms": 2.5, "std_ms": 0.25, "median_ms": 2.0, "p10_ms": 1.5, "p90_ms": 3.5, "throughput": 500.0, "img_size": (224, 224)}
DENSE = Row(MATH, "dense", None, **TIMES, macs=4_000_000_000, dense_macs=4_000_000_000)
COMPARED = {"speedup": 1.2, "speedup_low": 1.1, "speedup_high": 1.3, "predicted": 1.25, "ceiling": 1.5, "peak_mib": 100.0, "above_rest_mib": 2.5}
PRUNED = Row(MATH, "pruned", "dense", **TIMES, **COMPARED, macs=3_200_000_000, dense_macs=4_000_000_000, noise="too noisy")


def results(layout, rows=(DENSE, PRUNED), settings=(MATH,), **fields):
    flops = {"dense": 8_000_000_000, "pruned": 6_400_000_000}
    return Results(layout, ("dense", "pruned"), settings, {"dense": None, "pruned": "dense"}, flops, rows, **fields)


def lines(text):
    """The cells of each line; columns are two blanks apart."""
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in text.splitlines()]


def test_a_row_has_every_figure_under_its_own_name():
    titled, header, _, dense, pruned = lines(as_text(results("rows")))
    assert titled == ["inference, 224 x 224 px, batch 1, float32, eager, backend math"]
    row = dict(zip(header, pruned, strict=True))
    assert row == {
        "model": "pruned (noisy)",
        "median ms": "2.000",
        "mean ± std ms": "2.50 ± 0.25",
        "p10": "1.500",
        "p90": "3.500",
        "images/s": "500.0",
        "speedup": "1.200x",
        "interval": "1.100 to 1.300",
        "predicted": "1.250x",
        "efficiency": "0.960",
        "ceiling": "1.500x",
        "GMACs": "3.200",
        "GFLOPs": "6.400",
        "peak MiB": "100",
        "of the call": "2.5",
    }
    assert dense[6:11] == ["-"] * 5


def test_what_is_not_known_is_a_dash():
    row = Row(MATH, "resnet", None, **TIMES)
    assert lines(as_text(results("rows", (row,))))[3][-4:] == ["-"] * 4


@pytest.mark.parametrize(
    ("layout", "header", "dense", "pruned"),
    [
        ("table1", ["top-1 %", "top-5 %", "GFLOPs (2 x GMACs)", "math ms"], ["72.20", "91.10", "8.000", "2.00"], ["owed", "owed", "6.400", "2.00 (1.20x)"]),
        ("table11", ["GFLOPs (2 x GMACs)", "math ms"], ["8.000", "2.00"], ["6.400", "2.00 (1.20x)"]),
        ("table12", ["GFLOPs (2 x GMACs)", "math ms"], ["8.000", "2.50 ± 0.25"], ["6.400", "2.50 ± 0.25 (1.20x)"]),
    ],
)
def test_the_papers_layouts_have_the_speedup_in_parentheses(layout, header, dense, pruned):
    found = lines(as_text(results(layout, accuracy={"dense": (72.2, 91.1)})))
    assert found[0] == ["model", *header]
    assert found[2:4] == [["dense", *dense], ["pruned", *pruned]]


def test_every_row_is_printed_where_nothing_was_measured_and_says_why():
    text = as_text(results("table11", (), (MATH, EFFICIENT), owed={MATH: "there is no CUDA device here", EFFICIENT: "there is no CUDA device here"}))
    assert lines(text)[2:4] == [["dense", "8.000", "owed", "owed"], ["pruned", "6.400", "owed", "owed"]]
    assert "backend efficient: there is no CUDA device here" in text


def test_columns_of_a_table_say_what_differs():
    settings = (Setting(backend="math", dtype="float16"), MATH)
    assert lines(as_text(results("table11", settings=settings)))[0][2:] == ["math, dtype float16 ms", "math, dtype float32 ms"]


def test_a_reason_that_many_rows_share_is_given_once():
    assert warnings_of([DENSE, PRUNED, PRUNED]) == ["2 speedups: too noisy"]
    assert warnings_of([PRUNED]) == [f"{MATH}: too noisy"]


def test_the_picture_is_drawn_where_something_was_compared(tmp_path):
    pytest.importorskip("matplotlib")
    assert draw_speedups([DENSE], tmp_path / "x.png") is None
    assert draw_speedups([DENSE, PRUNED, PRUNED], tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [tmp_path / "x.png"]
