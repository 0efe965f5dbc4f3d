"""Trackers: TensorBoard read by its own reader and server, MLflow by a real server, W&B in its offline mode; and faults."""

import http.server
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.plugins.hparams import metadata
from tensorboard.util.tensor_util import make_ndarray

from pipeline.cli import main
from pipeline.console import warn_once
from pipeline.run.metrics import RunSummary, read_metrics
from pipeline.run.run_directory import RunFolder
from pipeline.run.trackers import BackgroundTracker, MLflow, TensorBoard, publish_results, summarise_run
from pipeline.training.stages import pretrain
from tests.flows.api import PATIENCE, call, clean_environment, free_ports, python, until

needs_mlflow = pytest.mark.skipif(not find_spec("mlflow"), reason="MLflow is not installed: make setup-peers")
needs_wandb = pytest.mark.skipif(not find_spec("wandb"), reason="W&B is not installed: make setup-peers")


def read_summary(run: Path) -> tuple[dict[str, Any], dict[str, float], dict[str, str]]:
    """The options, final metrics and samples that TensorBoard's reader finds."""
    (file,) = (run / "tensorboard").iterdir()
    options: dict[str, Any] = {}
    metrics, samples = dict[str, float](), dict[str, str]()
    for event in EventFileLoader(str(file)).Load():
        for value in event.summary.value:
            plugin = value.metadata.plugin_data
            if value.tag == metadata.SESSION_START_INFO_TAG:
                session = metadata.parse_session_start_info_plugin_data(plugin.content)
                options = {name: getattr(item, item.WhichOneof("kind")) for name, item in session.hparams.items()}
            elif plugin.plugin_name == "text":
                samples[value.tag] = make_ndarray(value.tensor).item().decode()
            else:
                metrics[value.tag] = float(make_ndarray(value.tensor))
    return options, metrics, samples


def test_tensorboard_has_options_figures_and_samples(run: Path) -> None:
    options = RunFolder(run).load_options()
    pretrain_only = RunFolder(run).load_options(["evaluate.stage=pretrain"], "evaluate")
    shown, figures, samples = read_summary(run)
    assert shown["optimizer.learning_rate"] == options.optimizer.learning_rate and shown["name"] == "run"
    assert shown["deterministic"] is True and shown["finetune.steps"] == 4 and "finetune.seconds" not in shown
    assert shown["evaluate.parts"] == str(options.evaluate.parts)
    assert {"validation/bits_per_token", "test/bits_per_char", "test/bits_per_char_without_memory"} <= set(figures)
    written = json.loads((run / "evaluation.json").read_text())
    assert figures["test/bits_per_char"] == pytest.approx(written["bits_per_char"])
    assert len(samples) > 1 and all(text.startswith("```") for text in samples.values())
    publish_results(pretrain_only)
    _, figures, samples = read_summary(run)  # none of them is of that checkpoint
    assert set(figures) == {"validation/bits_per_token", "validation/standard_error"} and not samples


def test_tensorboard_reads_files_in_their_order_even_if_the_clock_went_back(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = TensorBoard(RunFolder(run), "finetune")
    first.write_record({"step": 1, "loss": 2.0})
    first.close(True)
    now = time.time()
    monkeypatch.setattr("pipeline.run.trackers.time.time", lambda: now - 3600)
    second = TensorBoard(RunFolder(run), "finetune", 1)
    second.write_record({"step": 2, "loss": 1.0})
    second.close(True)
    read = EventAccumulator(str(run / "finetune" / "tensorboard"))
    read.Reload()
    assert [event.step for event in read.Scalars("loss")][-2:] == [1, 2]


@needs_mlflow
def test_an_option_that_is_set_back_is_set_back_in_mlflow(run: Path) -> None:
    class Client:
        params, tags = {"seed": "0", "name": "run", "finetune.seconds": "5"}, dict[str, str]()

        def get_run(self, _: str) -> Any:
            return SimpleNamespace(data=self)

        def log_batch(self, _: str, params: Any = (), tags: Any = (), metrics: Any = ()) -> None:
            self.tags |= {tag.key: tag.value for tag in tags}

        def get_metric_history(self, *_: Any) -> list[Any]:
            return []

    tracker = object.__new__(MLflow)
    tracker._client, tracker._opened = (client := Client()), "known"
    for seed in (0, 1, 0):
        client.tags["mlflow.user"] = "me"
        tracker.write_summary(RunSummary({"seed": seed, "name": "run"}))
        assert client.tags.get("seed", "0") == str(seed) and client.tags["finetune.seconds"] == "null"
    assert "name" not in client.tags


@pytest.mark.slow
def test_the_hparams_dashboard_filters_by_every_option_that_varies(run: Path) -> None:
    other = run.parent / "other"
    other.mkdir()
    for file in run.iterdir():
        if file.name != "tensorboard":
            (other / file.name).symlink_to(file)
    options = RunFolder(run).load_options()
    options.name, options.optimizer.learning_rate, options.deterministic = "other", 0.5, False
    for each in (RunFolder(run).load_options(), options):
        publish_results(each)
    port, _ = free_ports()
    command = [sys.executable, "-m", "flows.server", "board", "--port", str(port), "--logdir", str(run.parent)]
    with subprocess.Popen(command, env=clean_environment(), stderr=subprocess.DEVNULL) as board:

        def ask(path: str, **body: Any) -> Any:
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/data/plugin/hparams/{path}",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                return json.loads(answer.read())

        try:
            asked = {"experimentName": "", "includeMetrics": True}
            found = until(
                PATIENCE, lambda: len((answer := ask("experiment", **asked)).get("metricInfos", ())) and answer
            )
            differ = {item["name"] for item in found["hparamInfos"] if item.get("differs")}
            assert differ == {"name", "optimizer.learning_rate", "deterministic"} and len(found["hparamInfos"]) > 150
            assert "test/bits_per_char" in {item["name"]["tag"] for item in found["metricInfos"]}
            column = {"hparam": "optimizer.learning_rate", "filterInterval": {"minValue": 0.4, "maxValue": 1.0}}
            statuses = ["STATUS_UNKNOWN", "STATUS_SUCCESS", "STATUS_RUNNING", "STATUS_FAILURE"]
            groups = ask("session_groups", colParams=[column], allowedStatuses=statuses, startIndex=0, sliceSize=9)
            assert [group["hparams"]["name"] for group in groups["sessionGroups"]] == ["other"]
        finally:
            board.terminate()


def test_without_its_package_a_tracker_is_left_out_with_one_line(
    tiny: list[str], options: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind, module in (("mlflow", "mlflow"), ("wandb", "wandb")):
        monkeypatch.setitem(sys.modules, module, None)
        words = [*tiny, "name=tiny", f"tracking={kind}", "resume=auto"]
        assert main(["pretrain", "--config", "quickstart", *words]) == 0
        said = capsys.readouterr().err
        assert said.count(f"tracking={kind} is left out") == 1 and f"pip install 'haed[{kind}]'" in said
    assert not (Path(options.runs_dir) / "tiny" / "tracking.json").exists()


def test_a_slow_tracker_delays_no_step(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training is over while the first call still waits; then the rest is sent in order, once what failed is back."""
    warn_once.cache_clear()
    monkeypatch.setattr("pipeline.run.trackers.RETRY_SECONDS", 0.01)
    begun, trained, calls, failures = threading.Event(), threading.Event(), list[str](), [OSError("gone")] * 3

    class Slow(MLflow):
        def __init__(self, run: RunFolder, phase: Any) -> None:
            self.run, self.place = run, "Slow"

        def write_record(self, record: Any) -> None:
            if failures:
                raise failures.pop()
            calls.append(f"step {record['step']}")

        def write_summary(self, summary: Any) -> None:
            begun.set()
            assert trained.wait(PATIENCE)
            calls.append("summary")

        def close(self, finished: bool) -> None:
            calls.append(f"finished {finished}")

    def listen(record: Any) -> None:
        if record["step"] == 6 and "loss" in record:
            assert begun.wait(PATIENCE) and calls == []
            trained.set()

    monkeypatch.setattr("pipeline.run.trackers._KINDS", {"mlflow": Slow})
    options.tracking = "mlflow"
    pretrain(options, listener=listen)
    steps = [f"step {record['step']}" for record in read_metrics(Path(options.runs_dir, "tiny/pretrain/metrics.jsonl"))]
    assert calls == ["summary", *steps, "summary", "finished True"]


def test_what_is_refused_is_dropped_and_what_fails_at_the_end_is_given_up(
    run: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    warn_once.cache_clear()

    class Refusal(Exception):
        def get_http_status_code(self) -> int:
            return 400

    class Failing(MLflow):
        def __init__(self) -> None:
            self.run, self.place = RunFolder(run), "Failing"
            self.errors, self.tries = [Refusal("too long"), OSError("gone"), OSError("gone"), OSError("gone")], 0

        def write_record(self, record: Any) -> None:
            self.tries += 1
            raise self.errors.pop(0)

    tracker = Failing()
    background = BackgroundTracker(tracker)
    for step in (1, 2, 3):
        background.write_record({"step": step})
    until(PATIENCE, lambda: tracker.tries == 2)
    background.close(True)  # one more try of the second; the third has none
    assert tracker.tries == 3
    refused, failed = (record.message for record in caplog.records)
    assert "refuses a part of the run (too long)" in refused and "OSError: gone" in failed


def test_a_run_that_is_trained_is_left_to_its_training(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = list[Path]()

    class Closed(MLflow):
        def __init__(self, run: RunFolder, phase: Any) -> None:
            opened.append(run.path)
            raise ModuleNotFoundError("closed")

    monkeypatch.setattr("pipeline.run.trackers._KINDS", {"mlflow": Closed})
    options = RunFolder(run).load_options()
    options.tracking = "mlflow"
    shutil.rmtree(run / "tensorboard")
    with RunFolder(run).lock():
        publish_results(options)
    assert opened == [] and read_summary(run)[1]
    publish_results(options)
    assert opened == [run]


def train(words: list[str], home: Path, *more: str, command: str = "pretrain", **environment: str) -> str:
    """Train in a process of its own, as a user does; what it logs."""
    quiet = {"HOME": str(home), "OMP_NUM_THREADS": "1", "MLFLOW_DISABLE_TELEMETRY": "true"}
    done = python(home, "-m", "pipeline", command, *words, *more, **(quiet | environment))
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1  # the trackers print nothing
    return done.stderr


@contextmanager
def mlflow_server(folder: Path) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    address = f"http://127.0.0.1:{(port := free_ports()[0])}"
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder}/x.db", "--artifacts-destination", f"{folder}/artifacts"]
    quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (
        open(folder / "log", "wb") as log,
        subprocess.Popen(
            command, env=clean_environment(**quiet), cwd=folder, stdout=log, stderr=log, start_new_session=True
        ) as server,
    ):
        try:
            until(PATIENCE, lambda: urllib.request.urlopen(f"{address}/health", timeout=PATIENCE).status == 200)
            yield address, server
        finally:
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)


def ask_mlflow(address: str, path: str, **body: Any) -> Any:
    return call(address, f"/2.0/mlflow/{path}", body or None)


@needs_mlflow
@pytest.mark.nightly
@pytest.mark.timeout(PATIENCE)
def test_mlflow_has_one_run_through_ranks_resuming_a_signal_and_a_report(
    tiny: list[str], options: Any, tmp_path: Path
) -> None:
    name = "größe-数"
    words = ["--config", "quickstart", *tiny, f"name={name}", "tracking=mlflow"]
    run = tmp_path / "runs" / name
    with mlflow_server(tmp_path) as (address, server):
        where = {"MLFLOW_TRACKING_URI": address}

        def the_run() -> Any:
            (found,) = ask_mlflow(address, "runs/search", experiment_ids=["1"], max_results=9)["runs"]
            return found

        def steps_of(metric: str) -> list[int]:
            key = f"metrics/get-history?run_id={the_run()['info']['run_id']}&metric_key={metric}"
            return [item["step"] for item in ask_mlflow(address, key)["metrics"]]

        train(words, tmp_path, "launcher.processes=2", **where)
        assert steps_of("pretrain/loss") == [1, 2, 5, 6]  # of the first rank alone
        train(words, tmp_path, "pretrain.steps=8", **where)
        assert steps_of("pretrain/loss") == [1, 2, 5, 6, 8]
        found = the_run()
        assert found["info"]["run_name"] == name and found["info"]["status"] == "FINISHED"
        params = {item["key"]: item["value"] for item in found["data"]["params"]}
        tags = {item["key"]: item["value"] for item in found["data"]["tags"]}
        assert params["batch.sequences"] == "2" and params["pretrain.steps"] == "6" and tags["pretrain.steps"] == "8"
        command = [sys.executable, "-m", "pipeline", "pretrain", *words, "pretrain.steps=1000000", "log_steps=1"]
        environment = clean_environment(HOME=str(tmp_path), MLFLOW_DISABLE_TELEMETRY="true", **where)
        with subprocess.Popen(command, env=environment, cwd=tmp_path, stderr=subprocess.DEVNULL) as training:
            until(PATIENCE, lambda: max(steps_of("pretrain/loss")) > 8)
            training.send_signal(signal.SIGINT)
            assert training.wait(PATIENCE) == 128 + signal.SIGINT
        assert the_run()["info"]["status"] == "KILLED"
        train([str(run)], tmp_path, command="report", **where)
        found = the_run()
        tags = {item["key"]: item["value"] for item in found["data"]["tags"]}
        figures = {item["key"]: item["value"] for item in found["data"]["metrics"]}
        summary = summarise_run(RunFolder(run).load_options())
        assert tags["checkpoint"] == summary.checkpoint and found["info"]["status"] == "FINISHED"
        assert figures["validation/bits_per_token"] == summary.metrics["validation/bits_per_token"]
        train(words, tmp_path, "finetune.steps=3", command="finetune", **where)  # fewer than those of phase one
        figures = {item["key"]: item["value"] for item in the_run()["data"]["metrics"]}
        wanted = summarise_run(RunFolder(run).load_options()).metrics["validation/bits_per_token"]
        assert figures["validation/bits_per_token"] == wanted != summary.metrics["validation/bits_per_token"]
        files = ask_mlflow(address, f"artifacts/list?run_id={found['info']['run_id']}")["files"]
        assert [file["path"] for file in files] == ["report.html"]


class Broken(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_error(500)

    do_POST = do_GET

    def log_message(self, *words: Any) -> None:
        pass


@needs_mlflow
@pytest.mark.nightly
@pytest.mark.parametrize("fault", ["answers 500", "never answers", "is not there"])
def test_a_server_that_fails_is_said_once(fault: str, tiny: list[str], options: Any, tmp_path: Path) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Broken) as server:
        if fault == "answers 500":
            threading.Thread(target=server.serve_forever, daemon=True).start()
        port = free_ports()[0] if fault == "is not there" else server.server_port
        where = {"MLFLOW_TRACKING_URI": f"http://127.0.0.1:{port}", "MLFLOW_HTTP_REQUEST_TIMEOUT": "1"}
        said = train(["--config", "quickstart", *tiny, "name=tiny", "tracking=mlflow"], tmp_path, **where)
        if fault == "answers 500":
            server.shutdown()
    lines = [line for line in said.splitlines() if "mlflow" in line.lower() or "HTTP" in line]
    assert len(lines) == 1 and f"MLflow at http://127.0.0.1:{port} does not answer" in lines[0]


def read_wandb(run: Path) -> list[Any]:
    """The records of W&B's offline files of a run: a log in LevelDB's format."""
    from wandb.proto.wandb_internal_pb2 import Record

    records, size = [], 1 << 15
    for file in sorted(run.glob("wandb/offline-run-*/*.wandb")):
        content, place, part = file.read_bytes(), 7, b""
        while place + 7 <= len(content):
            if size - place % size < 7:
                place += size - place % size
                continue
            length, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
            part += content[place + 7 : place + 7 + length]
            place += 7 + length
            if kind in (1, 4):  # whole, or the last part
                records.append(Record.FromString(part))
                part = b""
    return records


@needs_wandb
@pytest.mark.slow
def test_wandb_records_offline_and_goes_on_in_the_same_run(tiny: list[str], options: Any, tmp_path: Path) -> None:
    name = "größe-数"
    words, run = ["--config", "quickstart", *tiny, f"name={name}", "tracking=wandb"], tmp_path / "runs" / name
    train(words, tmp_path, WANDB_MODE="offline")
    train(words, tmp_path, "pretrain.steps=8", WANDB_MODE="offline")
    train([str(run)], tmp_path, command="report", WANDB_MODE="offline")
    records = read_wandb(run)
    (identifier,) = {record.run.run_id for record in records if record.HasField("run")}
    assert json.loads((run / "tracking.json").read_text())["wandb"] == identifier
    assert {record.run.display_name for record in records if record.HasField("run")} == {name}
    rows = [
        {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    assert [json.loads(row["pretrain/step"]) for row in rows if "pretrain/loss" in row] == [1, 2, 5, 6, 8]
    text = b"".join(record.SerializeToString() for record in records)
    checkpoint = summarise_run(RunFolder(run).load_options()).checkpoint[:12]
    for part in (b"optimizer.learning_rate", b"validation/bits_per_token", f"checkpoint:{checkpoint}".encode()):
        assert part in text
    assert any(record.request.HasField("log_artifact") or record.HasField("artifact") for record in records)


@needs_wandb
@pytest.mark.nightly
@pytest.mark.parametrize("key", ["", "0123456789012345678901234567890123456789"])
def test_without_credentials_or_server_wandb_asks_nothing_and_records_offline(
    key: str, tiny: list[str], options: Any, tmp_path: Path
) -> None:
    """On a terminal, where it would ask."""
    words = ["--config", "quickstart", *tiny, "name=tiny", "tracking=wandb"]
    above, terminal = pty.openpty()
    given = {"WANDB_API_KEY": key, "WANDB_BASE_URL": f"http://127.0.0.1:{free_ports()[0]}"} if key else {}
    environment = clean_environment(HOME=str(tmp_path), OMP_NUM_THREADS="1", TERM="xterm", **given)
    with subprocess.Popen(
        [sys.executable, "-m", "pipeline", "pretrain", *words],
        env=environment,
        cwd=tmp_path,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
    ) as training:
        os.close(terminal)
        said = b"".join(iter(make_reader(above), b"")).decode()
        assert training.wait(PATIENCE) == 0
    os.close(above)
    assert said.count("W&B: ") == 1 and "`wandb sync " in said
    assert {"history"} <= {record.WhichOneof("record_type") for record in read_wandb(tmp_path / "runs/tiny")}


def make_reader(descriptor: int) -> Callable[[], bytes]:
    def read() -> bytes:
        try:
            return os.read(descriptor, 1 << 16)
        except OSError:  # the other side is closed
            return b""

    return read
