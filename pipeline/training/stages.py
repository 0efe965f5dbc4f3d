"""The training stages: pretrain (phase one), finetune (phase two) and train (end to end).

A phase with a checkpoint is resumed. If it is finished, it keeps the options it was trained with. Options that differ
from the checkpoint's are logged.
"""

import hashlib
import json
import logging
import math
from contextlib import ExitStack, nullcontext, suppress
from copy import deepcopy
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from data.corpus import Corpus
from data.loader import Loader
from haed.chunk.mixture import ChunkVocabulary
from haed.distributed import Ranks
from haed.registry import make_objective
from pipeline.config import (
    Difference,
    FinetuneOptions,
    Options,
    Phase,
    PhaseOptions,
    check_training,
    check_windows,
    diff_trees,
    format_value,
    is_mixed,
    max_known_chunks,
    set_option,
    write_override,
)
from pipeline.run.checkpoints import (
    Checkpoint,
    Checkpoints,
    Identity,
    PhaseOne,
    State,
    explain_too_few_steps,
    has_checkpoint,
    identity_differences,
    list_checkpoints,
    load_chosen,
    make_identity,
    read_newest_state,
    read_position,
    resolve_pointer,
)
from pipeline.run.device import Compute, release_memory, setup_compute
from pipeline.run.known import make_vocabulary, store_known_chunks
from pipeline.run.metrics import Listener, Metrics, Position, Progress, read_newest_step
from pipeline.run.run_directory import LATEST_FIRST, RunFolder
from pipeline.run.sharding import check_corpus, open_shards
from pipeline.run.system import build_system, check_memory, estimate_memory, free_memory
from pipeline.run.trackers import open_trackers
from pipeline.run.windows import fixed_subset
from pipeline.signals import StopRequested, TrainingInterrupted, interruptible_section, signals_end_process
from pipeline.suggestions import format_command
from pipeline.training.launcher import is_launched, is_torchrun_child, join_ranks, launch_stage, print_record
from pipeline.training.optimizer import learning_rate_share
from pipeline.training.rescue import save_beside
from pipeline.training.trainer import (
    PhaseProgress,
    Stop,
    Trainer,
    TrainingResult,
    UnsavedCheckpointError,
    Validation,
    restore_checkpoint,
    restore_learning,
    restore_reading,
)

_ENDS = ("steps", "seconds", "epochs", "patience")  # options of a phase that end it
_SHARED = ("seed", "batch", "iem", "optimizer", "validation")  # what any phase is trained with, beside its own section


def options_if_finished(phase: Phase, options: Options, newest: Checkpoint, say: bool) -> Options | None:
    """Return the options with those that a finished phase was trained with; None if the phase is resumed.

    A phase is finished if the given limits are reached. Lower ones end it where it is, and only they are taken over.
    With `say`, options that come too late to have an effect are logged.
    """
    reached = _phase_progress(newest.state)
    if not reached.is_finished(getattr(options, phase)):
        return None
    kept, late = _restore_sections(newest.state["options"], options, (*_SHARED, phase))
    if not reached.is_finished(getattr(kept, phase)):
        ends = [each for each in late if each.key in {f"{phase}.{name}" for name in _ENDS}]
        for each in ends:
            set_option(kept, each.key, each.now)
        late = [each for each in late if each not in ends]
    for each in late if say else ():
        was = format_value(each.was)
        log.warning("%s is finished: %s has no effect, it was trained with %s", phase, each.given_now, was)
    return kept


def keep_trained_options(phase: Phase, run: RunFolder, options: Options) -> Options:
    """Return the options with those that the run's other phases were trained with, whatever is given for them now.

    Lower limits in config.yaml that ended a phase where it is stay.
    """
    for other in LATEST_FIRST:
        state = read_newest_state(run.phase_folder(other) / "checkpoints") if other != phase else {}
        if not (trained := state.get("options")):
            continue
        with suppress(OSError, ValueError, KeyError, TypeError):  # damaged: whoever needs it says so
            limits = getattr(run.load_options(), other)
            if _phase_progress(state).is_finished(limits):
                trained[other] |= {name: getattr(limits, name) for name in _ENDS}
        options, late = _restore_sections(trained, options, (other,))
        for each in late:
            again = format_command(other)
            log.info("config.yaml keeps %s until %s trains with %s", each.given_before, again, format_value(each.now))
    return options


def _phase_progress(state: State) -> PhaseProgress:
    return PhaseProgress(Position(state["step"], **state["phase"]), stale=state["stale"])


def _restore_sections(
    then: dict[str, Any], options: Options, sections: tuple[str, ...]
) -> tuple[Options, list[Difference]]:
    """Return a copy of the options with these sections as in a checkpoint, and the differences."""
    current, kept = asdict(options), deepcopy(options)
    late = [each for name in sections for each in diff_trees(then[name], current[name], name)]
    for each in late:
        set_option(kept, each.key, each.was)
    return kept, late


def log_changed_options(state: State, options: Options, ranks: int) -> None:
    """Log the training options, and the numbers of ranks and threads, that differ from those of a checkpoint."""
    current, then = asdict(options), state["options"]
    for section in (*LATEST_FIRST, *_SHARED, "launcher", "precision", "device", "deterministic", "compile"):
        for each in diff_trees(then.get(section), current[section], section):
            log.info("changed since the checkpoint: %s (before: %s)", each.given_now, format_value(each.was))
    if len(state["sums"]) != ranks:
        log.info("ranks: %d (before: %d). They resume at the same place in the data", ranks, len(state["sums"]))
    if state["threads"] != torch.get_num_threads():
        log.info(
            "threads: %d (before: %d). Sums are rounded differently, so the last bits of the result will differ",
            torch.get_num_threads(),
            state["threads"],
        )


def log_changed_limits(phase: Phase, checkpoint: Checkpoint, trainer: Trainer) -> None:
    """Log how changed limits affect the learning rate, and why a phase has ended or its best checkpoint stays."""
    limits, position = trainer.phase, trainer.position
    names = ("steps", "seconds", "epochs", "rate_from", "rate_to")
    before = replace(limits, **{name: checkpoint.state["options"][phase][name] for name in names})
    was, now = (learning_rate_share(position, each, trainer.options.optimizer) for each in (before, limits))
    if was != now and position.progress(limits) < 1:
        log.info(
            "the limits changed: %.0f %% of the phase is done (before: %.0f %%). The learning rate continues "
            "at %.1f %% of its peak (before: %.1f %%), recomputed for the new limits",
            *(100 * share for share in (position.progress(limits), position.progress(before), now, was)),
        )
    if trainer.progress.has_converged(limits):
        log.info("the phase ended early by %s.patience=%d. Raise it to continue", phase, limits.patience)
    best = resolve_pointer(trainer.checkpoints.folder, "best")
    if trainer.validation is None and best is not None and position.progress(limits) < 1:
        log.warning(
            "validation is off, so %s stays the best checkpoint. It is evaluated, sampled and indexed", best.name
        )


def warn_lost_steps(folder: Path, step: int, is_finished: bool) -> None:
    """Warn of steps after the resumed checkpoint, according to the metrics of the phase, that no whole one holds."""
    if (done := read_newest_step(folder / "metrics.jsonl")) > step:
        log.warning(
            "the steps after %s, up to at least %s, are lost: no whole checkpoint has them. They are %s",
            f"{step:,}",
            f"{done:,}",
            "not repeated, as the limits are reached" if is_finished else "repeated",
        )


def check_fixed_options(phase: Phase, newest: Checkpoint, options: Options) -> None:
    """Raise ValueError if an option differs from the checkpoint's that cannot change within a phase."""
    now, was = asdict(getattr(options, phase)), newest.state["options"][phase]
    for name in ("start_from", "part_from", "part_to"):
        if name in now and now[name] != was[name]:
            raise ValueError(
                f"{phase}.{name} cannot change within a phase, in which it was {format_value(was[name])} so far. Set "
                f"{write_override(f'{phase}.{name}', was[name])}, or use another name= for a new run"
            )


def load_phase_one(options: Options) -> Checkpoint:
    """Load the phase-one checkpoint that finetune starts from: the best by its validations, else the newest."""
    run = RunFolder.from_options(options).find_first_run(options)
    try:
        return load_chosen(run.phase_folder("pretrain") / "checkpoints", training=True)
    except FileNotFoundError:
        again = format_command("pretrain", run.path)
        if not (run.path / "config.yaml").exists():
            again = f"{format_command('pretrain')} with the same options"
        advice = f"Run {again} first, or name a run in finetune.start_from"
        raise FileNotFoundError(f"{run.path} has no phase one. {advice}") from None


def log_start_checkpoint(first: Checkpoint) -> None:
    """Log which phase-one checkpoint finetune starts from, and why."""
    newest, best = list_checkpoints(first.path.parent)[-1], resolve_pointer(first.path.parent, "best")
    which = "the newest checkpoint of phase one"
    if first.path == best:
        which = "the best checkpoint of phase one by validation"
        which += f", which ended at {newest.name}" if newest != best else ", and the newest"
    log.info("finetune starts from %s: %s", first.path, which)


def warn_newer_phase_one(phase: Phase, newest: Checkpoint, options: Options) -> None:
    """Warn if phase one has another checkpoint than the one that phase two began with; phase two does not use it."""
    if phase != "finetune":
        return
    try:
        first = RunFolder.from_options(options).find_first_run(options).select_checkpoint("pretrain")
    except (FileNotFoundError, ValueError):  # it is not needed any more
        return
    if first.digest != newest.state["first"]["digest"]:
        log.warning(
            "phase one has another checkpoint now, %s. finetune continues without that. To start from it, "
            "use another name= and finetune.start_from=%s",
            first.path,
            options.finetune.start_from or options.name,
        )


def _warn_unused_phase_one(options: Options, is_begun: bool) -> None:
    """Warn before phase one is trained if phase two of the same run does not use it."""
    if options.finetune.start_from:
        log.warning(
            "finetune of this run starts from phase one of %s (finetune.start_from), not from this one",
            options.finetune.start_from,
        )
    elif not is_begun and has_checkpoint(RunFolder.from_options(options).phase_folder("finetune") / "checkpoints"):
        log.warning(
            "finetune of this run began with an earlier phase one, which is gone. It continues without this one, which is trained anew"
        )


log = logging.getLogger(__name__)


def run_phase(
    phase: Phase, options: Options, stop: Stop = lambda: False, listener: Listener = lambda record: None
) -> TrainingResult:
    """Train one phase of a run, from its last checkpoint if there is one.

    Args:
        phase: pretrain, finetune or train.
        options: the run's options.
        stop: called after every step; true makes the phase save and raise `TrainingInterrupted`.
        listener: called with every metrics record, and after every step with the position.

    Raises:
        ConfigError: the phase has no limit, or this kind of model has no such phase.
        FileNotFoundError: the shards, or the phase one to start from, do not exist.
        ValueError: the checkpoint is of another model or corpus, or `resume` does not allow it.
        BlockingIOError: another process trains this run.
        FolderLostError: the run was removed, moved or replaced meanwhile; the training is saved beside it, if possible.
    """
    check_training(phase, options)
    if options.launcher.processes > 1 and not is_torchrun_child():
        return launch_stage(phase, options, stop, listener)
    try:
        with join_ranks() as ranks, interruptible_section():  # until the first step
            return _run_phase(phase, options, ranks, stop, listener)
    except StopRequested:
        raise TrainingInterrupted(f"stopped before the first step of {phase}, so there is nothing to save") from None


def _run_phase(phase: Phase, options: Options, ranks: Ranks, stop: Stop, listener: Listener) -> TrainingResult:
    """Lock the run, check everything that could be refused, and only then write into it."""
    limits: PhaseOptions = getattr(options, phase)
    run = RunFolder.from_options(options)
    if ranks.is_first:
        _warn_unused_launcher_options(options, ranks.size)
    with ExitStack() as held:
        guard = held.enter_context(run.lock()) if ranks.is_first else None
        ranks.wait_for_all()
        checkpoints = Checkpoints(run.phase_folder(phase) / "checkpoints", options.checkpoint.keep)
        _check_resume(options.resume, checkpoints.folder)
        corpus = open_shards(options)
        newest = checkpoints.load_newest()
        identity = make_identity(options, corpus.digest)
        _check_ranks_agree(ranks, newest, identity)
        if newest is not None:
            check_same_identity(newest, identity, run)
        _check_identity(run, identity, phase)
        first = load_phase_one(options) if phase == "finetune" and newest is None else None
        done = options_if_finished(phase, options, newest, say=ranks.is_first) if newest is not None else None
        if done:
            options, limits = done, getattr(done, phase)
        else:
            check_windows(limits, options, ranks.size)
        trainer = build_trainer(limits, options, corpus, checkpoints, setup_compute(options), stop, ranks)
        if newest is not None:
            best = checkpoints.find_best(newest)
            _restore_trainer(trainer, newest, phase, has_best=best is not None)
        elif first is not None:
            check_same_identity(first, trainer.identity)
            restore_learning(trainer.training_state, first)
            trainer.first = cast(PhaseOne, {"digest": first.digest, **read_position(first.path.parent)})
            _continue_reading(trainer, first, options)
        ranks.wait_for_all()
        noted = keep_trained_options(phase, run, options) if ranks.is_first else options
        if ranks.is_first:
            run = RunFolder.create(noted)
            run.write_corpus_record(corpus)
            if is_mixed(options, limits):
                store_known_chunks(run, corpus, max_known_chunks(options))
        if phase == "pretrain" and ranks.is_first:
            _warn_unused_phase_one(options, newest is not None)
        if newest is not None:
            if ranks.is_first:
                checkpoints.restore_pointers(newest, best)
            _log_resumed(phase, newest, trainer, options, done is not None)
        elif first is not None:
            log_start_checkpoint(first)
        resumed, progress, metrics = trainer.position.step, Progress(phase, limits), None
        if ranks.is_first:
            warn_lost_steps(run.phase_folder(phase), resumed, done is not None)
            listeners: list[Listener] = [print_record] if is_launched() else [progress, listener]
            trackers = [each.write_record for each in held.enter_context(open_trackers(noted, phase, resumed))]
            metrics = Metrics(run.phase_folder(phase), resumed, trackers, listeners, trainer.progress.validated_at.step)
        ranks.wait_for_all()  # with patience: others may begin with an exchange that has less of it
        try:
            position = trainer.fit(metrics, partial(run.restore_missing_files, noted, corpus))
        except TrainingInterrupted as error:
            raise TrainingInterrupted(f"{error} of {phase}") from None
        except UnsavedCheckpointError as error:
            assert guard is not None and metrics is not None  # the first rank's
            raise save_beside(error, phase, options, guard, corpus, metrics.read_all()) from None
        finally:
            checkpoints.close()
            if metrics is not None:
                progress.close()
                metrics.close()
            del trainer
            release_memory()
        ranks.wait_for_all()
    remark = explain_too_few_steps(checkpoints.folder)
    if remark and ranks.is_first and not done:
        log.warning("%s", remark)
    reached = (position.step, position.seconds, position.epochs)
    return TrainingResult(str(run.path), phase, str(checkpoints.latest_path()), *reached, resumed, remark)


# Phase one: encoder and main model by the IEM loss, with a share of the decoder.
pretrain = partial(run_phase, "pretrain")
# Phase two: everything for exact likelihood, from the phase one of this run or of `finetune.start_from`.
finetune = partial(run_phase, "finetune")
# End to end for exact likelihood, without a phase one.
train = partial(run_phase, "train")


def check_run(phase: Phase, options: Options) -> None:
    """Raise early the errors that `run_phase` would raise about a run's corpus and model."""
    digest, run = check_corpus(options), RunFolder.from_options(options)
    _check_resume(options.resume, run.phase_folder(phase) / "checkpoints")
    if digest is None:
        open_shards(options)  # which may say that there are none
    else:
        check_identity(options, digest)


def check_identity(options: Options, digest: str) -> None:
    """Raise ValueError if the run of this name was trained with another model, or another corpus than that of a digest."""
    _check_identity(RunFolder.from_options(options), make_identity(options, digest))


def _check_ranks_agree(ranks: Ranks, newest: Checkpoint | None, identity: Identity) -> None:
    """Raise ValueError if the ranks would go on from different checkpoints, with other models, or on other corpora."""
    known = json.dumps([newest and newest.digest, identity], sort_keys=True)
    number = int(hashlib.sha256(known.encode()).hexdigest()[:12], 16)  # exact in float64
    highest, lowest = ranks.max_over_ranks([number, -number])
    if highest != -lowest:
        raise ValueError(
            "the processes would not resume from the same checkpoint, or have other options or another corpus. Is the "
            "folder of the run shared by all machines? See the messages above, and run the same command again"
        )


def _restore_trainer(trainer: Trainer, newest: Checkpoint, phase: Phase, has_best: bool) -> None:
    """Restore a trainer from its checkpoint, without validations that were of another loss or of a lost checkpoint."""
    options, limits = trainer.options, trainer.phase
    check_fixed_options(phase, newest, options)
    trainer.progress, trainer.first = restore_checkpoint(trainer.training_state, newest, options), newest.state["first"]
    if math.isfinite(trainer.progress.best) and not has_best:
        trainer.progress.best, trainer.progress.stale = math.inf, 0
        log.info("the checkpoint with the best validation is gone, so earlier validations are not compared")
    then = replace(limits, **{name: newest.state["options"][phase][name] for name in ("decode_fraction", "iem_weight")})
    # A phase is validated by the loss of its decoder, and of its mixture, if it has them.
    was, now = ((each.decode_fraction > 0, is_mixed(options, each)) for each in (then, limits))
    if was != now:
        trainer.progress.best, trainer.progress.stale = math.inf, 0
        log.info("the loss of the validation changed, so earlier validations are not compared")


def _log_resumed(phase: Phase, newest: Checkpoint, trainer: Trainer, options: Options, is_finished: bool) -> None:
    """Log where a phase goes on, or that it is finished, and what differs from then."""
    log.info("%s %s step %s", phase, "is finished, at" if is_finished else "resumes from", f"{trainer.position.step:,}")
    warn_newer_phase_one(phase, newest, options)
    if not is_finished:
        log_changed_options(newest.state, options, trainer.ranks.size)
    log_changed_limits(phase, newest, trainer)


def _find_vocabulary(limits: PhaseOptions, options: Options, corpus: Corpus, ranks: Ranks) -> ChunkVocabulary | None:
    """Return the known chunks of a mixture, which the first rank finds for all; None without a mixture."""
    if not is_mixed(options, limits):
        if options.model.mixture.known != 0 and ranks.is_first:
            why = "without the IEM loss (iem_weight=0)" if not limits.iem_weight else "of pixels, most of which are new"
            log.info("no mixture in a phase %s: the decoder alone is the likelihood", why)
        return None
    if not ranks.is_first:
        ranks.wait_for_all()  # until the first one has written them
    vocabulary = make_vocabulary(corpus, max_known_chunks(options))
    if ranks.is_first:
        ranks.wait_for_all()
    return vocabulary


def _warn_unused_launcher_options(options: Options, ranks: int) -> None:
    """Warn of options of the launcher that this number of ranks leaves without effect."""
    if options.launcher.shard and ranks == 1:
        log.warning("launcher.shard=true has no effect in one process. Set launcher.processes to the number of GPUs")
    if options.iem.group and ranks == 1:
        log.warning("iem.group=%d has no effect in one process", options.iem.group)
    if ranks != options.launcher.processes:  # torchrun was called by hand
        log.warning("ranks: %d, as torchrun was told, not launcher.processes=%d", ranks, options.launcher.processes)


def build_trainer(
    limits: PhaseOptions,
    options: Options,
    corpus: Corpus,
    checkpoints: Checkpoints,
    machine: Compute,
    stop: Stop,
    ranks: Ranks | None = None,
) -> Trainer:
    """Build a trainer from model, loss, data and optimizer; nothing is restored yet."""
    ranks = ranks or Ranks()
    is_sharded = options.launcher.shard and ranks.size > 1
    weights = estimate_memory(options, corpus.build_chunker(), limits, ranks.size if is_sharded else 1)
    check_memory(weights, free_memory(machine.device))
    known = _find_vocabulary(limits, options, corpus, ranks)
    system = build_system(options, corpus.build_chunker())
    if corpus.form:
        system.smooth_values()
    remarks = list(system.option_warnings)
    if options.iem.terms and not limits.iem_weight:
        remarks.append("iem.terms has no effect in this phase: without the IEM loss (iem_weight=0) nothing has terms")
    for remark in remarks if ranks.is_first else ():
        log.warning("%s", remark)
    distinct = corpus.statistics["train"].distinct_chunks if "train" in corpus.statistics else 0
    with signals_end_process() if ranks.size > 1 else nullcontext():  # both wait for other ranks
        if is_sharded:
            from haed.fsdp import ShardedModule, shard_blocks  # takes a second

            mesh = shard_blocks(system, machine.device)
        objective = make_objective(
            system.to(machine.device),
            replace(options.iem, cells=options.iem.choose_cells(distinct)),
            iem_weight=limits.iem_weight,
            decode_fraction=limits.decode_fraction,
            pieces=options.batch.pieces,
            ranks=ranks,
            lexicon=known,
        )
    if options.batch.pieces > 1:  # the first call imports PyTorch's compiler, a second or more that is no training
        objective.recompute(torch.clone, torch.zeros(()), use_reentrant=False)
    if is_sharded and options.compile and ranks.is_first:
        log.warning("compile=true compiles nothing with launcher.shard=true")
    elif not is_sharded and options.compile and not objective.compile_training() and ranks.is_first:
        log.warning(
            "compile=true compiles nothing here, because shapes differ from step to step. It compiles a main transformer "
            "with batch.pieces=1, and models of tokens other than spacebyte with chunks of a fixed size"
        )

    def stream(number: int) -> Loader:
        return Loader(
            corpus,
            "train",
            context=options.batch.context,
            sequences=options.batch.sequences,
            seed=options.seed,
            rank=ranks.rank,
            ranks=ranks.size,
            part=(limits.part_from, limits.part_to),
            stream=number,
            options=options.loader,
        )

    negatives = stream(1) if limits.iem_weight and options.iem.extra_batches else None
    windows = fixed_subset(corpus, options.batch.context, options.validation.windows if options.validation.times else 0)
    alone = {"everything": 0, "decoder": math.inf, "decoder_first": options.finetune.decoder_steps}
    return Trainer(
        limits,
        options,
        objective,
        stream(0),
        negatives,
        checkpoints,
        machine,
        make_identity(options, corpus.digest),
        stop,
        Validation(windows, limits.decode_fraction > 0, known) if windows is not None else None,
        alone[limits.trains] if isinstance(limits, FinetuneOptions) else 0,
        ShardedModule(objective, mesh) if is_sharded else None,
    )


def _check_identity(run: RunFolder, wanted: Identity, but: Phase | None = None) -> None:
    """Raise ValueError if any phase of the run, `but` one, was trained with another model or corpus.

    A run has one config.yaml, so its phases share both.
    """
    for phase in LATEST_FIRST:
        if phase != but and has_checkpoint(run.phase_folder(phase) / "checkpoints"):
            try:
                present = run.select_checkpoint(phase)
            except ValueError:  # damaged: whoever needs it raises this again
                continue
            check_same_identity(present, wanted, run)


def check_same_identity(checkpoint: Checkpoint, wanted: Identity, run: RunFolder | None = None) -> None:
    """Raise ValueError naming the options in which a checkpoint's model or corpus differs from a run's identity.

    If the run is given, the message names its own shards, if they still exist. Else the checkpoint is the phase one that a
    new run starts from.
    """
    if other := identity_differences(checkpoint.identity, wanted):
        remedy = "set it back"
        if other[0].startswith("corpus="):
            advice = "Restore them"
            with suppress(OSError, ValueError):
                if run:
                    location = run.open_corpus().location
                    advice = f"Resume with its own corpus by source.kind=shards source.path={location}"
            remedy = f"its source or shards changed. {advice}"
        instead = "use another name= for a new run" if run else "start from another run with finetune.start_from="
        raise ValueError(
            f"{checkpoint.path} was trained with {other[0]}, but this run has {other[1]}: {remedy}, or {instead}"
        )


def _continue_reading(trainer: Trainer, first: Checkpoint, options: Options) -> None:
    """Continue in the data where phase one stopped, if both phases read the same windows in one order.

    Tables of hashed rows memorise the data that phase one has read. Starting with the same data again teaches less
    (dev/LOG.md).
    """
    then = first.state["options"]
    one, two = then["pretrain"], options.finetune
    orders = ((then["seed"], one["part_from"], one["part_to"]), (options.seed, two.part_from, two.part_to))
    if orders[0] != orders[1]:
        log.info(
            "finetune reads its data from the beginning: seed, part_from and part_to are %s, but %s in phase one",
            *orders[::-1],
        )
        return
    restore_reading(trainer.training_state, first)
    loader = trainer.training_state.loader
    log.info("finetune continues reading where phase one stopped, after %.2f epochs", loader.epochs_passed)
    loader.restart_epoch_count()


def _check_resume(resume: str, folder: Path) -> None:
    there = has_checkpoint(folder)
    if resume == "never" and there:
        raise ValueError(f"resume=never, but {folder} has a checkpoint. Use another name=, or resume=auto")
    if resume == "required" and not there:
        raise ValueError(f"resume=required, but {folder} has no checkpoint. Use resume=auto to start")


def format_outcome(trained: TrainingResult) -> str:
    """Format the result of a stage as one line for people."""
    resumed = f", resumed at step {trained.resumed_from:,}" if trained.resumed_from else ""
    if trained.resumed_from == trained.steps:
        resumed = "; its limits were reached before, nothing was trained"
    few = ", too few to learn anything" if trained.remark else ""
    return (
        f"{trained.phase}: {trained.steps:,} steps in {trained.seconds:,.0f} s, {trained.epochs:.2f} epochs{few}{resumed}; "
        f"{trained.checkpoint}"
    )
