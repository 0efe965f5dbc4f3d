"""What `haed serve` keeps and says is for its user alone: modes of files, its password, passwords that were typed."""

import os
import signal
import stat
import subprocess
import sys
import threading
import urllib.request
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2
import pytest
from prefect.exceptions import PrefectHTTPStatusError
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools.validation import ValidationError, validate

from flows.environment import keep_private
from flows.flows import FLOWS
from flows.middleware import WORDS, explain_errors
from flows.serve import _load_or_create_password, _prepare_own_server
from flows.server import explain_refusal, is_server_healthy
from tests.flows.api import PATIENCE, clean_environment, free_ports, haed, until
from tests.flows.test_bounds import form

TYPED = ["https://user:hunter2@example.org/data", "s3://key:hun/ter2@bucket", "https://h/x?X-Amz-Signature=hunter2"]
TYPED += ["https://hunter2@host/x"]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_no_text_of_any_form_takes_an_address_with_a_password_and_every_pattern_has_words() -> None:
    patterns = [
        {each.get("pattern") for _, each in form(flow, []) if each.get("type") == "string" and "enum" not in each}
        for flow in FLOWS
    ]
    assert all(patterns) and set[str | None]().union(*patterns) == {*WORDS}


@pytest.mark.parametrize("typed", TYPED)
@pytest.mark.parametrize("given", ["source", "overrides"])
def test_a_password_in_an_address_is_refused_in_words_that_do_not_repeat_it(typed: str, given: str) -> None:
    schema = parameter_schema(FLOWS[0]).model_dump()
    value: Any = typed if given == "source" else [f"source.path={typed}"]
    with pytest.raises(ValidationError) as refused:
        validate({given: value}, schema, raise_on_error=True)
    said = explain_errors({"detail": [f"Error creating flow run: {refused.value}"]})["detail"][0]
    assert "hunter2" in str(refused.value).replace("/ter2", "ter2") and "Leave it out" in said
    assert "hun" not in said and "\\s" not in said and given in said
    (error, *_) = validate({given: value}, schema)
    assert explain_errors(error.message) == next(iter(WORDS.values()))
    plain = {"source": "http://host:8080/a/b", "overrides": ["source.path=s3://bucket/a:b"]}
    validate(plain, schema, raise_on_error=True)


def test_the_prefect_home_is_made_private_and_a_folder_of_others_is_not(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o755)
    (home / "prefect.db").write_text("")
    keep_private(home)
    assert mode(home) == 0o700
    other = tmp_path / "other"
    other.mkdir(mode=0o755)
    (other / "thesis.txt").write_text("")
    keep_private(other)
    assert mode(other) == 0o755 and mode(other / "prefect.db") == 0o600


@pytest.mark.parametrize(
    ("host", "asks"), [("127.0.0.1", False), ("localhost", False), ("0.0.0.0", True), ("::", True)]
)
def test_a_server_that_others_reach_asks_for_a_password(
    host: str, asks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("PREFECT")]:
        monkeypatch.delenv(name)
    for name in ("API_URL", "UI_URL", "UI_API_URL", "API_AUTH_STRING", "SERVER_API_AUTH_STRING"):
        monkeypatch.setenv(f"PREFECT_{name}", "x")  # which is taken back afterwards
        monkeypatch.delenv(f"PREFECT_{name}")
    monkeypatch.setenv("PREFECT_SERVER_CORS_ALLOWED_ORIGINS", "")
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    _, secret = _prepare_own_server(host, free_ports()[0], False, ())
    assert bool(secret) == asks == (tmp_path / "password").exists()
    assert os.environ.get("PREFECT_SERVER_API_AUTH_STRING", "") == secret
    assert not asks or mode(tmp_path / "password") == 0o600


def test_a_password_that_was_not_written_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    (tmp_path / "password").touch()
    assert _load_or_create_password() == _load_or_create_password() == (tmp_path / "password").read_text() != ""
    assert mode(tmp_path / "password") == 0o600 and [each.name for each in tmp_path.iterdir()] == ["password"]
    (tmp_path / "password").write_text("haed:wörter")
    with pytest.raises(RuntimeError, match="password that is not ASCII. Delete it"):
        _load_or_create_password()


def test_what_a_server_that_answers_already_would_not_have_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("API_URL", "UI_URL", "UI_API_URL", "SERVER_CORS_ALLOWED_ORIGINS"):
        monkeypatch.setenv(f"PREFECT_{name}", "")  # put back afterwards
    (tmp_path / "api").mkdir()
    health = tmp_path / "api" / "health"
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_address[1]
        for said, is_server in (("hello", False), ("true", True)):
            health.write_text(said)
            assert is_server_healthy(f"http://127.0.0.1:{port}") == is_server
        with pytest.raises(RuntimeError, match="--allowed-host do not change it. Stop it, or choose another port"):
            _prepare_own_server("127.0.0.1", port, True, ())
        server.shutdown()


@pytest.mark.parametrize(
    ("variable", "said"),
    [
        ("", "asks for a password. Set PREFECT_API_AUTH_STRING"),
        ("PREFECT_API_AUTH_STRING", "asks for another password"),
        ("PREFECT_API_KEY", "does not take the key in PREFECT_API_KEY"),
    ],
)
def test_a_server_that_asks_for_a_password_says_where_to_put_it(
    variable: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PREFECT_API_AUTH_STRING", "PREFECT_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "a:b")
    request = httpx2.Request("GET", "http://h/api/flows")

    def refuse(status: int) -> None:
        response = httpx2.Response(status, request=request)
        with explain_refusal("http://h/api"):
            raise PrefectHTTPStatusError(str(status), request=request, response=response)

    with pytest.raises(PermissionError, match=f"^http://h/api {said}"):
        refuse(401)
    with pytest.raises(PrefectHTTPStatusError):
        refuse(500)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_haed_serve_says_where_its_password_is_and_keeps_everything_to_its_user(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o755)
    port, board = free_ports()
    ours = {"PREFECT_SERVER_CORS_ALLOWED_ORIGINS": "https://ours.example"}
    where = clean_environment(PREFECT_HOME=str(home), PYTHONUNBUFFERED="1", **ours)
    command = [sys.executable, "-m", "flows.cli", "serve", "--password", "--port", str(port)]
    command += ["--tensorboard-port", str(board)]
    with (
        open(tmp_path / "said", "wb") as said,
        subprocess.Popen(command, cwd=tmp_path, env=where, stdout=said, stderr=said) as process,
    ):
        until(PATIENCE, lambda: "To schedule: " in (tmp_path / "said").read_text())
        secret = (home / "password").read_text()

        known = tuple(secret.split(":", 1))

        def ask(path: str, body: Any, auth: Any = None, **headers: str) -> httpx2.Response:
            address = f"http://127.0.0.1:{port}/api{path}"
            return httpx2.post(address, json=body, auth=auth, headers=headers, timeout=PATIENCE)

        def ask_board() -> bool:
            with urllib.request.urlopen(f"http://127.0.0.1:{board}", timeout=PATIENCE) as answer:
                return bool(answer.status == 200)

        assert ask("/deployments/filter", {}).status_code == 401
        assert until(PATIENCE, ask_board)  # it has none, as docs/reference/security.md warns
        for origin, expected in (("https://ours.example", 200), ("https://evil.example", 403)):
            assert ask("/deployments/filter", {}, known, Origin=origin).status_code == expected
        found = ask("/deployments/filter", {}, known).json()
        whole = next(each["id"] for each in found if each["tags"] == ["haed"])
        refused = ask(f"/deployments/{whole}/create_flow_run", {"parameters": {"source": TYPED[0]}}, known)
        assert refused.status_code == 409 and "Leave it out" in refused.text
        assert "hunter2" not in refused.text and "\\\\s" not in refused.text
        other = {"PREFECT_API_URL": f"http://127.0.0.1:{port}/api", "HOME": str(tmp_path)}
        for words in ("deploy --pool any", "serve --no-server", f"serve --port {port}"):
            for given in ({}, {"PREFECT_API_AUTH_STRING": "a:wrong"}):
                said_by = haed(tmp_path, *words.split(), **other, **given)
                assert said_by.returncode == 1 and len(said_by.stderr.splitlines()) == 1, said_by.stderr
                assert f"asks for {'another' if given else 'a'} password. Set PREFECT_API_AUTH_STRING" in said_by.stderr
        files = [path for path in home.rglob("*") if path.is_file() and path.name != "serve.lock"]
        assert mode(home) == 0o700 and {"prefect.db", "server.log"} <= {path.name for path in files}
        assert {path.name: mode(path) for path in files if mode(path) & 0o077} == {}
        process.send_signal(signal.SIGINT)
        process.wait(PATIENCE)
    shown = (tmp_path / "said").read_text() + (home / "server.log").read_text()
    assert secret not in shown and secret.partition(":")[2] not in shown and str(home / "password") in shown
