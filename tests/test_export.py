import copy
import io
import sys

import pytest
import timm
import torch
from timm.models.deit import VisionTransformerDistilled
from torch import nn

import vit_prune as vp
from tests.helpers import randomise_bias, randomise_gates, single_thread, tiny_named, tiny_vit
from vit_prune.export import ExportError, ParityError, compare, export_onnx, export_program, onnx_session, save_program
from vit_prune.export import graph as graph_module
from vit_prune.export.parity import random_images
from vit_prune.fuse import fuse

pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.filterwarnings("ignore:the token bias is all zero")

MERGE = vp.Columns(keep=0.5, dropped="merge")
GUMBEL = vp.Columns(keep=0.5, sampling="gumbel")
HOSTS = {
    "plain": (dict, None),
    "pruned": (dict, vp.TokenBias(keep=0.5)),
    "merged": (dict, [vp.TokenBias(), MERGE]),
    "column_mean": (dict, vp.Columns(keep=0.5, importance="column_mean", dropped="merge")),
    "gumbel": (dict, [vp.TokenBias(), GUMBEL]),
    "query-key-free": (dict, vp.TokenBias(keep=0.5, query_key_free=1)),
    "systematic": (dict, [vp.TokenBias(), vp.Columns(keep=0.5, importance="prob", dropped="merge", sampling="systematic")]),
    "tome": (dict, vp.ToMe(r=3)),
    "heads": (dict, [vp.TokenBias(), vp.Columns(keep=0.5, importance="prob"), vp.BudgetFormer(heads=2)]),
    "registers": (lambda: {"reg_tokens": 4}, vp.TokenBias(keep=0.5)),
    "distilled": (lambda: {"host": VisionTransformerDistilled}, vp.TokenBias(keep=0.5)),
    "average": (lambda: {"global_pool": "avg"}, vp.TokenBias(keep=0.5)),
}
SLOW = ("plain", "pruned", "merged", "gumbel", "registers", "average")
EXPORTS = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in HOSTS]


@pytest.fixture(autouse=True)
def _one_thread():
    with single_thread():
        yield


def build(name="pruned", **kwargs):
    arguments, methods = HOSTS[name]
    model = tiny_vit(**{"depth": 2 if name == "query-key-free" else 1} | arguments() | kwargs)
    if name == "column_mean":
        vp.calibrate(model, [torch.randn(4, 3, 32, 32)], rank=8)
    return model if methods is None else randomise_gates(randomise_bias(vp.patch(model, methods)))


def run(path, images):
    return torch.from_numpy(onnx_session(path, threads=1).run(None, {"images": images.numpy()})[0])


@torch.no_grad()
def assert_same(path, model, *shape):
    images = torch.randn(*shape)
    torch.testing.assert_close(run(path, images), model(images), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", EXPORTS)
def test_onnx_computes_what_torch_does_at_batches_that_were_not_exported(name, tmp_path):
    model = build(name)
    report = export_onnx(model, tmp_path / "model.onnx")
    assert [(one.batch, one.size) for one in report.parity] == [(1, (32, 32)), (3, (32, 32))]
    assert max(one.difference for one in report.parity) < 1e-5
    assert report.bytes == (tmp_path / "model.onnx").stat().st_size
    assert_same(tmp_path / "model.onnx", model, 7, 3, 32, 32)


@pytest.mark.parametrize("name", ["pruned", pytest.param("column_mean", marks=pytest.mark.slow), pytest.param("query-key-free", marks=pytest.mark.slow)])
def test_a_fused_model_is_exported(name, tmp_path):
    model = build(name)
    export_onnx(fuse(copy.deepcopy(model)), tmp_path / "model.onnx")
    assert_same(tmp_path / "model.onnx", model, 2, 3, 32, 32)


def test_every_size_keeps_as_many_columns_as_torch_does(tmp_path):
    """.55 * 100 is 55.000000000000007 in float64 and 55.000002 in float32: not a 56th column."""
    model = randomise_bias(vp.patch(tiny_vit(dynamic_img_size=True, depth=1), vp.TokenBias(keep=0.55)))
    report = export_onnx(model, tmp_path / "model.onnx", dynamic_size=True)
    assert [one.size for one in report.parity] == [(32, 32), (32, 32), (48, 24), (48, 24)]
    for height, width in ((80, 80), (8, 8), (16, 160), (24, 88), (64, 40)):
        assert_same(tmp_path / "model.onnx", model, 2, 3, height, width)


@pytest.mark.parametrize("tokens", [16, pytest.param(1024, marks=pytest.mark.slow)])
def test_ties_go_to_the_lower_index_as_in_torch(tokens, tmp_path):
    model = vp.patch(tiny_vit(depth=1, img_size=8 * int(tokens**0.5)), vp.TokenBias(keep=0.5))  # every bias is 0
    report = export_onnx(model, tmp_path / "model.onnx", batch_sizes_checked=(2,))
    assert report.parity[0].undecided == 0
    model.blocks[0].attn.prune.columns.set_keep_ratio(1.0)
    images = torch.randn(2, 3, *report.parity[0].size)
    assert (run(tmp_path / "model.onnx", images) - model(images)).abs().max() > 1e-3  # the columns matter


def test_the_model_is_left_as_it_was_and_its_mode_does_not_matter(tmp_path):
    model = build().double().train()
    model.set_grad_checkpointing(True)
    model.blocks[0].requires_grad_(False)
    before = {name: (value, value.clone(), value.requires_grad) for name, value in model.named_parameters()}
    export_onnx(model, tmp_path / "model.onnx", batch_sizes_checked=(1,))
    assert all(module.training for module in model.modules())
    assert model.grad_checkpointing
    for name, value in model.named_parameters():
        same, values, requires_grad = before[name]
        assert value is same
        assert torch.equal(value, values)
        assert value.requires_grad == requires_grad
    assert_same(tmp_path / "model.onnx", model.float().eval(), 2, 3, 32, 32)


def test_a_mismatch_raises_and_the_last_good_file_stays(tmp_path, monkeypatch):
    path = tmp_path / "model.onnx"
    path.write_bytes(b"the last good one")
    monkeypatch.setattr(graph_module, "stable_sort", wrong_sort)
    with pytest.raises(ParityError, match=r"differs from torch by .* at batch 1, 32 x 32 pixels; the tolerance is 0.0001"):
        export_onnx(build(), path)
    assert path.read_bytes() == b"the last good one"
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]


def wrong_sort():
    from onnxscript import opset18 as op

    return lambda x, dim=-1, descending=False, stable=None: op.TopK(x, op.Shape(x, start=dim), axis=dim, largest=1, sorted=1)


def test_large_weights_lie_beside_the_graph_and_are_found_there(tmp_path, monkeypatch):
    monkeypatch.setattr("vit_prune.export.EMBEDDED", 1000)
    model = build()
    report = export_onnx(model, tmp_path / "model.onnx", batch_sizes_checked=(1,))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]
    assert report.bytes == sum(file.stat().st_size for file in tmp_path.iterdir())
    assert_same(tmp_path / "model.onnx", model, 2, 3, 32, 32)


class Cliff(nn.Module):
    """Jumps by 1 where the first value of an image passes `edge`, as a model does where two columns are nearly equal."""

    in_chans = 3

    def __init__(self, edge, inclusive=False):
        super().__init__()
        self.edge, self.inclusive = edge, inclusive

    def forward(self, images):
        first = images[:, 0, 0, :1]
        return (first >= self.edge if self.inclusive else first > self.edge).float()


def test_an_image_on_which_rounding_decides_is_replaced_and_counted():
    edge = random_images(Cliff(0), 2, (4, 4), seed=0)[0, 0, 0, 0]
    exported = Cliff(edge, inclusive=True)  # the other way at the edge itself, on which the first image lies
    parity = compare(lambda images: [exported(images)], Cliff(edge), (4, 4), 2, 1e-4)
    assert (parity.difference, parity.undecided) == (0.0, 1)
    assert "1 images replaced" in str(parity)


def test_a_difference_that_noise_does_not_explain_is_a_mismatch():
    for wrong in (lambda images: [1 - Cliff(0.1)(images)], lambda images: [torch.full((len(images), 1), torch.nan)]):
        with pytest.raises(ParityError, match="differs from torch by"):
            compare(wrong, Cliff(0.1), (4, 4), 2, 1e-4)


def test_a_model_in_which_rounding_decides_everything_says_so():
    class Everywhere(Cliff):
        def forward(self, images):
            return (images[:, 0, 0, :1] * 1e7).sin()

    with pytest.raises(ParityError, match=r"16 images in 8 draws .* rounding decides in this model"):
        compare(lambda images: [Everywhere(0)(images * (1 + 1e-6))], Everywhere(0), (4, 4), 2, 1e-4)


@pytest.mark.parametrize(
    ("make", "options", "sentence"),
    [
        (lambda: vp.patch(tiny_vit(), vp.Columns(rule="mass", tau=0.9, importance="column_mean")), {}, "calibrate"),
        (lambda: vp.patch(tiny_vit(), [vp.TokenBias(), vp.Columns(rule="mass", tau=0.9)]), {}, "the rule mass keeps another number of columns"),
        (lambda: vp.patch(tiny_vit(), [vp.TokenBias(), vp.Columns(rule="threshold", tau=1.0)]), {}, "the rule threshold keeps another number"),
        (lambda: randomise_gates(vp.patch(tiny_vit(), vp.BudgetFormer())), {}, "each image's budget decides how many heads run"),
        (build, {"dynamic_size": True}, "built with dynamic_img_size=True, and this VisionTransformer was not"),
        (build, {"img_size": 48}, "does not take images of 48 x 48 pixels: Input height"),
        (build, {"img_size": 0}, "img_size must be a positive number"),
        (build, {"batch_sizes_checked": ()}, "batch sizes >= 1"),
        (build, {"tolerance": 0}, "tolerance must be > 0"),
        (lambda: tiny_vit(device="meta"), {}, "meta device has no weights"),
    ],
)
def test_what_cannot_be_exported_is_refused_in_one_sentence(make, options, sentence, tmp_path):
    with pytest.raises(ValueError, match=sentence):
        export_onnx(make(), tmp_path / "model.onnx", **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["onnxscript", "onnxruntime"])
def test_a_missing_package_names_the_extra(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=rf"^{name} is missing: pip install 'vit_prune\[export\]'$"):
        export_onnx(build(), tmp_path / "model.onnx")


def test_a_session_takes_its_threads(tmp_path):
    export_onnx(nn.Flatten(), tmp_path / "model.onnx", img_size=4, batch_sizes_checked=(1,))  # ONNX of any model
    assert onnx_session(tmp_path / "model.onnx", threads=2).get_session_options().intra_op_num_threads == 2
    with pytest.raises(ValueError, match="threads must be at least 1, got 0"):
        onnx_session(tmp_path / "model.onnx", threads=0)


def loaded(program):
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file).module()


@pytest.mark.parametrize("name", EXPORTS)
@torch.no_grad()
def test_a_saved_program_computes_what_eager_does_at_every_batch(name):
    model = build(name)
    program = loaded(export_program(model.train()))
    for batch in (1, 2, 5):
        images = torch.randn(batch, 3, 32, 32)
        torch.testing.assert_close(program(images), model.eval()(images), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["column_mean", pytest.param("pruned", marks=pytest.mark.slow)])
@torch.no_grad()
def test_a_fused_model_is_a_program_too(name):
    model = build(name)
    program = loaded(export_program(fuse(copy.deepcopy(model))))
    images = torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(program(images), model(images), rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_program_of_any_size_and_what_torch_cannot_save(tmp_path):
    model = build(dynamic_img_size=True)
    program = export_program(model, dynamic_size=True)
    for shape in ((1, 3, 32, 32), (5, 3, 48, 24), (2, 3, 16, 16)):
        images = torch.randn(*shape)
        torch.testing.assert_close(program.module()(images), model(images), rtol=0, atol=1e-5)
    with pytest.raises(ExportError, match="export one size, or ONNX"):
        save_program(program, tmp_path / "model.pt2")
    assert list(tmp_path.iterdir()) == []
    save_program(export_program(tiny_vit(dynamic_img_size=True, depth=1), dynamic_size=True), tmp_path / "model.pt2")
    assert torch.export.load(tmp_path / "model.pt2").module()(torch.randn(1, 3, 40, 32)).shape == (1, 5)


@pytest.mark.slow
def test_several_outputs_and_a_host_of_another_kind(tmp_path):
    features = timm.create_model("vit_mini28_bias", features_only=True, depth=2, keep=0.5, out_indices=(0, 1)).eval()
    export_onnx(features, tmp_path / "features.onnx", batch_sizes_checked=(2,))
    assert [value.name for value in onnx_session(tmp_path / "features.onnx").get_outputs()] == ["output_0", "output_1"]


@pytest.mark.slow
def test_naflexvit_is_exported_for_images(tmp_path):
    model = randomise_bias(vp.patch(tiny_named("naflexvit_base_patch16_gap", img_size=64, patch_size=16), vp.TokenBias(keep=0.5)))
    export_onnx(model, tmp_path / "model.onnx", img_size=64)  # it takes any, and its own is 384
    assert_same(tmp_path / "model.onnx", model, 2, 3, 64, 64)


FULL = {
    "ti": ("deit_ti_bias", {}),
    "s": ("deit_s_bias", {}),
    "b": ("deit_b_bias", {}),
    "registers": ("deit_s_bias", {"reg_tokens": 4}),
    "average": ("deit_s_bias", {"global_pool": "avg"}),
    "distilled": ("deit_small_distilled_patch16_224", {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", FULL)
def test_full_size_models_agree_within_1e_4_at_batch_1_and_3(name, fused, tmp_path):
    torch.manual_seed(0)
    architecture, arguments = FULL[name]
    model = timm.create_model(architecture, **arguments).eval()
    if name == "distilled":
        vp.patch(model, vp.TokenBias(keep=0.5))
    else:
        vp.set_keep(model, 0.5)
    randomise_bias(model)
    report = export_onnx(fuse(model) if fused else model, tmp_path / "model.onnx")
    assert max(one.difference for one in report.parity) < 1e-4
