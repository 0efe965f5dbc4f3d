"""Every option of a run, composed from the rooms. Importing this module imports nothing heavy."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from data.options import ChunkerOptions, LoaderOptions, ShardOptions, SourceOptions
from haed.options import IEMOptions, ModelOptions

Phase = Literal["pretrain", "finetune", "train"]

# Options of earlier versions, or values of one, that config.yaml files still hold: whether a value changed what was computed,
# and what is then read in its place (None: nothing). They went because they did not pay, see docs/log.md.
RETIRED: dict[str, tuple[Callable[[Any], bool], Any]] = {
    "iem.correction": (lambda value: value == "log_q", "none"),
    "iem.counts": (lambda value: value != "streaming", None),
    "iem.bank": (bool, None),
    "iem.bank_draws": (lambda value: False, None),  # of iem.bank, as the next ones of iem.mined
    "iem.mined": (bool, None),
    "iem.mined_share": (lambda value: False, None),
    "iem.mined_refresh": (lambda value: False, None),
}


@dataclass(kw_only=True)
class BatchOptions:
    """One step's windows."""

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
    """AdamW, and a learning rate that is a function of progress: warm-up, then cosine."""

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
        Literal["cosine", "inverse_root"],
        Field(
            description="after the warm-up: a half cosine from rate_from to rate_to of the phase, or falling with the root of "
            "the steps, from rate_from"
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
    """One training phase. Whichever of its limits is reached first ends it; any may be null."""

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
    """Phase one: encoder and main model learn in the space of chunk embeddings."""

    iem_weight: Annotated[float, Field(ge=0, le=1e6, description="weight of the IEM loss; 0 switches it off")] = 1.0
    decode_fraction: Annotated[
        float, Field(ge=0, le=1, description="share of the chunks the decoder is trained along on (paper: 0)")
    ] = 0.15


@dataclass(kw_only=True)
class FinetuneOptions(PhaseOptions):
    """Phase two: everything is trained for exact likelihood."""

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
    """Training end to end, without a phase one: the baseline of the paper's Figure 4."""


@dataclass(kw_only=True)
class CheckpointOptions:
    """When a phase saves, and what is kept."""

    every_steps: Annotated[int | None, Field(ge=1, le=10**12, description="save after so many steps")] = None
    every_seconds: Annotated[
        float | None, Field(gt=0, le=10**10, description="save after so many seconds of training")
    ] = 60.0
    keep: Annotated[int, Field(ge=1, le=10**6, description="newest checkpoints kept, beside the best")] = 2


@dataclass(kw_only=True)
class ValidationOptions:
    """The loss on a fixed subset of the validation split, while training: in bits, or the IEM loss where nothing is decoded."""

    times: Annotated[int, Field(ge=0, le=10**6, description="evaluations spread evenly over a phase; 0: none")] = 5
    windows: Annotated[int, Field(ge=1, le=10**7, description="windows of the validation split that are scored")] = 64


@dataclass(kw_only=True)
class EvaluateOptions:
    """Exact bits on a whole split."""

    split: Annotated[Literal["train", "valid", "test"], Field(description="which split is scored")] = "test"
    stride: Annotated[
        int | None, Field(ge=1, le=65_536, description="chunks newly scored by each window; null: half of its context")
    ] = None
    stage: Annotated[
        Phase | None,
        Field(
            description="whose checkpoint is evaluated, sampled from and indexed; null: finetune's, else train's, else "
            "pretrain's"
        ),
    ] = None
    likelihood: Annotated[
        Literal["mixture", "decoder"],
        Field(
            description="of a run with model.mixture.known: the mixture, or the decoder alone; of others there is one"
        ),
    ] = "mixture"
    closed_set: Annotated[
        int,
        Field(
            ge=0,
            le=10**8,
            description="IEM scores are normalised over all distinct chunks if there are at most so many",
        ),
    ] = 200_000
    closed_windows: Annotated[
        int,
        Field(ge=0, le=10**7, description="windows in which that is held against the decoder's likelihood; 0: none"),
    ] = 64
    breakdown: Annotated[
        bool, Field(description="also bits by position in a chunk, by its length, and by its frequency in training")
    ] = True
    sequences: Annotated[int, Field(ge=1, le=65_536, description="windows scored at a time")] = 16
    yardsticks: Annotated[bool, Field(description="also measure n-gram models and xz on the same bytes")] = True


@dataclass(kw_only=True)
class SampleOptions:
    """Sampling."""

    prompts: Annotated[
        list[str], Field(description="prompts of the report's samples; none: frequent chunks of the corpus")
    ] = field(default_factory=list)
    pictures: Annotated[
        int, Field(ge=1, le=10_000, description="held-out pictures whose lower half a model of pictures completes")
    ] = 8
    chunks: Annotated[int, Field(ge=1, le=10**7, description="chunks to write")] = 60
    temperature: Annotated[float, Field(ge=0, le=1e3, description="0: always the likeliest token, or known chunk")] = (
        0.8
    )
    top_k: Annotated[int, Field(ge=0, le=10**6, description="only the k likeliest tokens, or known chunks; 0: all")] = 0
    top_p: Annotated[
        float, Field(gt=0, le=1, description="only the likeliest tokens, or known chunks, that make up this mass")
    ] = 0.95
    seed: Annotated[int, Field(ge=0, le=2**63 - 1, description="of the draws")] = 0


@dataclass(kw_only=True)
class IndexOptions:
    """The index of chunk embeddings."""

    split: Annotated[Literal["train", "valid", "test"], Field(description="whose distinct chunks are indexed")] = (
        "train"
    )
    min_count: Annotated[
        int | None,
        Field(
            ge=1,
            le=10**12,
            description="leave rarer chunks out; null: all are in, but with a table in the encoder (model.encoder.rows), where "
            "rare chunks share rows with frequent ones, those that occur 10 times, if there are 1,000 of them",
        ),
    ] = None
    max_chunks: Annotated[
        int | None,
        Field(
            ge=1,
            le=10**9,
            description="index so many at most, the most frequent first; a vector takes 4 · model.encoder.width bytes, "
            "twice in memory; null: all",
        ),
    ] = 1_000_000
    queries: Annotated[
        list[str], Field(description="queries shown in the report; none: frequent chunks of the corpus")
    ] = field(default_factory=list)
    neighbours: Annotated[int, Field(ge=1, le=10**5, description="neighbours per query")] = 8


@dataclass(kw_only=True)
class LauncherOptions:
    """Processes that train together."""

    processes: Annotated[
        int, Field(ge=1, le=1024, description="training processes on this machine, by torchrun; one GPU each")
    ] = 1
    dask: Annotated[
        str | None,
        Field(
            description="shard on a Dask cluster: the address of its scheduler (HOST:PORT), or local; null: shard.workers here"
        ),
    ] = None


@dataclass(kw_only=True)
class Options:
    """A run: what it reads, what it trains, how, and where it writes."""

    name: Annotated[str, Field(min_length=1, max_length=200, description="the run, a folder under runs_dir")] = "run"
    runs_dir: Annotated[str, Field(description="folder of runs")] = "runs"
    shards_dir: Annotated[str, Field(description="folder of sharded corpora")] = "shards"
    seed: Annotated[int, Field(ge=0, le=2**63 - 1, description="of weights, data order and random choices")] = 0
    device: Annotated[
        str, Field(pattern=r"^(auto|cpu|mps|(cuda|xpu)(:\d{1,3})?)$", description="auto, cpu, cuda, cuda:1, mps, xpu")
    ] = "auto"
    threads: Annotated[int | None, Field(ge=1, le=1024, description="CPU threads; null: all cores")] = None
    precision: Annotated[
        Literal["auto", "fp32", "bf16"], Field(description="auto: bf16 where the processor multiplies it fast")
    ] = "auto"
    compile: Annotated[
        bool,
        Field(description="torch.compile a main transformer: a quarter of a minute at the start, steps a tenth faster"),
    ] = False
    log_steps: Annotated[
        int,
        Field(
            ge=1, le=10**12, description="steps between two lines of metrics; there are also some of the first steps"
        ),
    ] = 50
    resume: Annotated[
        Literal["auto", "never", "required"],
        Field(description="auto: go on where there is a checkpoint; never: refuse one; required: refuse without one"),
    ] = "auto"
    source: SourceOptions = field(default_factory=SourceOptions)
    chunker: ChunkerOptions = field(default_factory=ChunkerOptions)
    shard: ShardOptions = field(default_factory=ShardOptions)
    loader: LoaderOptions = field(default_factory=LoaderOptions)
    batch: BatchOptions = field(default_factory=BatchOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    iem: IEMOptions = field(default_factory=IEMOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    pretrain: PretrainOptions = field(default_factory=PretrainOptions)
    finetune: FinetuneOptions = field(default_factory=FinetuneOptions)
    train: TrainOptions = field(default_factory=TrainOptions)
    validation: ValidationOptions = field(default_factory=ValidationOptions)
    launcher: LauncherOptions = field(default_factory=LauncherOptions)
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)
    evaluate: EvaluateOptions = field(default_factory=EvaluateOptions)
    sample: SampleOptions = field(default_factory=SampleOptions)
    index: IndexOptions = field(default_factory=IndexOptions)
