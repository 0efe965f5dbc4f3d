"""The web application of the pages under `/runs/`: all runs of a folder beside the Prefect UI, or one (`haed explore`).

Every page has an address that contains its question, so it can be bookmarked and shared. `format=json` returns the
answer for programs. No page changes anything. Pages work without scripts; the only script refreshes a page during
training. Templates escape all texts.
"""

import asyncio
import json
import os
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, get_type_hints
from urllib.parse import quote, urlencode

from jinja2 import Environment
from pydantic import TypeAdapter, ValidationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from haed.options import SYSTEMS
from pipeline.console import escape_control_characters, format_error, unescape_query
from pipeline.reporting.charts import draw_curves
from pipeline.reporting.rendering import STYLE, make_environment, render_template
from pipeline.reporting.report import EvaluationStatus, evaluation_status, load_run_report
from pipeline.reporting.run_state import damaged_state, determine_state, phase_metrics, read_history, read_setting
from pipeline.run.index.queries import PIXELS
from pipeline.run.run_directory import RunFolder
from pipeline.web import questions
from pipeline.web.model_cache import ModelCache, ServerBusyError
from pipeline.web.runs import NotFoundError, RunListing, ServedRuns, list_served_files, metrics_csv

TOOLS = {
    "neighbours": "neighbours",
    "passages": "passages",
    "next": "next chunks",
    "samples": "samples",
    "score": "bits of a text",
}
# By tool: the class of its question, and what returns the function that answers one with an opened run.
_QUESTIONS: dict[str, tuple[type, Callable[[Any], Callable[[Any], Any]]]] = {
    "neighbours": (questions.NeighbourQuestion, questions.ask_neighbours),
    "passages": (questions.PassageQuestion, questions.ask_passages),
    "next": (questions.NextChunkQuestion, questions.ask_next_chunks),
    "samples": (questions.SampleQuestion, questions.ask_samples),
    "score": (questions.ScoreQuestion, questions.ask_score),
}


def run_page_url(name: str, page: str = "", **question: Any) -> str:
    """Return the address of a run's page, with a question as its parameters."""
    asked = f"?{urlencode(question, doseq=True)}" if question else ""
    return f"/runs/{quote(name, safe='', errors='surrogateescape')}/{page}{asked}"


def served_page_url(folder: RunFolder) -> str | None:
    """Return the address of a run's page beside the Prefect UI; None: `haed serve` does not serve that run.

    The address has no host, so it works under every name of the server.
    """
    served = os.environ.get("HAED_PAGES") and folder.path.resolve().parent == Path("runs").resolve()
    return run_page_url(folder.path.name) if served else None


def make_templates(links: dict[str, str]) -> Environment:
    """Return the Jinja environment of the pages.

    Args:
        links: addresses by name, shown at the head of every page.
    """
    return make_environment(
        tools=TOOLS, links=links, address=run_page_url, asking=_neighbours_url, heading=_next_chunks_heading
    )


def _next_chunks_heading(found: Any) -> str:
    from pipeline.inference import prediction_heading

    return prediction_heading(found)


def _neighbours_url(name: str, hexadecimal: str, pictures: bool, **more: Any) -> str:
    """Return the address of a page with the neighbours of a chunk.

    The chunk is given as text if that is unambiguous, else in hexadecimal.
    """
    try:
        text = "" if pictures else bytes.fromhex(hexadecimal).decode()
    except UnicodeDecodeError:
        text = ""
    plain = text and unescape_query(escape_control_characters(text)) == text
    question = {"query": escape_control_characters(text)} if plain else {"hex": hexadecimal}
    return run_page_url(
        name, "neighbours", **question, **{key: value for key, value in more.items() if value is not None}
    )


T = TypeVar("T")
_LOOK_SECONDS = 0.2  # interval of the check whether the client still waits
_OURS = "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'self'; object-src 'none'"
# A file of a run is not trusted: its scripts run apart from our pages and have no network access.
_THEIRS = (
    "sandbox allow-scripts; default-src 'none'; frame-ancestors 'self'; img-src data: blob:; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'"
)
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": _OURS,
}
_SHOWN = (".html", ".png")  # files of a run that the browser shows; others are downloads
_MAP = "analysis/map.html"
_STATIC = Path(__file__).parent / "static"
_ASSETS = {
    "style.css": (STYLE, "text/css"),
    "live.js": (_STATIC / "live.js", "text/javascript"),
    "icon.svg": (_STATIC / "icon.svg", "image/svg+xml"),
}


def make_application(runs_of: ServedRuns, warm: ModelCache, links: dict[str, str] | None = None) -> Starlette:
    """Return the pages of runs as an ASGI application, to be put behind `pipeline.web.host_check`.

    Args:
        runs_of: the runs to serve.
        warm: answers the questions.
        links: addresses by name, shown at the head of every page.
    """
    pages = _Pages(runs_of, warm, links or {})
    routes = [
        Route("/", pages.redirect_front),
        Route("/runs/", pages.show_listing),
        Route("/runs/.pages/{file}", pages.serve_asset),
        Route("/runs/{name}/", pages.show_run),
        Route("/runs/{name}/live", pages.show_progress),
        *(
            Route(f"/runs/{{name}}/{tool}", partial(pages.answer_tool, tool, *kind))
            for tool, kind in _QUESTIONS.items()
        ),
        Route("/runs/{name}/files/{file:path}", pages.serve_file),
    ]
    mistakes = (NotFoundError, ValueError, OSError, FloatingPointError, ServerBusyError, HTTPException)
    made = Starlette(routes=routes, exception_handlers={kind: pages.show_error for kind in mistakes})
    made.add_middleware(_HeaderMiddleware)
    return made


class _HeaderMiddleware:
    """ASGI middleware that adds our headers to every response."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                known = {name for name, _ in message["headers"]}
                more = [(name.lower().encode(), value.encode()) for name, value in _HEADERS.items()]
                message["headers"] = [*message["headers"], *(each for each in more if each[0] not in known)]
            await send(message)

        await self._app(scope, receive, send_with_headers)


class _Pages:
    """The pages, one method each."""

    def __init__(self, runs_of: ServedRuns, warm: ModelCache, links: dict[str, str]) -> None:
        self._runs, self._warm, self._listing = runs_of, warm, RunListing(_make_row)
        self._templates = make_templates(links)

    def _render_page(self, template: str, status: int = 200, **known: Any) -> HTMLResponse:
        return HTMLResponse(render_template(self._templates, template, **known), status)

    async def redirect_front(self, request: Request) -> Response:
        """Redirect to the questions of a single run, or to the listing of runs."""
        found = self._runs.list_folders()[0]
        if self._runs.single:
            tool = "neighbours" if _is_chunk_model(found[0]) else "samples"
            return RedirectResponse(run_page_url(found[0].path.name, tool))
        return RedirectResponse("/runs/")

    async def serve_asset(self, request: Request) -> Response:
        """Serve the icon, the script, or the style sheet, which is that of reports."""
        name = request.path_params["file"]
        if name not in _ASSETS:
            raise NotFoundError(f"there is no file {name!r}")
        path, media_type = _ASSETS[name]
        return Response(path.read_text(encoding="utf-8"), media_type=media_type)

    async def show_listing(self, request: Request) -> Response:
        """Show all runs."""
        rows, elsewhere = await run_in_threadpool(self._list_rows)
        if _wants_json(request):
            return _json_response([_state_facts(row) for row in rows])
        return self._render_page("runs.html", rows=rows, elsewhere=elsewhere, place=self._runs.place)

    def _list_rows(self) -> tuple[list[dict[str, Any]], list[str]]:
        folders, elsewhere = self._runs.list_folders()
        rows = [self._listing.get_row(folder) for folder in folders]
        return sorted(rows, key=lambda row: row["state"].changed, reverse=True), elsewhere

    async def show_run(self, request: Request) -> Response:
        """Show a run."""
        folder = self._find_run(request)
        known = await run_in_threadpool(_run_page_values, folder)
        return self._render_page("run.html", **known)

    async def show_progress(self, request: Request) -> Response:
        """Return the progress of a run with its curves, which its page requests repeatedly."""
        folder = self._find_run(request)
        known = await run_in_threadpool(
            lambda: _state_row(folder) | {"curves": draw_curves(phase_metrics(folder, read_history(folder)))}
        )
        html = render_template(self._templates, "live.html", **known)
        return _json_response(_state_facts(known) | {"html": html})

    async def serve_file(self, request: Request) -> Response:
        """Serve a file of a run, if it is one of those that are served."""
        folder, name = self._find_run(request), request.path_params["file"]
        phase, _, kind = name.partition("/")
        if kind == "metrics.csv" and phase in phase_metrics(folder):
            table = await run_in_threadpool(metrics_csv, folder, phase)
            named = {"Content-Disposition": f'attachment; filename="{phase}-metrics.csv"'}
            return Response(table, media_type="text/csv", headers=named)
        for file in list_served_files(folder):
            if file.name == name:
                how = (
                    "inline" if file.path.suffix in _SHOWN and "download" not in request.query_params else "attachment"
                )
                saved_as = f"{folder.path.name}-{name.replace('/', '-')}"
                policy = {"Content-Security-Policy": _THEIRS}
                return FileResponse(file.path, headers=policy, filename=saved_as, content_disposition_type=how)
        raise NotFoundError(f"{folder.path.name} has no served file {name!r}")

    async def answer_tool(
        self, tool: str, kind: type[T], ask: Callable[[T], Callable[[Any], Any]], request: Request
    ) -> Response:
        """Show the form of a question, with the answer if the question was asked. One for neighbours always is.

        Args:
            tool: name of the page and its template.
            kind: class of the question.
            ask: returns the function that answers a question with an opened run.
            request: the request.
        """
        folder = self._find_run(request)
        known: dict[str, Any] = {"name": folder.path.name, "tool": tool, "of_chunks": _is_chunk_model(folder)}
        known["pictures"] = read_setting(folder, "chunker.kind") == PIXELS
        if tool == "neighbours" and any(file.name == _MAP for file in list_served_files(folder)):
            known["map"] = run_page_url(folder.path.name, f"files/{_MAP}")
        known["question"], status = kind(), 200
        try:
            known["question"] = _parse_question(kind, request)
            if tool == "neighbours" or "prompt" in request.query_params or _wants_json(request):
                asking = self._warm.ask_run(folder, ask(known["question"]))
                if (answer := await _wait_unless_gone(request, asking)) is None:
                    return Response(status_code=499)  # the client has gone
                known["answer"] = answer
            else:
                self._warm.prepare_run(folder)
        except (ValueError, OSError, FloatingPointError, ServerBusyError) as error:
            status = 503 if isinstance(error, ServerBusyError) else 409 if isinstance(error, OSError) else 400
            known["error"] = format_error(error)
        if not _wants_json(request):
            return self._render_page(f"{tool}.html", status, **known)
        if "error" in known:
            return _json_response({"error": known["error"]}, status)
        return _json_response(asdict(known["answer"]))

    async def show_error(self, request: Request, error: Exception) -> Response:
        """Show an error as one line."""
        status = (
            error.status_code if isinstance(error, HTTPException) else 404 if isinstance(error, NotFoundError) else 500
        )
        said = error.detail if isinstance(error, HTTPException) else format_error(error)
        if _wants_json(request):
            return _json_response({"error": said}, status)
        return self._render_page("error.html", status, error=said)

    def _find_run(self, request: Request) -> RunFolder:
        return self._runs.find_folder(request.path_params["name"])


async def _wait_unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """Wait for work as long as the client does; None: the client has gone, and the work is cancelled."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # else asyncio logs it as never retrieved
    try:
        while not task.done():
            await asyncio.wait([task], timeout=_LOOK_SECONDS)
            if not task.done() and await request.is_disconnected():
                return None
        return task.result()
    finally:
        task.cancel()


def _json_response(value: Any, status: int = 200) -> Response:
    return Response(json.dumps(value) + "\n", status, media_type="application/json")


def _wants_json(request: Request) -> bool:
    return request.query_params.get("format") == "json"


def _parse_question(kind: type[T], request: Request) -> T:
    """Parse a question from the parameters of an address.

    Raises:
        ValueError: a value is out of its bounds or of the wrong type.
    """
    given: dict[str, Any] = {}
    for name, hint in get_type_hints(kind).items():
        values = request.query_params.getlist(name)
        if isinstance(getattr(kind(), name), list):
            given[name] = values
        elif values and (values[-1] or hint is str):
            given[name] = values[-1]
    try:
        return TypeAdapter(kind).validate_python(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{place}={str(first['input'])[:40]}: {first['msg'].lower()}") from None


def _is_chunk_model(folder: RunFolder) -> bool:
    family = SYSTEMS.get(str(read_setting(folder, "model.kind")))
    return family is None or family.chunks


def _state_row(folder: RunFolder) -> dict[str, Any]:
    return {"name": folder.path.name, "state": determine_state(folder)}


def _make_row(folder: RunFolder) -> dict[str, Any]:
    """Return a row of the listing. For a damaged run it holds a note, so that the others are still listed."""
    try:
        return _state_row(folder) | {"evaluation": evaluation_status(folder)}
    except (OSError, ValueError) as error:
        status = EvaluationStatus(None, [format_error(error)])
        return {"name": folder.path.name, "state": damaged_state(folder), "evaluation": status}


def _state_facts(row: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a run as JSON values."""
    state = row["state"]
    facts = {"run": row["name"], **asdict(state), "running": state.running, "changed": state.changed.isoformat()}
    if "evaluation" in row:
        result = row["evaluation"].result
        facts["headline"] = asdict(result.headline) | {"split": result.split} if result else None
        facts["warnings"] = row["evaluation"].warnings
    return facts


def _run_page_values(folder: RunFolder) -> dict[str, Any]:
    """Return the values that the page of a run shows."""
    name, files = folder.path.name, list_served_files(folder)
    addresses = {file.name: run_page_url(name, f"files/{file.name}") for file in files}
    return load_run_report(folder).template_values(addresses) | {
        "files": files,
        "of_chunks": _is_chunk_model(folder),
        "place": folder.path.resolve(),
    }
