import pytest
import torch
from PIL import Image

import vit_prune as vp
from tests.helpers import randomise_bias, tiny_named
from vit_prune.analysis.pictures import draw_kept, kept_columns

pytestmark = pytest.mark.filterwarnings("ignore:the token bias is all zero")


def test_kept_patches_are_those_of_the_index_and_padding_is_not_kept():
    images = torch.randn(3, 3, 32, 32)
    model = randomise_bias(vp.patch(tiny_named(), [vp.TokenBias(), vp.Columns(rule="mass", tau=0.6)]))
    together = kept_columns(model, images)
    for row in range(3):
        alone = kept_columns(model, images[row : row + 1])
        assert torch.equal(together[0][row], alone[0][0])
    assert together[0].shape == (3, 16)
    dense = kept_columns(vp.patch(tiny_named(), vp.TokenBias()), images)
    assert all(block.all() for block in dense)


def test_the_picture_has_a_row_per_image_and_leaves_no_hook(tmp_path):
    model = randomise_bias(vp.patch(tiny_named(), vp.TokenBias(keep="1,.25")))
    path = draw_kept(model, torch.randn(2, 3, 32, 32), tmp_path / "kept.png")
    assert Image.open(path).width > Image.open(path).height
    assert not any(block.attn.prune._forward_hooks for block in model.blocks)


def test_an_unpatched_model_has_nothing_to_draw():
    with pytest.raises(ValueError, match="not patched"):
        kept_columns(tiny_named(), torch.randn(1, 3, 32, 32))
