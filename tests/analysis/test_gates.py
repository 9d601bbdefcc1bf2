"""What the gates of heads do: records of a model, and summaries of records made by hand."""

import math

import pytest
import torch
from torch import nn

import vit_prune as vp
from tests.helpers import gates_of, randomise_gates, single_thread, tiny_named
from vit_prune.analysis.gates import GateRecord, collect
from vit_prune.analysis.gates.heads import head_maps
from vit_prune.analysis.gates.record import placed
from vit_prune.analysis.gates.summaries import by_block, by_class, by_difficulty, overall, thirds
from vit_prune.analysis.gates.tables import MANY_CLASSES, SHOWN, block_table, class_table, difficulty_table, overall_table
from vit_prune.analysis.noop import perturb
from vit_prune.methods.base import HeadGate
from vit_prune.methods.budgetformer import UNTRAINED
from vit_prune.methods.stack import prune_stacks
from vit_prune.text.encoder import TextTransformer
from vit_prune.train.statistics import layer_statistics

CPU = torch.device("cpu")
CLASSES = ("cat", "dog", "emu", "fox", "gnu")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    with single_thread():
        yield


def gated(**fields) -> nn.Module:
    return randomise_gates(vp.patch(tiny_named(), vp.BudgetFormer(**fields)))


def by_hand(budget, *, heads=None, label=None, loss=None, right=None) -> GateRecord:
    """budget: s [n][L], of 4 heads."""
    s = torch.tensor(budget, dtype=torch.float64)
    n, L = s.shape
    loss = torch.arange(n).double() if loss is None else torch.tensor(loss, dtype=torch.float64)
    return GateRecord(
        budget=s,
        entropy=s / 2,
        heads=(s * 4).long().clamp(min=1) if heads is None else torch.tensor(heads),
        label=torch.zeros(n, dtype=torch.int64) if label is None else torch.tensor(label),
        loss=loss,
        right=loss < n / 2 if right is None else torch.tensor(right),
        blocks=tuple(range(L)),
        num_heads=(4,) * L,
        counted={},
    )


def test_a_record_has_of_each_input_what_the_model_gives_it_alone_and_leaves_out_targets_below_zero():
    model, images = gated(), torch.randn(7, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([0, 1, -1, 2, 0, -1, 4])
    record = collect(model, [(images[:4], targets[:4]), (images[4:], targets[4:])], CPU)
    assert len(record) == 5
    assert record.blocks == (0, 1)
    assert record.label.tolist() == [0, 1, 2, 0, 4]
    assert record.heads.unique().numel() > 1
    for row, image in enumerate(images[targets >= 0]):
        alone = layer_statistics(model, image[None])
        assert record.budget[row].tolist() == pytest.approx([layer["budget"] for layer in alone], abs=1e-6)
        assert record.entropy[row].tolist() == pytest.approx([layer["entropy"] for layer in alone], abs=1e-6)
        assert record.heads[row].tolist() == [layer["heads"] for layer in alone]
        logits = model(image[None]).detach()
        assert record.loss[row].item() == pytest.approx(-logits.log_softmax(-1)[0, record.label[row]].item(), abs=1e-5)
        assert bool(record.right[row]) == (logits.argmax().item() == record.label[row])


def test_the_model_is_left_as_it_was():
    model = gated().train()
    collect(model, iter([(torch.randn(2, 3, 32, 32), torch.tensor([0, 1]))]), CPU)
    assert model.training
    assert not any(stack._forward_hooks for stack in prune_stacks(model))


def test_inputs_that_are_numbers_of_words_keep_their_type():
    model = gated().double()
    assert placed(torch.tensor([[3, 7]]), model, CPU).dtype == torch.int64
    assert placed(torch.ones(1, 3), model, CPU).dtype == torch.float64


def test_texts_of_any_length_are_recorded_and_padding_has_no_weight():
    torch.manual_seed(0)
    model = perturb(TextTransformer(vocab_size=50, max_length=12, num_classes=3, embed_dim=32, depth=2, num_heads=4))
    model = randomise_gates(vp.patch(model, vp.BudgetFormer())).eval()
    ids = torch.randint(2, 50, (3, 12))
    ids[:, 8:] = 0
    padded, alone = (collect(model, [(texts, torch.tensor([0, 1, 2]))], CPU) for texts in (ids, ids[:, :8]))
    torch.testing.assert_close(padded.budget, alone.budget, atol=1e-6, rtol=0)
    assert (head_maps(model, ids[:1]).weights[..., 8:] == 0).all()


def test_what_cannot_be_analysed_is_refused():
    images = torch.randn(2, 3, 32, 32)
    with pytest.raises(ValueError, match="no gates"):
        collect(vp.patch(tiny_named(), vp.Columns(keep=0.5, importance="value_norm")), [], CPU)
    with pytest.raises(ValueError, match="none of the inputs"):
        collect(gated(), [(images, torch.tensor([-1, -1]))], CPU)
    with pytest.raises(ValueError, match="none of the inputs"):
        collect(gated(), [], CPU)
    with pytest.raises(ValueError, match="1 of 2 losses are not finite"):
        collect(gated(), [(torch.stack([images[0], images[1] * math.nan]), torch.tensor([0, 1]))], CPU)


def test_blocks_have_mean_and_spread_over_the_inputs():
    first, second = by_block(by_hand([[0.2, 0.5], [0.6, 0.5]], heads=[[1, 2], [2, 2]]))
    assert first == pytest.approx({"block": 0, "budget": 0.4, "budget_std": 0.2, "heads": 1.5, "num_heads": 4, "entropy": 0.2, "max_entropy": math.log(4)})
    assert second["budget_std"] == 0
    assert "0.400 ± 0.200" in block_table([first, second])


def test_a_class_whose_inputs_get_another_s_is_seen_as_such():
    rows = by_class(by_hand([[0.9, 0.5], [0.2, 0.5], [0.7, 0.5], [0.4, 0.5]], label=[1, 3, 1, 3]), CLASSES)
    assert [(row["class"], row["block"]) for row in rows] == [("dog", 0), ("dog", 1), ("fox", 0), ("fox", 1)]
    assert [row["budget"] for row in rows] == pytest.approx([0.8, 0.5, 0.3, 0.5])
    assert [row["budget_std"] for row in rows] == pytest.approx([0.1, 0, 0.1, 0])
    assert "0.800 ± 0.100" in class_table(rows).splitlines()[2]


def test_gates_that_look_at_the_label_are_found_in_a_model(monkeypatch):
    """Dark images get s = .25, bright ones .75."""
    model = gated()
    for gate in gates_of(model):

        def by_brightness(x, *, mask, sizes, gate=gate):
            s = torch.where(brightness > 0, 0.75, 0.25)
            return HeadGate(torch.ones(len(x), 4), None, s, torch.full((len(x), 4), 0.25))

        monkeypatch.setattr(gate, "gate", by_brightness)
    targets = torch.tensor([0, 1, 1, 0])
    brightness = targets * 2.0 - 1
    rows = by_class(collect(model, [(brightness[:, None, None, None].expand(-1, 3, 32, 32), targets)], CPU), CLASSES)
    assert [(row["class"], row["budget"], row["budget_std"]) for row in rows[::2]] == [("cat", 0.25, 0), ("dog", 0.75, 0)]


def test_thirds_are_of_equal_size_and_equal_losses_stay_together():
    assert thirds(torch.tensor([5.0, 0.0, 3.0, 1.0, 4.0, 2.0])).tolist() == [2, 0, 1, 0, 2, 1]
    assert thirds(torch.rand(999, generator=torch.Generator().manual_seed(0))).bincount().tolist() == [333, 333, 333]
    assert thirds(torch.tensor([1.0, 1.0, 1.0, 1.0])).tolist() == [1, 1, 1, 1]
    assert thirds(torch.tensor([0.0, 0.0, 0.0, 0.0, 9.0])).tolist() == [1, 1, 1, 1, 2]
    assert thirds(torch.tensor([7.0])).tolist() == [1]
    assert thirds(torch.tensor([7.0, 1.0])).tolist() == [2, 0]


def test_harder_inputs_with_more_s_are_seen_as_such():
    s = [[0.2, 0.4], [0.5, 0.5], [0.8, 0.6]]
    rows = {row["group"]: row for row in by_difficulty(by_hand(s, loss=[0.1, 0.5, 2.0], heads=[[1, 1], [2, 2], [3, 2]], right=[True, True, False]))}
    assert [rows[name]["budget"] for name in ("easy", "medium", "hard")] == pytest.approx([0.3, 0.5, 0.7])
    assert [rows[name]["heads"] for name in ("easy", "medium", "hard", "right")] == [1, 2, 2.5, 1.5]
    assert [rows[name]["accuracy"] for name in ("easy", "medium", "hard")] == [100, 100, 0]
    assert rows["right"]["budget"] == pytest.approx(0.4)
    assert rows["right"]["budget_std"] == pytest.approx(0.1)  # of each input's mean over the blocks
    assert rows["wrong"]["budget_per_block"] == pytest.approx([0.8, 0.6])


def test_one_input_gives_no_nan():
    record = by_hand([[0.3, 0.5]], loss=[0.2], right=[True])
    rows = by_difficulty(record)
    assert [row["inputs"] for row in rows] == [0, 1, 0, 1, 0]
    assert rows[0]["budget"] is None
    assert by_class(record, CLASSES)[0]["budget_std"] == 0
    assert "nan" not in difficulty_table(rows) + class_table(by_class(record, CLASSES)) + block_table(by_block(record))


def test_many_classes_are_cut_to_those_of_most_and_of_least_s():
    n = MANY_CLASSES + 1
    rows = by_class(by_hand([[place / n] for place in range(n)], label=list(range(n))), list(map(str, range(n))))
    lines = class_table(rows).splitlines()
    assert [line.split()[0] for line in lines[2:-1]] == [str(n - 1 - place) for place in range(SHOWN)] + [str(place) for place in reversed(range(SHOWN))]
    assert f"out of {n}" in lines[-1]


def test_macs_are_those_of_the_heads_that_ran_and_none_where_they_are_not_known(monkeypatch):
    model, batch = gated(), (torch.randn(6, 3, 32, 32, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 5)
    row = overall(collect(model, [batch], CPU), model)
    assert 0 < row["macs"] < row["dense_macs"]
    assert row["macs_spread"] > 0
    for gate in gates_of(model):
        gate.progress.fill_(UNTRAINED)  # all heads run
    whole = overall(collect(model, [batch], CPU), model)
    assert whole["heads"] == 4
    assert whole["macs"] > row["macs"]
    assert "unknown" in overall_table(whole | {"macs": None, "macs_spread": None})
