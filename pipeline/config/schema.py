"""The options of a run, and which of them apply to which models. Importing this module imports nothing heavy.

Each option is declared once, beside its owner: options of models in `haed.options`, of sources and shards in
`data.options`, all others here. A field's metadata says who uses it:

- `models`: "chunks" or "tokens", if only these models do; `instead` names the option that the others use.
- `kinds`: the kinds of its section that do, such as "lstm" for `model.main.units`.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, make_dataclass
from functools import cache, reduce
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any, Literal, cast, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from data.options import CHUNKERS, SOURCES, ChunkerOptions, Kinds, LoaderOptions, ShardOptions, SourceOptions
from haed.options import DECODERS, ENCODERS, MAINS, SYSTEMS, IEMOptions, ModelOptions, PartKinds

log = logging.getLogger(__name__)
Phase = Literal["pretrain", "finetune", "train"]
PHASES: tuple[Phase, ...] = ("pretrain", "finetune", "train")
CHUNKS_ONLY = {"models": "chunks"}


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
    ] = field(default=1, metadata=CHUNKS_ONLY)


@dataclass(kw_only=True)
class OptimizerOptions:
    """Options of AdamW and its learning rate, a function of progress: a warm-up, then a schedule."""

    learning_rate: Annotated[float, Field(gt=0, le=1e3, description="of encoder, decoder and heads (paper: 2e-3)")] = (
        2e-3
    )
    main_learning_rate: Annotated[float, Field(gt=0, le=1e3, description="of the main model (paper: 3.5e-4)")] = field(
        default=1e-3, metadata={"models": "chunks", "instead": "optimizer.learning_rate"}
    )
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
    iem_weight: Annotated[float, Field(ge=0, le=1e6, description="weight of the IEM loss; 0 switches it off")] = field(
        default=0.0, metadata=CHUNKS_ONLY
    )
    decode_fraction: Annotated[float, Field(ge=0, le=1, description="share of the chunks decoded in each step")] = (
        field(default=1.0, metadata=CHUNKS_ONLY)
    )
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
    ] = field(default=None, metadata={"instead": ""})
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


@dataclass(kw_only=True)
class EvaluateOptions:
    """Options of evaluation on a whole split, and the precision in which a trained run computes."""

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
    ] = field(default="mixture", metadata=CHUNKS_ONLY)
    memory: Annotated[
        int,
        Field(
            ge=0,
            le=65_536,
            description="chunks of a document whose states are remembered by a model of chunks: further parts of its likelihood "
            "copy and repeat the document's chunks, and recall those of the train split; 0: the model alone. What it costs: a "
            "product with so many states a chunk, and 8 bytes for each chunk of the train split",
        ),
    ] = field(default=4096, metadata=CHUNKS_ONLY)
    parts: Annotated[
        list[Literal["copied", "repeated", "recalled", "words"]],
        Field(
            max_length=8,
            description="what remembers, if evaluate.memory is not 0: parts that copy from the document by similar states, repeat "
            "its n-grams of chunks and recall those of the train split, and its words, which help the decoder to spell",
        ),
    ] = field(default_factory=lambda: ["copied", "repeated", "recalled", "words"], metadata=CHUNKS_ONLY)
    closed_set: Annotated[
        int,
        Field(
            ge=0,
            le=10**8,
            description="IEM scores are normalised over all distinct chunks if there are at most so many; 0: never",
        ),
    ] = field(default=200_000, metadata=CHUNKS_ONLY)
    breakdown: Annotated[
        bool, Field(description="also bits by position in a chunk, by its length, and by its frequency in training")
    ] = True
    precision: Annotated[
        Literal["fp32", "bf16", "auto"],
        Field(
            description="of all that is asked of a trained run: bits, samples, next chunks, vectors; auto: bf16 where the "
            "processor multiplies it fast, which is quicker and off by some hundredths of a bit a chunk"
        ),
    ] = "fp32"
    sequences: Annotated[int, Field(ge=1, le=65_536, description="windows scored at a time")] = 16
    baselines: Annotated[bool, Field(description="also measure n-gram models, xz and PPMd on the same bytes")] = True


@dataclass(kw_only=True)
class SampleOptions:
    """Options of sampling."""

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
    """Options of a trained run's indexes: of its chunks, and of places in the text."""

    space: Annotated[
        Literal["chunks", "contexts", "predictions"],
        Field(
            description="chunks: what the encoder makes of every distinct one; contexts: states of the main model all over the "
            "text; predictions are not stored, but asked for among chunks"
        ),
    ] = "chunks"
    kind: Annotated[
        Literal["auto", "flat", "hnsw", "ivf", "ivfpq"],
        Field(
            description="exact search, or approximate by a graph, by clusters, or by clusters of compressed vectors; auto: flat "
            "for up to 256 MB of vectors, then a graph, and beyond 8 GB of 8-bit codes ivfpq"
        ),
    ] = "auto"
    metric: Annotated[
        Literal["auto", "centred", "cosine", "ip", "l2"],
        Field(
            description="centred: the cosine once the mean embedding is taken off, of chunks only; cosine, inner product, or "
            "Euclidean distance; auto: centred of chunks, cosine of contexts"
        ),
    ] = "auto"
    recall: Annotated[
        float,
        Field(gt=0, le=1, description="share of the exact ten nearest that an approximate index is tuned to find"),
    ] = 0.99
    split: Annotated[
        Literal["train", "valid", "test"], Field(description="whose distinct chunks, or contexts, are indexed")
    ] = "train"
    min_count: Annotated[
        int | None,
        Field(
            ge=1,
            le=10**12,
            description="leave rarer chunks out; null: all are in, and questions are answered with those that occur often, "
            "unless they have a --min-count",
        ),
    ] = field(default=None, metadata=CHUNKS_ONLY)
    max_chunks: Annotated[
        int | None,
        Field(
            ge=1,
            le=10**9,
            description="index so many at most, the most frequent first; a vector takes 4 · model.encoder.width bytes of the "
            "disk; null: all",
        ),
    ] = field(default=1_000_000, metadata=CHUNKS_ONLY)
    max_contexts: Annotated[
        int | None,
        Field(
            ge=1,
            le=10**9,
            description="index about so many places of the text, in windows drawn by the seed; null: all",
        ),
    ] = 100_000
    layer: Annotated[
        int | None,
        Field(
            ge=0,
            le=1000,
            description="contexts are what comes out of this layer of the main model, from 0; null: out of all of them",
        ),
    ] = field(default=None, metadata=CHUNKS_ONLY)
    scale: Annotated[
        int | None,
        Field(
            ge=1,
            le=10**6,
            description="contexts are what the layers of this scale of a multi-scale model, or level of an Hourglass, make of "
            "the last of its groups of so many tokens that is complete; null: what comes out of them all",
        ),
    ] = field(default=None, metadata={"models": "tokens"})
    queries: Annotated[
        list[str], Field(description="queries shown in the report; none: frequent chunks of the corpus")
    ] = field(default_factory=list, metadata=CHUNKS_ONLY)


@dataclass(kw_only=True)
class AnalyseOptions:
    """Options of `haed analyse`."""

    split: Annotated[
        Literal["train", "valid", "test"], Field(description="whose chunks and contexts are looked at")
    ] = "train"
    min_count: Annotated[
        int | None,
        Field(
            ge=1,
            le=10**12,
            description="leave rarer chunks out; null: those that occur less than 10 times, if 1,000 others do",
        ),
    ] = None
    max_chunks: Annotated[
        int,
        Field(
            ge=3,
            le=100_000,
            description="chunks of the analyses and of the map, the most frequent first; time grows with their square",
        ),
    ] = 20_000
    corpus_chunks: Annotated[
        int, Field(ge=1, le=10**10, description="contexts are counted in so many chunks of the split at most")
    ] = 5_000_000
    against: Annotated[
        str | None,
        Field(
            description="drift is measured from the embeddings of this run (name or path); null: from this run's phase one"
        ),
    ] = None
    clusters: Annotated[
        int, Field(ge=2, le=1000, description="clusters of embeddings, as word classes and colours")
    ] = 50
    map: Annotated[
        Literal["auto", "pca", "umap", "tsne"],
        Field(description="the map beside PCA; auto: UMAP or t-SNE if one is installed (pip install 'haed[maps]')"),
    ] = "auto"
    passages: Annotated[
        int,
        Field(ge=0, le=10**6, description="places of the text whose nearest ones are compared by layer; 0: none"),
    ] = 4000
    projector: Annotated[
        int,
        Field(
            ge=0,
            le=10**7,
            description="points of the export for TensorBoard's projector, the most frequent first; 0: none",
        ),
    ] = 100_000
    skip_gram: Annotated[
        bool, Field(description="also train a skip-gram as a baseline, if gensim is installed (haed[baselines])")
    ] = True


@dataclass(kw_only=True)
class Options:
    """Options of a run: what it reads, what it trains and how, and where it writes."""

    name: Annotated[str, Field(min_length=1, max_length=200, description="the run, a folder under runs_dir")] = "run"
    runs_dir: Annotated[str, Field(description="folder of runs")] = "runs"
    shards_dir: Annotated[str, Field(description="folder of sharded corpora")] = "shards"
    seed: Annotated[int, Field(ge=0, le=2**63 - 1, description="of weights, data order and random choices")] = 0
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d{1,3})?)$", description="auto, cpu, cuda, cuda:1")] = (
        "auto"
    )
    threads: Annotated[
        int | None,
        Field(
            ge=1,
            le=1024,
            description="CPU threads; null: as many as this process may use, by its affinity, its container's quota and "
            "OMP_NUM_THREADS",
        ),
    ] = None
    deterministic: Annotated[
        bool,
        Field(
            description="the same command gives the same bits each time, also with several threads and on a GPU; false: "
            "PyTorch may add in any order, where that is faster"
        ),
    ] = True
    precision: Annotated[
        Literal["auto", "fp32", "bf16"],
        Field(
            description="of training and of the validation within it; auto: bf16 where the processor multiplies it fast"
        ),
    ] = "auto"
    compile: Annotated[
        bool,
        Field(description="torch.compile a main transformer: half a minute at first; on a CPU no gain was measured"),
    ] = field(default=False, metadata=CHUNKS_ONLY)
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
        default: its default value; None for a section.
        models: "chunks" or "tokens" if only these models use it, else empty.
        instead: the option that other models use, or empty.
        kinds: kinds of its section that use it; empty: all of them.
    """

    type: Any
    default: Any = None
    models: str = ""
    instead: str = ""
    kinds: tuple[str, ...] = ()


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
        raise ValueError(f"{key}={kind} is in more than one package: {', '.join(map(describe_entry, matches))}")
    if not matches:
        return
    try:
        kind_class = matches[0].load()
    except Exception as error:  # whatever another package raises
        reason = f"cannot be loaded: {type(error).__name__}: {error}"
        raise ValueError(f"{key}={kind}: {describe_entry(matches[0])} {reason}") from error
    if options_class := getattr(kind_class, "options_class", None):
        if not (isinstance(options_class, type) and is_dataclass(options_class)):
            raise ValueError(f"{key}={kind}: options_class of {describe_entry(matches[0])} is not a dataclass")
        option_classes[key, kind] = options_class
        schema_options.cache_clear()
        option_names.cache_clear()


def describe_entry(entry: EntryPoint) -> str:
    """Return what an entry point names, and the package that has it: `my_module:MyClass of my-package`."""
    return f"{entry.value}{f' of {entry.dist.name}' if entry.dist else ''}"


@cache
def warn_of_hidden_kinds() -> None:
    """Log, once, the kinds of other packages that are not used, since this package has kinds of the same names."""
    installed = entry_points()
    for key, table in KINDS.items():
        for entry in installed.select(group=table.group):
            if entry.name in table:
                log.warning(
                    "%s=%s is a kind of haed: %s is not used, rename it", key, entry.name, describe_entry(entry)
                )


@cache
def schema_options() -> dict[str, Option]:
    """Return all options and sections by their dotted keys, those of kinds that were loaded by `load_kind` included."""
    options: dict[str, Option] = {}

    def collect(section: Any, above: str, inherited: Option, kinds: tuple[str, ...] = ()) -> None:
        types = get_type_hints(section)
        for each in fields(section):
            key = f"{above}{each.name}"
            if key in options:  # inherited by the options of a kind
                continue
            kind, models = types[each.name], each.metadata.get("models", inherited.models)
            instead, users = each.metadata.get("instead", inherited.instead), each.metadata.get("kinds", kinds)
            if is_dataclass(kind):
                options[key] = Option(kind, None, models, instead, users)
                collect(kind, f"{key}.", options[key])
                continue
            default = each.default if each.default_factory is MISSING else each.default_factory()
            options[key] = Option(kind, default, models, instead, users)

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


def flatten_tree(tree: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys of a nested dictionary with their values, in order."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flatten_tree(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def nest_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by dotted key as nested dictionaries."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *sections, name = key.split(".")
        reduce(lambda part, section: part.setdefault(section, {}), sections, tree)[name] = value
    return tree


@dataclass
class Difference:
    """A dotted key with different values in two nested dictionaries, and both values."""

    key: str
    was: Any
    now: Any


def diff_trees(was: Any, now: Any, key: str = "") -> Iterator[Difference]:
    """Yield the differences between two nested dictionaries, in order."""
    if isinstance(was, dict) and isinstance(now, dict):
        for name in [*now, *(name for name in was if name not in now)]:
            yield from diff_trees(was.get(name), now.get(name), f"{key}.{name}" if key else name)
    elif was != now:
        yield Difference(key, was, now)


def models_with_option(key: str) -> list[str]:
    """Return the kinds of models that use an option or section."""
    option, section = schema_options().get(key), key.split(".")[1] if "." in key else ""
    models = option.models if option else ""
    if models:
        return [kind for kind, family in SYSTEMS.items() if family.chunks == (models == "chunks")]
    if key.startswith("model."):
        owners = [kind for kind, family in SYSTEMS.items() if section in family.sections]
        return owners or list(SYSTEMS)
    return list(SYSTEMS)


def applies_to(key: str, kind: str) -> bool:
    """Return whether a model of this kind uses an option, given as a dotted key."""
    return kind in models_with_option(key)


def applies_to_part(key: str, options: Options) -> bool:
    """Return whether the chosen kind of the option's section uses it, such as an LSTM as the main model.

    A kind of another package may use all options of its section.
    """
    kinds, choice = schema_options()[key].kinds, f"{key.rpartition('.')[0]}.kind"
    if not kinds:
        return True
    kind = get_option(options, choice)
    return kind in kinds or kind not in KINDS[choice]


def training_phases(kind: str) -> tuple[Phase, ...]:
    """Return the phases that a whole run of this kind of model trains, in order."""
    return ("pretrain", "finetune") if SYSTEMS[kind].chunks else ("train",)


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
    how = options.evaluate
    alone = not how.parts or options.model.kind != "haed" or requested_likelihood(options, phase) == "decoder"
    return 0 if alone else how.memory


def requested_likelihood(options: Options, phase: Phase) -> Literal["mixture", "decoder"] | None:
    """Return the likelihood to compute for a phase's checkpoint; None: the checkpoint has only one."""
    return options.evaluate.likelihood if is_mixed(options, getattr(options, phase)) else None
