"""What tools/sweep.py takes from its YAML file, and what it refuses before anything runs."""

from pathlib import Path

import pytest

from vit_prune.methods.columns import Columns
from vit_prune.methods.l1 import L1
from vit_prune.methods.tome import ToMe
from vit_prune.sweep.config import SweepConfig, check_entries, configured, is_method, load_sweep, shares_of

METHODS = {"ToMe": [{"name": "tome", "r": "auto"}], "searched": {"search": [{"name": "tome"}], "shares": [0.5]}}
HEAD = "model: vit_mini28\nmethods:\n  ToMe: [{name: tome, r: auto}]\n"


@pytest.fixture
def load(tmp_path):
    """Load a sweep from text."""

    def call(text: str, **given) -> SweepConfig:
        (tmp_path / "sweep.yaml").write_text(text)
        return load_sweep(tmp_path / "sweep.yaml", **given)

    return call


def test_a_file_is_read_and_what_is_given_goes_before_it(load):
    config = load(HEAD + "img-size: 28\nshares: [0.9, 0.5]\nruns: 7\n", runs=3, shares=None, img_size=(28, 56))
    assert (config.img_size, config.shares, config.runs, config.data) == ((28, 56), (0.9, 0.5), 3, "photographs")
    assert load(HEAD + "img-size: 28\nshares: 0.9\n").img_size == (28,)
    assert load(HEAD + "shares: 0.9\n").shares == (0.9,)


@pytest.mark.parametrize("path", sorted(Path("configs/sweeps").glob("*.yaml")), ids=lambda path: path.name)
def test_the_sweeps_that_we_ship_are_valid(path):
    config = load_sweep(path)
    assert config.methods or config.trained


def test_a_search_may_have_shares_of_its_own():
    config = SweepConfig(model="x", methods=METHODS, shares=(0.9, 0.8))
    assert shares_of(config, "searched") == (0.5,)
    assert shares_of(config, "ToMe") == (0.9, 0.8)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (HEAD + "treads: 2", "unknown key 'treads'; did you mean threads"),
        (HEAD + "1: 2", "unknown key '1'"),
        (HEAD + "runs: 3\nruns: 4", "runs is given twice"),
        ("[a, b]", "expected a mapping"),
        ("model: vit_mini28", "a sweep needs a model and methods, or trained folders, or both"),
        ("methods: {ToMe: [{name: tome, r: auto}]}", "a sweep needs a model and methods"),
        ("data: digits", "a sweep needs a model and methods"),
        ("model: vit_mini28\ntrained: {a: b}\ndata: digits", "a sweep needs a model and methods"),
        ("trained: {dense: folder}", "trained folders are compared by accuracy: give data"),
        ("model: vit_mini28\nmethods: [tome]", "methods must be a mapping by label, got \\['tome'\\]"),
        ("trained: [a, b]\ndata: digits", "trained must be a mapping by label"),
        (HEAD + "shares: [0.5, 1.0]", "shares are of the unpruned model's MACs, between 0 and 1, got 1.0"),
        (HEAD + "shares: [0]", "between 0 and 1, got 0"),
        (HEAD + "threads: 0", "threads must be a whole number >= 1, got 0"),
        (HEAD + "runs: x", "runs must be a whole number >= 1, got 'x'"),
        (HEAD + "img_size: '8'", "img_size must be a whole number >= 1, got '8'"),
        (HEAD + "device: foo", "foo"),
        ("model: vit_mini28\nmethods: {1: [{name: tome, r: auto}]}", "each label must be a text of its own, .* got 1"),
        (HEAD + "data: digits\ntrained: {unpruned: a}", "other than 'unpruned'"),
        (HEAD + "data: digits\ntrained: {ToMe: a}", "each label must be a text of its own, .* got 'ToMe'"),
        ("model: vit_mini28\nmethods: {a b: {search: [{name: tome}]}, a/b: {search: [{name: tome}]}}", "or they share a file: a b, a/b"),
        (HEAD + "shares: half", "between 0 and 1, got 'half'"),
        ("model: vit_mini28\nmethods: {a: [{name: tomme, r: auto}]}", "method a: .*unknown method 'tomme'"),
    ],
)
def test_a_wrong_file_is_one_sentence_with_its_name(load, text, sentence):
    with pytest.raises(ValueError, match=rf"sweep\.yaml: .*{sentence}"):
        load(text)


def test_a_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_sweep(tmp_path / "nothing.yaml")


@pytest.mark.parametrize(
    ("entries", "sentence"),
    [
        ([], "must be a list of entries such as"),
        ("tome", "must be a list of entries such as .* got 'tome'"),
        ({"name": "tome", "r": "auto"}, "must be a list of entries such as"),
        ({"search": [{"name": "tome"}], "share": [0.5]}, "a search takes search and shares, not share"),
        ([{"name": "tome", "r": "auto", "weight": -1}], "weight must be a number > 0, got -1"),
        ([{"name": "tome", "r": "auto", "weight": "auto"}], "weight must be a number > 0, got 'auto'"),
        ([{"r": "auto"}], "must be a list of entries"),
        (["tome"], "must be a list of entries"),
        ({"search": []}, "must be a list of entries"),
        ({"shares": [0.5]}, "must be a list of entries"),
        ([{"name": "tome", "r": 8}], "has no dial on auto: nothing would bring it to a share"),
        ([{"name": "tome", "keep": "auto"}], "tome"),
        ([{"name": "columns", "keep": "auto", "importance": "colum_mean"}], "importance must be one of"),
        ([{"name": "l1", "mlps": "auto"}], "l1 takes heads, mlp, ranking, not mlps"),
        ([{"name": "l1", "heads": "auto", "ranking": "locl"}], "ranking must be one of"),
        ({"search": [{"name": "l1"}]}, "heads and mlp are both 0"),
        ({"search": [{"name": "tome", "r": "auto"}]}, "a search turns the dials itself: leave out auto"),
        ({"search": [{"name": "token_bias"}]}, "nothing to search"),
        ({"search": [{"name": "tome"}, {"name": "tome"}]}, "a method is given twice"),
        ({"search": [{"name": "tome"}], "shares": [1.5]}, "between 0 and 1, got 1.5"),
        ({"search": [{"name": "tome"}], "shares": 0.5}, "shares must be a list"),
    ],
)
def test_wrong_entries_are_refused_by_the_label_of_their_method(entries, sentence):
    with pytest.raises(ValueError, match=rf"method mine:? .*{sentence}"):
        check_entries("mine", entries)


@pytest.mark.parametrize("entries", [*METHODS.values(), [{"name": "l1", "mlp": "auto"}, {"name": "tome", "r": 4, "weight": 2}]])
def test_right_entries_pass(entries):
    assert check_entries("mine", entries) is None


def test_dials_on_auto_are_turned_and_l1_is_0_where_it_is_not_given():
    assert configured({"name": "tome", "r": "auto", "weight": 3}, {"r": 5}) == ToMe(r=5)
    assert configured({"name": "columns", "keep": "auto", "importance": "random"}, {"keep": 0.3}) == Columns(keep=0.3, importance="random")
    assert configured({"name": "tome", "r": 2}, {"r": 5}) == ToMe(r=2)
    assert configured({"name": "l1", "mlp": "auto"}, {"mlp": 0.5}) == L1(heads=0.0, mlp=0.5)
    assert configured({"name": "l1", "heads": 0.25}, {}) == L1(heads=0.25, mlp=0.0)


def test_what_is_patched_and_what_is_cut_are_told_apart():
    assert is_method(ToMe())
    assert not is_method(L1(0.5, 0.5))
