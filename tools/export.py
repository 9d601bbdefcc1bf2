"""Write a model for another runtime: `python tools/export.py --checkpoint output/train/RUN/best --keep 0.5 --output model.onnx`.

What is written is compared with the model, on random images at batch 1 and 3, before the file gets its name.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import nn

from vit_prune import checkpoint
from vit_prune.export import ExportError, compare, export_onnx, export_program, save_program
from vit_prune.fuse import fuse
from vit_prune.measure.inputs import image_size
from vit_prune.methods.stack import prune_stacks
from vit_prune.patch import set_keep
from vit_prune.train.build import build_model
from vit_prune.train.cli import main, parse_flags

MEGA = 1e6
BATCHES = (1, 3)


@dataclass(frozen=True)
class Export:
    """Write a model as ONNX or as a graph of torch.export, for any batch, and check it.

    Args:
        output: the file to write, e.g. model.onnx or model.pt2
        checkpoint: a folder of vp.save; or, with --model, a file of weights
        model: timm's name, ours among them
        num_classes: of --model
        keep: another keep schedule: 0.5, linear:1.0:0.3, cosine:..., step:1.0:0.5:6, or one ratio per block
        img_size: one side, or height and width, in pixels; the model's own if left out
        dynamic_size: leave height and width open too
        format: onnx, or torch-export
        fuse: fuse a patched model first: the same outputs, faster
        tolerance: largest absolute difference of an output
    """

    output: Path
    checkpoint: Path | None = None
    model: str | None = None
    num_classes: int | None = None
    keep: str | None = None
    img_size: tuple[int, ...] | None = None
    dynamic_size: bool = False
    format: Literal["onnx", "torch-export"] = "onnx"
    fuse: bool = True
    tolerance: float = 1e-4

    def __post_init__(self) -> None:
        if self.model is None and self.checkpoint is None:
            raise ValueError("give --checkpoint FOLDER of vp.save, --model NAME, or --model with a file of weights")
        if self.img_size is not None and len(self.img_size) not in (1, 2):
            raise ValueError(f"img-size takes one side, or height and width, got {len(self.img_size)} numbers")
        if not self.tolerance > 0:
            raise ValueError(f"tolerance must be > 0, got {self.tolerance}")

    def size(self) -> int | tuple[int, ...] | None:
        return self.img_size[0] if self.img_size and len(self.img_size) == 1 else self.img_size


def build(flags: Export) -> nn.Module:
    """In eval mode: what vp.save wrote, or the named model at the size that was asked for."""
    if flags.model is None:
        model = checkpoint.load(flags.checkpoint)
    else:
        wanted = {"img_size": flags.size(), "num_classes": flags.num_classes, "dynamic_img_size": flags.dynamic_size or None}
        model = build_model(flags.model, **{name: value for name, value in wanted.items() if value is not None})
        print(checkpoint.load_weights(model, flags.checkpoint, purpose="evaluate") if flags.checkpoint else "no checkpoint: the weights are random")
    if flags.keep is not None:
        set_keep(model, flags.keep)
    return fuse(model.eval()) if flags.fuse and prune_stacks(model) else model.eval()


def export() -> None:
    flags = parse_flags(Export)
    try:
        model, settings = build(flags), {"img_size": flags.size(), "dynamic_size": flags.dynamic_size}
        if flags.format == "onnx":
            report = export_onnx(model, flags.output, tolerance=flags.tolerance, batch_sizes_checked=BATCHES, **settings)
            parity, size_bytes, kind = report.parity, report.bytes, f"ONNX, opset {report.opset}"
            call = f"onnxruntime.InferenceSession('{flags.output}').run(None, {{'images': images}})"
        else:
            program = export_program(model, **settings)
            graph, size = program.module(), image_size(model, flags.size())
            parity = [compare(lambda images: [graph(images)], model.float(), size, batch, flags.tolerance) for batch in BATCHES]
            save_program(program, flags.output)
            size_bytes, kind, call = flags.output.stat().st_size, "torch.export", f"torch.export.load('{flags.output}').module()(images)"
    except (ExportError, ImportError, TypeError) as error:
        raise ValueError(str(error)) from error
    print(f"{flags.output}: {kind}, {size_bytes / MEGA:.1f} MB\nlargest difference to torch: {'; '.join(map(str, parity))}")
    print(f"next: {call}  # images float32 [B, C, H, W]")


if __name__ == "__main__":
    main(export)
