"""Studies: strict files, and runs that go on where they were interrupted."""

import json
from pathlib import Path

import pytest

from vit_prune.train.study import StudyFailed, load_study, load_variant, train_all, with_run_folder

RECIPE = """
model: vit_mini28_bias
model_kwargs: {depth: 2, embed_dim: 16, num_heads: 2}
img_size: 8
dataset: synthetic/8
batch_size: 4
workers: 0
device: cpu
epochs: 1
warmup_epochs: 0
"""
STUDY = """
recipe: recipe.yaml
seeds: [0, 1]
variants:
  dense: {model: vit_mini28}
  pruned: {keep: [1, 0.5], seeds: [3]}
"""


@pytest.fixture
def study(tmp_path):
    """A function that writes a study beside its recipe."""

    def write(text: str = STUDY) -> Path:
        (tmp_path / "recipe.yaml").write_text(RECIPE)
        (tmp_path / "study.yaml").write_text(text)
        return tmp_path / "study.yaml"

    return write


def test_a_variant_changes_its_own_fields_and_may_have_seeds_of_its_own(study):
    runs = load_study(study())
    assert [(one.variant, one.seed, one.config.seed, one.config.model, one.config.keep) for one in runs] == [
        ("dense", 0, 0, "vit_mini28", None),
        ("dense", 1, 1, "vit_mini28", None),
        ("pruned", 3, 3, "vit_mini28_bias", "1,0.5"),
    ]
    assert load_variant(study(), "pruned").keep == "1,0.5"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("recipe: recipe.yaml\nseeds: [0]\n", r"study\.yaml: a study needs recipe, seeds, variants; variants is missing"),
        (STUDY + "epochs: 3\n", r"study\.yaml: unknown key 'epochs'"),
        (STUDY.replace("keep: [1, 0.5]", "keep: 2"), r"study\.yaml: variant pruned: keep must be in \(0, 1\], got 2"),
        (STUDY.replace("seeds: [0, 1]", "seeds: 3"), r"study\.yaml: seeds must be a list of different whole numbers, got 3"),
        (STUDY.replace("seeds: [0, 1]", "seeds: [0, 0]"), r"study\.yaml: seeds must be a list of different whole numbers, got \[0, 0\]"),
        (STUDY.replace("seeds: [3]", "seeds: [x]"), r"study\.yaml: variant pruned: seeds must be a list"),
        ("recipe: recipe.yaml\nseeds: [0]\nvariants: [a]\n", r"study\.yaml: variants must be a mapping of names to fields, got \['a'\]"),
        ("recipe: recipe.yaml\nseeds: [0]\nvariants: {a: 3}\n", r"study\.yaml: variant a must be a mapping of fields to values, got 3"),
        ("recipe: 3\nseeds: [0]\nvariants: {a: {}}\n", r"study\.yaml: recipe must be the name of a file, got 3"),
        (STUDY.replace("keep: [1, 0.5]", "kepe: 1"), r"study\.yaml: variant pruned: unknown key 'kepe'; did you mean keep"),
    ],
    ids=["missing", "unknown", "value", "one seed", "seed twice", "text for a seed", "list", "number", "recipe", "field"],
)
def test_a_wrong_study_is_refused_with_its_name_before_the_first_run(study, text, message):
    with pytest.raises(ValueError, match=message):
        load_study(study(text))


def test_an_unknown_variant_is_refused_with_those_that_there_are(study):
    with pytest.raises(ValueError, match="unknown variant 'prnued'; did you mean pruned"):
        load_variant(study(), "prnued")


def test_all_runs_are_trained_and_finished_ones_are_read_the_second_time(study, tmp_path):
    runs = [with_run_folder(one, data_dir=None, output=tmp_path / "out") for one in load_study(study()) if one.seed != 1]
    first = train_all(runs, processes=1)
    assert {variant: list(seeds) for variant, seeds in first.items()} == {"dense": [0], "pruned": [3]}
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["dense-seed0", "pruned-seed3"]
    assert train_all(runs, processes=1) == json.loads(json.dumps(first), object_hook=lambda value: {int(k) if k.isdigit() else k: v for k, v in value.items()})


def test_a_run_that_fails_is_named_after_the_others_have_come_to_their_end(study, tmp_path):
    text = STUDY.replace("dense: {model: vit_mini28}", "wild: {opt: sgd, lr: 1e30, seeds: [0]}")
    runs = [with_run_folder(one, data_dir=None, output=tmp_path / "out") for one in load_study(study(text))]
    with pytest.raises(StudyFailed, match="1 of 2 runs failed; wild seed 0: training diverged: the loss is"):
        train_all(runs, processes=1)
    assert (tmp_path / "out/pruned-seed3/last").is_dir()
