"""Who may ask the server: those who know the token, of the host and the pages that it is meant for.

A page of another site that a browser shows must not reach the checkpoint: its requests carry an ``Origin`` of its own,
and a name that it makes point to this machine (DNS rebinding) is an unknown ``Host``. Other users of the machine do not
know the token.
"""

from __future__ import annotations

import hmac
import re
import secrets
from base64 import b64decode
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from ..errors import DataError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_ANY = ("0.0.0.0", "::", "")  # addresses that stand for all of this machine's
_TOKEN = re.compile(r"[A-Za-z0-9._~-]*")  # what needs no quotes in an address, a cookie or a header

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
"""Headers of every answer: nothing is loaded from elsewhere, and no other page may show or read what is sent."""


def new_token() -> str:
    """Return a random token of 192 bits."""
    return secrets.token_urlsafe(24)


class Guard:
    """Wraps an application so that it answers only requests that may be answered.

    The token comes as ``?token=`` (a page is then redirected to itself with a cookie in place of it), as the cookie, as
    ``Authorization: Bearer TOKEN`` (or as the password of Basic), or as a path, ``/t/TOKEN/...``, for programs that can
    be given only a URL.

    Parameters
    ----------
    app
        The application.
    token
        The token; "" asks for none.
    host
        The address that the server listens on.
    hosts
        More names in ``Host`` that are accepted: those of a proxy or a tunnel.

    Raises
    ------
    DataError
        The token has characters that mean something in an address.
    """

    def __init__(self, app: App, token: str, host: str, hosts: Iterable[str] = ()) -> None:
        if not _TOKEN.fullmatch(token):
            raise DataError("the token is a part of an address: it may have letters, digits and - . _ ~ in it")
        self._app = app
        self._token = token.encode()
        self._hosts = {*_LOOPBACK, *(name.lower() for name in hosts)}
        if host not in _ANY:
            self._hosts.add(host.lower())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return  # no websockets
        headers = {name.lower(): value for name, value in reversed(scope["headers"])}
        refused = self._refused(scope, headers)
        if refused is not None:
            await _say(send, *refused)
            return
        path: str = scope["path"]
        cookie = f"lazyckpt-{_port(scope)}"
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = [value for name, value in query if name == "token"]
        if path.startswith("/t/"):
            token, slash, rest = path[3:].partition("/")
            if not self._is(token):
                await _say(send, 403, "The token in the address is not that of this server.")
                return
            if not slash:
                await _say(send, 308, "", {"Location": f"{token}/"})
                return
            scope = {**scope, "path": f"/{rest}", "raw_path": None}
        elif given and self._is(given[-1]):
            if scope["method"] == "GET" and path == "/":
                others = [(name, value) for name, value in query if name != "token"]
                where = "./" + (f"?{urlencode(others)}" if others else "")  # relative, below the path of any proxy
                kept = f"{cookie}={given[-1]}; HttpOnly; SameSite=Strict"  # without Path: for this page and below
                await _say(send, 303, "", {"Location": where, "Set-Cookie": kept, "Cache-Control": "no-store"})
                return
        elif not self._knows(headers, cookie):
            await _say(
                send,
                403,
                "This server shows its checkpoint to those who know its token.\n"
                "Open the address that `lazyckpt serve` printed: it has the token in it.",
            )
            return
        await self._app(scope, receive, _with_headers(send))

    def _refused(self, scope: Scope, headers: Mapping[bytes, bytes]) -> tuple[int, str] | None:
        if scope["method"] not in ("GET", "HEAD"):
            return 405, "The server is read-only: it answers GET and HEAD."
        host = headers.get(b"host", b"").decode("latin-1")
        if not self._accepts(host):
            return 421, (
                f"The server does not answer under the name {host!r:.100}.\n"
                "If a proxy or a tunnel leads here under this name: lazyckpt serve --allow-host NAME"
            )
        origin = headers.get(b"origin")
        if origin is not None and _netloc(origin.decode("latin-1")) != host.lower():
            return 403, "The request comes from a page of another site."
        site = headers.get(b"sec-fetch-site", b"none")
        if site not in (b"none", b"same-origin") and headers.get(b"sec-fetch-mode") != b"navigate":
            return 403, "The request comes from a page of another site."
        return None

    def _accepts(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname
        except ValueError:
            return False
        return name is not None and ("*" in self._hosts or name.lower() in self._hosts)

    def _is(self, token: str) -> bool:
        return hmac.compare_digest(token.encode("utf-8", "replace"), self._token)

    def _knows(self, headers: Mapping[bytes, bytes], cookie: str) -> bool:
        if not self._token:
            return True
        kind, _, rest = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        if kind.lower() in ("bearer", "token") and self._is(rest.strip()):
            return True
        if kind.lower() == "basic":
            try:
                password = b64decode(rest, validate=True).decode().partition(":")[2]
            except ValueError:
                return False
            if self._is(password):
                return True
        # not SimpleCookie, which gives up at the first cookie that it cannot read: servers of other ports set some
        pairs = (one.strip().partition("=") for one in headers.get(b"cookie", b"").decode("latin-1").split(";"))
        return any(name == cookie and self._is(value) for name, _, value in pairs)


def _netloc(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None


def _port(scope: Scope) -> int:
    return (scope.get("server") or ("", 0))[1] or 0


async def _say(send: Send, status: int, text: str, headers: Mapping[str, str] | None = None) -> None:
    body = text.encode()
    about = {
        "Content-Type": "text/plain; charset=utf-8",
        "Content-Length": str(len(body)),
        **HEADERS,
        **(headers or {}),
    }
    if status == 405:
        about["Allow"] = "GET, HEAD"
    if status == 403:
        about["Cache-Control"] = "no-store"
    pairs = [(name.lower().encode(), value.encode("latin-1")) for name, value in about.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})


def _with_headers(send: Send) -> Send:
    more = [(name.lower().encode(), value.encode("latin-1")) for name, value in HEADERS.items()]

    async def sent(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *more]}
        await send(message)

    return sent
