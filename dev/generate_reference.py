"""Write docs/reference/options.md and docs/reference/cli.md from the schema of options and the parser of commands.

Run `make reference` after a change of an option or an argument. `tests/pipeline/config/test_reference.py` compares the
pages with what this module generates. Packages of others, the terminal and the machine have no part in it.
"""

import argparse
from dataclasses import is_dataclass
from pathlib import Path

from flows.commands import COMMANDS as FLOW_COMMANDS
from pipeline.arguments import make_parser
from pipeline.commands import COMMANDS
from pipeline.config import list_presets
from pipeline.config.reference import explain_option, explain_section
from pipeline.config.schema import models_with_option, schema_options

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "reference"
OPTIONS = """# Options

Every option is set by `key=value` on the command line, or in a YAML file.
`haed config PRESET` prints all options of a preset with the same explanations.
`haed config PRESET --search WORDS` finds options by their name and meaning.
A preset may set another value than the default below.

`make reference` writes this page from the code.
"""
COMMAND_LINE = """# Commands

`haed COMMAND --help` prints the same text.
Options of a run are `key=value`, see [Options](options.md).
Every command but `haed cat` takes `--json`, which ends its output with the result as one line of JSON.
Every command takes `--debug`, which shows the traceback of an error.
The exit status is 0 after success, 1 after a failure and 2 after a usage error.
It is 130 after Ctrl-C and 143 after SIGTERM, of `haed serve` 0 after both.

`make reference` writes this page from the code.
"""


def make_table(titles: list[str], rows: list[list[str]]) -> str:
    """Return a table in Markdown."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def generate_options() -> str:
    """Return the page of all options: a heading and a table for each section."""
    options = schema_options()
    sections = {"": [key for key in options if "." not in key and not is_dataclass(options[key].type)]}
    for section in (key for key, option in options.items() if is_dataclass(option.type)):
        inside = [key for key in options if key.rpartition(".")[0] == section and not is_dataclass(options[key].type)]
        sections |= {section: inside} if inside else {}
    page = OPTIONS
    for section, keys in sections.items():
        page += f"\n## {section or 'The run'}\n\n"
        if section:
            page += f"{explain_section(section)}\n"
            page += f"{_name_models(section)}\n" if _name_models(section) else ""
            page += "\n"
        rows = []
        for key in keys:
            found = explain_option(key)
            only = _name_models(key) if _name_models(key) != _name_models(section) else ""
            meaning, facts = found.paragraphs
            text = _escape(" ".join(filter(None, [meaning, only])))
            rows.append([f"`{key}`", f"{text}<br>{_escape(facts)} Default: `{found.default}`."])
        page += make_table(["Option", "Meaning"], rows)
    return page


def _name_models(key: str) -> str:
    """Return a sentence that names the kinds of models that use an option or section; empty: all of them."""
    users, everyone = models_with_option(key), models_with_option("seed")
    return "" if users == everyone else f"Only with model.kind={', '.join(users)}."


def generate_commands() -> str:
    """Return the page of all commands: a heading, an example and a table of arguments for each."""
    _, commands = make_parser("haed", (*FLOW_COMMANDS, *COMMANDS))
    page = f"{COMMAND_LINE}\n## Presets\n\nThese presets are YAML files in `configs/`.\n\n"
    for title, is_paper in (("For an ordinary machine", False), ("Of a paper's sizes", True)):
        names = [f"`{preset}`" for preset in list_presets() if preset.startswith("paper-") == is_paper]
        page += f"- {title}: {', '.join(names)}\n"
    for name, parser in commands.choices.items():
        rows = [_describe_argument(each) for each in parser._actions if each.dest not in ("help", "json", "debug")]
        example = str(parser.epilog).removeprefix("Example: ")
        page += f"\n## haed {name}\n\n{parser.description}\n\n```bash\n{example}\n```\n\n"
        page += make_table(["Argument", "Meaning"], rows)
    return page


def _describe_argument(action: argparse.Action) -> list[str]:
    values = f" One of {', '.join(action.choices)}." if action.choices else ""
    metavar = str(action.metavar or action.dest.upper()) if action.nargs != 0 and not action.choices else ""
    name = " ".join(filter(None, [", ".join(action.option_strings), metavar]))
    required = " Required." if action.required and action.option_strings else ""
    return [f"`{name}`", _escape(str(action.help) % {"default": action.default}) + values + required]


def _escape(text: str) -> str:
    """Return text in which nothing is Markdown, save code."""
    return "".join(f"\\{sign}" if sign in "\\*<>[]" else sign for sign in text)


def main() -> None:
    """Write both pages."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, page in (("options", generate_options()), ("cli", generate_commands())):
        (FOLDER / f"{name}.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
