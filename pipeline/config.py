"""Load configurations: a YAML preset or file and `key=value` overrides, checked against one schema.

OmegaConf rejects unknown keys and wrong types, Pydantic checks the bounds. Both name the key.
"""

import difflib
import logging
import math
import os
import unicodedata
from collections.abc import Iterable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError
from yaml import MarkedYAMLError, YAMLError

from data.checked import CONFIG, CorruptFileError, read_bytes, read_yaml
from data.options import SOURCES
from data.urls import check_folder, check_scheduler, check_url, is_remote, redact_urls, show_url
from haed.options import SYSTEMS
from pipeline.console import make_printable
from pipeline.interpolation import InterpolationError, TextProtector, has_references
from pipeline.kinds import applies_to, explain_inapplicable_option, is_limited, is_mixed, required_heads, shared_limits
from pipeline.options import FinetuneOptions, LauncherOptions, Options, Phase
from pipeline.plainly import (
    PRESETS,
    explain_malformed_override,
    explain_omegaconf_error,
    explain_validation_error,
    find_mistake,
    list_presets,
    shorten_text,
    shorten_value,
)
from pipeline.trees import drop_key, flatten_tree, get_option, set_option
from pipeline.verbatim import RESOLVED, TEXTS, dump_yaml, parse_override, parse_yaml, type_of

log = logging.getLogger(__name__)
_UNSEEN = ("Cc", "Cf", "Cs", "Zl", "Zp")  # categories of Unicode: control, format, surrogates, separators
_FILLERS = "\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0"  # letters and symbols that are blank


class ConfigError(ValueError):
    """An invalid preset, key or value: a usage error, exit status 2. Names and passwords in URLs are redacted."""

    def __init__(self, message: str) -> None:
        super().__init__(redact_urls(message))


def describe_presets() -> str:
    """Return the presets as text: first those for an ordinary machine, then those of the papers' sizes."""
    small, large = ([name for name in list_presets() if name.startswith("paper-") == paper] for paper in (False, True))
    return f"{', '.join(small)}; of the papers' sizes {', '.join(large)}"


def find_config_file(config: str) -> Path:
    """Return the file of a preset, or the given path of a YAML file.

    Raises:
        ConfigError: neither exists.
    """
    path = Path(config)
    if (
        path.suffix in (".yaml", ".yml", ".json")
        or len(path.parts) > 1
        or path.is_file()
        and config not in list_presets()
    ):
        if (path / "config.yaml").is_file():
            raise ConfigError(f"{path} is a run: name it without --config, or give {path / 'config.yaml'}")
        if not path.is_file():
            hint = f"; {path.stem} is a preset: --config {path.stem}" if path.stem in list_presets() else ""
            raise ConfigError(f"no configuration file at {path}{hint}")
        return path
    path = PRESETS / f"{config}.yaml"
    if not path.is_file():
        if Path("runs", config, "config.yaml").is_file():
            raise ConfigError(f"no preset {config!r}: it is a run, which is named without --config")
        known = {name.replace("-", "_"): name for name in list_presets()}
        close = difflib.get_close_matches(config.lower().replace("-", "_"), known, 1)
        hint = f"did you mean {known[close[0]]}? " if close else ""
        raise ConfigError(f"no preset {config!r}: {hint}presets are {describe_presets()}; or give a .yaml file")
    return path


def load_options(config: str | Path | None = None, overrides: list[str] | tuple[str, ...] = ()) -> Options:
    """Load and check a configuration.

    An override of `model.kind` may ask for another kind of model than the file. The file is then adapted:

    - Its options that only the other kind uses are reset.
    - Its name gets the kind as a suffix, unless `overrides` set a name.
    - Phases without a limit get a share of the file's limits.
    - A Retina gets at least one attention head for each scale.

    `pipeline.arguments.log_unused_options` logs these changes.

    Args:
        config: name of a preset, path of a YAML file, or None for the defaults. The address of a Dask cluster in a file
            is ignored with a warning: only the user may give one.
        overrides: `key=value` pairs, with dots for nested keys: `model.decoder.kind=transformer`.

    Raises:
        ConfigError: naming the wrong key or file, and what is accepted.
    """
    where = "the command line"
    in_file: Any = {}
    tree: Any = {}
    protection = TextProtector()
    try:
        merged = _options_schema()
        resolved = False
        if config is not None:
            path = find_config_file(str(config))
            where = str(path)
            tree, resolved = _read_config_file(path)
            _refuse_mistakes(tree, f"{path}: ", resolved)
            merged = OmegaConf.merge(merged, protection.protect_tree(tree, resolved))
            in_file = protection.restore_texts(
                _select_typed_values(tree, OmegaConf.to_container(merged, resolve=False))
            )
            merged = _without_scheduler(merged, in_file, path)
            where = "the command line"
        tree = parse_overrides(overrides)
        _refuse_mistakes(tree)
        options = OmegaConf.to_object(OmegaConf.merge(merged, protection.protect_tree(tree)) if tree else merged)
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"{where}: {protection.restore_texts(explain_omegaconf_error(error))}"
        ) from None  # its own may hold a password
    except (YAMLError, UnicodeError, RecursionError, OSError) as error:
        raise ConfigError(f"{where}: not readable as YAML: {_explain_yaml_error(error)}") from error
    except InterpolationError as error:
        raise ConfigError(f"{where}: {error}") from None
    except ValueError as error:  # from Python, for a number with thousands of digits
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{where}: {error}") from None
    assert isinstance(options, Options)
    for key, value in flatten_tree(asdict(options)):
        set_option(options, key, protection.restore_texts(value))
    _expand_home(options, dict(flatten_tree(in_file)) if resolved else {}, dict(flatten_tree(tree)))
    kind = check_options(options).model.kind
    if wrong := _foreign_keys(tree, kind):
        raise ConfigError(explain_inapplicable_option(wrong[0], kind))
    defaults = Options()
    if (in_file.get("model") or {}).get("kind", defaults.model.kind) != kind:
        if in_file and "name" not in tree:
            options.name += f"-{kind.replace('_', '-')}"
        _fit_to_kind(options, in_file, tree)
        return options
    for key in _foreign_keys(in_file, kind):
        if get_option(options, key) != get_option(
            defaults, key
        ):  # config.yaml holds all options, so defaults are accepted
            raise ConfigError(f"{find_config_file(str(config))}: {explain_inapplicable_option(key, kind)}")
    return options


def parse_overrides(overrides: Iterable[str]) -> dict[str, Any]:
    """Return key=value pairs as nested dictionaries, with values as from `parse_override`. Later pairs win.

    Raises:
        ConfigError: a word is not of that form, or a list or section cannot be parsed.
    """
    found: dict[str, Any] = {}
    for word in overrides:
        if word != word.encode(errors="ignore").decode():
            raise ConfigError(f"{word!r} is not UTF-8, in which a configuration is written: rename what it names")
        if "=" not in word:
            raise ConfigError(explain_malformed_override(word))
        try:
            key, value = parse_override(word)
        except CorruptFileError as error:
            raise ConfigError(str(error)) from error
        except YAMLError as error:
            signs = " Texts with signs in them stand in quotes." if word.partition("=")[2][:1] == "[" else ""
            why = getattr(error, "problem", None) or "it is not readable"
            raise ConfigError(f'{shorten_text(word)}: {why}.{signs} Lists are such as [1, 2] or ["a", "b"]') from None
        if value == "???" and type_of(key) not in TEXTS:
            raise ConfigError(f"{word} is no value")
        *above, last = key.split(".")
        part = found
        for name in above:
            inner = part.get(name)
            part[name] = part = inner if isinstance(inner, dict) else {}
        part[last] = _merge_trees(part.get(last), value)
    return found


def _merge_trees(below: Any, above: Any) -> Any:
    """Merge two nested dictionaries. Values of the second win."""
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    return below | {name: _merge_trees(below.get(name), value) for name, value in above.items()}


def _refuse_mistakes(tree: dict[str, Any], where: str = "", resolved: bool = False) -> None:
    """Raise ConfigError if `find_mistake` finds one in the options."""
    if mistake := find_mistake(tree, resolved):
        raise ConfigError(f"{where}{mistake}")


def _explain_yaml_error(error: BaseException, line: str = "") -> str:
    """Return one line that says why a text is not valid YAML. `line` is the line of the error, if known."""
    problem, mark = getattr(error, "problem", None), getattr(error, "problem_mark", None)
    if not problem or mark is None:
        return " ".join(str(error).split())[:200]
    place = f"line {mark.line + 1}, column {mark.column + 1}: "
    if "'\\t'" in problem or "\t" in line[: mark.column + 1]:
        return f"{place}there is a tab: indent by blanks"
    if "a second time" in problem:
        return f"{place}{problem}: leave one of them out"
    return f"{place}{problem}"[:200]


def _read_config_file(path: Path) -> tuple[dict[str, Any], bool]:
    """Read the options that a file sets, with every scalar as text.

    Returns:
        The nested dictionaries, and whether the file was written by `dump`, so that `${` in its texts has no meaning.

    Raises:
        ConfigError: the file holds no options.
        YAMLError: the file is not readable as YAML.
    """
    try:
        content = read_yaml(path)
    except CorruptFileError as error:
        cause = error.__cause__
        if isinstance(cause, MarkedYAMLError) and cause.problem_mark is not None:
            lines = read_bytes(path, CONFIG).decode().splitlines()
            line = lines[cause.problem_mark.line] if cause.problem_mark.line < len(lines) else ""
            raise ConfigError(f"{path}: not readable as YAML: {_explain_yaml_error(cause, line)}") from error
        raise ConfigError(str(error)) from error
    tree = parse_yaml(content)
    if tree is not None and not isinstance(tree, dict):
        like = "a list" if isinstance(tree, list) else f"the text {shorten_value(tree)}"
        raise ConfigError(f"{path} is not a mapping of options but {like}: write each on a line, as `seed: 1`")
    return tree or {}, content.startswith(RESOLVED)


def _select_typed_values(tree: Any, merged: Any) -> Any:
    """Return the keys of a file's tree with the typed values of the merged configuration."""
    if not isinstance(tree, dict) or not isinstance(merged, dict):
        return merged
    return {name: _select_typed_values(value, merged[name]) for name, value in tree.items()}


def _expand_home(options: Options, resolved: dict[str, Any], asked: dict[str, Any]) -> None:
    """Expand `~` in paths, because a shell does not expand it after `=`."""
    for key in ("source.path", "runs_dir", "shards_dir", "loader.cache_dir"):
        if (place := get_option(options, key)) and (key in asked or key not in resolved):
            set_option(options, key, os.path.expanduser(place))


def _fit_to_kind(options: Options, in_file: Any, asked: Any) -> None:
    """Adapt the options of a file to the kind of model that was requested instead; see `load`."""
    kind, defaults = options.model.kind, Options()
    changed = {key: get_option(defaults, key) for key in _foreign_keys(in_file, kind)}
    for key, limit in shared_limits(in_file, kind).items():
        if not is_limited(getattr(options, key.split(".")[0])):
            changed[key] = limit
    if (heads := "model.token.heads") not in dict(flatten_tree(asked)):
        changed[heads] = max(get_option(options, heads), required_heads(options))
    for key, value in changed.items():
        set_option(options, key, value)


def read_given_options(config: str | Path | None) -> Any:
    """Return the options that a file sets, as nested dictionaries; empty without a file."""
    if config is None:
        return {}
    protection = TextProtector()
    tree, resolved = _read_config_file(find_config_file(str(config)))
    merged = OmegaConf.merge(_options_schema(), protection.protect_tree(tree, resolved))
    return protection.restore_texts(_select_typed_values(tree, OmegaConf.to_container(merged, resolve=False)))


def find_interpolations(config: str | Path | None, overrides: Iterable[str]) -> dict[str, str]:
    """Return the texts of a file and of overrides that refer to other options, by their keys."""
    tree, resolved = ({}, True) if config is None else _read_config_file(find_config_file(str(config)))
    given = ({} if resolved else dict(flatten_tree(tree))) | dict(flatten_tree(parse_overrides(overrides)))
    return {key: text for key, text in given.items() if has_references(key, text)}


def _foreign_keys(tree: Any, kind: str) -> list[str]:
    return [key for key, _ in flatten_tree(tree) if not applies_to(key, kind)]


@cache
def _options_schema() -> Any:
    """Return the options and their types as an OmegaConf structure. Merge with it, do not change it."""
    return OmegaConf.structured(Options)


@cache
def _bounds_validator() -> TypeAdapter[Options]:
    return TypeAdapter(Options)


def _without_scheduler(merged: Any, in_file: Any, path: Path) -> Any:
    """Remove the address of a Dask cluster that a file sets.

    Code is sent to that address, so only the user may give it.
    """
    launcher = in_file.get("launcher")
    address = launcher.get("dask") if isinstance(launcher, dict) else launcher
    if address not in (None, "local"):
        log.warning(
            "%s names a Dask scheduler, %s, which is left out: to work on it, give launcher.dask=ADDRESS yourself",
            path,
            redact_urls(str(address)),
        )
        if isinstance(launcher, dict):
            merged.launcher.dask = None
        else:
            merged.launcher = LauncherOptions()
    return merged


def check_options(options: Options) -> Options:
    """Check the options against every bound of the schema, and return them; for values set from Python or a form.

    Raises:
        ConfigError: naming the keys and the values that they accept.
    """
    endless = [
        key for key, value in flatten_tree(asdict(options)) if isinstance(value, float) and not math.isfinite(value)
    ]
    if endless:
        raise ConfigError(f"{endless[0]}={get_option(options, endless[0])}: must be a finite number")
    try:
        _bounds_validator().validate_python(asdict(options))
    except ValidationError as error:
        wrong = [
            explain_validation_error(".".join(map(str, item["loc"])), item) for item in error.errors(include_url=False)
        ]
        raise ConfigError("; ".join(wrong[:3]) + _preset_hint(options.model.kind)) from None  # it may hold a password
    for key, value in flatten_tree(asdict(options)):
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and "\0" in text:
                raise ConfigError(f"{key}={text!r}: holds a NUL character")
            if isinstance(text, str) and text != text.encode(errors="ignore").decode():
                raise ConfigError(f"{key}={text!r}: holds half of a character, which no file can hold")
    if not all(0 <= place < 2**62 for place in options.source.offsets):
        raise ConfigError(
            f"source.offsets={shorten_value(options.source.offsets)}: expected places in a file, in bytes"
        )
    for phase in ("pretrain", "finetune", "train"):
        part = getattr(options, phase)
        if part.part_from >= part.part_to:
            raise ConfigError(f"{phase}.part_from={part.part_from} must be below {phase}.part_to={part.part_to}")
    if options.iem.duplicates and options.iem.correction != "none":
        raise ConfigError(
            "iem.duplicates=true needs iem.correction=none: what is corrected is a set of different chunks"
        )
    _check_locations(options)
    options.name = check_name(options.name)
    return options


def check_name(name: str) -> str:
    """Return the name of a run without surrounding blanks.

    Raises:
        ConfigError: the name is blank, is not a single folder's name, or holds control or invisible characters.
    """
    bare = name.strip()
    if not bare:
        raise ConfigError(f"name={name!r} is blank. Use name=my-run.")
    if bare in (".", "..") or "/" in bare:
        raise ConfigError(f"name={name!r}: must be the name of a folder, without slashes")
    unseen = [sign for sign in bare if unicodedata.category(sign) in _UNSEEN or sign in _FILLERS]
    if unseen or bare != make_printable(bare):
        raise ConfigError(
            f"name={name!r}: must have no line ends and no other control characters, and no invisible ones"
        )
    return bare


def _preset_hint(kind: str) -> str:
    """Return a hint for the case that a preset's name was given as `model.kind`, or an empty text."""
    return f"; {kind} is a preset: --config {kind}" if kind not in SYSTEMS and kind in list_presets() else ""


def check_phase(phase: Phase, options: Options) -> None:
    """Check that this kind of model has the phase, and that the phase's options can train it.

    Raises:
        ConfigError: it has no such phase, nothing would be trained, or the IEM options do not fit the mixture.
    """
    if not applies_to(phase, kind := options.model.kind):
        raise ConfigError(f"model.kind={kind} has no phase one and no phase two: train it end to end, by `haed train`")
    limits = getattr(options, phase)
    if isinstance(limits, FinetuneOptions) and limits.trains != "everything" and not limits.decode_fraction:
        raise ConfigError(
            f"finetune.trains={limits.trains} trains the decoder alone, and finetune.decode_fraction=0 gives it nothing to "
            "decode: raise that"
        )
    if is_mixed(options, limits):
        try:
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
        raise ConfigError(f"{phase} has no limit: set {phase}.seconds, {phase}.steps or {phase}.epochs")


def check_output_folder(folder: str | Path, option: str) -> None:
    """Check that a folder to write to is not a URL.

    Raises:
        ConfigError: it is one.
    """
    try:
        check_folder(folder, option)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _check_locations(options: Options) -> None:
    """Check the paths and addresses of the options before they are used.

    Raises:
        ConfigError: naming the option.
    """
    source = options.source
    check_output_folder(options.shards_dir, "shards_dir")
    check_output_folder(options.runs_dir, "runs_dir")
    check_output_folder(options.loader.cache_dir, "loader.cache_dir")
    try:
        if options.launcher.dask:
            check_scheduler(options.launcher.dask)
        if source.path and is_remote(source.path):
            check_url(source.path, "source.path")
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if source.path and is_remote(source.path) and source.kind in SOURCES and source.kind != "shards":
        raise ConfigError(
            f"source.path={source.path} is a URL, which only source.kind=shards reads: "
            f"fetch the files for source.kind={source.kind}"
        )
    if options.finetune.start_from and is_remote(options.finetune.start_from):
        raise ConfigError(
            f"finetune.start_from={show_url(options.finetune.start_from)}: expected a run on this machine, got a URL"
        )


def dump_options(options: Options, scheduler: bool = False) -> str:
    """Return the complete configuration as YAML, which `load` reads back unchanged.

    Options that only other kinds of model use are left out.

    Args:
        options: the options to write.
        scheduler: also write the address of a Dask cluster, which `load` ignores in a file.
    """
    found = asdict(options)
    if found["launcher"]["dask"] != "local" and not scheduler:
        found["launcher"]["dask"] = None
    for key in _foreign_keys(found, options.model.kind):
        drop_key(found, key.split("."))
    return dump_yaml(found)
