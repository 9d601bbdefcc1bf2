"""Describe a model so that it can be built again, or refuse it."""

import hashlib
import json

import timm
import torch
from timm.models.naflexvit import NaFlexVit
from torch import Tensor, nn

from vit_prune.checkpoint.common import is_plain, listing, misfits, tuples
from vit_prune.checkpoint.rebuild import build, create, method_from, saved_calibration
from vit_prune.methods.base import MethodConfig
from vit_prune.methods.stack import columns_methods, prune_stacks
from vit_prune.patch.timm import ROOTS
from vit_prune.version import __version__

PREPROCESSING = ("mean", "std", "interpolation", "crop_pct", "crop_mode", "tag", "label_names")  # of timm's pretrained_cfg: another tag normalises otherwise
SWITCHES = ("fused_attn", "grad_checkpointing", "distilled_training")  # flipped after the model is built: recorded, not refused
UNSEEN = ("training", "weight_init_mode", "fix_init", "frozen")  # say nothing about what a loaded model computes
# timm's argument: where the model shows its value
ARGUMENTS = {
    "img_size": "patch_embed.img_size",
    "patch_size": "patch_embed.patch_size",
    "dynamic_img_pad": "patch_embed.dynamic_img_pad",
    "embed_dim": "embed_dim",
    "num_heads": "blocks.0.attn.num_heads",
    "in_chans": "in_chans",
    "num_classes": "num_classes",
    "global_pool": "global_pool",
    "class_token": "has_class_token",
    "reg_tokens": "num_reg_tokens",
    "no_embed_class": "no_embed_class",
    "pool_include_prefix": "pool_include_prefix",
    "dynamic_img_size": "dynamic_img_size",
    "vocab_size": "vocab_size",  # of a text encoder, as the next
    "max_length": "max_length",
}
NAFLEX_ARGUMENTS = ARGUMENTS | {"img_size": "embeds.default_img_size", "patch_size": "embeds.patch_size", "dynamic_img_pad": "embeds.dynamic_img_pad"}
RATES = {
    "drop_rate": ("head_drop.p",),
    "pos_drop_rate": ("pos_drop.p", "embeds.pos_drop.p"),
    "patch_drop_rate": ("patch_drop.prob",),
    "proj_drop_rate": ("blocks.0.attn.proj_drop.p",),
    "attn_drop_rate": ("blocks.0.attn.attn_drop.p",),
    "drop_path_rate": ("blocks.{last}.drop_path1.drop_prob",),
}
FORMAT = 1


def describe(model: nn.Module, model_args: dict, state: dict[str, Tensor]) -> dict:
    """What config.json holds. Raises: ValueError where a model built from it differs."""
    pretrained_cfg = getattr(model, "pretrained_cfg", None) or {}
    architecture = model_args.pop("architecture", None) or pretrained_cfg.get("architecture")
    if not architecture:
        raise ValueError(
            f"this {type(model).__name__} has no timm architecture name: give save(..., model_args={{'architecture': 'vit_tiny_patch16_224', ...}})"
        )
    args = recorded_args(model) | model_args
    lost = [f"{name}={value!r}" for name, value in args.items() if not is_plain(value)]
    plan = getattr(model, "prune_plan", None)
    config = {
        "format": FORMAT,
        "architecture": architecture,
        "model_args": {name: value for name, value in args.items() if is_plain(value)},
        "preprocessing": {key: pretrained_cfg[key] for key in PREPROCESSING if pretrained_cfg.get(key) is not None},
        "prune_plan": None if plan is None else plan.to_dict(),
        **describe_methods(model),
        "settings": {},
        "calibrated": bool(saved_calibration(model, state)),
        "grid_size": read(model, "patch_embed.grid_size"),
        "versions": {"vit_prune": __version__, "torch": str(torch.__version__), "timm": timm.__version__},
    }
    config["model_args"] |= {name: value for name, value in changed_args(model, config).items() if name not in model_args}
    config["settings"] = refuse_difference(model, state, config, lost)
    config = json.loads(json.dumps(config))
    return config | {"digest": hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16]}


def describe_methods(model: nn.Module) -> dict:
    """Raises: ValueError where the blocks differ, or a method cannot be written down."""
    stacks = prune_stacks(model)
    if not stacks:
        return {"methods": [], "impl": "auto", "keep": None}
    blocks = getattr(model, "blocks", ())
    if [read(block, "attn.prune") for block in blocks] != stacks:
        raise ValueError(f"the patched ViT is inside this {type(model).__name__}, or is patched in part: save the ViT itself, patched as a whole")
    if any(stack.configs != stacks[0].configs or stack.impl != stacks[0].impl for stack in stacks):
        raise ValueError("the blocks are patched with different methods: patch all of them with the same ones")
    methods = [config.to_dict() for config in stacks[0].configs]
    for method in methods:
        if method_from(json.loads(json.dumps(method)), "this model").to_dict() != method:
            raise ValueError(f"{method['name']} does not come back from its own to_dict(): {method}")
    columns = columns_methods(model)
    keep = [method.keep_ratio for method in columns] if columns and getattr(columns[0].config, "rule", None) == "topk" else None
    return {"methods": methods, "impl": stacks[0].impl, "keep": keep}


def recorded_args(model: nn.Module) -> dict:
    """timm keeps the arguments of create_model. Those of our entry points are among them, and build no host."""
    ours = {name for cls in MethodConfig.__subclasses__() for name in getattr(cls, "__dataclass_fields__", ())}
    return {name: value for name, value in getattr(model, "_model_args", {}).items() if name not in ours}


def changed_args(model: nn.Module, config: dict) -> dict:
    """Arguments that the model shows and that what timm builds from the config does not."""
    ours, theirs = shown_args(model), shown_args(create(config, "this model", device="meta"))
    follows = {"fc_norm"} if ours.get("global_pool") != theirs.get("global_pool") else set()  # the default follows the pooling
    return {name: value for name, value in ours.items() if value != theirs.get(name) or name in follows}


def shown_args(model: nn.Module) -> dict:
    paths = NAFLEX_ARGUMENTS if isinstance(model, NaFlexVit) else ARGUMENTS
    args = {name: value for name, path in paths.items() if (value := read(model, path)) is not None and is_plain(value)}
    args |= {name: sum(read(model, path) or 0.0 for path in alternatives) for name, alternatives in RATES.items()}
    if isinstance(model, NaFlexVit) and model.embeds.default_img_size is None:
        args["pos_embed_grid_size"] = model.embeds.pos_embed_grid_size
    if isinstance(model, tuple(ROOTS)):
        norms = [not isinstance(norm, nn.Identity) for norm in (model.norm, model.fc_norm)]
        args |= {"depth": len(model.blocks), "final_norm": any(norms), "fc_norm": norms[1]}
    if getattr(model, "prune_plan", None) is not None:
        args["num_heads"] = model.prune_plan.blocks[0].num_heads  # of the host that the plan is replayed on
    return args


def read(module: nn.Module, path: str) -> object:
    """The value at "blocks.{last}.attn.num_heads"; None where there is no such thing."""
    value = module
    for part in path.format(last=len(getattr(module, "blocks", ())) - 1).split("."):
        value = getattr(value, part, None)
    return value


def refuse_difference(model: nn.Module, state: dict[str, Tensor], config: dict, lost: list[str]) -> dict[str, dict]:
    """The switches that were flipped since the model was built. Raises: ValueError where anything else differs from what the config builds."""
    rebuilt = build(config, state, "this model", device="meta")
    settings, wrong = compare_modules(model, rebuilt)
    if misfit := misfits(state, rebuilt.state_dict()):
        wrong.append(f"weights: {misfit}")
    if wrong:
        unsaved = f" (config.json cannot hold {listing(lost)})" if lost else ""
        raise ValueError(
            f"this model cannot be rebuilt: timm.create_model({config['architecture']!r}, **{config['model_args']}){unsaved} differs from it: "
            f"{listing(wrong, 3, '; ')}. Where arguments are missing, give them: save(..., model_args={{...}})"
        )
    return settings


def compare_modules(model: nn.Module, rebuilt: nn.Module) -> tuple[dict[str, dict], list[str]]:
    """Settings to be restored by `load`, {module: {attribute: value}}, and differences that it could not restore, in words."""
    ours, theirs = dict(model.named_modules()), dict(rebuilt.named_modules())
    settings, wrong = {}, [f"{name} is {'here' if name in ours else 'there'} only" for name in sorted(ours.keys() ^ theirs.keys())]
    for name in [name for name in ours if name in theirs]:
        here, there, is_method = ours[name], theirs[name], "prune" in name.split(".")
        built = plain_attributes(there)
        changed = {key: value for key, value in plain_attributes(here).items() if (is_method or key in built) and value != built.get(key)}
        kept = {key: value for key, value in changed.items() if is_method or key in SWITCHES}
        if kept:
            settings[name] = kept
        wrong += [f"{name or 'model'}.{key} is {value!r} here, {built[key]!r} there" for key, value in changed.items() if key not in kept]
        if type(here) is not type(there):
            wrong.append(f"{name or 'model'} is a {type(here).__name__} here, a {type(there).__name__} there")
        elif not changed and here.extra_repr() != there.extra_repr():
            wrong.append(f"{name} is {type(here).__name__}({here.extra_repr()}) here, ({there.extra_repr()}) there")
    return settings, wrong


def plain_attributes(module: nn.Module) -> dict:
    return {key: tuples(value) for key, value in vars(module).items() if key[0] != "_" and key not in UNSEEN and is_plain(value)}
