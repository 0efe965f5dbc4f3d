"""Pages beside Prefect's: who gets which, and that both ask for the same password."""

import base64
from typing import Any

import pytest
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from flows.serving.asgi import RunPagesMiddleware

UUID = "0b2f4d3e-7a51-4f6e-9d0c-3c1f2a4b5d6e"


def site(secret: str = "") -> TestClient:
    return TestClient(
        RunPagesMiddleware(PlainTextResponse("Prefect"), PlainTextResponse("pages"), secret), "http://127.0.0.1:4200"
    )


def basic(secret: str) -> dict[str, str]:
    return {"Authorization": f"Basic {base64.b64encode(secret.encode()).decode()}"}


@pytest.mark.parametrize(
    ("path", "whose"),
    [
        ("/", "Prefect"),
        ("/v2/runs", "Prefect"),
        ("/api/health", "Prefect"),
        ("/runsheet", "Prefect"),
        (f"/runs/flow-run/{UUID}", "Prefect"),
        ("/runs", "pages"),
        ("/runs/", "pages"),
        ("/runs/flow-run/", "pages"),
    ],
)
def test_the_pages_have_runs_and_prefect_all_else(path: str, whose: str) -> None:
    assert site().get(path).text == whose


def test_a_password_is_asked_for_once(secret: str = "haed:sesam öffne") -> None:
    client = site(secret)
    assert client.get("/").text == "Prefect"  # which asks for it itself
    refused = client.get("/runs/")
    assert refused.status_code == 401 and refused.headers["www-authenticate"].startswith("Basic ")
    wrong: list[dict[str, Any]] = [basic("haed:other"), {"Authorization": "Basic"}, {"Authorization": "Bearer x"}]
    wrong += [{"Authorization": "Basic é".encode()}, {"Cookie": "haed-pages=x"}, {"Cookie": 'haed-pages="\\377'}]
    for headers in wrong:
        assert client.get("/runs/", headers=headers).status_code == 401
        assert client.post("/enter", headers=headers).status_code == 401
    assert client.get("/runs/", headers=basic(secret)).text == "pages"

    assert "localStorage" in client.get("/enter").text and not client.cookies
    told = client.post("/enter", headers=basic(secret))
    assert told.status_code == 204
    cookie = told.headers["set-cookie"]
    assert all(word in cookie for word in ("HttpOnly", "SameSite=Lax", "Path=/runs")) and "sesam" not in cookie
    assert client.get("/runs/").text == "pages"
