"""tools/train_text.py from its command line: what works, and one sentence for what does not."""

import pytest

from tests.helpers import single_thread
from tests.text.helpers import rows, write_csv

pytest.importorskip("tokenizers")
TINY = ["--model", "text_mini", "--model-kwargs", "depth=1", "embed_dim=16", "num_heads=2", "--vocab-size", "60", "--max-length", "16"]
QUICK = ["--epochs", "1", "--batch-size", "12", "--device", "cpu", "--experiment", "run"]


@pytest.fixture
def train(run_tool, tmp_path):
    """(exit status or None, stdout, stderr), with texts in CSV files without a header, labels first, as those of AG News."""
    files = []
    for split, count in (("train", 8), ("test", 3)):
        path = write_csv(tmp_path / f"{split}.csv", [[1 + index % 3, row["label"], row["text"]] for index, row in enumerate(rows(count))])
        files += [f"--{split}-file", path]
    with single_thread():
        yield lambda *flags: run_tool("train_text.py", *files, "--text-columns", "3", "--label-column", "1", *flags, "--output", tmp_path / "output")


def test_a_run_says_how_good_it_is_and_where_its_results_are(train, tmp_path):
    code, out, _ = train(*TINY, *QUICK)
    assert code is None
    assert out.startswith("top-1 ")
    assert f"results in {tmp_path / 'output' / 'run'}" in out
    written = (tmp_path / "output/run/recipe.yaml").read_text()
    assert "text_columns:\n- '3'\n" in written
    assert (tmp_path / "output/run/last/tokenizer.json").is_file()


def test_flags_override_the_recipe_and_a_run_goes_on_by_its_own(train, run_tool, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: text_mini\nlr: 0.5\nvocab_size: 60\nmax-length: 16\nmodel_kwargs: {depth: 1, embed_dim: 16, num_heads: 2}\n")
    assert train("--config", recipe, "--lr", "2e-3", *QUICK)[0] is None
    assert "lr: 0.002\n" in (tmp_path / "output/run/recipe.yaml").read_text()
    code, out, _ = run_tool("train_text.py", "--resume", tmp_path / "output/run", "--epochs", "2")
    assert code is None
    assert " after 2 epochs" in out


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--fraction", "2"], "error: fraction must be in (0, 1], got 2.0"),
        (["--model", "text_4l8x"], "error: unknown model 'text_4l8x'; did you mean text_4l8h"),
        (["--label-column", "7"], "error: "),
        (["--dataset-dir", "d"], "error: give train_file and test_file, or dataset_dir, not both"),
        (["--config", "nowhere.yaml"], "error: [Errno 2] No such file or directory: 'nowhere.yaml'"),
        (["--variant", "a"], "error: --variant goes with --config STUDY"),
        (["--batch-size", "5000"], "error: 24 texts to train on are fewer than one batch of 5000"),
        (["--opt", "sgd", "--lr", "1e30", "--epochs", "30", "--sched", "constant"], "error: training diverged: the loss is"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_users_error_is_one_sentence_and_an_exit_status(train, flags, sentence):
    code, out, err = train(*TINY, *QUICK, *flags)
    assert str(code).startswith(sentence)
    assert "\n" not in code
    assert out == ""
    assert "Traceback" not in err


def test_an_unknown_flag_ends_the_program(train):
    code, _, err = train(*TINY, *QUICK, "--max-lenght", "3")
    assert code == 2
    assert "--max-length" in err
