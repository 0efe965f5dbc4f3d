"""What a command is, the arguments that several have, and how what was typed is taken apart."""

import argparse
import difflib
import logging
import os
import sys
from collections.abc import Callable, Container, Iterable
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import Any, NoReturn

from pipeline.config import ConfigError, given_in, listed, load, put_in
from pipeline.kinds import is_of, is_of_part, least_heads, shared_limits
from pipeline.options import Options
from pipeline.plainly import instead_of, is_known, unequal, unknown_command
from pipeline.run.folder import RunFolder, list_runs
from pipeline.shown import printable
from pipeline.trees import get, leaves
from pipeline.verbatim import is_option, type_of

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
    if named and arguments.config:
        raise ConfigError(_of_two(named[0], arguments.config))
    if len(named) > 1:
        raise ConfigError(unequal(named[-1]))
    if named:
        return run_options(named[0], overrides)
    return asked_options(arguments.config, overrides)


def _of_two(word: str, config: str) -> str:
    """What is wrong with a word that changes no option beside a configuration."""
    if "=" not in word and is_run(word):
        return f"{word} is a run, which has its own options: leave --config {config} out"
    return unequal(word)


def is_run(name: str, runs_dir: str = "runs") -> bool:
    """Whether there is a run of that name, or in a folder of that path."""
    return any(os.path.isfile(os.path.join(place, name, "config.yaml")) for place in (".", runs_dir))


def runs_there(runs_dir: str = "runs") -> str:
    """The runs in a folder, for people: the newest first."""
    names = list_runs(runs_dir)
    if not names:
        return f"there are no runs in {runs_dir}/ yet: `haed run --config quickstart` makes one"
    return f"runs there: {', '.join(names[:10])}{', …' if len(names) > 10 else ''}"


def _sorted(words: list[str]) -> tuple[list[str], list[str]]:
    """Words that change options, and those that name runs: those of a sweep may have an equals sign too."""
    runs_dir = next((word[len("runs_dir=") :] for word in words if word.startswith("runs_dir=")), "runs")

    def names_run(word: str) -> bool:
        key, equals, _ = word.partition("=")
        if not equals or "/" in key:
            return True
        return not is_option(word) and is_run(word, runs_dir)

    named = list(filter(names_run, words))
    return [word for word in words if word not in named], named


def asked_options(config: str | None, overrides: list[str]) -> Options:
    """A configuration as `load` reads it; it is said what of it the model has no use for."""
    options = load(config, overrides)
    say_unused(config, overrides, options)
    return options


def say_unused(config: str | None, overrides: list[str], options: Options) -> None:
    """Logs which given options this kind of model, or of its parts, has no use for, and what it makes of others."""
    say_put_in(config, overrides, options)
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
    runs_dir = load(None, [word for word in overrides if word.startswith("runs_dir=")]).runs_dir
    options = RunFolder.find(run, runs_dir).options(overrides, reader)
    say_put_in(None, overrides, options)
    return options


def say_put_in(config: str | None, overrides: list[str], options: Options) -> None:
    """Logs what became of the texts into which values of other options were put."""
    for key, text in put_in(config, overrides).items():
        log.info("%s=%s is %s=%s", key, text, key, get(options, key))


_FLAGS = {  # arguments, and what other programs call them
    "--samples": "n num num_samples n_samples num_return_sequences count",
    "--count": "n k top_k topk top num top_n limit",
    "--port": "p",
    "--text": "t f file input data",
}


def port(typed: str) -> int:
    """The number of a port, as the type of an argument.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    if not (typed.isdecimal() and int(typed) < 1 << 16):
        raise argparse.ArgumentTypeError(f"{typed[:40]} is no port: expected a number up to 65535, such as 4300")
    return int(typed)


class UsageError(SystemExit):
    """What was typed is no command; it has been said."""

    def __init__(self, message: str) -> None:
        super().__init__(2)
        self.message = message


class _Parser(argparse.ArgumentParser):
    """One that repeats what was typed without its control characters, and knows what may have been meant."""

    typed: tuple[str, ...] = ()

    def error(self, message: str) -> NoReturn:
        """Of what is missing, without what may be; of what is unknown, with what is like it.

        Raises:
            UsageError: always.
        """
        what, _, named = message.partition(": ")
        if what.endswith("are required"):
            optional = {action.metavar for action in self._actions if action.nargs == "*"}
            message = f"{what}: {', '.join(each for each in named.split(', ') if each not in optional)}"
            message += f"; {runs_there()}" if message.endswith(" RUN") else ""
        elif what == "unrecognized arguments" and (hint := self._instead_of(named)):
            message += f"; {hint}"
        self.print_usage(sys.stderr)
        self._print_message(f"{self.prog}: error: {message}\n", sys.stderr)
        raise UsageError(message)

    def _instead_of(self, named: str) -> str:
        """What to type in place of an argument that there is none of; empty: nothing is like it."""
        word, equals, value = named.split()[0].partition("=")
        if word[:1] != "-":
            return f"{self.prog} takes no key=value" if equals else ""
        name = word.strip("-").replace("-", "_")
        at = self.typed.index(word) + 1 if word in self.typed else len(self.typed)
        if not equals and at < len(self.typed) and not self.typed[at].startswith("-"):
            value = self.typed[at]
        if is_known(name):
            return f"options have no dashes: {name}={value or '…'}"
        known = [each for each in self._option_string_actions if each.startswith("--")]
        if "--config" not in known and name in ("config", "preset"):
            return f"{self.prog} takes no preset and no file"
        if flags := [each for each, names in _FLAGS.items() if each in known and name in names.split()]:
            return f"did you mean {flags[0]}?"
        if is_known(own := f"{self.prog.rpartition(' ')[2]}.{name}"):
            return f"options have no dashes: {own}={value or '…'}"
        if len(name) == 1 and (wanted := [each for each in known if each.startswith(f"--{name}")]):
            return f"did you mean {' or '.join(wanted)}?"
        if close := difflib.get_close_matches(word, known, 1, 0.7):
            return f"did you mean {close[0]}?"
        return instead_of(name, value or None)

    def _print_message(self, message: str, file: Any = None) -> None:
        super()._print_message(printable(message), file)


def parse(argv: list[str] | None, program: str, commands: tuple[Command, ...]) -> argparse.Namespace:
    """What was typed: options may stand anywhere among the other words, and what follows `--` is none.

    Raises:
        UsageError: it is none of the program's commands.
        SystemExit: help was asked for.
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
        sub.set_defaults(command=command.name, execute=command.execute, stopped=command.stopped)
    argv = _command_first(sys.argv[1:] if argv is None else argv, subparsers.choices)
    if not argv or argv[0] not in subparsers.choices:
        if argv and argv[0].startswith("--config"):
            parser.error(f"a command comes first: {program} run {' '.join(argv[:2])}")
        if argv and argv[0] not in ("-h", "--help", "--json", "--debug"):
            parser.error(unknown_command(argv[0], subparsers.choices))
        return parser.parse_args(argv)
    sub, end = subparsers.choices[argv[0]], argv.index("--") if "--" in argv else len(argv)
    sub.typed = tuple(argv[1:end])
    if mistake := _misplaced(argv[1:end], argv[0] in ("neighbours", "next")):
        sub.error(mistake)
    found = sub.parse_intermixed_args([*argv[1:end], *(_LITERAL + word for word in argv[end + 1 :])])
    if "run" in found:
        _sort(sub, found)
    for name, value in vars(found).items():
        if isinstance(value, list):
            setattr(found, name, [word.removeprefix(_LITERAL) if isinstance(word, str) else word for word in value])
    return found


def _command_first(argv: list[str], known: Container[str]) -> list[str]:
    """The words with the command before flags that every command has."""
    flags = list(takewhile(lambda word: word in ("--json", "--debug"), argv))
    rest = argv[len(flags) :]
    return [rest[0], *flags, *rest[1:]] if rest and rest[0] in known else argv


def _misplaced(words: list[str], are_queries: bool) -> str | None:
    """What is wrong with words before any of them is understood: blanks about `=`, long dashes, a second --config."""
    for word, after in zip(words, [*words[1:], ""], strict=False):
        key = word.removesuffix("=")
        if "=" not in key and key[:1] != "-" and (not are_queries or "." in key and type_of(key) is not None):
            value = after.removeprefix("=") or next(iter(words[words.index(word) + 2 :]), "…")
            if key == word and after.startswith("="):
                return f"{word} {after}: leave out the blanks about the equals sign: {key}={value}"
            if key != word and after and "=" not in after and after[:1] != "-":
                return f"{word} {after}: leave out the blank after the equals sign: {key}={after}"
        if word[:1] in "–—" and word.strip("–—")[:1].isalpha() and not are_queries:
            return f"{word} begins with a long dash: give --{word.lstrip('–—')}"
    if sum(word == "--config" or word.startswith("--config=") for word in words) > 1:
        return "--config is given twice: leave one out"
    return None


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
