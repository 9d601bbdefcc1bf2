from pathlib import Path

import pytest
import timm
import torch

import vit_prune as vp
from tests.helpers import tiny_named
from vit_prune.analysis.fidelity import fidelity, fidelity_table
from vit_prune.analysis.photographs import crops, photograph_batches, photographs

RANDOM = ["random, drop", "random, merge"]
WEIGHTS = Path(__file__).parents[3] / "shared" / "data" / "dinov2_vits14_224.fp16.safetensors"


def test_photographs_are_real_and_their_crops_differ():
    images = photographs()
    assert len(images) == 8
    first, second = crops(images["china.jpg"], 64)
    assert first.size == (64, 64)
    assert first.tobytes() != second.tobytes()
    batches = photograph_batches(tiny_named(), 32, count=3)
    assert [tuple(batch.shape) for batch in batches] == [(3, 3, 32, 32)] * 8
    assert 0.3 < torch.cat(batches).std() < 2  # normalised, not 0..255


def test_keeping_everything_is_the_model_itself():
    rows = {row.way: row for row in fidelity(tiny_named(), keep=1.0, size=32, rank=8)}
    assert all(row.patch_cosine == pytest.approx(1.0, abs=1e-5) for row in rows.values())
    assert all(row.macs_share == 1.0 for row in rows.values())


def test_every_way_is_compared_on_what_it_was_not_calibrated_on():
    model = tiny_named()
    rows = fidelity(model, keep=0.25, size=32, rank=8)
    assert [row.way for row in rows] == ["drop", "merge", "merge, kept set by Gumbel-top-k", "merge, kept set by systematic sampling", *RANDOM]
    assert all(row.crops_by_half == (8, 8) for row in rows)
    assert all(0 < row.patch_cosine < 1 for row in rows)
    assert rows[1].macs_share > rows[0].macs_share  # the assignment is counted
    assert "patch cosine" in fidelity_table(rows)
    assert not any("prune" in name for name, _ in model.named_modules())


@pytest.mark.slow
@pytest.mark.skipif(not WEIGHTS.exists(), reason="the real ViT-S is not here")
def test_merging_keeps_a_real_vit_near_itself_where_dropping_does_not():
    model = timm.create_model("vit_small_patch14_dinov2", img_size=224, num_classes=0).eval()
    vp.load_weights(model, WEIGHTS)
    rows = {row.way: row for row in fidelity(model, keep=0.5, size=224)}
    assert min(rows["merge"].crops_by_half) >= 8
    assert rows["merge"].patch_cosine >= 0.97
    assert rows["merge"].patch_cosine >= rows["drop"].patch_cosine + 0.04
    assert rows["merge, kept set by systematic sampling"].patch_cosine >= 0.98
