"""What is said of options: meaning, unit, range and default, in `haed config` and in the pages of the reference."""

import re
import shlex
from collections.abc import Callable
from dataclasses import asdict, is_dataclass, make_dataclass
from pathlib import Path
from typing import Annotated, get_args

import pytest
from pydantic import Field

from dev.generate_reference import generate_commands, generate_options
from flows.commands import COMMANDS as FLOW_COMMANDS
from haed.options import ENCODERS, EncoderOptions
from pipeline.arguments import Command, make_parser, parse_arguments
from pipeline.commands import COMMANDS
from pipeline.config import dump_options, load_options
from pipeline.config.reference import explain_option, explain_section, search_options
from pipeline.config.schema import KINDS, option_classes, option_names, schema_options
from tests.pipeline.conftest import CommandLine

ROOT = Path(__file__).resolve().parents[3]
WITHOUT_UNIT = ("seed", "layer", "expansion")  # numbers that count nothing


def test_every_option_has_a_meaning_in_sentences_and_every_number_bounds_and_every_whole_one_a_unit() -> None:
    for key in option_names():
        found, kind = explain_option(key), schema_options()[key].type
        assert re.match("[A-Z]|[a-z_, ]+: |(layers|heads|from:to)@", found.meaning) and found.meaning.endswith("."), key
        assert found.range and found.default, key
        assert not {int, float} & {kind, *get_args(kind)} or " to " in found.range or kind == list[int], key
        assert not found.meaning.startswith("Only with kind="), key
        assert found.unit or int not in (kind, *get_args(kind)) or key.rpartition(".")[2] in WITHOUT_UNIT, key


def test_the_kinds_that_use_an_option_are_kinds_of_its_section() -> None:
    for key, option in schema_options().items():
        if option.kinds:
            sections = (key.rsplit(".", depth)[0] for depth in range(1, key.count(".") + 1))
            table = next(KINDS[f"{section}.kind"] for section in sections if f"{section}.kind" in KINDS)
            assert set(option.kinds) <= set(table), key


def test_every_section_has_a_meaning() -> None:
    sections = [key for key, option in schema_options().items() if is_dataclass(option.type)]
    assert len(sections) > 20 and all(explain_section(key).endswith(".") for key in sections)


@pytest.mark.parametrize(
    ("key", "range_", "unit", "default"),
    [
        ("batch.context", "1 to 65,536", "chunks", "128"),
        ("threads", "null, or 1 to 1,024", "threads", "null"),
        ("pretrain.rate_from", "above 0 to 1", "share", "1.0"),
        ("optimizer.beta2", "above 0 to below 1", "", "0.95"),
        ("source.cut", "null, true or false", "", "null"),
        ("name", "text of at most 200 characters", "", "run"),
        ("device", r"text that matches ^(auto|cpu|cuda(:\d{1,3})?)$", "", "auto"),
        ("evaluate.split", "train, valid, test", "", "test"),
        ("model.encoder.kind", f"{', '.join(ENCODERS)}, or a kind of another package", "", "mlp"),
        ("model.decoder.grams.orders", "list of at most 64, each 1 to 64", "tokens", "[2, 3, 4, 5]"),
        ("model.multiscale.heads", "text", "", '""'),
    ],
)
def test_ranges_and_defaults_are_those_of_the_declaration(key: str, range_: str, unit: str, default: str) -> None:
    found = explain_option(key)
    assert (found.range, found.unit, found.default) == (range_, unit, default)


@pytest.mark.parametrize(
    "words", [["quickstart"], ["hourglass"], ["paper-imagenet32", "name='a: #b'", "sample.prompts=['# x', 'y: z']"]]
)
def test_the_printed_configuration_explains_every_line_and_is_read_back(
    words: list[str], tmp_path: Path, haed: CommandLine
) -> None:
    printed = haed.output("config", *words)
    preset, options = tmp_path / "mine.yaml", load_options(words[0], words[1:])
    preset.write_text(printed)
    assert load_options(preset) == options
    lines = printed.splitlines()
    plain = [line for line in lines if line and not line.lstrip().startswith("# ")]
    assert plain == dump_options(options).splitlines()[1:] and max(map(len, lines)) < 120
    for above, line in zip(lines, lines[1:], strict=False):
        if line in plain and not line.lstrip().startswith("- "):
            assert above.lstrip().startswith("# "), line
    meaning, bounds = "  # Windows per training step and process (B).", "  # Range: 1 to 65,536. Unit: windows."
    assert f"{meaning}\n{bounds}\n  sequences: " in printed


def test_json_has_no_comments(haed: CommandLine) -> None:
    assert haed.json("config", "quickstart") == asdict(load_options("quickstart"))


def test_options_are_found_by_words_of_name_and_meaning(haed: CommandLine) -> None:
    assert haed.output("config", "quickstart", "--search", "Rate table") == (
        "optimizer.table_learning_rate=0.2\n"
        "    Learning rate of tables of hashed rows (model.encoder.rows, grams). Adagrad trains them row by\n"
        "    row.\n"
        "    Range: above 0 to 1,000. Default: 0.2.\n"
    )
    (found,) = haed.json("config", "quickstart", "batch.context=64", "--search", "chunks per window")
    assert (found["key"], found["value"], found["default"], found["unit"]) == ("batch.context", 64, "128", "chunks")
    keys = [each.key for each in search_options(load_options("quickstart"), "rate")]
    assert {"optimizer.learning_rate", "finetune.rate_to"} < set(keys) and "pretrain.iem_weight" not in keys
    (found,) = search_options(load_options("hourglass"), "shortening")
    assert found.key == "model.hourglass.shortening"
    said = haed.error("config", "quickstart", "--search", "shortening", status=2)  # an option of another kind of model
    assert "no option has 'shortening' in its name or meaning" in said


@pytest.mark.parametrize(("page", "generate"), [("options.md", generate_options), ("cli.md", generate_commands)])
def test_the_pages_of_the_reference_are_generated(
    page: str, generate: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert (ROOT / "docs" / "reference" / page).read_text(encoding="utf-8") == generate(), "run `make reference`"


@pytest.mark.parametrize("command", [*COMMANDS, *FLOW_COMMANDS], ids=lambda command: command.name)
def test_every_argument_has_a_help_in_sentences_and_the_example_of_a_command_is_one(command: Command) -> None:
    _, parsers = make_parser("haed", (command,))
    arguments = parsers.choices[command.name]._actions[1:]
    assert arguments and all(str(each.help)[:1].isupper() for each in arguments)
    assert all(str(each.help).endswith(".") for each in arguments)
    program, *words = shlex.split(command.example)
    assert program == "haed" and parse_arguments(words, "haed", (command,)).command == command.name


def test_options_of_another_package_need_no_description_and_no_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = [("plain", int, 3), ("some", Annotated[float, Field(gt=0)], 1.0), ("many", tuple[int, ...], (1,))]
    theirs = make_dataclass("Theirs", fields, bases=(EncoderOptions,), kw_only=True)
    monkeypatch.setitem(option_classes, ("model.encoder.kind", "theirs"), theirs)
    schema_options.cache_clear()
    try:
        found = [explain_option(f"model.encoder.{name}") for name in ("plain", "some", "many")]
    finally:
        schema_options.cache_clear()
    assert [each.range for each in found] == ["any number", "above 0", "tuple"]
    assert [each.meaning for each in found] == ["Only with kind=theirs."] * 3
