"""The same backbone for detectron2: give `ViT(...)` as `net` to its `SimpleFeaturePyramid`, as configs/detectron2 does.

detectron2 is installed from its source, as its own documentation says.
"""

from collections.abc import Collection
from pathlib import Path

import torch
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.modeling.backbone import Backbone
from detectron2.modeling.backbone.vit import SimpleFeaturePyramid
from detectron2.structures import BoxMode
from torch import Tensor

from vit_prune.detection.backbone import ViTBackbone, prunes
from vit_prune.detection.build import dense_vit
from vit_prune.detection.data.coco import CocoImages, clipped, corners


class ViT(ViTBackbone, Backbone):
    """`ViTBackbone` by name, in detectron2's interface: images [B, 3, H, W] -> {out_feature: [B, D, H / p, W / p]}.

    Args: model, pretrained, checkpoint and kwargs as of `dense_vit`; window and global_blocks as of `ViTBackbone`.
    """

    def __init__(
        self,
        model: str,
        *,
        window: int | None = None,
        global_blocks: Collection[int] = (),
        pretrained: bool = False,
        checkpoint: str | Path | None = None,
        out_feature: str = "last_feat",
        **kwargs,
    ) -> None:
        vit = dense_vit(model, pretrained=pretrained, checkpoint=checkpoint, **kwargs)
        super().__init__(vit, window=window, global_blocks=global_blocks)
        self._out_features = [out_feature]
        self._out_feature_channels = {out_feature: self.channels}
        self._out_feature_strides = {out_feature: self.stride}

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        sizes = sizes_without_padding(images) if any(prunes(block.attn) for block in self.vit.blocks) else None
        return {self._out_features[0]: super().forward(images, sizes)}


def sizes_without_padding(images: Tensor) -> list[tuple[int, int]]:
    """detectron2 does not tell a backbone how large its images are. Padding is exactly 0, and a pixel less ImageNet's mean never is."""
    filled = (images != 0).any(1)  # [B, H, W]
    return list(zip(filled.any(2).sum(1).tolist(), filled.any(1).sum(1).tolist(), strict=True))


class Pyramid(SimpleFeaturePyramid):
    """detectron2's, which spells one of its padding constraints so that nobody reads it (issue 4676): without a square, images are padded to no multiple."""

    @property
    def padding_constraints(self) -> dict[str, int]:
        return {"size_divisibility": self._size_divisibility, "square_size": self._square_pad}


def register_coco(name: str, annotations: str | Path, images: str | Path) -> None:
    """Make a data set in COCO's format known to detectron2 by name, read by the rules of the other engine, `CocoImages`, when it is first asked for.

    detectron2's own reader stops at an empty polygon. Give the mapper instance_mask_format="bitmask": run lengths are no polygons.
    """
    DatasetCatalog.register(name, lambda: records(name, CocoImages(annotations, images)))
    MetadataCatalog.get(name).set(json_file=str(annotations), image_root=str(images), evaluator_type="coco")


def records(name: str, data: CocoImages) -> list[dict]:
    """The images as detectron2 has them."""
    numbers = {category: number for number, category in enumerate(data.categories.ids)}
    MetadataCatalog.get(name).set(thing_classes=list(data.categories.names), thing_dataset_id_to_contiguous_id=numbers)
    return [record(data, index) for index in range(len(data))]


def record(data: CocoImages, index: int) -> dict:
    """One image; categories count from 0. Crowds, and what has no area, are left out."""
    entry, size = data.images[index], data.size(index)
    objects = []
    for one in data.learnt(index):
        [box] = clipped(torch.tensor([corners(one["bbox"])]), size).tolist()
        runs = data.runs(one, size)
        if box[2] > box[0] and box[3] > box[1] and runs is not None:
            number = data.categories.label_of(one["category_id"]) - 1
            objects.append({"bbox": box, "bbox_mode": BoxMode.XYXY_ABS, "category_id": number, "iscrowd": 0, "segmentation": runs})
    path = str(data.folder / entry["file_name"])
    return {"file_name": path, "image_id": entry["id"], "height": size[0], "width": size[1], "annotations": objects}
