"""Pools of processes that end as they should, whichever process began them."""

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from data.processes import available_threads, free_memory, process_pool

_kept: list[object] = []


def _note(folder: Path) -> None:
    """What a worker begins with: it leaves a file if it is terminated."""

    def terminated(*_: object) -> None:
        (folder / f"{os.getpid()}").touch()
        os._exit(1)

    signal.signal(signal.SIGTERM, terminated)


def _keep_a_pool(folder: Path) -> None:
    pool = process_pool(2, _note, (folder,))
    assert list(pool.map(abs, range(8))) == list(range(8))
    _kept.append(pool)


@pytest.mark.parametrize("start", ["spawn", "fork"])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_pool_that_is_never_closed_ends_by_itself_not_by_a_signal(tmp_path: Path, start: str) -> None:
    """Terminated workers look like a crash to the pool, which clears up just while the process ends: status 1 now and then."""
    process = multiprocessing.get_context(start).Process(target=_keep_a_pool, args=(tmp_path,))  # type: ignore[attr-defined]
    process.start()
    process.join()
    assert (process.exitcode, list(tmp_path.iterdir())) == (0, [])


def _warn(text: str) -> None:
    logging.getLogger("data.remote").info("no file %s", text)


@pytest.fixture
def spawned_logs(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Logs may be changed, and workers have none of them but what the pool hands over: beside torch they are spawned."""
    import torch  # noqa: F401

    before = logging.getLogRecordFactory()
    caplog.set_level(logging.INFO, "data")
    yield
    logging.setLogRecordFactory(before)


@pytest.mark.slow
@pytest.mark.parametrize("served", [False, True])
@pytest.mark.usefixtures("spawned_logs")
def test_what_a_worker_logs_is_as_printable_as_what_its_parent_logs(
    served: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    from flows.artifacts import name_flows_in_logs
    from pipeline.console import prepare_logs

    prepare_logs()
    if served:  # by Prefect
        name_flows_in_logs()
    with process_pool(1) as pool:
        pool.submit(_warn, "a\x1b[31m of https://me:hunter2@host/x").result()
    said = capfd.readouterr().err
    assert "no file a\\x1b[31m" in said and "hunter2" not in said


@pytest.mark.slow
@pytest.mark.usefixtures("spawned_logs")
def test_a_log_record_of_ones_own_that_a_worker_cannot_have_is_left_out() -> None:
    before = logging.getLogRecordFactory()
    for make in (lambda *values, **named: before(*values, **named), _Lost):
        logging.setLogRecordFactory(make)
        with process_pool(1) as pool:
            assert pool.submit(abs, -1).result() == 1


class _Lost(logging.LogRecord):
    """A record that is pickled by a name which a worker does not find."""

    __module__ = "__main__"


sys.modules["__main__"]._Lost = _Lost  # type: ignore[attr-defined]
CPUS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
V1 = {"cpu.cfs_quota_us": "100000", "cpu.cfs_period_us": "100000"}
GROUPS = {
    "version 2": ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "100000 100000", "cpu.max": "max 100000"}, 1),
    "version 2, of a container": ("0::/\n", {"cpu.max": "50000 100000"}, 1),
    "version 1": ("5:memory:/x\n4:cpu,cpuacct:/x\n", {f"cpu,cpuacct/x/{name}": x for name, x in V1.items()}, 1),
    "version 1, whose path is another outside": ("4:cpu:/docker/x\n", {f"cpu/{name}": x for name, x in V1.items()}, 1),
    "none, or not readable": (
        "0::/\n4:cpu:/\nnonsense\n",
        {"cpu.max": "garbage", "cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"},
        8,
    ),
    "two would not use what is paid for": ("0::/\n", {"cpu.max": "250000 100000"}, 3),
}


@pytest.mark.parametrize("case", GROUPS)
def test_threads_are_no_more_than_a_containers_quota(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(8), raising=False)
    assert available_threads(tmp_path) == 8
    own, files, threads = GROUPS[case]
    for name, content in {"proc/self/cgroup": own, **{f"sys/fs/cgroup/{name}": x for name, x in files.items()}}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    assert available_threads(tmp_path) == threads


@pytest.mark.parametrize(("asked", "expected"), [("1", 1), ("1,2", 1), ("0", CPUS), ("many", CPUS), ("", CPUS)])
def test_threads_are_no_more_than_openmp_is_given(asked: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert available_threads() == min(expected, available_threads()) and available_threads(Path("/nowhere")) == expected


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="of Linux")
def test_a_run_computes_with_no_more_threads_than_its_affinity_has_cores() -> None:
    """As `taskset -c` has it, and at OMP_NUM_THREADS; an option goes before both."""
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); import torch\n"
        "from pipeline.config import load_options\nfrom pipeline.run.device import setup_compute\n"
        "setup_compute(load_options(None, [])); print(torch.get_num_threads())\n"
        "setup_compute(load_options(None, ['threads=3'])); print(torch.get_num_threads())\n"
        "setup_compute(load_options(None, [])); print(torch.get_num_threads())"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "3", "1"]


def test_without_a_record_of_free_memory_it_is_all_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise FileNotFoundError

    free = free_memory()
    monkeypatch.setattr("data.processes.open", refuse, raising=False)  # macOS has no /proc
    whole = free_memory()
    assert free < whole < float("inf")

    def know_nothing(name: str) -> int:
        raise ValueError(name)

    monkeypatch.setattr(os, "sysconf", know_nothing)
    assert free_memory() == float("inf")
