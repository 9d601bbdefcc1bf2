import numpy as np
import pytest

from vit_prune.text.data.labels import classes_of, numbered, share_of, stratified
from vit_prune.text.data.rows import Rows


def of(labels: list[str]) -> Rows:
    return Rows("FILE", [(str(number),) for number in range(len(labels))], labels)


def test_classes_are_sorted_as_numbers_where_all_are_numbers():
    assert classes_of(of(["10", "9", "1", "9"])) == ["1", "9", "10"]
    assert classes_of(of(["b", "10", "a"])) == ["10", "a", "b"]
    assert numbered(of(["9", "10"]), ["1", "9", "10"]).tolist() == [1, 2]


def test_a_test_label_that_training_has_not_is_named():
    with pytest.raises(ValueError, match="FILE has labels that the training texts have not: c; they have a, b"):
        numbered(of(["a", "c"]), ["a", "b"])
    with pytest.raises(ValueError, match="FILE has one class alone, a"):
        classes_of(of(["a", "a"]))


def test_a_share_has_as_much_of_each_class_and_lies_within_a_larger_one():
    targets = np.array([0] * 100 + [1] * 40 + [2] * 3)
    tenth, half = stratified(targets, 0.1, 5), stratified(targets, 0.5, 5)
    assert np.bincount(targets[tenth]).tolist() == [10, 4, 1]  # never none
    assert np.bincount(targets[half]).tolist() == [50, 20, 2]
    assert set(tenth) <= set(half)
    assert (np.diff(half) > 0).all()


def test_a_share_depends_on_the_seed_alone_and_all_is_all():
    targets = np.arange(200) % 2
    assert stratified(targets, 0.25, 1).tolist() == stratified(targets, 0.25, 1).tolist() != stratified(targets, 0.25, 2).tolist()
    assert stratified(targets, 1.0, 1).tolist() == list(range(200))


def test_texts_and_classes_of_a_share_stay_together():
    rows = of(["a", "b"] * 10)
    part, targets = share_of(rows, numbered(rows, ["a", "b"]), 0.5, 0)
    assert len(part.parts) == len(targets) == 10
    assert [int(text) % 2 for (text,) in part.parts] == targets.tolist()
