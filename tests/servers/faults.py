"""What a server can be told to do wrong, how often, and to which requests."""

from __future__ import annotations

import asyncio
import gzip
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from .http import DropError, Request, Response, cut

PAGE = b"<!DOCTYPE html><html><head><title>Sign in</title></head><body>Sign in to the network</body></html>"


@dataclass
class Fault:
    """One thing to do wrong.

    ``path`` and ``method`` are patterns of what it concerns, ``what`` is "object", "list" or "*". The first ``skip``
    such requests are answered well, then ``times`` are not; None is all of them. ``options`` depend on the kind.
    """

    kind: str
    path: str = "*"
    method: str = "*"
    what: str = "*"
    skip: int = 0
    times: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    seen: int = 0

    def concerns(self, request: Request) -> bool:
        """Whether to do it to this request; counts the requests that it could concern."""
        if not (fnmatchcase(request.path, self.path) and fnmatchcase(request.method, self.method)):
            return False
        if self.what != "*" and self.what != ("list" if lists(request) else "object"):
            return False
        if self.kind == "token" and self.options["good"] in " ".join(request.headers.values()):
            return False
        self.seen += 1
        return self.skip < self.seen and (self.times is None or self.seen <= self.skip + self.times)


def lists(request: Request) -> bool:
    """Whether a request lists objects, by the protocols of S3, Google Cloud Storage and Azure."""
    asked = request.query
    if request.method != "GET":
        return False
    return (
        "list-type" in asked or asked.get("comp") == "list" or asked.keys() == {"prefix"} or request.path.count("/") < 2
    )


class Faults:
    """The faults of a server. ``replace`` gives an object other bytes of the same size; ``hidden`` are names that
    listings leave out."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.replace: Callable[[str], None] | None = None
        self.tags = 0

    def find(self, request: Request) -> Fault | None:
        found = None
        for fault in self.faults:
            if fault.concerns(request):
                found = found or fault
        return found

    async def before(self, fault: Fault, request: Request) -> Response | None:
        """Do what is to be done before the request is answered; return an answer to give instead."""
        options = fault.options
        match fault.kind:
            case "slow":  # seconds
                await asyncio.sleep(options["seconds"])
            case "hang":
                await asyncio.sleep(3600)
            case "drop":
                raise DropError
            case "status":  # status, error, message, headers
                return error(request, options["status"], options.get("error", "SlowDown"), options.get("message", ""),
                             options.get("headers"))  # fmt: skip
            case "token":  # good: text that a header of an accepted request has
                return error(request, 403, options.get("error", "ExpiredToken"), "The provided token has expired.")
            case "html":
                headers = {"Content-Type": "text/html", "Last-Modified": "Tue, 03 Feb 2026 01:00:00 GMT"}
                return Response(200, headers, [PAGE])
            case "redirect":  # to, status
                return Response(options.get("status", 307), {"Location": options["to"] + request.target})
            case "ignore_range":
                request.headers.pop("range", None)
            case "other_range":  # by: the answer is of bytes that lie so much later, and says so
                if found := re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("range", "")):
                    first, last = (int(n) + options["by"] for n in found.groups())
                    request.headers["range"] = f"bytes={first}-{last}"
            case "replace":
                assert self.replace is not None, "this server cannot replace objects"
                self.replace(options.get("object", request.path))
        return None

    def after(self, fault: Fault, response: Response) -> Response:
        """Spoil an answer."""
        options, headers, good = fault.options, response.headers, response.status in (200, 206)
        match fault.kind:
            case "cut":  # after: the bytes of the body that arrive
                response.cut = options["after"]
            case "short" if good:  # by: as many bytes of the body are missing, and Content-Length says so
                response.body = cut(response.body, 0, max(0, response.size - options["by"]))
            case "wrong_content_range" if "Content-Range" in headers:  # by
                first, last, size = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", headers["Content-Range"]).groups()  # type: ignore[union-attr]
                headers["Content-Range"] = f"bytes {int(first) + options['by']}-{int(last) + options['by']}/{size}"
            case "no_content_range":
                headers.pop("Content-Range", None)
            case "no_etag":
                headers.pop("ETag", None)
            case "new_etag":
                self.tags += 1
                headers["ETag"] = f'"tag-{self.tags}"'
            case "gzip" if good:
                response.body = [gzip.compress(response.bytes(), 1)]
                headers["Content-Encoding"] = "gzip"
            case "trickle":  # seconds, size
                response.pause, response.pause_size = options["seconds"], options.get("size", 1 << 10)
            case "no_token":  # a listing says that it goes on, but not how
                response.body = [re.sub(rb"<NextContinuationToken>.*?</NextContinuationToken>", b"", response.bytes())]
            case "hide":  # objects: names (regular expression) that a listing leaves out
                hidden = re.compile(rf"<Contents>(?:(?!</Contents>).)*<Key>{options['objects']}</Key>.*?</Contents>")
                response.body = [hidden.sub("", response.bytes().decode()).encode()]
        return response


KINDS = [
    "slow",
    "hang",
    "drop",
    "status",
    "token",
    "html",
    "redirect",
    "ignore_range",
    "other_range",
    "replace",
    "cut",
    "short",
    "wrong_content_range",
    "no_content_range",
    "no_etag",
    "new_etag",
    "gzip",
    "trickle",
    "hide",
    "no_token",
]


def error(
    request: Request, status: int, code: str, message: str = "", headers: dict[str, str] | None = None
) -> Response:
    """Return an error as S3 describes it."""
    body = f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>{message}</Message></Error>'
    return Response(status, {"Content-Type": "application/xml"} | (headers or {}), [body.encode()])
