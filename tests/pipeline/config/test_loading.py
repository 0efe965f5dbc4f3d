"""What is typed, what is put into it, and what a run's config.yaml keeps of it."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from flows.forms import read_form
from pipeline.cli import main
from pipeline.config import (
    ConfigError,
    Options,
    applies_to,
    check_options,
    dump_options,
    flatten_tree,
    get_option,
    load_options,
    set_option,
    type_of,
    write_override,
)
from pipeline.config.loading import TEXTS, parse_override
from pipeline.run.run_directory import RunFolder

HOSTILE = [*"${}#='\"~|>", "\n", "", " a", "a ", "\ta", "a\nb", "a\r\nb", "a: b", ": ", "# x", "- a", "\\", "{a: b}"]
HOSTILE += r"${seed} \${seed} \\${seed} ${ ${oc.env:HOME} a${b ${a:b}${ a\ \n ~/x ??? null [a] << = --- ...".split()
HOSTILE += "1e3 0x10 010 1_000 yes off 2024-01-01 3:4 .5 *a &a !a %a @a `a".split()
HOSTILE += ["\N{GRINNING FACE}", "\x85", "\u2028", "\ufeff", "\x7f", "\x1b[2J", "\u202ea"]
TEXT_OPTIONS = [key for key, _ in flatten_tree(asdict(Options())) if type_of(key) in TEXTS and applies_to(key, "haed")]
LIST_OPTIONS = [key for key, _ in flatten_tree(asdict(Options())) if type_of(key) == list[str]]
texts = st.sampled_from(HOSTILE) | st.text(max_size=12) | st.lists(st.sampled_from(HOSTILE), max_size=3).map("".join)


def checked(options: Options) -> Options | None:
    """The options as they are read; None if they are refused."""
    try:
        return check_options(options)
    except ConfigError:
        return None


@pytest.mark.parametrize("key", [*TEXT_OPTIONS, *LIST_OPTIONS])
def test_every_option_of_text_is_read_back_as_it_was_written(key: str, tmp_path: Path) -> None:
    tried = 0

    @settings(max_examples=12)
    @given(st.data())
    def check_option(data: st.DataObject) -> None:
        nonlocal tried
        given = Options()
        set_option(given, key, data.draw(st.lists(texts, max_size=3) if key in LIST_OPTIONS else texts))
        options = checked(given)
        if options is None or key == "launcher.dask":  # an address is the user's
            return
        tried += 1
        path = tmp_path / "config.yaml"
        path.write_text(dump_options(options), encoding="utf-8")
        assert load_options(path) == options
        written = dict(flatten_tree(yaml.safe_load(path.read_text(encoding="utf-8"))))
        assert written[key] == get_option(options, key)

    check_option()
    assert tried or key.endswith(".kind") or key in ("device", "launcher.dask")


@settings(max_examples=25)
@given(st.sampled_from(TEXT_OPTIONS), texts)
def test_a_value_of_a_form_is_a_value(key: str, text: str) -> None:
    options = Options()
    set_option(options, key, text)
    word = write_override(key, text)
    keeps_references = key in ("source.field", "source.test_pattern")
    if checked(options) and not text.startswith("~") and ("${" not in text or keeps_references):
        expected = text.strip() if key == "name" else text  # blanks around a name are taken off
        assert get_option(load_options(None, [word]), key) == expected, (word, parse_override(word))


def test_nothing_in_a_text_stands_for_another_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    typed = {"name": "run", "source": "my.txt", "sources": {"field": "${HOME}"}}
    options = load_options(*read_form("haed", {"preset": "quickstart", "overrides": []} | typed))
    assert options.source.field == "${HOME}"
    words = [r"source.test_pattern=\${x}", 'sample.prompts=["${seed}"]', "source.field=???"]
    options = load_options(None, words)
    assert options.source.test_pattern == r"\${x}"
    assert (options.sample.prompts, options.source.field) == (["${seed}"], "???")
    with pytest.raises(ConfigError, match=r"^threads=\$\{seed\}: is not a whole number$"):
        load_options(None, ["threads=${seed}"])


def test_a_name_or_path_with_a_reference_is_refused_unless_it_exists(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "secret-place")
    path = here / "mine.yaml"
    path.write_text("runs_dir: ${oc.env:HOME}/runs\n")
    wrong = "is not expanded. Write its value instead"
    with pytest.raises(ConfigError, match=rf"^{path}: runs_dir=\$\{{oc.env:HOME\}}/runs: .* {wrong}$"):
        load_options(path)
    for word in ("name=run-${seed}", "source.path=${HOME}/x", "finetune.start_from=${name}"):
        with pytest.raises(ConfigError, match=wrong) as caught:
            load_options(None, [word])
        assert "secret-place" not in str(caught.value)
    with pytest.raises(ConfigError, match=wrong):
        load_options(*read_form("haed", {"preset": "quickstart", "overrides": [], "name": "a${seed}"}))
    (here / "${seed}").mkdir()
    (here / "${seed}" / "a.txt").touch()
    for there in ("${seed}", "${seed}/*.txt"):
        assert load_options(None, [f"source.path={there}"]).source.path == there
    with pytest.raises(ConfigError, match=wrong):
        load_options(None, ["name=${seed}"])


@pytest.mark.usefixtures("here")
def test_a_run_and_what_haed_config_prints_keep_a_dollar_sign(capsys: pytest.CaptureFixture[str]) -> None:
    options = load_options("quickstart", ["name=a$seed", "source.path=$seed", "source.kind=text"])
    run = RunFolder.create(options)
    assert run.path == Path("runs", "a$seed") and run.load_options() == options
    assert main(["config", str(run.path / "config.yaml"), "source.pattern=\u202e"]) == 0
    printed = capsys.readouterr()
    Path("again.yaml").write_text(printed.out)
    options.source.pattern = "\u202e"
    assert load_options("again.yaml") == options and not printed.err


def test_a_file_names_an_option_once_and_may_be_json(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    for content in ("seed: 1\nseed: 2\n", "pretrain: {steps: 3, steps: 4}\n"):
        path.write_text(content)
        with pytest.raises(ConfigError, match="mine.yaml .*line .* is a duplicate key. Remove one of them"):
            load_options(path)
    path.write_text("pretrain: &p {steps: 3}\nfinetune: {<<: *p}\n")
    with pytest.raises(ConfigError, match=r"line 2.*merge keys \(<<\) are not read. Write the options out"):
        load_options(path)
    path.write_text("train.steps: 5\ntrain: {steps: 6}\n")
    with pytest.raises(ConfigError, match="mine.yaml has train.steps twice. Remove one of them"):
        load_options(path)
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"seed": 3, "source": {"path": "1e3", "cut": True}, "threads": None}))
    options = load_options(path)
    assert (options.seed, options.source.path, options.source.cut, options.threads) == (3, "1e3", True, None)


@pytest.mark.parametrize(
    ("content", "typed", "begin"),
    [
        ("name: ../x\n", [], "{path}: name='../x'"),
        ("pretrain: {part_from: 0.5, part_to: 0.2}\n", [], "{path}: pretrain.part_from=0.5 must be below"),
        ("pretrain: {part_from: 0.5}\n", ["pretrain.part_to=0.2"], "pretrain.part_from=0.5 must be below"),
        ("seed: 1\n", ["name=../x"], "name='../x'"),
    ],
)
def test_a_broken_rule_names_the_file_that_alone_broke_it(
    content: str, typed: list[str], begin: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        load_options(path, typed)
    assert str(caught.value).startswith(begin.format(path=path))
