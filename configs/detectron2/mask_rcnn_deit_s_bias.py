"""The same with the token bias and pruned columns: 331.17 GFLOPs of the backbone, the pruned row of the paper's Table 2.

DETECTRON2/tools/lazyconfig_train_net.py --config-file configs/detectron2/mask_rcnn_deit_s_bias.py --num-gpus 8 model.backbone.net.checkpoint=FILE

Hardware: 8 GPUs of 40 GB or more, some days; never run here. Expected: 42.7 box AP (the paper's Table 2).
"""

from .mask_rcnn_deit_s import dataloader, lr_multiplier, model, optimizer, train  # noqa: F401  (what detectron2 reads)

model.backbone.net.model = "deit_s_bias"
model.backbone.net.keep = "linear:1.0:0.0853"
