"""Floor 4: detection and instance segmentation with a plain ViT, dense or with pruned columns, in ViTDet's style (arXiv 2203.16527)."""
