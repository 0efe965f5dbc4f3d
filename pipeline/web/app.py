"""The web application of the pages under `/runs/`: all runs of a folder beside the Prefect UI, or one (`haed explore`).

Every page has an address that contains its question, so it can be bookmarked and shared. `format=json` returns the
answer for programs. Only forms sent by POST change anything; see `pipeline.web.changes`. Pages work without scripts, which
add sorting, filters and curves to look into. Templates escape all texts.
"""

import asyncio
import csv
import hashlib
import io
import os
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qs, quote, unquote_to_bytes, urlencode, urlsplit

from jinja2 import Environment
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from haed.options import SYSTEMS
from pipeline.config.schema import LIMITS
from pipeline.console import escape_control_characters, format_error, unescape_query
from pipeline.reporting.charts import list_series
from pipeline.reporting.findings import ANALYSIS, MAP, read_map_checkpoint
from pipeline.reporting.rendering import STYLE, make_environment, render_template
from pipeline.reporting.report import load_run_report
from pipeline.reporting.run_state import determine_state, phase_metrics, read_history, read_settings
from pipeline.run.files import RunNotes, read_notes
from pipeline.run.index.queries import PIXELS
from pipeline.run.index.storage import check_index_exists
from pipeline.run.run_directory import RunFolder
from pipeline.suggestions import Suggestion, mark_commands
from pipeline.web import changes, questions
from pipeline.web.changes import RefusedChangeError
from pipeline.web.host_check import add_headers
from pipeline.web.listing import RunListing, encode_json, rows_to_json, state_facts
from pipeline.web.model_cache import ModelCache, ServerBusyError
from pipeline.web.questions import InvalidQuestionError, describe_bounds, parse_question
from pipeline.web.runs import NotFoundError, ServedRuns, list_served_files, stamp_results

TOOLS = {
    "neighbours": "neighbours",
    "passages": "passages",
    "next": "next chunks",
    "samples": "samples",
    "score": "bits of a text",
    "map": "map",
}
_QUESTIONS = {
    "neighbours": questions.NeighbourQuestion,
    "passages": questions.PassageQuestion,
    "next": questions.NextChunkQuestion,
    "samples": questions.SampleQuestion,
    "score": questions.ScoreQuestion,
}
_OF_CHUNKS = ("neighbours", "next", "map")  # tools that models of tokens do not have


def run_page_url(name: str, page: str = "", **question: Any) -> str:
    """Return the address of a run's page, with a question as its parameters."""
    parameters = f"?{urlencode(question, doseq=True)}" if question else ""
    return f"/runs/{quote(name, safe='', errors='surrogateescape')}/{page}{parameters}"


def run_list_url(name: str) -> str:
    """Return the address of the list of the runs whose names contain a text."""
    return f"/runs/?{urlencode({'filter run': name})}"


def served_page_url(folder: RunFolder) -> str | None:
    """Return the address of a run's page beside the Prefect UI; None: `haed serve` does not serve that run.

    The address has no host, so it works under every name of the server.
    """
    served = os.environ.get("HAED_PAGES") and folder.path.resolve().parent == Path("runs").resolve()
    return run_page_url(folder.path.name) if served else None


def tensorboard_url(name: str) -> str | None:
    """Return the address of the TensorBoard of `haed serve`, filtered to a run; None: there is none."""
    board = os.environ.get("HAED_TENSORBOARD_URL")
    return f"{board}/?{urlencode({'runFilter': f'^{re.escape(name)}/'})}" if board else None


def make_templates(links: dict[str, str]) -> Environment:
    """Return the Jinja environment of the pages.

    Args:
        links: addresses by name, shown at the head of every page.
    """
    environment = make_environment(
        links=links, address=run_page_url, form=_form_url, asking=_neighbours_url, heading=_next_chunks_heading
    )
    if links:
        environment.filters["commands"] = partial(mark_commands, form_url=_form_url)
    return environment


def _form_url(suggestion: Suggestion) -> str:
    return run_page_url(suggestion.run, f"form/{suggestion.flow}", **suggestion.fields)


def _next_chunks_heading(prediction: Any) -> str:
    from pipeline.inference import prediction_heading

    return prediction_heading(prediction)


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
    question |= {key: value for key, value in more.items() if value is not None}
    return run_page_url(name, "neighbours", **question)


T = TypeVar("T")
_LOOK_SECONDS = 0.2  # interval of the check whether the client still waits
_OURS = "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'self'; object-src 'none'"
# A file of a run is not trusted: its scripts run apart from our pages and have no network access.
_THEIRS = (
    "sandbox allow-scripts; default-src 'none'; frame-ancestors 'self'; img-src data: blob:; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'"
)
_HEADERS = {"cache-control": "no-store", "content-security-policy": _OURS}
_SHOWN = (".html", ".png")  # files of a run that the browser shows; others are downloads
_MAP = f"{ANALYSIS}/{MAP}"
_STATIC = Path(__file__).parent / "static"
_ASSETS = {
    "style.css": ((_STATIC / "tabulator.min.css", _STATIC / "uplot.min.css", STYLE), "text/css"),
    "icon.svg": ((_STATIC / "icon.svg",), "image/svg+xml"),
    **{path.name: ((path,), "text/javascript") for path in _STATIC.glob("*.js")},
}
_ABSOLUTE = re.compile(r'\b((?:form)?action|href|src|data-[a-z-]+)="/')
_PAGE = 200  # runs on a page of the list without scripts
_FEWEST, _MOST_COMPARED = 2, 20
_LONGEST_FORM = 1 << 20  # bytes of a form that is sent, such as thousands of names


def make_application(runs_of: ServedRuns, warm: ModelCache, links: dict[str, str] | None = None) -> ASGIApp:
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
        Route("/runs/.compare", pages.compare_runs),
        Route("/runs/.curves", pages.send_curves),
        Route("/runs/.delete", pages.confirm_deletion, methods=["POST"]),
        Route("/runs/.change", pages.change_runs, methods=["POST"]),
        Route("/runs/{name}/", pages.show_run),
        Route("/runs/{name}/live", pages.show_progress),
        Route("/runs/{name}/edit", pages.edit_run, methods=["GET", "POST"]),
        *(Route(f"/runs/{{name}}/{tool}", partial(pages.answer_tool, tool)) for tool in _QUESTIONS),
        Route("/runs/{name}/chunks", pages.complete_chunk),
        Route("/runs/{name}/map", pages.show_map),
        Route("/runs/{name}/files/{file:path}", pages.serve_file),
    ]
    mistakes = (NotFoundError, ValueError, OSError, FloatingPointError, ServerBusyError, HTTPException)
    routed = Starlette(routes=routes, exception_handlers={kind: pages.show_error for kind in mistakes})

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await routed(scope, receive, add_headers(send, _HEADERS))

    return application


class _Pages:
    def __init__(self, runs_of: ServedRuns, warm: ModelCache, links: dict[str, str]) -> None:
        self._runs, self._warm, self._listing = runs_of, warm, RunListing(runs_of)
        self._templates = make_templates(links)
        self._maps: dict[Path, Future[Any]] = {}  # that are being made, or could not be

    def _render_page(self, request: Request, template: str, status: int = 200, **known: Any) -> HTMLResponse:
        page = render_template(self._templates, template, **known)  # in which a quotation mark is one of a template
        return HTMLResponse(_ABSOLUTE.sub(rf'\1="{_find_root(request)}', page), status)

    async def redirect_front(self, request: Request) -> Response:
        """Redirect to the questions of a single run, or to the listing of runs."""
        if self._runs.single:
            folder = self._runs.find_folder(self._runs.place.name)
            tool = "neighbours" if _is_chunk_model(folder) else "samples"
            return _redirect(request, run_page_url(folder.path.name, tool))
        return _redirect(request, "/runs/")

    async def serve_asset(self, request: Request) -> Response:
        """Serve the icon, a script, or the style sheet: that of reports, after those of the libraries."""
        name = request.path_params["file"]
        if name not in _ASSETS:
            raise NotFoundError(f"there is no file {name!r}")
        paths, media_type = _ASSETS[name]
        content = "\n".join(path.read_text(encoding="utf-8") for path in paths)
        return _unless_known(request, Response(content, media_type=media_type, headers={"Cache-Control": "no-cache"}))

    async def show_listing(self, request: Request) -> Response:
        """Show all runs, `_PAGE` at a time; the script of the page asks for all as JSON."""
        if _wants_json(request, "csv"):
            content = await run_in_threadpool(self._listing.to_json)
            return _unless_known(request, Response(content, media_type="application/json"))
        rows, elsewhere = await run_in_threadpool(self._listing.list_rows)
        if request.query_params.get("format") == "csv":
            facts = await run_in_threadpool(rows_to_json, rows)
            return _csv_response(list(map(_csv_row, facts)), "runs.csv")
        shown = [row for row in rows if not row.notes.archived or "archived" in request.query_params]
        pages, number = max(1, -(-len(shown) // _PAGE)), request.query_params.get("page") or "1"
        if not number.isascii() or not number.isdecimal() or not 1 <= int(number[:9]) <= pages:
            raise NotFoundError(f"page={number[:40]}: there are pages 1 to {pages}")
        first = _PAGE * (int(number) - 1)
        return self._render_page(
            request,
            "runs.html",
            rows=shown[first : first + _PAGE],
            archived=sum(row.notes.archived for row in rows),
            page=int(number),
            pages=pages,
            elsewhere=elsewhere,
            place=self._runs.place,
            total=len(rows),
        )

    async def compare_runs(self, request: Request) -> Response:
        """Show how runs differ, with their curves."""
        folders, wants_json = self._find_ticked(request.query_params.getlist("run")), _wants_json(request)
        if not _FEWEST <= len(folders) <= _MOST_COMPARED:
            raise ValueError(f"{len(folders)} runs are ticked. Tick {_FEWEST} to {_MOST_COMPARED} to compare them")
        from pipeline.reporting.comparison import make_comparison  # Matplotlib costs a second

        comparison, _ = await run_in_threadpool(make_comparison, {folder.path.name: folder for folder in folders})
        if wants_json:
            return _json_response(asdict(comparison))
        link = f"?{urlencode([*request.query_params.multi_items(), ('format', 'json')])}"
        return self._render_page(request, "comparison.html", comparison=comparison, json_link=link)

    async def send_curves(self, request: Request) -> Response:
        """Return the metrics of runs, whose curves a page draws."""
        folders = self._find_ticked(request.query_params.getlist("run")[:_MOST_COMPARED])
        series = await run_in_threadpool(
            lambda: [
                {"run": folder.path.name, **each}
                for folder in folders
                for each in list_series(phase_metrics(folder, read_history(folder)))
            ]
        )
        return _unless_known(request, _json_response(series))

    async def confirm_deletion(self, request: Request) -> Response:
        """Show runs with their states and sizes, and a button that deletes them."""
        return await self._ask_deletion(request, self._find_ticked((await self._read_form(request)).get("run", [])))

    async def _ask_deletion(
        self, request: Request, folders: list[RunFolder], errors: Sequence[str] = (), status: int = 200
    ) -> Response:
        rows = await run_in_threadpool(
            lambda: [(self._listing.get_row(folder), changes.measure_size(folder.path)) for folder in folders]
        )
        return self._render_page(request, "delete.html", status, rows=rows, errors=errors)

    async def change_runs(self, request: Request) -> Response:
        """Archive, restore or delete the ticked runs, as far as nothing uses them."""
        form = await self._read_form(request)
        folders, action = self._find_ticked(form.get("run", [])), form.get("action", [""])[-1]
        actions: dict[str, Callable[[RunFolder], Any]] = {
            "archive": partial(changes.archive_run, archived=True),
            "restore": partial(changes.archive_run, archived=False),
            "delete": partial(changes.delete_run, self._runs),
        }
        if action not in actions:
            raise ValueError(f"action={action[:40]}: choose archive, restore or delete")
        refused: dict[str, RunFolder] = {}
        for folder in folders:
            try:
                await run_in_threadpool(actions[action], folder)
            except (RefusedChangeError, OSError) as error:
                refused[format_error(error)] = folder
        if not refused:
            came = urlsplit(request.headers.get("referer", ""))  # to the list as it was searched and grouped
            query = f"?{came.query}" if came.path.endswith("/runs/") and came.query else ""
            return _redirect(request, f"/runs/{query}", 303)
        if action == "delete":
            return await self._ask_deletion(request, list(refused.values()), list(refused), 409)
        return self._render_page(request, "error.html", 409, error=" ".join(refused), title="Not possible")

    async def edit_run(self, request: Request) -> Response:
        """Show the name, tags and note of a run as a form, or write them."""
        folder = self._find_run(request)
        notes = await run_in_threadpool(changes.read_or_empty, folder)
        shown: dict[str, Any] = {"name": folder.path.name, "new_name": folder.path.name, "single": self._runs.single}
        shown |= {"note": notes.note, "tags": " ".join(notes.tags), "seen": notes.digest}
        if request.method != "POST":
            return self._render_page(request, "edit.html", **shown)
        form = {key: values[-1].replace("\r\n", "\n") for key, values in (await self._read_form(request)).items()}
        shown |= {key: form[key] for key in ("tags", "note") if key in form}
        shown["new_name"] = form.get("name", folder.path.name)
        values = shown["new_name"], shown["tags"], shown["note"]
        try:
            await run_in_threadpool(changes.edit_run, self._runs, folder, *values, form.get("seen", notes.digest))
        except (RefusedChangeError, OSError) as error:
            shown["error"] = format_error(error)
            if field := getattr(error, "field", ""):
                shown["troubles"] = {field: shown.pop("error")}
            return self._render_page(request, "edit.html", 409, **shown)
        return _redirect(request, run_page_url(shown["new_name"].strip()), 303)

    async def _read_form(self, request: Request) -> dict[str, list[str]]:
        kind, body = request.headers.get("content-type", ""), b""
        if kind and not kind.startswith("application/x-www-form-urlencoded"):
            raise HTTPException(415, f"The form is sent as {kind[:100]}. Send application/x-www-form-urlencoded")
        async for part in request.stream():
            body += part
            if len(body) > _LONGEST_FORM:
                raise HTTPException(413, f"The form has more than {_LONGEST_FORM:,} bytes")
        try:
            return parse_qs(body.decode(), keep_blank_values=True, errors="strict", max_num_fields=20_000)
        except UnicodeDecodeError:
            raise HTTPException(400, "The form has bytes that are no UTF-8") from None

    def _find_ticked(self, names: list[str]) -> list[RunFolder]:
        if not names:
            raise ValueError("no run is ticked. Tick runs in the list first")
        known = {folder.path.name: folder for folder in self._runs.list_folders()[0]}
        if missing := [name for name in names if name not in known]:
            raise NotFoundError(f"there is no run {missing[0]!r} in {self._runs.place}")
        return [known[name] for name in dict.fromkeys(names)]

    async def show_run(self, request: Request) -> Response:
        """Show a run."""
        folder = self._find_run(request)
        if request.query_params.get("format"):
            raise ValueError(f"a run's page has no other format. Use {run_page_url(folder.path.name)}live for JSON")
        known = await run_in_threadpool(_run_page_values, folder)
        return self._render_page(request, "run.html", **known)

    async def show_progress(self, request: Request) -> Response:
        """Return the progress of a run with its curves, which its page requests repeatedly."""
        folder = self._find_run(request)
        state = await run_in_threadpool(determine_state, folder)
        html = render_template(self._templates, "live.html", state=state)
        known = {"trained": folder.is_trained(), "results": stamp_results(list_served_files(folder)), "html": html}
        return _json_response(state_facts(folder.path.name, state) | known)

    async def serve_file(self, request: Request) -> Response:
        """Serve a file of a run, if it is one of those that are served."""
        folder, name = self._find_run(request), request.path_params["file"]
        phase, _, kind = name.partition("/")
        metrics = await run_in_threadpool(phase_metrics, folder) if kind == "metrics.csv" else {}
        if phase in metrics:
            return await run_in_threadpool(_csv_response, metrics[phase], f"{phase}-metrics.csv")
        for file in list_served_files(folder):
            if file.name == name:
                is_shown = file.path.suffix in _SHOWN and "download" not in request.query_params
                disposition = "inline" if is_shown else "attachment"
                saved_as = f"{folder.path.name}-{name.replace('/', '-')}"
                policy = {"Content-Security-Policy": _THEIRS}
                return FileResponse(file.path, headers=policy, filename=saved_as, content_disposition_type=disposition)
        raise NotFoundError(f"{folder.path.name} has no served file {name!r}")

    async def answer_tool(self, tool: str, request: Request) -> Response:
        """Show the form of a question, with the answer if the question was asked. One for neighbours always is."""
        folder, wants_json, kind = self._find_run(request), _wants_json(request), _QUESTIONS[tool]
        known = _tool_values(folder, tool)
        known["pictures"] = read_settings(folder).get("chunker.kind") == PIXELS
        known["question"], known["bounds"], status = kind(), describe_bounds(kind), 200
        try:
            _check_query_text(request, known["bounds"])
            known["question"] = parse_question(kind, request.query_params)
            if tool in _OF_CHUNKS and tool not in known["tools"]:
                raise ValueError(f"this run's model predicts tokens, so it has no {TOOLS[tool]}. Choose another page")
            if tool == "neighbours" or "prompt" in request.query_params or wants_json:
                asking = self._warm.ask_run(folder, known["question"].answer)
                if (result := await _wait_unless_gone(request, asking)) is None:
                    return Response(status_code=499)  # the client has gone
                known["answer"] = result
            else:
                if tool == "passages":
                    check_index_exists(folder, "contexts")
                self._warm.prepare_run(folder)
        except InvalidQuestionError as error:
            status, known["troubles"] = 400, error.troubles
            known["question"] = error.typed or known["question"]
        except (ValueError, OSError, FloatingPointError, ServerBusyError) as error:
            status, known["error"] = _status_of(error), format_error(error)
        if not wants_json:
            return self._render_page(request, f"{tool}.html", status, **known)
        if "answer" in known:
            return _json_response(asdict(known["answer"]))
        message = known.get("error") or ". ".join(known["troubles"].values())
        return _json_response({"error": message}, status)

    async def complete_chunk(self, request: Request) -> Response:
        """Return the most frequent chunks that begin with what was typed, for the list of a box."""
        typed = request.query_params.get("begin", "")
        asking = self._warm.ask_run(self._find_run(request), partial(questions.complete_chunk, typed))
        answer = await _wait_unless_gone(request, asking)
        return Response(status_code=499) if answer is None else _json_response(answer.value)

    async def show_map(self, request: Request) -> Response:
        """Lead to the map of the present checkpoint, or say that it is being made."""
        folder = self._find_run(request)
        if not _is_chunk_model(folder):
            raise ValueError("this run's model predicts tokens, so it has no map. Choose another page")
        digest = await run_in_threadpool(self._warm.present_digest, folder)
        making = self._maps.get(folder.path)
        is_done = making is not None and making.done()  # first: one that is ready later is not made again
        there = [file.path for file in list_served_files(folder) if file.name == _MAP]
        if there and read_map_checkpoint(there[0]) == digest:
            return _redirect(request, run_page_url(folder.path.name, f"files/{_MAP}"), 303)
        if making is not None and is_done:
            if request.method != "HEAD":  # by which the page asks whether it is made
                del self._maps[folder.path]
            making.result()
            making = None
        if making is None:
            if os.path.islink(place := folder.path / ANALYSIS):
                raise ValueError(f"{place} is a link, so its files are not served. Replace it by a folder")
            self._maps[folder.path] = self._warm.start_work(folder, _draw_map)
        return self._render_page(request, "map.html", 202, **_tool_values(folder, "map"))

    async def show_error(self, request: Request, error: Exception) -> Response:
        """Show an error as one line."""
        status = _status_of(error)
        message = error.detail if isinstance(error, HTTPException) else format_error(error)
        if request.query_params.get("format") == "json":
            return _json_response({"error": message}, status)
        title = "Not found" if status == 404 else "Not possible"
        return self._render_page(request, "error.html", status, error=message, title=title)

    def _find_run(self, request: Request) -> RunFolder:
        return self._runs.find_folder(request.path_params["name"])


def _find_root(request: Request) -> str:
    """Return the root as a relative address, so that a proxy may serve the pages below a path of its own."""
    return "../" * (request.scope["path"].count("/") - 1) or "./"


def _redirect(request: Request, place: str, status: int = 307) -> Response:
    return RedirectResponse(_find_root(request) + place.removeprefix("/"), status)


def _status_of(error: Exception) -> int:
    if isinstance(error, HTTPException):
        return error.status_code
    kinds = {NotFoundError: 404, ServerBusyError: 503, OSError: 409}
    return next((status for kind, status in kinds.items() if isinstance(error, kind)), 400)


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
    return Response(encode_json(value), status, media_type="application/json")


def _wants_json(request: Request, *others: str) -> bool:
    """Return if an address asks for JSON; raise ValueError if it asks for a format that the page does not have."""
    chosen = request.query_params.get("format", "")
    if chosen not in ("", "json", *others):
        shown = escape_control_characters(chosen[:50])
        raise ValueError(f"format={shown}: this page has no such format. Use format=json")
    return chosen == "json"


def _draw_map(opened: Any) -> None:
    from pipeline.analysis.stage import draw_map

    draw_map(opened.run)


def _is_chunk_model(folder: RunFolder) -> bool:
    family = SYSTEMS.get(str(read_settings(folder).get("model.kind")))
    return family is None or family.chunks


def _tools_of(folder: RunFolder) -> dict[str, str]:
    absent: tuple[str, ...] = () if _is_chunk_model(folder) else _OF_CHUNKS
    with suppress(OSError, ValueError):  # else what is damaged is named by the tool
        form = folder.read_corpus_record().form
        absent += (*(("samples",) if "height" in form else ()), *(("score",) if form else ()))
    return {tool: title for tool, title in TOOLS.items() if tool not in absent}


def _tool_values(folder: RunFolder, tool: str) -> dict[str, Any]:
    return {"name": folder.path.name, "tool": tool, "title": TOOLS[tool], "tools": _tools_of(folder)}


def _suggest_extension(folder: RunFolder) -> Suggestion | None:
    """Return the form that doubles the limits of a run's last phase; None: no phase has a checkpoint, or none has limits.

    It is the form of `haed`, which also evaluates, if `haed` ends with that phase. Else it is that of the phase's own flow: `haed`
    would train further phases.
    """
    if not folder.is_trained():
        return None
    phase = folder.trained_phase()
    options = read_settings(folder)
    limits = {f"{phase}.{unit}": options.get(f"{phase}.{unit}") for unit in (*LIMITS, "patience")}
    overrides = [f"{key}={2 * limit}" for key, limit in limits.items() if isinstance(limit, int | float) and limit]
    flow = "haed" if phase == ("finetune" if _is_chunk_model(folder) else "train") else phase
    return Suggestion(flow, folder.path.name, {"overrides": overrides}) if overrides else None


def _check_query_text(request: Request, boxes: Mapping[str, Any]) -> None:
    """Raise ValueError if the query of an address is no UTF-8, which Starlette would replace."""
    try:
        unquote_to_bytes(request.scope["query_string"]).decode()
    except UnicodeDecodeError:
        advice = "Write a chunk of other bytes as hex=" if "hex" in boxes else "Write the text in UTF-8"
        raise ValueError(f"the address has bytes that are no UTF-8. {advice}") from None


def _unless_known(request: Request, response: Response) -> Response:
    """Return a response, or 304 if the client has it already."""
    digest = f'"{hashlib.blake2b(bytes(response.body), digest_size=16).hexdigest()}"'
    response.headers["ETag"] = digest
    if request.headers.get("if-none-match") == digest:
        kept = {name: response.headers[name] for name in ("ETag", "Cache-Control") if name in response.headers}
        return Response(status_code=304, headers=kept)
    return response


def _csv_row(facts: dict[str, Any]) -> dict[str, Any]:
    """Return a row of the list for a spreadsheet, with columns for each metric and each option that varies."""
    evaluation = {f"evaluation.{key}": value for key, value in (facts["headline"] or {}).items()}
    left_out = ("headline", "options", "metrics", "warnings", "running", "holder")
    plain = {key: value for key, value in facts.items() if key not in left_out} | {"tags": " ".join(facts["tags"])}
    return plain | evaluation | {f"metrics.{key}": each for key, each in facts["metrics"].items()} | facts["options"]


def _csv_response(rows: Sequence[Mapping[str, Any]], name: str) -> Response:
    written = io.StringIO()
    table = csv.DictWriter(written, dict.fromkeys(key for row in rows for key in row))
    table.writeheader()
    table.writerows({key: _as_cell(value) for key, value in row.items()} for row in rows)
    named = {"Content-Disposition": f'attachment; filename="{name}"'}
    return Response(written.getvalue(), media_type="text/csv", headers=named)


def _as_cell(value: Any) -> Any:
    """Return a value for a spreadsheet, which must not take a text for a formula."""
    return f"'{value}" if isinstance(value, str) and value[:1] in tuple("=+-@\t\r") else value


def _run_page_values(folder: RunFolder) -> dict[str, Any]:
    name, files = folder.path.name, list_served_files(folder)
    addresses = {file.name: run_page_url(name, f"files/{file.name}") for file in files}
    values = load_run_report(folder).template_values(addresses)
    try:
        notes = read_notes(folder.path)
    except ValueError as error:
        notes = RunNotes()
        values["warnings"].append(format_error(error))
    return values | {
        "files": files,
        "of_chunks": _is_chunk_model(folder),
        "tools": _tools_of(folder),
        "trained": folder.is_trained(),
        "results": stamp_results(files),
        "extension": _suggest_extension(folder),
        "tensorboard": tensorboard_url(name),
        "place": folder.path.resolve(),
        "notes": notes,
    }
