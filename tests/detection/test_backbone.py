"""A ViT as a dense map: the true grid, windows, and columns pruned inside them."""

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers import resample_abs_pos_embed

import vit_prune as vp
from vit_prune.detection.backbone import ViTBackbone, cut
from vit_prune.detection.build import dense_vit
from vit_prune.patch.check import UnsupportedModel

TINY = {"depth": 3, "embed_dim": 32, "num_heads": 4}


def vit(name="vit_tiny_patch16_224", **kwargs):
    torch.manual_seed(0)
    model = dense_vit(name, **TINY | kwargs).eval()
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight *= 4
            if hasattr(block.attn, "prune"):
                block.attn.prune.token_bias.weight.normal_()
    return model


def images(height=80, width=112):
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_the_map_is_the_blocks_of_timm_without_prefix_and_norm_at_positions_of_the_true_grid():
    model = vit()
    x = model.patch_embed.proj(images()).flatten(2).mT
    x = x + resample_abs_pos_embed(model.pos_embed, [5, 7], num_prefix_tokens=0)
    for block in model.blocks:
        x = block(x)
    out = ViTBackbone(model)(images())
    assert out.shape == (2, 32, 5, 7)
    torch.testing.assert_close(out, x.mT.unflatten(2, (5, 7)))


def by_hand(block, x, grid, window):
    """ViTDet's window attention of a dense block, window by window: zeros after the norm where a window hangs over."""
    h, w = grid
    normed = block.norm1(x).unflatten(1, grid)
    attended = torch.zeros_like(normed)
    for top in range(0, h, window):
        for left in range(0, w, window):
            part = normed[:, top : top + window, left : left + window]
            rows, columns = part.shape[1:3]
            padded = F.pad(part, (0, 0, 0, window - columns, 0, window - rows))
            out = block.attn(padded.flatten(1, 2)).unflatten(1, (window, window))
            attended[:, top : top + rows, left : left + columns] = out[:, :rows, :columns]
    x = x + attended.flatten(1, 2)
    return x + block.mlp(block.norm2(x))


@pytest.mark.parametrize("window", [1, 3, 4, 7, 20])
@torch.no_grad()
def test_windows_are_those_of_vitdet(window):
    model = vit()
    x = model._pos_embed(model.patch_embed(images()))
    for index, block in enumerate(model.blocks):
        x = block(x) if index == 1 else by_hand(block, x, (5, 7), window)
    out = ViTBackbone(model, window=window, global_blocks=(1,))(images())
    torch.testing.assert_close(out, x.mT.unflatten(2, (5, 7)), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_keep_1_in_windows_is_the_dense_model():
    dense, bias = vit(), vit("vit_ti_bias")
    for block in bias.blocks:
        block.attn.prune.token_bias.weight.zero_()
    bias.load_state_dict(dense.state_dict(), strict=False)
    torch.testing.assert_close(ViTBackbone(bias, window=4)(images()), ViTBackbone(dense, window=4)(images()))


def kept_of(backbone, x):
    seen = []
    handles = [block.attn.prune.register_forward_hook(lambda _m, args, out: seen.append((args[0], out))) for block in backbone.vit.blocks]
    with torch.no_grad():
        backbone(x)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("dropped", ["drop", "merge"])
def test_each_window_keeps_its_own_columns_and_never_one_of_the_padding(dropped):
    model = vit("vit_ti_bias", keep="0.5", dropped=dropped)
    with torch.no_grad():
        for block in model.blocks:  # a padded token, which is zero, has the largest bias of all
            block.norm1.bias.fill_(1.0)
            block.attn.prune.token_bias.weight.copy_(-block.attn.prune.token_bias.weight.abs())
    for x, kept in kept_of(ViTBackbone(model, window=4), images()):
        assert x.shape == (2 * 2 * 2, 16, 32)
        real = (x != 0).any(-1)
        seen = kept.bias.amax(1) > float("-inf")
        assert real.gather(1, kept.index)[seen].all()
        assert torch.equal(seen.sum(1), (0.5 * real.sum(1)).ceil().long())


@pytest.mark.parametrize("window", [None, 4])
def test_what_an_image_was_padded_with_wins_no_place_and_is_not_seen(window):
    model = vit("vit_ti_bias", keep="0.5")
    with torch.no_grad():
        model.pos_embed.zero_()  # which is of the whole canvas
        for block in model.blocks:
            block.attn.prune.token_bias.weight.mul_(10)
    backbone, whole = ViTBackbone(model, window=window), images(64, 96)
    padded = F.pad(whole, (0, 32, 0, 48))
    with torch.no_grad():
        alone, canvas = backbone(whole), backbone(padded, [(64, 96)] * 2)
    torch.testing.assert_close(canvas[:, :, :4, :6], alone, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(backbone(padded)[:, :, :4, :6], alone, atol=1e-3)  # it would win


def test_a_canvas_that_is_filled_needs_no_mask():
    backbone = ViTBackbone(vit("vit_ti_bias", keep="0.5"))
    assert backbone.real_tokens(images(), [(80, 112)] * 2) is None
    assert backbone.real_tokens(images(), [(80, 112), (65, 33)])[1].sum() == 5 * 3


@torch.no_grad()
def test_what_a_window_computes_does_not_depend_on_how_far_it_hangs_over():
    model = vit("vit_ti_bias", keep="0.5")
    inside = ViTBackbone(model)(images(48, 48))  # one window of 3 x 3, no padding
    hanging = ViTBackbone(model, window=4)(images(48, 48))
    torch.testing.assert_close(hanging, inside, rtol=1e-4, atol=1e-5)


def test_windows_are_cut_row_by_row():
    grid = torch.arange(16.0).view(1, 4, 4, 1)
    assert cut(grid, 2)[..., 0].tolist() == [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]


@pytest.mark.parametrize("window", [None, 4])
def test_checkpointing_changes_no_gradient(window):
    grads = []
    for checkpointing in (False, True):
        model = vit("vit_ti_bias", keep="0.5").train()
        model.set_grad_checkpointing(checkpointing)
        ViTBackbone(model, window=window)(images()).square().mean().backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    assert all(grad is not None for grad in grads[0])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", "vit_ti_bias", "vit_tiny_patch16_224"])
def test_a_classifiers_weights_are_taken_without_class_token_norm_and_head(name, tmp_path):
    torch.manual_seed(3)
    source = timm.create_model(name, **TINY)
    torch.save({"model": source.state_dict()}, tmp_path / "weights.pth")
    model = dense_vit(name, checkpoint=tmp_path / "weights.pth", **TINY)
    assert torch.equal(model.pos_embed, source.pos_embed[:, 1:])
    for key, value in model.blocks.state_dict().items():
        assert torch.equal(value, source.blocks.state_dict()[key])
    assert not [key for key in model.state_dict() if key.startswith(("norm.", "head.", "cls_token"))]


def test_a_mae_pretraining_is_taken_without_its_decoder(tmp_path):
    torch.manual_seed(3)
    source = timm.create_model("vit_tiny_patch16_224", num_classes=0, **TINY)
    decoder = {"mask_token": torch.zeros(1, 1, 8), "decoder_embed.weight": torch.zeros(8, 32), "decoder_pred.bias": torch.zeros(4)}
    torch.save({"model": source.state_dict() | decoder}, tmp_path / "mae.pth")
    model = dense_vit("vit_ti_bias", checkpoint=tmp_path / "mae.pth", **TINY)
    assert torch.equal(model.blocks[0].attn.qkv.weight, source.blocks[0].attn.qkv.weight)


def test_position_embeddings_stay_on_their_own_grid_and_are_resampled_for_each_image():
    model = ViTBackbone(vit())
    assert model.vit.pos_embed.shape == (1, 14 * 14, 32)
    assert [tuple(model(images(*size)).shape[-2:]) for size in ((224, 224), (512, 96), (64, 1024))] == [(14, 14), (32, 6), (4, 64)]


REFUSED = {
    "merging": (lambda: ViTBackbone(vp.patch(vit(), vp.ToMe(r=1))), UnsupportedModel, "in which no tokens merge"),
    "prefix tokens": (lambda: ViTBackbone(timm.create_model("vit_tiny_patch16_224", **TINY)), ValueError, r"1 prefix token\(s\), .* dense_vit"),
    "patch 14": (lambda: ViTBackbone(dense_vit("vit_small_patch14_dinov2", depth=1)), ValueError, "square patches of 8, 16, 32 pixels"),
    "one size": (
        lambda: ViTBackbone(timm.create_model("vit_tiny_patch16_224", class_token=False, global_pool="", **TINY)),
        ValueError,
        "dynamic_img_size=True",
    ),
    "gated": (lambda: ViTBackbone(vp.patch(vit(), vp.BudgetFormer())), UnsupportedModel, "BudgetFormer is for classifiers"),
    "another family": (lambda: dense_vit("resnet18"), UnsupportedModel, "resnet18 cannot be built as a dense VisionTransformer"),
    "nothing to keep": (lambda: dense_vit("vit_tiny_patch16_224", keep="0.5"), UnsupportedModel, "keep is for models with columns, such as deit_s_bias"),
    "distilled": (lambda: dense_vit("deit_tiny_distilled_patch16_224", **TINY), UnsupportedModel, "cannot be built as a dense VisionTransformer"),
    "an unknown name": (lambda: dense_vit("deit_smal_patch16_224"), ValueError, "did you mean deit_small_patch16_224"),
    "no window": (lambda: ViTBackbone(vit(), global_blocks=(1,)), ValueError, "give a window, or leave them out"),
    "no such block": (lambda: ViTBackbone(vit(), window=4, global_blocks=(3,)), ValueError, "block 3, the model has blocks 0 to 2"),
    "window 0": (lambda: ViTBackbone(vit(), window=0), ValueError, "window must be a number of tokens >= 1"),
}


@pytest.mark.parametrize(("make", "error", "sentence"), REFUSED.values(), ids=REFUSED)
def test_what_gives_no_dense_map_is_refused(make, error, sentence):
    with pytest.raises(error, match=sentence):
        make()
