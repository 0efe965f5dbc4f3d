"""Commands, arguments shared by several of them, and the parser of the command line."""

import argparse
import difflib
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

from pipeline.config import ConfigError, Options, describe_presets, is_option, load_options, type_of
from pipeline.config.messages import explain_malformed_override, explain_unknown_command, suggest_option
from pipeline.config.schema import option_names
from pipeline.console import make_printable
from pipeline.run.run_directory import RunFolder, describe_runs

GOES_ON = "stopped. Run the same command to resume"
_NEAR_OPTION = 0.9  # of a query that may be a misspelt option
_LITERAL = "\0"  # marks words after `--`; no argument of a process can contain it


@dataclass
class CommandResult:
    """The result of a command: bytes, a text for people, and a value for programs."""

    text: str
    value: Any
    raw: Iterable[bytes] = ()


@dataclass(frozen=True)
class Command:
    """A subcommand: its name, help line, example, arguments, function, and the message printed when a signal ended it."""

    name: str
    help: str
    example: str
    arguments: Callable[[argparse.ArgumentParser], None]
    execute: Callable[[argparse.Namespace], CommandResult]
    stopped: str = "stopped"


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a command that reads a configuration."""
    parser.add_argument(
        "--config",
        metavar="PRESET_OR_FILE",
        help="Preset or YAML file of options, such as quickstart. `haed --help` lists the presets.",
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="[RUN] key=value",
        help="Name or folder of a run to continue, and options to change, such as batch.sequences=8.",
    )


def add_run_arguments(parser: argparse.ArgumentParser, such: str = "evaluate.stage=pretrain") -> None:
    """Add the arguments of a command that reads a trained run."""
    add_run_argument(parser)
    parser.add_argument("words", nargs="*", metavar="key=value", help=f"Options to change, such as {such}.")


def add_run_argument(parser: argparse.ArgumentParser) -> None:
    """Add the argument that names a run."""
    parser.add_argument("run", metavar="RUN", help="Name of a run in runs_dir, or its folder.")


def options_from_arguments(arguments: argparse.Namespace) -> Options:
    """Return the configuration that the arguments name: a preset, a file, or the options of an existing run.

    Raises:
        ConfigError: more than one configuration is named, or it is not valid.
    """
    overrides, named = split_words(arguments.words)
    if named and arguments.config and is_run(named[0]):
        raise ConfigError(f"{named[0]} is a run, which has its own options. Leave out `--config {arguments.config}`")
    if len(named) + bool(arguments.config) > 1:
        raise ConfigError(explain_malformed_override(named[-1]))
    if named:
        return load_run_options(named[0], overrides)
    return load_options(arguments.config, overrides, log_changes=True)


def is_run(name: str, runs_dir: str = "runs") -> bool:
    """Return whether a run of that name, or in a folder of that path, exists."""
    return any(os.path.isfile(os.path.join(place, name, "config.yaml")) for place in (".", runs_dir))


def split_words(words: list[str]) -> tuple[list[str], list[str]]:
    """Return the words that change options, and the words that name runs.

    The name of a run may contain an equals sign, as the runs of a sweep do.
    """
    runs_dir = next((word[len("runs_dir=") :] for word in words if word.startswith("runs_dir=")), "runs")

    def names_run(word: str) -> bool:
        key, equals, _ = word.partition("=")
        if not equals or "/" in key:
            return True
        return not is_option(word) and is_run(word, runs_dir)

    named = list(filter(names_run, words))
    return [word for word in words if word not in named], named


def load_run_options(run: str, overrides: list[str], reader: str | None = None) -> Options:
    """Return the configuration of an existing run with overrides applied.

    Args:
        run: name of the run under `runs_dir`, or path of its folder.
        overrides: `key=value` pairs.
        reader: the command that reads the run. It limits which options may be changed, see `RunFolder.load_options`.
    """
    runs_dir = load_options(None, [word for word in overrides if word.startswith("runs_dir=")]).runs_dir
    return RunFolder.find(run, runs_dir).load_options(overrides, reader, log_changes=True)


_FLAGS = {  # arguments, and their names in other programs
    "--samples": "n num num_samples n_samples num_return_sequences count",
    "--count": "n k top_k topk top num top_n limit",
    "--port": "p",
    "--text": "t f file input data",
}


def parse_port(typed: str) -> int:
    """Parse a port number, as the type of an argument.

    Raises:
        argparse.ArgumentTypeError: the text is not a port number.
    """
    if not (typed.isdecimal() and int(typed) < 1 << 16):
        raise argparse.ArgumentTypeError(f"{typed[:40]} is not a port. Use a number up to 65535, such as 4300")
    return int(typed)


def parse_path(typed: str) -> Path:
    """Parse a path, as the type of an argument.

    Raises:
        argparse.ArgumentTypeError: the text is empty, as of a shell's variable that is not set.
    """
    if not typed:
        raise argparse.ArgumentTypeError("the path is empty. Name a file or folder; . is the current folder")
    return Path(typed)


class UsageError(SystemExit):
    """A command line that cannot be parsed. The message was already printed."""

    def __init__(self, message: str) -> None:
        super().__init__(2)
        self.message = message


class _StoreOnce(argparse.Action):
    """Store the value of an argument that is given once. argparse would silently take the last of several."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        stored: set[str] = getattr(namespace, "given_once", set())
        if option_string is not None and self.dest in stored:
            parser.error(f"argument {option_string}: it was given twice. Give it once")
        namespace.given_once = stored | {self.dest}
        setattr(namespace, self.dest, values)


class _ArgumentParser(argparse.ArgumentParser):
    """An argument parser that escapes control characters in its messages and suggests what was meant."""

    typed: tuple[str, ...] = ()

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        for action in (None, "store"):
            self.register("action", action, _StoreOnce)

    def error(self, message: str) -> NoReturn:
        """Print the usage and the error, and raise.

        For missing arguments, the message leaves optional ones out. For unknown ones, it suggests the closest match.

        Raises:
            UsageError: always.
        """
        kind, _, named = message.partition(": ")
        if kind.endswith("are required"):
            optional = {action.metavar for action in self._actions if action.nargs == "*"}
            message = f"{kind}: {', '.join(each for each in named.split(', ') if each not in optional)}"
            message += f"; {describe_runs()}" if message.endswith(" RUN") else ""
        elif (
            named == "expected one argument" and (flag := kind.rpartition(" ")[2].rpartition("/")[2]) in self.typed[:-1]
        ):
            value = self.typed[self.typed.index(flag) + 1]
            message += f"; use {flag}={shlex.quote(value)}" if value not in self._option_string_actions else ""
        elif kind == "unrecognized arguments" and (hint := self._suggest_argument(named)):
            message += f"; {hint}"
        self.print_usage(sys.stderr)
        self._print_message(f"{self.prog}: error: {message}\n", sys.stderr)
        raise UsageError(message)

    def leave_out_values(self, words: Sequence[str]) -> Iterator[str]:
        """Yield the words but for the values of flags, such as the text after `--prompt`."""
        is_value = False
        for word in words:
            if not is_value:
                yield word
            action = None if is_value else self._option_string_actions.get(word)
            is_value = action is not None and action.nargs != 0

    def keep_dashes(self, word: str) -> str:
        """Mark the value of `--argument=--`, which `argparse` drops; no value but a text can be two dashes."""
        flag = word.removesuffix("=--")
        action = next((each for name, each in self._option_string_actions.items() if name.startswith(flag)), None)
        if flag == word or action is None:
            return word
        if action.type is not None or action.choices is not None:
            self.error(f"argument {flag}: -- is no value")
        return f"{flag}={_LITERAL}--"

    def _suggest_argument(self, named: str) -> str:
        """Return a suggestion in place of an unknown argument, or an empty text if nothing is similar."""
        word, equals, value = named.split()[0].partition("=")
        if word[:1] != "-":
            return f"{self.prog} takes no key=value" if equals else ""
        name = word.strip("-").replace("-", "_")
        if not name[:1].isalpha():
            takes_texts = any(action.dest == "queries" for action in self._actions)
            return "put -- before a text that begins with a dash" if takes_texts else ""
        at = self.typed.index(word) + 1 if word in self.typed else len(self.typed)
        if not equals and at < len(self.typed) and not self.typed[at].startswith("-"):
            value = self.typed[at]
        if name in option_names():
            return f"options have no dashes. Use {name}={value or '…'}"
        known = [each for each in self._option_string_actions if each.startswith("--")]
        if "--config" not in known and name in ("config", "preset"):
            return f"{self.prog} takes no preset and no file"
        if flags := [each for each, names in _FLAGS.items() if each in known and name in names.split()]:
            return f"did you mean {flags[0]}?"
        if (key := f"{self.prog.rpartition(' ')[2]}.{name}") in option_names():
            return f"options have no dashes. Use {key}={value or '…'}"
        if len(name) == 1 and (wanted := [each for each in known if each.startswith(f"--{name}")]):
            return f"did you mean {' or '.join(wanted)}?"
        if close := difflib.get_close_matches(word, known, 1, 0.7):
            return f"did you mean {close[0]}?"
        return suggest_option(name, value or None)

    def _print_message(self, message: str, file: Any = None) -> None:
        super()._print_message(make_printable(message), file)


def make_parser(
    program: str, commands: tuple[Command, ...]
) -> "tuple[_ArgumentParser, argparse._SubParsersAction[Any]]":
    """Return the parser of a program, and the parsers of its commands."""
    parser = _ArgumentParser(
        prog=program,
        description="Hierarchical Attention Encoder-Decoders, trained in two phases, and other hierarchical models.",
        epilog=f"Options are key=value. `{program} config` explains them. Presets: {describe_presets()}.",
    )
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in commands:
        sub = subparsers.add_parser(
            command.name, help=command.help, description=command.help, epilog=f"Example: {command.example}"
        )
        command.arguments(sub)
        sub.add_argument("--json", action="store_true", help="End with the result as one line of JSON.")
        sub.add_argument("--debug", action="store_true", help="Show the traceback of an error.")
        sub.set_defaults(command=command.name, execute=command.execute, stopped=command.stopped)
    return parser, subparsers


def parse_arguments(argv: list[str] | None, program: str, commands: tuple[Command, ...]) -> argparse.Namespace:
    """Parse the command line. Options may stand anywhere among the other words; words after `--` are never options.

    Raises:
        UsageError: the words are not a valid command of the program.
        SystemExit: help was requested.
    """
    parser, subparsers = make_parser(program, commands)
    argv = sys.argv[1:] if argv is None else argv
    flags = list(takewhile(lambda word: word in ("--json", "--debug"), argv))
    if (rest := argv[len(flags) :]) and rest[0] in subparsers.choices:  # flags of every command may come first
        argv = [rest[0], *flags, *rest[1:]]
    if not argv or argv[0] not in subparsers.choices:
        if argv and argv[0].startswith("--config"):
            parser.error(f"the command comes first. Use {program} run {' '.join(argv[:2])}")
        if argv and argv[0] not in ("-h", "--help", "--json", "--debug"):
            parser.error(explain_unknown_command(argv[0], subparsers.choices))
        return parser.parse_args(argv)
    sub, end = subparsers.choices[argv[0]], argv.index("--") if "--" in argv else len(argv)
    sub.typed = tuple(argv[1:end])
    words = list(sub.leave_out_values(argv[1:end]))
    if mistake := _explain_misplaced_word(words, argv[0] in ("neighbours", "next")):
        sub.error(mistake)
    before = [sub.keep_dashes(word) for word in argv[1:end]]
    arguments = sub.parse_intermixed_args([*before, *(_LITERAL + word for word in argv[end + 1 :])])
    if "run" in arguments:
        _assign_words(sub, arguments)
    for name, value in vars(arguments).items():
        if isinstance(value, list):
            value = [word.removeprefix(_LITERAL) if isinstance(word, str) else word for word in value]
        setattr(arguments, name, value.removeprefix(_LITERAL) if isinstance(value, str) else value)
    return arguments


def _explain_misplaced_word(words: list[str], are_queries: bool) -> str | None:
    """Return the error message for misplaced words: blanks around `=`, misspelt options, long dashes.

    The check runs before the words are parsed. None: nothing is wrong.
    """
    for place, word in enumerate(words):
        key = word.removesuffix("=")
        after, third = [*words[place + 1 :], "", ""][:2]
        if "=" not in key and key[:1] != "-" and (not are_queries or "." in key and type_of(key) is not None):
            if key == word and after.startswith("="):
                value = after.removeprefix("=") or third or "…"
                return f"{word} {after}: remove the spaces around the equals sign. Use {key}={value}"
            if key != word and after and "=" not in after and after[:1] != "-":
                return f"{word} {after}: remove the space after the equals sign. Use {key}={after}"
        key, equals, value = word.partition("=")
        if are_queries and equals and "." in key and key not in option_names() and not any(map(str.isspace, key)):
            if close := difflib.get_close_matches(key, option_names(), 1, _NEAR_OPTION):
                return (
                    f"{word}: there is no option {key}. Use {close[0]}={value}, or -- {shlex.quote(word)} for this text"
                )
        if word[:1] in "–—" and word.strip("–—")[:1].isalpha() and not are_queries:
            return f"{word} begins with a long dash. Use --{word.lstrip('–—')}"
    return None


def _assign_words(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Assign the words to `run`, `queries` and `words`.

    RUN is the first word that changes no option. If the command takes queries, they are the other such words.
    """
    words = [arguments.run, *(arguments.queries if "queries" in arguments else arguments.words)]
    changes = [word for word in words if word[:1] != _LITERAL]
    arguments.words = list(filter(is_option, changes)) if "queries" in arguments else split_words(changes)[0]
    named = [word for word in words if word not in arguments.words]
    if not named:
        parser.error("the following arguments are required: RUN")
    arguments.run, rest = named[0].removeprefix(_LITERAL), named[1:]
    if "queries" in arguments:
        arguments.queries = rest
    else:
        arguments.words += rest
