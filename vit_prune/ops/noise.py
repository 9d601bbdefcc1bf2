"""Random numbers from a counter: the same key gives the same numbers on every device, in eager mode, compiled and recomputed.

A torch.Generator would draw other numbers when gradient checkpointing runs the forward again, and breaks torch.compile's graph.
"""

import torch
from torch import Tensor

MULTIPLIER = 0x45D9F3B  # 27 bits: its product with 32 bits stays inside int64
LOW_32_BITS = 0xFFFFFFFF


def mix(value: Tensor) -> Tensor:
    """Scramble int64 values in [0, 2^32) so that neighbours look independent (xor-shift-multiply, three rounds)."""
    for _ in range(3):
        value = (((value >> 16) ^ value) * MULTIPLIER) & LOW_32_BITS
    return (value >> 16) ^ value


def uniform(key: Tensor, length: int) -> Tensor:
    """Uniform numbers in (0, 1): key [B] int64 -> [B, length] float32; rows with equal keys are equal."""
    position = torch.arange(1, length + 1, device=key.device)
    bits = mix((mix(key & LOW_32_BITS)[:, None] + mix(position)[None, :]) & LOW_32_BITS)
    return ((bits >> 9).float() + 0.5) / 2**23  # 23 bits: exact in float32, never 0 or 1


def gumbel(key: Tensor, length: int) -> Tensor:
    """Standard Gumbel noise -log(-log u): key [B] int64 -> [B, length] float32."""
    return -(-uniform(key, length).log()).log()


def block_key(seed: int, block: int, draw: int = 0) -> int:
    """The key of one block's noise under a seed; another `draw` is another noise."""
    key = torch.zeros(1, dtype=torch.int64, device="cpu")
    for part in (seed, block, draw):
        key = mix((key + part) & LOW_32_BITS)
    return int(key)
