"""Values of a config are checked at birth, each with one sentence."""

import pytest

from vit_prune.train.config import TrainConfig


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"device": "meta"}, "device must be cpu, cuda or cuda:NUMBER, got 'meta'"),
        ({"importance": "column_mean", "keep": 0.5}, "importance column_mean needs vp.calibrate"),
        ({"keep": 0}, r"^keep must be in \(0, 1\], got 0$"),
        ({"keep": 1.5}, r"^keep must be in \(0, 1\], got 1.5$"),
        ({"eval_keep": "linear:1:0"}, r"^eval_keep: keep must be in \(0, 1\], got 0.0$"),
        ({"keep": "linaer:1:.5"}, "did you mean linear"),
        ({"dataset": "digit"}, "unknown dataset 'digit'; did you mean digits"),
        ({"opt": "adamww"}, "unknown opt 'adamww'; did you mean adamw"),
        ({"sched": "step"}, "unknown sched 'step'; there are cosine, constant"),
        ({"clip_mode": "max", "clip_grad": 1.0}, "unknown clip_mode 'max'; there are norm, value, agc"),
        ({"amp_dtype": "float8"}, "unknown amp_dtype 'float8'; did you mean float16"),
        ({"distillation": "warm"}, "unknown distillation 'warm'; there are soft, hard"),
        ({"train_only": ("bais",)}, "unknown part in train_only 'bais'; did you mean bias"),
        ({"keep_warmup_epochs": 3}, "keep_warmup_epochs needs keep"),
        ({"keep": 0.5, "keep_warmup_epochs": 300}, "keep_warmup_epochs must be less than epochs, got 300 of 300"),
        ({"layer_decay": 0.0}, r"layer_decay must be in \(0, 1\], got 0.0"),
        ({"grad_accum_steps": 0}, "grad_accum_steps must be > 0, got 0"),
        ({"amp_dtype": "bfloat16"}, "amp_dtype bfloat16 does nothing without amp: give amp too, or leave amp_dtype at float16"),
        ({"clip_mode": "agc"}, "clip_mode agc does nothing without clip_grad"),
        ({"kd_temperature": 2.0}, "kd_temperature 2.0 does nothing without teacher"),
        ({"no_aug": True, "mixup": 0.8}, "no_aug leaves nothing random, and mixup is given"),
        ({"opt": "adahessian"}, "opt adahessian needs gradients of gradients"),
        ({"resume": "auto"}, "resume auto looks for OUTPUT/EXPERIMENT: give --experiment"),
        ({"resume": "x", "experiment": "y"}, "resume x names the run's folder already"),
        ({"teacher_checkpoint": "x"}, "teacher_checkpoint x does nothing without teacher"),
        ({"no_aug": True, "aug_repeats": 3}, "no_aug leaves nothing random, and aug_repeats is given"),
        ({"dataset": "synthetic/0"}, "synthetic"),
        ({"lr": 0}, "^lr must be > 0, got 0"),
        ({"lr": float("nan")}, "^lr must be > 0, got nan"),
        ({"lr": "fast"}, "^lr must be a number, got 'fast'"),
        ({"epochs": 2.5}, "^epochs must be a whole number, got 2.5"),
        ({"epochs": True}, "^epochs must be a whole number, got True"),
        ({"batch_size": 0}, "^batch_size must be > 0, got 0"),
        ({"smoothing": 1.0}, r"^smoothing must be in \[0, 1\), got 1.0"),
        ({"hflip": 1.1}, r"^hflip must be in \[0, 1\], got 1.1"),
        ({"scale": (1.0, 0.5)}, "^scale must be two numbers > 0, the smaller one first"),
        ({"scale": (0.5,)}, "^scale must be two numbers, got"),
        ({"aa": "rand-x9"}, "^aa must be a policy of timm"),
        ({"device": "gpu"}, "^device must be cpu, cuda or cuda:NUMBER, got 'gpu'"),
        ({"dropped": "burn"}, "^dropped must be one of drop, merge, got 'burn'"),
        ({"rule": "mass"}, "rule mass takes tau"),
        ({"rule": "mass", "tau": 0.9, "eval_keep": 0.5}, "eval_keep belongs to the rule topk"),
        ({"query_key_free": -1}, "query_key_free must be a number of blocks >= 0"),
        ({"tome_r": "fast"}, "^tome_r: r must be a number of merges"),
        ({"epochs": 3, "warmup_epochs": 3}, "warmup_epochs must be less than epochs, got 3 of 3"),
        ({"mixup": 0.8, "batch_size": 3}, "batch_size must be even, got 3"),
        ({"model_kwargs": {"keep": 0.5}}, "model_kwargs repeats keep"),
        ({"no_aug": True, "hflip": 0.5}, "no_aug leaves nothing random, and hflip is given"),
        ({"experiment": "../x"}, "experiment must be the name of a folder"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_a_wrong_value_is_refused_by_name(values, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**values)


@pytest.mark.parametrize("keep", [(1, 0.5), [1, 0.5], "1,.5", " 1,0.5"], ids=str)
def test_every_way_to_write_a_schedule_becomes_the_same_text(keep):
    assert TrainConfig(keep=keep).keep == "1,0.5"


def test_whole_numbers_are_numbers_so_that_recipes_compare_equal():
    assert TrainConfig(lr=1) == TrainConfig(lr=1.0)
    assert type(TrainConfig(lr=1).lr) is float


def test_only_the_pruning_arguments_that_were_given_reach_the_model():
    assert TrainConfig().pruning_kwargs() == {}
    assert TrainConfig(keep=0.5, dropped="merge", query_key_free=0).pruning_kwargs() == {"keep": "0.5", "dropped": "merge", "query_key_free": 0}
