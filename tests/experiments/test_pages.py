"""Pages of committed results: each is what the generator makes of its JSON."""

from functools import cache
from pathlib import Path

import pytest

from experiments import pages
from experiments.catalogue import list_outdated
from experiments.results import judge_claims

load_results = cache(lambda: list(pages.load_results()))
AGAIN = "run python -m experiments.pages"


@pytest.mark.parametrize("name", sorted(path.stem for path in pages.PLACE.glob("*.json")))
def test_a_page_is_made_of_its_json(name: str) -> None:
    ((experiment, result),) = [each for each in load_results() if each[0].name == name]
    page = (pages.PLACE / f"{experiment.name}.md").read_text(encoding="utf-8")
    assert page == pages.format_page(experiment, result), AGAIN
    assert result.verdicts == judge_claims(experiment, result.rows), AGAIN
    assert not list_outdated(experiment, {row.variant: row.options for row in result.rows}), "run it again"
    assert result.command.startswith(f"haed experiment {experiment.name} ") and result.date and result.machine
    assert Path(result.folder).parent == Path(experiment.name), AGAIN  # no path of the machine that made it


def test_the_index_lists_all_results() -> None:
    assert pages.format_overview(load_results()) in (pages.PLACE / "index.md").read_text(encoding="utf-8"), AGAIN


def test_every_result_has_a_page_and_a_picture_and_nothing_else_is_there() -> None:
    names = {experiment.name for experiment, _ in load_results()}
    expected = {f"{name}.{suffix}" for name in names for suffix in ("json", "md", "png")} | {"index.md"}
    assert expected == {path.name for path in Path(pages.PLACE).iterdir()}
