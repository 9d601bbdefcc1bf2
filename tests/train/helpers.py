"""What the tests of training share."""

import sys
from pathlib import Path

import numpy as np
from PIL import Image

# torchrun, in two processes
LAUNCHER = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]


def write_image(path: Path, *, seed: int = 0) -> Path:
    """Noise, 12 pixels high and 10 wide, in the format of the path's ending."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).integers(0, 256, size=(12, 10, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    return path
