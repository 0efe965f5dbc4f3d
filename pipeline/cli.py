"""The command line: `python -m pipeline COMMAND`, and, together with the flows, `haed COMMAND`.

Results go to standard output as text, or with `--json` as one line of JSON, which comes last. If a command with
`--json` fails, that line is an object with an `error`. Progress goes to standard error. The exit status is 2 for a
usage error, 1 for a failure, 130 after SIGINT and 143 after SIGTERM. This module imports almost nothing, so that
signals are handled from the start. The commands are in `pipeline.commands`.
"""

import os
import signal
import sys

from pipeline import ROOT
from pipeline.signals import Interrupt, end_at_once

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from pipeline.arguments import Command


def main(
    argv: list[str] | None = None, program: str = "pipeline", more: "Callable[[], tuple[Command, ...]]" = tuple
) -> int:
    """Run a command and return the exit status.

    Args:
        argv: words of the command line. None: those of this process.
        program: name of the program.
        more: returns the commands that this program has in addition to those of `pipeline`.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    words, typed = "stopped", sys.argv[1:] if argv is None else argv
    try:
        end_at_once()
        if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # a closed terminal; `nohup` ignores it
            signal.signal(signal.SIGHUP, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        from pipeline import commands, console
        from pipeline.arguments import parse_arguments

        console.prepare_streams()
        _prefer_own_modules()
        arguments = parse_arguments(argv, program, (*commands.COMMANDS, *more()))
        words = arguments.stopped
        return _execute_command(arguments, typed)
    except SystemExit as error:
        if error.code:
            _write_error(typed, getattr(error, "message", str(error)), "UsageError", 2)
        raise
    except KeyboardInterrupt as error:
        from pipeline.console import is_first_rank, print_stderr

        number = signal.SIGINT
        if isinstance(error, Interrupt):
            number, words = signal.Signals(error.number), error.words or words
        if words and (is_first_rank() or not words.startswith("saved step")):
            print_stderr(words)
        _write_error(typed, words or "stopped", number.name, 128 + number)
        return 128 + number
    finally:
        for number, previous in before.items():  # no message about a signal at the end of a process
            signal.signal(number, signal.SIG_DFL if argv is None else previous)
        from pipeline.console import end_streams

        end_streams()


def _prefer_own_modules() -> None:
    """Put our modules before those of the working folder, here and in processes started from here."""
    sys.path[:] = [ROOT, *(path for path in sys.path if path != ROOT)]
    known = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", ROOT)]
    os.environ |= {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join([ROOT, *known])}


def _as_json(value: object) -> str:
    """Return a value as one line of JSON without control characters."""
    import json

    return json.dumps(value).replace("\x7f", "\\u007f")


def _write_error(typed: list[str], message: str, kind: str, status: int) -> None:
    """Write the error of a command with `--json` as the last line of standard output."""
    words = typed[: typed.index("--")] if "--" in typed else typed
    flags = (word.partition("=")[0] for word in words)  # argparse accepts abbreviations
    if not any(flag[2:] and "--json".startswith(flag) for flag in flags):
        return
    from contextlib import suppress

    from pipeline.console import is_first_rank, print_stdout

    if not is_first_rank():
        return
    with suppress(OSError, ValueError):  # the error cannot be reported
        print_stdout(_as_json({"error": {"message": message, "type": kind, "exit": status}}))


def _execute_command(arguments: "argparse.Namespace", typed: list[str]) -> int:
    """Run a command, print its result, and return the exit status: also 1 if it logged an error."""
    import logging
    import traceback

    from pipeline import console
    from pipeline.config import ConfigError

    console.warn_once.cache_clear()
    console.prepare_logs()
    lines = console.StderrHandler()
    logging.getLogger().addHandler(lines)
    for room in ("pipeline", "data", "haed", "flows", "experiments"):
        logging.getLogger(room).setLevel(logging.INFO if console.is_first_rank() else logging.WARNING)
    try:
        _check_current_folder()
        result = arguments.execute(arguments)
        if console.is_first_rank():
            for block in result.raw:
                console.print_stdout(block)
            if text := _as_json(result.value) if arguments.json else result.text:
                console.print_stdout(text)
        return 1 if lines.failed else 0
    except console.StdoutClosedError:  # `haed … | head`
        return 1
    except Exception as error:
        status = 2 if isinstance(error, ConfigError) else 1
        message = console.format_error(error, arguments.command)
        if status == 1:
            message += _name_plugin(error)
        _write_error(typed, message, type(error).__name__, status)
        if arguments.debug:
            sys.excepthook = lambda *exception: console.print_stderr("".join(traceback.format_exception(*exception)))
            raise
        is_expected = isinstance(error, ValueError | OSError | FloatingPointError) or console.is_out_of_memory(error)
        origin = "" if is_expected else f" ({type(error).__name__}; --debug prints the traceback)"
        console.print_stderr(f"error: {message}{origin}")
        return status
    finally:
        logging.getLogger().removeHandler(lines)


def _check_current_folder() -> None:
    """Raise FileNotFoundError if the current folder was removed. In such a one, MKL ends the process without a reason."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise FileNotFoundError(
            "the current folder was removed, or replaced by one of the same name. Change to a folder that exists with cd"
        ) from None


def _name_plugin(error: BaseException) -> str:
    """Return a remark on the other package whose code raised an error, or whose class lacks what is called, if any."""
    import re
    import traceback
    from importlib.metadata import entry_points

    from pipeline.config.schema import describe_entry

    report = "".join(traceback.format_exception(error))
    ran = [frame.f_code.co_qualname.partition(".")[0] for frame, _ in traceback.walk_tb(error.__traceback__)]
    installed, plugin, unlike = entry_points(), "", ""
    for group in installed.groups:
        for entry in installed.select(group=group) if group.startswith("haed.") else ():
            file = getattr(sys.modules.get(entry.module), "__file__", None)
            if file and (lines := re.findall(rf'File "{re.escape(file)}", line (\d+)', report)):
                plugin = f" (in {describe_entry(entry)}, {file}, line {lines[-1]})"
                if entry.attr in ran:  # not another class of its module
                    return plugin
            elif file and isinstance(error, AttributeError | TypeError):
                if re.search(rf"\b{re.escape(entry.attr)}\b", str(error)):
                    unlike = f" (in {describe_entry(entry)}, {file})"
    return plugin or unlike
