"""Text encoders in timm's registry: `timm.create_model("text_4l8h", vocab_size=8192, max_length=128, num_classes=4)`.

nL mH: n blocks of m heads, width 768, as in BudgetFormer (arXiv 2604.22583). `text_mini` is small: 4 blocks, 8 heads, width 256.
They take the arguments of `TextTransformer`; those with `_bias` the fields of `TokenBias` and `Columns` too. None has pretrained weights.
"""

from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import nn

from vit_prune.models import bias_model
from vit_prune.text.encoder import TextTransformer

SIZES = {
    "text_mini": {"depth": 4, "num_heads": 8, "embed_dim": 256},
    "text_4l8h": {"depth": 4, "num_heads": 8},
    "text_4l12h": {"depth": 4, "num_heads": 12},
    "text_6l12h": {"depth": 6, "num_heads": 12},
    "text_12l12h": {"depth": 12, "num_heads": 12},
}
OF_IMAGES = ("in_chans", "img_size", "global_pool", "out_indices", "scriptable", "exportable")  # what timm passes on to any model
default_cfgs = generate_default_cfgs({name: {"num_classes": 2, "first_conv": "patch_embed", "classifier": "head"} for name in SIZES})


def text_model(architecture: str, pretrained: bool = False, **kwargs) -> nn.Module:
    """A TextTransformer of the named size, any part of which kwargs may change."""
    return build_model_with_cfg(TextTransformer, architecture, pretrained, kwargs_filter=OF_IMAGES, **SIZES[architecture] | kwargs)


@register_model
def text_mini(pretrained: bool = False, **kwargs) -> nn.Module:
    """4 blocks, 8 heads, width 256."""
    return text_model("text_mini", pretrained, **kwargs)


@register_model
def text_4l8h(pretrained: bool = False, **kwargs) -> nn.Module:
    """4 blocks, 8 heads, width 768."""
    return text_model("text_4l8h", pretrained, **kwargs)


@register_model
def text_4l12h(pretrained: bool = False, **kwargs) -> nn.Module:
    """4 blocks, 12 heads, width 768."""
    return text_model("text_4l12h", pretrained, **kwargs)


@register_model
def text_6l12h(pretrained: bool = False, **kwargs) -> nn.Module:
    """6 blocks, 12 heads, width 768."""
    return text_model("text_6l12h", pretrained, **kwargs)


@register_model
def text_12l12h(pretrained: bool = False, **kwargs) -> nn.Module:
    """12 blocks, 12 heads, width 768."""
    return text_model("text_12l12h", pretrained, **kwargs)


@register_model
def text_mini_bias(pretrained: bool = False, **kwargs) -> nn.Module:
    """`text_mini` with token bias."""
    return bias_model("text_mini", pretrained, **kwargs)


@register_model
def text_4l8h_bias(pretrained: bool = False, **kwargs) -> nn.Module:
    """`text_4l8h` with token bias."""
    return bias_model("text_4l8h", pretrained, **kwargs)
