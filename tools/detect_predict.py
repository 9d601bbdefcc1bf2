"""Draw what a detector finds: `python tools/detect_predict.py --checkpoint output/detect/last --images FILE ... --output FOLDER`.

Writes each picture with boxes, masks and names as NAME.png into the folder, and detections.json with all of them.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

from vit_prune.detection.checkpoint import load_detector
from vit_prune.detection.picture import draw
from vit_prune.detection.predict import predict
from vit_prune.train.build import pick_device
from vit_prune.train.cli import main
from vit_prune.train.data.images import read_image
from vit_prune.train.state import write_atomically


@dataclass(frozen=True)
class Flags:
    checkpoint: Path  # a folder of tools/detect_train.py
    images: tuple[Path, ...]  # image files
    output: Path  # the folder of the pictures
    score: float = 0.5  # least score that is drawn
    device: str | None = None  # e.g. cpu, cuda (None: cuda where there is one)


def run() -> None:
    flags = tyro.cli(Flags, description=__doc__)
    names = [path.stem for path in flags.images]
    if twice := [name for place, name in enumerate(names) if name in names[:place]]:
        raise ValueError(f"two images are called {twice[0]}, and would be drawn into one file: draw them into two folders")
    model, config, categories = load_detector(flags.checkpoint)
    device = pick_device(flags.device)
    model = model.to(device).eval()
    flags.output.mkdir(parents=True, exist_ok=True)
    found = {}
    for path in flags.images:
        image = read_image(path)
        detections = predict(model, image, config.image_size, torch.device(device), least_score=flags.score)
        picture = flags.output / f"{path.stem}.png"
        draw(image, detections, categories).save(picture)
        found[str(path)] = [
            {"box": box, "score": score, "name": categories.names[label - 1]}
            for box, score, label in zip(*(detections[name].tolist() for name in ("boxes", "scores", "labels")), strict=True)
        ]
        print(f"{path}: {len(found[str(path)])} found, drawn: {picture}")
    write_atomically(flags.output / "detections.json", json.dumps(found, indent=2))


if __name__ == "__main__":
    main(run)
