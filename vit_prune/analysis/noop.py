"""No-op equality: does a patched model with zero bias and keep = 1, with r = 0 merges, or with untrained gates, compute the same function as timm's?

Every parameter is perturbed first, so that attention, norms and scales matter: at initialisation a dropped LayerScale or a
wrong attention scale could hide behind values near 0 or 1.
"""

from dataclasses import dataclass

import timm
import torch
from timm.layers import Attention
from torch import Tensor, nn

from vit_prune.methods.budgetformer import BudgetFormer
from vit_prune.methods.columns import Columns
from vit_prune.methods.token_bias import TokenBias
from vit_prune.methods.tome import ToMe
from vit_prune.patch import Methods, patched

PERTURBATION = 0.05
COLUMNS = (TokenBias(), Columns(keep=1.0))
MERGING = (ToMe(r=0),)
GATES = (BudgetFormer(),)  # that nothing has trained
OUTPUTS = ("forward", "forward_features", "forward_intermediates")


@dataclass(frozen=True)
class Case:
    """A timm model to compare: its name, the arguments that it is built with, and the image size [height, width]."""

    name: str
    args: tuple[tuple[str, object], ...] = ()
    size: tuple[int, int] | None = None  # None: the model's own
    gated: bool = False  # replace the attentions by gated ones, which no registered name builds

    @property
    def title(self) -> str:
        words = [self.name, *(f"{key}={value}" for key, value in self.args)]
        words += ["gated"] if self.gated else []
        words += [f"at {self.size[0]} x {self.size[1]}"] if self.size else []
        return " ".join(words)


def perturb(model: nn.Module, seed: int = 0) -> nn.Module:
    """Add 0.05 * randn to every parameter, in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(PERTURBATION * torch.randn(parameter.shape, generator=generator))
    return model


def build(case: Case, *, depth: int | None = None) -> tuple[nn.Module, Tensor]:
    """The perturbed model in eval mode, and two random images [2, 3, height, width]. `depth` cuts the model to that many blocks."""
    args = dict(case.args) | ({} if depth is None else {"depth": depth})
    torch.manual_seed(0)
    model = timm.create_model(case.name, **args)
    for block in model.blocks if case.gated else ():
        block.attn = Attention(model.embed_dim, block.attn.num_heads, qkv_bias=True, gated=True)
    return perturb(model).eval(), torch.randn(2, 3, *(case.size or image_size(model)))


def image_size(model: nn.Module) -> tuple[int, int]:
    """Height and width that the model was built for."""
    size = getattr(getattr(model, "patch_embed", None), "img_size", None)
    return tuple(size or model.pretrained_cfg["input_size"][1:])


@torch.no_grad()
def outputs(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """What three ways through the model give, each flattened into one vector."""
    last, intermediates = model.forward_intermediates(images)
    return {
        "forward": flat(model(images)),
        "forward_features": flat(model.forward_features(images)),
        "forward_intermediates": flat([last, *intermediates]),
    }


def flat(value: object) -> Tensor:
    if isinstance(value, Tensor):
        return value.flatten()
    parts = value.values() if isinstance(value, dict) else value
    return torch.cat([flat(part) for part in parts if part is not None])


def differences(model: nn.Module, images: Tensor, *, methods: Methods = COLUMNS, impl: str = "auto") -> dict[str, float]:
    """Largest difference between patched and unpatched, over the largest output, for each of OUTPUTS; 0 for `restored` means bit for bit."""
    before = outputs(model, images)
    with patched(model, methods, impl=impl):
        during = outputs(model, images)
    after = outputs(model, images)
    result = {name: relative(during[name], before[name]) for name in OUTPUTS}
    return result | {"restored": max(relative(after[name], before[name]) for name in OUTPUTS)}


def relative(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).abs().max() / expected.abs().max()).item()


CASES = (
    Case("deit_tiny_patch16_224"),
    Case("deit_small_patch16_224"),
    Case("deit_small_patch16_224", (("img_size", (224, 160)),)),
    Case("deit_small_patch16_224", (("dynamic_img_size", True),), (160, 256)),
    Case("deit_tiny_distilled_patch16_224"),
    Case("deit_small_distilled_patch16_224"),
    Case("deit3_small_patch16_224"),
    Case("deit3_medium_patch16_224"),
    Case("deit3_base_patch16_224"),
    Case("vit_tiny_patch16_224"),
    Case("vit_small_patch16_224"),
    Case("vit_small_patch16_224", (("qk_norm", True), ("init_values", 0.5), ("qkv_bias", False), ("proj_bias", False))),
    Case("vit_small_patch16_224", (("scale_attn_norm", True), ("scale_mlp_norm", True))),
    Case("vit_small_patch16_224", gated=True),
    Case("vit_small_patch32_224"),
    Case("vit_base_patch16_224.mae"),
    Case("vit_large_patch16_224.mae", (("global_pool", "avg"),)),
    Case("vit_base_patch16_gap_224"),
    Case("vit_medium_patch16_gap_256"),
    Case("vit_small_patch14_dinov2", (("img_size", 224),)),
    Case("vit_base_patch14_dinov2", (("img_size", 224),)),
    Case("vit_small_patch14_reg4_dinov2", (("img_size", 224),)),
    Case("vit_giant_patch14_reg4_dinov2", (("img_size", 224), ("depth", 4))),
    Case("vit_base_patch14_reg1_tipsv2", (("img_size", 224),)),
    Case("vit_wee_patch16_reg1_gap_256"),
    Case("vit_betwixt_patch16_reg4_gap_256"),
    Case("vit_base_patch16_clip_224"),
    Case("vit_base_patch32_clip_quickgelu_224"),
    Case("vit_base_patch16_siglip_224"),
    Case("vit_base_patch16_siglip_gap_224"),
    Case("vit_base_patch16_radio_v3", (("img_size", 224),)),
    Case("aimv2_large_patch14_224"),
    Case("beit3_base_patch16_224"),
    Case("flexivit_small"),
    Case("vit_small_resnet26d_224"),
    Case("naflexvit_base_patch16_gap"),
    Case("naflexvit_base_patch16_par_gap", (), (224, 320)),
    Case("naflexvit_base_patch16_siglip"),
    Case("naflexvit_base_patch16_map"),
    Case("test_vit"),
    Case("test_vit2"),
    Case("test_vit3"),
    Case("test_vit4"),
)
