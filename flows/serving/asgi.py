"""Routes beside Prefect's UI at the same address: the pages of runs, and the password form.

With a password, `/enter` asks for it and gives it to Prefect's UI and to the pages, which set a cookie.
`/enter#PASSWORD` does the same; browsers do not send the part after `#`. Without the cookie a browser asks for name and
password, which programs send as they do to Prefect's API.
"""

import base64
import hashlib
import hmac
import re
from http.cookies import CookieError, SimpleCookie
from typing import Any

from pipeline.web.host_check import send_response

COOKIE = "haed-pages"
_SECONDS = 30 * 24 * 3600
_ENTER = (
    "<!doctype html><title>haed serve: password</title><form hidden><label>Password, which haed serve keeps in the file it "
    "named: <input type=password autocomplete=current-password autofocus></label> <button>Enter</button> <output></output></form>"
    "<script>const form = document.querySelector('form'); async function enter(given) {"
    "const secret = btoa(given.includes(':') ? given : 'haed:' + given);"
    "const told = await fetch('/enter', {method: 'POST', headers: {Authorization: 'Basic ' + secret}});"
    "if (!told.ok) { form.hidden = false; form.querySelector('output').value = 'That is not it.'; return }"
    "localStorage.setItem('prefect-password', secret); location.replace('/v2/') }"
    "form.onsubmit = event => { event.preventDefault(); enter(form.querySelector('input').value.trim()) };"
    "if (location.hash) enter(decodeURIComponent(location.hash.slice(1))); else form.hidden = false</script>"
)
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
            or not (path in ("/enter", "/runs") or path.startswith("/runs/"))
            or _PREFECTS.match(path)
        ):
            return await self._prefect(scope, receive, send)
        if path == "/enter" and scope["method"] == "GET":
            return await send_response(send, 200, _ENTER, "text/html")
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        known = not self._secret or self._has_password(headers)
        if path == "/enter":
            cookie = f"{COOKIE}={self._token}; Path=/runs; Max-Age={_SECONDS}; HttpOnly; SameSite=Lax"
            return await send_response(
                send, 204 if known else 401, "", more=[(b"set-cookie", cookie.encode())] if known else ()
            )
        if not known and not self._has_cookie(headers):
            asked = (b"www-authenticate", b'Basic realm="haed", charset="UTF-8"')
            return await send_response(
                send, 401, "haed serve has a password: /enter asks for it, and lets a browser in\n", more=[asked]
            )
        await self._pages(scope, receive, send)

    def _has_password(self, headers: dict[bytes, str]) -> bool:
        scheme, _, given = headers.get(b"authorization", "").partition(" ")
        try:
            return scheme.lower() == "basic" and hmac.compare_digest(base64.b64decode(given), self._secret)
        except ValueError:
            return False

    def _has_cookie(self, headers: dict[bytes, str]) -> bool:
        try:
            found = SimpleCookie(headers.get(b"cookie", "")).get(COOKIE)
        except CookieError:
            return False
        return found is not None and hmac.compare_digest(found.value.encode(), self._token.encode())
