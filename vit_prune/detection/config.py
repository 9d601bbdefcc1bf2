"""What a detector is built from."""

from dataclasses import dataclass, field

from vit_prune.train.checks import Values, check_positive


@dataclass(frozen=True)
class DetectorConfig:
    """A Mask R-CNN on a ViT; the defaults are those of ViTDet (arXiv 2203.16527) on COCO.

    Args:
        model: a name of timm's registry; ours among them come with the token bias.
        num_classes: K, without the background.
        model_kwargs: other arguments of the model, e.g. depth or embed_dim.
        keep: a schedule of keep ratios for a model with columns, as `Columns(keep=...)`; None leaves what the model has.
        window: tokens per side of the windows that blocks attend in; None is global attention in all blocks.
        global_blocks: blocks with global attention among windows.
        image_size: pixels of the longer side. square: pad to a square of it; False pads to the least size that holds a batch.
        drop_path: stochastic depth of the last block, rising linearly from 0.
        channels: of the pyramid and the heads. hidden: width of the box head's linear layer.
        train_candidates, test_candidates: of each level, before suppression. proposals: after it. sampled_proposals: that the heads train on.
        score_thresh: least score of a detection. nms_thresh: overlap of two of one class. detections: of an image, at most.
    """

    model: str = "deit_small_patch16_224"
    num_classes: int = 80
    model_kwargs: Values = field(default_factory=dict)
    keep: str | None = None
    window: int | None = None
    global_blocks: tuple[int, ...] = ()
    image_size: int = 1024
    square: bool = True
    drop_path: float = 0.1
    channels: int = 256
    hidden: int = 1024
    train_candidates: int = 2000
    test_candidates: int = 1000
    proposals: int = 1000
    sampled_proposals: int = 512
    score_thresh: float = 0.05
    nms_thresh: float = 0.5
    detections: int = 100

    def __post_init__(self) -> None:
        self.check_detector()

    def check_detector(self, least_classes: int = 1) -> None:
        """Raises: ValueError that names the field."""
        if not isinstance(self.num_classes, int) or self.num_classes < least_classes:
            raise ValueError(f"num_classes must be a whole number >= {least_classes}, got {self.num_classes!r}")
        for name in ("image_size", "channels", "hidden", "train_candidates", "test_candidates", "proposals", "sampled_proposals", "detections"):
            check_positive(name, getattr(self, name))
        for name in ("score_thresh", "nms_thresh", "drop_path"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)!r}")
