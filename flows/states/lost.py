"""Messages for flow runs whose process was killed: the last checkpoint, and which later steps are lost.

Prefect kills a cancelled run 30 s after asking it to end, and reports success.
"""

from contextlib import suppress
from pathlib import Path
from typing import Any

from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound
from prefect.logging.loggers import flow_run_logger
from prefect.states import Cancelled

from flows.states.heartbeat import PROCESS, RUN, TRAINS, mark_stages_crashed
from pipeline.run.checkpoints import resolve_pointer
from pipeline.run.metrics import read_metrics
from pipeline.run.run_directory import PHASES, RunFolder

_KILLED = "Process exited with status code"  # of Prefect's runner, of a run that did not tell of its end itself


def report_lost_work(flow: Any, flow_run: Any, state: Any) -> None:
    """Report what is left of a killed run (a Prefect hook for cancelled and crashed runs).

    It runs in the serving process. A flow that ended in time has already reported what it saved.
    """
    with suppress(ObjectNotFound), get_client(sync_client=True) as client:
        now = client.read_flow_run(flow_run.id)
        if now.state is None or PROCESS not in now.labels:  # it had not begun
            return
        kept = describe_saved_progress(flow.name, now.labels)
        if now.state.is_cancelling():
            message = f"killed, as it had not ended 30 s after Cancel: {kept}"
            client.set_flow_run_state(now.id, Cancelled(message=message), force=True)
        elif now.state.is_crashed() and str(now.state.message).startswith(_KILLED):
            message = f"its process was killed: {kept}"
        else:
            return
        flow_run_logger(now, flow).error("%s", message)
        mark_stages_crashed(client, now.id)


def describe_saved_progress(flow: str, labels: dict[str, Any]) -> str:
    """Describe the last checkpoint of a killed training, from its run folder, and the lost steps."""
    if flow not in TRAINS:
        return "what was not finished is lost; Retry does it again"
    if RUN not in labels:
        return "what it did since its last checkpoint is lost; Retry goes on from there"
    run = RunFolder(Path(labels[RUN]))
    lines = {phase: run.phase_folder(phase) / "metrics.jsonl" for phase in PHASES}
    written = {phase: path.stat().st_mtime for phase, path in lines.items() if path.is_file()}
    if not written:
        return "no step was saved; Retry does what is left"
    phase = max(written, key=lambda each: written[each])
    latest = resolve_pointer(run.phase_folder(phase) / "checkpoints", "latest")
    saved = 0 if latest is None else int(latest.name.removeprefix("step-"))
    done = int(max((record.get("step", 0) for record in read_metrics(lines[phase])), default=0))
    lost = f"steps after it were lost, to {done:,} at least" if done > saved else "what came after it is lost"
    if not saved:
        return f"no step of {phase} was saved: {lost.replace('after it ', '')}; Retry begins it again"
    return f"the last step that was saved is {saved:,} of {phase}: {lost}; Retry goes on from there"
