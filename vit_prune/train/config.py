"""What `tools/train.py` takes: one dataclass, its values checked at birth. A field means what timm's flag of the same name means."""

from dataclasses import dataclass
from typing import ClassVar

from vit_prune.train.checks import check_augmentation, check_name, merges_text
from vit_prune.train.data import check_dataset
from vit_prune.train.run_config import RunConfig

TRAINABLE = ("bias", "head")
OF_TEACHER = ("teacher_checkpoint", "distillation", "distill_loss_weight", "task_loss_weight", "kd_temperature")


@dataclass(frozen=True)
class TrainConfig(RunConfig):
    """Train a Vision Transformer, with pruning or without.

    Args:
        model: any name of timm's registry, ours among them: deit_ti_bias, deit_s_bias, vit_mini28_bias, ...; or a folder of vp.save, to train on
        pretrained: start from timm's weights
        num_classes: outputs of the head (None: the classes of the data)
        img_size: pixels per side (None: the model's own)
        train_only: bias, head or both: all other weights stay as they are (none given: all train)
        tome_r: tokens merged per block (ToMe), in training and evaluation: 8, decreasing:8 or one number per block: 8,8,4,0
        dataset: folder (DATA_DIR/train/CLASS/IMAGE and DATA_DIR/val/...), fashion-mnist, digits, synthetic/N, hfds/NAME, hfids/NAME, wds/NAME or torch/NAME
        data_dir: where the data lies
        class_map: a file with one class per line: only these classes of a folder, numbered by line
        skip_broken: go on where an image cannot be read: it is named, counted and left out
        batch_size: images per step and process
        workers: processes that load images; 0 loads in this one
        epochs: passes over the training images
        lr: peak learning rate (None: lr_base x images per update / lr_base_size)
        lr_base: peak learning rate for lr_base_size images per update, over all processes and accumulated steps; linear in them for every optimizer
        lr_base_size: see lr_base
        layer_decay: each block learns at this share of the rate of the block after it (None: all alike)
        teacher: distil from this model: a name of timm (its pretrained weights, or teacher_checkpoint) or a folder of vp.save
        teacher_checkpoint: weights of the teacher
        distillation: soft (KL divergence at kd_temperature) or hard (the teacher's first class)
        distill_loss_weight: weight of the teacher's loss
        task_loss_weight: weight of the labels' loss beside it
        kd_temperature: of soft distillation
        no_aug: resize and crop the centre, nothing random
        scale: area of the random crop (None: by data set, see docs/data.md)
        ratio: aspect ratio of the random crop (None: by data set)
        hflip: probability of a mirror image (None: by data set; a mirrored digit is another digit)
        color_jitter: strength (None: by data set)
        aa: AutoAugment policy, e.g. rand-m9-mstd0.5-inc1
        reprob: probability of random erasing
        aug_repeats: show each image of an epoch this often, augmented anew, and so fewer images (0: once)
        mixup: alpha of mixup; 0 is off
        cutmix: alpha of CutMix; 0 is off
        seed: of weights, order and augmentation
    """

    choices: ClassVar[dict[str, tuple[str, ...]]] = RunConfig.choices | {"distillation": ("soft", "hard")}
    needs: ClassVar[dict[str, str]] = RunConfig.needs | dict.fromkeys(OF_TEACHER, "teacher")

    model: str = "deit_s_bias"
    pretrained: bool = False
    num_classes: int | None = None
    img_size: int | None = None
    train_only: tuple[str, ...] = ()
    tome_r: str | None = None

    dataset: str = "folder"
    data_dir: str | None = None
    class_map: str | None = None
    skip_broken: bool = False

    lr_base: float = 1e-3
    lr_base_size: int = 1024
    layer_decay: float | None = None
    teacher: str | None = None
    teacher_checkpoint: str | None = None
    distillation: str = "soft"
    distill_loss_weight: float = 0.5
    task_loss_weight: float = 0.5
    kd_temperature: float = 1.0

    no_aug: bool = False
    scale: tuple[float, float] | None = None
    ratio: tuple[float, float] | None = None
    hflip: float | None = None
    color_jitter: float | None = None
    aa: str | None = None
    reprob: float = 0.0
    aug_repeats: int = 0
    mixup: float = 0.0
    cutmix: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "tome_r", merges_text(self.tome_r))
        super().__post_init__()
        check_dataset(self.dataset)
        for part in self.train_only:
            check_name("part in train_only", part, TRAINABLE)
        self._check_data()

    def _check_data(self) -> None:
        if (self.mixup or self.cutmix) and self.batch_size % 2:
            raise ValueError(f"mixup and cutmix mix pairs of images: batch_size must be even, got {self.batch_size}")
        random = [name for name in ("scale", "ratio", "hflip", "color_jitter", "aa", "reprob", "aug_repeats", "mixup", "cutmix") if getattr(self, name)]
        if self.no_aug and random:
            raise ValueError(f"no_aug leaves nothing random, and {', '.join(random)} is given: leave out one of the two")
        if self.aa is not None:
            check_augmentation(self.aa)
