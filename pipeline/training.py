"""The training stages: pretrain (phase one), finetune (phase two) and train (end to end)."""

import json
import logging
import math
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data.corpus import Corpus
from data.loader import Loader
from haed.chunks import chunk_keys
from haed.iem import UnigramCounts
from haed.model import HAED
from haed.objective import Objective
from haed.ranks import Ranks
from pipeline.checkpoints import Checkpoint, Checkpoints
from pipeline.config import differences
from pipeline.device import Compute, compute, release_memory
from pipeline.launcher import joined, launch, started_by_torchrun
from pipeline.metrics import Listener, Metrics, Progress
from pipeline.options import FinetuneOptions, Options, Phase, PhaseOptions
from pipeline.resuming import restore, restore_learning
from pipeline.runs import RunFolder
from pipeline.sharding import open_shards
from pipeline.trainer import Stop, Trainer
from pipeline.validation import Validation
from pipeline.windows import grid

log = logging.getLogger(__name__)


@dataclass
class Trained:
    """Outcome of a training stage."""

    run: str
    phase: str
    checkpoint: str
    steps: int
    seconds: float
    epochs: float
    resumed_from: int


def pretrain(options: Options, stop: Stop = lambda: False, listener: Listener = lambda record: None) -> Trained:
    """Phase one: encoder and main model by the IEM loss, with a share of the decoder. See `run_phase`."""
    return run_phase("pretrain", options, stop, listener)


def finetune(options: Options, stop: Stop = lambda: False, listener: Listener = lambda record: None) -> Trained:
    """Phase two: everything for exact likelihood, from the phase one of this run or `start_from`. See `run_phase`."""
    return run_phase("finetune", options, stop, listener)


def train(options: Options, stop: Stop = lambda: False, listener: Listener = lambda record: None) -> Trained:
    """End to end for exact likelihood, without a phase one. See `run_phase`."""
    return run_phase("train", options, stop, listener)


def run_phase(phase: Phase, options: Options, stop: Stop, listener: Listener = lambda record: None) -> Trained:
    """Trains one phase of a run, from its last checkpoint if there is one.

    Args:
        phase: pretrain, finetune or train.
        options: the run's options.
        stop: asked after every step; true makes the phase save and raise `trainer.Interrupted`.
        listener: called with every metrics record, and after every step with where the phase is.

    Raises:
        FileNotFoundError: the shards, or the phase one to start from, are not there.
        ValueError: a checkpoint of another model or corpus, or one where `resume` forbids it.
        BlockingIOError: another process trains this run.
    """
    if options.launcher.processes > 1 and not started_by_torchrun():
        return Trained(**launch(phase, options, stop, listener))
    with joined() as ranks:
        return _run_phase(phase, options, ranks, stop, listener)


def _run_phase(phase: Phase, options: Options, ranks: Ranks, stop: Stop, listener: Listener) -> Trained:
    limits: PhaseOptions = getattr(options, phase)
    corpus = open_shards(options)
    first = _phase_one(options) if phase == "finetune" else None
    run = RunFolder(Path(options.runs_dir) / options.name)
    checkpoints = Checkpoints(run.phase(phase) / "checkpoints", options.checkpoint.keep)
    _check_resume(options.resume, checkpoints)
    ranks.wait()
    with ExitStack() as held:
        if ranks.first:
            run = RunFolder.create(options)
            run.remember(corpus)
            held.enter_context(run.lock())
        ranks.wait()
        machine = compute(options)
        trainer = build_trainer(limits, options, corpus, checkpoints, machine, stop, ranks)
        newest = checkpoints.newest()
        if newest is not None:
            _check_identity(newest, trainer.identity)
            restore(trainer, newest)
            if ranks.first:
                checkpoints.point("latest", newest.path)  # a kill, or damage, may have left it behind
            log.info("%s goes on from step %d", phase, trainer.position.step)
            _say_what_changed(newest.state, options, ranks.size)
        elif first is not None:
            _check_identity(first, trainer.identity)
            restore_learning(trainer, first)
            log.info("finetune starts from %s", first.path)
        resumed = trainer.position.step
        progress, metrics = Progress(phase, limits), None
        if ranks.first:
            metrics = Metrics(run.phase(phase), resumed, [progress, listener])
        try:
            position = trainer.fit(metrics)
        finally:
            if metrics is not None:
                progress.close()
                metrics.close()
            del trainer
            release_memory()
        ranks.wait()
    return Trained(
        str(run.path), phase, str(checkpoints.latest()), position.step, position.seconds, position.epochs, resumed
    )


def build_model(options: Options, corpus: Corpus) -> HAED:
    """The model of `options` for a corpus, initialised from the seed."""
    torch.manual_seed(options.seed)
    chunker = corpus.chunker()
    return HAED(options.model, options.iem, chunker.k, chunker.vocabulary, chunker.fixed, options.batch.context)


def build_trainer(
    limits: PhaseOptions,
    options: Options,
    corpus: Corpus,
    checkpoints: Checkpoints,
    machine: Compute,
    stop: Stop,
    ranks: Ranks | None = None,
) -> Trainer:
    """Puts model, loss, data and optimizer together, not yet restored from anything."""
    ranks = ranks or Ranks()
    objective = Objective(
        build_model(options, corpus).to(machine.device),
        options.iem,
        limits.iem_weight,
        limits.decode_fraction,
        options.batch.pieces,
        ranks,
        options.seed,
    )
    if options.compile:
        objective.compile_main()
    if objective.candidates is not None and options.iem.counts == "corpus":
        count_corpus(objective.candidates.unigram, corpus)

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

    loader = stream(0)
    negatives = None
    if limits.iem_weight and options.iem.extra_batches:
        negatives = stream(1)
    wanted = options.validation.windows if options.validation.times and limits.decode_fraction else 0
    alone = {"everything": 0, "decoder": math.inf, "decoder_first": options.finetune.decoder_steps}
    return Trainer(
        limits,
        options,
        objective,
        loader,
        negatives,
        checkpoints,
        machine,
        identity(options, corpus),
        stop,
        Validation.of(corpus, options.batch.context, wanted),
        alone[limits.trains] if isinstance(limits, FinetuneOptions) else 0,
    )


def count_corpus(unigram: UnigramCounts, corpus: Corpus) -> None:
    """Counts the chunks of the train split, a pass over its shards."""
    k = corpus.chunker().k
    for shard in corpus.of("train"):
        for sample in corpus.read(shard):
            rows = torch.from_numpy(grid(sample.tokens, sample.lengths, k))
            keys = chunk_keys(rows, torch.from_numpy(sample.lengths.astype(np.uint8)))
            unigram.update(keys, torch.ones(len(keys)))


def identity(options: Options, corpus: Corpus) -> dict[str, Any]:
    """What must be the same for a checkpoint to fit: model, corpus and context, under their option names."""
    return {
        "model": asdict(options.model),
        "iem": {"head": options.iem.head, "similarity": options.iem.similarity},
        "batch": {"context": options.batch.context},
        "chunker": asdict(options.chunker),
        "corpus": corpus.digest,
    }


def _check_identity(checkpoint: Checkpoint, wanted: dict[str, Any]) -> None:
    """Raises ValueError naming the first option in which a checkpoint's model or corpus differs."""
    for key, was, now in differences(checkpoint.state["identity"], wanted):
        raise ValueError(
            f"{checkpoint.path} was trained with {key}={was}, this run has {key}={now}: "
            "set it back, or choose another name= for the new run"
        )


def _say_what_changed(state: dict[str, Any], options: Options, ranks: int) -> None:
    """Logs the options of training that are others than those of a checkpoint, and other numbers of ranks and threads."""
    given = asdict(options)
    for section in ("pretrain", "finetune", "train", "optimizer", "iem", "batch", "launcher", "seed", "precision"):
        for key, before, after in differences(state["options"].get(section), given[section], section):
            log.info("changed since then: %s=%s, was %s", key, after, before)
    if len(state["sums"]) != ranks:
        log.info("ranks: %d now, %d then; they go on where the others stopped in the data", ranks, len(state["sums"]))
    if state["threads"] != torch.get_num_threads():
        log.info(
            "threads: %d now, %d then; sums round otherwise, so the result will differ in its last bits",
            torch.get_num_threads(),
            state["threads"],
        )


def _check_resume(resume: str, checkpoints: Checkpoints) -> None:
    there = (checkpoints.folder / "latest").is_file()
    if resume == "never" and there:
        raise ValueError(
            f"resume=never, but {checkpoints.folder} has a checkpoint: choose another name=, or resume=auto"
        )
    if resume == "required" and not there:
        raise ValueError(f"resume=required, but {checkpoints.folder} has no checkpoint: use resume=auto to start")


def _phase_one(options: Options) -> Checkpoint:
    """The newest checkpoint of the phase one that finetune starts from."""
    source = options.finetune.start_from
    folder = RunFolder.find(source, options.runs_dir).path if source else Path(options.runs_dir) / options.name
    first = Checkpoints(folder / "pretrain" / "checkpoints").newest()
    if first is None:
        raise FileNotFoundError(
            f"{folder} has no phase one to start from: run `haed pretrain` first, or name a run with finetune.start_from"
        )
    return first


def outcome(trained: Trained) -> str:
    """One line for people."""
    resumed = f", resumed at step {trained.resumed_from}" if trained.resumed_from else ""
    return (
        f"{trained.phase}: {trained.steps} steps in {trained.seconds:.0f} s, {trained.epochs:.2f} epochs{resumed}; "
        f"{trained.checkpoint}"
    )


def as_json(trained: Trained) -> str:
    """One JSON object for programs."""
    return json.dumps(asdict(trained))
