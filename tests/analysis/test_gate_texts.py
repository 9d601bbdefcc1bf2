"""What the heads of a text encoder look at, token by token, and what its gates give to texts of different lengths."""

import numpy as np
import pytest
import torch
from PIL import Image

from tests.helpers import single_thread
from tests.text.helpers import WORDS, hand_macs, save_encoder
from vit_prune import checkpoint
from vit_prune.analysis.gates import text_pictures
from vit_prune.analysis.gates.heads import head_maps
from vit_prune.analysis.gates.text_pictures import SHOWN_LETTERS, SHOWN_TOKENS, Sentence, caption, draw_text_maps, sentence, short
from vit_prune.analysis.gates.texts import analyse_texts
from vit_prune.methods.stack import prune_stacks
from vit_prune.text.data.texts import Texts
from vit_prune.text.data.tokenizer import FILE, load_tokenizer
from vit_prune.train.statistics import layer_statistics

pytest.importorskip("tokenizers")
PAIR = ("Cat dog", "oak")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    with single_thread():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_encoder(tmp_path_factory.mktemp("model") / "budget", "text_mini_budget", initial_budget=0.5)


@pytest.fixture
def model(folder):
    return checkpoint.load(folder).eval()


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder / FILE)


def test_tokens_are_those_that_the_model_reads(tokenizer):
    text = sentence(tokenizer, PAIR, 16)
    assert "".join(text.tokens).replace("##", "") == "catdog[SEP]oak"
    assert text.ids.tolist() == [[tokenizer.token_to_id(token) for token in text.tokens]]
    assert sentence(tokenizer, ("",), 16).tokens == ("[UNK]",)
    assert len(sentence(tokenizer, (WORDS["tools"],), 6).tokens) == 6


def test_rows_of_the_maps_sum_to_one_over_the_real_tokens_beside_padding_too(model, tokenizer):
    ids = sentence(tokenizer, PAIR, 16).ids
    length = ids.shape[1]
    alone, padded = (head_maps(model, numbers, 0) for numbers in (ids, torch.nn.functional.pad(ids, (0, 16 - length))))
    assert alone.weights.shape == (4, length, length)
    torch.testing.assert_close(alone.weights.sum(-1), torch.ones(4, length))
    torch.testing.assert_close(padded.weights[:, :length, :length].sum(-1), torch.ones(4, length))
    torch.testing.assert_close(padded.weights[:, :length, :length], alone.weights)
    assert torch.equal(padded.heads, alone.heads)


def test_a_panel_has_the_weights_of_its_head_rows_as_queries_and_the_tokens_beside_it(model, tokenizer, tmp_path, monkeypatch):
    seen, drawn = [], text_pictures.draw_panel
    monkeypatch.setattr(text_pictures, "draw_panel", lambda panel, *args: (drawn(panel, *args), seen.append(panel)))
    text = sentence(tokenizer, PAIR, 16)
    path, maps = draw_text_maps(model, text, tmp_path / "heads.png"), head_maps(model, text.ids)
    assert Image.open(path).width > 3 * Image.open(path).height
    assert [panel.get_title().split(":")[0] for panel in seen] == [f"head {head}" for head in maps.heads.tolist()]
    assert {panel.get_title().split(", ")[1] for panel in seen} == {"runs", "does not run"}
    for panel, weights in zip(seen, maps.weights, strict=True):
        assert np.array_equal(panel.images[0].get_array(), weights.numpy())  # row 0 on top: the first token as a query
        assert [label.get_text() for label in panel.get_xticklabels()] == list(text.tokens)
        assert [label.get_text() for label in panel.get_yticklabels()] == list(text.tokens)
    assert not any(stack._forward_hooks for stack in prune_stacks(model))


def test_long_texts_are_cut_with_a_note_and_dollar_signs_are_no_formulas(tmp_path):
    save_encoder(tmp_path / "long", "text_mini_budget", max_length=40, num_heads=2)
    text = Sentence(torch.randint(3, 30, (1, 40)), ("$a_$_$", "internationalisation") * 20)
    path = draw_text_maps(checkpoint.load(tmp_path / "long"), text, tmp_path / "heads.png", block=0)
    assert Image.open(path).width < 1500
    assert caption(0, SHOWN_TOKENS, 40) == "block 0: rows are queries, columns are keys; the first 24 of 40 tokens"
    assert caption(1, 9, 9) == "block 1: rows are queries, columns are keys"
    assert (short("x" * SHOWN_LETTERS), short("x" * 15)) == ("x" * 14, "x" * 13 + "…")


def test_macs_are_those_of_each_text_alone_at_its_own_length(model):
    ids = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [7], [9, 4, 3]]
    macs = [hand_macs(len(text), [int(layer["heads"]) for layer in layer_statistics(model, torch.tensor([text]))]) for text in ids]
    found = analyse_texts(model, Texts(ids, np.array([0, 1, 1]), ["a", "b", "c"]), ["a", "b", "c"], torch.device("cpu"), batch_size=2)
    assert found["overall"]["macs"] == round(sum(macs) / 3)
    assert found["overall"]["tokens"] == 13 / 3
    assert "text" in found["units"]["macs"]
    assert [row["inputs"] for row in found["by_class"]] == [1, 1, 2, 2]
