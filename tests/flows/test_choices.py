"""What forms offer, and what they make of what was typed."""

import re
from pathlib import Path
from typing import Any

import pytest

from flows.forms import PLAIN, add_run_choices, detect_source_kind, is_user_chosen, read_form
from pipeline import config
from pipeline.run.run_directory import RunFolder


@pytest.mark.parametrize(
    ("files", "usual", "kind"),
    [
        (["a.txt", "b/c.txt.gz", "README"], "stdlib", "text"),
        (["a.txt"], "wikitext", "wikitext"),
        (["a.py", "b.py", "c.txt"], "stdlib", "stdlib"),
        (["a.py"], "images", "text"),
        (["a.jsonl.zst"], "stdlib", "jsonl"),
        (["a.PNG", "b.jpg", "list.txt"], "stdlib", "images"),
        (["a.wav"], "text", "audio"),
        (["a.tar"], "text", "webdataset"),
        (["manifest.json", "a.tar"], "stdlib", "shards"),
        ([], "images", "text"),
    ],
)
def test_a_source_is_seen_by_its_files(files: list[str], usual: str, kind: str, tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    assert detect_source_kind(str(tmp_path), usual) == kind


def test_a_form_has_no_standard_input() -> None:
    fields = {name: each.default for name, each in PLAIN.items()} | {"source": " - "}
    with pytest.raises(config.ConfigError, match="a form has no standard input"):
        read_form("haed", fields)


def test_a_source_is_a_pattern_too_and_blanks_around_it_are_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    for split in ("train", "valid", "test"):
        (tmp_path / "mine" / f"{split}.jsonl").write_text('{"text": "words"}\n')
    monkeypatch.setenv("HOME", str(tmp_path))
    for source in (f" {tmp_path}/mine ", "~/mine", f"{tmp_path}/mine/*.jsonl"):
        _, _, values = read_form("shard", {"preset": "quickstart", "overrides": [], "source": source})
        assert values["source.kind"] == "jsonl" and values["source.path"].startswith(f"{tmp_path}/mine"), source
    assert detect_source_kind(f"{tmp_path}/none/*.jsonl", "stdlib") == "stdlib"


def test_lists_beside_pictures_and_figures_beside_texts_change_nothing(tmp_path: Path) -> None:
    for name, size in {"a.npz": 9000, "README.md": 100, "a_files.txt": 200, "b_files.txt": 100}.items():
        (tmp_path / name).write_bytes(bytes(size))
    assert detect_source_kind(str(tmp_path), "stdlib") == "images"
    for number in range(20):
        (tmp_path / f"{number}.txt").write_bytes(bytes(100))
    assert detect_source_kind(str(tmp_path), "stdlib") == "text"


def test_what_is_no_path_of_this_machine_stays_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x")
    assert detect_source_kind(str(tmp_path / "a.py"), "stdlib") == "text"  # a file: stdlib reads folders
    assert detect_source_kind("https://host/shards", "stdlib") == "shards"
    assert detect_source_kind("Salesforce/wikitext", "datasets") == "datasets"
    assert detect_source_kind("nowhere", "jsonl") == "jsonl"
    asked = {"preset": "quickstart", "overrides": [], "source": str(tmp_path / "a.py")}
    assert read_form("haed", asked)[2]["source.kind"] == "text"
    assert read_form("haed", asked | {"sources": {"kind": "jsonl"}})[2]["source.kind"] == "jsonl"


@pytest.mark.usefixtures("here")
def test_without_a_preset_the_configuration_is_the_runs_own(tiny: list[str]) -> None:
    made = RunFolder.create(config.load_options("quickstart", [*tiny, "name=first", "runs_dir=runs", "seed=7"]))
    made.path.rename("runs/second")  # the name in its config.yaml is another now

    def asked(**given: Any) -> Any:
        return config.load_options(*read_form("finetune", {name: ask.default for name, ask in PLAIN.items()} | given))

    found = asked(preset=None, name="second", overrides=["seed=8", ""])
    assert (found.name, found.runs_dir, found.seed, found.batch.context) == ("second", "runs", 8, 16)
    assert asked(preset=None, overrides=["name=second"]).seed == 7
    for empty in ("", "   "):  # nobody names a run, so none is gone on with
        with pytest.raises(config.ConfigError, match="no preset is chosen and no run is named.*runs in .*: second"):
            asked(preset=None, name=empty, overrides=())
    with pytest.raises(config.ConfigError, match="no preset is chosen, and no run 'third'.*runs in .*: second"):
        asked(preset=None, name="third", overrides=())


def test_forms_list_presets_and_runs_and_take_any_other() -> None:
    from prefect.utilities.callables import parameter_schema
    from prefect.utilities.schema_tools import validate

    from flows.flows import FLOWS

    forms = {flow.name: parameter_schema(flow) for flow in FLOWS}
    for form in forms.values():
        add_run_choices(form.properties, ["b", "a"])
    listed, file, own = forms["finetune"].properties["preset"]["anyOf"]
    assert listed["enum"][0] == "quickstart" and set(listed["enum"]) == set(config.list_presets())
    assert (file["type"], own["type"]) == ("string", "null")
    assert forms["haed"].properties["preset"]["default"] == "quickstart"
    run = forms["evaluate"].properties["run"]
    assert run["anyOf"][1]["enum"] == ["b", "a"] and run["default"] == "b"
    for form in forms.values():  # as a form sends them that nobody has touched
        untouched = {name: shown["default"] for name, shown in form.properties.items() if "default" in shown}
        assert not validate(untouched, form.model_dump())
    assert {each["title"] for each in forms["haed"].definitions.values()} == {"set here"}
    for name, given in (
        ("evaluate", {"run": "a", "split": "valid"}),
        ("evaluate", {"run": "/data/runs/c", "overrides": [""]}),
        ("compare", {"runs": ["a", "b"]}),
        ("compare", {"runs": ["elsewhere/c"]}),
        ("finetune", {"preset": None, "name": "a"}),
        ("haed", {"preset": "my.yaml", "name": "new"}),
        ("sample", {"temperature": 0, "prompt_count": 3}),
        ("neighbours", {"queries": [""]}),
    ):
        schema = forms[name].model_dump_for_openapi()
        validate(given, schema, raise_on_error=True, preprocess=True, ignore_required=True)


def test_a_name_that_somebody_typed_is_told_from_one_that_was_made_up() -> None:
    made_up = ["Refined-Towhee", "venomous-polecat", "kappa995-uxbenka", "beta2-soga-tensor"]
    typed = ["beta run", "beta-2", "first-try", "Refined model of May", "nightly"]
    assert [name for name in (*made_up, *typed) if is_user_chosen(name)] == typed


def test_a_run_of_ones_own_source_is_named_by_it_and_two_sources_never_meet(tiny: list[str], here: Path) -> None:
    for folder in ("one", "two"):
        (here / folder / "books").mkdir(parents=True)
        (here / folder / "books/train.txt").write_text("text")
    asked = {"preset": "quickstart", "name": "", "source": "one/books/", "seconds": 0, "overrides": []}
    options = config.load_options(*read_form("train", asked))
    assert options.name == "quickstart-books"
    assert config.load_options(*read_form("train", asked | {"preset": "hourglass"})).name == "hourglass-books"
    assert config.load_options(*read_form("train", asked | {"name": "mine"})).name == "mine"
    assert config.load_options(*read_form("train", asked | {"overrides": ["name=typed"]})).name == "typed"
    assert config.load_options(*read_form("train", asked | {"source": ""})).name == "quickstart"
    RunFolder.create(options)
    assert config.load_options(*read_form("train", asked)).name == "quickstart-books"  # it goes on
    other = config.load_options(*read_form("train", asked | {"source": str(here / "two/books")})).name
    assert re.fullmatch("quickstart-books-[0-9a-f]{4}", other)
