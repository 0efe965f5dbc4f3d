import json
from pathlib import Path

import numpy as np
import pytest

from haed.options import SYSTEMS, IEMOptions, ModelOptions
from pipeline.cli import main
from pipeline.config import (
    ConfigError,
    applies_to,
    check_training,
    dump_options,
    list_presets,
    load_options,
    training_phases,
)
from pipeline.run.sharding import shard_source
from pipeline.run.system import check_system
from pipeline.training.stages import run_phase
from tests.conftest import MORE, TOKENS, mostly_nightly
from tests.pipeline.conftest import CommandLine

SOURCE = [f"source.{word}" for word in ("cut=true", "image_size=8", "encoding=pcm16", "field=body", "newlines=lf")]


@pytest.mark.parametrize("preset", list_presets())
def test_presets_resolve_and_read_back(preset: str, tmp_path: Path) -> None:
    options = load_options(preset)
    path = tmp_path / "config.yaml"
    path.write_text(dump_options(options))
    assert load_options(path) == options and options.name == preset


@pytest.mark.parametrize(
    "preset", mostly_nightly(list_presets(), "quickstart", "top-down")
)  # one of each kind of phases
def test_presets_take_a_step_on_tiny_data(preset: str, tiny: list[str], tmp_path: Path) -> None:
    """Narrower, but with all of their parts."""
    own = load_options(preset)
    kind = own.model.kind
    if own.source.kind == "images":
        folder = tmp_path / "images"
        folder.mkdir()
        images = np.random.default_rng(0).integers(0, 256, (300, 768), dtype=np.uint8)
        np.savez(folder / "train_data_batch_1.npz", data=images)
        np.savez(folder / "val_data.npz", data=images[:2])
        source = ["source.kind=images", f"source.path={folder}", "source.image_size=null", "batch.context=64"]
    else:
        source = ["batch.context=16"]
    keep = [item for item in tiny if not item.startswith(("model.", "optimizer."))]
    chunks = ["model.decoder.width=32", f"model.encoder.hidden={own.model.encoder.width}", "model.main.units=null"]
    if own.model.main.width > 512:  # as wide as the encoder's vectors, or wider
        chunks += [
            f"model.{part}={size}" for part, size in (("encoder.width", 32), ("main.width", 32), ("main.ffn", 64))
        ]
    sizes = [word for word in MORE.get(kind, []) if word.split("=")[0].endswith((".width", ".ffn"))]
    narrow = ["batch.sequences=2", *(chunks if SYSTEMS[kind].chunks else [*TOKENS, *sizes])]
    limits = [f"{phase}.{limit}" for phase in training_phases(kind) for limit in ("steps=1", "epochs=null")]
    chosen = [word for word in [*keep, *source] if applies_to(word.split("=")[0], kind)]
    options = load_options(preset, [*chosen, *narrow, *limits, "validation.times=0"])
    shard_source(options)
    assert [run_phase(phase, options).steps for phase in training_phases(kind)] == [1] * len(training_phases(kind))


@pytest.mark.parametrize(
    ("kind", "override", "message"),
    [
        ("hourglass", "model.encoder.hidden=3", "hidden belongs to model.kind=haed, and this is .*hourglass"),
        ("hourglass", "model={main: {layers: 4}}", "model.main.layers .*: set model.token.… or model.hourglass"),
        ("haed", "model.hourglass.hierarchy=6@1", "belongs to model.kind=hourglass, .*=haed: set model.encoder.…"),
        ("hourglass", "iem.scale=none", "iem.scale belongs to model.kind=haed, .*leave it out, or set model.kind=haed"),
        ("hourglass", "pretrain.steps=3", "pretrain.steps belongs to .*: set train.…, or"),
        ("hourglass", "batch.pieces=1", "batch.pieces belongs to"),
        ("hourglass", "train.decode_fraction=0.5", "train.decode_fraction belongs to"),
        ("hourglass", "optimizer.main_learning_rate=1", "optimizer.learning_rate, or set model.kind=haed for a new"),
        ("hourglass", "finetune.start_from=other", "finetune.start_from belongs to .*: leave it out, or"),
    ],
)
def test_options_of_another_kind_are_refused(kind: str, override: str, message: str, tmp_path: Path) -> None:
    """Given by the user, even at their default; in a file that is of one kind, where they are another's."""
    with pytest.raises(ConfigError, match=message) as caught:
        load_options("quickstart", [f"model.kind={kind}", override])
    assert "\n" not in str(caught.value)
    path = tmp_path / "mixed.yaml"
    path.write_text(f"model: {{kind: {kind}, main: {{layers: 9}}, token: {{width: 8}}}}")
    with pytest.raises(ConfigError, match=rf"mixed.yaml: model.(main.layers|token.width) belongs to .*={kind}:"):
        load_options(path)


def test_another_kind_is_a_word_and_what_it_leaves_of_a_preset_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "quickstart", "model.kind=hourglass", "model.token.width=8"]) == 0
    found = capsys.readouterr()
    assert "hourglass ignores these options of quickstart: model.encoder.rows, model.main.layers, " in found.err
    assert found.err.count("\n") == 1 and "width: 8" in found.out
    assert not any(line.startswith(("iem:", "pretrain:", "analyse:")) for line in found.out.splitlines())
    options = load_options("quickstart", ["model.kind=hourglass"])
    assert options.model.main == ModelOptions().main and options.iem == IEMOptions()
    names = [load_options("quickstart", [f"model.kind={kind}"]).name for kind in ("haed", "hourglass", "top_down")]
    assert names == ["quickstart", "quickstart-hourglass", "quickstart-top-down"]  # another model is another run
    assert load_options("quickstart", ["model.kind=hourglass", "name=mine"]).name == "mine"
    assert main(["config", "quickstart"]) == 0
    printed = capsys.readouterr()
    assert main(["config", "--config", "quickstart"]) == 0 and capsys.readouterr() == printed and not printed.err


@pytest.mark.parametrize("preset", mostly_nightly(list_presets(), "spacebyte", "paper-transformer-xl-enwik8"))
def test_another_kind_needs_no_second_word(preset: str) -> None:
    """Every system can be built from every preset: of few heads; wide, with an attention that not all know."""
    for kind in SYSTEMS:
        check_system(load_options(preset, [f"model.kind={kind}"]))


def test_what_another_kind_needs_more_of_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "spacebyte", "model.kind=retina"]) == 0
    found = capsys.readouterr()
    assert "model.kind=retina needs one head per scale, so model.token.heads=3 is set\n" in found.err
    assert "heads: 3" in found.out
    own = [["model.token.heads=2"], ["model.retina.windows=8:256@4 0:8@1"], ["model.retina.windows=9:99@9,8:9@4,0:8@1"]]
    assert [load_options("spacebyte", ["model.kind=retina", *words]).model.token.heads for words in own] == [2, 2, 3]
    assert main(["config", "spacebyte", "model.kind=hourglass", "model.token={heads: 8}"]) == 0
    assert "needs one head" not in capsys.readouterr().err


def test_phases_of_another_kind_share_the_limits_of_a_preset(haed: CommandLine, tmp_path: Path) -> None:
    words = ["model.kind=haed", "pretrain.steps=9"]
    said = haed.error("config", "top-down", *words, status=0)
    assert "model.kind=haed uses these limits of top-down: finetune.seconds=240\n" in said
    options = load_options("top-down", words)
    assert (options.pretrain.seconds, options.pretrain.steps, options.finetune.seconds) == (None, 9, 240)
    check_training("finetune", options)
    path = tmp_path / "mine.yaml"
    path.write_text("pretrain: {steps: 5, epochs: 0.5}\nfinetune: {steps: 6}\n")
    alone = load_options(path, ["model.kind=retina"]).train
    assert (alone.steps, alone.epochs, alone.seconds) == (11, 0.5, None)
    assert load_options("quickstart", ["model.kind=retina"]).train.seconds == 135
    assert load_options(path).train.steps is None
    with pytest.raises(ConfigError, match=r"^train has no limit. Set train.seconds, train.steps or train.epochs$"):
        check_training("train", load_options(path))


@pytest.mark.parametrize(
    ("preset", "kind", "words", "unused"),
    [
        ("hred", "model.main.kind=transformer", [], ["model.main.units"]),
        ("hred", "model.decoder.kind=lstm", ["model.decoder.heads=2", "model.encoder.hidden=300"], ["model.decoder.heads"]),
        ("quickstart", "source.kind=jsonl", SOURCE, ["source.cut", "source.image_size", "source.encoding"]),
        ("quickstart", "source.kind=text", SOURCE, ["source.image_size", "source.encoding", "source.field"]),
        ("quickstart", "source.kind=audio", SOURCE, ["source.cut", "source.image_size", "source.field", "source.newlines"]),
        ("quickstart", "source.kind=images", SOURCE, ["source.cut", "source.encoding", "source.field", "source.newlines"]),
        ("quickstart", "iem.correction=none", ["iem.cells=2048", "iem.smoothing=1"], ["iem.cells", "iem.smoothing"]),
        ("quickstart", "iem.similarity=dot", ["iem.temperature=0.1"], ["iem.temperature"]),
        ("quickstart", "optimizer.schedule=inverse_root", ["pretrain.rate_to=0.1"], ["pretrain.rate_to"]),
        ("quickstart", "finetune.trains=everything", ["finetune.decoder_steps=7"], ["finetune.decoder_steps"]),
        ("hred", "model.decoder.grams.rows=0", ["model.decoder.grams.width=8"], ["model.decoder.grams.width"]),
        ("hourglass", "model.kind=hourglass", ["train.layer_decay=0.5"], ["train.layer_decay"]),
        ("hourglass", "model.token.attention=local", ["model.token.hashes=3"], ["model.token.hashes"]),
        ("retina", "model.token.attention=rotary", ["model.token.window=64"], ["model.token.window"]),
        ("spacebyte", "model.token.attention=rotary", ["model.token.window=64", "model.token.hashes=3"], ["model.token.hashes"]),
        ("hourglass", "model.hourglass.attention=[lsh]", ["model.token.window=64", "model.token.hashes=3"], []),
    ],
)  # fmt: skip
def test_options_that_another_choice_leaves_without_effect_are_named(
    preset: str, kind: str, words: list[str], unused: list[str], haed: CommandLine
) -> None:
    said = haed.error("config", preset, kind, *words, status=0).splitlines()
    assert said == [f"{key} has no effect with {kind}" for key in unused]


def test_a_phase_that_would_train_nothing_is_refused() -> None:
    nothing = ["finetune.iem_weight=0", "finetune.decode_fraction=0"]
    check_training("pretrain", load_options("quickstart", nothing))
    with pytest.raises(ConfigError, match=r"^finetune.iem_weight and finetune.decode_fraction are both 0"):
        check_training("finetune", load_options("quickstart", nothing))
    check_training("train", load_options("hourglass", []))


def test_values_are_taken_verbatim_and_checked_and_overrides_win() -> None:
    values = {"finetune.seconds": 100.0, "source.field": "${HOME}", "name": "a", "seed": 3, "sample.prompts": ["x"]}
    options = load_options("quickstart", ["name=b"], values)
    assert (options.finetune.seconds, options.source.field, options.name) == (100.0, "${HOME}", "b")
    assert options.sample.prompts == ["x"] and values["name"] == "a"
    with pytest.raises(ConfigError, match="^threads=0: input should be greater than or equal to 1$"):
        load_options(None, [], {"threads": 0})
    with pytest.raises(ConfigError, match="^there is no option lr: use optimizer.learning_rate="):
        load_options(None, [], {"lr": 1})


def test_a_mistake_in_a_file_names_the_file_and_one_in_an_override_does_not(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("seed: x\nthreads: 0\n")
    with pytest.raises(ConfigError, match=r"mine.yaml: seed=x: is not a whole number; .*mine.yaml: threads=0: input"):
        load_options(path)
    with pytest.raises(ConfigError, match="^threads=none: .* Write threads=null$"):
        load_options(path, ["seed=1", "threads=none"])


def test_a_number_may_have_zeros_behind_the_point_and_text_is_taken_verbatim() -> None:
    assert load_options(None, ["pretrain.steps=100.0", "seed=1_000"]).pretrain.steps == 100
    given = {"source.path": "-", "source.test_pattern": r"_[0-4]\.wav$", "name": "1e3", "source.field": "[body]: #1"}
    options = load_options(None, [f"{key}={value}" for key, value in given.items()])
    assert (options.source.path, options.source.test_pattern) == ("-", r"_[0-4]\.wav$")
    assert (options.name, options.source.field) == ("1e3", "[body]: #1")
    assert load_options(None, ["source.path=null", "name='quoted'"]).source.path is None
    assert load_options(None, ["name='quoted'"]).name == "quoted"
    assert load_options(None, ['name="  my run\u3000"']).name == "my run"


def test_texts_in_lists_and_files_and_beyond_the_first_plane_are_taken_verbatim(tmp_path: Path) -> None:
    items = ["3:4", "001122", "no", "1_000", "a\N{GRINNING FACE}b", "\\\\ud83d"]
    options = load_options(
        None, ["index.queries=[3:4, 001122, no, 1_000, 'a\N{GRINNING FACE}b', '\\\\ud83d']", "name=\U00020bb7"]
    )
    assert options.index.queries == items and options.name == "\U00020bb7"
    assert load_options(None, [f"index.queries={json.dumps(items)}", f"name={json.dumps(options.name)}"]) == options
    path = tmp_path / "file.yaml"
    path.write_text("name: 1e3\nthreads: 1\nsource: {path: 0x10}\nindex: {queries: [3:4, on, 'x', 1.50]}\n")
    found = load_options(path)
    assert (found.name, found.threads, found.source.path) == ("1e3", 1, "0x10")
    assert found.index.queries == ["3:4", "on", "x", "1.50"]
    path.write_text(dump_options(options))
    assert load_options(path) == options


def test_the_address_of_a_cluster_is_the_users(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Code runs there: none is taken out of a file, be it another run's, and none is written into one."""
    path = tmp_path / "config.yaml"
    for text in ("launcher: {dask: 'tcp://evil.example:8786'}", "launcher: {dask: evil.example:1}"):
        path.write_text(text)
        caplog.clear()
        assert load_options(path).launcher.dask is None
        assert "names a Dask scheduler" in caplog.text and "launcher.dask=ADDRESS" in caplog.text
        assert load_options(path, ["launcher.dask=tcp://mine:8786"]).launcher.dask == "tcp://mine:8786"
    caplog.clear()
    path.write_text(dump_options(load_options(None, ["launcher.dask=tcp://mine:8786"])))
    assert load_options(path).launcher.dask is None and not caplog.text
    path.write_text(dump_options(load_options(None, ["launcher.dask=local"])))
    assert load_options(path).launcher.dask == "local" and not caplog.text


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("pretrain.steps=many", "pretrain.steps=many: is not a whole number"),
        ("model.decoder.kind=none", r"model.decoder.kind=none: expected one of lstm, transformer"),
        ("pretrain.decode_fraction=2", "pretrain.decode_fraction=2.*less than or equal to 1"),
        ("name=a/b", "name of a folder"),
        ("name=a\x1bb", r"a.x1bb.*control characters"),
        ("name=a\nb", "invisible characters are not allowed"),
        ("source.path=\udcff", "is not UTF-8"),
        ("iem.duplicates=true", "iem.duplicates=true needs iem.correction=none"),
        ("pretrain={part_from: 0.6, part_to: 0.5}", "pretrain.part_from=0.6 must be below"),
        ("threads=100000", "threads=100000: input should be less than or equal to 1024"),
        ("batch.context=100000", "batch.context=100000: input should be less than or equal to 65536"),
        ("seed=99999999999999999999", "seed=99999999999999999999: input should be less"),
        (f"seed={'9' * 5000}", "seed=9999.*…9*: has too many digits"),
        ("optimizer.learning_rate=1e400", "optimizer.learning_rate=1e400: must be a finite number"),
        ("seed=1e400", "seed=1e400: is not a whole number"),
        ("sample.prompts={a: 1}", r"sample.prompts=\{'a': '1'\}: expected a list, such as \[a, b\]"),
        ("index.queries=3", "index.queries=3: expected a list"),
        ("index.queries=[null]", r"index.queries\[0\] must not be null"),
        ("model.kind=megabyte", "kind=megabyte: expected one of .*; megabyte is a preset: `--config megabyte`$"),
        ("model=3", "model=3: model is a section of options. Set one option of it"),
        ("model={main: 3}", "model.main=3: model.main is a section of options"),
        ("model=null", "model=null: model is a section of options. Leave it out"),
        ("seed=???", r"seed=\?\?\?: is not a whole number"),
        ("source.pattern=/x", "source.pattern='/x': expected a glob relative to source.path"),
        ("source.pattern=**a", "source.pattern='.*a': this is not a glob"),
        ("source.valid_pattern=(", r"source.valid_pattern='\(': this is not a regular expression: missing \)"),
        ("name=   ", "name='   ' is blank. Use name=my-run."),
        ("name=" + 150 * "é", "name=é{40}… takes 300 bytes .* more than 200. Shorten it"),
        ("name=\u3000\u00a0", r"is blank. Use name=my-run."),
        ("name=a\u200bb", r"name='a\\u200bb': line ends, .* invisible characters are not allowed"),
        ("name=a\u200db", "invisible characters are not allowed"),
        ("name=\u3164", "invisible characters are not allowed"),
        ("name=\u202eabc", "invisible characters are not allowed"),
        ("source.offsets=[-1]", r"source.offsets=\[-1\] must be two byte positions in a file"),
        ("device=foo", "device='foo': expected auto .*, cpu, cuda, or cuda:1 for the second GPU$"),
        ("runs_dir=a\0b", "runs_dir='a.x00b': a NUL character is not allowed"),
        (f"name={'x' * 300}", "name='xxx.*…x*': string should have at most 200 characters"),
    ],
)
def test_what_is_out_of_bounds_names_its_option(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_options(None, [override])
    assert len(str(caught.value)) < 300 and "\n" not in str(caught.value)
    for word in ("Dict", "ListConfig", "AnyNode", "subclass", "NoneType", "Options'"):
        assert word not in str(caught.value)


@pytest.mark.parametrize("trains", ["decoder", "decoder_first"])
def test_a_decoder_that_is_trained_alone_needs_something_to_decode(trains: str) -> None:
    options = load_options(
        "quickstart", [f"finetune.trains={trains}", "finetune.decode_fraction=0", "finetune.iem_weight=1"]
    )
    with pytest.raises(ConfigError, match="finetune.decode_fraction=0 decodes nothing. Raise finetune.decode_fraction"):
        check_training("finetune", options)
    check_training("pretrain", options)


@pytest.mark.parametrize(
    "override",
    [
        "sample.prompts=" + "[" * 100_000,
        'sample.prompts=["\\ud83d\\ude00", ' + "[" * 100_000,
        "batch.context=" + "{a: " * 30_000,
        "source.path='a': " + "[" * 100_000,
        "source.path=${" + "[" * 100_000,
        "a." * 50_000 + "b=1",
    ],
    ids=["list", "quoted list", "mappings", "list after a mapping", "pattern", "key"],
)
def test_no_override_ends_a_parser(override: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_options(None, [override])
    assert len(str(error.value)) < 500
