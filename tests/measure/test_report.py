import json

import pytest
import torch

import vit_prune as vp
from tests.helpers import tiny_vit
from vit_prune.measure.macs import macs
from vit_prune.measure.report import block_table, macs_table, text_table, write_json

pytestmark = pytest.mark.filterwarnings("ignore:the token bias is all zero")


@pytest.fixture
def result():
    with torch.device("meta"):
        model = tiny_vit(embed_dim=384, num_heads=6)
    return macs(vp.patch(model, [vp.TokenBias(), vp.Columns(keep=0.5, dropped="merge")]))


def cells(table: str, row: int) -> dict[str, str]:
    """A row by header; a header ends where its column of dashes ends."""
    lines = table.splitlines()
    ends = [i for i, char in enumerate(lines[1] + " ") if char == " " and lines[1][i - 1] == "-"]
    spans = list(zip([0, *ends], ends, strict=False))
    return {lines[0][a:b].strip(): lines[row][a:b].strip() for a, b in spans}


def test_flops_and_macs_have_columns_of_their_own(result):
    row = cells(macs_table({"tiny": result}), 2)
    assert row["dense GMACs"] == f"{result.dense / 1e9:.3f}"
    assert row["pruned GMACs"] == f"{result.total / 1e9:.3f}"
    assert row["pruned GFLOPs"] == f"{2 * result.total / 1e9:.3f}"
    assert (row["saved"], row["ceiling saved"]) == (f"{result.saved:.1%}", f"{result.ceiling_saved:.1%}")


def test_a_block_shows_its_m_its_share_and_its_ceiling(result):
    table = block_table(result)
    block, row = result.blocks[0], cells(table, 2)
    assert (row["part"], row["tokens"], row["columns"]) == ("blocks.0", "17", "9")
    assert (row["MMACs"], row["MFLOPs"]) == (f"{block.total / 1e6:.1f}", f"{2 * block.total / 1e6:.1f}")
    assert row["share"] == f"{block.total / result.total:.1%}"
    assert row["overhead MMACs"] == f"{block.overhead / 1e6:.1f}" != "0.0"
    assert row["ceiling saved"] == f"{block.ceiling_saved:.1%}"
    total = cells(table, -1)
    assert (total["part"], total["share"], total["MMACs"]) == ("total", "100.0%", f"{result.total / 1e6:.1f}")


def test_the_shares_of_a_block_table_leave_nothing_out(result):
    table = block_table(result).splitlines()
    shares = [float(cells("\n".join(table), row)["share"].rstrip("%")) for row in range(2, len(table) - 1)]
    assert sum(shares) == pytest.approx(100, abs=0.3)


def test_columns_are_aligned_whatever_is_longest():
    assert text_table(("a", "long header"), [("longer", "1"), ("b", "22")]).splitlines() == [
        "a       long header",
        "------  -----------",
        "longer            1",
        "b                22",
    ]


def test_json_is_complete_or_absent(tmp_path, result):
    path = tmp_path / "macs.json"
    path.write_text("old")
    with pytest.raises(TypeError):
        write_json(path, {"not json": torch.Tensor})
    assert path.read_text() == "old"
    write_json(path, result.to_dict())
    assert json.loads(path.read_text())["macs"] == result.total
    assert list(tmp_path.iterdir()) == [path]
