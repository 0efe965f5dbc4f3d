"""A phase that has a checkpoint: what trained it, whether it is finished, and what is said where it goes on otherwise."""

import logging
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from pipeline.options import Options, Phase
from pipeline.run.checkpoints import Checkpoint, Checkpoints
from pipeline.run.folder import PHASES, RunFolder, command
from pipeline.run.metrics import Position, read
from pipeline.run.saved import State, pointed, saved, trained_with
from pipeline.train.optimizer import rate
from pipeline.train.state import TrainState
from pipeline.train.trainer import Trainer
from pipeline.trees import Difference, differences, put

log = logging.getLogger(__name__)
_SHARED = ("seed", "batch", "iem", "optimizer", "validation")  # what any phase is trained with, beside its own section


def finished(phase: Phase, options: Options, newest: Checkpoint, say: bool) -> Options | None:
    """Of a phase that is finished, the options with what it was trained with; None: it goes on.

    It is finished if the limits of its checkpoint are reached and the given ones as well: lower ones only end it where it is.

    Args:
        phase: that it is.
        options: as they are given.
        newest: its checkpoint.
        say: whether to log what of them comes too late.
    """
    state = newest.state
    kept, late = _as_in(state["options"], options, (*_SHARED, phase))
    reached = TrainState(Position(state["step"], **state["phase"]), stale=state["stale"])
    if not all(reached.is_finished(getattr(each, phase)) for each in (options, kept)):
        return None
    for each in late if say else ():
        log.warning(
            "%s is finished: %s=%s does not change it, it was trained with %s", phase, each.key, each.now, each.was
        )
    return kept


def as_trained(phase: Phase, run: RunFolder, options: Options) -> Options:
    """The options with what the other phases of the run were trained with, whatever is given for them now."""
    for other in PHASES:
        if other != phase and (then := trained_with(run.phase(other) / "checkpoints")):
            options, late = _as_in(then, options, (other,))
            for each in late:
                log.info("config.yaml keeps %s=%s until `haed %s` trains with %s", each.key, each.was, other, each.now)
    return options


def _as_in(then: dict[str, Any], options: Options, sections: tuple[str, ...]) -> tuple[Options, list[Difference]]:
    """A copy of the options with these sections as a checkpoint has them, and where they differ."""
    given, kept = asdict(options), deepcopy(options)
    late = [each for name in sections for each in differences(then[name], given[name], name)]
    for each in late:
        put(kept, each.key, each.was)
    return kept, late


def say_what_changed(state: State, options: Options, ranks: int) -> None:
    """Logs the options of training that are others than those of a checkpoint, and other numbers of ranks and threads."""
    given, then = asdict(options), state["options"]
    for section in (*PHASES, *_SHARED, "launcher", "precision"):
        for each in differences(then.get(section), given[section], section):
            log.info("changed since then: %s=%s, was %s", each.key, each.now, each.was)
    if len(state["sums"]) != ranks:
        log.info("ranks: %d now, %d then; they go on where the others stopped in the data", ranks, len(state["sums"]))
    if state["threads"] != torch.get_num_threads():
        log.info(
            "threads: %d now, %d then; sums round otherwise, so the result will differ in its last bits",
            torch.get_num_threads(),
            state["threads"],
        )


def say_where(phase: Phase, checkpoint: Checkpoint, trainer: Trainer) -> None:
    """Logs what other limits do to the learning rate, and why a phase does not go on or its best checkpoint not move."""
    limits, position = trainer.phase, trainer.position
    names = ("steps", "seconds", "epochs", "rate_from", "rate_to")
    before = replace(limits, **{name: checkpoint.state["options"][phase][name] for name in names})
    was, now = (rate(position, each, trainer.options.optimizer) for each in (before, limits))
    if was != now:
        log.info(
            "other limits: %.0f %% of the phase is done, it was %.0f %%; the learning rate goes on at %.1f %% of its peak, "
            "was %.1f %%, as if these limits had stood from the start",
            *(100 * share for share in (position.progress(limits), position.progress(before), now, was)),
        )
    if trainer.state.has_converged(limits):
        log.info("the phase ended by %s.patience=%d; raise that for it to go on", phase, limits.patience)
    best = pointed(trainer.checkpoints.folder, "best")
    if trainer.validation is None and best is not None and position.progress(limits) < 1:
        log.warning(
            "without validation %s stays the best checkpoint, which is evaluated, sampled and indexed", best.name
        )


def say_what_was_lost(folder: Path, step: int) -> None:
    """Warns of steps that a phase had done after its checkpoint, as its metrics tell: a kill took them.

    Args:
        folder: of the phase.
        step: of the checkpoint from which it goes on, or 0.
    """
    done = int(max((record.get("step", 0) for record in read(folder / "metrics.jsonl")), default=0))
    if done > step:
        log.warning(
            "steps after %d were lost, to %d at least: the process ended before it had saved them; they are done again",
            step,
            done,
        )


def phase_one(options: Options) -> Checkpoint:
    """The checkpoint of the phase one that finetune starts from: the best by its validations, else the newest."""
    run = RunFolder.of(options).first(options)
    first = Checkpoints(run.phase("pretrain") / "checkpoints").best(training=True)
    if first is None:
        raise FileNotFoundError(
            f"{run.path} has no phase one to start from: run `{command('pretrain', run)}` first, or name a run with "
            "finetune.start_from"
        )
    return first


def say_where_it_starts(first: Checkpoint) -> None:
    """Logs with which checkpoint of phase one finetune starts, and why."""
    newest, best = saved(first.path.parent)[-1], pointed(first.path.parent, "best")
    which = "the newest checkpoint of phase one"
    if first.path == best:
        which = "the best one of phase one by its validations"
        which += f", which ended at {newest.name}" if newest != best else ", and its newest"
    log.info("finetune starts from %s: %s", first.path, which)


def say_what_came_before(phase: Phase, newest: Checkpoint, options: Options) -> None:
    """Logs that phase one was trained further since phase two last saved, which knows nothing of that."""
    if phase != "finetune":
        return
    try:
        first = phase_one(options)
    except (FileNotFoundError, ValueError):  # it is not needed any more
        return
    if first.path.stat().st_mtime > newest.path.stat().st_mtime:
        log.warning(
            "phase one was trained on to %s since: finetune goes on without that; another name= and "
            "finetune.start_from=%s begin with it",
            first.path,
            options.name,
        )
