"""One update of the weights, left out where the gradient is no number."""

from timm.utils import dispatch_clip_grad
from torch import Tensor
from torch.amp import GradScaler
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer


class Update:
    """backward for each batch, then step.

    A gradient with an inf or a NaN (a bad batch, or a loss that was scaled too high) would be in all weights after the step: such a step is
    left out. All processes hold the same summed gradient, and so decide alike.

    Args:
        clip_grad, clip_mode: norm, value or agc, as timm's. scaler: of the loss, for float16.
    """

    def __init__(self, optimizer: Optimizer, *, clip_grad: float | None = None, clip_mode: str = "norm", scaler: GradScaler | None = None) -> None:
        self.optimizer, self.clip_grad, self.clip_mode = optimizer, clip_grad, clip_mode
        self.scaler = GradScaler(enabled=False) if scaler is None else scaler
        self.parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def step(self) -> bool:
        """Move the weights, unless the gradient is not finite; then forget it. Returns: whether they moved."""
        self.scaler.unscale_(self.optimizer)
        norm = get_total_norm([parameter.grad for parameter in self.parameters if parameter.grad is not None])
        moved = bool(norm.isfinite())
        if moved:
            self._clip(norm)
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return moved

    def _clip(self, norm: Tensor) -> None:
        if self.clip_grad is None:
            return
        if self.clip_mode == "norm":
            clip_grads_with_norm_(self.parameters, self.clip_grad, norm)
        else:
            dispatch_clip_grad(self.parameters, self.clip_grad, mode=self.clip_mode)
