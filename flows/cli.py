"""The console script `haed`: the commands of `pipeline`, and those that need Prefect."""

import argparse
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

from flows.environment import prepare
from pipeline.cli import Command, Result, Stop, options_of, settings
from pipeline.cli import main as pipeline_main
from pipeline.config import ConfigError
from pipeline.runs import RunFolder


def _run(arguments: argparse.Namespace, stop: Stop) -> Result:
    if not arguments.config and not any("=" not in word for word in arguments.words):
        arguments.config = "quickstart"
    options = options_of(arguments)  # a wrong option or source is said before Prefect starts
    from pipeline.sharding import check_source

    check_source(options)
    prepare()
    from prefect.settings import PREFECT_API_URL, PREFECT_FLOWS_HEARTBEAT_FREQUENCY, PREFECT_UI_URL, temporary_settings

    from flows.server import start_temporary_server

    answering = None if PREFECT_API_URL.value() else start_temporary_server()
    from prefect.exceptions import TerminationSignal

    from flows.flows import everything  # loads for seconds, in which the server starts
    from pipeline import evaluate, index, report, sampling, training  # noqa: F401

    if not arguments.debug:
        _drop_tracebacks()
    overrides = [word for word in arguments.words if "=" in word]
    named = [word for word in arguments.words if "=" not in word]
    preset = arguments.config
    if named:
        preset = str(RunFolder.find(named[0], options.runs_dir).path / "config.yaml")
    known: dict[Any, Any] = {PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}  # its thread adds a second to every flow
    if answering is not None:
        known |= {PREFECT_API_URL: answering(), PREFECT_UI_URL: ""}
    with temporary_settings(known):
        try:
            found = everything(preset, overrides=overrides)
        except TerminationSignal:
            print("stopped and saved; the same command goes on from there", file=sys.stderr)
            raise SystemExit(143) from None
    figure, unit = report.headline(found["evaluation"])
    lines = [
        f"{figure:.4f} {unit} on the {found['evaluation']['split']} split",
        f"report: {found['report']}",
        f"try: haed neighbours {found['run']}",
    ]
    return Result("\n".join(lines), found)


def _drop_tracebacks() -> None:
    """Keeps Prefect's tracebacks off the terminal, where the error is said in a line; the UI shows them all the same."""
    for handler in logging.getLogger().handlers:
        handler.addFilter(lambda record: not (record.exc_info and record.name.startswith("prefect")))


def _serve_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=4200, help="port of the Prefect UI")
    parser.add_argument("--no-server", action="store_true", help="use the server that PREFECT_API_URL names")
    parser.add_argument("--tensorboard-port", type=int, default=6006, help="0: no TensorBoard")
    parser.add_argument("--chain", action="store_true", help="a finished shard starts pretrain, and that finetune")


def _serve(arguments: argparse.Namespace, stop: Stop) -> Result:
    prepare()
    from flows.serve import serve

    for number in (signal.SIGINT, signal.SIGTERM):  # serving has no step to finish: the runner lets its trainings save
        signal.signal(number, signal.default_int_handler)
    server = not arguments.no_server
    serve(arguments.host, arguments.port, server, arguments.tensorboard_port, arguments.chain)
    return Result("", None)


def _deploy_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pool", required=True, help="work pool whose workers run the flows")
    parser.add_argument(
        "--folder", type=Path, default=Path(), help="where they run, with runs/ and shards/ (default: here)"
    )


def _deploy(arguments: argparse.Namespace, stop: Stop) -> Result:
    prepare()
    if "PREFECT_API_URL" not in os.environ:
        raise ConfigError("haed deploy registers flows with a server: set PREFECT_API_URL to its address")
    from flows.deployments import deploy

    made = deploy(arguments.pool, arguments.folder)
    return Result("\n".join(made), made)


COMMANDS = (
    Command("run", "all stages in order, as one Prefect flow", settings, _run),
    Command("serve", "every flow as a deployment in the Prefect UI", _serve_arguments, _serve),
    Command("deploy", "register every flow for a work pool", _deploy_arguments, _deploy),
)


def main(argv: list[str] | None = None) -> int:
    """Runs a command and returns the exit status."""
    return pipeline_main(argv, "haed", COMMANDS)


if __name__ == "__main__":
    sys.exit(main())
