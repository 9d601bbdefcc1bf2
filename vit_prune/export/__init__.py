"""Models for other runtimes: ONNX, checked in onnxruntime before the file gets its name, and torch.export.

B batch, images [B, C, H, W]. What is exported is a copy on the CPU, in float32 and eval mode: the model stays as it was.
"""

import importlib
import io
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from vit_prune.export.graph import OPSET, ExportError, capture, checked_sizes, first_line, inference_copy, translate, weight_bytes
from vit_prune.export.parity import Parity, ParityError, Run, Size, compare

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

__all__ = ["ExportError", "OnnxReport", "Parity", "ParityError", "compare", "export_onnx", "export_program", "onnx_session", "save_program"]

EMBEDDED = 1_500_000_000  # bytes of weights above which they lie in a file of their own: protobuf ends at 2 GiB


@dataclass(frozen=True)
class OnnxReport:
    """What `export_onnx` wrote. bytes: with the file of the weights, where there is one."""

    path: str
    opset: int
    bytes: int
    parity: tuple[Parity, ...]


def export_onnx(
    model: nn.Module,
    path: str | Path,
    *,
    img_size: int | Size | None = None,
    dynamic_size: bool = False,
    batch_sizes_checked: Sequence[int] = (1, 3),
    tolerance: float = 1e-4,
) -> OnnxReport:
    """Write a model as ONNX: input "images" [B, C, H, W], output "output" ("output_0", ... where there are several), any batch.

    Args:
        model: a timm model, patched, fused or plain. path: replaced when the check has passed. Weights above 1.5 GB go to PATH.data beside it.
        img_size: pixels, one side or (height, width); None is the model's own.
        dynamic_size: height and width stay open too, at multiples of the patch; for ViTs that were built with dynamic_img_size=True.
        batch_sizes_checked: batches of random images on which onnxruntime is compared, at img_size, and at a second size with dynamic_size.
        tolerance: largest absolute difference of an output.

    Raises: ValueError for what cannot be exported; ImportError that names the extra; ParityError and ExportError. Nothing is written then.
    """
    if not tolerance > 0 or not batch_sizes_checked or min(batch_sizes_checked) < 1:
        raise ValueError(f"tolerance must be > 0 and batch sizes >= 1, got {tolerance} and {tuple(batch_sizes_checked)}")
    for name in ("onnxscript", "onnxruntime"):
        optional(name)
    path, model = Path(path), inference_copy(model)
    sizes = checked_sizes(model, img_size, dynamic_size)
    program = translate(capture(model, sizes[0], dynamic_size), dynamic_size)
    with unfinished(path) as folder:
        program.save(str(folder / path.name), external_data=weight_bytes(model) > EMBEDDED)
        run = runner(onnx_session(folder / path.name))
        parity = tuple(compare(run, model, size, batch, tolerance) for size in sizes for batch in batch_sizes_checked)
        total = sum(file.stat().st_size for file in folder.iterdir())
    return OnnxReport(str(path), OPSET, total, parity)


def export_program(model: nn.Module, *, img_size: int | Size | None = None, dynamic_size: bool = False) -> ExportedProgram:
    """The model as a graph of torch.export, for any batch; arguments as in `export_onnx`. It is for inference, and takes float32 images on the CPU.

    Raises: ValueError for what cannot be exported; ExportError.
    """
    model = inference_copy(model)
    return capture(model, checked_sizes(model, img_size, dynamic_size)[0], dynamic_size)


def save_program(program: ExportedProgram, path: str | Path) -> None:
    """Write what torch.export.load reads, complete or not at all. Raises: ExportError for a graph that this torch cannot save."""
    path, content = Path(path), io.BytesIO()
    try:
        torch.export.save(program, content)
    except Exception as error:  # torch has no one class for it
        if "ceil" in str(error):
            raise ExportError("torch cannot save a graph in which the kept columns are counted for each image size: export one size, or ONNX") from error
        raise ExportError(f"torch cannot save this graph: {first_line(error)}") from error
    with unfinished(path) as folder:
        (folder / path.name).write_bytes(content.getbuffer())


def onnx_session(path: str | Path, *, threads: int | None = None) -> "InferenceSession":
    """An onnxruntime session on the CPU. threads: inside one operator; None is onnxruntime's choice. Raises: ImportError that names the extra."""
    if threads is not None and threads < 1:
        raise ValueError(f"threads must be at least 1, got {threads}")
    onnxruntime = optional("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or 0
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def runner(session: "InferenceSession") -> Run:
    def run(images: Tensor) -> list[Tensor]:
        try:
            return [torch.from_numpy(value) for value in session.run(None, {"images": images.numpy()})]
        except Exception as error:  # onnxruntime's classes are private
            raise ExportError(f"onnxruntime cannot run the graph: {first_line(error)}") from error

    return run


def optional(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{name} is missing: pip install 'vit_prune[export]'") from error


@contextmanager
def unfinished(path: Path) -> Iterator[Path]:
    """A folder beside `path`: its files take their places there at the end of the block, the largest name first; where the block fails they are gone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        yield Path(folder)
        for file in sorted(Path(folder).iterdir(), reverse=True):  # the weights, PATH.data, before the graph that names them
            os.replace(file, path.parent / file.name)
