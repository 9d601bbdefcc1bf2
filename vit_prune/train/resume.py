"""Go on with a run that ended early: what resume.pt holds, what must be the same, and what is told to have changed."""

import logging
from pathlib import Path

from torch.utils.data import IterableDataset

from vit_prune.train.build import peak_lr
from vit_prune.train.distributed import same_over_ranks, world_size
from vit_prune.train.job import Job
from vit_prune.train.labels import check_classes
from vit_prune.train.recipe import plain
from vit_prune.train.run_config import AUTO, RunConfig
from vit_prune.train.state import RECIPE, RESUME, History, RunFolder

log = logging.getLogger(__name__)

FORMAT = 1
SAME = (  # without these the weights, the optimizer's state or the average do not fit
    "model", "model_kwargs", "num_classes", "img_size", "per_head", "query_key_free", "tome_r", "rule", "tau", "importance", "dropped", "sampling",
    "keep", "eval_keep", "keep_warmup_epochs", "train_only", "opt", "momentum", "layer_decay", "weight_decay", "model_ema",
    "tokenizer", "vocab_size", "max_length",
)  # fmt: skip
FREE = (  # change nothing
    "output", "experiment", "resume", "device", "data_dir", "train_file", "test_file", "dataset_dir", "log_interval", "tensorboard", "checkpoint_interval",
)  # fmt: skip


def run_path(config: RunConfig) -> Path:
    """The run's folder."""
    return Path(config.output) / config.experiment if config.resume in (None, AUTO) else Path(config.resume)


def recipe_of(run: str | Path) -> Path:
    """The recipe of a run. Raises: FileNotFoundError where there is no such run."""
    path = Path(run) / RECIPE
    if not path.is_file():
        raise FileNotFoundError(f"no run to resume in {run}: it has no {RECIPE}")
    return path


def capture(job: Job, history: History) -> dict:
    """All that the rest of the run depends on, in tensors and plain values. Orders and draws are functions of seed and epoch, and need no state."""
    training = job.training
    return {
        "format": FORMAT,
        "config": plain(job.config),
        "world_size": world_size(),
        "classes": [str(name) for name in job.train_set.classes],
        "images": len(job.train_set),
        "digests": digests(job),
        "peak_lr": peak_lr(job.config),
        "rows": history.rows,
        "layers": history.layers,
        "updates_made": training.updates_made,
        "skipped_in_a_row": training.skipped_in_a_row,
        "model": training.model.state_dict(),
        "ema": None if training.ema is None else training.ema.module.state_dict(),
        "optimizer": training.optimizer.state_dict(),
        "scaler": training.update.scaler.state_dict(),
    }


def restore(state: dict, job: Job) -> History:
    """Put everything back. Raises: ValueError for a change that cannot be resumed from, before anything is changed; others are told."""
    check_same(state, job)
    tell(state, job)
    training = job.training
    training.model.load_state_dict(state["model"])
    if training.ema is not None:
        training.ema.module.load_state_dict(state["ema"])
    training.optimizer.load_state_dict(state["optimizer"])
    if state["scaler"] and training.update.scaler.is_enabled():
        training.update.scaler.load_state_dict(state["scaler"])
    training.updates_made, training.skipped_in_a_row = state["updates_made"], state["skipped_in_a_row"]
    done = state["rows"][-1]["epoch"]
    training.scheduler.step_update(done * training.updates_per_epoch)
    training.scheduler.step(done)
    return History(state["rows"], state["layers"])


def check_same(state: dict, job: Job) -> None:
    """Raises: ValueError for other weights, another optimizer or other classes than the run began with."""
    if state.get("format") != FORMAT:
        raise ValueError(f"{RESUME} has format {state.get('format')!r}, this version reads {FORMAT}: finish the run with the version that began it")
    if fixed := [text for name, text in changes(state, job.config).items() if name in SAME]:
        raise ValueError(f"cannot resume with {', '.join(fixed)}: keep what the run began with, or start a new one with --initial-checkpoint")
    check_classes("the run", job.training.model, tuple(map(str, job.train_set.classes)), tuple(state["classes"]))


def changes(state: dict, config: RunConfig) -> dict[str, str]:
    """{field: what it was and is} of every setting that is another now. A field that a run of an earlier version has not was at its default."""
    began = plain(type(config)()) | state["config"]
    now, then = ({**values, "keep": values["keep"] or "1"} for values in (plain(config), began))
    return {name: f"{name} {then[name]!r} -> {value!r}" for name, value in now.items() if then[name] != value}


def tell(state: dict, job: Job) -> None:
    """Say what goes on as it was and what does not. Raises: ValueError for a complete run with other settings."""
    config, epoch = job.config, state["rows"][-1]["epoch"]
    free = FREE if isinstance(job.train_set, IterableDataset) else (*FREE, "workers")  # a stream is divided among them
    told = [text for name, text in changes(state, config).items() if name not in free]
    if world_size() != state["world_size"]:
        told.append(f"processes {state['world_size']} -> {world_size()} ({describe_batch(state, config)})")
    if digests(job) != state.get("digests", digests(job)):
        told.append("the texts are others")
    for name, before, after in (("images", state["images"], len(job.train_set)), ("peak learning rate", state["peak_lr"], peak_lr(config))):
        if before != after:
            told.append(f"{name} {before:g} -> {after:g}")
    if told and epoch >= config.epochs:
        raise ValueError(f"the run is complete, with other settings: {'; '.join(told)}. Give the new one another --experiment")
    log.info(f"resumed after epoch {epoch} of {config.epochs}: weights, optimizer, scaler, average and the rows of the summary are kept")
    if told:
        log.warning(f"changed since the run began: {'; '.join(told)}. What follows is not what the run as it began would have given")


def digests(job: Job) -> list[str | None]:
    """Of what is trained and evaluated on, where the data set knows its own: a file of another name may hold the same, and one of the same name not."""
    return [getattr(data, "digest", None) for data in (job.train_set, job.eval_set)]


def describe_batch(state: dict, config: RunConfig) -> str:
    before = state["config"]["batch_size"] * state["world_size"] * state["config"]["grad_accum_steps"]
    after = config.batch_size * world_size() * config.grad_accum_steps
    return f"{before} images per update, as before" if before == after else f"{before} -> {after} images per update"


def find_state(config: RunConfig) -> dict | None:
    """What there is to resume from; None where the run starts from the beginning. Raises: FileNotFoundError where `resume` names no run."""
    if config.resume is None:
        return None
    if config.resume != AUTO:
        recipe_of(config.resume)
    folder = RunFolder(run_path(config))
    state = folder.read()
    if not same_over_ranks(0 if state is None else state["rows"][-1]["epoch"]):
        raise ValueError(f"the processes see different runs in {folder.path}: OUTPUT must be a folder that all nodes share")
    if state is None and folder.path.is_dir():
        log.info(f"{folder.path} holds no finished epoch: the run starts from its beginning")
    return state
