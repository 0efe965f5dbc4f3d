"""The logs of a phase on a disk that is full for a while, and the line of its progress."""

import io
import os
import resource
import threading
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from pipeline.config import PretrainOptions
from pipeline.run.metrics import Metrics, PhaseStatus, Progress, ProgressCounter, read_metrics
from pipeline.run.run_directory import RunFolder
from pipeline.run.trackers import TensorBoard


def test_a_full_disk_ends_no_thread_and_loses_no_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    limits, threads = resource.getrlimit(resource.RLIMIT_FSIZE), threading.active_count()
    run = RunFolder(tmp_path)
    board = TensorBoard(run, "pretrain", 0)
    metrics = Metrics(run.phase_folder("pretrain"), 0, [board.write_record])
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # Python ignores the signal: it is an OSError
        for step in range(1, 101):
            metrics.write_record({"step": step, "loss": step / 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    path = run.phase_folder("pretrain") / "metrics.jsonl"
    assert "are kept in memory" in caplog.text and len(read_metrics(path)) < 100
    metrics.close()
    board.close(True)
    assert threading.active_count() == threads
    assert [record["step"] for record in read_metrics(path)] == list(range(1, 101))
    (events,) = (path.parent / "tensorboard").iterdir()
    steps = [event.step for event in EventFileLoader(str(events)).Load() if event.HasField("summary")]
    assert steps == list(range(1, 101))


class Terminal(io.StringIO):
    def fileno(self) -> int:
        return 2

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [200, 40])
def test_progress_is_a_bar_on_a_terminal_and_shown_from_the_first_metrics_on(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr(os, "get_terminal_size", lambda number: os.terminal_size((columns, 24)))
    monkeypatch.setattr("pipeline.run.metrics.TERMINAL_SECONDS", 0.0)
    progress = Progress("pretrain", PretrainOptions(seconds=None, steps=10))
    for step in (1, 5, 10):
        progress({"step": step, "loss": 2.0})
    _, *lines = terminal.getvalue().split("\r\x1b[2K")
    assert [line.count("━") for line in lines] == [2, 10, 20]
    assert all("%" in line and len(line) < columns for line in lines)
    assert ("loss 2.000" in lines[0]) == (columns == 200)


def test_a_count_ends_with_a_whole_bar_on_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr("pipeline.run.metrics.TERMINAL_SECONDS", 0.0)
    progress = ProgressCounter("evaluate", 4, "chunks")
    progress.add_done()
    monkeypatch.setattr("pipeline.run.metrics.TERMINAL_SECONDS", 60.0)
    progress.add_done(3)
    _, *lines = terminal.getvalue().split("\r\x1b[2K")
    assert [line.count("━") for line in lines] == [5, 20]
    assert lines[1].endswith("100% · evaluate · 4 of 4 chunks\n")


def test_what_is_prepared_before_the_first_count_is_no_part_of_the_time_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 1000.0
    monkeypatch.setattr("pipeline.run.metrics.time.monotonic", lambda: now)
    progress = ProgressCounter("evaluate", 100, "chunks")
    with caplog.at_level("INFO"):
        for now in (1060.0, 1120.0):  # noqa: B007
            progress.add_done(10)
    assert [line.split(" · ")[:2] for line in caplog.messages] == [["10%", "evaluate"], ["20%", "8 min left"]]


def test_the_time_left_is_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a phase whose limit is in seconds of steps, which validations between them do not count for."""
    now = 1000.0
    monkeypatch.setattr("pipeline.run.metrics.time.monotonic", lambda: now)
    status = PhaseStatus("pretrain", PretrainOptions(seconds=100, steps=None))
    status({"step": 1, "seconds": 10.0})
    now += 60
    status({"step": 4, "seconds": 40.0})
    assert status.line().startswith("40% · 2 min left · pretrain")


def test_progress_elsewhere_is_a_line_at_once_and_then_one_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    progress = Progress("pretrain", PretrainOptions(seconds=None, steps=10))
    with caplog.at_level("INFO"):
        for step in (1, 5, 10):
            progress({"step": step, "loss": 2.0})
    (line,) = caplog.messages
    assert line.startswith("10% · pretrain · step 1 · loss 2.000")
