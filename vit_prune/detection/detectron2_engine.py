"""The same backbone for detectron2: give `ViT(...)` as `net` to its `SimpleFeaturePyramid`, as configs/detectron2 does.

detectron2 is installed from its source, as its own documentation says.
"""

from collections.abc import Collection
from pathlib import Path

from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.modeling.backbone import Backbone
from detectron2.modeling.backbone.vit import SimpleFeaturePyramid
from detectron2.structures import BoxMode
from torch import Tensor

from vit_prune.detection.backbone import ViTBackbone
from vit_prune.detection.build import dense_vit
from vit_prune.detection.data.coco import CocoImages
from vit_prune.detection.data.masks import encode


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
        return {self._out_features[0]: super().forward(images)}


class Pyramid(SimpleFeaturePyramid):
    """detectron2's, which spells one of its padding constraints so that nobody reads it (issue 4676): without a square, images are padded to no multiple."""

    @property
    def padding_constraints(self) -> dict[str, int]:
        return {"size_divisibility": self._size_divisibility, "square_size": self._square_pad}


def register_coco(name: str, annotations: str | Path, images: str | Path) -> None:
    """Make a data set in COCO's format known to detectron2 by name, read by the rules of the other engine: see `CocoImages`.

    detectron2's own reader stops at an empty polygon. Every mask becomes run lengths: give the mapper instance_mask_format="bitmask".
    """
    data = CocoImages(annotations, images)
    DatasetCatalog.register(name, lambda: [record(data, index) for index in range(len(data))])
    numbers = {category: number for number, category in enumerate(data.categories.ids)}
    MetadataCatalog.get(name).set(
        json_file=str(annotations),
        image_root=str(images),
        evaluator_type="coco",
        thing_classes=list(data.categories.names),
        thing_dataset_id_to_contiguous_id=numbers,
    )


def record(data: CocoImages, index: int) -> dict:
    """One image as detectron2 has it; categories count from 0."""
    entry, target = data.images[index], data.target(index)
    objects = [
        {"bbox": box, "bbox_mode": BoxMode.XYXY_ABS, "category_id": label - 1, "iscrowd": 0, "segmentation": mask}
        for box, label, mask in zip(target["boxes"].tolist(), target["labels"].tolist(), encode(target["masks"].bool().numpy()), strict=True)
    ]
    path = str(data.folder / entry["file_name"])
    return {"file_name": path, "image_id": entry["id"], "height": entry["height"], "width": entry["width"], "annotations": objects}
