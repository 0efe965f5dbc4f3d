"""What the forms of the UI ask for, and the configuration that follows from the answers.

Groups of options are folded until one is opened. An opened one shows the schema's own defaults, presets have others: a field
that was left at the schema's default is left to the preset. What must be set back to such a default is set by `overrides`,
which come last.
"""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline import config

PHASES = ("pretrain", "finetune", "train")


def words(
    preset: str,
    name: str,
    source: str,
    seconds: float,
    overrides: list[str],
    groups: dict[str, Any],
    phases: tuple[str, ...] = PHASES,
) -> list[str]:
    """The overrides of a preset that the fields of a form stand for.

    Args:
        preset: name of a preset, or path of a YAML file.
        name: of the run; empty: the preset's.
        source: file, folder or URL; empty: the preset's.
        seconds: of training, over `phases` in the preset's proportion, or half each; 0: the preset's limits.
        overrides: `key=value`, stronger than the other fields.
        groups: sections of the options, as dataclasses, or None.
        phases: among which seconds are divided.

    Raises:
        ConfigError: a value is not one.
    """
    found = [
        f"{key}={json.dumps(value)}"
        for section, group in groups.items()
        if group is not None
        for key, _, value in config.differences(asdict(type(group)()), asdict(group), section)
    ]
    found += [f"name={json.dumps(name)}"] if name else []
    found += [f"source.path={json.dumps(source)}"] if source else []
    if seconds:
        own = config.load(preset)
        limits = [getattr(own, phase).seconds or 0.0 for phase in phases]
        total = sum(limits)
        shares = [limit / total if total else 1 / len(phases) for limit in limits]
        found += [f"{phase}.seconds={seconds * share:g}" for phase, share in zip(phases, shares, strict=True) if share]
        found += [f"{phase}.{other}=null" for phase in phases for other in ("steps", "epochs")]
    return [*found, *overrides]


def run_name(stage: str) -> Callable[[], str]:
    """What a flow run is called in lists: the stage, the run and its budget."""
    phases = (stage,) if stage in PHASES else ("pretrain", "finetune")

    def name() -> str:
        from prefect.runtime import flow_run

        given = dict(flow_run.parameters)
        if "preset" not in given:
            run = given.get("run") or ", ".join(given.get("runs", []))
            return f"{stage} {Path(run).name}"
        answers = (given.get("name", ""), given.get("source", ""), given.get("seconds", 0), given["overrides"])
        try:
            options = config.load(given["preset"], words(given["preset"], *answers, {}, phases))
        except config.ConfigError:
            return f"{stage} {given['preset']}"  # the flow itself says what is wrong
        if stage == "shard":
            return f"shard {options.source.path or options.source.kind}"
        limits = [getattr(options, phase) for phase in phases]
        budget = [
            f"{sum(found):g} {unit}"
            for unit in ("seconds", "steps", "epochs")
            if (found := [value for limit in limits if (value := getattr(limit, unit))])
        ]
        return " · ".join([f"{stage} {options.name}", *budget]).replace(" seconds", " s")

    return name
