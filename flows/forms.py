"""Forms of the Prefect UI: their fields, the flows behind them, and the configuration made from the submitted values.

Groups of options are folded until one is opened. Every field of an opened group is empty, which means the preset's
value. A submitted value counts even if it equals the schema's default. Forms list the presets and the newest runs.
"""

import hashlib
import inspect
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, is_dataclass, make_dataclass, replace
from datetime import datetime
from functools import cache, wraps
from glob import iglob
from inspect import Parameter, Signature
from itertools import islice
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_type_hints

from annotated_types import Unit
from coolname.data import config as WORD_LISTS  # of the server's names of flow runs
from prefect import flow
from prefect.runtime import flow_run
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as pydantic_dataclass
from pydantic.fields import FieldInfo

from data.options import ChunkerOptions, ShardOptions, SourceOptions
from data.urls import NO_SECRET, is_remote
from flows.artifacts import ROOMS, name_flows_in_logs, update_parent_progress
from flows.lifecycle import (
    bare_run_name,
    drop_tracebacks,
    finish_flow_run,
    is_inner,
    is_served,
    label_flow_run,
    tag_flow_run,
)
from flows.middleware import VALUES
from haed.options import IEMOptions, ModelOptions
from pipeline import config
from pipeline.arguments import describe_runs, load_run_options
from pipeline.console import make_printable, prepare_logs
from pipeline.run.run_directory import RunFolder, list_runs
from pipeline.run.sharding import check_corpus
from pipeline.web.listing import RunListing
from pipeline.web.runs import ServedRuns

log = logging.getLogger(__name__)
_MOST_RUNS = 200  # in a list
_LOOKED_AT = 1000  # files of a folder
# Kinds of sources that read the same files, the first of them if nothing else is said, by the endings of names.
_FAMILIES = {
    ("jsonl",): (".jsonl", ".ndjson"),
    ("images",): (".png", ".jpg", ".jpeg", ".npz"),
    ("audio",): (".wav", ".flac"),
    ("webdataset",): (".tar",),
    ("stdlib", "text"): (".py",),
    ("text", "wikitext", "enwik8"): (),
}
# What Prefect's form makes up as the name of a flow run: one of these and a short animal; in its former UI a letter and a star.
_SUGGESTED = re.compile(
    "(Awesome|Rustic|Small|Gorgeous|Fantastic|Sleek|Intelligent|Unbranded|Refined|Licensed|Generic|Practical|Ergonomic|"
    "Handcrafted|Tasty|Handmade|Incredible)-.{1,6}|"
    "(alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|omicron|pi|rho|sigma|tau|upsilon|phi|chi|psi|"
    r"omega)\d+-\S+"
)
_LABEL = re.compile(r" \([a-z ]+, \d{4}-\d\d-\d\d \d\d:\d\d\)\s*$")
_CHECKS = ("type", "items", "pattern", "minLength", "maxLength", "minItems", "maxItems")  # of a schema
_PACKED = (".gz", ".xz", ".bz2", ".zst")
_WITHOUT_RUN = ("shard", "sweep")  # flows with the form of a run that they do not train
_ROWS = RunListing(ServedRuns(Path("runs")))  # of the runs in forms


@dataclass(frozen=True)
class SchemaChange:
    """A change to the JSON schema of a parameter, which Prefect makes with a `json_schema_extra` of its own."""

    change: Callable[[dict[str, Any]], None]

    def __get_pydantic_json_schema__(self, core: Any, handler: Any) -> dict[str, Any]:
        schema: dict[str, Any] = handler(core)
        self.change(schema)
        return schema


def _offer_presets(schema: dict[str, Any]) -> None:
    """Offer a list of presets (those for an ordinary machine first), a file path, or nothing."""
    (text,) = (choice for choice in schema["anyOf"] if choice != {"type": "null"})
    names = sorted(config.list_presets(), key=lambda name: (name != "quickstart", name.startswith("paper-"), name))
    schema["anyOf"] = [
        {"type": "string", "enum": names, "title": "a preset"},
        text | {"title": "a YAML file"},
        {"type": "null", "title": "the run's own"},
    ]


def _flatten_optional(schema: dict[str, Any]) -> None:
    """Show an optional field as one box that may stay empty, without a choice of null."""
    (kind,) = (choice for choice in schema.pop("anyOf") if choice != {"type": "null"})
    schema.pop("default", None)
    schema |= kind
    if schema["type"] == "boolean":
        schema["enum"] = [True, False]  # else a switch, which has no third state
    if "const" in schema:
        schema["enum"] = [schema.pop("const")]  # else a box for any text


Preset = Annotated[None, Field(title="as the preset")]  # what the form calls a group that stays folded
_NoSecret = Field(json_schema_extra={"pattern": NO_SECRET})
_Optional = SchemaChange(_flatten_optional)
# Bounds of what may be typed: Prefect's server keeps it for good, and shows it in the list of all flow runs.
LONGEST, MOST, LONGEST_WORD = 4096, 10_000, 1 << 17  # of a text, of a list, and of a word as on the command line
# An item that was added and left empty is "", where the form would submit null, which is none.
Words = Annotated[
    list[Annotated[str, Field(max_length=LONGEST_WORD, json_schema_extra={"pattern": NO_SECRET, "default": ""})]],
    Field(max_length=MOST),
]
Values = Annotated[
    list[Annotated[str, Field(max_length=LONGEST, json_schema_extra={"pattern": VALUES, "default": ""})]],
    Field(max_length=100),
]
Text = Annotated[str, Field(max_length=LONGEST)]
Place = Annotated[str, Field(max_length=LONGEST), _NoSecret]
Run = Annotated[str, Field(min_length=1, max_length=LONGEST), _NoSecret]
Seconds = Annotated[float, Field(ge=0, le=1e10)]
Split = Annotated[Literal["train", "valid", "test"] | None, _Optional]
Temperature = Annotated[Annotated[float, Field(ge=0, le=1000)] | None, _Optional]
Count = Annotated[Annotated[int, Field(ge=1, le=10_000)] | None, _Optional]
_MOST_LETTERS = 300  # of a flow run's name
_TIMED = ("pretrain", "finetune")  # phases with a field of their own for their seconds
PHASES = {"pretrain": config.PretrainOptions, "finetune": config.FinetuneOptions, "train": config.TrainOptions}


@dataclass(frozen=True)
class FormField:
    """A field of a form: its type (for a group, its dataclass), its description, and its default."""

    kind: Any
    description: str
    default: object = None


PLAIN = {
    "preset": FormField(
        Annotated[Place | None, SchemaChange(_offer_presets)],
        "Preset or YAML file. Presets paper-… have the sizes of a paper, all others are for an ordinary machine. "
        "the run's own: the options of an existing run, which is named below.",
        "quickstart",
    ),
    "name": FormField(
        Annotated[str, Field(max_length=240), _NoSecret],  # 200, and what a list adds
        "Name of the run, a folder in runs. An existing run goes on. Empty: the name of the preset, and of the source if "
        "one is given. It is required with the run's own preset.",
        "",
    ),
    "source": FormField(
        Place,
        "File, folder or URL of the data, without a password. Its files show the kind of source. Empty: the preset's.",
        "",
    ),
    "seconds": FormField(
        Seconds, "Training time, divided among the phases as in the preset. Unit: seconds. 0: the preset's limits.", 0
    ),
    **{
        f"{phase}_seconds": FormField(
            Seconds,
            f"Training time of {phase}, in place of its share. Unit: seconds. 0: its share, or the preset's limits.",
            0,
        )
        for phase in _TIMED
    },
    "values": FormField(
        Values,
        "Values to try, each line an option with its values, such as optimizer.learning_rate=0.001,0.003. Each combination is a run, "
        "at most 100 in all.",
        ("seed=0,1,2",),
    ),
    "overrides": FormField(Words, "Further options, each key=value. They are applied last.", ()),
}
GROUPS = {
    "sources": FormField(SourceOptions, "Kind of the source, and how it is split."),
    "chunker": FormField(ChunkerOptions, "How documents are cut into chunks."),
    "sharding": FormField(ShardOptions, "Size of the shards, and number of processes."),
    "batch": FormField(config.BatchOptions, "Windows of a training step."),
    "model": FormField(ModelOptions, "Kind of model, and its parts. Phase two needs the model of phase one."),
    "iem": FormField(IEMOptions, "The IEM loss, in phases that give it a weight."),
    "optimizer": FormField(config.OptimizerOptions, "Learning rates and other options of the optimizer."),
    "validation": FormField(config.ValidationOptions, "How often the model is validated, and on how many windows."),
    "checkpoint": FormField(config.CheckpointOptions, "When checkpoints are saved."),
    "launcher": FormField(config.LauncherOptions, "Processes that train together, and a Dask cluster for sharding."),
}


@dataclass
class FormSubmission:
    """A submitted form: the preset, the overrides as on the command line, the resulting options, and its fields."""

    preset: str
    overrides: list[str]
    options: config.Options
    fields: dict[str, Any]


def check_all_stages(options: config.Options) -> None:
    """Check what all stages of a run need, before the corpus is sharded.

    Raises:
        ConfigError: a phase cannot be trained so, also for want of windows in a step, or the system cannot be built.
        ValueError: the run was trained with another model or on another corpus, or the device is not there.
    """
    from pipeline.run.device import check_device  # with torch, which costs two seconds and serving can do without
    from pipeline.run.system import check_system
    from pipeline.training.stages import check_identity

    for phase in config.phases_to_train(options):
        config.check_training(phase, options)
        config.check_windows(getattr(options, phase), options, options.launcher.processes)
    check_system(options)
    check_device(options.device)
    if (digest := check_corpus(options)) is not None:
        check_identity(options, digest)


def stage_flow(stage: str, summarize: Callable[[Any], str]) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that makes a function the flow of a stage.

    The flow gets a descriptive run name, is labelled with its process, and ends in a state with a one-line summary.

    Args:
        stage: its name.
        summarize: returns the one-line summary of the function's result.
    """
    _prepare_flow_logs()

    def decorate(function: Callable[..., Any]) -> Any:
        @wraps(function)
        def run_stage(*arguments: Any, **named: Any) -> Any:
            label_flow_run()
            update_parent_progress(stage)
            return finish_flow_run(stage, lambda: function(*arguments, **named), summarize)

        return flow(name=stage, flow_run_name=run_name(stage))(run_stage)

    return decorate


@cache
def _prepare_flow_logs() -> None:
    prepare_logs()
    if is_served():
        name_flows_in_logs()
    drop_tracebacks()
    for room in ROOMS:
        logging.getLogger(room).setLevel(logging.INFO)


def config_flow(
    stage: str, fields: str, summarize: Callable[[Any], str], preset: str | None = "quickstart"
) -> Callable[[Callable[[FormSubmission], Any]], Any]:
    """Return a decorator that makes a function the flow of a stage whose form takes a preset and changes to it.

    Args:
        stage: its name.
        fields: names of `PLAIN` and `GROUPS`, in the order of the form.
        summarize: returns the one-line summary of the result, see `stage_flow`.
        preset: the default preset; None: the configuration of the run.
    """
    known = PLAIN | GROUPS | {"phase": FormField(PHASES.get(stage), "Limits and weights of the phase.")}
    known["preset"] = replace(known["preset"], default=preset)
    form_fields = {name: known[name] for name in fields.split()}
    parameters = []
    for name, each in form_fields.items():
        default = list(each.default) if isinstance(each.default, tuple) else each.default
        annotation = each.kind if name in PLAIN else optional_copy(each.kind) | Preset
        parameters.append(Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation))
    form = Signature(parameters)

    def decorate(function: Callable[[FormSubmission], Any]) -> Any:
        def run_form(*arguments: Any, **named: Any) -> Any:
            bound = form.bind(*arguments, **named)
            bound.apply_defaults()
            preset, overrides, values = read_form(stage, bound.arguments)
            options = load_form_options(preset, overrides, values)
            if stage not in _WITHOUT_RUN:
                tag_flow_run(options.name, folder=RunFolder.from_options(options).path)
            return function(FormSubmission(preset, join_overrides(values, overrides), options, bound.arguments))

        descriptions = "\n".join(f"    {name}: {each.description}" for name, each in form_fields.items())
        run_form.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n\nArgs:\n{descriptions}\n"
        run_form.__name__ = run_form.__qualname__ = function.__name__  # by which a worker finds it in its module
        run_form.__module__ = function.__module__
        run_form.__signature__ = form  # type: ignore[attr-defined]
        return stage_flow(stage, summarize)(run_form)

    return decorate


def join_overrides(values: Mapping[str, Any], overrides: Iterable[str]) -> list[str]:
    """Return the values of a form as overrides, and the overrides, which take precedence."""
    return [*(config.write_override(key, value) for key, value in values.items()), *overrides]


def read_form(stage: str, fields: dict[str, Any]) -> tuple[str, list[str], dict[str, Any]]:
    """Return the arguments of `load_options`: a preset or a run's configuration file, overrides, and values by key.

    Raises:
        ConfigError: a value is invalid, or the run does not exist.
    """
    overrides = [word for word in fields["overrides"] if word]  # one that was added and left empty
    typed = dict(word.split("=", 1) for word in overrides if "=" in word)
    preset, name, source = fields["preset"], unlabel_run(fields.get("name", "")), fields.get("source", "").strip()
    if source == "-":
        raise config.ConfigError("source=-: a form has no standard input. Name a file, a folder or a URL")
    if source and not is_remote(source):
        source = str(Path(source).expanduser())
    runs_dir, run = typed.get("runs_dir", "runs"), dict[str, str]()
    if preset is None:
        preset, run = find_run_configuration(name or typed.get("name", ""), runs_dir)
        name, overrides = "", [word for word in overrides if not word.startswith(("name=", "runs_dir="))]
    elif source and not name and "name" not in typed:
        name = name_run_after_source(preset, source, runs_dir)
    overrides = [_fill_in_date(word) if word.startswith("name=") else word for word in overrides]
    sections = {"sources": "source", "sharding": "shard", "phase": stage}
    groups = {sections.get(field, field): group for field, group in fields.items() if group and field not in PLAIN}
    tree = {section: group if isinstance(group, dict) else asdict(group) for section, group in groups.items()}
    values = {key: value for key, value in config.flatten_tree(tree) if value is not None}
    if name:
        values["name"] = _fill_in_date(name)
    if source:
        values["source.path"] = source
        if "source.kind" not in values and "source.kind" not in typed:
            usual = config.load_options(preset).source.kind
            if (kind := detect_source_kind(source, usual)) != usual:
                values["source.kind"] = kind
    return preset, overrides, _divide_seconds(stage, preset, overrides, values, fields) | values | run


_DECIDING = ("model.kind", "finetune.start_from")  # options that decide which phases are trained


def _divide_seconds(
    stage: str, preset: str, overrides: list[str], values: dict[str, Any], fields: dict[str, Any]
) -> dict[str, Any]:
    """Return the limits of phases that follow from the fields for seconds.

    `seconds` is divided as in the preset, or equally. `pretrain_seconds` takes precedence over the share of that phase.
    """
    seconds = fields.get("seconds", 0)
    timed = {phase: each for phase in _TIMED if (each := fields.get(f"{phase}_seconds"))}
    if not seconds and not timed:
        return {}
    kinds = {key: value for key, value in values.items() if key in _DECIDING}
    options = config.load_options(preset, [word for word in overrides if word.partition("=")[0] in _DECIDING], kinds)
    trained = divide_training_time(options, _phases_to_train(stage, options))
    if missing := [phase for phase in timed if phase not in trained]:
        raise config.ConfigError(
            f"{missing[0]}_seconds: model.kind={options.model.kind} is trained in one phase. Use seconds, such as 60"
        )
    limits = {phase: seconds * share for phase, share in trained.items() if seconds and share} | timed
    budget: dict[str, Any] = {f"{phase}.seconds": limit for phase, limit in limits.items()}
    return budget | {f"{phase}.{other}": None for phase in limits for other in ("steps", "epochs")}


def _phases_to_train(stage: str, options: config.Options) -> tuple[str, ...]:
    """Return the phase that a stage trains or, for a stage that trains none itself, all phases of such a run."""
    return (stage,) if stage in PHASES else config.phases_to_train(options)


def divide_training_time(options: config.Options, phases: Iterable[str]) -> dict[str, float]:
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
            description, annotation = (hint.__doc__ or "").split("\n")[0], optional_copy(hint) | Preset
        else:
            kind, *checks = get_args(hint) or [hint]
            info = next((check for check in checks if isinstance(check, FieldInfo)), None)
            if info is None:
                example = "Annotated[int, Field(ge=1, le=64, description=…), Unit(…)]"
                raise TypeError(
                    f"{group.__name__}.{name} has no Field with bounds and a description, such as {example}"
                )
            checks = [*info.metadata, *(check for check in checks if check is not info)]
            units = [f"Unit: {each.unit}." for each in checks if isinstance(each, Unit)]
            users = group.__dataclass_fields__[name].metadata.get("kinds", ())
            advice = [f"Only with kind={', '.join(users)}."] if users else []
            advice += ["For null, use overrides."] if NoneType in get_args(kind) else []
            description = " ".join([info.description or "", *units, *advice])
            extra = info.json_schema_extra
            if kind in (str, str | None):
                checks = [Field(max_length=LONGEST), *checks]
                kind, extra = str, extra or {"pattern": NO_SECRET}  # an empty box is no text anyway
            annotation = Annotated[kind, Field(json_schema_extra=extra), *checks] | None
        shown = Field(title=name, description=description, json_schema_extra=None if nested else _flatten_optional)
        fields.append((name, Annotated[annotation, shown], field(default=None)))
    copy = make_dataclass(group.__name__, fields, kw_only=True)
    copy.__doc__, copy.__module__ = "", __name__  # the text stands beside the name already
    copy = pydantic_dataclass(copy, config=ConfigDict(extra="forbid", title="set here"))
    globals()[copy.__name__] = copy
    return copy


def _fill_in_date(word: str) -> str:
    """Replace {date} by the day for which the flow run was scheduled. A retry does not change that day."""
    if "{date}" not in word:
        return word
    return word.replace("{date}", str(flow_run.scheduled_start_time.astimezone().date()))


def load_form_options(preset: str, overrides: list[str], values: dict[str, Any]) -> config.Options:
    """Return the options that a form asks for, and log how they differ from the preset.

    Raises:
        ConfigError: a preset, key or value is invalid.
    """
    options = config.load_options(preset, overrides, values, log_changes=not is_inner())
    if not is_inner():
        kind = options.model.kind
        changed = config.diff_trees(asdict(config.load_options(preset)), asdict(options))
        texts = [f"{x.given_now} (was {config.format_value(x.was)})" for x in changed if config.applies_to(x.key, kind)]
        changes = ", ".join(texts)
        log.info("preset %s %s", preset, f"with {changes}" if changes else "as it is")
    return options


def run_name(stage: str) -> Callable[[], str]:
    """Return a function that names a flow run by its stage, run and budget."""

    def name_flow_run() -> str:
        now, new_name = bare_run_name(str(flow_run.name or "")), describe_flow_run()
        if now and is_user_chosen(now) and not now.startswith(new_name.partition(" · ")[0]):
            new_name = now
        return make_printable(" ".join(new_name.split()))[:_MOST_LETTERS]  # the server keeps and lists it

    def describe_flow_run() -> str:
        parameters: dict[str, Any] = dict(flow_run.parameters)
        if "preset" not in parameters:
            runs = [unlabel_run(run) for run in [parameters.get("run", ""), *parameters.get("runs", [])] if run]
            return f"{stage} {', '.join(Path(run).name for run in runs)}".strip()
        try:
            options = config.load_options(*read_form(stage, parameters))
        except config.ConfigError:  # the flow itself says what is wrong
            return f"{stage} {unlabel_run(parameters.get('name', '')) or parameters['preset'] or ''}".strip()
        if stage == "shard":
            return f"shard {options.source.path or options.source.kind}"
        limits = [getattr(options, phase) for phase in _phases_to_train(stage, options)]
        budget = [
            f"{sum(values):g} {unit}" if sum(values) < 10 or unit == "epochs" else f"{sum(values):,.0f} {unit}"
            for unit in ("seconds", "steps", "epochs")
            if (values := [value for limit in limits if (value := getattr(limit, unit))])
        ]
        return " · ".join([f"{stage} {options.name}", *budget]).replace(" seconds", " s of training")

    return name_flow_run


def load_tagged_options(run: str, overrides: list[str], reader: str, **values: object) -> config.Options:
    """Return the options of a run with the form's changes, and tag the flow run with the run's name."""
    if not unlabel_run(run):
        raise config.ConfigError(f"no run is named. Choose one of the list, or type its name; {describe_runs()}")
    fields = {key.replace("__", "."): value for key, value in values.items() if value is not None}
    try:
        options = load_run_options(unlabel_run(run), join_overrides(fields, filter(None, overrides)), reader)
    except Exception:
        places = [word.removeprefix("runs_dir=") for word in overrides if word.startswith("runs_dir=")]
        tag_with_runs([unlabel_run(run)], (places or ["runs"])[-1])
        raise
    tag_flow_run(options.name)
    return options


def tag_with_runs(runs: Iterable[str], runs_dir: str) -> None:
    """Tag the flow run with the names of those runs that exist."""
    names = list[str]()
    for run in runs:
        with suppress(OSError, ValueError):
            names.append(RunFolder.find(run, runs_dir).path.name)
    tag_flow_run(*names)


def list_recent_runs() -> list[str]:
    """Return the runs in the folder `runs` as `NAME (STATE, DATE)`: finished, training, others; each newest first.

    Archived runs are left out. The date of a run in use is that of its start, since forms must not change all the time.
    """
    labels = []
    for name in list_runs("runs")[:_MOST_RUNS]:
        # It was removed meanwhile, is in use by somebody else, or has a name that is not UTF-8.
        with suppress(OSError, ValueError):
            name.encode()
            row, config_file = _ROWS.get_row(RunFolder(Path("runs", name))), Path("runs", name, "config.yaml")
            if row.notes.archived:
                continue
            state = row.state
            when = datetime.fromtimestamp(config_file.stat().st_mtime) if state.running else state.changed
            order = 1 if state.running else 0 if state.word in ("finished", "pretrain done") else 2
            labels.append((order, -when.timestamp(), f"{name} ({state.word}, {when:%Y-%m-%d %H:%M})"))
    return [label for *_, label in sorted(labels)]


def unlabel_run(chosen: str) -> str:
    """Return the name of a run that was chosen in a list of `list_recent_runs`, or typed."""
    return _LABEL.sub("", chosen).strip()


def add_run_choices(properties: dict[str, Any], runs: list[str]) -> None:
    """Offer these runs as a list in a form, beside a box for any other. The first run is the default.

    An optional field gets no default: the form would send null, which is refused.
    """
    for shown in properties.values():
        if "type" in shown and shown.get("default", "") is None:
            del shown["default"]
    if not runs:
        return
    listed = {"type": "string", "enum": runs}
    for name, other in (("run", "another folder"), ("name", "another name")):
        if (shown := properties.get(name)) and "enum" not in shown:
            text = {key: shown.pop(key) for key in _CHECKS if key in shown}
            shown["anyOf"] = [text | {"title": other}, listed | {"title": "an existing run"}]
    if "run" in properties:
        properties["run"]["default"] = runs[0]  # for who looks at the form; who submits none is refused
    if shown := properties.get("runs"):
        several = {key: shown.pop(key) for key in _CHECKS if key in shown}
        shown["anyOf"] = [several | {"items": listed, "title": "existing runs"}, several | {"title": "other folders"}]
        shown["default"] = runs[:2]


def find_run_configuration(name: str, runs_dir: str) -> tuple[str, dict[str, str]]:
    """Return the configuration file of an existing run and the options that name its folder.

    Raises:
        ConfigError: no run is named, or it does not exist.
    """
    if not name.strip():
        hint = describe_runs(runs_dir)
        raise config.ConfigError(f"no preset is chosen and no run is named. Name one, such as name=my-run; {hint}")
    try:
        path = RunFolder.find(name.strip(), runs_dir).path
    except FileNotFoundError as error:
        raise config.ConfigError(f"no preset is chosen, and {error}") from None
    return str(path / "config.yaml"), {"name": path.name, "runs_dir": str(path.parent)}


def name_run_after_source(preset: str, source: str, runs_dir: str) -> str:
    """Return a run name made of preset and source, such as quickstart-books, so that sources do not share a run.

    Digits of a hash of the source's location are added if a run of that name has another source.
    """
    words = (Path(preset).stem, Path(source.rstrip("/")).name)
    plain = "-".join(filter(None, (re.sub(r"[^\w.]+", "-", word).strip("-.") for word in words)))
    place = source if is_remote(source) else str(Path(source).expanduser().resolve())
    try:
        then = RunFolder(Path(runs_dir).expanduser() / plain).load_options().source.path
    except (OSError, ValueError):
        return plain
    if then is None or (then if is_remote(then) else str(Path(then).resolve())) == place:
        return plain
    return f"{plain}-{hashlib.sha256(place.encode()).hexdigest()[:4]}"


def detect_source_kind(path: str, usual: str) -> str:
    """Return the kind of a source, judged by the file extensions: the usual kind if it reads them, else one that does.

    A kind counts if its files make up the greater part, in number and in bytes together. Image folders often contain
    lists, and text folders contain images.

    Args:
        path: a file, a folder, a pattern of files, or a URL.
        usual: the preset's kind.
    """
    place = Path(path)
    if is_remote(path) or (place / "manifest.json").is_file():
        return "shards"
    named = place.rglob("*") if place.is_dir() else map(Path, iglob(path, recursive=True))  # a file, or a pattern
    files = list(islice((each for each in named if each.is_file()), _LOOKED_AT))
    if usual == "datasets" or not (files or place.exists()):
        return usual
    number, size = Counter(map(_data_extension, files)), Counter[str]()
    for each in files:
        size[_data_extension(each)] += each.stat().st_size
    shares = {
        family: sum(count[ending] / max(1, count.total()) for count in (number, size) for ending in endings)
        for family, endings in _FAMILIES.items()
    }
    most = max(shares, key=lambda family: shares[family])
    family = most if shares[most] > 1 else ("text", "wikitext", "enwik8")
    if usual in family and not (usual == "stdlib" and not place.is_dir()):
        return usual
    return "text" if "text" in family else family[0]


def _data_extension(path: Path) -> str:
    endings = [each.lower() for each in path.suffixes if each.lower() not in _PACKED]
    return endings[-1] if endings else ""


def is_user_chosen(name: str) -> bool:
    """Return whether a user chose the name of a flow run, rather than Prefect's form or server generating it."""
    generated = {word for each in dict[str, Any](WORD_LISTS).values() for word in each.get("words", ())}
    return not (_SUGGESTED.fullmatch(name) or all(word in generated for word in name.split("-")))
