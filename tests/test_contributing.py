"""CONTRIBUTING.md: its chunk encoder of one's own, as it stands there."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from pydantic import TypeAdapter

from haed.options import EncoderOptions, ModelOptions
from pipeline import open_run
from pipeline.cli import main
from pipeline.config import ConfigError, Options, check_options, dump_options, load_options
from pipeline.config.schema import KINDS, option_names, schema_options

TEXT = (Path(__file__).resolve().parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
BAG = ["model.encoder.kind=bag"]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package with the encoder; what it registers in this process is taken back."""
    (module,), (points,) = (
        re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL),
        re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL),
    )
    info = tmp_path / "packages" / "my_encoder-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-encoder\nVersion: 1\n")
    (info / "entry_points.txt").write_text(re.sub(r'project\.entry-points\."(.*)"', r"\1", points).replace('"', ""))
    (info.parent / "my_encoder.py").write_text(module)
    monkeypatch.syspath_prepend(str(info.parent))
    yield
    sys.modules.pop("my_encoder", None)
    KINDS["model.encoder.kind"].option_classes.clear()
    schema_options.cache_clear()
    option_names.cache_clear()


@pytest.mark.usefixtures("installed")
def test_an_encoder_of_ones_own_is_trained_with_an_option_of_its_own(
    options: Options, tiny: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*tiny, *BAG, "model.encoder.power=0.5", "name=bag", "pretrain.steps=2", "validation.times=0"]
    assert main(["pretrain", "--config", "quickstart", *words]) == 0
    messages = capsys.readouterr().err
    assert "model.encoder." not in messages and "no effect with model.decoder.kind=lstm" in messages
    run = open_run("bag", options.runs_dir)
    assert run.system.encoder.power == 0.5 and type(run.system.encoder).__name__ == "BagEncoder"
    assert (
        yaml.safe_load((Path(options.runs_dir) / "bag" / "config.yaml").read_text())["model"]["encoder"]["power"] == 0.5
    )
    assert main(["pretrain", str(Path(options.runs_dir) / "bag"), "pretrain.steps=3"]) == 0  # goes on from there


@pytest.mark.usefixtures("installed")
def test_its_options_are_listed_checked_and_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "quickstart", *BAG]) == 0
    assert "    power: 1.0\n" in capsys.readouterr().out
    options = load_options("quickstart", [*BAG, "model.encoder.power=0.25", "name=run-${model.encoder.power}"])
    assert options.name == "run-0.25" and isinstance(options.model.encoder, EncoderOptions)
    path = tmp_path / "config.yaml"
    path.write_text(dump_options(options))
    assert load_options(path) == options == check_options(options)
    for word, message in (
        ("power=2", "model.encoder.power=2: input should be less than or equal to 1"),
        ("power=a", "model.encoder.power=a: is not a number"),
        ("powr=1", "there is no option model.encoder.powr; did you mean model.encoder.power=1"),
        ("width=0", "model.encoder.width=0: input should be greater than or equal to 1"),
    ):
        with pytest.raises(ConfigError, match=f"^{message}"):
            load_options("quickstart", [*BAG, f"model.encoder.{word}"])
    with pytest.raises(
        ConfigError, match="^model.encoder.power belongs to model.encoder.kind=bag: leave it out, or set"
    ):
        load_options("quickstart", ["model.encoder.power=1"])
    assert "bag" in TypeAdapter(ModelOptions).json_schema()["$defs"]["EncoderOptions"]["properties"]["kind"]["enum"]
    assert "power" not in dump_options(load_options("quickstart"))
    with pytest.raises(
        ConfigError, match="expected one of bag, mlp, linear, lstm, transformer. Write model.encoder.kind=bag"
    ):
        load_options("quickstart", ["model.encoder.kind=bagg"])


def test_without_its_package_a_kind_is_not_known() -> None:
    with pytest.raises(ConfigError, match="kind=bag: expected one of mlp, linear, lstm, transformer$"):
        load_options("quickstart", BAG)
    with pytest.raises(ConfigError, match="there is no option model.encoder.power"):
        load_options("quickstart", ["model.encoder.power=1"])
