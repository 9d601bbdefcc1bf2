"""vit_prune makes timm's Vision Transformers cheaper and says what that cost."""

from vit_prune import models, text  # register deit_s_bias, text_4l8h and the others with timm
from vit_prune.calibrate import calibrate
from vit_prune.checkpoint import load, load_weights, save
from vit_prune.export import export_onnx
from vit_prune.fuse import fuse
from vit_prune.measure.summary import report
from vit_prune.methods.base import set_progress
from vit_prune.methods.budgetformer import BudgetFormer
from vit_prune.methods.columns import Columns
from vit_prune.methods.l1 import L1, PrunePlan, Taylor
from vit_prune.methods.losses import losses
from vit_prune.methods.schedules import constant, cosine, linear, step
from vit_prune.methods.token_bias import TokenBias
from vit_prune.methods.tome import ToMe
from vit_prune.patch import patch, patched, set_heads, set_keep, unpatch
from vit_prune.prune import prune
from vit_prune.search import load_found, search
from vit_prune.version import __version__

__all__ = [
    "L1",
    "BudgetFormer",
    "Columns",
    "PrunePlan",
    "Taylor",
    "ToMe",
    "TokenBias",
    "__version__",
    "calibrate",
    "constant",
    "cosine",
    "export_onnx",
    "fuse",
    "linear",
    "load",
    "load_found",
    "load_weights",
    "losses",
    "models",
    "patch",
    "patched",
    "prune",
    "report",
    "save",
    "search",
    "set_heads",
    "set_keep",
    "set_progress",
    "step",
    "text",
    "unpatch",
]
