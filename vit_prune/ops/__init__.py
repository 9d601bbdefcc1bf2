"""Floor 1: pure functions on tensors. No nn.Module, no timm."""
