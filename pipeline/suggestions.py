"""Commands that messages suggest, and how each place shows them.

A message is a text that names commands and flags as they are typed, in backticks. It cannot carry them as data. It
crosses processes as a line of a log, as an error of a pool or as a note in a JSON file. Other messages quote it. So
this module is the only one that reads them back. A terminal shows a message as it is. Prefect's UI and the pages beside
it, whose readers have no terminal, name flows and the fields of their forms.
"""

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

_STAGES = "shard pretrain finetune train evaluate sample next index neighbours analyse report compare"
_FLOWS = {"run": "haed"} | {name: name for name in _STAGES.split()}
_FIELDS = {"config": "preset", "prompt": "prompts"}  # of forms, by flags that have other names
_CODE = re.compile(r"`([^`]+)`")
_AGAIN = re.compile(r"[Rr]un the same command(?: again)?")


def format_command(*words: object) -> str:
    """Return a command in backticks, which can be typed as it is."""
    return f"`{shlex.join(['haed', *map(str, words)])}`"


@dataclass(frozen=True)
class Suggestion:
    """A command that a message suggests, or flags of one, in terms of forms. Placeholders such as RUN are left out.

    Attributes:
        flow: name of the flow; empty: of any.
        run: name of the run; empty: none is named.
        fields: values of the fields of the form by name.
    """

    flow: str
    run: str
    fields: dict[str, Any]

    def __str__(self) -> str:
        words = [f"{name}={value}" if value else name for name, value in self.fields.items() if name != "overrides"]
        words = [*([f"run {self.run}"] if self.run else []), *words, *self.fields.get("overrides", ())]
        if not self.flow:
            return " ".join(words)
        return f"the flow {self.flow} ({' '.join(words)})" if words else f"the flow {self.flow}"


def read_suggestion(code: str) -> Suggestion | None:
    """Return what a text in backticks suggests; None: it is no command that has a flow, and no flag."""
    try:
        words = shlex.split(code)
    except ValueError:  # it ends within quotes
        return None
    flow = _FLOWS.get(words[1], "") if words[:1] == ["haed"] and words[1:] else ""
    if not flow and not code.startswith("--"):
        return None
    run, fields, overrides = "", dict[str, Any](), []
    rest = iter(words[2:] if flow else words)
    for word in rest:
        if word.startswith("--"):
            name = word[2:].replace("-", "_")
            value = next(rest, "")
            if not _is_placeholder(value):
                fields[_FIELDS.get(name, name)] = value
        elif "=" in word and "/" not in word.partition("=")[0]:  # else the folder of a run, such as runs/seed=1
            overrides += [] if _is_placeholder(word.partition("=")[2]) else [word]
        elif not run and not _is_placeholder(word):
            run = Path(word).name
    return Suggestion(flow, run, fields | ({"overrides": overrides} if overrides else {}))


def _is_placeholder(word: str) -> bool:
    return word.isalpha() and word.isupper()


def name_flows(text: str) -> str:
    """Return a message for Prefect's UI, in which flows and fields of forms replace commands and flags."""

    def name_flow(code: re.Match[str]) -> str:
        shown = str(read_suggestion(code[1]) or code[0])
        begins = text[: code.start()].endswith(". ")
        return f"{shown[0].upper()}{shown[1:]}" if begins and shown.startswith("the flow") else shown

    return _AGAIN.sub("Retry", _CODE.sub(name_flow, text))


def mark_commands(text: str, form_url: Callable[[Suggestion], str] | None = None) -> Markup:
    """Return a message as HTML, with its commands as code.

    Args:
        text: the message.
        form_url: returns the address of a form of Prefect that is filled in. A command for a run is then a link to its
            form, and all others are shown as Prefect's UI shows them.
    """
    parts: list[str] = _CODE.split(text)
    for place, part in enumerate(parts):
        suggestion = read_suggestion(part) if place % 2 else None
        if suggestion and form_url and suggestion.flow and suggestion.run:
            parts[place] = Markup('<a href="{}">the form {}</a>').format(form_url(suggestion), suggestion.flow)
        elif suggestion and (form_url or not suggestion.flow):
            parts[place] = str(suggestion)
        elif place % 2:
            parts[place] = Markup("<code>{}</code>").format(part)
        elif form_url:
            parts[place] = _AGAIN.sub("Retry", part)
    return Markup("").join(parts)
