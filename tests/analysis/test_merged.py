import pytest
import torch

import vit_prune as vp
from tests.helpers import tiny_named
from vit_prune.analysis.merged import draw_merged, merged_sources, painted


def test_sources_say_which_token_a_patch_ends_in():
    model = vp.patch(tiny_named(), vp.ToMe(r=3))
    sources = merged_sources(model, torch.randn(2, 3, 32, 32))
    assert sources.shape == (2, 16)
    assert [len(row.unique()) for row in sources] == [10, 10]


def test_a_model_that_merges_nothing_is_refused():
    for methods, message in ((vp.TokenBias(), "no tokens merge"), (vp.ToMe(r=0), "nothing to draw")):
        with pytest.raises(ValueError, match=message), vp.patched(tiny_named(), methods) as model:
            merged_sources(model, torch.randn(1, 3, 32, 32))


def test_a_token_has_the_mean_colour_of_its_patches_and_lines_around_it():
    image = torch.zeros(8, 8, 3)
    image[:, 4:] = 1.0
    one = painted(image, torch.zeros(2, 2, dtype=torch.long))
    assert torch.equal(one, torch.full((8, 8, 3), 0.5))
    two = painted(image, torch.tensor([[0, 1], [0, 1]]))
    assert two[:, 0].max() == 0
    assert two[:, 7].min() == 1
    assert (two[:, 4] == 0.35).all()


def test_the_picture_is_written(tmp_path):
    model = vp.patch(tiny_named(), vp.ToMe(r=3))
    assert draw_merged(model, torch.randn(2, 3, 32, 32), tmp_path / "merged.png").stat().st_size > 1000
