"""Which signals are one request to stop, and which insist."""

import os
import signal
import subprocess
import sys
import time

import pytest

from pipeline import ROOT, signals
from pipeline.signals import StopRequested, end_interruptible, interruptible_section, postponed_signals


def test_only_a_signal_that_comes_clearly_later_insists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "SAME_SECONDS", 3600)
    stop = signals.StopSignal()
    assert not stop()
    assert not stop.is_second_request(signal.SIGINT) and not stop.is_second_request(signal.SIGTERM)
    assert stop() and stop.number == signal.SIGINT
    monkeypatch.setattr(signals, "SAME_SECONDS", 0)
    assert stop.is_second_request(signal.SIGTERM) and stop.number == signal.SIGINT


SLOW_TO_END = """
import os, signal, sys, time
from pipeline import signals
signals.END_SECONDS = 0.2
signals.end_at_once()
class Slow:
    def __del__(self, sleep=time.sleep): sleep(0.5)
kept = Slow()
try:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
except signals.Interrupt as interrupt:
    sys.exit(128 + interrupt.number)
"""


def test_a_process_that_is_taken_down_slowly_ends_with_its_own_status() -> None:
    assert subprocess.run([sys.executable, "-c", SLOW_TO_END], cwd=ROOT).returncode == 128 + signal.SIGTERM


def test_a_signal_whose_exception_was_lost_ends_work_that_would_be_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "_ending", stop := signals.StopSignal())
    stop.is_second_request(signal.SIGTERM)
    with pytest.raises(signals.Interrupt) as error, signals.postponed_signals():
        pytest.fail("the work began")
    assert error.value.number == signal.SIGTERM


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_stop_that_python_ignores_is_raised_again(early: bool) -> None:
    class Late:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)  # the handler runs here, where Python ignores what it raises

    def work() -> None:
        with postponed_signals(), interruptible_section():
            Late()
            reached.append("after")
            if early:
                end_interruptible()
                reached.append("the first step")

    reached: list[str] = []
    with pytest.raises(StopRequested):
        work()
    assert reached == ["after"]
