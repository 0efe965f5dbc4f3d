"""The options of a run, composed from those of each package. Importing this module imports nothing heavy."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from data.options import ChunkerOptions, LoaderOptions, ShardOptions, SourceOptions
from haed.options import IEMOptions, ModelOptions
from pipeline.options.asking import AnalyseOptions, EvaluateOptions, IndexOptions, SampleOptions
from pipeline.options.training import (
    BatchOptions,
    CheckpointOptions,
    FinetuneOptions,
    LauncherOptions,
    OptimizerOptions,
    Phase,
    PhaseOptions,
    PretrainOptions,
    TrainOptions,
    ValidationOptions,
)

__all__ = [
    "AnalyseOptions",
    "BatchOptions",
    "CheckpointOptions",
    "EvaluateOptions",
    "FinetuneOptions",
    "IndexOptions",
    "LauncherOptions",
    "OptimizerOptions",
    "Options",
    "Phase",
    "PhaseOptions",
    "PretrainOptions",
    "SampleOptions",
    "TrainOptions",
    "ValidationOptions",
]


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
    analyse: AnalyseOptions = field(default_factory=AnalyseOptions)
