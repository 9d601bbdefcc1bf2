"""Our models in timm's registry: `timm.create_model("deit_s_bias", pretrained=True, keep="linear:1.0:0.3")`.

Each is timm's own model, patched: NAME_bias with `TokenBias` and `Columns`, NAME_budget with `BudgetFormer`, and with the other two as well where
their fields are given. It takes timm's arguments (`img_size`, `num_classes`, `features_only`,
`checkpoint_path` with dense or with our weights, ...) and the fields of the configs. `pretrained=True` starts from timm's dense weights.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields

import timm
from timm.models import VisionTransformer, build_model_with_cfg, generate_default_cfgs, register_model
from timm.models._features import FeatureGetterNet
from torch import Tensor, nn

from vit_prune.methods.base import MethodConfig
from vit_prune.methods.budgetformer import BudgetFormer
from vit_prune.methods.columns import Columns
from vit_prune.methods.token_bias import TokenBias
from vit_prune.patch import patch

default_cfgs = generate_default_cfgs(
    {
        "vit_mini28": {
            "num_classes": 10,
            "input_size": (3, 28, 28),
            "crop_pct": 1.0,
            "interpolation": "bicubic",
            "mean": (0.5, 0.5, 0.5),
            "std": (0.5, 0.5, 0.5),
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        }
    }
)
COLUMNS_FIELDS = {field.name for field in fields(Columns)}
BIAS_FIELDS = {field.name for field in fields(TokenBias)} - COLUMNS_FIELDS
GATE_FIELDS = {field.name for field in fields(BudgetFormer)} - {"seed"}  # one seed, for whatever is drawn


def bias_model(architecture: str, pretrained: bool = False, **kwargs) -> nn.Module:
    """timm's `architecture` with token bias and columns; kwargs are timm's and the fields of TokenBias and Columns.

    Raises: ValueError for a field's wrong value, TypeError (timm's) for an unknown argument.
    """
    methods = bias_configs(kwargs)
    return patched_model(architecture, pretrained, methods, **kwargs)


def budget_model(architecture: str, pretrained: bool = False, **kwargs) -> nn.Module:
    """timm's `architecture` with gated heads; kwargs are timm's and the fields of BudgetFormer. Fields of TokenBias and Columns add those too.

    Raises: as `bias_model`.
    """
    hybrid = bool((BIAS_FIELDS | COLUMNS_FIELDS - {"seed"}) & kwargs.keys())
    given = {name: kwargs.pop(name) for name in GATE_FIELDS & kwargs.keys()}
    gates = BudgetFormer(**given, seed=kwargs.get("seed", 0))
    methods = bias_configs(kwargs) if hybrid else []
    kwargs.pop("seed", None)
    return patched_model(architecture, pretrained, [*methods, gates], **kwargs)


def bias_configs(kwargs: dict) -> list[MethodConfig]:
    """TokenBias and Columns from their fields, which are taken out of kwargs."""
    bias = TokenBias(**{name: kwargs.pop(name) for name in BIAS_FIELDS & kwargs.keys()})
    return [bias, Columns(**{name: kwargs.pop(name) for name in COLUMNS_FIELDS & kwargs.keys()})]


def patched_model(architecture: str, pretrained: bool, methods: Sequence[MethodConfig], **kwargs) -> nn.Module:
    """timm's model with the methods; kwargs are timm's."""
    features_only, out_indices = kwargs.pop("features_only", False), kwargs.pop("out_indices", 3)
    model = timm.create_model(architecture, pretrained=pretrained, **kwargs)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the token bias is all zero")  # a checkpoint or the training comes after
        patch(model, methods)
    return PrunedFeatures(model, out_indices=out_indices) if features_only else model


class PrunedFeatures(FeatureGetterNet):
    """timm's `features_only` wrapper around a patched model: it cuts the blocks after the last index, which keep what they had in the whole model."""

    def __init__(self, model: nn.Module, out_indices: int | Sequence[int]) -> None:
        super().__init__(model, out_indices=out_indices)
        self.pretrained_cfg = {key: value for key, value in model.pretrained_cfg.items() if key not in ("num_classes", "classifier", "global_pool")}
        self.default_cfg = self.pretrained_cfg

    def load_state_dict(self, state_dict: Mapping[str, Tensor], strict: bool = True, assign: bool = False):
        """Takes the wrapper's own weights, or those of a whole model, dense or ours, of which it leaves out what was cut."""
        own = self.state_dict()
        if not any(key.startswith("model.") for key in state_dict):
            state_dict = {f"model.{key}": value for key, value in state_dict.items() if f"model.{key}" in own}
        return super().load_state_dict(state_dict, strict=strict, assign=assign)


@register_model
def deit_ti_bias(pretrained: bool = False, **kwargs) -> nn.Module:
    """DeiT-Ti/16 at 224 px with token bias."""
    return bias_model("deit_tiny_patch16_224", pretrained, **kwargs)


@register_model
def deit_s_bias(pretrained: bool = False, **kwargs) -> nn.Module:
    """DeiT-S/16 at 224 px with token bias."""
    return bias_model("deit_small_patch16_224", pretrained, **kwargs)


@register_model
def deit_b_bias(pretrained: bool = False, **kwargs) -> nn.Module:
    """DeiT-B/16 at 224 px with token bias."""
    return bias_model("deit_base_patch16_224", pretrained, **kwargs)


@register_model
def deit_ti_budget(pretrained: bool = False, **kwargs) -> nn.Module:
    """DeiT-Ti/16 at 224 px with gated heads."""
    return budget_model("deit_tiny_patch16_224", pretrained, **kwargs)


@register_model
def deit_s_budget(pretrained: bool = False, **kwargs) -> nn.Module:
    """DeiT-S/16 at 224 px with gated heads."""
    return budget_model("deit_small_patch16_224", pretrained, **kwargs)


@register_model
def deit_b_budget(pretrained: bool = False, **kwargs) -> nn.Module:
    """DeiT-B/16 at 224 px with gated heads."""
    return budget_model("deit_base_patch16_224", pretrained, **kwargs)


@register_model
def vit_ti_bias(pretrained: bool = False, **kwargs) -> nn.Module:
    """ViT-Ti/16 at 224 px (AugReg) with token bias."""
    return bias_model("vit_tiny_patch16_224", pretrained, **kwargs)


@register_model
def vit_s_bias(pretrained: bool = False, **kwargs) -> nn.Module:
    """ViT-S/16 at 224 px (AugReg) with token bias."""
    return bias_model("vit_small_patch16_224", pretrained, **kwargs)


@register_model
def vit_l_mae_bias(pretrained: bool = False, **kwargs) -> nn.Module:
    """ViT-L/16 at 224 px from MAE pretraining, for fine-tuning as in MAE: average pooling, a fresh head, token bias."""
    return bias_model("vit_large_patch16_224.mae", pretrained, **{"global_pool": "avg", "num_classes": 1000, **kwargs})


@register_model
def vit_mini28(pretrained: bool = False, **kwargs) -> nn.Module:
    """A small dense ViT for 28-pixel images: patch 4, depth 6, width 128, 4 heads, 50 tokens, 10 classes."""
    args = {"img_size": 28, "patch_size": 4, "embed_dim": 128, "depth": 6, "num_heads": 4, **kwargs}
    out_indices = args.pop("out_indices", 3)
    features = {"out_indices": out_indices, "feature_cls": "getter"}
    return build_model_with_cfg(VisionTransformer, "vit_mini28", pretrained, feature_cfg=features, **args)


@register_model
def vit_mini28_bias(pretrained: bool = False, **kwargs) -> nn.Module:
    """`vit_mini28` with token bias."""
    return bias_model("vit_mini28", pretrained, **kwargs)


@register_model
def vit_mini28_budget(pretrained: bool = False, **kwargs) -> nn.Module:
    """`vit_mini28` with gated heads."""
    return budget_model("vit_mini28", pretrained, **kwargs)
