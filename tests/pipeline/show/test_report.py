"""The report of a mixture shows what each of its parts has."""

from pathlib import Path

from pipeline.options import Options
from pipeline.run.files import OF_PARTS
from pipeline.score.evaluate import evaluate
from pipeline.show.report import report


def test_the_parts_of_a_mixture_are_shown(mixed: Options) -> None:
    found = evaluate(mixed)
    page = Path(report(mixed))
    written = page.read_text(), page.with_name("report.md").read_text()
    assert found.breakdown is not None and len(found.breakdown.of_parts()) > 3
    for text in written:
        assert found.whose in text
        assert all(cell in text for row in [OF_PARTS, *found.breakdown.of_parts()] for cell in row)
