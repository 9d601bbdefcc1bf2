"""Floor 4: text encoders of timm's blocks, the reading of texts, and their training (extra `text`)."""

from vit_prune.text import models  # registers text_4l8h and the others with timm
from vit_prune.text.encoder import TextTransformer

__all__ = ["TextTransformer", "models"]
