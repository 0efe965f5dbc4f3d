"""The presentation of files and pages: Jinja templates, one style sheet, and tables.

A page of a server links to its style sheet and pictures. A file, such as report.html, embeds them and needs nothing
else. Both come from the templates in `templates/`, which escape all texts.

A table is a list of columns. The same list makes the table of a page, of Markdown and of a terminal, so a new `Column`
in it is all that a new column needs.
"""

import base64
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

from jinja2 import Environment, PackageLoader, Template
from markupsafe import Markup, escape

from pipeline.config import format_value
from pipeline.console import (
    STEERING,
    escape_control_characters,
    format_probability,
    make_printable,
    markdown_text,
    show_white_space,
)
from pipeline.reporting.terms import TERMS
from pipeline.suggestions import format_command, mark_commands

STYLE = Path(__file__).parent / "style.css"


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        title: heading of the column.
        value: returns the value of a row; None is shown as a dash.
        format: how a value is shown, as a format string such as `{:,}` or as a function. Columns with a format hold
            numbers and are aligned to the right. None: the value is text.
    """

    title: str
    value: Callable[[Any], Any]
    format: str | Callable[[Any], str] | None = None

    def format_cell(self, row: Any) -> str:
        """Return the text of a row's cell."""
        if (value := self.value(row)) is None:
            return "–"
        return self.format(value) if callable(self.format) else (self.format or "{}").format(value)


@dataclass(frozen=True)
class Table:
    """A table of texts, which each format escapes.

    Attributes:
        titles: headings of the columns.
        rows: cells of each row.
        numeric: whether each column holds numbers, which are aligned to the right.
    """

    titles: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: Sequence[bool]

    @classmethod
    def from_columns(cls, columns: Sequence[Column], rows: Iterable[Any]) -> "Table":
        """Return the table of some rows.

        Raises:
            ValueError: a column cannot be made of a row; both are named.
        """

        def format_cell(column: Column, row: Any) -> str:
            try:
                return column.format_cell(row)
            except Exception as error:
                description = f"{type(error).__name__}: {error}"
                raise ValueError(f"column {column.title!r} of {columns[0].value(row)}: {description}") from error

        return cls(
            [column.title for column in columns],
            [[format_cell(column, row) for column in columns] for row in rows],
            [column.format is not None for column in columns],
        )

    def to_markdown(self) -> str:
        """Return the table as Markdown."""
        rule = ["---:" if number else "---" for number in self.numeric]
        escaped = [[markdown_text(cell) for cell in line] for line in (self.titles, *self.rows)]
        return "\n".join("| " + " | ".join(line) + " |" for line in (escaped[0], rule, *escaped[1:]))

    def split_columns(self, most: int) -> "list[Table]":
        """Return tables of at most so many columns, each with the first one, for places that do not scroll."""
        lines: list[Sequence[Any]] = [self.titles, *self.rows, self.numeric]
        starts = range(1, len(self.titles), most - 1)
        parts = [[[line[0], *line[start : start + most - 1]] for line in lines] for start in starts]
        return [Table(titles, rows, numeric) for titles, *rows, numeric in parts]

    def to_text(self) -> str:
        """Return the table for a terminal, each column as wide as its widest cell."""
        lines = [self.titles, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        aligned = [str.rjust if number else str.ljust for number in self.numeric]
        padded = [
            [align(cell, width) for align, cell, width in zip(aligned, line, widths, strict=True)] for line in lines
        ]
        return "\n".join("  ".join(cells).rstrip() for cells in padded)


class _TemplateLoader(PackageLoader):
    """A loader that compiles one template at a time.

    Jinja parses literals with `ast`, which fails in CPython 3.11 if two threads do so at once (python/cpython#106905).
    """

    _lock = Lock()

    def load(self, *arguments: Any, **named: Any) -> Template:
        with self._lock:
            return super().load(*arguments, **named)


def make_environment(**names: Any) -> Environment:
    """Return the Jinja environment of all templates.

    Args:
        names: values and functions that templates use, beside those of each page.
    """
    environment = Environment(
        loader=_TemplateLoader("pipeline.reporting"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals |= {"terms": TERMS, "command": format_command} | names
    environment.filters |= {
        "visible": escape_control_characters,
        "signs": show_white_space,
        "line": _join_lines,
        "pixels": _split_pixels,
        "commands": mark_commands,
        "exact": _refer_to_characters,
        "option": format_value,
        "probability": format_probability,
    }
    return environment


def render_template(environment: Environment, template: str, /, **values: Any) -> str:
    """Return a rendered template without control characters."""
    return make_printable(environment.get_template(template).render(**values))


def render_file(template: str, /, **values: Any) -> str:
    """Return an HTML file that needs nothing else."""
    return render_template(_file_environment(), template, **values)


@cache
def _file_environment() -> Environment:
    return make_environment(style=STYLE.read_text(encoding="utf-8"))


def data_uri(png: bytes) -> str:
    """Return a PNG as a data URI."""
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def _join_lines(text: str) -> str:
    """Return text around a chunk on one line, with repeated blanks as one."""
    return re.sub(r"[ \t]{2,}", " ", text.replace("\r", "").replace("\n", "↵"))


def _refer_to_characters(text: str) -> Markup:
    """Return text for a box of a form that is sent again, with invisible characters as references."""
    return Markup(STEERING.sub(lambda match: f"&#{ord(match[0])};", str(escape(text))))


def _split_pixels(hexadecimal: str) -> list[str]:
    return [f"#{hexadecimal[i : i + 6]}" for i in range(0, len(hexadecimal) - 5, 6)]
