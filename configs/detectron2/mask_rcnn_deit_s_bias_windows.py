"""ViTDet's own setting: windows of 14 x 14 tokens, four blocks that see the whole image, and columns pruned for each window on its own.

DETECTRON2/tools/lazyconfig_train_net.py --config-file configs/detectron2/mask_rcnn_deit_s_bias_windows.py --num-gpus 8

Hardware: 8 GPUs of 24 GB or more; never run here.
"""

from .mask_rcnn_deit_s_bias import dataloader, lr_multiplier, model, optimizer, train  # noqa: F401  (what detectron2 reads)

model.backbone.net.window = 14
model.backbone.net.global_blocks = (2, 5, 8, 11)
