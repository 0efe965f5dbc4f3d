"""Building blocks of reports and comparisons: self-contained pages, embedded pictures, tables."""

import base64
import html
from collections.abc import Iterable, Sequence

from pipeline.console import make_printable

escape = html.escape
STYLE = """
body { font: 15px/1.55 system-ui, sans-serif; color: #22272e; background: #fafafa; margin: 0; }
main { max-width: 62rem; margin: 2rem auto; padding: 0 1.5rem; }
h1 { font-size: 1.7rem; margin-bottom: 0; } h2 { font-size: 1.15rem; margin-top: 2.2rem; border-bottom: 1px solid #ddd; }
.lead { color: #57606a; margin-top: .2rem; } .figure { font-size: 2.4rem; font-weight: 600; color: #c8553d; }
img { max-width: 100%; background: white; border: 1px solid #e3e5e8; border-radius: 6px; padding: .5rem; box-sizing: border-box; }
pre, code { font: 13px/1.45 ui-monospace, monospace; }
pre { background: white; border: 1px solid #e3e5e8; border-radius: 6px; padding: .7rem 1rem; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; }
pre b { color: #2a6f97; } table { border-collapse: collapse; } td, th { padding: .15rem .9rem .15rem 0; text-align: left; }
.grid > table { align-self: start; }
.examples td, .grid :is(td, th) { overflow-wrap: anywhere; vertical-align: top; }
.examples td.number, .grid .number { overflow-wrap: normal; } .examples td.number { white-space: nowrap; }
.grid .number { width: 1%; }
.wide { width: max-content; min-width: 100%; max-width: 96vw; position: relative; left: 50%; transform: translateX(-50%); }
.wide { overflow-x: auto; font-size: .85rem; } .wide td:first-child { white-space: nowrap; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(17rem, 1fr)); gap: 1rem 2rem; }
summary { cursor: pointer; color: #57606a; }
"""


def render_page(title: str, body: str) -> str:
    """Return a self-contained HTML page."""
    head = f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title><style>{STYLE}</style>"
    return make_printable(f"{head}<main>{body}</main></html>\n")


def data_uri(png: bytes) -> str:
    """Return a PNG as a data URI."""
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def render_image(alt: str, png: bytes) -> str:
    """Return an HTML image with the PNG embedded."""
    return f"<img alt='{escape(alt)}' src='{data_uri(png)}'>"


def render_table(head: Sequence[str], rows: Iterable[Sequence[str]], words: int) -> str:
    """Return an HTML table. Columns after the first `words` are numbers; head and cells are already HTML."""

    def row(tag: str, cells: Sequence[str]) -> str:
        marked = (f"<{tag}{'' if at < words else ' class=number'}>{cell}" for at, cell in enumerate(cells))
        return f"<tr>{''.join(marked)}"

    return f"<table>{row('th', head)}{''.join(row('td', cells) for cells in rows)}</table>"


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]], words: int) -> str:
    """Return a Markdown table. Head and cells are already Markdown; see `markdown_text`."""
    rule = ["---" if at < words else "---:" for at in range(len(head))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *rows))


def text_table(head: Sequence[str], rows: Sequence[Sequence[str]], words: int) -> str:
    """Return a table for a terminal, each column as wide as its widest cell."""
    widths = [max(len(line[at]) for line in (head, *rows)) for at in range(len(head))]
    shown = (
        (
            cell.ljust(width) if at < words else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in (head, *rows)
    )
    return "\n".join("  ".join(line).rstrip() for line in shown)
