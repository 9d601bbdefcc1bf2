"""From a model to a graph of torch.export, and from that to ONNX."""

import copy
import importlib
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.export import Dim, ExportedProgram

from vit_prune.checkpoint.common import unwrap
from vit_prune.export.parity import ExportError, Size, outputs, random_images
from vit_prune.measure.inputs import image_size
from vit_prune.methods.budgetformer import budget_decides
from vit_prune.methods.stack import columns_methods

OPSET = 20  # the first with Gelu; from 23 on attention is one operator, which in onnxruntime takes no mask [B, H, 1, M]
AXES = {0: "batch", 2: "height", 3: "width"}  # of the images


def inference_copy(model: nn.Module) -> nn.Module:
    """On the CPU, in float32 and eval mode, without wrappers and gradient checkpointing. Raises: ValueError for what has no graph."""
    model = unwrap(model)
    if any(value.is_meta for value in model.state_dict().values()):
        raise ValueError("a model on the meta device has no weights to export")
    if rules := {method.config.rule for method in columns_methods(model)} - {"topk"}:
        raise ValueError(f"the rule {rules.pop()} keeps another number of columns in each image, and a graph has one: patch the model with the rule topk")
    if budget_decides(model):
        raise ValueError("each image's budget decides how many heads run, and a graph has one number: give it by vp.set_heads(model, k)")
    model = copy.deepcopy(model).to("cpu", torch.float32).eval().requires_grad_(False)
    if hasattr(model, "set_grad_checkpointing"):
        model.set_grad_checkpointing(False)
    return model


def checked_sizes(model: nn.Module, img_size: int | Size | None, dynamic_size: bool) -> list[Size]:
    """The size of the example, and with dynamic_size a taller, narrower one. Raises: ValueError for sizes that the model does not take."""
    sizes = [image_size(model, img_size)]
    if dynamic_size:
        if not getattr(model, "dynamic_img_size", False):
            raise ValueError(f"dynamic_size needs a ViT that was built with dynamic_img_size=True, and this {type(model).__name__} was not")
        (height, width), (patch_height, patch_width) = sizes[0], model.patch_embed.patch_size
        sizes.append((height + 2 * patch_height, max(patch_width, width - patch_width)))
    for size in sizes:
        try:
            outputs(model, random_images(model, 1, size))
        except (AssertionError, RuntimeError) as error:  # timm asserts, convolutions raise
            raise ValueError(f"the model does not take images of {size[0]} x {size[1]} pixels: {first_line(error)}") from error
    return sizes


def weight_bytes(model: nn.Module) -> int:
    return sum(value.nbytes for value in model.state_dict().values())


def capture(model: nn.Module, size: Size, dynamic_size: bool) -> ExportedProgram:
    """The graph of a model that `inference_copy` returned. Raises: ExportError."""
    shapes = dict.fromkeys(AXES if dynamic_size else [0], Dim.DYNAMIC)
    settings = {"dynamic_shapes": (shapes,), "strict": False, "prefer_deferred_runtime_asserts_over_guards": True}
    with quiet(), torch.no_grad(), torch.fx.experimental._config.patch(backed_size_oblivious=True):  # or the batch is 2 or more
        try:
            return allow_batch_1(torch.export.export(model, (random_images(model, 2, size),), **settings))
        except Exception as error:  # whatever tracing runs into
            raise ExportError(f"torch.export cannot trace this {type(model).__name__}: {first_line(error)}") from error


def allow_batch_1(program: ExportedProgram) -> ExportedProgram:
    """Take out the assertions that the batch is not 1: torch.export makes them where torch would fold a product otherwise, with the same result."""
    for node in list(program.graph.nodes):
        if node.target is torch.ops.aten._assert_scalar.default and re.search(r"expression Ne\(s\d+, 1\) ", str(node.args[1])):
            program.graph.erase_node(node)
    program.graph_module.recompile()
    return program


def translate(program: ExportedProgram, dynamic_size: bool) -> "torch.onnx.ONNXProgram":
    """The graph as ONNX. Raises: ExportError."""
    names = [f"output_{index}" for index in range(len(program.graph_signature.user_outputs))]
    settings = {"input_names": ["images"], "output_names": names if len(names) > 1 else ["output"], "opset_version": OPSET, "verbose": False}
    settings |= {"custom_translation_table": {torch.ops.aten.sort.stable: stable_sort()}}
    axes = AXES if dynamic_size else {0: AXES[0]}
    with quiet():
        try:
            return torch.onnx.export(program, (), dynamo=True, dynamic_shapes=(axes,), **settings)
        except Exception as error:  # whatever an operator without translation runs into
            raise ExportError(f"this model cannot be written as ONNX: {first_line(error)}") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings and notes of the exporters, which are about themselves."""
    disabled = logging.root.manager.disable
    logging.disable(max(disabled, logging.INFO))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def stable_sort() -> Callable:
    """The translation that torch.onnx lacks."""
    op = importlib.import_module("onnxscript").opset18

    def sort(x, dim=-1, descending=False, stable=None):
        """TopK of all: it promises that equal values stand by their index, as in a stable sort."""
        size = op.Shape(x, start=dim, end=dim + 1 or None)
        return op.TopK(x, size, axis=dim, largest=int(descending), sorted=1)

    return sort


def first_line(error: BaseException) -> str:
    cause = error.__cause__ or error
    return next((line for line in str(cause).splitlines() if line.strip()), type(cause).__name__)
