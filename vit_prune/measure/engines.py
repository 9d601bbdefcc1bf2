"""What runs a model: eager, torch.compile, a CUDA graph, or onnxruntime. Each turns a model and its inputs into a call without arguments.

Build and call within `pinned(backend)` of measure.backends.
"""

import importlib.util
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

ENGINES = ("eager", "compile", "cuda-graph", "onnxruntime")
MODES = ("inference", "train")
TRAINING_ENGINES = ("eager", "compile")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CAPTURE_WARMUP = 3  # calls before a capture
GRAPHS_PER_CODE = 64  # all models of one class share the code of its forward, and so its limit of compilations

Call = Callable[[], object]


def check_engine(engine: str, *, mode: str, dtype: str, device: torch.device) -> None:
    """Raises: ValueError for an engine that cannot be had here, in this mode or in this dtype."""
    if mode == "train" and engine not in TRAINING_ENGINES:
        raise ValueError(f"engine {engine} has no backward pass: mode train takes {' and '.join(TRAINING_ENGINES)}")
    if engine == "cuda-graph" and device.type != "cuda":
        raise ValueError(f"engine cuda-graph captures the launches of a CUDA device, and the device is {device}: use eager, compile or onnxruntime")
    if engine != "onnxruntime":
        return
    if missing := [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]:
        raise ValueError(f"engine onnxruntime needs {', '.join(missing)}: pip install 'vit_prune[export]'")
    if device.type != "cpu" or dtype != "float32":
        raise ValueError(f"engine onnxruntime runs on the CPU in float32 here, got {device} and {dtype}")


def prepare(model: nn.Module, *, mode: str, dtype: str, device: torch.device) -> nn.Module:
    """In place: on the device; in evaluation mode with weights in the dtype, or in training mode with float32 weights (the dtype is autocast's)."""
    if mode == "train":
        return model.to(device, torch.float32).train()
    return model.to(device, DTYPES[dtype]).eval().requires_grad_(False)


def build_call(model: nn.Module, inputs: tuple, *, engine: str = "eager", mode: str = "inference", dtype: str = "float32", threads: int | None = None) -> Call:
    """A call that runs the model on the inputs once; compilation, capture and export are done when this returns.

    Args:
        model: as `prepare` leaves it. inputs: the arguments of its forward, on its device.
        dtype: of autocast, in the mode train. threads: of onnxruntime; None is its own choice.

    Raises: ValueError where the engine cannot take the model.
    """
    if engine == "onnxruntime":
        return onnxruntime_call(model, inputs, threads)
    if engine == "cuda-graph":
        return CudaGraph(model, inputs)
    call = training_step(model, inputs, dtype) if mode == "train" else eager_call(model, inputs)
    return compiled_call(model, inputs, mode, dtype) if engine == "compile" else call


def eager_call(model: nn.Module, inputs: tuple) -> Call:
    def call() -> object:
        with torch.inference_mode():
            return model(*inputs)

    return call


def training_step(model: nn.Module, inputs: tuple, dtype: str, *, forward: Callable | None = None) -> Call:
    """Forward in the training mode and backward of the sum of all outputs; gradients are None before each step. No optimizer."""
    device_type = next(model.parameters()).device.type
    forward = model if forward is None else forward

    def step() -> None:
        model.zero_grad(set_to_none=True)
        with nullcontext() if dtype == "float32" else torch.autocast(device_type, DTYPES[dtype]):
            outputs = forward(*inputs)
        sum(output.float().sum() for output in tree_leaves(outputs) if isinstance(output, Tensor) and output.requires_grad).backward()

    return step


def compiled_call(model: nn.Module, inputs: tuple, mode: str, dtype: str) -> Call:
    """torch.compile of the whole graph, for these shapes; for inference on the CPU with the weights frozen into it (packed once)."""
    import torch._dynamo.config  # these load Triton where it is installed
    import torch._functorch.config
    import torch._inductor.config

    on_cpu = next(model.parameters()).device.type == "cpu"
    forward = torch.compile(model, fullgraph=True, dynamic=False)
    step = training_step(model, inputs, dtype, forward=forward) if mode == "train" else None

    def call() -> object:
        if step is not None:
            return step()
        with torch.no_grad():  # a graph is not frozen under inference_mode
            return forward(*inputs)

    inductor = {"freezing": mode == "inference" and on_cpu, "fx_graph_cache": False}  # the caches do not tell one pinned kernel from another
    with (
        torch._inductor.config.patch(inductor),
        torch._functorch.config.patch(enable_autograd_cache=False),
        torch._dynamo.config.patch(recompile_limit=GRAPHS_PER_CODE),
    ):
        call()
    return call


class CudaGraph:
    """One forward, warmed up on a side stream and captured; a call replays it. Inputs and outputs are the graph's own: refill `inputs` in place."""

    def __init__(self, model: nn.Module, inputs: tuple) -> None:
        self.inputs = tuple(value.clone() if isinstance(value, Tensor) else value for value in inputs)
        self.graph = torch.cuda.CUDAGraph()
        with torch.no_grad():
            warm_up_on_a_side_stream(lambda: model(*self.inputs))
            try:
                with torch.cuda.graph(self.graph):
                    self.outputs = model(*self.inputs)
            except RuntimeError as error:
                raise ValueError(f"the model cannot be captured in a CUDA graph (does it ask the device for a value on the way?): {error}") from error

    def __call__(self) -> object:
        self.graph.replay()
        return self.outputs


def warm_up_on_a_side_stream(call: Call) -> None:
    """As PyTorch's notes on CUDA graphs have it: what is set up lazily must not be captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(CAPTURE_WARMUP):
            call()
    torch.cuda.current_stream().wait_stream(stream)


def onnxruntime_call(model: nn.Module, inputs: tuple, threads: int | None) -> Call:
    """Exported to a temporary folder, and run on the CPU."""
    from vit_prune.export import ExportError, export_onnx, onnx_session  # which imports from measure

    (images,) = inputs
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        try:
            export_onnx(model, path, img_size=tuple(images.shape[-2:]), batch_sizes_checked=(len(images),))
        except ExportError as error:
            raise ValueError(f"engine onnxruntime cannot have this model: {error}") from error
        session = onnx_session(path, threads=threads)
    feed = {session.get_inputs()[0].name: images.cpu().numpy()}
    return lambda: session.run(None, feed)
