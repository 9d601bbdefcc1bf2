import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
HEAVY = (
    "triton", "detectron2", "transformers", "matplotlib", "fvcore", "tyro", "sklearn", "skimage", "onnx", "onnxruntime", "pycocotools", "peft",
    "datasets", "tokenizers", "codecarbon",
)  # fmt: skip


def loaded(statement: str, folder: Path = ROOT) -> set[str]:
    code = f"import sys\nbefore = set(sys.modules)\n{statement}\nprint(*{{name.split('.')[0] for name in set(sys.modules) - before}})"
    return set(subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True).stdout.split())


def test_importing_the_package_loads_nothing_heavy_beyond_torch_and_timm():
    ours, theirs = loaded("import vit_prune"), loaded("import timm")
    assert "vit_prune" in ours
    assert (ours - theirs) & set(HEAVY) == set()


def test_models_are_registered_by_the_import():
    assert "vit_prune" in loaded("import timm, vit_prune\nassert timm.is_model('deit_s_bias') and timm.is_model('vit_mini28_bias')")
    assert "vit_prune" in loaded("import timm, vit_prune\nassert timm.is_model('text_4l8h') and timm.is_model('text_mini_bias')")


def test_the_folder_named_kernels_harms_no_import_from_the_repository_root():
    if "transformers" in loaded("import importlib.util as u\nif u.find_spec('transformers'): import transformers"):
        assert "transformers" in loaded("import transformers", folder=ROOT.parent)
    assert "vit_prune" in loaded("import vit_prune.kernels\nassert vit_prune.kernels.__file__.replace(chr(92), '/').endswith('kernels/__init__.py')")
