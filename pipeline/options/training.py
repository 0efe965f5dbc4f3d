"""Options of training: windows, optimizer, phases, checkpoints, validation, processes."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

Phase = Literal["pretrain", "finetune", "train"]


@dataclass(kw_only=True)
class BatchOptions:
    """Options of the batch of windows in one training step."""

    sequences: Annotated[int, Field(ge=1, le=65_536, description="windows per step and process (B)")] = 4
    context: Annotated[int, Field(ge=1, le=65_536, description="chunks per window (T); also the model's context")] = 128
    pieces: Annotated[
        int,
        Field(
            ge=1,
            le=65_536,
            description="a step's windows are computed in so many pieces, each again for its gradient: the same "
            "step in less memory, a third slower",
        ),
    ] = 1


@dataclass(kw_only=True)
class OptimizerOptions:
    """Options of AdamW and its learning rate, a function of progress: a warm-up, then a schedule."""

    learning_rate: Annotated[float, Field(gt=0, le=1e3, description="of encoder, decoder and heads (paper: 2e-3)")] = (
        2e-3
    )
    main_learning_rate: Annotated[float, Field(gt=0, le=1e3, description="of the main model (paper: 3.5e-4)")] = 1e-3
    table_learning_rate: Annotated[
        float,
        Field(
            gt=0,
            le=1e3,
            description="of tables of hashed rows (model.encoder.rows, grams), which Adagrad trains by rows",
        ),
    ] = 0.2
    warmup_steps: Annotated[
        int, Field(ge=0, le=10**12, description="steps of linear warm-up of a phase (paper: 2000)")
    ] = 100
    schedule: Annotated[
        Literal["cosine", "linear", "stable", "inverse_root"],
        Field(
            description="after the warm-up, from rate_from to rate_to of the phase: a half cosine, a straight line, or stable "
            "for four fifths of the phase and straight then; or falling with the root of the steps, from rate_from"
        ),
    ] = "cosine"
    weight_decay: Annotated[float, Field(ge=0, le=1e3, description="decoupled, of matrices only")] = 0.1
    beta2: Annotated[float, Field(gt=0, lt=1, description="decay of the second moment")] = 0.95
    epsilon: Annotated[float, Field(gt=0, le=1, description="added to the root of the second moment")] = 1e-8
    clip_norm: Annotated[
        float,
        Field(gt=0, le=1e12, description="bound on the norm of the whole gradient, tables left out (paper: 0.01)"),
    ] = 1.0
    ema: Annotated[
        float,
        Field(ge=0, lt=1, description="decay of a moving average of the weights, which is what is evaluated; 0: none"),
    ] = 0.0


@dataclass(kw_only=True)
class PhaseOptions:
    """Options of a training phase. The limit that is reached first ends the phase; any may be null."""

    steps: Annotated[int | None, Field(ge=1, le=10**12, description="limit in steps")] = None
    seconds: Annotated[float | None, Field(gt=0, le=10**10, description="limit in seconds of training")] = None
    epochs: Annotated[
        float | None, Field(gt=0, le=10**9, description="limit in passes over this phase's part of the data")
    ] = None
    iem_weight: Annotated[float, Field(ge=0, le=1e6, description="weight of the IEM loss; 0 switches it off")] = 0.0
    decode_fraction: Annotated[float, Field(ge=0, le=1, description="share of the chunks decoded in each step")] = 1.0
    rate_from: Annotated[float, Field(gt=0, le=1, description="share of the learning rates at the start")] = 1.0
    rate_to: Annotated[float, Field(ge=0, le=1, description="share of the learning rates at the end (paper: 0.05)")] = (
        0.05
    )
    layer_decay: Annotated[
        float,
        Field(
            gt=0,
            le=1,
            description="factor of the learning rate for each block between a weight and the decoder; 1: all the same",
        ),
    ] = 1.0
    patience: Annotated[
        int,
        Field(ge=0, le=10**6, description="validations in a row without a better one that end the phase; 0: none do"),
    ] = 0
    part_from: Annotated[float, Field(ge=0, lt=1, description="the phase reads the corpus from this share on")] = 0.0
    part_to: Annotated[float, Field(gt=0, le=1, description="up to this share (paper: one half for each phase)")] = 1.0


@dataclass(kw_only=True)
class PretrainOptions(PhaseOptions):
    """Options of phase one: encoder and main model learn in the space of chunk embeddings."""

    iem_weight: Annotated[float, Field(ge=0, le=1e6, description="weight of the IEM loss; 0 switches it off")] = 1.0
    decode_fraction: Annotated[
        float, Field(ge=0, le=1, description="share of the chunks the decoder is trained along on (paper: 0)")
    ] = 0.15


@dataclass(kw_only=True)
class FinetuneOptions(PhaseOptions):
    """Options of phase two: everything is trained for exact likelihood."""

    start_from: Annotated[
        str | None, Field(description="another run (name or path) whose phase one to start from; null: this run's")
    ] = None
    trains: Annotated[
        Literal["everything", "decoder", "decoder_first"],
        Field(description="everything (paper), the decoder alone, or the decoder alone for decoder_steps first"),
    ] = "everything"
    decoder_steps: Annotated[int, Field(ge=1, le=10**12, description="of trains=decoder_first")] = 1000


@dataclass(kw_only=True)
class TrainOptions(PhaseOptions):
    """Options of end-to-end training without a phase one: the baseline of the paper's Figure 4."""


@dataclass(kw_only=True)
class CheckpointOptions:
    """Options of checkpoints: when a phase saves them, and how many are kept."""

    every_steps: Annotated[int | None, Field(ge=1, le=10**12, description="save after so many steps")] = None
    every_seconds: Annotated[
        float | None, Field(gt=0, le=10**10, description="save after so many seconds of training")
    ] = 60.0
    keep: Annotated[int, Field(ge=1, le=10**6, description="newest checkpoints kept, beside the best")] = 2


@dataclass(kw_only=True)
class ValidationOptions:
    """Options of the validation during training, on a fixed subset of the validation split.

    The loss is in bits, or the IEM loss if nothing is decoded.
    """

    times: Annotated[int, Field(ge=0, le=10**6, description="evaluations spread evenly over a phase; 0: none")] = 5
    windows: Annotated[int, Field(ge=1, le=10**7, description="windows of the validation split that are scored")] = 64


@dataclass(kw_only=True)
class LauncherOptions:
    """Options of the processes that train together."""

    processes: Annotated[
        int, Field(ge=1, le=1024, description="training processes on this machine, by torchrun; one GPU each")
    ] = 1
    dask: Annotated[
        str | None,
        Field(
            description="shard on a Dask cluster: the address of its scheduler (HOST:PORT), or local; null: shard.workers here"
        ),
    ] = None
