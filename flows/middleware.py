"""ASGI middleware around Prefect's server: refused values, plain errors, and the pages of runs at the same address.

- `StorableBodyMiddleware` refuses values that the server could store but never show again. The server reads JSON with
  the standard library and writes it with orjson, which supports neither integers of more than 64 bits nor lone
  surrogates. One such value in the parameters, name or tags of a flow run would break the list of all flow runs.
- `PlainErrorMiddleware` explains the messages of form checks. They come from jsonschema, which repeats the value and
  the pattern that it does not match.
- `RunPagesMiddleware` serves the pages of runs, and leads from them to forms of Prefect that are filled in:
  `/runs/NAME/form/index?space=contexts&overrides=index.kind=flat`. `/runs/.form/haed` leads to an empty one. With a
  password, `/enter` asks for it and gives it to Prefect's UI and to the pages, which set a cookie. `/enter#PASSWORD`
  does the same; browsers do not send the part after `#`. `/leave` removes the cookie. Without it a browser asks for
  name and password, which programs send as they do to Prefect's API. Who cancels that sees the form of `/enter`.
"""

import base64
import hashlib
import hmac
import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
from starlette.datastructures import Headers, QueryParams
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, RedirectResponse, Response

from data.urls import NO_SECRET, redact_urls
from flows.environment import deployment_suffix
from haed.options import NO_ADDRESS
from pipeline.console import cut_middle

# For forms: an option with values to try, or an item that was added and left empty.
VALUES = NO_SECRET + r"(?=\s*[\w.]+\s*=|$)"
DEEPEST = 100  # objects and lists within each other
_MOST = 2**63 - 1
_MOST_BYTES, _MOST_VALUES = 16 << 20, 1_000_000  # of a request
_SHOWN = 80  # characters


def find_unstorable_value(body: bytes) -> str | None:
    """Return why a request's JSON cannot be stored; None if it can, or if it is not JSON (the server reports that)."""
    try:
        value = json.loads(body)
    except RecursionError:
        return f"lists and objects are nested too deeply. Use at most {DEEPEST} levels"
    except ValueError as error:  # also an integer of thousands of digits
        return str(error).partition(":")[0] + ". Give a smaller one" if "digits" in str(error) else None
    left: list[tuple[Any, str, int]] = [(value, "", 0)]
    count = 0
    while left:
        each, place, depth = left.pop()
        count += 1
        if count > _MOST_VALUES:
            return f"it has more than {_MOST_VALUES:,} values"
        where = f"{_shorten_text(place)}: " if place else ""
        if depth > DEEPEST:
            return f"{where}lists and objects are nested too deeply. Use at most {DEEPEST} levels"
        if isinstance(each, dict):
            left += [(name, place, depth) for name in each]
            left += [(item, f"{place}.{name}".lstrip("."), depth + 1) for name, item in each.items()]
        elif isinstance(each, list):
            left += [(item, f"{place}[{number}]", depth + 1) for number, item in enumerate(each)]
        elif isinstance(each, str):
            if any("\ud800" <= character <= "\udfff" for character in each):
                return f"{where}{_shorten_text(repr(each))} holds half of a character (a lone surrogate). Remove it"
            if "\0" in each and place.startswith(("parameters", "name", "tags")):
                return f"{where}{_shorten_text(repr(each))} holds a NUL character. Remove it"
        elif isinstance(each, float):
            if not math.isfinite(each):
                return f"{where}{each} is not a number that can be stored. Use one such as 10"
        elif isinstance(each, int) and abs(each) > _MOST:
            return f"{where}{_shorten_text(str(each))} is too large to be stored. Use at most {_MOST}"
    return None


def _shorten_text(text: str) -> str:
    """Return a text without its middle if it is long, with characters escaped that an answer cannot hold."""
    return cut_middle(text.encode(errors="backslashreplace").decode(), _SHOWN)


class StorableBodyMiddleware:
    """ASGI middleware that refuses requests with values that the server could store but not show."""

    def __init__(self, application: Any) -> None:
        self._application = application

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass the request on, or answer 422 with a reason."""
        path = scope.get("path", "")
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS") or not path.startswith("/api/"):
            return await self._application(scope, receive, send)
        body = b""
        try:
            async for block in Request(scope, receive).stream():
                body += block
                if len(body) > _MOST_BYTES:
                    problem = {"detail": f"a request may have at most {_MOST_BYTES >> 20} MiB"}
                    return await JSONResponse(problem, 413)(scope, receive, send)
        except ClientDisconnect:
            return
        if body and (reason := find_unstorable_value(body)):
            return await JSONResponse({"detail": reason}, 422)(scope, receive, send)
        left: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_again() -> Any:
            return left.pop() if left else await receive()

        await self._application(scope, receive_again, send)


_CHECKED = re.compile(r"/api/(deployments/[^/]+/create_flow_run(/bulk)?|deployments/?([^/]+)?|ui/schemas/validate)")
_OF_NO_KIND = "is not valid under any of the given schemas"
_LONGEST = 600  # characters of a message, which repeats what was typed
WORDS = {
    NO_SECRET: (
        "an address must not hold a name, password or signature, because it is stored and shown. Leave "
        "it out, as in s3://BUCKET/FOLDER. Keys come from the environment, see docs/reference/security.md"
    ),
    VALUES: "values to try are KEY=VALUE,VALUE, such as seed=0,1,2. An address must not hold a password",
    NO_ADDRESS: "a term of the loss is WEIGHT*NAME, such as 0.01*center",
}


def explain_errors(value: Any) -> Any:
    """Return the JSON of an answer with patterns replaced by explanations and secrets by stars."""
    if isinstance(value, dict):
        return {key: explain_errors(each) for key, each in value.items()}
    if isinstance(value, list):
        return [explain_errors(each) for each in value]
    if not isinstance(value, str):
        return value
    for pattern, words in WORDS.items():
        if (end := f" does not match {pattern!r}") in value:
            where, reason, _ = value.partition(end)[0].partition("Failure reason: ")
            return f"{where}{words}" if reason else words
    if value.startswith("{") and value.endswith(_OF_NO_KIND):  # of a group of fields: Prefect says no more here
        return "one of these values is not allowed. The message that appears at the edge of the page names it"
    before, is_found, after = value.partition(_OF_NO_KIND)
    if is_found:
        where, colon, value_of_field = before.rpartition("Failure reason: ")
        kinds = "a whole number, a choice, a shorter text or a group of fields"
        value = f"{where}{colon}{cut_middle(value_of_field, _SHOWN)}is no value for this field, which may want {kinds}{after}"
    return cut_middle(redact_urls(value), _LONGEST)


class PlainErrorMiddleware:
    """ASGI middleware that rewrites the error messages of form checks."""

    def __init__(self, application: Any) -> None:
        self._application = application

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer as the wrapped application does, with rewritten error messages."""
        if scope["type"] != "http" or scope["method"] == "GET" or not _CHECKED.fullmatch(scope.get("path", "")):
            return await self._application(scope, receive, send)
        start: dict[str, Any] = {}
        body = b""

        async def look(message: Any) -> None:
            nonlocal body
            if message["type"] == "http.response.start":
                start.update(message)
                return
            body += message.get("body", b"")
            if message.get("more_body"):
                return
            answer = body
            if start["status"] in (400, 409, 422) or scope["path"].endswith("/validate"):
                with suppress(ValueError):
                    answer = json.dumps(explain_errors(json.loads(body))).encode()
            kept = [(name, value) for name, value in start["headers"] if name.lower() != b"content-length"]
            await send(start | {"headers": [*kept, (b"content-length", str(len(answer)).encode())]})
            await send({"type": "http.response.body", "body": answer})

        # Compressed answers could not be read.
        headers = [(name, value) for name, value in scope["headers"] if name.lower() != b"accept-encoding"]
        await self._application(scope | {"headers": headers}, receive, look)


COOKIE = "haed-pages"
_SECONDS = 30 * 24 * 3600
_ENTER = (  # also what a browser shows of a page without its password; then that page is shown after it
    "<!doctype html><html lang=en><meta name=viewport content='width=device-width'><title>haed serve: password</title>"
    "<form hidden><label>Password (haed serve printed "
    "where it is kept): <input type=password autocomplete=current-password autofocus></label> "
    "<button>Enter</button> <output></output></form>"
    "<script>const form = document.querySelector('form'), here = location.pathname === '/enter';"
    "async function enter(password) {"
    "const bytes = new TextEncoder().encode(password.includes(':') ? password : 'haed:' + password);"
    "const secret = btoa(String.fromCharCode(...bytes));"
    "const answer = await fetch('/enter', {method: 'POST', headers: {Authorization: 'Basic ' + secret}});"
    "if (!answer.ok) { form.hidden = false; form.querySelector('output').value = 'Wrong password.'; return }"
    "localStorage.setItem('prefect-password', secret); here ? location.replace('/v2/') : location.reload() }"
    "form.onsubmit = event => { event.preventDefault(); enter(form.querySelector('input').value.trim()) };"
    "let shared = location.hash.slice(1); try { shared = decodeURIComponent(shared) } catch {}"  # of no such encoding
    "if (here && shared) enter(shared); else form.hidden = false</script>"
)
_FORM = re.compile(r"/runs/(?:\.|([^/]+)/)form/([a-z]+)")
_GUARDED = re.compile(r"/(?:api/.*|openapi\.json|docs|redoc)", re.DOTALL)  # by the password, beside the pages
_FLOW_RUNS = re.compile(r"/runs/([^/]+)/flow-runs")
_LISTED = 10  # flow runs on the page of a run
# Flows whose forms name a run, to continue it by its own configuration.
_BY_NAME = ("pretrain", "finetune", "train", "haed", "sweep")
_PREFECTS = re.compile(r"/runs/(flow-run|task-run)/[0-9a-f-]{36}")  # in its UI of before


class RunPagesMiddleware:
    """An ASGI application that serves the pages of runs and passes other requests to Prefect.

    Args:
        prefect: Prefect's application.
        pages: the application of the pages.
        secret: NAME:PASSWORD that both ask for; empty: no password.
    """

    def __init__(self, prefect: Any, pages: Any, secret: str) -> None:
        self._prefect, self._pages, self._secret = prefect, pages, secret.encode()
        self._token = hmac.new(self._secret, COOKIE.encode(), hashlib.sha256).hexdigest()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer the request, or pass it to one of the two applications."""
        path = scope.get("path", "")
        if (
            scope["type"] != "http"
            or not (path in ("/enter", "/leave", "/runs") or path.startswith("/runs/"))
            or _PREFECTS.match(path)
        ):
            if not self._is_open(scope, path) and not self._has_password(Headers(scope=scope)):
                # As Prefect answers, but before the body of the request is read, and for its documentation, too.
                return await JSONResponse({"exception_message": "Unauthorized"}, 401)(scope, receive, send)
            return await self._prefect(scope, receive, send)
        await (await self._answer(path, Request(scope)))(scope, receive, send)

    async def _answer(self, path: str, request: Request) -> Any:
        """Return the response to a request, or the application that answers it."""
        if path == "/enter" and request.method == "GET":
            return HTMLResponse(_ENTER)
        if path == "/leave":
            left = PlainTextResponse("The pages of runs ask for the password again\n")
            left.delete_cookie(COOKIE, path="/runs", httponly=True, samesite="lax")
            return left
        known = not self._secret or self._has_password(request.headers)
        if path == "/enter":
            response = Response(status_code=204 if known else 401)
            if known:
                response.set_cookie(COOKIE, self._token, _SECONDS, path="/runs", httponly=True, samesite="lax")
            return response
        cookie = request.cookies.get(COOKIE, "").encode()
        if not known and not hmac.compare_digest(cookie, self._token.encode()):
            asks = {"www-authenticate": 'Basic realm="haed", charset="UTF-8"'}
            if request.method == "GET" and "text/html" in request.headers.get("accept", ""):
                return HTMLResponse(_ENTER, 401, asks)
            return PlainTextResponse("haed serve has a password. Open /enter in a browser to enter it\n", 401, asks)
        if form := _FORM.fullmatch(path):
            return await self._redirect_to_form(form[1], form[2], request.query_params)
        if listed := _FLOW_RUNS.fullmatch(path):
            return await self._list_flow_runs(listed[1])
        return self._pages

    async def _list_flow_runs(self, run: str) -> Response:
        """Return the newest flow runs of a run, without stages of others."""
        of_it = {"tags": {"all_": [f"run:{run}"]}, "parent_task_run_id": {"is_null_": True}}
        wanted = {"flow_runs": of_it, "sort": "START_TIME_DESC", "limit": _LISTED}
        if (flow_runs := await self._ask_prefect("/api/flow_runs/filter", wanted)) is None:
            return PlainTextResponse("Prefect does not answer. Its log says why\n", 502)
        rows = [
            {
                "name": each["name"],
                "state": each["state_name"] or "",
                "date": each["start_time"] or each["expected_start_time"],
                "address": f"/v2/runs/flow-run/{each['id']}",
            }
            for each in flow_runs
        ]
        return Response(json.dumps(rows), media_type="application/json")  # also of what is not UTF-8

    async def _redirect_to_form(self, run: str | None, flow: str, query: QueryParams) -> Response:
        """Redirect to the form of a flow of this folder, or else of the newest, filled in for a run if one is named."""
        wanted = {"flows": {"name": {"any_": [flow]}}, "sort": "UPDATED_DESC", "limit": 1}
        ours = wanted | {"deployments": {"name": {"any_": [f"{flow}-{deployment_suffix(Path.cwd())}"]}}}
        deployments = [
            deployment
            for question in (ours, wanted)
            for deployment in await self._ask_prefect("/api/deployments/filter", question) or []
        ]
        if not deployments:
            return PlainTextResponse(f"there is no deployment of {flow}. Start haed serve, then try again\n", 404)
        values: dict[str, Any] = {"preset": None, "name": run} if flow in _BY_NAME else {"run": run}
        values = values if run else {}
        fields = {"overrides": [word for word in query.getlist("overrides") if word], "space": query.get("space")}
        values |= {name: value for name, value in fields.items() if value}
        place = f"/v2/deployments/deployment/{deployments[0]['id']}/run?{urlencode({'parameters': json.dumps(values)})}"
        return RedirectResponse(place, 303)

    async def _ask_prefect(self, path: str, question: Any) -> Any:
        """Return the answer of Prefect's API in this process, as JSON; None if it refuses."""
        secret = base64.b64encode(self._secret).decode()
        headers = {"Authorization": f"Basic {secret}", "Content-Type": "application/json"}
        transport = httpx.ASGITransport(self._prefect)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=headers) as client:
            answer = await client.post(path, content=json.dumps(question))
        return answer.json() if answer.status_code == 200 else None

    def _is_open(self, scope: Any, path: str) -> bool:
        """Return whether a request to Prefect needs no password here; Prefect checks those of websockets."""
        if not self._secret or scope["type"] != "http" or scope["method"] == "OPTIONS":
            return True
        is_probe = scope["method"] == "GET" and path in ("/api/health", "/api/ready")
        return is_probe or _GUARDED.fullmatch(path) is None

    def _has_password(self, headers: Mapping[str, str]) -> bool:
        scheme, _, credentials = headers.get("authorization", "").partition(" ")
        with suppress(ValueError):
            return scheme.lower() == "basic" and hmac.compare_digest(base64.b64decode(credentials), self._secret)
        return False
