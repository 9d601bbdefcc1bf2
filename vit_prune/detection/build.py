"""Build a dense ViT by name, and give it the weights of a classifier or of a pretraining."""

import warnings
from pathlib import Path

import timm
import torch
from timm.models.vision_transformer import VisionTransformer

import vit_prune.models  # noqa: F401  registers ours with timm
from vit_prune.checkpoint import load_weights
from vit_prune.detection.backbone import ViTBackbone
from vit_prune.detection.config import DetectorConfig
from vit_prune.detection.model import MaskRCNN, mask_rcnn
from vit_prune.detection.pyramid import SimpleFeaturePyramid
from vit_prune.patch.check import UnsupportedModel
from vit_prune.train.checks import check_name

WITHOUT_HEAD = {"num_classes": 0, "global_pool": ""}


def dense_vit(name: str, *, pretrained: bool = False, checkpoint: str | Path | None = None, **kwargs) -> VisionTransformer:
    """timm's model without prefix tokens, final norm and head, for images of all sizes.

    Its position embeddings stay on the grid that they were learnt on, and are resampled to the grid of each batch, as in ViTDet.

    Args:
        name: of timm's registry, a VisionTransformer; of ours with the token bias.
        pretrained, checkpoint: timm's weights, or a file of a classifier (timm, DeiT, ours) or a MAE pretraining. Class token, norm and head are left out.
        kwargs: timm's, e.g. drop_path_rate, and those of our models, e.g. keep.

    Raises: ValueError, UnsupportedModel for a model that gives no dense map, and as `vit_prune.load_weights`.
    """
    check_name("model", name.split(".")[0], timm.list_models())
    try:
        vit = timm.create_model(name, class_token=False, reg_tokens=0, final_norm=False, dynamic_img_size=True, **WITHOUT_HEAD, **kwargs)
    except (TypeError, AssertionError) as error:  # an argument that this family does not take, or not with these values
        hint = "; keep is for models with columns, such as deit_s_bias" if "'keep'" in str(error) else ""
        raise UnsupportedModel(f"{name} cannot be built as a dense VisionTransformer: {error}{hint}") from error
    if pretrained or checkpoint is not None:
        take_weights(vit, source_of(name, pretrained, checkpoint, **kwargs))
    return vit


def source_of(name: str, pretrained: bool, checkpoint: str | Path | None, **kwargs) -> VisionTransformer:
    """The model as it was trained, prefix tokens and all."""
    source = timm.create_model(name, pretrained=pretrained, num_classes=0, **kwargs)
    if checkpoint is not None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*: head has ")  # it is dropped, as it should be
            load_weights(source, checkpoint)
    return source


@torch.no_grad()
def take_weights(vit: VisionTransformer, source: VisionTransformer) -> None:
    """Copy every weight of the dense model from one that has prefix tokens, whose part of the position embedding is left out."""
    weights = dict(source.state_dict())
    patches = vit.pos_embed.shape[1]
    weights["pos_embed"] = weights["pos_embed"][:, -patches:]
    vit.load_state_dict({name: weights[name] for name in vit.state_dict()})


def build_backbone(config: DetectorConfig, *, pretrained: bool = False, checkpoint: str | Path | None = None) -> ViTBackbone:
    """The backbone of a detector."""
    kwargs = dict(config.model_kwargs) if config.keep is None else {"keep": config.keep, **config.model_kwargs}
    vit = dense_vit(config.model, pretrained=pretrained, checkpoint=checkpoint, drop_path_rate=config.drop_path, **kwargs)
    return ViTBackbone(vit, window=config.window, global_blocks=config.global_blocks)


def build_detector(config: DetectorConfig, *, pretrained: bool = False, checkpoint: str | Path | None = None) -> MaskRCNN:
    """The whole detector. pretrained, checkpoint: weights of the ViT, see `dense_vit`."""
    backbone = build_backbone(config, pretrained=pretrained, checkpoint=checkpoint)
    return mask_rcnn(config, SimpleFeaturePyramid(backbone, config.channels))
