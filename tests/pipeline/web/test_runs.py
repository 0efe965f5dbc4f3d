"""The listing of runs: what changed is worked out again, and nothing else."""

import os
import shutil
from pathlib import Path

import pytest

from data.filesystem import write_json
from pipeline.run.files import Evaluation, read_as
from pipeline.run.metrics import encode_record, read_metrics
from pipeline.run.run_directory import RunFolder
from pipeline.web.app import _make_row
from pipeline.web.runs import RunListing


def test_a_row_is_made_once_and_again_when_a_file_changed(run: Path) -> None:
    """Also where size and time of writing are the same as before."""
    folder, listing = RunFolder(run), RunListing(_make_row)
    first = listing.get_row(folder)
    assert listing.get_row(folder) is first and listing.made == 1
    assert first["evaluation"].result.headline.value == read_as(Evaluation, run / "evaluation.json").headline.value
    path = run / "finetune" / "metrics.jsonl"
    status, records = path.stat(), read_metrics(path)
    validated = [record for record in records if "validation/bits_per_token" in record][-1]
    was = str(validated["validation/bits_per_token"])
    validated["validation/bits_per_token"] = float(("2" if was[0] == "1" else "1") + was[1:-1] + "5")
    path.write_bytes(b"".join(encode_record(record) for record in records))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    changed = listing.get_row(folder)
    assert path.stat().st_size == status.st_size
    assert changed["state"].validation == validated["validation/bits_per_token"] != first["state"].validation
    assert listing.made == 2 and listing.get_row(folder) is changed


@pytest.mark.parametrize(
    "name", ["config.yaml", "finetune/checkpoints/best", "finetune/checkpoints/step-00000004/model.safetensors"]
)
def test_each_file_that_a_row_is_made_of_is_looked_at(name: str, run: Path) -> None:
    listing = RunListing(_make_row)
    listing.get_row(RunFolder(run))
    (run / name).write_bytes((run / name).read_bytes() + b" ")
    listing.get_row(RunFolder(run))
    assert listing.made == 2


def test_who_holds_a_run_is_always_looked_at(run: Path) -> None:
    folder, listing = RunFolder(run), RunListing(_make_row)
    assert not listing.get_row(folder)["state"].running
    with folder.lock():
        assert listing.get_row(folder)["state"].running
    assert not listing.get_row(folder)["state"].running


def test_another_run_under_a_name(run: Path) -> None:
    listing, old = RunListing(_make_row), run.with_name("old")
    assert listing.get_row(RunFolder(run))["evaluation"].result is not None
    run.rename(old)
    shutil.copytree(old, run)
    (run / "evaluation.json").unlink()
    assert listing.get_row(RunFolder(run))["evaluation"].result is None
    write_json(run / "evaluation.json", {"bits": 1})
    assert "damaged" in listing.get_row(RunFolder(run))["evaluation"].warnings[0]


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
