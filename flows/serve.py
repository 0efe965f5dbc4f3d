"""`haed serve`: a Prefect server, if none answers, every flow as a deployment in it, and TensorBoard, until Ctrl-C."""

import fcntl
import logging
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from flows.deployments import deployments
from flows.server import child, lasting_server

log = logging.getLogger(__name__)
LOCAL = "local"


def serve(
    host: str = "127.0.0.1",
    port: int = 4200,
    server: bool = True,
    board_port: int = 6006,
    chain: bool = False,
) -> None:
    """Serves all flows in the foreground, from a server on `host`:`port` that is started if none answers there.

    Args:
        host: address to listen on.
        port: of the server and its UI.
        server: false uses the server that PREFECT_API_URL names.
        board_port: of TensorBoard; 0 starts none.
        chain: a finished shard starts a pretrain of the same settings, and that a finetune.

    Raises:
        RuntimeError: the server does not start, or PREFECT_API_URL is not set.
        BlockingIOError: another `haed serve` serves from the same Prefect home.
    """
    with ExitStack() as held:
        held.enter_context(_alone())
        deployment = LOCAL
        if server:
            address = f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"
            os.environ["PREFECT_API_URL"] = f"{address}/api"
            os.environ.setdefault("PREFECT_UI_URL", f"{address}/v2")
            held.enter_context(lasting_server(address, host, port))
        else:
            if not os.environ.get("PREFECT_API_URL"):
                raise RuntimeError("--no-server needs the address of a server: set PREFECT_API_URL")
            address = os.environ["PREFECT_API_URL"].removesuffix("/api")
            deployment = socket.gethostname()  # others may serve the same flows from there
        board = held.enter_context(_tensorboard(board_port)) if board_port else None
        os.environ |= {"HAED_TENSORBOARD_URL": board} if board else {}
        _mark_stale(deployment)
        print(f"Prefect UI:  {address}\nPrefect API: {address}/api\nTensorBoard: {board or 'not started'}", flush=True)
        _serve_flows(deployment, chain)


def _serve_flows(deployment: str, chain: bool) -> None:
    from prefect import serve as prefect_serve

    try:
        prefect_serve(*deployments(deployment, chain), print_starting_message=False)
    except SystemExit:  # of Prefect's handler of SIGTERM
        pass


@contextmanager
def _alone() -> Iterator[None]:
    """Holds the Prefect home; two servers on one SQLite database, or two runners of one deployment, would collide."""
    home = Path(os.environ["PREFECT_HOME"])
    home.mkdir(parents=True, exist_ok=True)
    with open(home / "serve.lock", "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(f"another haed serve holds {home}: stop it, or set another PREFECT_HOME") from None
        yield


def _mark_stale(deployment: str) -> None:
    """Marks runs that were left by an earlier `haed serve` as Crashed, so that Retry is there.

    No run of these deployments can be alive: flows end with the process that serves them, and this one holds the lock.
    """
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterName, FlowRunFilter
    from prefect.client.schemas.objects import StateType
    from prefect.states import Crashed

    alive = [StateType.RUNNING, StateType.PENDING, StateType.CANCELLING]
    with get_client(sync_client=True) as client:
        found = client.read_flow_runs(
            deployment_filter=DeploymentFilter(name=DeploymentFilterName(any_=[deployment])),
            flow_run_filter=FlowRunFilter.model_validate({"state": {"type": {"any_": alive}}}),
            limit=200,
        )
        for run in found:
            client.set_flow_run_state(run.id, Crashed(message="haed serve ended while it ran"), force=True)
            children = client.read_flow_runs(
                flow_run_filter=FlowRunFilter.model_validate(
                    {"state": {"type": {"any_": alive}}, "parent_flow_run_id": {"any_": [run.id]}}
                )
            )
            for child in children:
                client.set_flow_run_state(child.id, Crashed(message="its parent crashed"), force=True)
    if found:
        print(f"marked as crashed: {', '.join(run.name for run in found)}; Retry goes on from their checkpoints")


@contextmanager
def _tensorboard(port: int) -> Iterator[str | None]:
    """TensorBoard on `runs/`, on this machine alone; its address."""
    Path("runs").mkdir(exist_ok=True)
    with socket.socket() as tried:
        if tried.connect_ex(("127.0.0.1", port)) == 0:
            log.warning("port %d is taken: no TensorBoard; choose another with --tensorboard-port", port)
            yield None
            return
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", "runs", "--host", "127.0.0.1", "--port", str(port)]
    with child(command):
        yield f"http://127.0.0.1:{port}"
