"""The report of a mixture shows what each of its parts has; names in a report are texts."""

from html import escape
from pathlib import Path

from markdown_it import MarkdownIt

from pipeline.cli import main
from pipeline.config import Options
from pipeline.console import markdown_text
from pipeline.run.files import MIXTURE_COLUMNS
from pipeline.run.run_directory import RunFolder
from pipeline.score.evaluate import evaluate_run
from pipeline.show.compare import compare_runs
from pipeline.show.compare import format_markdown as compared
from pipeline.show.report import inline_markdown, write_report


def test_the_parts_of_a_mixture_are_shown(mixed: Options) -> None:
    found = evaluate_run(mixed)
    page = Path(write_report(mixed))
    written = page.read_text(), page.with_name("report.md").read_text()
    assert found.breakdown is not None and len(found.breakdown.mixture_rows()) > 3
    for text, shown in zip(written, (escape, markdown_text), strict=True):
        assert shown(found.whose) in text
        assert all(shown(cell) in text for row in [MIXTURE_COLUMNS, *found.breakdown.mixture_rows()] for cell in row)


def test_a_run_of_any_name_has_a_report_that_shows_it_as_text(run: Path) -> None:
    name = "_x_ <img src=x onerror=alert(1)>|[a](javascript:b) `c` ``d $\\frac{1}$ **e** ]('\"&amp; report"
    place = run.rename(run.with_name(name))
    assert main(["sample", str(place)]) == 0
    assert main(["report", str(place)]) == 0
    for text in ((place / "report.md").read_text(), inline_markdown(RunFolder(place)), markdown_of(place)):
        tokens = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(text.partition("<details>")[0])
        every = [token for line in tokens for token in [line, *(line.children or [])]]
        kinds = {token.type for token in every}
        assert not {"html_block", "html_inline", "link_open", "em_open", "s_open"} & kinds
        assert name in [
            "".join(token.content for token in line.children or []) for line in tokens if line.type == "inline"
        ]
    page = (place / "report.html").read_text()
    assert "<img src=x" not in page and "alert(1)&gt;" in page


def markdown_of(place: Path) -> str:
    """The table of a comparison."""
    return compared(compare_runs([place.name], str(place.parent), place.parent / "compared"))
