"""Artifacts of a flow run. The UI renders their descriptions as Markdown, so descriptions are escaped here."""

from collections.abc import Mapping, Sequence
from typing import Any

from prefect.artifacts import create_link_artifact, create_markdown_artifact, create_table_artifact

from pipeline.console import make_printable, markdown_text


def post_markdown(text: str, key: str, *about: str) -> None:
    """Post a Markdown text.

    Args:
        text: Markdown, whose names, paths and messages went through `pipeline.console.markdown_text` or `markdown_code`.
        key: of the artifact.
        about: paragraphs of its description, as plain text.
    """
    create_markdown_artifact(text, key, _join_paragraphs(about))


def post_table(rows: Sequence[Mapping[str, Any]], key: str, *about: str) -> None:
    """Post a table, whose cells the UI shows as plain text; see `post_markdown`."""
    shown = [{name: _escape_cell(value) for name, value in row.items()} for row in rows]
    create_table_artifact(shown, key, _join_paragraphs(about))


def post_link(address: str, text: str, key: str, *about: str) -> None:
    """Post a link to one of our addresses; see `post_markdown`."""
    create_link_artifact(address, text, key=key, description=_join_paragraphs(about))


def _join_paragraphs(about: Sequence[str]) -> str:
    return "\n\n".join(markdown_text(each) for each in about)


def _escape_cell(value: Any) -> Any:
    return make_printable(value) if isinstance(value, str) else value
