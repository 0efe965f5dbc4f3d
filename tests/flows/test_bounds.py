"""What may be typed into a form has bounds, and Prefect's server keeps and lists whatever is within them."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect.utilities.callables import parameter_schema

from flows.flows import FLOWS
from flows.forms import add_run_choices
from flows.middleware import VALUES
from tests.flows.api import python

BEYOND = [92233720368547760001, -92233720368547760001, 1e308, -1e308]


def inner(schema: dict[str, Any], definitions: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    yield path, schema
    for key in ("anyOf", "allOf", "oneOf"):
        for choice in schema.get(key, ()):
            yield from inner(choice, definitions, path)
    if "items" in schema:
        yield from inner(schema["items"], definitions, f"{path}[]")
    for name, field in schema.get("properties", {}).items():
        yield from inner(field, definitions, f"{path}.{name}")


def form(flow: Any, runs: list[str]) -> list[tuple[str, dict[str, Any]]]:
    """All schemas of a form, with where each stands."""
    made = parameter_schema(flow)
    add_run_choices(made.properties, runs)
    return list(inner({"properties": made.properties}, made.definitions or {}, flow.name))


@pytest.mark.parametrize("runs", [[], ["a", "b"]], ids=["no runs", "runs"])
@pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: str(flow.name))
def test_every_number_text_and_list_of_every_form_has_bounds(flow: Any, runs: list[str]) -> None:
    found = form(flow, runs)
    assert len(found) > 2
    for place, schema in found:
        assert {"anyOf", "enum", "const", "type", "properties"} & set(schema), place
        if "enum" in schema or "const" in schema:
            continue
        if schema.get("type") in ("integer", "number"):
            least = schema.get("minimum", schema.get("exclusiveMinimum"))
            most = schema.get("maximum", schema.get("exclusiveMaximum"))
            assert least is not None and most is not None, place
            assert -(2**63) <= least <= most < 2**63 and math.isfinite(least) and math.isfinite(most), place
        elif schema.get("type") == "string":
            assert schema.get("maxLength", math.inf) <= 1 << 17, place
        elif schema.get("type") == "array":
            assert schema.get("maxItems", math.inf) <= 10_000, place
        elif schema.get("type") == "object":
            assert schema["additionalProperties"] is False, place


def filled(schema: dict[str, Any], definitions: dict[str, Any], most: bool) -> Any:
    """A value whose numbers are as large, or as small, as a form takes them, and whose texts are as long."""
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    if "enum" in schema:
        return schema["enum"][-1 if most else 0]
    if choices := [choice for choice in schema.get("anyOf", ()) if choice.get("type") != "null"]:
        return filled(min(choices, key=lambda choice: "enum" in choice), definitions, most)
    kind = schema.get("type")
    if kind in ("integer", "number"):
        if most:
            return schema["maximum"] if "maximum" in schema else math.nextafter(schema["exclusiveMaximum"], 0)
        return schema["minimum"] if "minimum" in schema else 5e-324
    if kind == "string":
        return ("seed=" if schema.get("pattern") == VALUES else "") + "é" * min(schema["maxLength"] - 5, 5000)
    if kind == "array":
        return [filled(schema["items"], definitions, most)]
    if kind == "boolean":
        return most
    return {name: filled(field, definitions, most) for name, field in schema["properties"].items()}


def check() -> None:
    """Keeps the extremes of every form, refuses what is beyond, and lists all flow runs afterwards."""
    from prefect.client.orchestration import get_client
    from prefect.exceptions import PrefectHTTPStatusError

    from flows.deployments import build_deployments, offer_runs

    with get_client(sync_client=True) as client:
        refused, kept = set[str](), 0
        ids = {deployment.flow_name: deployment.apply() for deployment in build_deployments("place")}
        offer_runs(ids, [])
        for id in ids.values():
            schema: Any = client.read_deployment(id).parameter_openapi_schema
            definitions = schema.get("definitions") or {}
            for most in (False, True):
                given = {name: filled(field, definitions, most) for name, field in schema["properties"].items()}
                run = client.create_flow_run_from_deployment(id, parameters=given)
                assert client.read_flow_run(run.id).parameters == given
                kept += 1
                for name, field in schema["properties"].items():
                    (plain, *_) = [each for _, each in inner(field, definitions) if "type" in each]
                    is_new = (text := json.dumps(plain, sort_keys=True)) not in refused  # forms share their fields
                    refused.add(text)
                    for beyond in BEYOND if is_new and plain["type"] in ("integer", "number") else ():
                        with pytest.raises(PrefectHTTPStatusError):
                            client.create_flow_run_from_deployment(id, parameters=given | {name: beyond})
            with pytest.raises(PrefectHTTPStatusError, match="409"):  # a mistyped field
                client.create_flow_run_from_deployment(id, parameters=given | {"pretrain_second": 3})
            required = schema.get("required") or []
            assert ("run" in schema["properties"]) == ("run" in required)
            for name in required:  # a run to read is named: none is taken instead
                without = {key: value for key, value in given.items() if key != name}
                for wrong in (without, given | {name: [] if name == "runs" else ""}):
                    with pytest.raises(PrefectHTTPStatusError):
                        client.create_flow_run_from_deployment(id, parameters=wrong)
        assert len(client.read_flow_runs()) == kept == 2 * len(FLOWS)


@pytest.mark.nightly
def test_a_server_keeps_the_extremes_of_every_form_and_lists_them(tmp_path: Path, api: str) -> None:
    # Prefect's client leaves threads behind, which workers that are forked from this process later would trip over.
    script = "from tests.flows.test_bounds import check; check()"
    done = python(tmp_path, "-c", script, PREFECT_API_URL=api, PREFECT_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr[-5000:]
