"""The three tools of detection from their command lines: one to train, one to judge, one to look."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.detection.conftest import SMALL, coco, detector, val  # noqa: F401  (fixtures)
from tests.helpers import single_thread
from tests.train.helpers import LAUNCHER
from vit_prune.detection.checkpoint import save_detector
from vit_prune.detection.data.coco import CocoImages
from vit_prune.detection.evaluate import detect
from vit_prune.detection.metrics import coco_metrics
from vit_prune.detection.weights import to_detectron2

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def one_thread():
    with single_thread():
        yield


@pytest.fixture
def saved(detector, val, tmp_path):  # noqa: F811
    model = detector(score_thresh=0.05)
    save_detector(model, SMALL, val.categories, tmp_path / "saved")
    return tmp_path / "saved"


def test_a_folder_in_cocos_layout_needs_one_command_to_train_and_one_to_judge(run_tool, coco, tmp_path):  # noqa: F811
    small = ("--model-kwargs", "depth=2", "embed_dim=32", "num_heads=2", "--image-size", 96, "--channels", 16, "--hidden", 32, "--proposals", 50)
    short = ("--iterations", 2, "--batch-size", 2, "--checkpoint-interval", 2, "--workers", 0, "--device", "cpu")
    code, out, _ = run_tool("detect_train.py", "--model", "vit_ti_bias", "--keep", 0.5, *small, *short, "--data-dir", coco, "--output", tmp_path / "run")
    assert code is None, code
    assert out.startswith("box AP ")
    code, out, _ = run_tool("detect_evaluate.py", "--checkpoint", tmp_path / "run/last", "--data-dir", coco, "--workers", 0, "--device", "cpu")
    assert code is None, code
    assert [line.split()[0] for line in out.splitlines() if line and not line.startswith("-")] == ["AP", "box", "mask", "class", "circle", "square", "triangle"]


def test_a_recipe_of_detection_is_read_and_an_unknown_key_is_named(run_tool, tmp_path):
    (tmp_path / "recipe.yaml").write_text("iteration: 5\n")
    code, *_ = run_tool("detect_train.py", "--config", tmp_path / "recipe.yaml")
    assert "unknown key 'iteration'; did you mean iterations" in code


def three_images(coco, folder):  # noqa: F811
    """The first three images of the evaluation, as a file of their own."""
    content = json.loads((coco / "annotations/instances_val2017.json").read_text())
    content["images"] = sorted(content["images"], key=lambda one: one["id"])[:3]
    kept = {one["id"] for one in content["images"]}
    content["annotations"] = [one for one in content["annotations"] if one["image_id"] in kept]
    (folder / "three.json").write_text(json.dumps(content))
    return folder / "three.json"


def test_two_processes_judge_three_images_as_one_does(coco, saved, detector, tmp_path):  # noqa: F811
    path = three_images(coco, tmp_path)
    flags = ("--checkpoint", saved, "--annotations", path, "--images", coco / "val2017", "--workers", 0, "--device", "cpu")
    command = [*LAUNCHER, "tools/detect_evaluate.py", *map(str, flags), "--output", str(tmp_path / "two.json"), "--results", str(tmp_path / "found.json")]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    data = CocoImages(path, coco / "val2017")
    results = detect(detector(score_thresh=0.05), data, 96, torch.device("cpu"))
    assert len(json.loads((tmp_path / "found.json").read_text())) == len(results) > 0
    assert json.loads((tmp_path / "two.json").read_text()) == json.loads(json.dumps(coco_metrics(data, results)))


def test_detectron2s_weights_are_judged_as_ours(run_tool, coco, saved, detector, tmp_path):  # noqa: F811
    path = three_images(coco, tmp_path)
    torch.save({"model": to_detectron2(detector().state_dict()), "iteration": 5}, tmp_path / "model_final.pth")
    outs = []
    for weights in ((), ("--weights", tmp_path / "model_final.pth")):
        flags = ("--checkpoint", saved, "--annotations", path, "--images", coco / "val2017", "--workers", 0, "--device", "cpu", *weights)
        code, out, _ = run_tool("detect_evaluate.py", *flags)
        assert code is None, code
        outs.append(out)
    assert outs[0] == outs[1]


def test_pictures_are_drawn_with_what_was_found(run_tool, coco, saved, tmp_path):  # noqa: F811
    path = sorted((coco / "val2017").glob("*.png"))[0]
    code, out, _ = run_tool("detect_predict.py", "--checkpoint", saved, "--images", path, "--output", tmp_path / "out", "--score", 0.1, "--device", "cpu")
    assert code is None, code
    found = json.loads((tmp_path / "out/detections.json").read_text())[str(path)]
    assert f"{len(found)} found" in out
    assert found
    assert {"box", "score", "name"} == set(found[0])
    with Image.open(path) as image, Image.open(tmp_path / "out" / path.name) as drawn:
        assert image.size == drawn.size
        assert image.convert("RGB").tobytes() != drawn.convert("RGB").tobytes()


def test_costs_are_printed_dense_beside_pruned_and_only_what_has_columns_keeps_less(run_tool, tmp_path):
    small = ("--image-size", 64, "--num-classes", 3, "--keep", 0.5, "--output", tmp_path / "cost.json")
    code, out, err = run_tool("detect_cost.py", "--model", "vit_tiny_patch16_224", "vit_ti_bias", *small)
    assert code is None, code
    dense, pruned = json.loads((tmp_path / "cost.json").read_text())["rows"]
    assert dense["backbone_share"] == 1 > pruned["backbone_share"]
    assert f"{pruned['backbone_gflops']:.2f}" in out.splitlines()[-1]
    assert "all zero" not in err


WRONG = {
    "no checkpoint": (("detect_evaluate.py", "--checkpoint", "nothing", "--data-dir", "x"), "nothing"),
    "no data": (("detect_evaluate.py", "--checkpoint", "SAVED"), "give --data-dir"),
    "two of a name": (("detect_predict.py", "--checkpoint", "SAVED", "--images", "a/1.jpg", "b/1.png", "--output", "OUT"), "two images are called 1"),
    "no thread": (("detect_cost.py", "--threads", 0), "threads must be a whole number >= 1, got 0"),
    "a broken image": (("detect_predict.py", "--checkpoint", "SAVED", "--images", __file__, "--output", "OUT"), "cannot read the image"),
}


@pytest.mark.parametrize(("flags", "sentence"), WRONG.values(), ids=WRONG)
def test_a_users_mistake_is_one_sentence(run_tool, saved, tmp_path, flags, sentence):
    code, *_ = run_tool(*(str(saved) if flag == "SAVED" else str(tmp_path / "out") if flag == "OUT" else flag for flag in flags))
    assert code.startswith("error: ")
    assert sentence in code
