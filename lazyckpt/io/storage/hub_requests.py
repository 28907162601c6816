"""Requests to the Hub of Hugging Face, with huggingface_hub's session, headers and errors.

A read asks the Hub for a range of a file of one commit. The Hub answers with a link: for a large file to a storage
server, with a signature that expires; for a small one to itself. The link is kept, so that further reads of the file
take one request. The token is sent to the Hub only, never to the server behind a link.

Error messages (`hub_errors`) name the file, never a link, because a signed link is a credential.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple
from urllib.parse import quote, urljoin, urlsplit

from ...core.index import FileInfo
from ...errors import ChangedFileError, CorruptError
from .base import Buffer
from .hub_errors import failed
from .hub_url import COMMIT, KINDS, Place
from .traffic import Traffic

INSTALL = "pip install 'lazyckpt[hub]'"
_CONTENT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")  # the SHA-1 of a blob of Git, or the SHA-256 of a file of Git LFS
_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+)")
_QUERY = re.compile(r"\?[^\s\"']+")
_HOPS = 8  # redirects that one request follows
_WHOLE = 16 << 20  # bytes; a file of at most so many is read whole if the server does not serve ranges of it
_CHUNK = 1 << 20
_MESSAGE = 1 << 20  # bytes; the largest body of an error that is read
_BODIES = (200, 206, 416)  # statuses of answers that hold bytes of a file, or say that it has none there
_EXPIRED = (400, 401, 403, 404, 410)  # statuses with which storage servers refuse an old link


class _Logs(logging.Filter):
    """Removes the queries of URLs from what the HTTP libraries log of requests of this module: signatures are there."""

    def __init__(self) -> None:
        super().__init__()
        self._own = threading.local()

    @contextmanager
    def without_links(self) -> Iterator[None]:
        """Remove them from what this thread logs within the context."""
        for name in ("httpx", "urllib3.connectionpool", "huggingface_hub.utils._http"):
            logging.getLogger(name).addFilter(self)
        self._own.asks = True
        try:
            yield
        finally:
            self._own.asks = False

    def filter(self, record: logging.LogRecord) -> bool:
        if getattr(self._own, "asks", False):
            record.msg, record.args = _QUERY.sub("?...", record.getMessage()), ()
        return True


_logs = _Logs()


class _Link(NamedTuple):
    """Where the bytes of a file are, and what the Hub said of the file when it gave the link."""

    url: str
    info: FileInfo | None  # None: the answer behind the link tells it
    etag: str  # of the first answer behind the link


class Connection:
    """Requests for one repository.

    Parameters
    ----------
    place
        The repository.
    options
        ``token`` and ``endpoint``, if they are not those of huggingface_hub's login and environment.
    timeout
        The number of seconds to wait for an answer, and for each part of it.
    io
        The counters to add to. The caller counts one request for each call; further ones are counted here.
    """

    def __init__(self, place: Place, options: Mapping[str, Any], timeout: float, io: Traffic) -> None:
        self._place = place
        self._options = options
        self._timeout = timeout
        self._io = io
        self._links: dict[str, _Link] = {}

    @property
    def endpoint(self) -> str:
        """The URL of the Hub."""
        from huggingface_hub import constants

        found = self._options.get("endpoint") or os.environ.get("HF_ENDPOINT") or constants.ENDPOINT
        return str(found).rstrip("/")

    # -- the interface of the Hub

    def commit(self, revision: str) -> str:
        """Return the commit that a revision is now."""
        found, _ = self._json(self._api("revision", revision or "main") + "?expand=sha", self._place.url)
        commit = found.get("sha") if isinstance(found, dict) else None
        if not isinstance(commit, str) or not COMMIT.fullmatch(commit):
            raise OSError(
                f"{self._place.url}: {self.endpoint} does not answer as the Hub does: no commit in its answer"
            )
        return commit

    def tree(self, commit: str, folder: str, recursive: bool, after: str = "") -> tuple[list[dict[str, Any]], str]:
        """Return a page of the listing of a folder, and the URL of the next page (``after``), "" for the last."""
        path = f"/{quote(folder, safe='')}" if folder else ""
        url = after or f"{self._api('tree', commit)}{path}?recursive={recursive}&expand=False"
        found, following = self._json(url, self._place._replace(revision=commit, path=folder).url)
        if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
            raise OSError(f"{self._place.url}: {self.endpoint} does not answer as the Hub does: no list in its answer")
        return found, following

    def open(self, commit: str, path: str, start: int, stop: int) -> tuple[FileInfo, Iterator[Buffer]]:
        """Request bytes ``start`` to ``stop`` of a file; return its state, and the bytes as they arrive."""
        where = self._place._replace(revision=commit, path=path).url
        link = self._links.get(path)
        if link is not None:
            response = self._send(link.url, where, start, stop)
            status = response.status_code
            if status in _BODIES and _etag(response.headers) in ("", link.etag):
                return self._body(response, where, link.info, start, stop)
            self._finish(response, where, allowed=(*_BODIES, *_EXPIRED))
            if self._links.get(path) is link:  # it has expired, or leads elsewhere now: ask for another
                self._links.pop(path, None)
            self._io.add(requests=1)
        url, response, info = self._follow(self._url(commit, path), where, commit, start, stop)
        if response.status_code in (401, 403) and not self._is_hub(url or self.endpoint):
            response.close()
            raise OSError(f"{where}: {urlsplit(url).netloc} refuses the link that the Hub has just given")
        if response.status_code not in _BODIES:
            self._finish(response, where)
        found = self._body(response, where, info, start, stop)
        if url:
            self._links[path] = _Link(url, found[0] if info is None else info, _etag(response.headers))
        return found

    # -- implementation

    def _api(self, verb: str, revision: str) -> str:
        return f"{self.endpoint}/api/{self._place.kind}/{self._place.repo}/{verb}/{quote(revision, safe='')}"

    def _url(self, commit: str, path: str) -> str:
        from huggingface_hub import hf_hub_url

        repo, kind = self._place.repo, KINDS[self._place.kind]
        return str(hf_hub_url(repo, path, repo_type=kind, revision=commit, endpoint=self.endpoint))

    def _follow(self, url: str, where: str, commit: str, start: int, stop: int) -> tuple[str, Any, FileInfo | None]:
        """Request a file and follow redirects. Return the URL behind them ("" if there were none), its answer, and the
        state of the file if a redirect tells it."""
        version, size, target = "", "", ""
        for _ in range(_HOPS):
            response = self._send(target or url, where, start, stop)
            headers = response.headers
            if self._is_hub(target or url):
                told = headers.get("X-Repo-Commit", "")
                if response.status_code < 400 and COMMIT.fullmatch(told) and told != commit:
                    response.close()
                    raise ChangedFileError(f"{where}: the server answers with commit {told}: do not use this mirror")
                version = version or _content(headers.get("X-Linked-Etag", ""))
                size = size or headers.get("X-Linked-Size", "")
            if not 300 <= response.status_code < 400 or "Location" not in headers:
                info = FileInfo(int(size), 0, version) if size.isdigit() else None
                return target, response, info
            self._finish(response, where, allowed=range(300, 400))
            target = urljoin(target or url, headers["Location"])
            self._io.add(requests=1)
        raise OSError(f"{where}: the server redirects more than {_HOPS} times")

    def _is_hub(self, url: str) -> bool:
        """Return whether a URL is one of the Hub itself: the token goes nowhere else."""
        ours, theirs = urlsplit(self.endpoint), urlsplit(url)
        return (ours.scheme, ours.netloc.lower()) == (theirs.scheme, theirs.netloc.lower())

    def _json(self, url: str, where: str) -> tuple[Any, str]:
        """Return the JSON behind a URL of the Hub, and the URL of its next page, "" if there is none."""
        for _ in range(_HOPS):
            response = self._send(url, where)
            location = response.headers.get("Location", "")
            if not (300 <= response.status_code < 400 and location):  # a repository that was renamed has one
                break
            self._finish(response, where, allowed=range(300, 400))
            url = urljoin(url, location)
            self._io.add(requests=1)
        if response.status_code >= 300:
            self._finish(response, where)
        try:
            found = response.json() if _loaded(response) else None
        except ValueError:
            raise OSError(f"{where}: {self.endpoint} does not answer as the Hub does: its answer is no JSON") from None
        except Exception as e:
            raise failed(e, where, self._place, self.endpoint) from None
        following = urlsplit(response.links.get("next", {}).get("url", ""))
        # a mirror may pass on links to the original Hub
        return found, f"{self.endpoint}{following.path}?{following.query}" if following.query else ""

    def _send(self, url: str, where: str, start: int = 0, stop: int = 0) -> Any:
        """Send a GET, for a range if there is one; return the answer, whose body has not been read."""
        from huggingface_hub.utils import get_session

        headers = {"Accept-Encoding": "identity", "User-Agent": "lazyckpt"}
        if stop > start:
            headers["Range"] = f"bytes={start}-{stop - 1}"
        try:
            token = self._token() if self._is_hub(url) else None
            if token is not None:
                headers["Authorization"] = f"Bearer {token}"
            session = get_session()
            with _logs.without_links():
                if hasattr(session, "build_request"):  # httpx, which huggingface_hub uses since 1.0
                    request = session.build_request("GET", url, headers=headers, timeout=self._timeout)
                    return session.send(request, stream=True, follow_redirects=False)
                return session.get(url, headers=headers, timeout=self._timeout, stream=True, allow_redirects=False)
        except Exception as e:
            raise failed(e, where, self._place, self.endpoint) from None

    def _token(self) -> str | None:
        """Return the token to send. It is looked up for each request, because a login may renew it."""
        from huggingface_hub import constants, get_token
        from huggingface_hub.errors import LocalTokenNotFoundError

        asked = self._options.get("token")
        if isinstance(asked, str):
            return asked
        if asked is False or (asked is None and constants.HF_HUB_DISABLE_IMPLICIT_TOKEN):
            return None
        found: str | None = get_token()
        if found is None and asked is True:
            raise LocalTokenNotFoundError
        return found

    def _finish(self, response: Any, where: str, allowed: Container[int] = ()) -> None:
        """Finish an answer whose body is not wanted. Raises unless its status is ``allowed``."""
        from huggingface_hub.utils import hf_raise_for_status

        status = response.status_code
        try:
            size = response.headers.get("Content-Length", "")
            if status >= 300 and size.isdigit() and int(size) <= _MESSAGE:  # so that the connection can be used again
                _loaded(response)
            else:
                response.close()
            if status not in allowed:
                hf_raise_for_status(response)
                raise OSError(f"the server answers with status {status}")
        except Exception as e:
            raise failed(e, where, self._place, self.endpoint) from None

    def _body(
        self, response: Any, where: str, info: FileInfo | None, start: int, stop: int
    ) -> tuple[FileInfo, Iterator[Buffer]]:
        """Return the state of the file and the wanted bytes of an answer. Raises if it holds other ones."""
        status, headers = response.status_code, response.headers
        skip, size, count = 0, -1, 0
        told = _RANGE.fullmatch(headers.get("Content-Range", ""))
        length = headers.get("Content-Length", "")
        if headers.get("Content-Encoding", "identity") not in ("", "identity"):
            wrong = "the server compresses ranges of it"
        elif status == 416 and told:
            size, wrong = int(told[3]), ""
        elif status == 206 and told and told[1]:
            size, count = int(told[3]), int(told[2]) + 1 - start
            wrong = "" if int(told[1]) == start and int(told[2]) < stop else "the server answers with another range"
        elif status == 200 and length.isdigit():
            size = int(length)
            skip, count = min(start, size), max(0, min(stop, size) - start)
            wrong = "" if size <= max(_WHOLE, stop - start) else "the server does not serve ranges of it"
        else:
            wrong = f"the server answers with status {status} and no size"
        if wrong:
            response.close()
            raise CorruptError(f"{where}: {wrong}: download it with huggingface_hub, and open that")
        version = info.version if info is not None else _content(headers.get("ETag", ""))
        return FileInfo(size, 0, version), self._chunks(response, where, skip, count)

    def _chunks(self, response: Any, where: str, skip: int, count: int) -> Iterator[Buffer]:
        """Yield ``count`` bytes of a body, without the first ``skip``."""
        try:
            pieces = response.iter_raw() if hasattr(response, "iter_raw") else response.iter_content(_CHUNK)
            for piece in pieces:
                data = memoryview(piece)[skip:]
                skip = max(0, skip - len(piece))
                if len(data) > count:
                    data = data[:count]
                count -= len(data)
                if len(data):
                    yield data
                if not count and not skip:
                    break
        except Exception as e:
            raise failed(e, where, self._place, self.endpoint) from None
        finally:
            with suppress(Exception):  # what a broken connection says when it is closed
                response.close()


def _loaded(response: Any) -> bytes:
    """Read the body of an answer."""
    return bytes(response.read() if hasattr(response, "iter_raw") else response.content)


def _content(etag: str) -> str:
    """Return the hash that an ETag of the Hub is, "" if it is none."""
    text = etag.removeprefix("W/").strip('"')
    return text if _CONTENT.fullmatch(text) else ""


def _etag(headers: Mapping[str, str]) -> str:
    return headers.get("ETag", "")
