"""How pages are written: their templates, all of whose texts are escaped, and the addresses that stand in them."""

import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, PackageLoader

from pipeline.run.folder import RunFolder
from pipeline.shown import meant, visible

TOOLS = {"neighbours": "neighbours", "passages": "passages", "next": "next chunks", "samples": "samples"}


def address(name: str, page: str = "", **question: Any) -> str:
    """That of a run's page, with a question in it."""
    asked = f"?{urlencode(question, doseq=True)}" if question else ""
    return f"/runs/{quote(name, safe='', errors='surrogateescape')}/{page}{asked}"


def page_of(folder: RunFolder) -> str | None:
    """Address of a run's page beside the Prefect UI, by whatever name that is reached; None: `haed serve` has none of it."""
    served = os.environ.get("HAED_PAGES") and folder.path.resolve().parent == Path("runs").resolve()
    return address(folder.path.name) if served else None


def templates(links: dict[str, str]) -> Environment:
    """The templates, with what they call.

    Args:
        links: addresses by name of what stands beside, at the head of every page.
    """
    made = Environment(loader=PackageLoader("pipeline.pages"), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    made.filters |= {"visible": visible, "line": _line, "pixels": _pixels}
    made.globals |= {"tools": TOOLS, "links": links, "address": address, "asking": _asking, "heading": _heading}
    return made


def _line(text: str) -> str:
    """Text around a chunk on one line, with one blank for several."""
    return re.sub(r"[ \t]{2,}", " ", text.replace("\r", "").replace("\n", "↵"))


def _pixels(hexadecimal: str) -> list[str]:
    """The colours of a chunk of pixels."""
    return [f"#{hexadecimal[i : i + 6]}" for i in range(0, len(hexadecimal) - 5, 6)]


def _heading(found: Any) -> str:
    from pipeline.probe.next import heading

    return heading(found)


def _asking(name: str, hexadecimal: str, pictures: bool, **more: Any) -> str:
    """Where the neighbours of a chunk are asked for: by its text if it has one that is meant as it is."""
    try:
        text = "" if pictures else bytes.fromhex(hexadecimal).decode()
    except UnicodeDecodeError:
        text = ""
    plain = text and meant(visible(text)) == text
    question = {"query": visible(text)} if plain else {"hex": hexadecimal}
    return address(name, "neighbours", **question, **{key: value for key, value in more.items() if value is not None})
