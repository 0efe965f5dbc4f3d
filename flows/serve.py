"""`haed serve`: a Prefect server if none is running, every flow as a deployment, and TensorBoard, until Ctrl-C."""

import argparse
import fcntl
import logging
import os
import secrets
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from flows.environment import deployment_suffix
from flows.server import explain_refusal, is_server_healthy, lasting_server, run_child_process
from pipeline.web.host_check import LOOPBACK

log = logging.getLogger(__name__)
_PASSWORD = "password"  # file in PREFECT_HOME
_ANY = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}


def serve_flows(arguments: argparse.Namespace, port: int, has_own_server: bool) -> None:
    """Serve all flows in the foreground, as the arguments of `haed serve` say.

    Args:
        arguments: those of `haed serve`.
        port: port of the server and its UI, which is started if none answers there.
        has_own_server: false uses the server that PREFECT_API_URL names.

    Raises:
        PermissionError: the server that runs there asks for another password.
        RuntimeError: the server does not start, PREFECT_API_URL is not set, or flows had to be killed at the end.
        ConfigError: `--cron` is not a cron line.
        BlockingIOError: another `haed serve` uses the same Prefect home.
    """
    with ExitStack() as held:
        held.enter_context(_lock_prefect_home())
        address, secret = os.environ.get("PREFECT_API_URL", "").removesuffix("/api"), ""
        if has_own_server:
            address, secret = _prepare_own_server(arguments.host, port, arguments.password, arguments.allowed_host)
        elif not address:
            raise RuntimeError("--no-server needs a running server. Set PREFECT_API_URL to its address")
        from flows import deployments  # Prefect reads its settings when it is imported

        schedule = deployments.cron_schedule(arguments.cron) if arguments.cron else None
        board = held.enter_context(_run_tensorboard(arguments.tensorboard_port)) if arguments.tensorboard_port else None
        os.environ |= {"HAED_TENSORBOARD_URL": board} if board else {}  # also for the server's pages of runs
        if has_own_server:
            server = lasting_server(address, arguments.host, port, arguments.allowed_host)
            if held.enter_context(server):
                os.environ["HAED_PAGES"] = "1"  # of runs/; see pipeline.web.app.served_page_url
        from flows.dispatcher import run_flows
        from flows.flows import FLOWS
        from flows.lifecycle import crash_orphaned_runs

        name = deployment_suffix(Path.cwd(), "" if has_own_server else socket.gethostname())
        names = [f"{flow.name}-{name}" for flow in FLOWS]
        with explain_refusal(address):  # the first request to a server that was there before
            dead = crash_orphaned_runs(names, [flow.name for flow in FLOWS])
        if dead:
            print(f"marked as crashed: {', '.join(dead)}. Retry resumes from their checkpoints")
        ids = {each.flow_name: each.apply() for each in deployments.build_deployments(name)}
        if missed := deployments.skip_missed(names):
            print(f"cancelled: {missed} scheduled runs, because haed serve was not running at their time")
        if schedule:
            parameters = {"preset": arguments.config, "overrides": arguments.words}
            deployments.add_schedule(ids["haed"], schedule, parameters)
        deployments.keep_offering_runs(ids)
        _print_summary(address, name, secret, board, deployments.describe_schedules(names))
        run_flows(ids)


def _prepare_own_server(host: str, port: int, password: bool, allowed_hosts: Sequence[str]) -> tuple[str, str]:
    """Set the environment for a server started here, and return its address, and its password if it has one.

    Raises:
        RuntimeError: a server answers there already, which would not have what was asked for.
    """
    address = f"http://{_ANY.get(host, host if ':' not in host else f'[{host}]')}:{port}"
    if is_server_healthy(address):
        if password or host not in LOOPBACK or allowed_hosts:
            raise RuntimeError(
                f"a server answers at {address} already. --password, --host and --allowed-host do not change it. Stop it, or "
                "choose another port, such as --port 4201"
            )
        print(f"uses the server that runs at {address} already")
    os.environ["PREFECT_API_URL"] = f"{address}/api"
    os.environ.setdefault("PREFECT_UI_URL", f"{address}/v2")
    os.environ.setdefault("PREFECT_UI_API_URL", "/api")  # by whatever name the page was reached
    os.environ.setdefault("PREFECT_SERVER_CORS_ALLOWED_ORIGINS", address)
    if password or host not in LOOPBACK:
        os.environ.setdefault("PREFECT_SERVER_API_AUTH_STRING", _load_or_create_password())
    if secret := os.environ.get("PREFECT_SERVER_API_AUTH_STRING", ""):
        os.environ.setdefault("PREFECT_API_AUTH_STRING", secret)
    return address, secret


def _print_summary(address: str, name: str, secret: str, board: str | None, schedules: list[str]) -> None:
    print(f"Prefect UI:  {address}{'/enter' if secret else ''}")
    file = Path(os.environ["PREFECT_HOME"]) / _PASSWORD
    is_kept = file.is_file() and file.read_text().strip() == secret  # else the environment gives it
    if secret:  # what is printed may be kept in a log
        print(f"Password:    {f'in {file}' if is_kept else 'that of PREFECT_SERVER_API_AUTH_STRING'}")
    if "HAED_PAGES" in os.environ:
        print(f"Runs:        {address}/runs/")
    print(f"Prefect API: {address}/api\nTensorBoard: {board or 'not started'}")
    print(f"Deployments: haed/haed-{name}, and one of each stage")
    for line in schedules:
        print(f"Scheduled:   {line}")
    print("To schedule: haed serve --cron '0 2 * * *' 'name=nightly-{date}'", flush=True)


def _load_or_create_password() -> str:
    """Return the server's password. It is generated on first use, in a file that only this user can read."""
    path = Path(os.environ["PREFECT_HOME"]) / _PASSWORD
    if not path.is_file() or not path.read_bytes().strip():
        beside = path.with_name(f".{_PASSWORD}-{os.getpid()}")  # whole or not at all
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f"haed:{secrets.token_urlsafe(24)}")
        os.replace(beside, path)
    secret = path.read_text(errors="replace").strip()
    if not secret.isascii():
        raise RuntimeError(f"{path} holds a password that is not ASCII. Delete it, and a new one is made")
    return secret


@contextmanager
def _lock_prefect_home() -> Iterator[None]:
    """Lock the home: two servers on one SQLite database, or two runners of one deployment, would collide."""
    home = Path(os.environ["PREFECT_HOME"])
    with open(home / "serve.lock", "a+", opener=partial(os.open, mode=0o600)) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(f"another haed serve uses {home}. Stop it, or set another PREFECT_HOME") from None
        yield


@contextmanager
def _run_tensorboard(port: int) -> Iterator[str | None]:
    """Run TensorBoard on `runs/`, reachable from this machine only, and yield its address."""
    Path("runs").mkdir(exist_ok=True)
    with socket.socket() as tried:
        if tried.connect_ex(("127.0.0.1", port)) == 0:
            log.warning(
                "port %d is in use, so there is no TensorBoard. Choose another port with --tensorboard-port", port
            )
            yield None
            return
    with run_child_process("tensorboard", "board", "--port", str(port)):
        yield f"http://127.0.0.1:{port}"
