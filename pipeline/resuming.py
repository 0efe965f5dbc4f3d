"""What a checkpoint holds of a `Trainer`: everything that influences its next step, and how it is put back.

Weights and moving average in the model's own names; in `training.safetensors` the optimizer's moments, counts of chunks, bank,
mined negatives and the random generator; in `state.json` positions of schedule and data, sums of unwritten metrics, the best
validation, and the options.
"""

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pipeline.checkpoints import AVERAGE, MODEL, TRAINING, Checkpoint
from pipeline.metrics import Position

if TYPE_CHECKING:
    from pipeline.trainer import Trainer

SKIPPED = "skipped_windows"


def capture(trainer: "Trainer", sums: list[list[float]]) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Tensors by file, and what goes into state.json; `sums` are each rank's unwritten metrics and count of skipped windows."""
    candidates, model = trainer.objective.candidates, trainer.objective.model
    training = {f"candidates/{k}": v for k, v in candidates.state_dict().items()} if candidates else {}
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, moments in trainer.optimizer.state.items():
        training |= {f"optimizer/{names[parameter]}/{key}": value for key, value in moments.items()}
    training |= {f"miner/{k}": v for k, v in (trainer.miner.state_dict() if trainer.miner else {}).items()}
    training["random/torch"] = torch.get_rng_state()
    files = {MODEL: model.state_dict(), TRAINING: training}
    if trainer.average is not None:
        files[AVERAGE] = trainer.average.weights
    state = {
        "identity": trainer.identity,
        "options": asdict(trainer.options),
        "threads": torch.get_num_threads(),
        "phase": {name: value for name, value in vars(trainer.position).items() if name != "step"},
        "loader": trainer.loader.state_dict(),
        "negatives": trainer.negatives.state_dict() if trainer.negatives is not None else None,
        "sums": [dict(zip([*trainer.sums, SKIPPED], rank, strict=True)) for rank in sums],
        "validated": trainer.validated,
        "stale": trainer.stale,
        "best": trainer.best if math.isfinite(trainer.best) else None,
    }
    return files, state


def restore(trainer: "Trainer", checkpoint: Checkpoint) -> None:
    """Continues exactly where a checkpoint was written."""
    state = checkpoint.state
    restore_learning(trainer, checkpoint)
    trainer.position = Position(state["step"], **state["phase"])
    trainer.loader.load_state_dict(state["loader"])
    if trainer.negatives is not None and state["negatives"] is not None:
        trainer.negatives.load_state_dict(state["negatives"])
    trainer.sums = dict(state["sums"][trainer.ranks.rank if trainer.ranks.size == len(state["sums"]) else 0])
    trainer.loader.skipped = int(trainer.sums.pop(SKIPPED, 0))  # not in checkpoints of before
    trainer.validated, trainer.stale = state["validated"], state["stale"]
    trainer.best = math.inf if state["best"] is None else state["best"]
    if trainer.average is not None and checkpoint.average is not None:
        trainer.average.load(checkpoint.average)
    torch.set_rng_state(checkpoint.training["random/torch"])
    trainer.saved_at = Position(**vars(trainer.position))


def restore_learning(trainer: "Trainer", checkpoint: Checkpoint) -> None:
    """Takes over what a checkpoint learned: weights, the optimizer's moments, the counts of chunks."""
    model = trainer.objective.model
    model.load_state_dict(checkpoint.model)
    if trainer.average is not None:
        trainer.average.load(checkpoint.model)
    training = checkpoint.training
    for prefix, part in (("candidates/", trainer.objective.candidates), ("miner/", trainer.miner)):
        found = {name.removeprefix(prefix): x for name, x in training.items() if name.startswith(prefix)}
        if found and part is not None:
            part.load_state_dict(found)
    for name, parameter in model.named_parameters():
        keys = ("step", "exp_avg", "exp_avg_sq")
        moments = {key: training.get(f"optimizer/{name}/{key}") for key in keys}
        if moments["step"] is not None and parameter.requires_grad:
            trainer.optimizer.state[parameter] = {
                key: x.clone() if key == "step" else x.to(parameter.device, parameter.dtype, copy=True)
                for key, x in moments.items()
                if x is not None
            }
