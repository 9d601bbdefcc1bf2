"""Average precision as COCO defines it, of boxes and masks, and of each class."""

from collections.abc import Mapping, Sequence

import numpy as np
from faster_coco_eval import mask as coco_mask
from torch import Tensor

from vit_prune.detection.data.coco import CocoImages
from vit_prune.detection.data.masks import encode
from vit_prune.measure.report import text_table

KINDS = {"box": "bbox", "mask": "segm"}
NAMES = ("AP", "AP50", "AP75", "APs", "APm", "APl")  # in percent, the first six of COCO's figures
ALL_AREAS, MOST = 0, -1  # of COCO's areas, and of its numbers of detections per image


def to_results(found: Mapping[str, Tensor], image_id: int, data: CocoImages) -> list[dict]:
    """Detections of one image in COCO's result format: boxes as x y width height, masks as run lengths, ids of the file."""
    boxes = found["boxes"].double().cpu()
    boxes[:, 2:] -= boxes[:, :2]
    each = zip(boxes.tolist(), found["scores"].tolist(), found["labels"].tolist(), encode(found["masks"].cpu().numpy()), strict=True)
    return [
        {"image_id": image_id, "category_id": data.categories.id_of(label), "bbox": box, "score": score, "segmentation": mask}
        for box, score, label, mask in each
    ]


def coco_metrics(data: CocoImages, results: Sequence[Mapping], images: Sequence[int] | None = None) -> dict:
    """{"box": {"AP": percent, ...}, "mask": {...}, "classes": {name: {"box": AP, "mask": AP}}}; None where there is nothing to find.

    Detections on a crowd count neither for nor against. An object whose mask has no area counts for boxes alone.
    images: ids that were judged (None: all).
    """
    metrics: dict = {"classes": {name: {} for name in data.categories.names}}
    for kind, coco_kind in KINDS.items():
        stats, precision = evaluated(data, results, coco_kind, images)
        metrics[kind] = {name: percent(value) for name, value in zip(NAMES, stats, strict=False)}
        for number, name in enumerate(data.categories.names):
            seen = precision[:, :, number, ALL_AREAS, MOST]
            metrics["classes"][name][kind] = percent(seen[seen > -1].mean() if (seen > -1).any() else -1)
    return metrics


def evaluated(data: CocoImages, results: Sequence[Mapping], kind: str, images: Sequence[int] | None) -> tuple[np.ndarray, np.ndarray]:
    """COCO's summary, and its precision [thresholds, recalls, classes, areas, numbers of detections]."""
    from faster_coco_eval import COCO, COCOeval_faster

    judge = COCOeval_faster(as_coco(COCO, data, truth(data, kind)), as_coco(COCO, data, numbered(results, kind)), kind, print_function=silent)
    if images is not None:
        judge.params.imgIds = sorted(images)
    judge.evaluate()
    judge.accumulate()
    judge.summarize()
    return judge.stats, judge.eval["precision"]


def silent(*_words: object) -> None:
    """Instead of printing."""


def as_coco(kind: type, data: CocoImages, annotations: list[dict]):
    """An index of COCO's tools, without a file."""
    index = kind()
    categories = [{"id": number, "name": name} for number, name in zip(data.categories.ids, data.categories.names, strict=True)]
    index.dataset = {"images": data.images, "annotations": annotations, "categories": categories}
    index.createIndex()
    return index


def truth(data: CocoImages, kind: str) -> list[dict]:
    """What is to be found, numbered from 1 (COCO's matcher takes 0 for nothing), every mask as run lengths."""
    found: list[dict] = []
    for index, image in enumerate(data.images):
        for one in data.objects[image["id"]]:
            runs = data.runs(one, data.size(index)) if kind == "segm" else None
            if kind == "segm" and (runs is None or not coco_mask.area(runs)):
                continue
            own = {"area": area_of(one, runs)} if runs is None else {"area": area_of(one, runs), "segmentation": runs}
            found.append({**one, "id": len(found) + 1, "image_id": image["id"]} | own)
    return found


def area_of(annotation: Mapping, runs: Mapping | None) -> float:
    """As the file says; else of the mask, or of the box."""
    if annotation.get("area") is not None:
        return annotation["area"]
    return annotation["bbox"][2] * annotation["bbox"][3] if runs is None else float(coco_mask.area(runs))


def numbered(results: Sequence[Mapping], kind: str) -> list[dict]:
    """Results with what COCO's tools want of an annotation."""
    areas = [one["bbox"][2] * one["bbox"][3] for one in results] if kind == "bbox" else [float(coco_mask.area(one["segmentation"])) for one in results]
    return [{**one, "id": number + 1, "iscrowd": 0, "area": area} for number, (one, area) in enumerate(zip(results, areas, strict=True))]


def percent(value: float) -> float | None:
    """COCO's tools say -1 for what is undefined."""
    return None if value < 0 else 100 * float(value)


def metrics_table(metrics: Mapping) -> str:
    """Boxes and masks, and AP of each class."""
    rows = [(kind, *(shown(metrics[kind][name]) for name in NAMES)) for kind in KINDS]
    classes = [(name, *(shown(values[kind]) for kind in KINDS)) for name, values in metrics["classes"].items()]
    return f"{text_table(('', *NAMES), rows)}\n\n{text_table(('class', *(f'{kind} AP' for kind in KINDS)), classes)}"


def shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
