"""Load configurations: a YAML preset or file, `key=value` overrides and values, checked against one schema.

Scalars are text, as they are written, until Pydantic gives each the type of its option and checks its bounds. YAML would
read `1e3`, `3:4` and `no` as numbers and a boolean, but in a name they are text. Nothing in a text stands for another
value: no environment variable and no other option can be read.
"""

import glob
import json
import logging
import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, is_dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import yaml

from data.filesystem import CONFIG, DEEPEST, CorruptFileError, check_tree, read_bytes, read_yaml
from data.options import SOURCES
from data.urls import check_folder, check_scheduler, check_url, is_remote, redact_urls, show_url
from pipeline.config.messages import (
    PRESETS,
    explain_inapplicable_option,
    explain_malformed_override,
    explain_section_value,
    explain_unknown_option,
    explain_validation_error,
    list_presets,
    shorten_text,
    shorten_value,
    suggest_name,
)
from pipeline.config.schema import (
    KINDS,
    LIMITS,
    PHASES,
    FinetuneOptions,
    InvalidOptionsError,
    Options,
    Phase,
    PhaseOptions,
    applies_to,
    explain_no_effect,
    get_option,
    is_limited,
    is_mixed,
    load_kind,
    nest_values,
    schema_options,
    set_option,
    training_phases,
    type_of,
    validate_options,
    warn_of_hidden_kind,
)
from pipeline.console import make_printable, warn_on_first_rank

log = logging.getLogger(__name__)
# The first line of a file that `dump_options` wrote.
COMPLETE = "# All options that the model uses."
TEXTS = (str, str | None)
MOST_NAME_BYTES = 200  # file systems take 255, and what is beside a run adds to its name
_CORE = "tag:yaml.org,2002:"
_PATHS = ("source.path", "runs_dir", "shards_dir", "loader.cache_dir")
_PLACES = (*_PATHS, "name", "finetune.start_from", "analyse.against")
# Share of each phase in the training of a whole run, as in the presets.
_SHARES: dict[Phase, float] = {"pretrain": 0.6, "finetune": 0.4, "train": 1.0}
_UNSEEN = ("Cc", "Cf", "Cs", "Zl", "Zp")  # categories of Unicode: control, format, surrogates, separators
_FILLERS = "\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0"  # letters and symbols that are blank


class ConfigError(ValueError):
    """An invalid preset, key or value: a usage error, exit status 2. Names and passwords in URLs are redacted."""

    def __init__(self, message: str) -> None:
        super().__init__(redact_urls(message))


def describe_presets() -> str:
    """Return the presets as text: first those for an ordinary machine, then those of the papers' sizes."""
    small, large = ([name for name in list_presets() if name.startswith("paper-") == paper] for paper in (False, True))
    return f"{', '.join(small)}; with the sizes of the papers {', '.join(large)}"


def find_config_file(config: str) -> Path:
    """Return the file of a preset, or the given path of a YAML file.

    Raises:
        ConfigError: neither exists.
    """
    path = Path(config)
    is_path = path.suffix in (".yaml", ".yml", ".json") or len(path.parts) > 1
    if is_path or path.is_file() and config not in list_presets():
        if (path / "config.yaml").is_file():
            raise ConfigError(f"{path} is a run. Name it without `--config`, or use `--config {path / 'config.yaml'}`")
        if not path.is_file():
            hint = f". {path.stem} is a preset: use `--config {path.stem}`" if path.stem in list_presets() else ""
            raise ConfigError(f"no configuration file at {path}{hint}")
        return path
    path = PRESETS / f"{config}.yaml"
    if not path.is_file():
        if Path("runs", config, "config.yaml").is_file():
            raise ConfigError(f"{config!r} is a run, not a preset. Name it without `--config`")
        hint = f"{suggest_name(config, list_presets())}Presets are {describe_presets()}. A .yaml file is allowed too"
        raise ConfigError(f"there is no preset {config!r}. {hint}")
    return path


def load_options(
    config: str | Path | None = None,
    overrides: Iterable[str] = (),
    values: Mapping[str, Any] | None = None,
    *,
    log_changes: bool = False,
) -> Options:
    """Load and check a configuration.

    `model.kind` may be set to another kind of model than the file's. The file is then adapted:

    - Its options that only the other kind uses are reset.
    - Its name gets the kind as a suffix, unless a name is given.
    - Phases without a limit get a share of the file's limits.
    - A Retina gets at least one attention head for each scale.

    Args:
        config: name of a preset, path of a YAML file, or None for the defaults. The address of a Dask cluster in a file
            is ignored with a warning: only the user may give one.
        overrides: `key=value` pairs, with dots for nested keys: `model.decoder.kind=transformer`.
        values: values by dotted key; overrides of the same key win.
        log_changes: log what was adapted, which of the given options have no effect, and which kinds hide others.

    Raises:
        ConfigError: naming the wrong key or file, and what is accepted.
    """
    path = None if config is None else find_config_file(str(config))
    in_file, is_complete = ({}, True) if path is None else _read_config_file(path)
    typed = {**(values or {}), **parse_overrides(overrides)}
    values_by_key = {**in_file, **typed}

    def origin(key: str) -> str:
        """Return the file that a value is from, for a message."""
        return f"{path}: " if path and key not in typed else ""

    for key in values_by_key.keys() & KINDS.keys():
        try:
            load_kind(key, str(values_by_key[key]))
        except ValueError as error:
            raise ConfigError(f"{origin(key)}{error}") from error
    for key, value in values_by_key.items():
        if key not in schema_options():
            _load_kinds_of_section(key, values_by_key, origin)
        if key not in schema_options():
            raise ConfigError(f"{origin(key)}{explain_unknown_option(key, value)}")
        if is_dataclass(type_of(key)):
            raise ConfigError(f"{origin(key)}{explain_section_value(key, value)}")
    for key in _PLACES:
        if isinstance(text := values_by_key.get(key), str) and (key in typed or not is_complete):
            if key in _PATHS:
                values_by_key[key] = text = os.path.expanduser(text)  # a shell does not expand `~` after `=`
            is_path = key != "name" and len(text) < 4096  # longer ones are none, and a pattern would take minutes
            if "${" in text and not (is_path and (os.path.lexists(text) or any(True for _ in glob.iglob(text)))):
                shown = f"{origin(key)}{key}={shorten_text(text)}"
                raise ConfigError(f"{shown}: ${{…}} is not expanded. Write its value instead")
    try:
        options = validate_options(values_by_key)
    except InvalidOptionsError as error:
        raise _config_error(error, origin) from None  # its own text may hold a password
    _check_loaded_rules(options, path, values_by_key.keys(), typed.keys())
    kind = options.model.kind
    for key in typed:
        if not applies_to(key, kind):
            raise ConfigError(explain_inapplicable_option(key, kind))
    changes: list[str] = []
    if "model.kind" in typed and in_file.get("model.kind", schema_options()["model.kind"].default) != kind:
        changes = _adapt_to_kind(options, in_file, typed, config)
    elif unused := [key for key in in_file if not applies_to(key, kind)]:
        raise ConfigError(f"{path}: {explain_inapplicable_option(unused[0], kind)}")
    if log_changes:
        for change in changes:
            log.info("%s", change)
        for key in typed if is_complete else values_by_key:
            is_chosen = key in typed or get_option(options, key) != schema_options()[key].default
            if is_chosen and applies_to(key, kind) and (choice := explain_no_effect(key, options)):
                warn_on_first_rank("%s has no effect with %s", key, choice)
            if key in KINDS:
                warn_of_hidden_kind(key, get_option(options, key))
    return options


def _config_error(error: InvalidOptionsError, origin: Callable[[str], str] = lambda key: "") -> ConfigError:
    """Return the first three errors of Pydantic as one line. `origin` returns the file that set a key, or ""."""
    mistakes = []
    for item in error.errors[:3]:
        key = ".".join(part for part in item["loc"] if isinstance(part, str))
        mistakes.append(f"{origin(key)}{explain_validation_error(key, item)}")
    return ConfigError("; ".join(mistakes))


def _adapt_to_kind(
    options: Options, in_file: dict[str, Any], typed: Mapping[str, Any], config: str | Path | None
) -> list[str]:
    """Adapt the options of a file to another kind of model, see `load_options`; return a line about each change."""
    kind, changes = options.model.kind, list[str]()
    if in_file and "name" not in typed:
        options.name += f"-{kind.replace('_', '-')}"
    limits = _share_limits(options, in_file)
    if unused := [key for key in in_file if not applies_to(key, kind)]:
        changes.append(f"model.kind={kind} ignores these options of {config}: {', '.join(unused)}")
        for key in unused:
            set_option(options, key, deepcopy(schema_options()[key].default))
    if limits:
        shared = ", ".join(f"{key}={limit:g}" for key, limit in limits.items())
        changes.append(f"model.kind={kind} uses these limits of {config}: {shared}")
        for key, limit in limits.items():
            set_option(options, key, limit)
    scales = options.model.retina.windows.count("@") if kind == "retina" else 1
    if (heads := "model.token.heads") not in typed and get_option(options, heads) < scales:
        changes.append(f"model.kind={kind} needs one head per scale, so {heads}={scales} is set")
        set_option(options, heads, scales)
    return changes


def _share_limits(options: Options, in_file: dict[str, Any]) -> dict[str, float]:
    """Return by dotted key the limits of phases without one: their share of the limits that the file sets for others."""
    phases, limits = training_phases(options.model.kind), dict[str, float]()
    endless = [
        phase
        for phase in phases
        if not is_limited(getattr(options, phase)) and not any(in_file.get(f"{phase}.{limit}") for limit in LIMITS)
    ]
    for limit in LIMITS:
        total = sum(getattr(getattr(options, phase), limit) or 0 for phase in _SHARES if phase not in phases)
        for phase in endless if total else ():
            share = _SHARES[phase] * total
            limits[f"{phase}.{limit}"] = max(1, round(share)) if limit == "steps" else share
    return limits


def _load_kinds_of_section(key: str, values_by_key: Mapping[str, Any], origin: Callable[[str], str]) -> None:
    """Load the kinds that other packages have of an unknown option's section, as the option may be of one of them.

    Raises:
        ConfigError: the section's kind is of a package that is not installed.
    """
    choice = f"{key.rpartition('.')[0]}.kind"
    table, kind = KINDS.get(choice), values_by_key.get(choice)
    if table is None:
        return
    installed = entry_points(group=table.group)
    if isinstance(kind, str) and kind not in table and kind not in installed.names:
        raise ConfigError(
            f"{origin(choice)}{choice}={kind} is not installed (entry points {table.group}), so {key} is unknown. Install its package"
        )
    for entry in installed:
        with suppress(ValueError):  # a package that cannot be loaded is not in use here
            load_kind(choice, entry.name)


def parse_overrides(overrides: Iterable[str]) -> dict[str, Any]:
    """Return the options that key=value pairs set, by dotted key, with values as from `parse_override`. Later pairs win.

    Raises:
        ConfigError: a word is not of that form, or a list or section cannot be parsed.
    """
    values: dict[str, Any] = {}
    for word in overrides:
        if word != word.encode(errors="ignore").decode():
            raise ConfigError(f"{word!r} is not UTF-8. Rename the file or value")
        if "=" not in word:
            raise ConfigError(explain_malformed_override(word))
        try:
            key, value = parse_override(word)
        except CorruptFileError as error:
            raise ConfigError(str(error)) from error
        except yaml.YAMLError as error:
            key, _, value = word.partition("=")
            if value.lstrip()[:1] in ("[", "{"):
                why = f"{getattr(error, 'problem', None) or 'it is not valid YAML'}. Quote text that has special characters."
                raise ConfigError(f'{shorten_text(word)}: {why} Write a list as [1, 2] or ["a", "b"]') from None
        values |= _flatten_sections({key: value})
    return values


def _flatten_sections(tree: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys of a nested dictionary with their values; a dictionary in place of one value stays whole."""
    for name, value in tree.items():
        key = f"{above}{name}"
        kind = type_of(key)
        if isinstance(value, dict) and (value or is_dataclass(kind)) and (kind is None or is_dataclass(kind)):
            yield from _flatten_sections(value, f"{key}.")
        else:
            yield key, value


def _explain_yaml_error(error: BaseException, line: str = "") -> str:
    """Return one line that says why a text is not valid YAML. `line` is the line of the error, if known."""
    problem, mark = getattr(error, "problem", None), getattr(error, "problem_mark", None)
    if not problem or mark is None:
        return " ".join(str(error).split())[:200]
    place = f"line {mark.line + 1}, column {mark.column + 1}: "
    if "'\\t'" in problem or "\t" in line[: mark.column + 1]:
        return f"{place}a tab is not allowed. Indent with spaces"
    if "duplicate key" in problem:
        return f"{place}{problem}. Remove one of them"
    return f"{place}{problem}"[:200]


def _read_config_file(path: Path) -> tuple[dict[str, Any], bool]:
    """Read the options that a file sets, by dotted key, with every scalar as text.

    Return them, and whether `dump_options` wrote the file. The address of a Dask cluster is left out, with a warning: code
    is sent there, so only the user may give it.
    """
    try:
        content = read_yaml(path)
        tree = parse_yaml(content)
    except CorruptFileError as error:
        cause = error.__cause__
        if isinstance(cause, yaml.MarkedYAMLError) and cause.problem_mark is not None:
            lines = read_bytes(path, CONFIG).decode().splitlines()
            line = lines[cause.problem_mark.line] if cause.problem_mark.line < len(lines) else ""
            raise ConfigError(f"{path} is not valid YAML: {_explain_yaml_error(cause, line)}") from error
        raise ConfigError(str(error)) from error
    except (yaml.YAMLError, ValueError, RecursionError, OSError) as error:
        raise ConfigError(f"{path} is not valid YAML: {_explain_yaml_error(error)}") from error
    if tree is not None and not isinstance(tree, dict):
        like = "a list" if isinstance(tree, list) else f"the text {shorten_value(tree)}"
        raise ConfigError(
            f"{path} is not a mapping of options but {like}. Write one option per line, such as `seed: 1`"
        )
    values: dict[str, Any] = {}
    for key, value in _flatten_sections(tree or {}):
        if key in values:  # as `train: {steps: 1}` and as `train.steps: 1`
            raise ConfigError(f"{path} has {key} twice. Remove one of them")
        values[key] = value
    if values.get("launcher.dask") not in (None, "local"):
        address = redact_urls(str(values.pop("launcher.dask")))
        advice = "which is not used. To use it, set launcher.dask=ADDRESS in the command"
        log.warning("%s names a Dask scheduler, %s, %s", path, address, advice)
    return values, content.startswith(COMPLETE)


def parse_yaml(text: str | bytes) -> Any:
    """Parse YAML with every scalar as written, and nulls as None.

    Raises:
        YAMLError: the text is not YAML, repeats a key, or has an unknown tag.
    """

    def plain(node: Any) -> Any:
        if isinstance(node, yaml.MappingNode):
            mapping: dict[str, Any] = {}
            for key, value in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    raise yaml.MarkedYAMLError(None, None, "a key is not a word", key.start_mark)
                if key.value == "<<":
                    why = "merge keys (<<) are not read. Write the options out, or use an anchor for a value"
                    raise yaml.MarkedYAMLError(None, None, why, key.start_mark)
                if key.value in mapping:
                    raise yaml.MarkedYAMLError(None, None, f"{key.value} is a duplicate key", key.start_mark)
                mapping[key.value] = plain(value)
            return mapping
        if isinstance(node, yaml.SequenceNode):
            return [plain(each) for each in node.value]
        if not node.tag.startswith(_CORE) or "python" in node.tag:
            raise yaml.MarkedYAMLError(None, None, f"the tag {node.tag} is unknown", node.start_mark)
        return None if node.tag == f"{_CORE}null" and not node.style else _join_surrogates(node.value)

    root = yaml.compose(text, yaml.SafeLoader)
    return None if root is None else plain(root)


def _join_surrogates(text: str) -> str:
    """Join the surrogate pairs that JSON writes for characters beyond U+FFFF."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")


def parse_override(word: str) -> tuple[str, Any]:
    """Split key=value into the key and its value: text, None, or nested lists and dictionaries of these.

    The value of a text option is used as typed, except that `null` is None and a quoted text is unquoted.

    Raises:
        CorruptFileError: the value is nested too deeply.
    """
    key, typed = word.split("=", 1)
    if key.count(".") > DEEPEST:
        raise CorruptFileError(f"{key[:40]}… is not an option")
    if type_of(key) in TEXTS:
        return key, None if typed == "null" else _strip_quotes(typed)
    check_tree(typed, key)
    return key, parse_yaml(typed) if typed.strip() else typed


def _strip_quotes(typed: str) -> str:
    with suppress(yaml.YAMLError, ValueError):
        if typed[:1] in ("'", '"'):
            check_tree(typed, "")
            node = yaml.compose(typed, yaml.SafeLoader)
            return _join_surrogates(node.value) if isinstance(node, yaml.ScalarNode) else typed
    return typed


def write_override(key: str, value: Any) -> str:
    """Return the key=value that sets an option to exactly this value, whatever characters it holds."""
    return f"{key}={json.dumps(value)}"


def flatten_tree(tree: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys of a nested dictionary with their values, in order."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flatten_tree(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def flatten_options(options: Options) -> dict[str, Any]:
    """Return the options by dotted key, without those that only other kinds of model use."""
    return {key: value for key, value in flatten_tree(asdict(options)) if applies_to(key, options.model.kind)}


def check_options(options: Options) -> Options:
    """Check options from Python or a form against every bound of the schema, and return them with the schema's types.

    Raises:
        ConfigError: naming the keys and the values that they accept.
    """
    try:
        checked = validate_options(dict(flatten_tree(asdict(options))))
    except InvalidOptionsError as error:
        raise _config_error(error) from None  # its own text may hold a password
    _check_rules(checked)
    return checked


def _check_loaded_rules(options: Options, path: Path | None, keys: Set[str], typed: Set[str]) -> None:
    """Check the rules. An error names the file if all given options that it names are from there."""
    try:
        _check_rules(options)
    except ConfigError as error:
        named = keys & set(re.findall(r"[\w.]+", str(error)))
        if path and named and not named & typed:
            raise ConfigError(f"{path}: {error}") from error
        raise


def _check_rules(options: Options) -> None:
    """Check what the schema cannot express, and take blanks off the run's name."""
    for key, value in flatten_tree(asdict(options)):
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and "\0" in text:
                raise ConfigError(f"{key}={text!r}: a NUL character is not allowed")
            if isinstance(text, str) and text != text.encode(errors="ignore").decode():
                raise ConfigError(f"{key}={text!r}: half of a surrogate pair is not allowed")
    offsets = options.source.offsets
    if not all(0 <= place < 2**62 for place in offsets):
        raise ConfigError(f"source.offsets={shorten_value(offsets)} must be two byte positions in a file")
    for phase in PHASES:
        part = getattr(options, phase)
        if part.part_from >= part.part_to:
            raise ConfigError(f"{phase}.part_from={part.part_from} must be below {phase}.part_to={part.part_to}")
    if options.iem.duplicates and options.iem.correction != "none":
        raise ConfigError(
            "iem.duplicates=true needs iem.correction=none, because only distinct chunks can be corrected"
        )
    _check_locations(options)
    options.name = check_name(options.name)


def check_name(name: str) -> str:
    """Return the name of a run without surrounding blanks.

    Raises:
        ConfigError: the name is blank, is not a single folder's name, is too long for one, or holds control or invisible
            characters.
    """
    if not (bare := name.strip()):
        raise ConfigError(f"name={name!r} is blank. Use name=my-run.")
    if bare.startswith(".") or "/" in bare:
        raise ConfigError(f"name={name!r}: must be the name of a folder, without slashes or a dot at its beginning")
    unseen = [sign for sign in bare if unicodedata.category(sign) in _UNSEEN or sign in _FILLERS]
    if unseen or bare != make_printable(bare):
        raise ConfigError(f"name={name!r}: line ends, control characters and invisible characters are not allowed")
    if (size := len(bare.encode())) > MOST_NAME_BYTES:
        raise ConfigError(
            f"name={bare[:40]}… takes {size} bytes as the name of a folder, more than {MOST_NAME_BYTES}. Shorten it"
        )
    return bare


def check_phase(phase: Phase, options: Options) -> None:
    """Check that this kind of model has the phase, and that the phase's options can train it.

    Raises:
        ConfigError: it has no such phase, nothing would be trained, a term of the IEM loss is not installed, or the
            IEM options do not fit the mixture.
    """
    if not applies_to(phase, kind := options.model.kind):
        raise ConfigError(f"model.kind={kind} has no phase one and no phase two. Train it end to end with `haed train`")
    limits = getattr(options, phase)
    if applies_to(f"{phase}.iem_weight", kind) and not limits.iem_weight and not limits.decode_fraction:
        raise ConfigError(
            f"{phase}.iem_weight and {phase}.decode_fraction are both 0, so nothing would be trained. Raise one of them"
        )
    if isinstance(limits, FinetuneOptions) and limits.trains != "everything" and not limits.decode_fraction:
        raise ConfigError(
            f"finetune.trains={limits.trains} trains only the decoder, and finetune.decode_fraction=0 decodes "
            "nothing. Raise finetune.decode_fraction"
        )
    if isinstance(limits, FinetuneOptions) and limits.trains == "decoder_first" and options.launcher.shard:
        raise ConfigError(
            "launcher.shard=true: weights that are sharded cannot begin to be trained within a phase, as "
            "finetune.trains=decoder_first asks for. Use finetune.trains=everything or launcher.shard=false"
        )
    try:
        if limits.iem_weight:
            options.iem.check_terms()
        if is_mixed(options, limits):
            options.iem.check_calibrated()
    except ValueError as error:
        raise ConfigError(str(error)) from None


def check_training(phase: Phase, options: Options) -> None:
    """Check a phase as `check_phase` does, and that it has a limit.

    Raises:
        ConfigError: as `check_phase`, or the phase would never end.
    """
    check_phase(phase, options)
    if not is_limited(getattr(options, phase)):
        raise ConfigError(f"{phase} has no limit. Set {phase}.seconds, {phase}.steps or {phase}.epochs")


def check_windows(limits: PhaseOptions, options: Options, processes: int) -> None:
    """Check that a step of some processes has windows enough for a mixture, if the phase has one.

    Raises:
        ConfigError: it has one window, so no other one shows how likely its chunks are.
    """
    windows = options.batch.sequences * (1 + options.iem.extra_batches) * min(options.iem.group or processes, processes)
    if is_mixed(options, limits):
        try:
            options.iem.check_windows(windows)
        except ValueError as error:
            raise ConfigError(str(error)) from None


def check_output_folder(folder: str | Path, option: str) -> None:
    """Check that a folder to write to has a name and is not a URL.

    Raises:
        ConfigError: it is empty, or a URL.
    """
    try:
        check_folder(folder, option)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _check_locations(options: Options) -> None:
    source = options.source
    try:
        for option in ("shards_dir", "runs_dir", "loader.cache_dir"):
            check_folder(get_option(options, option), option)
        if options.launcher.dask:
            check_scheduler(options.launcher.dask)
        if source.path and is_remote(source.path):
            check_url(source.path, "source.path")
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if source.path and is_remote(source.path) and source.kind in SOURCES and source.kind != "shards":
        raise ConfigError(
            f"source.path={source.path} is a URL, which only source.kind=shards reads. Download the files for source.kind={source.kind}"
        )
    if (start := options.finetune.start_from) and is_remote(start):
        raise ConfigError(f"finetune.start_from={show_url(start)} is a URL. Use a run on this machine")


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar(f"{_CORE}str", text, style='"' if make_printable(text) != text else None)


_Dumper.add_representer(str, _represent_text)


def dump_options(options: Options, scheduler: bool = False) -> str:
    """Return the complete configuration as YAML, which `load_options` reads back unchanged.

    Options that only other kinds of model use are left out.

    Args:
        options: the options to write.
        scheduler: also write the address of a Dask cluster, which `load_options` ignores in a file.
    """
    values = flatten_options(options)
    if values["launcher.dask"] != "local" and not scheduler:
        values["launcher.dask"] = None
    text = yaml.dump(nest_values(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**9)
    return f"{COMPLETE}\n{make_printable(text)}"


def format_value(value: Any) -> str:
    """Return a value as it is written after `key=` on the command line."""
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


@dataclass
class Difference:
    """A dotted key with different values in two nested dictionaries, and both values."""

    key: str
    was: Any
    now: Any

    @property
    def given_before(self) -> str:
        """`key=value` with the first value."""
        return f"{self.key}={format_value(self.was)}"

    @property
    def given_now(self) -> str:
        """`key=value` with the second value."""
        return f"{self.key}={format_value(self.now)}"


def diff_trees(was: Any, now: Any, key: str = "") -> Iterator[Difference]:
    """Yield the differences between two nested dictionaries, in order."""
    if isinstance(was, dict) and isinstance(now, dict):
        for name in [*now, *(name for name in was if name not in now)]:
            yield from diff_trees(was.get(name), now.get(name), f"{key}.{name}" if key else name)
    elif was != now:
        yield Difference(key, was, now)
