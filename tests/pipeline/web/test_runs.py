"""The list of runs: what changed is worked out again and nothing else, and a request never waits long."""

import os
import shutil
from pathlib import Path
from threading import Event

import pytest

from data.filesystem import write_json
from pipeline.run.files import Evaluation, read_as
from pipeline.run.metrics import encode_record, read_metrics
from pipeline.run.run_directory import RunFolder
from pipeline.web.changes import archive_run
from pipeline.web.listing import RunListing, RunRow, list_varying_options, make_row, rows_to_json
from pipeline.web.runs import ServedRuns


def listing_of(run: Path) -> RunListing:
    return RunListing(ServedRuns(run.parent))


def test_a_row_is_made_once_and_again_when_a_file_changed(run: Path) -> None:
    """Also where size and time of writing are the same as before."""
    folder, listing = RunFolder(run), listing_of(run)
    archive_run(folder, True)
    assert listing.get_row(folder).notes.archived
    archive_run(folder, False)
    first = listing.get_row(folder)
    assert listing.get_row(folder) is first
    assert first.evaluation.result.headline.value == read_as(Evaluation, run / "evaluation.json").headline.value
    path = run / "finetune" / "metrics.jsonl"
    status, records = path.stat(), read_metrics(path)
    validated = [record for record in records if "validation/bits_per_token" in record][-1]
    was = str(validated["validation/bits_per_token"])
    validated["validation/bits_per_token"] = float(("2" if was[0] == "1" else "1") + was[1:-1] + "5")
    path.write_bytes(b"".join(encode_record(record) for record in records))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    changed = listing.get_row(folder)
    assert path.stat().st_size == status.st_size
    assert changed.state.validation == validated["validation/bits_per_token"] != first.state.validation
    assert listing.get_row(folder) is changed


@pytest.mark.parametrize(
    "name", ["config.yaml", "finetune/checkpoints/best", "finetune/checkpoints/step-00000004/model.safetensors"]
)
def test_each_file_that_a_row_is_made_of_is_looked_at(name: str, run: Path) -> None:
    listing = listing_of(run)
    before = listing.get_row(RunFolder(run))
    (run / name).write_bytes((run / name).read_bytes() + b" ")
    assert listing.get_row(RunFolder(run)) is not before


def test_who_holds_a_run_is_always_looked_at(run: Path) -> None:
    folder, listing = RunFolder(run), listing_of(run)
    assert not listing.get_row(folder).state.running
    with folder.lock():
        assert listing.get_row(folder).state.running
    assert not listing.get_row(folder).state.running


def test_another_run_under_a_name(run: Path) -> None:
    listing, old = listing_of(run), run.with_name("old")
    assert listing.get_row(RunFolder(run)).evaluation.result is not None
    run.rename(old)
    shutil.copytree(old, run)
    (run / "evaluation.json").unlink()
    assert listing.get_row(RunFolder(run)).evaluation.result is None
    write_json(run / "evaluation.json", {"bits": 1})
    assert "damaged" in listing.get_row(RunFolder(run)).evaluation.warnings[0]


def test_options_of_a_run_are_read_once(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy each, since they are changed; again when the file has changed."""
    from pipeline.run import run_directory as module

    read: list[Path] = []
    load = module.load_options
    monkeypatch.setattr(module, "load_options", lambda path, *more: read.append(path) or load(path, *more))
    first = RunFolder(run).load_options()
    first.seed = 99
    assert RunFolder(run).load_options().seed != 99 and len(read) == 1
    path = run / "config.yaml"
    path.write_text(path.read_text().replace("\nseed: 0\n", "\nseed: 7\n"))
    assert RunFolder(run).load_options().seed == 7 and len(read) == 2


def test_options_that_vary_are_columns_and_the_nearest_preset_is_named(run: Path) -> None:
    other = run.with_name("other")
    shutil.copytree(run, other)
    text = (other / "config.yaml").read_text()
    (other / "config.yaml").write_text(text.replace("\nseed: 0\n", "\nseed: 7\n").replace("name: run", "name: other"))
    rows, _ = listing_of(run).list_rows()
    assert list_varying_options(rows) == ["seed"] and {row.preset for row in rows} == {"quickstart"}
    facts = {row["run"]: row for row in rows_to_json(rows)}
    assert facts["other"]["options"] == {"seed": 7} and facts["run"]["options"] == {"seed": 0}
    assert facts["run"]["metrics"]["bits_per_token"] == facts["run"]["training"] and facts["run"]["parameters"] > 0
    assert list_varying_options(rows[:1]) == []


def test_rows_that_are_old_are_not_shown_while_a_look_takes_long(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listing = listing_of(run)
    assert [row.name for row in listing.list_rows()[0]] == ["run"]
    monkeypatch.setattr("pipeline.web.listing._FRESH_SECONDS", 0)
    monkeypatch.setattr("pipeline.web.listing._WAIT_SECONDS", 0)
    shutil.copytree(run, run.with_name("new"))
    assert {row.name for row in listing.list_rows()[0]} == {"run", "new"}


def test_a_look_that_takes_long_shows_the_rows_of_the_last_one(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, go_on = Event(), Event()

    def make(folder: RunFolder) -> RunRow:
        if folder.path.name == "slow":
            entered.set()
            go_on.wait()
        return make_row(folder)

    monkeypatch.setattr("pipeline.web.listing.make_row", make)
    listing = listing_of(run)
    assert [row.name for row in listing.list_rows()[0]] == ["run"]
    shutil.copytree(run, run.with_name("slow"))
    assert [row.name for row in listing.list_rows()[0]] == ["run"] and entered.is_set()
    go_on.set()
    while len(rows := listing.list_rows()[0]) == 1:
        pass
    assert {row.name for row in rows} == {"run", "slow"}
