"""The commands that need Prefect: run, serve, deploy."""

import argparse
import json
import logging
import os
import shlex
import shutil
import signal
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from flows.environment import prepare
from haed.options import SYSTEMS
from pipeline.arguments import (
    GOES_ON,
    Command,
    CommandResult,
    add_config_arguments,
    options_from_arguments,
    parse_path,
    parse_port,
    split_words,
)
from pipeline.config import (
    ConfigError,
    Options,
    check_training,
    check_windows,
    load_options,
    phases_to_train,
    write_override,
)
from pipeline.run.run_directory import RunFolder
from pipeline.signals import Interrupt


def _run_pipeline_flow(arguments: argparse.Namespace) -> CommandResult:
    if not arguments.config and not split_words(arguments.words)[1]:
        arguments.config = "quickstart"
    options = options_from_arguments(arguments)  # a wrong option or source is said before Prefect starts
    from pipeline.run.sharding import check_corpus, check_source

    check_source(options)
    check_corpus(options)
    for phase in phases_to_train(options):
        check_training(phase, options)
        check_windows(getattr(options, phase), options, options.launcher.processes)
    prepare()
    from prefect.settings import PREFECT_API_URL, PREFECT_FLOWS_HEARTBEAT_FREQUENCY, PREFECT_UI_URL, temporary_settings

    from flows.server import start_temporary_server

    answering = None if PREFECT_API_URL.value() else start_temporary_server()
    if answering is None:
        _check_server(", or unset it to use a temporary one")
    from prefect.exceptions import Abort, Pause, TerminationSignal

    from flows.flows import FLOWS, run_pipeline  # loads for seconds, in which the server starts
    from flows.lifecycle import crash_orphaned_runs
    from pipeline import inference  # noqa: F401
    from pipeline.evaluation import evaluate  # noqa: F401
    from pipeline.reporting import report  # noqa: F401
    from pipeline.run.index import build  # noqa: F401
    from pipeline.training import stages  # noqa: F401

    if not arguments.debug:
        _drop_tracebacks()
    preset, overrides = _find_preset_and_overrides(arguments, options)
    known: dict[Any, Any] = {PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}  # its thread adds a second to every flow
    if answering is not None:
        known |= {PREFECT_API_URL: answering(), PREFECT_UI_URL: ""}
    with temporary_settings(known):
        with suppress(Exception):  # the server's troubles are not the flow's
            crash_orphaned_runs([], [flow.name for flow in FLOWS])
        try:
            result = run_pipeline(preset, overrides=overrides)
        except (TerminationSignal, Pause, Abort, Interrupt) as error:
            # At the end of a flow Prefect sends the signal on, to our handler from before it.
            if isinstance(error, Interrupt) and not isinstance(error.__context__, TerminationSignal):
                raise
            raise Interrupt(signal.SIGTERM, "stopped and saved. Run the same command to resume") from None
    metric = result.evaluation.headline
    lines = [
        f"{metric.value:.4f} {metric.unit} on the {result.evaluation.split} split",
        f"report: {result.report}",
        *_suggest_commands(options, result.run),
    ]
    return CommandResult("\n".join(lines), asdict(result))


def _suggest_commands(options: Options, run: str) -> list[str]:
    """Return three commands to try on a finished run, each with a short description."""
    of_chunks, pictures = SYSTEMS[options.model.kind].chunks, options.chunker.kind == "pixels"
    another = "valid" if options.evaluate.split == "test" else "test"
    prompt = '"import "' if options.source.kind == "stdlib" else '"The "'
    tried = [("sample", "", "complete the lower halves of pictures" if pictures else "continue a prompt")]
    if of_chunks and not pictures and options.source.kind != "audio":
        tried.append(("next", prompt, "list the likeliest next chunks"))
    if of_chunks and options.index.space == "contexts":
        tried.append(("neighbours", f"--context {prompt}", "find places with similar contexts"))
    elif of_chunks:
        tried.append(("neighbours", '"#4080c0"' if pictures else "", "find chunks with similar embeddings"))
    tried.append(("evaluate", f"evaluate.split={another}", "compute the likelihood of another split"))
    tried.append(("profile", "", "measure the time of a training step"))
    installed = os.path.relpath(Path(sys.executable).with_name("haed"))  # its environment may not be active
    program = "haed" if shutil.which("haed") else shlex.quote(installed)
    commands = [
        " ".join([program, command, shlex.quote(run), *filter(None, [words])]) for command, words, _ in tried[:3]
    ]
    width = max(map(len, commands))
    return [f"{command:{width}}  # {why}" for command, (_, _, why) in zip(commands, tried, strict=False)]


def _find_preset_and_overrides(arguments: argparse.Namespace, options: Options) -> tuple[str, list[str]]:
    """Return the preset and overrides that give `options`.

    A resumed run is given by its folder, whatever its config.yaml says.
    """
    overrides, named = split_words(arguments.words)
    if not named:
        return arguments.config, overrides
    here = [write_override("name", options.name), write_override("runs_dir", options.runs_dir)]
    return str(RunFolder.from_options(options).path / "config.yaml"), [*overrides, *here]


def _check_server(instead: str = "") -> None:
    """Raise an error if the server that the environment or a profile names does not answer, or not to us.

    `instead` is what else may be done than to start it or to name another.

    Raises:
        ConnectionError: nothing answers, or something else than the API of a server.
        PermissionError: it asks for another password.
    """
    from prefect.client.orchestration import get_client
    from prefect.exceptions import PrefectHTTPStatusError

    from flows.server import explain_refusal

    with get_client(sync_client=True) as client:
        if trouble := client.api_healthcheck():  # which needs no password
            raise ConnectionError(
                f"no Prefect server answers at {client.api_url} ({trouble}). Start it, or set PREFECT_API_URL to another server{instead}"
            )
        try:
            with explain_refusal(str(client.api_url)):
                client.read_flows(limit=1)
        except (ValueError, PrefectHTTPStatusError) as error:
            raise ConnectionError(
                f"{client.api_url} answers, but not as the API of a Prefect server, whose address ends in /api ({type(error).__name__})"
            ) from error


def _drop_tracebacks() -> None:
    """Keep Prefect's tracebacks off the terminal, where the error is one line. The UI still shows them."""
    for handler in logging.getLogger().handlers:
        handler.addFilter(lambda record: not (record.exc_info and record.name.startswith("prefect")))


def _serve_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="Address to listen on. Default: %(default)s.")
    parser.add_argument(
        "--port",
        type=parse_port,
        help="Port of the Prefect UI. Default: that of PREFECT_API_URL if it is on this machine, else 4200.",
    )
    parser.add_argument(
        "--no-server",
        action="store_true",
        help="Use the server that PREFECT_API_URL names. A server on another machine is used anyway, unless --port is given.",
    )
    parser.add_argument(
        "--tensorboard-port",
        type=parse_port,
        default=6006,
        help="Port of TensorBoard. 0: no TensorBoard. Default: %(default)s.",
    )
    parser.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="Further name of the server, such as that of a proxy. Repeatable.",
    )
    parser.add_argument(
        "--password",
        action="store_true",
        help="Protect the server by a password. It always has one with another --host.",
    )
    parser.add_argument(
        "--trainings",
        type=int,
        default=1,
        help="Concurrent trainings on each device. Others wait. 0: as many as half of the memory holds, at 512 MB each. "
        "Default: %(default)s.",
    )
    parser.add_argument(
        "--cron", default="", metavar="LINE", help="Also run all stages at these times, such as '0 2 * * *'."
    )
    parser.add_argument(
        "--config", metavar="PRESET_OR_FILE", help="Preset or YAML file of the runs of --cron. Default: quickstart."
    )
    parser.add_argument("words", nargs="*", metavar="key=value", help="Options of the runs of --cron.")


def _serve_deployments(arguments: argparse.Namespace) -> CommandResult:
    if run := next((word for word in arguments.words if "=" not in word), None):
        if run.isdecimal():
            raise ConfigError(f"{run}: the port is an argument. Use --port {run}")
        raise ConfigError(f"{run}: haed serve shows all runs. Use `haed explore {run}` for one run")
    if not arguments.cron and (arguments.config or arguments.words):
        name, _, value = (arguments.words or [""])[0].partition("=")
        hint = f"; did you mean --{name} {value}?" if name in ("host", "port", "trainings", "cron") else ""
        raise ConfigError(f"--config and key=value apply to the runs of --cron, so they need --cron{hint}")
    arguments.config = arguments.config or "quickstart"
    load_options(arguments.config, arguments.words, log_changes=True)
    if arguments.trainings < 0:
        raise ConfigError(f"--trainings {arguments.trainings}: must not be negative")
    prepare()
    os.environ["HAED_TRAININGS"] = str(arguments.trainings)
    from flows.serve import serve_flows

    for number in (signal.SIGINT, signal.SIGTERM):  # serving has no step to finish: the runner lets its trainings save
        signal.signal(number, signal.default_int_handler)
    known = urlsplit(os.environ.get("PREFECT_API_URL", ""))  # of the environment or a profile
    near = known.hostname in (None, "127.0.0.1", "localhost", "::1")
    server = not arguments.no_server and (near or arguments.port is not None)
    if arguments.port == 0:
        raise ConfigError("--port 0: links to the server need a port that is known. Use one such as --port 4201")
    port = arguments.port or (known.port if near else None) or 4200
    if not server and os.environ.get("PREFECT_API_URL"):
        _check_server()
    serve_flows(arguments, port, server)
    return CommandResult("", None)


def _deploy_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pool", required=True, help="Work pool whose workers run the flows.")
    parser.add_argument(
        "--folder",
        type=parse_path,
        default=Path(),
        help="Folder in which the flows run, with runs/ and shards/. Default: this one.",
    )
    parser.add_argument("--image", default="", help="Image in which the flows run, if the pool starts containers.")
    parser.add_argument(
        "--job-variable",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="Job variable of the pool, such as env.OMP_NUM_THREADS=2. Repeatable.",
    )
    parser.add_argument(
        "--limit", type=int, metavar="N", help="Concurrent runs of the pool, at least 1. Default: unchanged."
    )


def _parse_job_variables(words: list[str]) -> dict[str, Any]:
    """Return job variables, with dots for nested ones.

    Values are parsed as JSON if possible, except environment variables (`env.NAME`).
    """
    variables: dict[str, Any] = {}
    for word in words:
        key, sign, text = word.partition("=")
        if not sign or not all(key.split(".")):
            raise ConfigError(f"--job-variable {word!r} is not of the form key=value")
        value: Any = text
        if not key.startswith("env."):
            with suppress(ValueError):
                value = json.loads(text)
        *above, last = key.split(".")
        inner = variables
        for part in above:
            inner = inner.setdefault(part, {})
            if not isinstance(inner, dict):
                break
        if not isinstance(inner, dict) or isinstance(inner.get(last), dict):
            raise ConfigError(f"--job-variable {word!r}: another one gives a part of it, or all. Give one of the two")
        if key == "env.HAED_TRAININGS" and not text.isdecimal():
            raise ConfigError(f"--job-variable {word!r}: this is a number of trainings, such as env.HAED_TRAININGS=1")
        inner[last] = value
    return variables


def _register_deployments(arguments: argparse.Namespace) -> CommandResult:
    variables = _parse_job_variables(arguments.job_variable)
    if arguments.limit is not None and arguments.limit < 1:
        raise ConfigError(f"--limit {arguments.limit}: must be at least 1")
    if not arguments.pool.strip():
        raise ConfigError("--pool is empty. Name a work pool, such as --pool my-pool")
    prepare()
    if not os.environ.get("PREFECT_API_URL"):
        raise ConfigError("haed deploy needs a Prefect server. Set PREFECT_API_URL to its address, or use a profile")
    _check_server()
    from flows.deployments import deploy_to_pool

    names = deploy_to_pool(arguments.pool, arguments.folder, arguments.image, variables, arguments.limit)
    return CommandResult("\n".join(names), names)


COMMANDS = (
    Command(
        "run",
        "Run all stages in order, as one Prefect flow.",
        "haed run --config quickstart name=my-run",
        add_config_arguments,
        _run_pipeline_flow,
        GOES_ON,
    ),
    Command(
        "serve",
        "Serve every flow as a deployment in the Prefect UI.",
        "haed serve --port 4300",
        _serve_arguments,
        _serve_deployments,
        "",
    ),
    Command(
        "deploy",
        "Register every flow for a work pool.",
        "haed deploy --pool my-pool --limit 2",
        _deploy_arguments,
        _register_deployments,
    ),
)
