"""AP as COCO's own tools give it, whatever is found (cocoapi 675)."""

import contextlib
import io
import json

import numpy as np
import pytest
import torch

from vit_prune.detection.metrics import NAMES, coco_metrics, metrics_table, numbered, to_results, truth


def some_results(data, seed=0, share=0.8):
    """Objects moved and resized a little, some of another class, and some that are nowhere."""
    random, results = np.random.default_rng(seed), []
    for index in range(len(data)):
        target = data.target(index)
        for box, label, mask in zip(target["boxes"], target["labels"], target["masks"], strict=True):
            if random.random() < share:
                moved = box + torch.from_numpy(random.normal(0, 2, 4)).float()
                shown = mask.bool().roll(int(random.integers(-3, 4)), dims=1)
                kind = label if random.random() < 0.9 else torch.tensor(int(random.integers(1, 4)))
                found = {"boxes": moved[None], "scores": torch.tensor([random.random()]), "labels": kind[None], "masks": shown[None]}
                results += to_results(found, data.images[index]["id"], data)
    return results


def by_pycocotools(data, results, kind):
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    with contextlib.redirect_stdout(io.StringIO()):
        indexes = []
        for annotations in (truth(data, kind), numbered(results, kind)):
            index = COCO()
            index.dataset = {"images": data.images, "annotations": annotations, "categories": [{"id": number} for number in data.categories.ids]}
            index.createIndex()
            indexes.append(index)
        judge = COCOeval(*indexes, kind)
        judge.evaluate()
        judge.accumulate()
        judge.summarize()
    return judge


@pytest.mark.parametrize(("kind", "coco_kind"), [("box", "bbox"), ("mask", "segm")])
def test_figures_are_those_of_pycocotools(val, kind, coco_kind):
    results = some_results(val)
    metrics, judge = coco_metrics(val, results), by_pycocotools(val, results, coco_kind)
    assert 5 < metrics[kind]["AP"] < 95
    for name, value in zip(NAMES, judge.stats, strict=False):
        assert metrics[kind][name] == (None if value < 0 else pytest.approx(100 * value, abs=1e-9)), name
    for number, name in enumerate(val.categories.names):
        precision = judge.eval["precision"][:, :, number, 0, -1]
        assert metrics["classes"][name][kind] == pytest.approx(100 * precision[precision > -1].mean(), abs=1e-9)


def perfect(val):
    results = []
    for index in range(len(val)):
        target = val.target(index)
        found = {"boxes": target["boxes"], "scores": torch.ones(len(target["labels"])), "labels": target["labels"], "masks": target["masks"].bool()}
        results += to_results(found, val.images[index]["id"], val)
    return results


@pytest.mark.parametrize("number", [lambda place: place, lambda place: 0, lambda place: f"object {place}"], ids=["from 0", "all alike", "text"])
def test_whatever_the_annotations_are_numbered_by(val, number):
    expected, results = coco_metrics(val, perfect(val)), perfect(val)
    objects = {image: list(found) for image, found in val.objects.items()}
    for place, one in enumerate(one for found in objects.values() for one in found):
        one["id"] = number(place)
    val.objects = objects
    assert coco_metrics(val, results) == expected


def test_what_is_there_is_found_wholly_by_itself_whatever_its_encoding(val):
    metrics = coco_metrics(val, perfect(val))
    assert metrics["mask"]["AP"] == pytest.approx(100)
    assert metrics["box"]["AP"] > 90  # boxes are of the masks of drawn outlines


def test_a_detection_on_a_crowd_counts_neither_way(val):
    results = some_results(val)
    number, crowd = next((image, one) for image, objects in val.objects.items() for one in objects if one["iscrowd"])
    on_crowd = {"image_id": number, "category_id": crowd["category_id"], "bbox": crowd["bbox"], "score": 1.0, "segmentation": crowd["segmentation"]}
    if isinstance(on_crowd["segmentation"]["counts"], list):
        from vit_prune.detection.data.masks import bitmap, encode

        on_crowd["segmentation"] = encode(bitmap(crowd["segmentation"], tuple(crowd["segmentation"]["size"]))[None])[0]
    assert coco_metrics(val, [*results, on_crowd]) == coco_metrics(val, results)


def test_nothing_found_is_0_and_nothing_to_find_is_undefined(val, monkeypatch):
    metrics = coco_metrics(val, [])
    assert metrics["box"]["AP"] == metrics["mask"]["AP50"] == 0
    one_image = some_results(val)[:2]
    assert coco_metrics(val, one_image)["box"]["AP"] > 0
    monkeypatch.setattr(val, "objects", {image: [] for image in val.objects})
    for results in ([], one_image):
        metrics = coco_metrics(val, results)
        assert set(metrics["box"].values()) == set(metrics["mask"].values()) == {None}
        assert json.loads(json.dumps(metrics)) == metrics
        assert "-" in metrics_table(metrics)


def test_a_lone_image_may_be_judged(val):
    results = some_results(val)
    image = val.images[0]["id"]
    alone = coco_metrics(val, results, [image])
    assert alone["box"]["AP"] != coco_metrics(val, results)["box"]["AP"]
    assert alone == coco_metrics(val, [one for one in results if one["image_id"] == image], [image])


def test_an_object_whose_mask_has_no_area_counts_for_boxes_alone(val):
    image = val.images[0]["id"]
    val.objects = dict(val.objects)
    val.objects[image] = [*val.objects[image], {"id": 999, "category_id": 3, "bbox": [1, 1, 5, 5], "iscrowd": 0, "segmentation": []}]
    assert len(truth(val, "bbox")) == len(truth(val, "segm")) + 1
    assert coco_metrics(val, some_results(val))["mask"]["AP"] is not None
