"""tools/train.py from its command line: what works, and one sentence for what does not."""

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = str(Path(__file__).parents[2] / "tools" / "train.py")
TINY = ["--model", "vit_mini28_bias", "--model-kwargs", "depth=1", "embed_dim=16", "num_heads=2", "--img-size", "8", "--dataset", "digits"]
QUICK = ["--epochs", "1", "--warmup-epochs", "0", "--batch-size", "700", "--workers", "0", "--device", "cpu"]


@pytest.fixture
def train(run_tool, tmp_path):
    """(exit status or None, stdout, stderr)."""
    return lambda *flags: run_tool("train.py", *flags, "--output", tmp_path / "output")


def test_a_run_says_where_its_results_are(train, tmp_path):
    code, out, _ = train(*TINY, *QUICK, "--experiment", "run")
    assert code is None
    assert out.startswith("best top-1 ")
    assert str(tmp_path / "output" / "run") in out


def test_flags_override_the_recipe_and_the_recipe_the_defaults(train, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: vit_mini28_bias\ndataset: digits\nlr: 0.5\nkeep: [1]\nmodel_kwargs: {depth: 1, embed_dim: 16, num_heads: 2}\n")
    assert train("--config", str(recipe), "--lr", "2e-3", "--img-size", "8", *QUICK, "--experiment", "run")[0] is None
    written = (tmp_path / "output/run/recipe.yaml").read_text()
    assert "lr: 0.002\n" in written
    assert "keep: 1,\n" in written
    assert "embed_dim: 16\n" in written


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--keep", "0"], "error: keep must be in (0, 1], got 0.0"),
        (["--keep", "1.5"], "error: keep must be in (0, 1], got 1.5"),
        (["--model", "deit_s_bais"], "error: unknown model 'deit_s_bais'; did you mean deit_s_bias"),
        (["--dataset", "folder"], "error: the data set folder needs --data-dir"),
        (["--dataset", "folder", "--data-dir", "nowhere"], "error: data_dir nowhere is no folder"),
        (["--config", "nowhere.yaml"], "error: [Errno 2] No such file or directory: 'nowhere.yaml'"),
        (["--batch-size", "5000"], "error: 1437 images to train on are fewer than one batch of 5000"),
        (["--opt", "sgd", "--lr", "1e30", "--batch-size", "100"], "error: training diverged: the loss is"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_users_error_is_one_sentence_and_an_exit_status(train, flags, sentence):
    code, out, err = train(*TINY, *QUICK, *flags)
    assert code.startswith(sentence)  # what SystemExit prints to stderr, with status 1
    assert "\n" not in code
    assert out == ""
    assert "Traceback" not in err


def test_a_wrong_key_in_a_recipe_is_named_with_the_nearest(train, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("learning_rat: 1\nlr: 1\n")
    assert train("--config", str(recipe))[0] == f"error: {recipe}: unknown key 'learning_rat'"
    recipe.write_text("weight_decya: 1\n")
    assert train("--config", str(recipe))[0].endswith("unknown key 'weight_decya'; did you mean weight_decay?")


def test_a_wrong_flag_ends_with_the_nearest_one(train):
    code, _, err = train("--bach-size", "4")
    assert code == 2
    assert "--batch-size" in err


def test_a_wrong_value_ends_the_process_with_status_1_and_no_traceback():
    done = subprocess.run([sys.executable, TOOL, "--keep", "0"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "error: keep must be in (0, 1], got 0.0\n")


def test_a_run_goes_on_by_its_own_recipe_which_flags_override(train, tmp_path):
    folder = tmp_path / "output" / "run"
    assert train(*TINY, *QUICK, "--experiment", "run")[0] is None
    code, out, err = train("--resume", folder, "--epochs", "2")
    assert code is None, err
    assert out == f"best top-1 {out.split()[2]} % in epoch {out.split()[6].rstrip(';')}; results in {folder}\n"
    assert len((folder / "summary.csv").read_text().splitlines()) == 3
    assert "cannot resume with model_kwargs" in train("--resume", folder, "--epochs", "3", "--model-kwargs", "depth=2")[0]


def test_a_folder_that_is_no_run_is_named(train, tmp_path):
    assert train("--resume", tmp_path)[0] == f"error: no run to resume in {tmp_path}: it has no recipe.yaml"


def test_a_variant_of_a_study_trains_and_an_unknown_one_is_named(train, tmp_path):
    (tmp_path / "recipe.yaml").write_text("model: vit_mini28_bias\ndataset: digits\nmodel_kwargs: {depth: 1, embed_dim: 16, num_heads: 2}\nimg_size: 8\n")
    (tmp_path / "study.yaml").write_text("recipe: recipe.yaml\nseeds: [5]\nvariants:\n  half: {keep: 0.5}\n")
    study = ["--config", tmp_path / "study.yaml"]
    assert train(*study, "--variant", "half", *QUICK, "--experiment", "run")[0] is None
    assert "seed: 5\n" in (tmp_path / "output/run/recipe.yaml").read_text()
    assert train(*study, "--variant", "hlaf")[0].endswith("unknown variant 'hlaf'; did you mean half?")
    assert train("--variant", "half")[0] == "error: --variant goes with --config STUDY, the file that names it"


def test_help_explains_every_flag(train):
    code, out, _ = train("--help")
    assert code == 0
    assert "columns kept in training" in out
    assert "--config FILE" in out
