"""Who may talk to the servers that `haed` starts: whoever addresses them by a name of theirs, and no page of another site.

A browser sends the requests of any page to 127.0.0.1 too. A page elsewhere shows by its `Origin`, which is not the address it
asks; one whose own name was made to point here (DNS rebinding) shows by its `Host`. Programs send no `Origin`. Both are looked
at before anything else, for plain requests, preflights and websockets alike.
"""

import ipaddress
import socket
from collections.abc import Iterable
from typing import Any

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def names_of(host: str) -> list[str]:
    """By which names a server may be addressed that listens on this one."""
    if host in LOOPBACK:
        return list(LOOPBACK)
    here = socket.gethostname()
    return [*LOOPBACK, host, here, here.split(".")[0], socket.getfqdn()]


class Rules:
    """The names of a server, and the origins beside its own whose pages may use it.

    Args:
        names: host names and addresses, without ports; `0.0.0.0` or `::` stand for every address, but for no name.
        origins: such as `https://dashboard.example`.
    """

    def __init__(self, names: Iterable[str], origins: Iterable[str] = ()) -> None:
        self._names = {name.lower().rstrip(".") for name in names}
        self._any_address = bool(self._names & {"0.0.0.0", "::"})
        self._origins = {origin.lower().rstrip("/") for origin in origins}

    def refusal(self, hosts: list[str], origins: list[str]) -> str | None:
        """Why a request with these `Host` and `Origin` headers is refused; None: it is not."""
        if len(hosts) != 1 or not self._is_ours(hosts[0]):
            return f"not the address of this server: Host {', '.join(hosts) or 'missing'}"[:200]
        own = {f"{scheme}://{hosts[0].lower()}" for scheme in ("http", "https")}
        if foreign := [origin for origin in origins if origin.lower() not in own | self._origins]:
            return f"not for pages of other sites: Origin {', '.join(foreign)}"[:200]
        return None

    def _is_ours(self, header: str) -> bool:
        bracketed = header.startswith("[")
        name = header[1:].partition("]")[0] if bracketed else header.partition(":")[0]
        name = name.lower().rstrip(".")
        return name in self._names or (self._any_address and _is_address(name))


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class Guarded:
    """An ASGI application behind the rules.

    Its pages may not be shown within those of other sites, whose visitors would click there without knowing, and load from and
    talk to this server alone, whatever a library in them or a Markdown text asks for.
    """

    _POLICY = (
        b"content-security-policy",
        b"default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; style-src 'self' 'unsafe-inline'; "
        b"img-src 'self' data: blob:; font-src 'self' data:; worker-src 'self' blob:; connect-src 'self'; object-src 'none'; "
        b"base-uri 'self'; form-action 'self'; frame-ancestors 'self'",
    )

    def __init__(self, application: Any, rules: Rules) -> None:
        self._application, self._rules = application, rules

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Passes a request on, or answers 403."""
        if scope["type"] not in ("http", "websocket"):
            return await self._application(scope, receive, send)
        given = [[v.decode("latin-1") for k, v in scope["headers"] if k == wanted] for wanted in (b"host", b"origin")]
        reason = self._rules.refusal(*given)
        if scope["type"] == "websocket":
            if reason is None:
                return await self._application(scope, receive, send)
            await receive()  # closed before it is accepted, it is answered 403 as well
            return await send({"type": "websocket.close", "code": 1008})
        if reason is not None:
            return await answer(send, 403, f"{reason}\n")

        async def send_with_policy(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = message | {"headers": [*message.get("headers", []), self._POLICY]}
            await send(message)

        await self._application(scope, receive, send_with_policy)


async def answer(
    send: Any, status: int, text: str, kind: str = "text/plain", more: Iterable[tuple[bytes, bytes]] = ()
) -> None:
    """A whole answer of an ASGI application, with further headers."""
    headers = [(b"content-type", f"{kind}; charset=utf-8".encode()), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text.encode()})


def guarded_wsgi(application: Any, rules: Rules) -> Any:
    """A WSGI application behind the rules."""

    def inner(environment: dict[str, Any], start_response: Any) -> Any:
        given = [[environment[name]] if name in environment else [] for name in ("HTTP_HOST", "HTTP_ORIGIN")]
        reason = rules.refusal(*given)
        if reason is None:
            return application(environment, start_response)
        start_response("403 Forbidden", [("Content-Type", "text/plain; charset=utf-8")])
        return [f"{reason}\n".encode()]

    return inner
