"""Kinds of models: which options and phases each has, and whether a phase trains a mixture."""

from typing import Any, Literal

from haed.options import SYSTEMS
from pipeline.options import Options, Phase, PhaseOptions

# Options and sections outside `model` that only models of chunks use, and the option to set instead for other models.
OF_CHUNKS = {
    "compile": "",
    "batch.pieces": "",
    "iem": "",
    "optimizer.main_learning_rate": "optimizer.learning_rate",
    "pretrain": "train.…",
    "finetune.start_from": "",
    "finetune": "train.…",
    "train.iem_weight": "",
    "train.decode_fraction": "",
    "evaluate.likelihood": "",
    "evaluate.closed_set": "",
    "evaluate.closed_windows": "",
    "index.min_count": "",
    "index.max_chunks": "",
    "index.layer": "",
    "index.queries": "",
    "index.neighbours": "",
    "analyse": "",
}
# Share of each phase in the training of a whole run, as in the presets.
SHARES: dict[Phase, float] = {"pretrain": 0.6, "finetune": 0.4, "train": 1.0}
LIMITS = ("steps", "seconds", "epochs")  # limits of a phase
OF_TOKENS = ("index.scale",)  # options that only the other models use
# Options of a part that only some of its kinds use.
_OF_PARTS = {
    "model.encoder": {
        "token_width": "mlp linear lstm",
        "hidden": "mlp lstm transformer",
        "layers": "mlp lstm transformer",
    }
    | dict.fromkeys(("heads", "ffn"), "transformer"),
    "model.main": {"units": "lstm"} | dict.fromkeys(("heads", "head_width", "ffn"), "transformer"),
    "model.decoder": {"token_width": "lstm"} | dict.fromkeys(("heads", "ffn"), "transformer"),
}
FITTING = 1 << 17  # default number of known chunks of a mixture


def training_phases(kind: str) -> tuple[Phase, ...]:
    """Return the phases that a whole run of this kind of model trains, in order."""
    return ("pretrain", "finetune") if SYSTEMS[kind].chunks else ("train",)


def is_limited(phase: PhaseOptions) -> bool:
    """Return whether a phase has a limit."""
    return any(getattr(phase, limit) for limit in LIMITS)


def shared_limits(tree: Any, kind: str) -> dict[str, float]:
    """Convert the limits in a file for another kind of model.

    Each phase of this kind without a limit gets its share of their sum.

    Returns:
        Limits by dotted key, such as `train.steps`.
    """
    own, found = training_phases(kind), dict[str, float]()
    endless = [phase for phase in own if not any((tree.get(phase) or {}).get(limit) for limit in LIMITS)]
    for limit in LIMITS:
        total = sum((tree.get(phase) or {}).get(limit) or 0 for phase in SHARES if phase not in own)
        for phase in endless if total else ():
            share = SHARES[phase] * total
            found[f"{phase}.{limit}"] = max(1, round(share)) if limit == "steps" else share
    return found


def required_heads(options: Options) -> int:
    """Return the number of attention heads that a model needs at least: a Retina needs one for each scale."""
    return options.model.retina.windows.count("@") if options.model.kind == "retina" else 1


def max_known_chunks(options: Options) -> int:
    """Return the maximum number of known chunks of a run's mixture; 0: the run has no mixture."""
    asked = options.model.mixture.known
    return (0 if options.chunker.kind == "pixels" else FITTING) if asked is None else asked


def is_mixed(options: Options, phase: PhaseOptions) -> bool:
    """Return whether checkpoints of a phase have the mixture's likelihood, which needs the IEM loss."""
    return max_known_chunks(options) > 0 and phase.iem_weight > 0


def requested_likelihood(options: Options, phase: Phase) -> Literal["mixture", "decoder"] | None:
    """Return the likelihood to compute for a phase's checkpoint; None: the checkpoint has only one."""
    return options.evaluate.likelihood if is_mixed(options, getattr(options, phase)) else None


def applies_to(key: str, kind: str) -> bool:
    """Return whether a model of this kind uses an option, given as a dotted key."""
    return kind in _kinds_with_option(key)


def explain_inapplicable_option(key: str, kind: str) -> str:
    """Return one line on an option that a model of this kind does not use: which kinds do, and what to set instead."""
    whose = [f"model.kind={other}" for other in _kinds_with_option(key)]
    if key.startswith("model."):
        instead = [f"model.{section}.…" for section in SYSTEMS[kind].sections]
    else:
        instead = [other for name, other in OF_CHUNKS.items() if _is_within(key, name)][:1]
    hint = f"set {' or '.join(instead)}" if any(instead) else "leave it out"
    return (
        f"{key} belongs to {', '.join(whose)}, and this is model.kind={kind}: {hint}, or set {whose[0]} for a new run"
    )


def applies_to_part(key: str, options: Options) -> bool:
    """Return whether the chosen kind of a part uses the option, such as an LSTM as the main model."""
    above, _, name = key.rpartition(".")
    kinds = _OF_PARTS.get(above, {}).get(name, "").split()
    return not kinds or getattr(options.model, above.split(".")[1]).kind in kinds


def _kinds_with_option(key: str) -> list[str]:
    if any(_is_within(key, name) for name in OF_CHUNKS):
        return [kind for kind, family in SYSTEMS.items() if family.chunks]
    if key in OF_TOKENS:
        return [kind for kind, family in SYSTEMS.items() if not family.chunks]
    owners = [
        kind for kind, family in SYSTEMS.items() if any(_is_within(key, f"model.{each}") for each in family.sections)
    ]
    return owners or list(SYSTEMS)


def _is_within(key: str, name: str) -> bool:
    return key == name or key.startswith(f"{name}.")
