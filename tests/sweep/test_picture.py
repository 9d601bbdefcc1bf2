"""The picture of the frontier."""

import pytest
from matplotlib.figure import Figure
from PIL import Image

from vit_prune.sweep.picture import draw_frontier, value


def row(method="a", **values):
    return {"method": method, "img_size": "32", "macs_share": "0.9", "latency_share": "", "patch_cosine": "0.99", "top1": "", **values}


@pytest.fixture
def shape(monkeypatch):
    """Rows and columns of panels of each picture drawn."""
    shapes, subplots = [], Figure.subplots
    monkeypatch.setattr(Figure, "subplots", lambda self, *args, **kwargs: shapes.append(args) or subplots(self, *args, **kwargs))
    return shapes


def test_a_picture_is_written_whole_with_a_panel_per_size_and_axis(tmp_path, shape):
    rows = [row(), row("b", macs_share="0.5", latency_share="0.6"), row(img_size="64"), row("c", macs_share="", patch_cosine="", note="out of reach")]
    path = draw_frontier(rows, tmp_path / "frontier.png", "title")
    assert Image.open(path).format == "PNG"
    assert [file.name for file in tmp_path.iterdir()] == ["frontier.png"]
    assert shape == [(2, 2)]


def test_accuracy_is_drawn_where_there_is_no_cosine(tmp_path, shape):
    assert draw_frontier([row(patch_cosine=None, top1=98.5, img_size=28)], tmp_path / "x.png", "title") == tmp_path / "x.png"
    assert shape == [(1, 1)]


@pytest.mark.parametrize("rows", [[], [row(patch_cosine="")], [row(macs_share="")]], ids=["no rows", "no quality", "no cost"])
def test_nothing_to_draw_is_no_picture(tmp_path, rows):
    assert draw_frontier(rows, tmp_path / "x.png", "title") is None
    assert not list(tmp_path.iterdir())


def test_a_cosine_is_drawn_as_a_loss_that_has_a_logarithm():
    assert value({"patch_cosine": "0.75"}, "patch_cosine") == 0.25
    assert value({"patch_cosine": "1.0000001"}, "patch_cosine") > 0
    assert value({"top1": "98.5"}, "top1") == 98.5


def test_a_method_has_one_colour_in_all_panels_and_the_legend_lies_beside_them(tmp_path, monkeypatch):
    figures, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kwargs: figures.append(self) or save(self, *args, **kwargs))
    drawn = [("a", "32", "0.99"), ("b", "32", "0.98"), ("b", "64", "0.97"), ("c", "64", "")]
    rows = [row(method, img_size=size, patch_cosine=cosine, target_share="0.9") for method, size, cosine in drawn]
    draw_frontier(rows, tmp_path / "x.png", "title")
    [figure] = figures
    colours = [{line.get_label(): line.get_color() for line in panel.lines} for panel in figure.axes]
    assert colours[0]["b"] == colours[1]["b"] != colours[0]["a"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b"]
    assert not any(panel.get_legend() for panel in figure.axes)
