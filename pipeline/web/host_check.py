"""Host check of the servers that `haed` starts: requests must use a name of the server, and not come from other sites.

A browser also sends requests of foreign pages to 127.0.0.1. Three headers identify them:

- `Origin` differs from the address that a foreign page requests.
- `Host` holds the foreign name if that name was made to point to this machine (DNS rebinding).
- `Sec-Fetch-Site` reveals frames, pictures and prefetches of foreign pages, which have no `Origin`. Only a link that
  a person follows is allowed.

Programs send neither `Origin` nor `Sec-Fetch-Site`. Plain requests, preflights and websockets are all checked before
anything else.
"""

import ipaddress
import re
import socket
import wsgiref.headers
from collections.abc import Iterable, Mapping
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse

_HOST = re.compile(r"(?:\[([^\]]*)\]|([^:\[\]]+))(?::[0-9]{1,5})?")
_ELSEWHERE = ("cross-site", "same-site")  # same-site: this host with another port, or a sibling domain
# Added to every response that lacks them: other sites may not frame or embed it, browsers may not guess its type.
_PROTECTING = {
    "x-frame-options": "SAMEORIGIN",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
_POLICY = {
    "content-security-policy": "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; worker-src 'self' blob:; "
    "connect-src 'self'; object-src 'none'; base-uri 'self'; form-action 'self'; frame-ancestors 'self'"
}
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def host_names(host: str) -> list[str]:
    """Return the names that clients may use for a server that listens on a host."""
    if host in LOOPBACK:
        return list(LOOPBACK)
    here = socket.gethostname()
    return [*LOOPBACK, host, here, here.split(".")[0], socket.getfqdn()]


class AllowedHosts:
    """The names of a server, and the other origins whose pages may use it.

    Args:
        names: host names and addresses, without ports; `0.0.0.0` or `::` allow every address, but no name.
        origins: such as `https://dashboard.example`.
    """

    def __init__(self, names: Iterable[str], origins: Iterable[str] = ()) -> None:
        self._names = {name.lower().rstrip(".") for name in names}
        self._any_address = bool(self._names & {"0.0.0.0", "::"})
        self._origins = {origin.lower().rstrip("/") for origin in origins}

    def refusal_reason(self, headers: Headers, method: str | None = "GET") -> str | None:
        """Return why a request is refused; None: it is allowed.

        Args:
            headers: its headers.
            method: its HTTP method; None: it opens a websocket.
        """
        hosts, origins = headers.getlist("host"), headers.getlist("origin")
        if len(hosts) != 1 or not self._is_ours(hosts[0]):
            named = f"this is not the address of this server: Host {', '.join(hosts) or 'missing'}"[:200]
            return f"{named}. Use the one that was printed. The server's option allowed-host lets in that of a proxy"
        same_origin = {f"{scheme}://{hosts[0].lower()}" for scheme in ("http", "https")}
        if foreign := [origin for origin in origins if origin.lower() not in same_origin | self._origins]:
            return f"requests from other sites are refused: Origin {', '.join(foreign)}"[:200]
        if origins or method is None or headers.get("sec-fetch-site") not in _ELSEWHERE:
            return None
        is_link = (  # of another site, which a person follows
            method in ("GET", "HEAD")
            and headers.get("sec-fetch-mode") == "navigate"
            and headers.get("sec-fetch-dest", "document") == "document"
            and "prefetch" not in headers.get("sec-purpose", "")
        )
        return None if is_link else "other sites may not embed these pages"

    def _is_ours(self, header: str) -> bool:
        match = _HOST.fullmatch(header)
        name = (match[1] or match[2]).lower().rstrip(".") if match else ""
        return bool(name) and (name in self._names or (self._any_address and _is_address(name)))


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class HostCheckMiddleware:
    """ASGI middleware that applies the rules to every request.

    Its pages cannot be framed by other sites, where visitors might click on them unknowingly. They load from and
    connect to this server only, whatever a library or a Markdown text in them requests. A page may have a policy of
    its own.
    """

    def __init__(self, application: Any, rules: AllowedHosts) -> None:
        self._application, self._rules = application, rules

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on, or answer 403."""
        if scope["type"] not in ("http", "websocket"):
            return await self._application(scope, receive, send)
        reason = self._rules.refusal_reason(Headers(scope=scope), scope.get("method"))
        if scope["type"] == "websocket":
            if reason is None:
                return await self._application(scope, receive, send)
            await receive()  # closing before accepting is answered 403 as well
            return await send({"type": "websocket.close", "code": 1008})
        if reason is not None:
            return await PlainTextResponse(f"{reason}\n", 403)(scope, receive, send)
        await self._application(scope, receive, add_headers(send, _PROTECTING | _POLICY))


def add_headers(send: Any, headers: Mapping[str, str]) -> Any:
    """Return the `send` of an ASGI application with headers for each response that lacks them.

    Args:
        send: the application's `send`.
        headers: values by lower-case names.
    """

    async def send_with_headers(message: Any) -> None:
        if message["type"] == "http.response.start":
            message = {"headers": [], **message}
            answered = MutableHeaders(scope=message)
            for name, value in headers.items():
                answered.setdefault(name, value)
        await send(message)

    return send_with_headers


def host_checked_wsgi(application: Any, rules: AllowedHosts) -> Any:
    """Return a WSGI application that applies the rules to every request."""

    def inner(environment: dict[str, Any], start_response: Any) -> Any:
        sent = {name[5:].replace("_", "-"): value for name, value in environment.items() if name.startswith("HTTP_")}
        reason = rules.refusal_reason(Headers(sent), environment.get("REQUEST_METHOD", "GET"))
        if reason is None:

            def start_protected(status: str, headers: list[tuple[str, str]], *more: Any) -> Any:
                answered = wsgiref.headers.Headers([*headers, ("Content-Security-Policy", "frame-ancestors 'self'")])
                for name, value in _PROTECTING.items():
                    answered.setdefault(name, value)
                return start_response(status, answered.items(), *more)

            return application(environment, start_protected)
        start_response("403 Forbidden", [("Content-Type", "text/plain; charset=utf-8")])
        return [f"{reason}\n".encode()]

    return inner
