"""What a command is, the arguments that several have, and how what was typed is taken apart."""

import argparse
import difflib
import logging
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from pipeline.config import ConfigError, given_in, listed, load
from pipeline.kinds import is_of, is_of_part, least_heads, shared_limits
from pipeline.options import Options
from pipeline.plainly import keys_like, unequal
from pipeline.run.folder import RunFolder
from pipeline.shown import printable
from pipeline.trees import leaves
from pipeline.verbatim import is_option

log = logging.getLogger(__name__)
GOES_ON = "stopped; the same command goes on from there"
_LITERAL = "\0"  # before words that stand after `--`; no argument of a process can have it


@dataclass
class Result:
    """What a command found: bytes and a text for people, a value for programs."""

    text: str
    value: Any
    raw: Iterable[bytes] = ()


@dataclass(frozen=True)
class Command:
    """A subcommand: its name, one line of help, its arguments, what it does, and what is said when a signal ended it."""

    name: str
    help: str
    arguments: Callable[[argparse.ArgumentParser], None]
    execute: Callable[[argparse.Namespace], Result]
    stopped: str = "stopped"


def settings(parser: argparse.ArgumentParser) -> None:
    """Arguments of a stage that reads a configuration."""
    parser.add_argument("--config", metavar="PRESET_OR_FILE", help=f"{listed()}; or a YAML file")
    parser.add_argument(
        "words", nargs="*", metavar="[RUN] key=value", help="a run to go on with, and options to change"
    )


def run_settings(parser: argparse.ArgumentParser) -> None:
    """Arguments of a stage that reads a trained run."""
    parser.add_argument("run", metavar="RUN", help="name under runs_dir, or folder")
    parser.add_argument("words", nargs="*", metavar="key=value", help="options to change")


def options_of(arguments: argparse.Namespace) -> Options:
    """The configuration that a stage's arguments ask for: a preset or file, or that of an existing run."""
    overrides, named = _sorted(arguments.words)
    if named and (len(named) > 1 or arguments.config):
        raise ConfigError(unequal(named[-1]))
    if named:
        return run_options(named[0], overrides)
    return asked_options(arguments.config, overrides)


def _sorted(words: list[str]) -> tuple[list[str], list[str]]:
    """Words that change options, and those that name runs: those of a sweep may have an equals sign too."""
    runs_dir = next((word[len("runs_dir=") :] for word in words if word.startswith("runs_dir=")), "runs")

    def is_run(word: str) -> bool:
        key, equals, _ = word.partition("=")
        if not equals or "/" in key:
            return True
        return not is_option(word) and any(os.path.isfile(f"{place}/{word}/config.yaml") for place in (".", runs_dir))

    named = list(filter(is_run, words))
    return [word for word in words if word not in named], named


def asked_options(config: str | None, overrides: list[str]) -> Options:
    """A configuration as `load` reads it; it is said what of it the model has no use for."""
    options = load(config, overrides)
    say_unused(config, overrides, options)
    return options


def say_unused(config: str | None, overrides: list[str], options: Options) -> None:
    """Logs which given options this kind of model, or of its parts, has no use for, and what it makes of others."""
    tree, kind = given_in(config), options.model.kind
    usual, now = (dict(leaves(asdict(each))) for each in (Options(), options))
    if lost := [key for key, _ in leaves(tree) if not is_of(key, kind)]:
        log.info("model.kind=%s has no use for these options of %s: %s", kind, config, ", ".join(lost))
    if shared := [f"{key}={limit:g}" for key, limit in shared_limits(tree, kind).items() if now[key] == limit]:
        log.info("model.kind=%s shares the limits of %s: %s", kind, config, ", ".join(shared))
    heads = "model.token.heads"
    if now[heads] == least_heads(options) > dict(leaves(tree)).get(heads, usual[heads]):
        log.info("model.kind=%s needs a head for each scale: %s=%d", kind, heads, now[heads])
    given = [
        *(key for key, value in leaves(tree) if usual.get(key) != value),
        *(each.split("=")[0] for each in overrides),
    ]
    for key in dict.fromkeys(key for key in given if is_of(key, kind) and not is_of_part(key, options)):
        part = key.rpartition(".")[0]
        log.warning("%s has no effect with %s.kind=%s", key, part, now[f"{part}.kind"])


def run_options(run: str, overrides: list[str], reader: str | None = None) -> Options:
    """The configuration of an existing run, with some options changed: those that `reader` takes, see `RunFolder.options`."""
    given = dict(item.split("=", 1) for item in overrides if "=" in item)
    return RunFolder.find(run, given.get("runs_dir", "runs")).options(overrides, reader)


class _Parser(argparse.ArgumentParser):
    """One that repeats what was typed without its control characters, and knows what may have been meant."""

    def error(self, message: str) -> NoReturn:
        """Of what is missing, without what may be; of what is unknown, with what is like it."""
        what, _, named = message.partition(": ")
        if what.endswith("are required"):
            optional = {action.metavar for action in self._actions if action.nargs == "*"}
            message = f"{what}: {', '.join(each for each in named.split(', ') if each not in optional)}"
        elif what == "unrecognized arguments":
            word = named.split()[0].split("=")[0]
            name = word.strip("-").replace("-", "_")
            close = difflib.get_close_matches(word, self._option_string_actions, 1, 0.7)
            keys = keys_like(name)
            exact = any(key.rpartition(".")[2] == name for key in keys)
            if wanted := close if close and not exact else [f"{key}=" for key in keys[:4]]:
                message += f"; did you mean {' or '.join(wanted)}?"
        super().error(message)

    def _print_message(self, message: str, file: Any = None) -> None:
        super()._print_message(printable(message), file)


def parse(argv: list[str] | None, program: str, commands: tuple[Command, ...]) -> argparse.Namespace:
    """What was typed: options may stand anywhere among the other words, and what follows `--` is none.

    Raises:
        SystemExit: it is none of the program's commands, or help was asked for.
    """
    parser = _Parser(
        prog=program,
        description="Hierarchical Attention Encoder-Decoders, trained in two phases, and the hierarchical models beside them.",
        epilog=f"Options are key=value; `{program} config` lists them. Presets: {listed()}.",
    )
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in commands:
        sub = subparsers.add_parser(command.name, help=command.help, description=command.help)
        command.arguments(sub)
        sub.add_argument("--json", action="store_true", help="end with one line of JSON")
        sub.add_argument("--debug", action="store_true", help="show tracebacks")
        sub.set_defaults(execute=command.execute, stopped=command.stopped)
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] not in subparsers.choices:
        return parser.parse_args(argv)
    sub, end = subparsers.choices[argv[0]], argv.index("--") if "--" in argv else len(argv)
    found = sub.parse_intermixed_args([*argv[1:end], *(_LITERAL + word for word in argv[end + 1 :])])
    if "run" in found:
        _sort(sub, found)
    for name, value in vars(found).items():
        if isinstance(value, list):
            setattr(found, name, [word.removeprefix(_LITERAL) if isinstance(word, str) else word for word in value])
    return found


def _sort(parser: argparse.ArgumentParser, found: argparse.Namespace) -> None:
    """RUN is the first of the words that changes no option; where there are queries, they are the others that do not."""
    words = [found.run, *(found.queries if "queries" in found else found.words)]
    changes = [word for word in words if word[:1] != _LITERAL]
    found.words = list(filter(is_option, changes)) if "queries" in found else _sorted(changes)[0]
    named = [word for word in words if word not in found.words]
    if not named:
        parser.error("the following arguments are required: RUN")
    found.run, rest = named[0].removeprefix(_LITERAL), named[1:]
    if "queries" in found:
        found.queries = rest
    else:
        found.words += rest
