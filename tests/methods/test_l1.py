import json
from dataclasses import FrozenInstanceError, asdict

import pytest
import torch

from vit_prune.methods.l1 import L1, BlockPlan, PrunePlan, Taylor, choose


def heads(scores: list[list[float]], share: float, ranking: str = "uniform") -> list[list[int]]:
    return choose([torch.tensor(score).double() for score in scores], share, ranking=ranking, group=1, what="heads")


def channels(scores: list[torch.Tensor], share: float, ranking: str = "uniform") -> list[list[int]]:
    return choose([score.double() for score in scores], share, ranking=ranking, group=8, what="channels")


@pytest.mark.parametrize("criterion", [L1, Taylor])
def test_configs_are_frozen_and_json_able(criterion):
    config = criterion(heads=0.25, mlp=0.5)
    assert json.loads(json.dumps(asdict(config))) == {"heads": 0.25, "mlp": 0.5, "ranking": "uniform"}
    assert criterion(**asdict(config)) == config != (Taylor if criterion is L1 else L1)(heads=0.25, mlp=0.5)
    with pytest.raises(FrozenInstanceError):
        config.heads = 0.5


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"heads": 1}, r"heads is the share that is removed, in \[0, 1\), got 1"),
        ({"mlp": -0.1}, "mlp is the share that is removed"),
        ({"heads": float("nan")}, "heads is the share that is removed"),
        ({"heads": True}, "heads is the share that is removed"),
        ({"mlp": "half"}, "mlp is the share that is removed"),
        ({"heads": 0, "mlp": 0}, "both 0: nothing would be removed"),
        ({"ranking": "locl"}, "ranking must be one of uniform, global, got 'locl'"),
    ],
)
def test_wrong_fields_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        L1(**fields)


def test_the_weakest_go_and_the_kept_stay_in_order():
    assert heads([[4, 1, 3, 2], [1, 2, 3, 4]], 0.5) == [[0, 2], [2, 3]]


def test_ties_keep_the_lower_index():
    assert heads([[1, 1, 1, 1]], 0.5) == [[0, 1]]


@pytest.mark.parametrize(("share", "left"), [(0.25, 3), (0.49, 3), (0.5, 2), (0.99, 1)])
def test_shares_are_rounded_down_to_whole_heads_and_one_stays(share, left):
    assert len(heads([[1, 2, 3, 4]], share)[0]) == left


def test_a_share_whose_product_falls_short_by_rounding_counts_whole():
    assert 0.29 * 100 < 29
    assert len(heads([list(range(100))], 0.29)[0]) == 71


@pytest.mark.parametrize(("count", "share", "left"), [(64, 0.5, 32), (64, 0.6, 32), (64, 0.99, 8), (30, 0.99, 14), (30, 0.3, 22)])
def test_channels_go_in_multiples_of_8_and_8_stay(count, share, left):
    assert len(channels([torch.arange(count)], share)[0]) == left
    assert len(channels([torch.arange(count)], share, "global")[0]) == left


def test_global_takes_from_the_blocks_whose_heads_are_weak_beside_their_mean():
    assert heads([[1, 1, 1, 1], [10, 10, 90, 90]], 0.25, "global") == [[0, 1, 2, 3], [2, 3]]  # by the bare scores two of the first would go


def test_global_leaves_one_head_in_every_block():
    assert heads([[1, 1, 100, 100], [1, 1, 1, 1]], 0.95, "global") == [[2], [0]]


def test_a_block_loses_a_prefix_of_its_own_order_in_groups_of_8():
    weak, strong = torch.randn(48).abs(), 5 + torch.randn(48).abs()
    first, second = channels([weak, strong], 1 / 3, "global")
    for score, kept in ((weak, first), (strong, second)):
        assert len(kept) % 8 == 0
        assert kept == sorted(score.argsort(descending=True, stable=True)[: len(kept)].tolist())
    assert len(first) + len(second) == 64
    assert len(first) < len(second)  # beside its mean, the first is the more uneven


def test_a_block_without_any_score_is_the_weakest_and_not_nan():
    assert heads([[1, 1], [0, 0]], 0.25, "global") == [[0, 1], [0]]


@pytest.mark.parametrize("ranking", ["uniform", "global"])
def test_a_share_that_removes_nothing_is_refused(ranking):
    with pytest.raises(ValueError, match=r"heads: a share of 0.25 of 3 per block removes no whole head"):
        heads([[1, 2, 3]], 0.25, ranking)
    with pytest.raises(ValueError, match=r"channels: .* removes no whole group of 8 channels"):
        channels([torch.arange(8)], 0.9, ranking)


def test_scores_that_are_not_finite_are_refused_by_block():
    with pytest.raises(ValueError, match=r"the heads of blocks\.1 are not finite"):
        heads([[1, 2], [1, float("nan")]], 0.5)


PLAN = PrunePlan((BlockPlan(3, (0, 2), 16, tuple(range(8))), BlockPlan(3, (0, 1, 2), 0, ())))


def test_a_plan_comes_back_from_json():
    assert PrunePlan.from_dict(json.loads(json.dumps(PLAN.to_dict()))) == PLAN


@pytest.mark.parametrize(
    "changed",
    [{"heads": [2, 0]}, {"heads": [0, 0]}, {"heads": [3]}, {"heads": []}, {"heads": [-1]}, {"heads": None}, {"heads": [0.5]}, {"channels": [16]}],
    ids=str,
)
def test_a_plan_of_wrong_indices_is_refused(changed):
    block = PLAN.to_dict()["blocks"][0]
    with pytest.raises(ValueError, match=f"{next(iter(changed))} of a plan must be rising numbers"):
        PrunePlan.from_dict({"blocks": [block | changed]})


@pytest.mark.parametrize("data", [None, {}, {"blocks": {}}, {"blocks": [{"heads": [0]}]}], ids=str)
def test_what_is_no_plan_is_refused(data):
    with pytest.raises(ValueError, match="a prune plan is"):
        PrunePlan.from_dict(data)
