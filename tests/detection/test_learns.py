"""A small detector learns, with all of its columns and with about half of them: some twenty minutes on two cores."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.detection.shapes import draw_coco
from vit_prune.detection.train.config import DetectTrainConfig
from vit_prune.detection.train.run import run
from vit_prune.train.recipe import load_recipe

RECIPE = Path(__file__).parents[2] / "configs/detection/shapes.yaml"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_small_detector_learns_dense_and_pruned(tmp_path):
    data = draw_coco(tmp_path / "shapes", train=400, val=80)
    config = replace(load_recipe(RECIPE, DetectTrainConfig), data_dir=str(data), device="cpu")
    pruned = run(replace(config, output=str(tmp_path / "pruned")))
    dense = run(replace(config, keep="1", output=str(tmp_path / "dense")))
    for kind in ("box_AP50", "mask_AP50"):
        assert dense[kind] >= 50
        assert pruned[kind] >= 50
        assert pruned[kind] >= dense[kind] - 3
