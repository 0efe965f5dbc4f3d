"""Configuration: a YAML preset or file and `key=value` overrides, against one schema.

OmegaConf refuses unknown keys and wrong types, Pydantic checks the bounds; both name the key.
"""

import difflib
import logging
import math
import os
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError
from yaml import YAMLError

from data.locations import check_folder, check_scheduler, check_url, is_remote, redact, show_url
from data.options import SOURCES
from haed.options import SYSTEMS
from pipeline.kinds import is_limited, is_mixed, is_of, least_heads, refusal, shared_limits
from pipeline.options import RETIRED, FinetuneOptions, LauncherOptions, Options, Phase
from pipeline.plainly import explain, short, unequal
from pipeline.shown import printable
from pipeline.trees import drop, get, leaves, put
from pipeline.verbatim import as_written, type_of, verbatim

log = logging.getLogger(__name__)
PRESETS = Path(__file__).resolve().parent.parent / "configs"


class ConfigError(ValueError):
    """A preset, key or value that is not one; a usage error, exit status 2. Names and passwords in URLs are not shown."""

    def __init__(self, message: str) -> None:
        super().__init__(redact(message))


def presets() -> list[str]:
    """Names of the shipped presets."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def listed() -> str:
    """The presets for people: first those of an ordinary machine, then those of the papers' sizes."""
    small, large = ([name for name in presets() if name.startswith("paper-") == paper] for paper in (False, True))
    return f"{', '.join(small)}; of the papers' sizes {', '.join(large)}"


def find(config: str) -> Path:
    """The file of a preset's name, or of a path to a YAML file.

    Raises:
        ConfigError: there is neither.
    """
    path = Path(config)
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        if not path.is_file():
            raise ConfigError(f"no configuration file at {path}")
        return path
    path = PRESETS / f"{config}.yaml"
    if not path.is_file():
        close = difflib.get_close_matches(config, presets(), 1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ConfigError(f"no preset {config!r}: {hint}presets are {listed()}; or give a .yaml file")
    return path


def load(config: str | Path | None = None, overrides: list[str] | tuple[str, ...] = ()) -> Options:
    """Reads and checks a configuration.

    Args:
        config: name of a preset, path of a YAML file, or None for the defaults. The address of a Dask cluster in a file is
            left out with a warning: only the user gives one. Where `overrides` ask for another kind of model than the file
            does, so are its options of the other kind, its name ends with the kind unless one is given, phases without a
            limit have a share of those that it has, and a Retina a head for each scale; `pipeline.arguments.say_unused`
            says so.
        overrides: `key=value` pairs, with dots for nested keys: `model.decoder.kind=transformer`.

    Raises:
        ConfigError: with the key or file that is wrong, and what would be right.
    """
    where = "the command line"
    in_file: Any = {}
    tree: Any = {}
    try:
        merged = _schema()
        if config is not None:
            path = find(str(config))
            where = str(path)
            loaded = OmegaConf.load(path)
            if not OmegaConf.is_dict(loaded):
                raise ConfigError(f"{path} is not a mapping of options")
            tree = OmegaConf.to_container(loaded, resolve=False)
            as_written(tree, path.read_bytes())
            if lost := retire(tree):
                log.warning("%s: %s", path, _RETIRED % ", ".join(lost))
            merged = _without_scheduler(OmegaConf.merge(merged, tree), path)
            where, in_file = "the command line", tree
        for override in overrides:
            if override != override.encode(errors="ignore").decode():
                raise ConfigError(
                    f"{override!r} is not UTF-8, in which a configuration is written: rename what it names"
                )
            if "=" not in override:
                raise ConfigError(unequal(override))
            if override.split("=", 1)[1].strip() == "???":  # which OmegaConf would leave out
                raise ConfigError(f"{override} is no value")
        tree = OmegaConf.to_container(OmegaConf.from_dotlist([verbatim(item) for item in overrides]), resolve=False)
        if lost := retire(tree):
            raise ConfigError(_RETIRED % ", ".join(lost))
        options = OmegaConf.to_object(OmegaConf.merge(merged, tree))
    except OmegaConfBaseException as error:
        raise ConfigError(f"{where}: {explain(error)}") from None  # its own message may hold a password
    except TypeError as error:  # of OmegaConf, for a mapping in place of a list
        raise ConfigError(f"{_culprit(merged, overrides) or where}: expected a list, such as [a, b]") from error
    except (YAMLError, UnicodeDecodeError, RecursionError, OSError) as error:
        raise ConfigError(f"{where}: not readable as YAML: {' '.join(str(error).split())[:200]}") from error
    except ValueError as error:  # of Python, for a number of thousands of digits
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{_culprit(merged, overrides) or where}: {error}") from None
    assert isinstance(options, Options)
    _at_home(options)
    kind = check(options).model.kind
    if wrong := _foreign(tree, kind):
        raise ConfigError(refusal(wrong[0], kind))
    defaults = Options()
    if (in_file.get("model") or {}).get("kind", defaults.model.kind) != kind:
        if in_file and "name" not in tree:
            options.name += f"-{kind.replace('_', '-')}"
        _fit_to_kind(options, in_file, tree)
        return options
    for key in _foreign(in_file, kind):
        if get(options, key) != get(defaults, key):  # what a file of before holds in full may have it so
            raise ConfigError(f"{find(str(config))}: {refusal(key, kind)}")
    return options


def _at_home(options: Options) -> None:
    """Has `~` in paths stand for the home folder: a shell leaves it alone behind `=`."""
    for key in ("source.path", "runs_dir", "shards_dir", "loader.cache_dir"):
        if place := get(options, key):
            put(options, key, os.path.expanduser(place))


def _fit_to_kind(options: Options, in_file: Any, asked: Any) -> None:
    """Makes a file's options those of another kind of model that was asked for; see `load`."""
    kind, defaults = options.model.kind, Options()
    changed = {key: get(defaults, key) for key in _foreign(in_file, kind)}
    for key, limit in shared_limits(in_file, kind).items():
        if not is_limited(getattr(options, key.split(".")[0])):
            changed[key] = limit
    if (heads := "model.token.heads") not in dict(leaves(asked)):
        changed[heads] = max(get(options, heads), least_heads(options))
    for key, value in changed.items():
        put(options, key, value)


def given_in(config: str | Path | None) -> Any:
    """The options that a file sets, as nested dictionaries; none without a file."""
    return {} if config is None else OmegaConf.to_container(OmegaConf.load(find(str(config))), resolve=False)


def _foreign(tree: Any, kind: str) -> list[str]:
    return [key for key, _ in leaves(tree) if not is_of(key, kind)]


_RETIRED = "%s is no longer possible, since it did not pay (docs/log.md): leave it out"


def retire(tree: Any) -> list[str]:
    """Takes the options of earlier versions out of nested dictionaries of options, and returns those that were in use."""
    lost = []
    for key, (used, instead) in RETIRED.items():
        *above, name = key.split(".")
        part = tree
        for each in above:
            part = part.get(each) if isinstance(part, dict) else None
        if not isinstance(part, dict) or name not in part:
            continue
        if used(part[name]):
            lost.append(f"{key}={short(part[name])}")
            part[name] = instead
        if type_of(key) is None:
            del part[name]
    return lost


@cache
def _schema() -> Any:
    """The options and their types, as OmegaConf has them: not to be changed, but to be merged with."""
    return OmegaConf.structured(Options)


@cache
def _bounds() -> TypeAdapter[Options]:
    return TypeAdapter(Options)


def _culprit(tree: Any, overrides: list[str] | tuple[str, ...]) -> str:
    """The override, if it is one, that OmegaConf or YAML cannot take."""
    for override in overrides:
        try:
            OmegaConf.merge(tree, OmegaConf.from_dotlist([verbatim(override)]))
        except (TypeError, ValueError):
            return override if len(override) <= 80 else f"{override[:60]}…"
    return ""


def _without_scheduler(merged: Any, path: Path) -> Any:
    """The configuration of a file without the address of a Dask cluster, which the user gives, since code runs there."""
    launcher = OmegaConf.to_container(merged, resolve=False)["launcher"]  # type: ignore[index, call-overload]
    address = launcher["dask"] if isinstance(launcher, dict) else launcher
    if address not in (None, "local"):
        log.warning(
            "%s names a Dask scheduler, %s, which is left out: to work on it, give launcher.dask=ADDRESS yourself",
            path,
            redact(str(address)),
        )
        if isinstance(launcher, dict):
            merged.launcher.dask = None
        else:
            merged.launcher = LauncherOptions()
    return merged


def check(options: Options) -> Options:
    """Checks every bound of the schema and returns the options; for values set from Python or a form.

    Raises:
        ConfigError: naming the keys and what they may be.
    """
    try:
        _bounds().validate_python(asdict(options))
    except ValidationError as error:
        wrong = [
            f"{'.'.join(str(part) for part in item['loc'])}={short(item['input'])}: "
            + (item["msg"].removeprefix("Value error, ") if item["type"] == "value_error" else item["msg"].lower())
            for item in error.errors(include_url=False)
        ]
        raise ConfigError("; ".join(wrong[:3]) + _preset_of(options.model.kind)) from None  # likewise
    endless = [key for key, value in leaves(asdict(options)) if isinstance(value, float) and not math.isfinite(value)]
    if endless:
        raise ConfigError(f"{endless[0]}: must be a finite number")
    for key, value in leaves(asdict(options)):
        if isinstance(value, str) and "\0" in value:
            raise ConfigError(f"{key}={value!r}: holds a NUL character")
    if not all(0 <= place < 2**62 for place in options.source.offsets):
        raise ConfigError(f"source.offsets={short(options.source.offsets)}: expected places in a file, in bytes")
    for phase in ("pretrain", "finetune", "train"):
        part = getattr(options, phase)
        if part.part_from >= part.part_to:
            raise ConfigError(f"{phase}.part_from={part.part_from} must be below {phase}.part_to={part.part_to}")
    if options.iem.duplicates and options.iem.correction != "none":
        raise ConfigError(
            "iem.duplicates=true needs iem.correction=none: what is corrected is a set of different chunks"
        )
    _check_places(options)
    if options.name in (".", "..") or "/" in options.name or "\0" in options.name:
        raise ConfigError(f"name={options.name!r}: must be the name of a folder, without slashes")
    if options.name != printable(options.name) or "\n" in options.name or "\t" in options.name:
        raise ConfigError(f"name={options.name!r}: must have no line ends and no other control characters")
    return options


def _preset_of(kind: str) -> str:
    """What to say where a preset's name was given as a kind of model."""
    return f"; {kind} is a preset: --config {kind}" if kind not in SYSTEMS and kind in presets() else ""


def check_phase(phase: Phase, options: Options) -> None:
    """Raises ConfigError if this kind of model has no such phase, or its loss cannot train what is asked for."""
    if not is_of(phase, kind := options.model.kind):
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
    """The same, and raises ConfigError for a phase that would never end."""
    check_phase(phase, options)
    if not is_limited(getattr(options, phase)):
        raise ConfigError(f"{phase} has no limit: set {phase}.seconds, {phase}.steps or {phase}.epochs")


def check_written(folder: str | Path, option: str) -> None:
    """Raises ConfigError for a URL where a folder of this machine is written to."""
    try:
        check_folder(folder, option)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _check_places(options: Options) -> None:
    """Checks what is written to and what is opened, before anything else sees it.

    Raises:
        ConfigError: naming the option.
    """
    source = options.source
    check_written(options.shards_dir, "shards_dir")
    check_written(options.runs_dir, "runs_dir")
    check_written(options.loader.cache_dir, "loader.cache_dir")
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


def dump(options: Options, scheduler: bool = False) -> str:
    """The complete configuration as YAML, without what is of other kinds of model; `load` reads it back unchanged.

    Args:
        options: to be written.
        scheduler: also the address of a Dask cluster, which no file has a say in; see `load`.
    """
    tree = OmegaConf.structured(options)
    if tree.launcher.dask != "local" and not scheduler:
        tree.launcher.dask = None
    found = OmegaConf.to_container(tree)
    for key in _foreign(found, options.model.kind):
        drop(found, key.split("."))
    return OmegaConf.to_yaml(OmegaConf.create(found))
