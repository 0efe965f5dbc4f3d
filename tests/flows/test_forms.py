"""What is typed into a form is what trains: nothing typed is the preset's, a default that is typed is not."""

import pickle
from dataclasses import dataclass
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from data.options import SourceOptions
from flows.forms import optional_copy, read_form
from haed.options import IEMOptions, ModelOptions
from pipeline import config
from pipeline.config import FinetuneOptions


def typed(group: type, **values: Any) -> Any:
    return TypeAdapter(optional_copy(group)).validate_python(values)


def read(*overrides: str, stage: str = "haed", **fields: Any) -> dict[str, Any]:
    return read_form(stage, {"preset": "quickstart", "overrides": list(overrides)} | fields)[2]


def test_what_is_given_counts_and_the_rest_is_the_presets() -> None:
    groups = {
        "model": typed(ModelOptions, main={"layers": 4, "heads": None}, decoder={"previous": False}, encoder=None),
        "iem": typed(IEMOptions, similarity="dot", smoothing=0),
        "finetune": typed(FinetuneOptions, steps=7, rate_to=0.05, seconds=None),
        "sources": typed(SourceOptions),
        "batch": None,
    }
    values = read(**pickle.loads(pickle.dumps(groups)))
    assert values == {
        "model.main.layers": 4,
        "model.decoder.previous": False,
        "iem.smoothing": 0.0,
        "iem.similarity": "dot",
        "finetune.steps": 7,
        "finetune.rate_to": 0.05,
    }
    options = config.load_options("quickstart", [], values)
    assert options.model.main.layers == 4 and options.iem.similarity == "dot"  # the schema's; the preset has others
    assert options.finetune.seconds == 45 and options.finetune.iem_weight == 1  # the preset's
    budget = read(seconds=5, **groups)
    assert (budget["finetune.steps"], budget["pretrain.steps"]) == (7, None)  # stronger than a budget in seconds


def test_another_kind_of_model_is_a_field_and_its_budget_is_of_one_phase() -> None:
    values = read(seconds=30, model=typed(ModelOptions, kind="top_down", token={"width": 128}))
    assert values["train.seconds"] == 30 and not any(key.startswith("pretrain") for key in values)
    options = config.load_options("quickstart", [], values)
    assert (options.model.kind, options.model.token.width, options.train.seconds) == ("top_down", 128, 30)
    budget = read(seconds=18)
    assert (budget["pretrain.seconds"], budget["finetune.seconds"]) == pytest.approx((12, 6))
    assert read("model.kind=retina", stage="train", seconds=30)["train.seconds"] == 30
    mixed = read(model=typed(ModelOptions, kind="retina", main={"layers": 2}))
    with pytest.raises(config.ConfigError, match="model.main.layers belongs to model.kind=haed, .*model.retina.…"):
        config.load_options("quickstart", [], mixed)


def test_fields_keep_their_bounds_and_choices_and_are_one_empty_box_each() -> None:
    for group, wrong in (
        (ModelOptions, {"main": {"layers": 0}}),
        (IEMOptions, {"similarity": "sine"}),
        (SourceOptions, {"kind": "nothing"}),
        (FinetuneOptions, {"step": 3}),
    ):
        with pytest.raises(ValidationError):
            typed(group, **wrong)
    schema = TypeAdapter(optional_copy(ModelOptions)).json_schema()
    main, decoder = schema["$defs"]["MainOptions"], schema["$defs"]["DecoderOptions"]["properties"]
    words = "Blocks of the transformer (paper: 6) or layers of the LSTM (paper: 1). Unit: layers."
    blocks = {"title": "layers", "description": words, "type": "integer", "minimum": 1, "maximum": 1024}
    assert main["properties"]["layers"] == blocks and not main.get("required")
    assert decoder["previous"]["enum"] == [True, False]  # three states: a switch has two
    assert "stdlib" in TypeAdapter(optional_copy(SourceOptions)).json_schema()["properties"]["kind"]["enum"]
    assert schema["$defs"]["MainOptions"]["properties"]["units"]["description"].endswith(
        "Only with kind=lstm. For null, use overrides."
    )
    steps = TypeAdapter(optional_copy(FinetuneOptions)).json_schema()["properties"]["steps"]
    assert "For null, use overrides." in steps["description"]


def test_an_option_that_is_declared_without_bounds_is_named() -> None:
    @dataclass(kw_only=True)
    class Bare:
        number: int = 1

    with pytest.raises(TypeError, match="Bare.number has no Field with bounds and a description, such as Annotated"):
        optional_copy(Bare)
