"""What `tools/detect_train.py` takes."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from vit_prune.detection.config import DetectorConfig
from vit_prune.train.checks import Values, check_device, conform_fields, keep_text
from vit_prune.train.run_config import PAIRS

LAYOUT = {"annotations": "annotations/instances_{split}2017.json", "images": "{split}2017"}  # COCO's own, under data_dir


@dataclass(frozen=True)
class DetectTrainConfig(DetectorConfig):
    """Train Mask R-CNN with a plain ViT, dense or with pruned columns. The defaults are ViTDet's recipe on COCO, for 8 processes of 8 images.

    Args:
        model: a name of timm's registry; ours among them (deit_s_bias, ...) come with the token bias and pruned columns
        num_classes: of the data (0: as many as the data has)
        model_kwargs: other arguments of the model, e.g. depth=4 embed_dim=192
        keep: columns kept: 0.5, linear:1.0:0.3, 1,1,.9,.7 (None: all)
        window: tokens per side of the windows that blocks attend in (None: every block sees the whole image)
        global_blocks: blocks that see the whole image among windows
        image_size: pixels of the longer side
        square: pad to a square
        drop_path: stochastic depth of the last block
        channels: of the pyramid and the heads
        hidden: width of the box head's linear layer
        train_candidates: proposals of each level before suppression, in training
        test_candidates: the same in evaluation
        proposals: after suppression
        sampled_proposals: that the heads train on, per image
        score_thresh: least score of a detection
        nms_thresh: overlap of two detections of one class
        detections: of an image, at most
        data_dir: COCO's layout: annotations/instances_train2017.json, train2017/, and val2017 likewise
        train_annotations: a file instead of the layout's
        train_images: its folder of images
        val_annotations: the same for evaluation
        val_images: the same for evaluation
        pretrained: start from timm's weights of the ViT
        initial_checkpoint: start from this file: a classifier or a MAE pretraining of timm, DeiT, MAE or ours
        iterations: updates of the weights
        batch_size: images per update and process
        workers: processes that load images
        scale: of the large-scale jitter
        skip_empty: train on images with objects only
        lr: peak learning rate, for the batch of all processes
        weight_decay: not on norms and position embeddings
        layer_decay: each block learns at this share of the rate of the block after it
        warmup_iterations: linear warm-up of the learning rate
        milestones: shares of the iterations after which the learning rate falls to a tenth
        clip_grad: largest norm of the gradient (None: no clipping)
        amp: compute in bfloat16 or float16 where that is safe (None: float32)
        grad_checkpointing: recompute each block in the backward pass; less memory, more time
        max_skipped_steps: updates in a row that may be left out because their gradient is no number, before the run stops
        eval_interval: iterations between evaluations (0: at the end alone); a multiple of checkpoint_interval
        checkpoint_interval: iterations that a kill may lose
        seed: of weights, order, augmentation and sampling
        device: e.g. cpu, cuda, cuda:1 (None: cuda where there is one)
        output: the folder of the run; a run that is there goes on
    """

    num_classes: int = 0
    model_kwargs: Annotated[Values, PAIRS] = field(default_factory=dict)
    data_dir: str | None = None
    train_annotations: str | None = None
    train_images: str | None = None
    val_annotations: str | None = None
    val_images: str | None = None
    pretrained: bool = False
    initial_checkpoint: str | None = None
    iterations: int = 184_375  # 100 epochs * 118_000 images / 64 per update
    batch_size: int = 8
    workers: int = 4
    scale: tuple[float, float] = (0.1, 2.0)
    skip_empty: bool = True
    lr: float = 1e-4
    weight_decay: float = 0.1
    layer_decay: float = 0.7
    warmup_iterations: int = 250
    milestones: tuple[float, ...] = (163_889 / 184_375, 177_546 / 184_375)
    clip_grad: float | None = None
    amp: str | None = None
    grad_checkpointing: bool = False
    max_skipped_steps: int = 20
    eval_interval: int = 0
    checkpoint_interval: int = 1000
    seed: int = 0
    device: str | None = None
    output: str = "output/detect"

    def __post_init__(self) -> None:
        object.__setattr__(self, "keep", keep_text("keep", self.keep))
        conform_fields(self)
        self.check_detector(least_classes=0)
        for name in ("iterations", "batch_size", "checkpoint_interval", "max_skipped_steps", "lr"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be > 0, got {getattr(self, name)}")
        for name in ("workers", "warmup_iterations", "eval_interval", "weight_decay", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}")
        for name in ("lr", "weight_decay", "clip_grad"):
            if getattr(self, name) is not None and not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} must be a finite number, got {getattr(self, name)}")
        if self.clip_grad is not None and self.clip_grad <= 0:
            raise ValueError(f"clip_grad must be > 0, or none, got {self.clip_grad}")
        if list(self.milestones) != sorted(self.milestones) or not all(0 < share < 1 for share in self.milestones):
            raise ValueError(f"milestones must be rising shares of the iterations between 0 and 1, got {self.milestones}")
        if not 0 < self.scale[0] <= self.scale[1]:
            raise ValueError(f"scale must be two rising numbers > 0, got {self.scale}")
        if not 0 < self.layer_decay <= 1:
            raise ValueError(f"layer_decay must be in (0, 1], got {self.layer_decay}")
        if self.amp not in (None, "bfloat16", "float16"):
            raise ValueError(f"amp must be bfloat16, float16 or none, got {self.amp!r}")
        if self.eval_interval % self.checkpoint_interval:
            raise ValueError(f"eval_interval must be a multiple of checkpoint_interval, {self.checkpoint_interval}, got {self.eval_interval}")
        check_device(self.device)

    def place(self, split: str, what: str) -> Path:
        """Of the annotations or the images of train or val. Raises: ValueError where neither data_dir nor they are given."""
        given = getattr(self, f"{split}_{what}")
        if given is None and self.data_dir is None:
            raise ValueError(f"give data_dir, a folder in COCO's layout, or {split}_annotations and {split}_images")
        return Path(given) if given is not None else Path(self.data_dir) / LAYOUT[what].format(split=split)
