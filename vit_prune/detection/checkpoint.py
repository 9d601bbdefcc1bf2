"""A detector in a folder: config.json says how it is built and what its labels are called, model.safetensors holds its weights."""

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path

from torch import Tensor

from vit_prune import checkpoint
from vit_prune.checkpoint.common import misfits
from vit_prune.checkpoint.reader import WEIGHTS, find_weights, read_tensors, read_torch_file
from vit_prune.detection.build import build_detector
from vit_prune.detection.config import DetectorConfig
from vit_prune.detection.data.coco import Categories
from vit_prune.detection.model import MaskRCNN
from vit_prune.detection.weights import from_detectron2

CONFIG = "config.json"
FORMAT = 1


def save_detector(model: MaskRCNN, config: DetectorConfig, categories: Categories, folder: str | Path) -> None:
    """Write both files, each complete or not at all."""
    own = {item.name: getattr(config, item.name) for item in fields(DetectorConfig)}
    content = {"detector_format": FORMAT, "detector": own, "categories": asdict(categories)}
    checkpoint.write(Path(folder), checkpoint.owned(model.state_dict()), content)


def load_detector(folder: str | Path) -> tuple[MaskRCNN, DetectorConfig, Categories]:
    """What `save_detector` wrote. Raises: OSError; ValueError that names the file."""
    folder = Path(folder)
    try:
        content = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        if content.get("detector_format") != FORMAT:
            raise ValueError(f"it is no detector of format {FORMAT}")
        config = DetectorConfig(**content["detector"] | {"global_blocks": tuple(content["detector"]["global_blocks"])})
        categories = Categories(*(tuple(content["categories"][name]) for name in ("ids", "names")))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{folder / CONFIG} was not written by save_detector: {error}") from error
    model = build_detector(config)
    load_weights(model, folder / WEIGHTS)
    return model, config, categories


def load_weights(model: MaskRCNN, path: str | Path) -> None:
    """Weights of a whole detector: ours, or detectron2's (a .pth with "model"). Raises: OSError; ValueError for those of another detector."""
    weights = read_weights(Path(path))
    if any(name.startswith("proposal_generator.") for name in weights):
        weights = from_detectron2(weights)
    if misfit := misfits(weights, model.state_dict()):
        raise ValueError(f"{path} is of another detector: {misfit}")
    model.load_state_dict(weights)


def read_weights(path: Path) -> Mapping[str, Tensor]:
    """By full names. Raises: OSError; ValueError for a broken file."""
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    return read_tensors(path)[0] if path.suffix == ".safetensors" else find_weights(read_torch_file(path), path, False)
