"""Choices that forms offer (presets and existing runs), and detection of the kind of a source."""

import hashlib
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from data.urls import is_remote
from pipeline import config
from pipeline.run.run_directory import RunFolder, list_runs

MOST = 200  # runs in a list
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
    r"omega)\d*-.+"
)
_CHECKS = ("type", "items", "pattern", "minLength", "maxLength", "minItems", "maxItems")  # of a schema
_PACKED = (".gz", ".xz", ".bz2", ".zst")


@dataclass(frozen=True)
class FormSchemaChange:
    """A change to the JSON schema of an annotated type. Validation is not affected."""

    change: Callable[[dict[str, Any]], dict[str, Any]]

    def __get_pydantic_json_schema__(self, core: Any, handler: Any) -> dict[str, Any]:
        return self.change(handler(core))


def offer_presets(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that offers a list of presets (those for an ordinary machine first), a file path, or nothing."""
    (text,) = (choice for choice in schema["anyOf"] if choice != {"type": "null"})
    names = sorted(config.list_presets(), key=lambda name: (name != "quickstart", name.startswith("paper-"), name))
    return {
        "anyOf": [
            {"type": "string", "enum": names, "title": "a preset"},
            text | {"title": "a YAML file"},
            {"type": "null", "title": "the run's own"},
        ]
    }


def flatten_optional_field(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an optional field as one box that may stay empty, without a choice of null."""
    (kind,) = (choice for choice in schema["anyOf"] if choice != {"type": "null"})
    return dict(kind)


def list_recent_runs(runs_dir: str = "runs") -> list[str]:
    """Return the names of the runs in a folder, most recently written first."""
    return list_runs(runs_dir)[:MOST]


def add_run_choices(properties: dict[str, Any], runs: list[str]) -> None:
    """Offer these runs as a list in a form, beside a box for any other. The newest run is the default.

    An optional field gets no default: the form would send null, which is refused.
    """
    for shown in properties.values():
        if "type" in shown and shown.get("default", "") is None:
            del shown["default"]
    if not runs:
        return
    listed = {"type": "string", "enum": runs}
    for name, other in (("run", "another folder"), ("name", "another name")):
        if name in properties and "enum" not in properties[name]:
            shown = properties[name]
            text = {key: shown.pop(key) for key in _CHECKS if key in shown}
            shown["anyOf"] = [text | {"title": other}, listed | {"title": "an existing run"}]
    if "run" in properties:
        properties["run"]["default"] = runs[0]  # for who looks at the form; who submits none is refused
    if "runs" in properties:
        shown = properties["runs"]
        several = {key: shown.pop(key) for key in _CHECKS if key in shown}
        shown["anyOf"] = [several | {"items": listed, "title": "existing runs"}, several | {"title": "other folders"}]
        shown["default"] = runs[:2]


def find_run_configuration(name: str, runs_dir: str) -> tuple[str, dict[str, str]]:
    """Return the configuration file of an existing run and the options that name its folder.

    Raises:
        ConfigError: no run is named, or it does not exist.
    """
    if not name.strip():
        known = list_recent_runs(runs_dir)[:10]
        hint = f"runs there: {', '.join(known)}" if known else f"there are no runs in {runs_dir}/"
        raise config.ConfigError(f"no preset is chosen, and no run is named: give one, such as name=my-run; {hint}")
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
        path: a file, folder or URL.
        usual: the preset's kind.
    """
    place = Path(path)
    if is_remote(path) or (place / "manifest.json").is_file():
        return "shards"
    if usual == "datasets" or not place.exists():
        return usual
    files = [place] if place.is_file() else islice((each for each in place.rglob("*") if each.is_file()), _LOOKED_AT)
    number, size = Counter[str](), Counter[str]()
    for each in files:
        number[_data_extension(each)] += 1
        size[_data_extension(each)] += each.stat().st_size
    shares = {
        family: sum(count[ending] / max(1, count.total()) for count in (number, size) for ending in endings)
        for family, endings in _FAMILIES.items()
    }
    most = max(shares, key=lambda family: shares[family])
    family = most if shares[most] > 1 else ("text", "wikitext", "enwik8")
    if usual in family and not (usual == "stdlib" and place.is_file()):
        return usual
    return "text" if "text" in family else family[0]


def _data_extension(path: Path) -> str:
    endings = [each.lower() for each in path.suffixes if each.lower() not in _PACKED]
    return endings[-1] if endings else ""


def is_user_chosen(name: str) -> bool:
    """Return whether a user chose the name of a flow run, rather than Prefect's form or server generating it."""
    from coolname.data import config as lists  # of the server

    made_up = {word for each in dict[str, Any](lists).values() for word in each.get("words", ())}
    return not (_SUGGESTED.fullmatch(name) or all(word in made_up for word in name.split("-")))
