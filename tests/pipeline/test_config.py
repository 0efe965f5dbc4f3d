from dataclasses import fields, is_dataclass
from pathlib import Path

import numpy as np
import pytest

from pipeline.config import ConfigError, dump, load, presets
from pipeline.options import Options
from tests.conftest import TINY


@pytest.mark.parametrize("preset", presets())
def test_presets_resolve_and_read_back(preset: str, tmp_path: Path) -> None:
    options = load(preset)
    path = tmp_path / "config.yaml"
    path.write_text(dump(options))
    assert load(path) == options and options.name == preset


@pytest.mark.parametrize("preset", presets())
def test_presets_take_a_step_on_tiny_data(preset: str, tiny: list[str], tmp_path: Path) -> None:
    from pipeline.sharding import shard
    from pipeline.training import finetune, pretrain

    own = load(preset)
    if own.source.kind == "images":
        folder = tmp_path / "images"
        folder.mkdir()
        images = np.random.default_rng(0).integers(0, 256, (300, 3072), dtype=np.uint8)
        np.savez(folder / "train_data_batch_1.npz", data=images)
        np.savez(folder / "val_data.npz", data=images[:2])
        source = ["source.kind=images", f"source.path={folder}", "batch.context=256"]
    else:
        source = ["batch.context=16"]
    keep = [item for item in tiny if not item.startswith(("model.", "optimizer."))]
    small = ["batch.sequences=2", "model.decoder.width=32", "pretrain.epochs=null", "finetune.epochs=null"]
    options = load(preset, [*keep, *small, *source, "pretrain.steps=1", "finetune.steps=1", "validation.times=0"])
    shard(options)
    assert pretrain(options).steps == 1 and finetune(options).steps == 1


@pytest.mark.parametrize(
    ("preset", "overrides", "message"),
    [
        ("quickstat", [], "did you mean quickstart"),
        ("nowhere.yaml", [], "no configuration file at nowhere.yaml"),
        (None, ["pretrain.stps=3"], "stps.*Did you mean: 'steps'"),
        (None, ["pretrain.steps=many"], "pretrain.steps.*'many'"),
        (None, ["model.decoder.kind=gru"], r"model.decoder.kind.*\['lstm', 'transformer'\]"),
        (None, ["pretrain.decode_fraction=2"], "pretrain.decode_fraction=2.*less than or equal to 1"),
        (None, ["model.main.width"], "not of the form key=value"),
        (None, ["name=a/b"], "name of a folder"),
        (None, ["pretrain.part_from=0.6", "pretrain.part_to=0.5"], "pretrain.part_from=0.6 must be below"),
    ],
)
def test_wrong_configurations_say_what_is_wrong(preset: str | None, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load(preset, overrides)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["- a\n- b\n", "a: [", "model: 3\n", "name: !!python/object:os.system x\n", "\x00"])
def test_files_that_are_not_configurations(content: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match="bad.yaml"):
        load(path)


def test_every_option_is_described() -> None:
    def check(kind: type, prefix: str) -> None:
        for field in fields(kind):
            metadata = getattr(field.type, "__metadata__", None)
            if is_dataclass(field.type):
                check(field.type, f"{prefix}{field.name}.")
            else:
                assert metadata and metadata[0].description, prefix + field.name

    check(Options, "")


def test_tiny_overrides_are_valid() -> None:
    assert load("quickstart", TINY).model.main.width == 16


def test_text_is_taken_verbatim() -> None:
    given = {"source.path": "-", "source.test_pattern": r"_[0-4]\.wav$", "name": "1e3", "source.field": "[body]: #1"}
    options = load(None, [f"{key}={value}" for key, value in given.items()])
    assert (options.source.path, options.source.test_pattern) == ("-", r"_[0-4]\.wav$")
    assert (options.name, options.source.field) == ("1e3", "[body]: #1")
    assert load(None, ["source.path=null", "name='quoted'"]).source.path is None
    assert load(None, ["name='quoted'"]).name == "quoted"
