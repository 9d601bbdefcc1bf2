"""vit_prune makes timm's Vision Transformers cheaper and says what that cost."""

from vit_prune.methods.columns import Columns
from vit_prune.methods.schedules import constant, cosine, linear, step
from vit_prune.methods.token_bias import TokenBias
from vit_prune.patch import patch, patched, set_keep, unpatch
from vit_prune.version import __version__
