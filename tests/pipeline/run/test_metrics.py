"""The logs of a phase on a disk that is full for a while."""

import resource
import threading
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from pipeline.run.metrics import Metrics, read


def test_a_full_disk_ends_no_thread_and_loses_no_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    limits, threads = resource.getrlimit(resource.RLIMIT_FSIZE), threading.active_count()
    metrics = Metrics(tmp_path, 0)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # Python ignores the signal: it is an OSError
        for step in range(1, 101):
            metrics.write({"step": step, "loss": step / 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "are kept for later" in caplog.text and len(read(tmp_path / "metrics.jsonl")) < 100
    metrics.close()
    assert threading.active_count() == threads
    assert [record["step"] for record in read(tmp_path / "metrics.jsonl")] == list(range(1, 101))
    (events,) = (tmp_path / "tensorboard").iterdir()
    steps = [event.step for event in EventFileLoader(str(events)).Load() if event.HasField("summary")]
    assert steps == list(range(1, 101))
