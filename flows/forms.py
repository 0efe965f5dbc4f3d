"""Forms of the Prefect UI: their fields, the flows behind them, and the configuration made from the submitted values.

Groups of options are folded until one is opened. Every field of an opened group is empty, which means the preset's
value. A submitted value counts even if it equals the schema's default.
"""

import inspect
import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, is_dataclass, make_dataclass, replace
from functools import cache, wraps
from inspect import Parameter, Signature
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_type_hints

from pydantic import ConfigDict, Field
from pydantic.fields import FieldInfo

from data.options import ChunkerOptions, ShardOptions, SourceOptions
from data.urls import NO_SECRET
from flows.artifacts import update_parent_progress
from flows.choices import (
    FormSchemaChange,
    detect_source_kind,
    find_run_configuration,
    flatten_optional_field,
    is_user_chosen,
    name_run_after_source,
    offer_presets,
)
from flows.lifecycle import ROOMS, drop_tracebacks, finish_flow_run, label_flow_run, tag_flow_run
from haed.options import IEMOptions, ModelOptions
from pipeline import config
from pipeline.config import (
    BatchOptions,
    CheckpointOptions,
    FinetuneOptions,
    LauncherOptions,
    OptimizerOptions,
    Options,
    PretrainOptions,
    TrainOptions,
    ValidationOptions,
    applies_to,
    training_phases,
    write_override,
)
from pipeline.console import make_printable, prepare_logs
from pipeline.run.run_directory import RunFolder

log = logging.getLogger(__name__)
Preset = Annotated[None, Field(title="as the preset")]  # what the form calls a group that stays folded
_NoSecret = Field(json_schema_extra={"pattern": NO_SECRET})
# Bounds of what may be typed: Prefect's server keeps it for good, and shows it in the list of all flow runs.
LONGEST, MOST, LONGEST_WORD = 4096, 10_000, 1 << 17  # of a text, of a list, and of a word as on the command line
# An item that was added and left empty is "", where the form would submit null, which is none.
Words = Annotated[
    list[Annotated[str, Field(max_length=LONGEST_WORD, json_schema_extra={"pattern": NO_SECRET, "default": ""})]],
    Field(max_length=MOST),
]
Text = Annotated[str, Field(max_length=LONGEST)]
Place = Annotated[str, Field(max_length=LONGEST), _NoSecret]
Run = Annotated[str, Field(min_length=1, max_length=LONGEST), _NoSecret]
Seconds = Annotated[float, Field(ge=0, le=1e10)]
Split = Annotated[Literal["train", "valid", "test"] | None, FormSchemaChange(flatten_optional_field)]
Temperature = Annotated[Annotated[float, Field(ge=0, le=1000)] | None, FormSchemaChange(flatten_optional_field)]
Count = Annotated[Annotated[int, Field(ge=1, le=10_000)] | None, FormSchemaChange(flatten_optional_field)]
_NAMED = 300  # characters of a flow run's name
PHASES = {"pretrain": PretrainOptions, "finetune": FinetuneOptions, "train": TrainOptions}


@dataclass(frozen=True)
class FormField:
    """A field of a form: its type (for a group, its dataclass), its description, and its default."""

    kind: Any
    about: str
    default: object = None


PLAIN = {
    "preset": FormField(
        Annotated[Place | None, FormSchemaChange(offer_presets)],
        "what is trained and how: of an ordinary machine, or of a paper's size (paper-…); the run's own is that of an "
        "existing run, named below",
        "quickstart",
    ),
    "name": FormField(
        Annotated[str, Field(max_length=200), _NoSecret],
        "of the run, a folder under runs: an existing one goes on; empty: the preset's, with the source's if one is given; "
        "required with the run's own preset",
        "",
    ),
    "source": FormField(
        Place,
        "file, folder or URL (no password in it) of the data, whose kind is seen by its files; empty: the preset's",
        "",
    ),
    "seconds": FormField(
        Seconds,
        "of training, divided among the phases as in the preset; 0: the preset's limits",
        0,
    ),
    "overrides": FormField(Words, "further options, each key=value as on the command line; these come last", ()),
}
GROUPS = {
    "sources": FormField(SourceOptions, "kind of the source and how it is split"),
    "chunker": FormField(ChunkerOptions, "how it is cut into chunks"),
    "sharding": FormField(ShardOptions, "size of the shards, and number of worker processes"),
    "batch": FormField(BatchOptions, "windows of a step"),
    "model": FormField(
        ModelOptions, "its kind, and the parts that are of this kind; the same in phase two as in phase one"
    ),
    "iem": FormField(IEMOptions, "the IEM loss, where the phase gives it a weight"),
    "optimizer": FormField(OptimizerOptions, "learning rates and the rest"),
    "validation": FormField(ValidationOptions, "how often, and on how much"),
    "checkpoint": FormField(CheckpointOptions, "when to save"),
    "launcher": FormField(LauncherOptions, "processes that train together, and a Dask cluster to shard on"),
}


@dataclass
class FormSubmission:
    """A submitted form: the preset, the overrides as on the command line, and the resulting options."""

    preset: str
    overrides: list[str]
    options: Options


def stage_flow(stage: str, told: Callable[[Any], str]) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that makes a function the flow of a stage.

    The flow gets a descriptive run name, is labelled with its process, and ends in a state with a one-line summary.

    Args:
        stage: its name.
        told: returns the one-line summary of the function's result.
    """
    from prefect import flow

    prepare_logs()
    drop_tracebacks()
    for room in ROOMS:
        logging.getLogger(room).setLevel(logging.INFO)

    def made(function: Callable[..., Any]) -> Any:
        @wraps(function)
        def begun(*arguments: Any, **named: Any) -> Any:
            label_flow_run()
            update_parent_progress(stage)
            return finish_flow_run(stage, lambda: function(*arguments, **named), told)

        return flow(name=stage, flow_run_name=run_name(stage))(begun)

    return made


def config_flow(
    stage: str, fields: str, told: Callable[[Any], str], preset: str | None = "quickstart"
) -> Callable[[Callable[[FormSubmission], Any]], Any]:
    """Return a decorator that makes a function the flow of a stage whose form takes a preset and changes to it.

    Args:
        stage: its name.
        fields: names of `PLAIN` and `GROUPS`, in the order of the form.
        told: returns the one-line summary of the result, see `staged`.
        preset: the default preset; None: the configuration of the run.
    """
    known = PLAIN | GROUPS | {"phase": FormField(PHASES.get(stage), "limits and weights of the phase")}
    known["preset"] = replace(known["preset"], default=preset)
    shown = {name: known[name] for name in fields.split()}
    form = Signature(
        [
            Parameter(
                name,
                Parameter.POSITIONAL_OR_KEYWORD,
                default=list(ask.default) if isinstance(ask.default, tuple) else ask.default,
                annotation=ask.kind if name in PLAIN else optional_copy(ask.kind) | Preset,
            )
            for name, ask in shown.items()
        ]
    )

    def made(function: Callable[[FormSubmission], Any]) -> Any:
        def answered(*arguments: Any, **named: Any) -> Any:
            given = form.bind(*arguments, **named)
            given.apply_defaults()
            preset, typed, values = read_form(stage, given.arguments)
            options = load_form_options(preset, typed, values)
            tag_flow_run(options.name, folder=RunFolder.from_options(options).path)
            overrides = [*(write_override(key, value) for key, value in values.items()), *typed]
            return function(FormSubmission(preset, overrides, options))

        listed = "\n".join(f"    {name}: {ask.about}" for name, ask in shown.items())
        answered.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n\nArgs:\n{listed}\n"
        answered.__name__ = answered.__qualname__ = function.__name__  # by which a worker finds it in its module
        answered.__module__ = function.__module__
        answered.__signature__ = form  # type: ignore[attr-defined]
        return stage_flow(stage, told)(answered)

    return made


def read_form(stage: str, given: dict[str, Any]) -> tuple[str, list[str], dict[str, Any]]:
    """Return what a form stands for: a preset or a run's configuration file, overrides, and values by dotted key.

    They are the arguments of `load_options`.

    Raises:
        ConfigError: a value is invalid, or the run does not exist.
    """
    typed = [word for word in given["overrides"] if word]  # one that was added and left empty
    preset: str = given["preset"]
    run: dict[str, str] = {}
    if preset is None:
        known = dict(word.split("=", 1) for word in typed if "=" in word)
        preset, run = find_run_configuration(given.get("name") or known.get("name", ""), known.get("runs_dir", "runs"))
        typed = [word for word in typed if not word.startswith(("name=", "runs_dir="))]
    sections = {"sources": "source", "sharding": "shard", "phase": stage}
    groups = {sections.get(name, name): value for name, value in given.items() if name not in PLAIN}
    name = "" if run else given.get("name", "")
    if not run and not name and not any(word.startswith("name=") for word in typed) and (source := given.get("source")):
        name = name_run_after_source(preset, source, next((w[9:] for w in typed if w.startswith("runs_dir=")), "runs"))
    typed = [_fill_in_date(word) if word.startswith("name=") else word for word in typed]
    values = collect_values(preset, name, given.get("source", ""), given.get("seconds", 0), typed, groups, stage)
    return preset, typed, values | run


def _phases_to_train(stage: str, kind: str) -> tuple[str, ...]:
    """Return the phase that a stage trains or, for a stage that trains none itself, all phases of such a model."""
    return (stage,) if stage in PHASES else training_phases(kind)


def divide_training_time(options: Options, phases: Iterable[str]) -> dict[str, float]:
    """Return the share of training time of each phase: in proportion to its seconds, or equal shares."""
    limits = {phase: getattr(options, phase).seconds or 0.0 for phase in phases}
    total = sum(limits.values())
    return {phase: limit / total if total else 1 / len(limits) for phase, limit in limits.items()}


@cache
def optional_copy(group: Any) -> Any:
    """Return a dataclass with the same fields, bounds and descriptions, in which every field is optional.

    It becomes an attribute of this module under its name, so that its instances can be pickled.
    """
    fields = []
    for name, hint in get_type_hints(group, include_extras=True).items():
        nested = is_dataclass(hint)
        if nested:
            about, given = (hint.__doc__ or "").split("\n")[0], optional_copy(hint) | Preset
        else:
            kind, *checks = get_args(hint)
            (said,) = (check for check in checks if isinstance(check, FieldInfo))
            checks = [*said.metadata, *(check for check in checks if check is not said)]
            about = f"{said.description}{'; null: by overrides' if NoneType in get_args(kind) else ''}"
            extra = said.json_schema_extra
            if kind in (str, str | None):
                checks = [Field(max_length=LONGEST), *checks]
                kind, extra = str, extra or {"pattern": NO_SECRET}  # an empty box is no text anyway
            given = Annotated[kind, Field(json_schema_extra=extra), *checks] | None
        shown = Field(title=name, description=about, json_schema_extra=None if nested else _flatten_optional_schema)
        fields.append((name, Annotated[given, shown], field(default=None)))
    made = make_dataclass(group.__name__, fields, kw_only=True)
    made.__doc__, made.__module__ = "", __name__  # the text stands beside the name already
    made.__pydantic_config__ = ConfigDict(extra="forbid", title="set here")  # type: ignore[attr-defined]
    globals()[made.__name__] = made
    return made


def _flatten_optional_schema(schema: dict[str, Any]) -> None:
    """Turn the schema of an optional field into one box that may stay empty, without a choice of null."""
    schema.pop("default")
    schema |= flatten_optional_field(schema)
    del schema["anyOf"]
    if schema["type"] == "boolean":
        schema["enum"] = [True, False]  # else a switch, which has no third state
    if "const" in schema:
        schema["enum"] = [schema.pop("const")]  # else a box for any text


def collect_values(
    preset: str,
    name: str,
    source: str,
    seconds: float,
    overrides: list[str],
    groups: dict[str, Any],
    stage: str = "haed",
) -> dict[str, Any]:
    """Return the options of a preset that the fields of a form change, by dotted key.

    Args:
        preset: name of a preset, or path of a YAML file.
        name: name of the run; empty: the preset's.
        source: file, folder or URL; empty: the preset's.
        seconds: training time, divided among the phases as in the preset, or equally; 0: the preset's limits.
        overrides: `key=value`, which take precedence over the values.
        groups: sections of the options, as instances of `twin` classes, dictionaries or None.
        stage: the stage that the form belongs to.

    Raises:
        ConfigError: a value is invalid.
    """
    tree = {section: group if isinstance(group, dict) else asdict(group) for section, group in groups.items() if group}
    values = {key: value for key, value in config.flatten_tree(tree) if value is not None}
    if name:
        values["name"] = _fill_in_date(name)
    if source:
        values["source.path"] = source
        if "source.kind" not in values and not any(word.startswith("source.kind=") for word in overrides):
            usual = config.load_options(preset).source.kind
            if (kind := detect_source_kind(source, usual)) != usual:
                values["source.kind"] = kind
    if not seconds:
        return values
    kinds = {key: value for key, value in values.items() if key == "model.kind"}
    options = config.load_options(preset, [word for word in overrides if word.startswith("model.kind=")], kinds)
    trained = divide_training_time(options, _phases_to_train(stage, options.model.kind))
    budget: dict[str, Any] = {f"{phase}.seconds": seconds * share for phase, share in trained.items() if share}
    return budget | {f"{phase}.{other}": None for phase in trained for other in ("steps", "epochs")} | values


def _fill_in_date(word: str) -> str:
    """Replace {date} by the day for which the flow run was scheduled. A retry does not change that day."""
    if "{date}" not in word:
        return word
    from prefect.runtime import flow_run

    return word.replace("{date}", str(flow_run.scheduled_start_time.astimezone().date()))


def load_form_options(preset: str, overrides: list[str], values: dict[str, Any]) -> Options:
    """Return the options that a form asks for, and log how they differ from the preset.

    Raises:
        ConfigError: a preset, key or value is invalid.
    """
    options = config.load_options(preset, overrides, values, log_changes=not is_inner())
    if not is_inner():
        kind = options.model.kind
        changed = config.diff_trees(asdict(config.load_options(preset)), asdict(options))
        texts = {each.key: f"{each.key}={json.dumps(each.now)} (was {json.dumps(each.was)})" for each in changed}
        said = ", ".join(text for key, text in texts.items() if applies_to(key, kind))
        log.info("preset %s %s", preset, f"with {said}" if said else "as it is")
    return options


def is_inner() -> bool:
    """Return whether this flow run is a stage of another flow run, which does the logging."""
    from prefect.context import FlowRunContext

    context = FlowRunContext.get()
    return bool(context and context.flow_run and context.flow_run.parent_task_run_id)


def run_name(stage: str) -> Callable[[], str]:
    """Return a function that names a flow run by its stage, run and budget."""

    def name() -> str:
        return make_printable(" ".join(called().split()))[:_NAMED]  # the server keeps and lists it

    def called() -> str:
        from prefect.runtime import flow_run

        given: dict[str, Any] = dict(flow_run.parameters)
        if flow_run.name and is_user_chosen(flow_run.name) and not flow_run.name.startswith(f"{stage} "):
            return str(flow_run.name)
        if "preset" not in given:
            run = given.get("run") or ", ".join(given.get("runs", [])) or given.get("name", "")
            return f"{stage} {Path(run).name}"
        try:
            options = config.load_options(*read_form(stage, given))
        except config.ConfigError:
            return f"{stage} {given.get('name') or given['preset'] or ''}".strip()  # the flow itself says what is wrong
        if stage == "shard":
            return f"shard {options.source.path or options.source.kind}"
        limits = [getattr(options, phase) for phase in _phases_to_train(stage, options.model.kind)]
        budget = [
            f"{sum(found) if unit == 'epochs' else round(sum(found)):g} {unit}"
            for unit in ("seconds", "steps", "epochs")
            if (found := [value for limit in limits if (value := getattr(limit, unit))])
        ]
        return " · ".join([f"{stage} {options.name}", *budget]).replace(" seconds", " s of training")

    return name
