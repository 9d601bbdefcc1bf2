"""ViTDet's Mask R-CNN on COCO with a plain DeiT-S, every block seeing the whole image: the dense row of the paper's Table 2.

DETECTRON2/tools/lazyconfig_train_net.py --config-file configs/detectron2/mask_rcnn_deit_s.py --num-gpus 8

Hardware: 8 GPUs of 40 GB or more, some days; never run here. Expected: 43.3 box AP (the paper's Table 2).
"""

import os
from functools import partial
from pathlib import Path

import detectron2.data.transforms as T
from detectron2 import model_zoo
from detectron2.config import LazyCall as L
from detectron2.data import DatasetCatalog
from detectron2.modeling.backbone.fpn import LastLevelMaxPool
from detectron2.modeling.backbone.vit import get_vit_lr_decay_rate
from detectron2.solver import WarmupParamScheduler
from fvcore.common.param_scheduler import MultiStepParamScheduler

from vit_prune.detection.detectron2_engine import Pyramid, ViT, register_coco

IMAGE_SIZE = 1024

model = model_zoo.get_config("common/models/mask_rcnn_vitdet.py").model
model.backbone = L(Pyramid)(
    net=L(ViT)(model="deit_small_patch16_224", pretrained=True, drop_path_rate=0.1),
    in_feature="last_feat",
    out_channels=256,
    scale_factors=(4.0, 2.0, 1.0, 0.5),
    top_block=L(LastLevelMaxPool)(),
    norm="LN",
    square_pad=IMAGE_SIZE,
)

COCO = Path(os.environ.get("DETECTRON2_DATASETS", "datasets")) / "coco"
for split in ("train", "val"):
    if f"coco_2017_{split}_by_vit_prune" not in DatasetCatalog:
        register_coco(f"coco_2017_{split}_by_vit_prune", COCO / f"annotations/instances_{split}2017.json", COCO / f"{split}2017")

dataloader = model_zoo.get_config("common/data/coco.py").dataloader
dataloader.train.dataset.names = "coco_2017_train_by_vit_prune"
dataloader.test.dataset.names = "coco_2017_val_by_vit_prune"
dataloader.train.mapper.augmentations = [
    L(T.RandomFlip)(horizontal=True),
    L(T.ResizeScale)(min_scale=0.1, max_scale=2.0, target_height=IMAGE_SIZE, target_width=IMAGE_SIZE),
    L(T.FixedSizeCrop)(crop_size=(IMAGE_SIZE, IMAGE_SIZE), pad=False),
]
dataloader.train.mapper.image_format = dataloader.test.mapper.image_format = "RGB"
dataloader.train.mapper.instance_mask_format = "bitmask"  # as the other engine: every encoding becomes a bitmap
dataloader.train.mapper.recompute_boxes = True
dataloader.train.total_batch_size = 64
dataloader.test.mapper.augmentations = [L(T.ResizeShortestEdge)(short_edge_length=IMAGE_SIZE, max_size=IMAGE_SIZE)]

train = model_zoo.get_config("common/train.py").train
train.amp.enabled = True
train.ddp.fp16_compression = True
train.init_checkpoint = ""  # the ViT brings its weights
train.max_iter = 184_375  # 100 epochs * 118_000 images / 64 per update

lr_multiplier = L(WarmupParamScheduler)(
    scheduler=L(MultiStepParamScheduler)(values=[1.0, 0.1, 0.01], milestones=[163_889, 177_546], num_updates=train.max_iter),
    warmup_length=250 / train.max_iter,
    warmup_factor=0.001,
)

optimizer = model_zoo.get_config("common/optim.py").AdamW
optimizer.params.lr_factor_func = partial(get_vit_lr_decay_rate, num_layers=12, lr_decay_rate=0.7)
optimizer.params.overrides = {"pos_embed": {"weight_decay": 0.0}}
