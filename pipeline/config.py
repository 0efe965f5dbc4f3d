"""Configuration: a YAML preset or file and `key=value` overrides, against one schema.

OmegaConf refuses unknown keys and wrong types, Pydantic checks the bounds; both name the key.
"""

import difflib
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError
from yaml import YAMLError

from pipeline.options import Options

PRESETS = Path(__file__).resolve().parent.parent / "configs"


class ConfigError(ValueError):
    """A preset, key or value that is not one; a usage error, exit status 2."""


def presets() -> list[str]:
    """Names of the shipped presets."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


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
        raise ConfigError(f"no preset {config!r}: {hint}presets are {', '.join(presets())}, or give a .yaml file")
    return path


def load(config: str | Path | None = None, overrides: list[str] | tuple[str, ...] = ()) -> Options:
    """Reads and checks a configuration.

    Args:
        config: name of a preset, path of a YAML file, or None for the defaults.
        overrides: `key=value` pairs, with dots for nested keys: `model.decoder.kind=transformer`.

    Raises:
        ConfigError: with the key or file that is wrong, and what would be right.
    """
    where = "the command line"
    try:
        merged = OmegaConf.structured(Options)
        if config is not None:
            path = find(str(config))
            where = str(path)
            loaded = OmegaConf.load(path)
            if not OmegaConf.is_dict(loaded):
                raise ConfigError(f"{path} is not a mapping of options")
            merged = OmegaConf.merge(merged, loaded)
            where = "the command line"
        for override in overrides:
            if "=" not in override:
                raise ConfigError(f"{override!r} is not of the form key=value")
        options = OmegaConf.to_object(
            OmegaConf.merge(merged, OmegaConf.from_dotlist([_verbatim(item) for item in overrides]))
        )
    except OmegaConfBaseException as error:
        raise ConfigError(f"{where}: {_explain(error)}") from error
    except (YAMLError, UnicodeDecodeError, RecursionError, OSError) as error:
        raise ConfigError(f"{where}: not readable as YAML: {' '.join(str(error).split())[:200]}") from error
    assert isinstance(options, Options)
    return check(options)


def _verbatim(override: str) -> str:
    """The value of a text option in quotes, unless it has some: `-`, `[34]` and `1e3` are text there, not YAML."""
    key, value = override.split("=", 1)
    kind: Any = Options
    for part in key.split("."):
        kind = get_type_hints(kind).get(part) if is_dataclass(kind) else None
    text = kind is str or kind == str | None
    return f"{key}={json.dumps(value)}" if text and value[:1] not in ("'", '"') and value != "null" else override


def check(options: Options) -> Options:
    """Checks every bound of the schema and returns the options; for values set from Python or a form.

    Raises:
        ConfigError: naming the keys and what they may be.
    """
    try:
        TypeAdapter(Options).validate_python(asdict(options))
    except ValidationError as error:
        wrong = [
            f"{'.'.join(str(part) for part in item['loc'])}={item['input']!r}: {item['msg'].lower()}"
            for item in error.errors(include_url=False)
        ]
        raise ConfigError("; ".join(wrong[:3])) from error
    endless = [key for key, value in _leaves(asdict(options)) if isinstance(value, float) and not math.isfinite(value)]
    if endless:
        raise ConfigError(f"{endless[0]}: must be a finite number")
    for phase in ("pretrain", "finetune", "train"):
        part = getattr(options, phase)
        if part.part_from >= part.part_to:
            raise ConfigError(f"{phase}.part_from={part.part_from} must be below {phase}.part_to={part.part_to}")
    if options.iem.mined and not options.iem.bank:
        raise ConfigError(f"iem.mined={options.iem.mined} needs a bank to mine from: set iem.bank, to 16384 say")
    if options.name in (".", "..") or "/" in options.name or "\0" in options.name:
        raise ConfigError(f"name={options.name!r}: must be the name of a folder, without slashes")
    return options


def _leaves(tree: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def differences(was: Any, now: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The dotted keys in which two nested dictionaries differ, in order, with both values."""
    if isinstance(was, dict) and isinstance(now, dict):
        for name in [*now, *(name for name in was if name not in now)]:
            yield from differences(was.get(name), now.get(name), f"{key}.{name}" if key else name)
    elif was != now:
        yield key, was, now


def dump(options: Options) -> str:
    """The complete configuration as YAML; `load` reads it back unchanged."""
    return OmegaConf.to_yaml(OmegaConf.structured(options))


def as_dict(options: Options) -> dict[str, Any]:
    """The complete configuration as nested dictionaries of plain values."""
    return asdict(options)


def _explain(error: OmegaConfBaseException) -> str:
    """One line: what OmegaConf says, with the full key where its first line has only the last part."""
    message = str(error).splitlines()[0] if str(error) else type(error).__name__
    key = getattr(error, "full_key", None)
    return f"{key}: {message}" if key and key not in message else message
