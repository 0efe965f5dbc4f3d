"""What a checkpoint holds of a phase: everything that influences its next step, and how it is put back.

Weights and moving average in the system's own names; in `training.safetensors` the optimizer's moments, the objective's own
state and the random generator; in `state.json` positions of schedule and data, sums of unwritten metrics, the best
validation, and the options.
"""

import logging
import math
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from data.loader import Loader
from haed.system import Objective
from pipeline.options import Options, PhaseOptions
from pipeline.run.checkpoints import AVERAGE, MODEL, TRAINING, Checkpoint
from pipeline.run.metrics import Position
from pipeline.run.saved import Identity, State
from pipeline.train.optimizer import Average

log = logging.getLogger(__name__)
SKIPPED = "skipped_windows"


@dataclass
class Trained:
    """Outcome of a training stage; `remark` says what is wrong with it, if anything is."""

    run: str
    phase: str
    checkpoint: str
    steps: int
    seconds: float
    epochs: float
    resumed_from: int
    remark: str = ""


@dataclass
class TrainState:
    """Where a phase is.

    Attributes:
        position: in the schedule.
        sums: of metrics since the last record, by name.
        validated_at: the last validation.
        stale: number of validations since the best one.
        best: its figure: bits per token, or of a phase one that decodes nothing nats per chunk.
        saved_at: the last checkpoint.
    """

    position: Position = field(default_factory=Position)
    sums: dict[str, Tensor | float] = field(default_factory=dict)
    validated_at: Position = field(default_factory=Position)
    stale: int = 0
    best: float = math.inf
    saved_at: Position = field(default_factory=Position)

    def has_converged(self, limits: PhaseOptions) -> bool:
        """The validations of the last `patience` times were no better than one before."""
        return bool(limits.patience) and self.stale >= limits.patience

    def is_finished(self, limits: PhaseOptions) -> bool:
        """A limit of the phase is reached, or it no longer improves."""
        return self.position.progress(limits) >= 1 or self.has_converged(limits)


@dataclass
class Read:
    """What was read up to a step's batch, and what reading it changed.

    Attributes:
        loader: its position.
        negatives: theirs, or None.
        epochs: passes over the data.
        skipped: windows that were not read.
        objective: its own state.
    """

    loader: dict[str, int]
    negatives: dict[str, int] | None
    epochs: float
    skipped: int
    objective: dict[str, Tensor]


@dataclass
class Learner:
    """What learns, and what it learns from.

    Attributes:
        objective: system and loss, on the device.
        optimizer: of the system's parameters.
        average: moving average of the weights, or None.
        loader: batches of windows.
        negatives: read only for their chunks, or None.
    """

    objective: Objective
    optimizer: torch.optim.Optimizer
    average: Average | None
    loader: Loader
    negatives: Loader | None

    def read(self) -> Read:
        """What was read so far."""
        return Read(
            self.loader.state_dict(),
            self.negatives.state_dict() if self.negatives is not None else None,
            self.loader.epochs,
            self.loader.skipped,
            self.objective.extra_state(),
        )


def capture(
    state: TrainState, learner: Learner, read: Read, sums: list[list[float]], identity: Identity, options: Options
) -> tuple[dict[str, dict[str, Tensor]], State]:
    """What is saved.

    Args:
        state: of the phase.
        learner: whose weights and moments are saved.
        read: up to the last step.
        sums: each rank's unwritten metrics, in the order of `state.sums`, and its count of skipped windows.
        identity: what a checkpoint must agree with to be resumed.
        options: of the run.

    Returns:
        Tensors by file, and what goes into state.json.
    """
    system = learner.objective.system
    training = dict(read.objective)
    names: dict[Tensor, str] = {parameter: name for name, parameter in system.named_parameters()}
    for parameter, moments in learner.optimizer.state.items():
        training |= {f"optimizer/{names[parameter]}/{key}": value for key, value in moments.items()}
    training["random/torch"] = torch.get_rng_state()
    files = {MODEL: system.state_dict(), TRAINING: training}
    if learner.average is not None:
        files[AVERAGE] = learner.average.weights
    return files, {
        "identity": identity,
        "options": asdict(options),
        "threads": torch.get_num_threads(),
        "phase": {name: value for name, value in vars(state.position).items() if name != "step"},
        "loader": read.loader,
        "negatives": read.negatives,
        "sums": [dict(zip([*state.sums, SKIPPED], rank, strict=True)) for rank in sums],
        "validated_at": vars(state.validated_at),
        "stale": state.stale,
        "best": state.best if math.isfinite(state.best) else None,
    }


def restore(learner: Learner, checkpoint: Checkpoint, options: Options) -> TrainState:
    """Puts back all that a checkpoint holds, so that the phase goes on exactly where it was written."""
    saved, ranks = checkpoint.state, learner.objective.ranks
    restore_learning(learner, checkpoint)
    restore_reading(learner, checkpoint)
    state = TrainState(Position(saved["step"], **saved["phase"]))
    skipped = [int(each[SKIPPED]) for each in saved["sums"]]
    if ranks.size != len(skipped):  # the first one has those of all
        skipped = [sum(skipped), *[0] * (ranks.size - 1)]
    learner.loader.skipped = skipped[ranks.rank]
    state.sums = dict(saved["sums"][ranks.rank if ranks.size == len(saved["sums"]) else 0])
    state.sums.pop(SKIPPED, None)
    state.validated_at = Position(**saved["validated_at"])
    if saved["best"] is not None:
        if saved["options"]["validation"]["windows"] == options.validation.windows:
            state.best, state.stale = saved["best"], saved["stale"]
        else:
            log.info("validation.windows changed: validations are not compared with those of before")
    if learner.average is not None and checkpoint.average is not None:
        learner.average.load(checkpoint.average)
    torch.set_rng_state(checkpoint.training["random/torch"])
    state.saved_at = Position(**vars(state.position))
    return state


def restore_reading(learner: Learner, checkpoint: Checkpoint) -> None:
    """Goes on in the data where a checkpoint stopped."""
    learner.loader.load_state_dict(checkpoint.state["loader"])
    if learner.negatives is not None and checkpoint.state["negatives"] is not None:
        learner.negatives.load_state_dict(checkpoint.state["negatives"])


def restore_learning(learner: Learner, checkpoint: Checkpoint) -> None:
    """Takes over what a checkpoint learned: weights, the optimizer's moments, and the objective's own state."""
    system, training = learner.objective.system, checkpoint.training
    system.load_state_dict(checkpoint.model)
    if learner.average is not None:
        learner.average.load(checkpoint.model)
    learner.objective.load_extra_state(training)
    tables = {id(x) for group in learner.optimizer.param_groups if group["table"] for x in group["params"]}
    for name, parameter in system.named_parameters():
        keys = ("step", "exp_avg", "exp_avg_sq")
        moments = {key: training.get(f"optimizer/{name}/{key}") for key in keys}
        if id(parameter) in tables:
            step, _, squares = moments.values()
            moments = {"squares": training.get(f"optimizer/{name}/squares")}
            if step is not None and squares is not None:
                log.info(
                    "%s was trained by AdamW, and is by Adagrad from now on: another path than without this stop", name
                )
                moments["squares"] = squares.mean(1) * step
        if parameter.requires_grad and all(x is not None for x in moments.values()):
            learner.optimizer.state[parameter] = {
                # also the step: a fused update reads it where the weights are
                key: x.to(parameter.device, x.dtype if key == "step" else parameter.dtype, copy=True)
                for key, x in moments.items()
                if x is not None
            }
