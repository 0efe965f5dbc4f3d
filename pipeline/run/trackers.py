"""Trackers: TensorBoard, MLflow and W&B, which show the metrics, options, results and samples of a run.

All three take the same calls. TensorBoard's files are written at once. The other two get theirs from a thread, so that a
slow or missing server delays no training step.

A run of haed is one run of a tracker, whatever stages it has. `tracking.json` in the run's folder has its identifier.
"""

import io
import logging
import os
import queue
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from data.filesystem import make_folders, write_atomically
from pipeline.config import Options, Phase, flatten_tree
from pipeline.console import code_fence, warn_once
from pipeline.run.files import Evaluation, KeptSample, read_as
from pipeline.run.metrics import AppendOnlyLog, Record, RunSummary, read_metrics
from pipeline.run.run_directory import RunFolder

log = logging.getLogger(__name__)
TRACKING, PROJECT = "tracking.json", "haed"
RETRY_SECONDS, CLOSE_SECONDS = 10.0, 30.0  # between two tries of a call; for what is left at the end
# MLflow's own tries would take minutes and log each; its address would go to the standard output, where results go.
_MLFLOW = {"HTTP_REQUEST_TIMEOUT": "10", "HTTP_REQUEST_MAX_RETRIES": "0", "SUPPRESS_PRINTING_URL_TO_STDOUT": "true"}
_LONGEST = 6000  # characters of a value in MLflow
_FIGURES = ("bits_per_char", "bits_per_byte", "bits_per_token", "bits_per_dim", "word_perplexity")


class TensorBoard:
    """TensorBoard's files of a run: the curves of a phase in its own folder, and the summary in that of the run.

    TensorBoard's own writer has a thread that ends with a traceback on a full disk. `step` is that from which the phase
    is resumed: later metrics in older files no longer count.
    """

    def __init__(self, run: RunFolder, phase: Phase | None = None, step: int = 0) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        self.run, self._log = run, None
        if phase is not None:
            folder = run.phase_folder(phase) / "tensorboard"
            make_folders(folder, within=run.path)
            self._log = AppendOnlyLog(folder / _name_event_file(folder))
            self._records = RecordWriter(self._log)
            _add_event(self._records, Event(file_version="brain.Event:2"))
            _add_event(self._records, Event(step=step + 1, session_log=SessionLog(status=SessionLog.START)))

    def write_record(self, record: Record) -> None:
        """Add the metrics of a step to the curves."""
        _add_event(self._records, _scalars(record, int(record["step"])))
        self._flush()

    def write_summary(self, summary: RunSummary) -> None:
        """Write options and final metrics for the HPARAMS dashboard, and samples as text, in place of earlier ones."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.record_writer import RecordWriter

        records = RecordWriter(content := io.BytesIO())
        _add_event(records, Event(file_version="brain.Event:2"))
        # No list of the options: TensorBoard would take that of one run for all. It collects them from the sessions.
        name = self.run.path.name.encode(errors="surrogateescape").decode(errors="replace")
        shown = [hparams_pb(summary.options, name)]
        shown += [text_pb(f"sample {number}", text) for number, text in enumerate(summary.samples, 1)]
        for each in shown:
            _add_event(records, Event(step=summary.step, summary=each))
        _add_event(records, _scalars(summary.metrics, summary.step))
        folder = self.run.path / "tensorboard"
        try:
            make_folders(folder, within=self.run.path)
            before = list(folder.glob("events.out.tfevents.*"))
            write_atomically(folder / _name_event_file(folder), content.getvalue())
            for file in before:
                file.unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s: options and results could not be written: %s", folder, error.strerror or error)

    def close(self, finished: bool) -> None:
        """Close the file; bytes that the disk does not take are dropped."""
        if self._log is not None:
            self._flush()
            self._log.close()

    def _flush(self) -> None:
        with suppress(OSError):  # of the same disk as metrics.jsonl, which warns; the next record tries again
            self._records.flush()


def _name_event_file(folder: Path) -> str:
    """Return a name that follows those in the folder, in whose order TensorBoard reads them, even if the clock went back."""
    numbers = [time.time()]
    for file in folder.glob("events.out.tfevents.*"):
        if match := re.match(r"\d+(\.\d{1,6})?(?=\.)", file.name.removeprefix("events.out.tfevents.")):
            numbers.append(float(match[0]) + 1e-5)
    return f"events.out.tfevents.{max(numbers):.6f}.{socket.gethostname()}.{os.getpid()}"


def _scalars(values: Mapping[str, float], step: int) -> Any:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    shown = {name: value for name, value in values.items() if name != "step" and isinstance(value, int | float)}
    summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in shown.items()])
    return Event(step=step, summary=summary)


def _add_event(records: Any, event: Any) -> None:
    event.wall_time = time.time()
    records.write(event.SerializeToString())


class MLflow:
    """A run of the MLflow server in MLFLOW_TRACKING_URI, in the experiment MLFLOW_EXPERIMENT_NAME or `haed`."""

    def __init__(self, run: RunFolder, phase: Phase | None) -> None:
        for name, value in _MLFLOW.items():
            os.environ.setdefault(f"MLFLOW_{name}", value)
        import mlflow

        self.run, self._phase, self._opened = run, phase, ""
        self._client, self.place = mlflow.MlflowClient(), f"MLflow at {mlflow.get_tracking_uri()}"

    def _open(self) -> str:
        """Return the identifier of MLflow's run, which is created or continued first."""
        from mlflow.exceptions import MlflowException

        if self._opened:
            return self._opened
        if known := _read_identifiers(self.run).get("mlflow"):
            try:
                if self._client.get_run(known).info.lifecycle_stage == "active":
                    self._client.update_run(known, status="RUNNING")
                    self._opened = known
                    return known
            except MlflowException as error:
                if error.get_http_status_code() != 404:
                    raise
            log.info("MLflow no longer has run %s. A new one is made", known)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self._client.create_experiment(name)
        self._opened = self._client.create_run(number, run_name=self.run.path.name).info.run_id
        _write_identifier(self.run, "mlflow", self._opened)
        return self._opened

    def write_record(self, record: Record) -> None:
        """Log the metrics of a step."""
        values = {f"{self._phase}/{name}": value for name, value in record.items() if name != "step"}
        self._log_metrics(values, int(record["step"]))

    def _log_metrics(self, values: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = round(1000 * time.time())
        shown = [Metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self._open(), metrics=shown)

    def write_summary(self, summary: RunSummary) -> None:
        """Log options, final metrics, the checkpoint and the report. An option that changed becomes a tag."""
        from mlflow.entities import Param, RunTag

        run = self._open()
        data = self._client.get_run(run).data
        options = {name: str(value)[:_LONGEST] for name, value in summary.options.items()}
        now = dict.fromkeys(data.params, "null") | options
        before = {name: data.tags.get(name, value) for name, value in data.params.items()}
        tags = {name: value for name, value in now.items() if before.get(name, value) != value}
        tags |= {"checkpoint": summary.checkpoint} if summary.checkpoint else {}
        tags |= {"evaluated_checkpoint": summary.evaluated} if summary.evaluated else {}
        params = [Param(name, value) for name, value in options.items() if name not in data.params]
        self._client.log_batch(run, params=params, tags=[RunTag(*each) for each in tags.items()])
        # MLflow shows the value of the largest step, and phase two may have fewer steps than phase one.
        earlier = [each.step for name in summary.metrics for each in self._client.get_metric_history(run, name)]
        self._log_metrics(summary.metrics, max(summary.step, *earlier, 0))
        if summary.report:
            self._client.log_artifact(run, str(summary.report))

    def close(self, finished: bool) -> None:
        """End MLflow's run; a later stage continues it."""
        self._client.set_terminated(self._open(), "FINISHED" if finished else "KILLED")


class WeightsAndBiases:
    """A run of W&B in the project WANDB_PROJECT or `haed`, kept in the run's folder if it cannot be sent."""

    def __init__(self, run: RunFolder, phase: Phase | None) -> None:
        import wandb

        self.run, self._phase, self._wandb, self.place = run, phase, wandb, "W&B"
        self._opened: Any = None

    def _open(self) -> Any:
        """Return W&B's run, which is created or continued first."""
        if self._opened is not None:
            return self._opened
        if not (known := _read_identifiers(self.run).get("wandb")):
            known = secrets.token_hex(4)
            _write_identifier(self.run, "wandb", known)
        # Silent, it asks for no credentials on a terminal.
        settings = self._wandb.Settings(silent=True, console="off", init_timeout=CLOSE_SECONDS / 2)
        self._wandb.setup(settings)
        begin = partial(
            self._wandb.init,
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            name=self.run.path.name,
            id=known,
            resume="allow",
            reinit="create_new",
            dir=str(self.run.path),
            settings=settings,
        )
        try:
            self._opened = begin()
        except self._wandb.Error as error:
            self._wandb.teardown()  # else the identifier is still in use
            self._opened = begin(mode="offline")
            folder = Path(self._opened.dir).parent
            reason = str(error).partition("\n")[0].rstrip(".")
            warn_once(f"W&B: {reason}. The run is recorded in {folder}. `wandb sync {folder}` sends it")
        if self._phase:
            self._opened.define_metric(f"{self._phase}/*", step_metric=f"{self._phase}/step")
        return self._opened

    def write_record(self, record: Record) -> None:
        """Log the metrics of a step."""
        self._open().log({f"{self._phase}/{name}": value for name, value in record.items()})

    def write_summary(self, summary: RunSummary) -> None:
        """Log options, final metrics, the checkpoint and the report."""
        run = self._open()
        run.config.update(summary.options, allow_val_change=True)
        run.summary.update(summary.metrics)
        if summary.evaluated:
            run.summary.update({"evaluated_checkpoint": summary.evaluated})
        if summary.checkpoint:  # a tag has at most 64 characters
            others = [tag for tag in run.tags or () if not tag.startswith("checkpoint:")]
            run.tags = (*others, f"checkpoint:{summary.checkpoint[:12]}")
        if summary.report:
            run.log_artifact(str(summary.report), name=f"report-{run.id}", type="report")

    def close(self, finished: bool) -> None:
        """End W&B's run; a later stage continues it."""
        self._open().finish(exit_code=0 if finished else 1)


_KINDS: dict[str, type[MLflow] | type[WeightsAndBiases]] = {"mlflow": MLflow, "wandb": WeightsAndBiases}


class BackgroundTracker:
    """A tracker whose calls are made in a thread, in order.

    A call that fails is tried again until the tracker is closed, once more then. One that the server refuses is dropped.
    """

    def __init__(self, tracker: MLflow | WeightsAndBiases) -> None:
        self._tracker, self._closing = tracker, threading.Event()
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # With the context of this thread, in which Prefect looks for the flow run of a log line.
        self._thread = threading.Thread(target=copy_context().run, args=(self._make_calls,), daemon=True)
        self._thread.start()

    def write_record(self, record: Record) -> None:
        """Send the metrics of a step."""
        self._calls.put(partial(self._tracker.write_record, dict(record)))

    def write_summary(self, summary: RunSummary) -> None:
        """Send options and results."""
        self._calls.put(partial(self._tracker.write_summary, summary))

    def close(self, finished: bool) -> None:
        """Wait, for a limited time, until everything is sent."""
        self._calls.put(partial(self._tracker.close, finished))
        self._calls.put(None)
        self._closing.set()
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            self._warn("takes too long to answer")

    def _make_calls(self) -> None:
        for call in iter(self._calls.get, None):
            while not self._try_call(call):
                if self._closing.is_set():
                    return
                self._closing.wait(RETRY_SECONDS)

    def _try_call(self, call: Callable[[], None]) -> bool:
        """Make a call, and return whether it is done with."""
        try:
            call()
        except Exception as error:  # whatever another package raises
            reason, status = " ".join(str(error).split())[:300], 0
            if find_status := getattr(error, "get_http_status_code", None):  # MLflow's own
                status = find_status()
            if 400 <= status < 500 and status != 429:
                self._warn(f"refuses a part of the run ({reason})")
                return True
            self._warn("does not answer" if status else f"cannot be used ({type(error).__name__}: {reason})")
            return False
        return True

    def _warn(self, problem: str) -> None:
        where, folder = self._tracker.place, self._tracker.run.path
        warn_once(f"{where} {problem}. The command goes on, and {folder} has everything. tracking=none leaves it out")


def _read_identifiers(run: RunFolder) -> dict[str, str]:
    try:
        identifiers = read_as(dict[str, str], run.path / TRACKING)
        return {kind: word for kind, word in identifiers.items() if re.fullmatch("[0-9a-z]{8,32}", word)}
    except (OSError, ValueError):
        return {}


def _write_identifier(run: RunFolder, kind: str, identifier: str) -> None:
    run.write_json(TRACKING, _read_identifiers(run) | {kind: identifier})


def summarise_run(options: Options, report: Path | None = None) -> RunSummary:
    """Return what trackers show of a run beside its curves, read from its folder as far as it is there.

    Final metrics and samples are those of the present checkpoint.
    """
    run = RunFolder.from_options(options)
    flat = {name: value for name, value in flatten_tree(asdict(options)) if value is not None}
    summary = RunSummary({name: str(value) if isinstance(value, list) else value for name, value in flat.items()})
    summary.report = report
    with suppress(OSError, ValueError):  # not trained yet, or damaged: whoever needs it says so
        checkpoint = run.select_checkpoint(options.evaluate.stage)
        summary.step, summary.checkpoint = checkpoint.step, checkpoint.digest
        for record in read_metrics(run.phase_folder(checkpoint.phase) / "metrics.jsonl"):
            if record["step"] <= checkpoint.step:
                summary.metrics |= {name: value for name, value in record.items() if name.startswith("validation/")}
    with suppress(OSError, ValueError):
        kept = read_as(list[KeptSample], run.path / "samples.json")
        present = [each for each in kept if each.checkpoint == summary.checkpoint]
        summary.samples = [code_fence(each.prompt + each.text) for each in present]
    with suppress(OSError, ValueError):
        evaluation = read_as(Evaluation, run.path / "evaluation.json")
        if evaluation.checkpoint == summary.checkpoint:
            figures = {name: getattr(evaluation, name) for name in _FIGURES}
            if evaluation.remembered is not None:
                figures[f"{evaluation.headline.unit.replace('/', '_per_')}_without_memory"] = evaluation.alone.value
            summary.metrics |= {
                f"{evaluation.split}/{name}": value for name, value in figures.items() if value is not None
            }
            summary.evaluated = evaluation.checkpoint
    return summary


@contextmanager
def open_trackers(
    options: Options, phase: Phase | None = None, step: int = 0, report: Path | None = None
) -> Iterator[list[TensorBoard | BackgroundTracker]]:
    """Open the trackers of a run. At the end they get its options, results and samples, and are closed.

    Args:
        options: the run's options, of which `tracking` names a tracker beside TensorBoard.
        phase: the phase whose metrics they will be given, or None. They get the options first.
        step: step from which the phase is resumed.
        report: the report, if it is new.
    """
    run = RunFolder.from_options(options)
    trackers: list[TensorBoard | BackgroundTracker] = [TensorBoard(run, phase, step)]
    # A training that goes on has the tracker's run open: a second writer would mix it up, and mark it as finished.
    if options.tracking != "none" and (phase or run.lock_holder() is None):
        try:
            trackers.append(BackgroundTracker(_KINDS[options.tracking](run, phase)))
        except Exception as error:  # whatever another package raises when it is imported
            missing = isinstance(error, ModuleNotFoundError)
            advice = f"Run pip install 'haed[{options.tracking}]'" if missing else "Use tracking=none"
            warn_once(f"tracking={options.tracking} is left out: {error}. {advice}")
    finished = False
    try:
        for tracker in trackers if phase else ():
            tracker.write_summary(summarise_run(options))
        yield trackers
        finished = True
    finally:
        summary = summarise_run(options, report)
        for tracker in trackers:
            tracker.write_summary(summary)
            tracker.close(finished)


def publish_results(options: Options, report: Path | None = None) -> None:
    """Give the trackers of a run its present results, and its report if there is a new one.

    While the run is trained, only TensorBoard gets them. The training gives them to the others at its end.
    """
    with open_trackers(options, report=report):
        pass
