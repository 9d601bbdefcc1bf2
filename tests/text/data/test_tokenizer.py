"""Tokenizers: deterministic, cut to length, and never all padding."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.text.helpers import rows
from vit_prune.text.data.tokenizer import encode, load_tokenizer, train_tokenizer

pytest.importorskip("tokenizers")
TEXTS = [row["text"] for row in rows(12)] + ["Ärger über ÄRGER", "tied tide edit diet"]
AGAIN = "import sys; from tests.text.data.test_tokenizer import TEXTS; from vit_prune.text.data.tokenizer import train_tokenizer; "
AGAIN += "print(*(train_tokenizer(kind, TEXTS, 60).to_str() for kind in sys.argv[1:]), sep=chr(10))"


@pytest.fixture(params=["wordpiece", "bpe"])
def tokenizer(request):
    return train_tokenizer(request.param, TEXTS, 60)


def test_the_same_texts_give_the_same_tokenizer_in_another_process():
    kinds = ("wordpiece", "bpe")
    command = [sys.executable, "-W", "ignore", "-c", AGAIN, *kinds]
    other = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=True).stdout.splitlines()
    assert other == [train_tokenizer(kind, TEXTS, 60).to_str() for kind in kinds]


def test_it_has_the_size_asked_for_lower_cases_and_pads_with_0(tokenizer):
    assert tokenizer.get_vocab_size() == 60
    assert [tokenizer.token_to_id(token) for token in ("[PAD]", "[UNK]", "[SEP]")] == [0, 1, 2]
    assert encode(tokenizer, [("CAT dog",)], 10) == encode(tokenizer, [("cat DOG",)], 10)


def test_texts_are_cut_to_length_of_a_pair_the_longer_one_first(tokenizer):
    long = " ".join(["cat"] * 50)
    assert len(encode(tokenizer, [(long,)], 7)[0]) == 7
    short, cut = encode(tokenizer, [("oak",), ("oak", long)], 12)
    assert len(cut) == 12
    assert cut[: len(short)] == short
    assert cut[len(short)] == 2  # [SEP]


def test_no_text_is_all_padding(tokenizer):
    assert encode(tokenizer, [("",), ("  ",)], 8) == [[1], [1]]
    assert encode(tokenizer, [("", "")], 8) == [[2]]
    assert all(0 not in ids for ids in encode(tokenizer, [("[PAD]",), ("cat [PAD] [PAD]",), ("[PAD]", "[PAD]")], 8))


def test_saved_and_loaded_it_cuts_the_same(tokenizer, tmp_path):
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert encode(load_tokenizer(tmp_path / "tokenizer.json"), [(text,) for text in TEXTS], 6) == encode(tokenizer, [(text,) for text in TEXTS], 6)


def test_a_template_of_the_tokenizers_own_is_kept(tokenizer, tmp_path):
    from tokenizers.processors import TemplateProcessing

    tokenizer.post_processor = TemplateProcessing(single="[UNK] $A [SEP]", special_tokens=[("[UNK]", 1), ("[SEP]", 2)])
    ids = encode(tokenizer, [("cat",)], 10)[0]
    assert (ids[0], ids[-1]) == (1, 2)


def test_a_file_that_is_no_tokenizer_or_numbers_otherwise_is_named(tmp_path):
    from tokenizers import Tokenizer, models

    path = tmp_path / "tokenizer.json"
    with pytest.raises(FileNotFoundError, match=r"no tokenizer .*tokenizer\.json"):
        load_tokenizer(path)
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is no tokenizer\.json"):
        load_tokenizer(path)
    Tokenizer(models.WordPiece(vocab={"[UNK]": 0, "[PAD]": 1}, unk_token="[UNK]")).save(str(path))
    with pytest.raises(ValueError, match=r"gives \[PAD\] the number 1, expected 0"):
        load_tokenizer(path)
    Tokenizer(models.WordPiece(vocab={"[PAD]": 0, "[UNK]": 1}, unk_token="[UNK]")).save(str(path))
    with pytest.raises(ValueError, match=r"has no \[SEP\]"):
        load_tokenizer(path)
    with pytest.raises(ValueError, match=r"tokenizer must be wordpiece or bpe or a tokenizer\.json, got 'words'"):
        train_tokenizer("words", TEXTS, 60)
