"""A Hub of its own: the parts of the Hub's HTTP interface that reading a repository needs, in threads of this process.

It answers as the Hub does: commits, trees in pages, private and gated repositories, small files behind a redirect on
the same host, and large files behind signed links to a second server, the "CDN", which refuses requests that carry an
Authorization header. It writes down every request.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, quote, unquote, urlencode, urlsplit

_LARGE = (".safetensors", ".bin", ".pt", ".distcp")  # endings of files that are stored by Git LFS
_API = re.compile(r"/api/(models|datasets|spaces)/([^/]+/[^/]+)/(revision|tree)/([^/]+)(?:/(.*))?")
_RESOLVE = re.compile(r"/(?:(datasets|spaces)/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
_CACHE = re.compile(r"/api/resolve-cache/(models|datasets|spaces)/([^/]+/[^/]+)/([^/]+)/(.+)")


class Asked(NamedTuple):
    """A request that a server got."""

    server: str  # "hub" or "cdn"
    method: str
    path: str
    range: str
    token: str


class Answer(NamedTuple):
    """An answer that replaces the right one."""

    status: int
    headers: Mapping[str, str] = {}
    body: bytes = b""


@dataclass
class Repository:
    """A repository: its commits (commit -> path -> content), and its refs (name -> commit)."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    private: bool = False
    gated: bool = False


class Hub:
    """Two servers, "hub" and "cdn"; use it as a context manager.

    Attributes
    ----------
    endpoint
        The URL of the Hub, for HF_ENDPOINT.
    asked
        The requests so far.
    token
        The token that may read private and gated repositories.
    page
        The number of entries of a page of a listing.
    faults
        Called with each request; an `Answer` is sent in place of the right answer, None changes nothing.
    ranges
        Whether requests for ranges get them. If False, every answer is the whole file.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.asked: list[Asked] = []
        self.token = "hf_" + "t" * 34
        self.page = 1000
        self.faults: Callable[[Asked], Answer | None] = lambda asked: None
        self.ranges = True
        self._links = 0  # links with a lower number have expired
        self._lock = threading.Lock()
        self._servers: list[ThreadingHTTPServer] = []

    def __enter__(self) -> Hub:
        for name in ("hub", "cdn"):
            handler = type("Handler", (_Handler,), {"hub": self, "server_name": name})
            server = _Server(("127.0.0.1", 0), handler)
            self._servers.append(server)
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._servers[0].server_address[1]}"

    @property
    def cdn(self) -> str:
        return f"http://localhost:{self._servers[1].server_address[1]}"

    # -- content

    def push(
        self,
        name: str,
        files: Mapping[str, bytes] | Path,
        ref: str = "main",
        kind: str = "models",
        private: bool | None = None,
        gated: bool | None = None,
    ) -> str:
        """Add a commit with these files (of a folder, all in it) to the others of a repository; return the commit."""
        if isinstance(files, Path):
            found = sorted(path for path in files.rglob("*") if path.is_file())
            files = {path.relative_to(files).as_posix(): path.read_bytes() for path in found}
        repository = self.repositories.setdefault(f"{kind}/{name}", Repository())
        before = repository.commits.get(repository.refs.get(ref, ""), {})
        content = before | dict(files)
        text = repr((len(repository.commits), sorted((path, _oid(path, data)) for path, data in content.items())))
        commit = hashlib.sha1(text.encode("utf-8", "surrogatepass")).hexdigest()
        repository.commits[commit] = content
        repository.refs[ref] = commit
        repository.private = repository.private if private is None else private
        repository.gated = repository.gated if gated is None else gated
        return commit

    def expire_links(self) -> None:
        """Make the CDN refuse all links that it has given out so far."""
        self._links += 1

    # -- counting

    def clear(self) -> None:
        self.asked.clear()

    def counts(self) -> dict[str, int]:
        """Return the numbers of requests since `clear`, by what they were for."""
        found: dict[str, int] = {}
        for asked in self.asked:
            words = ("revision", "tree", "resolve-cache", "resolve")
            kind = next((word for word in words if f"/{word}/" in asked.path), "other")
            kind = "cdn" if asked.server == "cdn" else kind
            found[kind] = found.get(kind, 0) + 1
        return found

    # -- answers

    def answer(self, asked: Asked) -> Answer:
        with self._lock:
            self.asked.append(asked)
        wrong = self.faults(asked)
        if wrong is not None:
            return wrong
        return self._from_cdn(asked) if asked.server == "cdn" else self._from_hub(asked)

    def _from_hub(self, asked: Asked) -> Answer:
        url = urlsplit(asked.path)
        if match := _API.fullmatch(url.path):
            kind, name, verb, revision, folder = match.groups()
            found = self._find(asked, kind, name, unquote(revision), f"https://huggingface.co/{name}")
            if isinstance(found, Answer):
                return found
            repository, commit = found
            if verb == "revision":
                siblings = [{"rfilename": path} for path in repository.commits[commit]]
                more = {} if "expand" in parse_qs(url.query) else {"siblings": siblings}
                return _json({"_id": "6", "id": name, "sha": commit, **more}, {})
            return self._tree(asked, repository.commits[commit], unquote(folder or ""))
        match = _RESOLVE.fullmatch(url.path)
        if match is None and (cached := _CACHE.fullmatch(url.path)):
            kind, name, revision, path = cached.groups()
        elif match:
            kind, name, revision, path = match.groups()
        else:
            return _error(404, "", "not found")
        kind, path = kind or "models", unquote(path)
        found = self._find(asked, kind, name, unquote(revision), f"https://huggingface.co/{name}", content=True)
        if isinstance(found, Answer):
            return found
        repository, commit = found
        if path not in repository.commits[commit]:
            return _error(404, "EntryNotFound", "Entry not found")
        data = repository.commits[commit][path]
        state = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if _is_large(path):
            sha = hashlib.sha256(data).hexdigest()
            query = urlencode({"X-Amz-Signature": f"secret{self._links}", "X-Amz-Expires": "3600"})
            link = f"{self.cdn}/{kind}/{quote(name)}/{commit}/{sha}/{quote(path)}?{query}"
            linked = {"X-Linked-Etag": f'"{sha}"', "X-Linked-Size": str(len(data)), "Location": link}
            return Answer(302, state | linked, b"Found. Redirecting to " + link.encode())
        etag = f'"{_oid(path, data)}"'
        if match:
            query = urlencode({url.path: "", "etag": etag})
            link = f"/api/resolve-cache/{kind}/{name}/{commit}/{quote(path)}?{query}"
            return Answer(307, state | {"Location": link}, b"Temporary Redirect")
        return self._part(asked, data, state | {"ETag": etag})

    def _find(
        self, asked: Asked, kind: str, name: str, revision: str, page: str, content: bool = False
    ) -> tuple[Repository, str] | Answer:
        if asked.token not in ("", self.token):
            return _error(401, "", "Invalid credentials in Authorization header")
        repository = self.repositories.get(f"{kind}/{name}")
        if repository is None or (repository.private and asked.token != self.token):
            return _error(401 if not asked.token else 404, "RepoNotFound", "Invalid username or password.")
        if repository.gated and content and asked.token != self.token:
            return _error(401, "GatedRepo", f"Access to model {name} is restricted. Visit {page}")
        commit = repository.refs.get(revision, revision)
        if commit not in repository.commits:
            return _error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return repository, commit

    def _tree(self, asked: Asked, files: Mapping[str, bytes], folder: str) -> Answer:
        query = parse_qs(urlsplit(asked.path).query)
        recursive = query.get("recursive", ["False"])[0].lower() == "true"
        start = int(query.get("cursor", ["0"])[0])
        entries: dict[str, dict[str, Any]] = {}
        for path, data in sorted(files.items()):
            if folder and not path.startswith(f"{folder}/"):
                continue
            rest = path[len(folder) + 1 if folder else 0 :].split("/")
            for depth in range(1, len(rest) if recursive else min(2, len(rest))):
                above = "/".join([folder, *rest[:depth]] if folder else rest[:depth])
                entries[above] = {"type": "directory", "oid": "0" * 40, "size": 0, "path": above}
            if recursive or len(rest) == 1:
                entries[path] = _entry(path, data)
        if folder and not entries:
            return _error(404, "EntryNotFound", f"{folder} does not exist")
        page = list(entries.values())[start : start + self.page]
        more = start + self.page < len(entries)
        path = urlsplit(asked.path).path
        words = urlencode({"recursive": recursive, "cursor": start + self.page})
        headers = {"Link": f'<{self.endpoint}{path}?{words}>; rel="next"'} if more else {}
        return _json(page, headers)

    def _from_cdn(self, asked: Asked) -> Answer:
        url = urlsplit(asked.path)
        kind, owner, name, commit, sha, path = unquote(url.path)[1:].split("/", 5)
        if asked.token:
            return Answer(400, {}, b"Only one auth mechanism allowed")
        if parse_qs(url.query).get("X-Amz-Signature") != [f"secret{self._links}"]:
            return Answer(403, {}, b"<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>")
        data = self.repositories[f"{kind}/{owner}/{name}"].commits[commit][path]
        return self._part(asked, data, {"ETag": f'"{hashlib.md5(sha.encode()).hexdigest()}-1"'})

    def _part(self, asked: Asked, data: bytes, headers: Mapping[str, str]) -> Answer:
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", asked.range) if self.ranges else None
        if not wanted:
            return Answer(200, headers, data)
        start, stop = int(wanted[1]), min(int(wanted[2]) + 1, len(data))
        if start >= len(data):
            return Answer(416, {**headers, "Content-Range": f"bytes */{len(data)}"}, b"")
        return Answer(206, {**headers, "Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"}, data[start:stop])


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: clients may hang up."""


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    server_name: str
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        asked = Asked(self.server_name, self.command, self.path, self.headers.get("Range", ""), token)
        answer = self.hub.answer(asked)
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        if "Content-Length" in answer.headers:  # perhaps not that of the body
            self.close_connection = True
        else:
            self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(answer.body)

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_message(self, format: str, *args: object) -> None:
        pass


def _is_large(path: str) -> bool:
    return path.endswith(_LARGE)


def _oid(path: str, data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _entry(path: str, data: bytes) -> dict[str, Any]:
    entry = {"type": "file", "oid": _oid(path, data), "size": len(data), "path": path}
    if _is_large(path):
        entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
    return entry


def _json(value: Any, headers: Mapping[str, str]) -> Answer:
    return Answer(200, {**headers, "Content-Type": "application/json"}, json.dumps(value).encode())


def _error(status: int, code: str, message: str) -> Answer:
    headers = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {})}
    return Answer(status, headers, json.dumps({"error": message}).encode())
