"""The options of a run, and which of them apply to which models. Importing this module imports nothing heavy.

Each option is declared once, beside its owner: options of models in `haed.options`, of sources and shards in
`data.options`, all others here. A field's metadata says who uses it:

- `models`: "chunks" or "tokens", if only these models do; `instead` names the option that the others use.
- `kinds`: the kinds of its section that do, such as "lstm" for `model.main.units`.
- `needs`: other options, each with values. It has no effect unless one of them has such a value. No values: any but 0.
"""

import logging
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, make_dataclass
from functools import cache, reduce
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any, Literal, cast, get_type_hints

from annotated_types import Ge, Gt, Le, Unit
from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from data.options import CHUNKERS, SOURCES, ChunkerOptions, Kinds, LoaderOptions, ShardOptions, SourceOptions
from haed.options import DECODERS, ENCODERS, MAINS, SYSTEMS, IEMOptions, ModelOptions, PartKinds

log = logging.getLogger(__name__)
Phase = Literal["pretrain", "finetune", "train"]
Split = Literal["train", "valid", "test"]
PHASES: tuple[Phase, ...] = ("pretrain", "finetune", "train")
CHUNKS_ONLY = {"models": "chunks"}
# Bounds and units that several options have.
Rate = Annotated[float, Gt(0), Le(1e3)]
LossWeight = Annotated[float, Ge(0), Le(1e6)]
Share = Annotated[float, Ge(0), Le(1), Unit("share")]
PositiveShare = Annotated[float, Gt(0), Le(1), Unit("share")]
Seed = Annotated[int, Ge(0), Le(2**63 - 1)]
Chunks = Annotated[int, Unit("chunks")]
OptionalChunks = Annotated[int | None, Unit("chunks")]
Windows = Annotated[int, Ge(1), Le(65_536), Unit("windows")]
Validations = Annotated[int, Ge(0), Le(10**6), Unit("validations")]
Steps = Annotated[int, Ge(1), Le(10**12), Unit("steps")]
OptionalSteps = Annotated[int | None, Ge(1), Le(10**12), Unit("steps")]
OptionalSeconds = Annotated[float | None, Gt(0), Le(10**10), Unit("seconds")]
MinCount = Annotated[int | None, Ge(1), Le(10**12), Unit("occurrences")]


@dataclass(kw_only=True)
class BatchOptions:
    """Options of the batch of windows in one training step."""

    sequences: Annotated[Windows, Field(description="Windows per training step and process (B).")] = 4
    context: Annotated[
        Chunks, Field(ge=1, le=65_536, description="Chunks per window (T). This is also the model's context.")
    ] = 128
    pieces: Annotated[
        int,
        Field(
            ge=1,
            le=65_536,
            description="Pieces into which a step's windows are divided. More pieces need less memory for the same step. "
            "Above 1, each piece is computed again for its gradient, which takes a third longer.",
        ),
        Unit("pieces"),
    ] = field(default=1, metadata=CHUNKS_ONLY)


@dataclass(kw_only=True)
class OptimizerOptions:
    """Options of AdamW and its learning rate, a function of progress: a warm-up, then a schedule."""

    learning_rate: Annotated[
        Rate, Field(description="Learning rate of encoder, decoder and heads (paper: 2e-3), and of models of tokens.")
    ] = 2e-3
    main_learning_rate: Annotated[Rate, Field(description="Learning rate of the main model (paper: 3.5e-4).")] = field(
        default=1e-3, metadata={"models": "chunks", "instead": "optimizer.learning_rate"}
    )
    table_learning_rate: Annotated[
        Rate,
        Field(
            description="Learning rate of tables of hashed rows (model.encoder.rows, grams). Adagrad trains them row by row."
        ),
    ] = 0.2
    warmup_steps: Annotated[
        int,
        Field(ge=0, le=10**12, description="Steps of linear warm-up at the start of a phase (paper: 2000)."),
        Unit("steps"),
    ] = 100
    schedule: Annotated[
        Literal["cosine", "linear", "stable", "inverse_root"],
        Field(
            description="Learning rate after the warm-up, from rate_from to rate_to of the phase. cosine: half a cosine. "
            "linear: a straight line. stable: constant for four fifths of the phase, then linear. inverse_root: "
            "falls from rate_from with the square root of the steps."
        ),
    ] = "cosine"
    weight_decay: Annotated[
        float, Field(ge=0, le=1e3, description="Decoupled weight decay. It applies to matrices only.")
    ] = 0.1
    beta2: Annotated[float, Field(gt=0, lt=1, description="Decay of AdamW's second moment.")] = 0.95
    epsilon: Annotated[float, Field(gt=0, le=1, description="Added to the root of AdamW's second moment.")] = 1e-8
    clip_norm: Annotated[
        float, Field(gt=0, le=1e12, description="Maximum norm of the whole gradient, without tables (paper: 0.01).")
    ] = 1.0
    ema: Annotated[
        float,
        Field(
            ge=0,
            lt=1,
            description="Decay of a moving average of the weights. If it is set, the average is evaluated. 0: no average.",
        ),
    ] = 0.0


@dataclass(kw_only=True)
class PhaseOptions:
    """Options of a training phase. The limit that is reached first ends the phase; any may be null."""

    steps: Annotated[OptionalSteps, Field(description="Maximum number of steps. Null: no limit.")] = None
    seconds: Annotated[
        OptionalSeconds,
        Field(
            description="Maximum time spent in training steps. Start-up, validation and saving are not counted. Null: no limit."
        ),
    ] = None
    epochs: Annotated[
        float | None,
        Field(gt=0, le=10**9, description="Maximum passes over the phase's part of the data. Null: no limit."),
        Unit("epochs"),
    ] = None
    iem_weight: Annotated[LossWeight, Field(description="Weight of the IEM loss. 0 turns it off.")] = field(
        default=0.0, metadata=CHUNKS_ONLY
    )
    decode_fraction: Annotated[Share, Field(description="Share of the chunks that are decoded in each step.")] = field(
        default=1.0, metadata=CHUNKS_ONLY
    )
    rate_from: Annotated[PositiveShare, Field(description="Share of the learning rates at the start of the phase.")] = (
        1.0
    )
    rate_to: Annotated[
        Share, Field(description="Share of the learning rates at the end of the phase (paper: 0.05).")
    ] = field(default=0.05, metadata={"needs": {"optimizer.schedule": ("cosine", "linear", "stable")}})
    layer_decay: Annotated[
        float,
        Field(
            gt=0,
            le=1,
            description="Factor of the learning rate for each block between a weight and the decoder. 1: all weights have the same rate.",
        ),
    ] = field(default=1.0, metadata={"needs": {"model.kind": ("haed",)}})
    patience: Annotated[
        Validations, Field(description="Validations in a row without improvement that end the phase. 0: no limit.")
    ] = 0
    part_from: Annotated[
        float, Field(ge=0, lt=1, description="Start of the part of the corpus that the phase reads."), Unit("share")
    ] = 0.0
    part_to: Annotated[
        PositiveShare,
        Field(description="End of the part of the corpus that the phase reads (paper: one half for each phase)."),
    ] = 1.0


@dataclass(kw_only=True)
class PretrainOptions(PhaseOptions):
    """Options of phase one: encoder and main model learn in the space of chunk embeddings."""

    iem_weight: Annotated[LossWeight, Field(description="Weight of the IEM loss. 0 turns it off.")] = 1.0
    decode_fraction: Annotated[
        Share, Field(description="Share of the chunks on which the decoder is trained in each step (paper: 0).")
    ] = 0.15


@dataclass(kw_only=True)
class FinetuneOptions(PhaseOptions):
    """Options of phase two: everything is trained for exact likelihood."""

    start_from: Annotated[
        str | None,
        Field(description="Another run, by name or path, whose phase one is the start. Null: this run's own."),
    ] = field(default=None, metadata={"instead": ""})
    trains: Annotated[
        Literal["everything", "decoder", "decoder_first"],
        Field(
            description="What is trained. everything: all weights (paper). decoder: the decoder alone. decoder_first: the "
            "decoder alone for finetune.decoder_steps, then all weights."
        ),
    ] = "everything"
    decoder_steps: Annotated[
        Steps, Field(description="Steps in which the decoder is trained alone, with finetune.trains=decoder_first.")
    ] = field(default=1000, metadata={"needs": {"trains": ("decoder_first",)}})


@dataclass(kw_only=True)
class TrainOptions(PhaseOptions):
    """Options of end-to-end training without a phase one: the baseline of the paper's Figure 4."""


@dataclass(kw_only=True)
class CheckpointOptions:
    """Options of checkpoints: when a phase saves them, and how many are kept."""

    every_steps: Annotated[OptionalSteps, Field(description="Steps between two checkpoints. Null: none by steps.")] = (
        None
    )
    every_seconds: Annotated[
        OptionalSeconds, Field(description="Training time between two checkpoints. Null: none by time.")
    ] = 60.0
    keep: Annotated[
        int,
        Field(ge=1, le=10**6, description="Newest checkpoints that are kept, in addition to the best one."),
        Unit("checkpoints"),
    ] = 2


@dataclass(kw_only=True)
class ValidationOptions:
    """Options of the validation during training, on a fixed subset of the validation split.

    The loss is in bits, or the IEM loss if nothing is decoded.
    """

    times: Annotated[Validations, Field(description="Validations, spread evenly over a phase. 0: none.")] = 5
    windows: Annotated[
        int, Field(ge=1, le=10**7, description="Windows of the validation split that are scored."), Unit("windows")
    ] = 64


@dataclass(kw_only=True)
class LauncherOptions:
    """Options of the processes that train together."""

    processes: Annotated[
        int,
        Field(ge=1, le=1024, description="Training processes on this machine, started by torchrun, with one GPU each."),
        Unit("processes"),
    ] = 1
    shard: Annotated[
        bool,
        Field(description="Shard weights, gradients and moments over processes (FSDP), for models larger than a GPU."),
    ] = False
    dask: Annotated[
        str | None,
        Field(
            description="Dask cluster that shards the source, as the address HOST:PORT of its scheduler, or local. Null: "
            "shard.workers processes on this machine."
        ),
    ] = None


def _check_distinct(parts: list[str]) -> list[str]:
    if len(set(parts)) < len(parts):
        raise ValueError("expected each part once")
    return parts


@dataclass(kw_only=True)
class EvaluateOptions:
    """Options of evaluation on a whole split, and the precision in which a trained run computes."""

    split: Annotated[Split, Field(description="Split that is scored.")] = "test"
    stride: Annotated[
        OptionalChunks,
        Field(ge=1, le=65_536, description="Chunks that each window scores anew. Null: half of its context."),
    ] = None
    stage: Annotated[
        Phase | None,
        Field(
            description="Phase whose checkpoint is evaluated, sampled from and indexed. Null: finetune, else train, else pretrain."
        ),
    ] = None
    likelihood: Annotated[
        Literal["mixture", "decoder"],
        Field(
            description="Likelihood of a run with model.mixture.known. mixture: known chunks and decoder. decoder: the "
            "decoder alone. Other runs have only one."
        ),
    ] = field(default="mixture", metadata=CHUNKS_ONLY)
    memory: Annotated[
        Chunks,
        Field(
            ge=0,
            le=65_536,
            description="Chunks of a document whose states a model of chunks remembers. They allow further parts of the "
            "likelihood, see evaluate.parts. 0: the model alone. It costs a product with as many states for each "
            "chunk, and 8 bytes for each chunk of the train split.",
        ),
    ] = field(default=4096, metadata=CHUNKS_ONLY)
    parts: Annotated[
        list[Literal["copied", "repeated", "recalled", "words"]],
        AfterValidator(_check_distinct),
        Field(
            max_length=8,
            description="Parts of the likelihood that remember, if evaluate.memory is not 0. copied: chunks of the document, "
            "by similar states. repeated: the document's n-grams of chunks. recalled: n-grams of chunks of the "
            "train split. words: the document's chunks, which help the decoder to spell new ones.",
        ),
    ] = field(default_factory=lambda: ["copied", "repeated", "recalled", "words"], metadata=CHUNKS_ONLY)
    closed_set: Annotated[
        Chunks,
        Field(
            ge=0,
            le=10**8,
            description="Maximum number of distinct chunks over which IEM scores are normalised. With more chunks this "
            "likelihood is not computed. 0: never.",
        ),
    ] = field(default=200_000, metadata=CHUNKS_ONLY)
    breakdown: Annotated[
        bool,
        Field(description="Also compute bits by position in a chunk, by its length, and by its frequency in training."),
    ] = True
    precision: Annotated[
        Literal["fp32", "bf16", "auto"],
        Field(
            description="Precision in which a trained run computes bits, samples, next chunks and vectors. auto: bf16 where "
            "the processor multiplies it fast. It is faster and differs by some hundredths of a bit per chunk."
        ),
    ] = "fp32"
    sequences: Annotated[Windows, Field(description="Windows scored at a time.")] = 16
    baselines: Annotated[bool, Field(description="Also measure n-gram models, xz and PPMd on the same bytes.")] = True


@dataclass(kw_only=True)
class SampleOptions:
    """Options of sampling."""

    prompts: Annotated[
        list[str],
        Field(description="Prompts of the report's samples. An empty list means frequent chunks of the corpus."),
    ] = field(default_factory=list)
    pictures: Annotated[
        int,
        Field(ge=1, le=10_000, description="Held-out pictures whose lower half a model of pictures completes."),
        Unit("pictures"),
    ] = 8
    chunks: Annotated[Chunks, Field(ge=1, le=10**7, description="Length of a sample.")] = 60
    temperature: Annotated[
        float,
        Field(
            ge=0,
            le=1e3,
            description="Sampling temperature. It applies to each draw: whether a chunk is a whole one or spelled, which whole "
            "one, and each token. 0: always the likeliest.",
        ),
    ] = 0.8
    top_k: Annotated[
        int,
        Field(ge=0, le=10**6, description="Draw from the k likeliest tokens or whole chunks. 0: from all of them."),
        Unit("tokens"),
    ] = 0
    top_p: Annotated[
        float,
        Field(
            gt=0,
            le=1,
            description="Draw from the likeliest tokens or whole chunks that together have this probability. Where whole "
            "chunks have as much, none is spelled, and the reverse.",
        ),
        Unit("probability"),
    ] = 0.95
    seed: Annotated[Seed, Field(description="Seed of sampling.")] = 0


@dataclass(kw_only=True)
class IndexOptions:
    """Options of a trained run's indexes: of its chunks, and of places in the text."""

    space: Annotated[
        Literal["chunks", "contexts", "predictions"],
        Field(
            description="What is indexed. chunks: the encoder's embedding of each distinct chunk. contexts: states of the "
            "main model at places in the text. predictions are not stored. They search the index of chunks."
        ),
    ] = "chunks"
    kind: Annotated[
        Literal["auto", "flat", "hnsw", "ivf", "ivfpq"],
        Field(
            description="Kind of FAISS index. flat: exact search. hnsw: a graph. ivf: clusters. ivfpq: clusters of compressed "
            "vectors. auto: flat up to 256 MB of vectors, then hnsw, and ivfpq beyond 8 GB of 8-bit codes."
        ),
    ] = "auto"
    metric: Annotated[
        Literal["auto", "centred", "cosine", "ip", "l2"],
        Field(
            description="Similarity of vectors. centred: cosine after subtracting the mean embedding, for chunks only. "
            "cosine: cosine. ip: inner product. l2: Euclidean distance. auto: centred for chunks, cosine for contexts."
        ),
    ] = "auto"
    recall: Annotated[
        PositiveShare,
        Field(
            description="Share of the exact ten nearest vectors that an approximate index must find. Its search is tuned to this."
        ),
    ] = 0.99
    split: Annotated[Split, Field(description="Split whose distinct chunks or contexts are indexed.")] = "train"
    min_count: Annotated[
        MinCount,
        Field(
            description="Minimum number of occurrences of an indexed chunk. Null: all chunks are indexed, and searches "
            "return frequent chunks only, unless they set a min_count."
        ),
    ] = field(default=None, metadata=CHUNKS_ONLY)
    max_chunks: Annotated[
        OptionalChunks,
        Field(
            ge=1,
            le=10**9,
            description="Maximum number of chunks in the index. The most frequent are indexed, and each vector takes 4 · "
            "model.encoder.width bytes on disk. Null: all.",
        ),
    ] = field(default=1_000_000, metadata=CHUNKS_ONLY)
    max_contexts: Annotated[
        int | None,
        Field(
            ge=1,
            le=10**9,
            description="Approximate number of places of the text in the index, in windows drawn by the seed. Null: all.",
        ),
        Unit("places"),
    ] = 100_000
    layer: Annotated[
        int | None,
        Field(
            ge=0,
            le=1000,
            description="Layer of the main model whose outputs are the contexts, counted from 0. Null: the model's output.",
        ),
    ] = field(default=None, metadata=CHUNKS_ONLY)
    scale: Annotated[
        int | None,
        Field(
            ge=1,
            le=10**6,
            description="Scale of a multi-scale model, or level of an Hourglass, whose outputs are the contexts. It is the "
            "group size in tokens. A context is the output for the last complete group. Null: the model's output.",
        ),
        Unit("tokens"),
    ] = field(default=None, metadata={"models": "tokens"})
    queries: Annotated[
        list[str], Field(description="Queries shown in the report. An empty list means frequent chunks of the corpus.")
    ] = field(default_factory=list, metadata=CHUNKS_ONLY)


@dataclass(kw_only=True)
class AnalyseOptions:
    """Options of `haed analyse`."""

    split: Annotated[Split, Field(description="Split whose chunks and contexts are analysed.")] = "train"
    min_count: Annotated[
        MinCount,
        Field(
            description="Minimum number of occurrences of an analysed chunk. Null: 10 if at least 1,000 chunks occur as often, else 1."
        ),
    ] = None
    max_chunks: Annotated[
        Chunks,
        Field(
            ge=3,
            le=100_000,
            description="Maximum number of chunks in the analyses and the map. The most frequent are analysed, and time grows "
            "with the square of the number.",
        ),
    ] = 20_000
    corpus_chunks: Annotated[
        Chunks,
        Field(ge=1, le=10**10, description="Maximum number of chunks of the split in which contexts are counted."),
    ] = 5_000_000
    against: Annotated[
        str | None,
        Field(description="Run, by name or path, from whose embeddings drift is measured. Null: this run's phase one."),
    ] = None
    clusters: Annotated[
        int,
        Field(ge=2, le=1000, description="Clusters of embeddings, shown as word classes and colours."),
        Unit("clusters"),
    ] = 50
    map: Annotated[
        Literal["auto", "pca", "umap", "tsne"],
        Field(
            description="Map that is drawn in addition to PCA. auto: UMAP or t-SNE, if one is installed (pip install 'haed[maps]')."
        ),
    ] = "auto"
    passages: Annotated[
        int,
        Field(ge=0, le=10**6, description="Places of the text whose nearest places are compared by layer. 0: none."),
        Unit("places"),
    ] = 4000
    projector: Annotated[
        int,
        Field(
            ge=0, le=10**7, description="Points exported for TensorBoard's projector, the most frequent first. 0: none."
        ),
        Unit("points"),
    ] = 100_000
    skip_gram: Annotated[
        bool,
        Field(
            description="Also train a skip-gram model as a baseline, if gensim is installed (pip install 'haed[baselines]')."
        ),
    ] = True


@dataclass(kw_only=True)
class Options:
    """Options of a run: what it reads, what it trains and how, and where it writes."""

    name: Annotated[
        str,
        Field(
            min_length=1,
            max_length=200,
            description="Name of the run, which is a folder in runs_dir, of at most 200 bytes.",
        ),
    ] = "run"
    runs_dir: Annotated[str, Field(description="Folder of runs.")] = "runs"
    shards_dir: Annotated[str, Field(description="Folder of sharded corpora.")] = "shards"
    seed: Annotated[Seed, Field(description="Seed of weights, data order and random choices.")] = 0
    device: Annotated[
        str,
        Field(
            pattern=r"^(auto|cpu|cuda(:\d{1,3})?)$",
            description="Device that computes: auto, cpu, cuda, or cuda:1 for the second GPU.",
        ),
    ] = "auto"
    threads: Annotated[
        int | None,
        Field(
            ge=1,
            le=1024,
            description="CPU threads. Null: as many as the process may use, by its affinity, its container's quota and OMP_NUM_THREADS.",
        ),
        Unit("threads"),
    ] = None
    deterministic: Annotated[
        bool,
        Field(
            description="The same command gives the same bits each time, also with several threads and on a GPU. If false, "
            "PyTorch may add in any order where that is faster."
        ),
    ] = True
    precision: Annotated[
        Literal["auto", "fp32", "bf16"],
        Field(
            description="Precision of training and of the validation within it. auto: bf16 where the processor multiplies it fast."
        ),
    ] = "auto"
    compile: Annotated[
        bool,
        Field(
            description="Compile with torch.compile what has the same shapes in every training step: a main transformer "
            "with batch.pieces=1, and models of tokens except spacebyte, with chunks of a fixed size. The first step then "
            "takes half a minute or more, which counts as training time. On a CPU, steps took 0.8 to 1.1 of the time."
        ),
    ] = False
    log_steps: Annotated[
        Steps, Field(description="Steps between two lines of metrics. Some of the first steps are also logged.")
    ] = 50
    tracking: Annotated[
        Literal["none", "mlflow", "wandb"],
        Field(description="Tracker beside TensorBoard. Install it: pip install 'haed[mlflow]' or 'haed[wandb]'."),
    ] = "none"
    resume: Annotated[
        Literal["auto", "never", "required"],
        Field(
            description="auto: continue from the newest checkpoint if there is one. never: stop if there is one. required: "
            "stop if there is none."
        ),
    ] = "auto"
    source: SourceOptions = field(default_factory=SourceOptions)
    chunker: ChunkerOptions = field(default_factory=ChunkerOptions)
    shard: ShardOptions = field(default_factory=ShardOptions)
    loader: LoaderOptions = field(default_factory=LoaderOptions)
    batch: BatchOptions = field(default_factory=BatchOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    iem: IEMOptions = field(default_factory=IEMOptions, metadata=CHUNKS_ONLY)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    pretrain: PretrainOptions = field(
        default_factory=PretrainOptions, metadata={"models": "chunks", "instead": "train.…"}
    )
    finetune: FinetuneOptions = field(
        default_factory=FinetuneOptions, metadata={"models": "chunks", "instead": "train.…"}
    )
    train: TrainOptions = field(default_factory=TrainOptions)
    validation: ValidationOptions = field(default_factory=ValidationOptions)
    launcher: LauncherOptions = field(default_factory=LauncherOptions)
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)
    evaluate: EvaluateOptions = field(default_factory=EvaluateOptions)
    sample: SampleOptions = field(default_factory=SampleOptions)
    index: IndexOptions = field(default_factory=IndexOptions)
    analyse: AnalyseOptions = field(default_factory=AnalyseOptions, metadata=CHUNKS_ONLY)


@dataclass(frozen=True)
class Option:
    """An option or section of the schema.

    Attributes:
        type: its type, without annotations; a dataclass for a section.
        annotated: its type with the bounds, description and unit that it is declared with.
        default: its default value; None for a section.
        models: "chunks" or "tokens" if only these models use it, else empty.
        instead: the option that other models use, or empty.
        kinds: kinds of its section that use it; empty: all of them.
        needs: other options, each with values. It has no effect unless one of them has such a value. No values: any but 0.
    """

    type: Any
    annotated: Any = None
    default: Any = None
    models: str = ""
    instead: str = ""
    kinds: tuple[str, ...] = ()
    needs: dict[str, tuple[str, ...]] = field(default_factory=dict)


# The kinds that other packages can add to, by the option that chooses one.
KINDS: dict[str, Kinds | PartKinds] = {
    "source.kind": SOURCES,
    "chunker.kind": CHUNKERS,
    "model.encoder.kind": ENCODERS,
    "model.main.kind": MAINS,
    "model.decoder.kind": DECODERS,
}
option_classes: dict[tuple[str, str], type] = {}  # options of other packages' kinds by key and kind; see `load_kind`


def load_kind(key: str, kind: str) -> None:
    """Make a kind known that another package has as an entry point, and the options of its `options_class`.

    Args:
        key: the option that chooses it, such as `model.encoder.kind`.
        kind: its name; nothing happens if this package has it, or no package.

    Raises:
        ValueError: two packages have a kind of that name, or its module cannot be imported.
    """
    table = KINDS[key]
    if kind in table or (key, kind) in option_classes:
        return
    matches = list(entry_points(group=table.group, name=kind))
    if len({entry.value for entry in matches}) > 1:
        raise ValueError(
            f"{key}={kind} is in more than one package: {', '.join(map(describe_entry, matches))}. Uninstall one of them"
        )
    if not matches:
        return
    try:
        kind_class = matches[0].load()
    except (Exception, SystemExit) as error:  # whatever another package raises
        reason = f"cannot be loaded: {type(error).__name__}: {error}"
        raise ValueError(f"{key}={kind}: {describe_entry(matches[0])} {reason}") from error
    if options_class := getattr(kind_class, "options_class", None):
        base = type_of(key.rpartition(".")[0])
        if not (isinstance(options_class, type) and is_dataclass(options_class) and issubclass(options_class, base)):
            wrong = f"options_class of {describe_entry(matches[0])} is {options_class!r:.100}"
            raise ValueError(f"{key}={kind}: {wrong}, expected a dataclass that inherits from {base.__name__}")
        option_classes[key, kind] = options_class
        schema_options.cache_clear()
        option_names.cache_clear()


def describe_entry(entry: EntryPoint) -> str:
    """Return what an entry point names, and the package that has it: `my_module:MyClass of my-package`."""
    return f"{entry.value}{f' of {entry.dist.name}' if entry.dist else ''}"


def warn_of_hidden_kind(key: str, kind: str) -> None:
    """Log if another package has a kind of this name too, which is not used."""
    for entry in entry_points(group=KINDS[key].group, name=kind) if kind in KINDS[key] else ():
        log.warning("%s=%s is a kind of haed, so %s is not used. Rename it", key, kind, describe_entry(entry))


@cache
def schema_options() -> dict[str, Option]:
    """Return all options and sections by their dotted keys, those of kinds that were loaded by `load_kind` included."""
    options: dict[str, Option] = {}

    def collect(section: Any, above: str, inherited: Option, kinds: tuple[str, ...] = ()) -> None:
        types, annotated = get_type_hints(section), get_type_hints(section, include_extras=True)
        for each in fields(section):
            key = f"{above}{each.name}"
            if key in options:  # inherited by the options of a kind
                continue
            kind, models = types[each.name], each.metadata.get("models", inherited.models)
            instead, users = each.metadata.get("instead", inherited.instead), each.metadata.get("kinds", kinds)
            if is_dataclass(kind):
                options[key] = Option(kind, kind, None, models, instead, users)
                collect(kind, f"{key}.", options[key])
                continue
            default = each.default if each.default_factory is MISSING else each.default_factory()
            needs = each.metadata.get("needs", {})
            options[key] = Option(kind, annotated[each.name], default, models, instead, users, needs)

    collect(Options, "", Option(Options))
    for (key, name), options_class in option_classes.items():
        section = key.rpartition(".")[0]
        collect(options_class, f"{section}.", options[section], (name,))
    return options


@cache
def option_names() -> tuple[str, ...]:
    """Return the dotted keys of all options, without those of sections."""
    return tuple(key for key, option in schema_options().items() if not is_dataclass(option.type))


def type_of(key: str) -> Any:
    """Return the type of an option or section; None: there is none of that key."""
    option = schema_options().get(key)
    return option.type if option else None


def is_option(word: str) -> bool:
    """Return whether a word changes an option: it has the form key=value, and the key exists."""
    key, equals, _ = word.partition("=")
    return bool(equals) and key in schema_options()


class InvalidOptionsError(ValueError):
    """Values that the schema does not accept.

    Attributes:
        errors: Pydantic's errors, see `pipeline.config.messages.explain_validation_error`.
    """

    def __init__(self, errors: list[dict[str, Any]]) -> None:
        super().__init__("; ".join(str(each["msg"]) for each in errors))
        self.errors = errors


@cache
def _validator(section: type) -> TypeAdapter[Any]:
    """Return a validator of {"value": section} that refuses unknown keys and numbers that are not finite."""
    config = ConfigDict(extra="forbid", allow_inf_nan=False)
    return TypeAdapter(make_dataclass("Section", [("value", section)], namespace={"__pydantic_config__": config}))


def validate_options(values: Mapping[str, Any]) -> Options:
    """Return options from values by dotted key: texts become the types of the schema, whose bounds are checked.

    A boolean is no number: it is checked as the text `true` or `false`.

    Raises:
        InvalidOptionsError: a key or value is wrong.
    """
    errors: list[dict[str, Any]] = []

    def validate(section: type, tree: Any, place: tuple[str, ...]) -> Any:
        try:
            return _validator(section).validate_python({"value": tree}).value
        except ValidationError as error:
            errors.extend({**item, "loc": (*place, *item["loc"][1:])} for item in error.errors(include_url=False))

    values = {
        key: str(value).lower() if isinstance(value, bool) and type_of(key) not in (str, str | None) else value
        for key, value in values.items()
    }
    parts: dict[str, Any] = {}
    for key in KINDS:
        if options_class := option_classes.get((key, str(values.get(key)))):
            section = key.rpartition(".")[0]
            chosen = {name: value for name, value in values.items() if name.startswith(f"{section}.")}
            values = {name: value for name, value in values.items() if name not in chosen}
            part = nest_values({name.removeprefix(f"{section}."): value for name, value in chosen.items()})
            parts[section] = validate(options_class, part, tuple(section.split(".")))
    options = validate(Options, nest_values(values), ())
    if errors:
        raise InvalidOptionsError(errors)
    for section, part in parts.items():
        set_option(options, section, part)
    return cast(Options, options)


def get_option(options: Any, key: str) -> Any:
    """Return the value of a dotted key in nested dataclasses."""
    return reduce(getattr, key.split("."), options)


def set_option(options: Any, key: str, value: Any) -> None:
    """Set the value of a dotted key in nested dataclasses."""
    above, _, name = key.rpartition(".")
    setattr(get_option(options, above) if above else options, name, value)


def nest_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by dotted key as nested dictionaries."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *sections, name = key.split(".")
        reduce(lambda part, section: part.setdefault(section, {}), sections, tree)[name] = value
    return tree


def models_with_option(key: str) -> list[str]:
    """Return the kinds of models that use an option or section."""
    if (option := schema_options().get(key)) and option.models:
        return [kind for kind, family in SYSTEMS.items() if family.chunks == (option.models == "chunks")]
    owners = []
    if key.startswith("model."):
        owners = [kind for kind, family in SYSTEMS.items() if key.split(".")[1] in family.sections]
    return owners or list(SYSTEMS)


def applies_to(key: str, kind: str) -> bool:
    """Return whether a model of this kind uses an option, given as a dotted key."""
    return kind in models_with_option(key)


def explain_no_effect(key: str, options: Options) -> str | None:
    """Return the choice, such as model.main.kind=lstm, that leaves an option without effect; None if it has one.

    A kind of another package may use all options of its section.
    """
    option, section = schema_options()[key], key.rpartition(".")[0]
    if option.kinds:
        choice = f"{section}.kind"
        kind = get_option(options, choice)
        if kind not in option.kinds and kind in KINDS[choice]:
            return f"{choice}={kind}"
    unmet = []
    for name, values in option.needs.items():
        other = name if "." in name else f"{section}.{name}"
        value = get_option(options, other)
        chosen = value if isinstance(value, list) else [value]
        if any(each in values for each in chosen) if values else value:
            return None
        unmet.append(f"{other}={value}")
    return unmet[0] if unmet else None


def training_phases(kind: str) -> tuple[Phase, ...]:
    """Return the phases that a whole run of this kind of model trains, in order."""
    return ("pretrain", "finetune") if SYSTEMS[kind].chunks else ("train",)


def phases_to_train(options: Options) -> tuple[Phase, ...]:
    """Return the phases that a run trains itself, in order. With `finetune.start_from` another run has phase one."""
    phases = training_phases(options.model.kind)
    return ("finetune",) if options.finetune.start_from and "finetune" in phases else phases


LIMITS = ("steps", "seconds", "epochs")  # limits of a phase
_KNOWN_CHUNKS = 1 << 17  # default number of known chunks of a mixture


def is_limited(phase: PhaseOptions) -> bool:
    """Return whether a phase has a limit."""
    return any(getattr(phase, limit) for limit in LIMITS)


def max_known_chunks(options: Options) -> int:
    """Return the maximum number of known chunks of a run's mixture; 0: the run has no mixture."""
    if options.model.mixture.known is None:
        return 0 if options.chunker.kind == "pixels" else _KNOWN_CHUNKS
    return options.model.mixture.known


def is_mixed(options: Options, phase: PhaseOptions) -> bool:
    """Return whether checkpoints of a phase have the mixture's likelihood, which needs the IEM loss."""
    return max_known_chunks(options) > 0 and phase.iem_weight > 0


def remembered_chunks(options: Options, phase: Phase) -> int:
    """Return how many chunks of a document take part in the likelihood of a phase's checkpoint; 0: the model alone."""
    evaluation = options.evaluate
    alone = not evaluation.parts or options.model.kind != "haed" or requested_likelihood(options, phase) == "decoder"
    return 0 if alone else evaluation.memory


def requested_likelihood(options: Options, phase: Phase) -> Literal["mixture", "decoder"] | None:
    """Return the likelihood to compute for a phase's checkpoint; None: the checkpoint has only one."""
    return options.evaluate.likelihood if is_mixed(options, getattr(options, phase)) else None
