"""The command line: `python -m pipeline STAGE`, and, with the flows beside it, `haed STAGE`.

Results go to standard output, for people or, with --json, for programs, as the last line; where there is no result that is
an object with an `error`. Progress goes to standard error. Exit status: 2 for a usage error, 1 for a failure, 130 and 143
after SIGINT and SIGTERM. This module imports next to nothing, so that a signal is met from the start; `pipeline.commands`
has the commands.
"""

import os
import signal
import sys

from pipeline import ROOT
from pipeline.stopping import Interrupt, end_at_once

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from pipeline.arguments import Command


def main(
    argv: list[str] | None = None, program: str = "pipeline", more: "Callable[[], tuple[Command, ...]]" = tuple
) -> int:
    """Runs a command and returns the exit status.

    Args:
        argv: its words; None: those of this process.
        program: its name.
        more: gives the commands that this program has beside those of `pipeline`.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    words, typed = "stopped", sys.argv[1:] if argv is None else argv
    try:
        end_at_once()
        from pipeline import commands, shown
        from pipeline.arguments import parse

        shown.prepare_streams()
        _prefer_own_modules()
        arguments = parse(argv, program, (*commands.COMMANDS, *more()))
        words = arguments.stopped
        return _execute(arguments, typed)
    except SystemExit as error:
        if error.code:
            _write_error(typed, getattr(error, "message", str(error)), "UsageError", 2)
        raise
    except KeyboardInterrupt as error:
        from pipeline.shown import say

        number = signal.SIGINT
        if isinstance(error, Interrupt):
            number, words = signal.Signals(error.number), error.words or words
        if words:
            say(words)
        _write_error(typed, words or "stopped", number.name, 128 + number)
        return 128 + number
    finally:
        for number, previous in before.items():  # at the end of a process nobody wants to hear of a signal
            signal.signal(number, signal.SIG_DFL if argv is None else previous)
        from pipeline.shown import end_streams

        end_streams()


def _prefer_own_modules() -> None:
    """Has no module of the working folder taken for one of ours, here or by processes that are started from here."""
    sys.path[:] = [ROOT, *(path for path in sys.path if path != ROOT)]
    known = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", ROOT)]
    os.environ |= {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join([ROOT, *known])}


def _as_json(value: object) -> str:
    """Write a result in one line, without signs that would steer a terminal."""
    import json

    return json.dumps(value).replace("\x7f", "\\u007f")


def _write_error(typed: list[str], message: str, kind: str, status: int) -> None:
    """Write why a command with --json has no result, as the last line of standard output."""
    words = typed[: typed.index("--")] if "--" in typed else typed
    if not any(word.startswith("--js") for word in words) or not _speaks():  # it may be abbreviated
        return
    from contextlib import suppress

    from pipeline.shown import write

    with suppress(OSError, ValueError):  # nobody is there to be told
        error = {"message": message, "type": kind, "exit": status}
        write(_as_json({"error": error}))


_TRAINING = "Lower batch.sequences or batch.context, raise batch.pieces, or take a smaller model"
_LESS_MEMORY = dict.fromkeys(("run", "pretrain", "finetune", "train", "profile"), _TRAINING) | {
    "shard": "Lower shard.workers or shard.megabytes",
    "evaluate": "Lower evaluate.sequences",
    "sample": "Lower --samples or sample.chunks",
    "index": "Lower index.max_chunks or index.max_contexts",
    "neighbours": "Ask fewer queries at a time",
    "analyse": "Lower analyse.max_chunks or analyse.corpus_chunks",
}


def _execute(arguments: "argparse.Namespace", typed: list[str]) -> int:
    """Runs a command, shows what it found, and returns the status: also 1 if something that it logs is an error."""
    import logging
    import traceback

    from pipeline import shown
    from pipeline.config import ConfigError
    from pipeline.run.checkpoints import forget_what_was_said

    forget_what_was_said()
    shown.prepare_logs()
    lines = shown.Lines()
    logging.getLogger().addHandler(lines)
    for room in ("pipeline", "data", "haed", "flows"):
        logging.getLogger(room).setLevel(logging.INFO if _speaks() else logging.WARNING)
    try:
        result = arguments.execute(arguments)
        if _speaks():
            for block in result.raw:
                shown.write(block)
            if text := _as_json(result.value) if arguments.json else result.text:
                shown.write(text)
        return 1 if lines.failed else 0
    except shown.NobodyReads:  # `haed … | head`
        return 1
    except Exception as error:
        status = 2 if isinstance(error, ConfigError) else 1
        message = shown.reason(error)
        if is_memory := shown.is_out_of_memory(error):
            message += f". {_LESS_MEMORY.get(arguments.command, 'Less may fit')}"
        _write_error(typed, message, type(error).__name__, status)
        if arguments.debug:
            sys.excepthook = lambda *what: shown.say("".join(traceback.format_exception(*what)))
            raise
        is_expected = isinstance(error, ValueError | OSError | FloatingPointError) or is_memory
        shown.say(f"error: {message}{'' if is_expected else f' ({type(error).__name__}; --debug shows where)'}")
        return status
    finally:
        logging.getLogger().removeHandler(lines)


def _speaks() -> bool:
    """Whether this process is to be heard: of torchrun's the first one alone is. Others may have left a RANK behind."""
    return "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get("RANK", "0") == "0"
