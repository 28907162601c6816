"""Repositories on the Hub of Hugging Face: ``hf://owner/name[@revision][/path]``, through huggingface_hub.

The revision is resolved to a commit when a checkpoint is opened, and every later request names the commit. A commit
does not change, so its listing is kept, and what is pushed meanwhile is seen by the next `lazyckpt.open`.

Files of the commit that are in huggingface_hub's cache are read from there, without a request. If huggingface_hub is
offline (HF_HUB_OFFLINE), only those are read. If the Hub cannot be reached, a warning says that the cache is read.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ...core.index import FileInfo
from ...core.requests import Ints, Policy, Request
from ...errors import CorruptError, FormatError, MissingFileError
from .access import guarded
from .base import Buffer, Entry, Fetched, Guard, Store, closed_error, raise_unreadable
from .credentials import OWN, Sealed, seal, unseal
from .hub_cache import cached_commit
from .hub_commit import Commit
from .hub_errors import missing
from .hub_requests import INSTALL, Connection
from .hub_url import COMMIT, Place, parse
from .listed import portable
from .local import LocalStore
from .mapping import Mapped
from .pieces import Pieces
from .repeating import Transient
from .requesting import Requesting
from .segments import ObjectKey
from .traffic import Traffic

_KEY = os.urandom(32)  # of this process, so that hashes of options reveal nothing about them elsewhere
_OPTIONS = ("token", "endpoint", "cache_dir", "requests", "pickle_credentials")
_OFFLINE = "it is not in the cache of huggingface_hub, which is offline (HF_HUB_OFFLINE): download it first"


def handles(url: str) -> bool:
    """Return whether a URL names a repository on the Hub. Buckets (hf://buckets/) are not repositories."""
    return url.startswith("hf://") and not url.startswith(("hf://buckets/", "hf://kernels/"))


def _restored(sealed: Sealed, pins: Mapping[str, FileInfo], guards: Mapping[str, Guard]) -> Store:
    url, options = unseal(sealed)
    return guarded(HubStore(parse(url), options, pins=pins), guards)


class HubStore(Requesting):
    """A folder of one commit of a repository.

    Parameters
    ----------
    place
        The folder, with a commit as its revision.
    options
        ``token``, ``endpoint`` and ``cache_dir``, if they are not those of huggingface_hub's login and environment;
        ``requests``, see `Policy`.
    traffic, pins
        See `Requesting`.
    shared
        What the stores of the same commit share; None for the first one.
    offline
        Whether only huggingface_hub's cache is read; None: if huggingface_hub is offline.
    """

    def __init__(
        self,
        place: Place,
        options: Mapping[str, Any] | None = None,
        traffic: Traffic | None = None,
        pins: Mapping[str, FileInfo] | None = None,
        shared: Commit | None = None,
        offline: bool | None = None,
    ) -> None:
        _check_installed(place.url)
        self._options = dict(options or {})
        super().__init__(Policy.of(self._options.get("requests")), traffic, pins)
        self._where = place
        if shared is None:
            connection = Connection(place, self._options, self.policy.timeout, self.io)
            shared = Commit(place._replace(path=""), connection, self._options.get("cache_dir"), bool(offline))
            shared.offline = is_offline() if offline is None else offline
        self._shared = shared
        self._local = LocalStore(shared.snapshot.root, shared.local)
        self._maps = self._has_all()

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (seal(self.root, self._options, self.root), portable(self.pins), dict(self.guards))

    def __repr__(self) -> str:
        return f"HubStore({self.root!r})"

    def close(self) -> None:
        super().close()
        self._local.close()

    @property
    def options(self) -> Mapping[str, Any]:
        return self._options

    @property
    def root(self) -> str:
        return self._where.url

    @property
    def key(self) -> str:
        text = repr((self._shared.connection.endpoint, sorted(self._options.items(), key=lambda item: item[0])))
        return f"{self.root} {hashlib.blake2b(text.encode('utf-8', 'surrogatepass'), key=_KEY).hexdigest()}"

    @property
    def maps_files(self) -> bool:
        return self._maps and self._local.maps_files  # not where the cache is on a network file system

    @property
    def gap(self) -> int:
        return self._local.gap if self._maps else super().gap

    def below(self, folder: str) -> HubStore:
        place = self._where._replace(path=self._full(folder))
        return self._like_this(HubStore(place, self._options, self.io, shared=self._shared))

    def _with(self, pins: Mapping[str, FileInfo]) -> HubStore:
        return HubStore(self._where, self._options, self.io, pins, self._shared)

    def pin(self, pins: Mapping[str, FileInfo]) -> None:
        super().pin(pins)
        self._maps = self._has_all()

    def list(self, folder: str = "") -> Mapping[str, Entry]:
        try:
            return self._shared.entries(self._full(folder), self._repeated)
        except OSError as e:
            raise_unreadable(self.root, folder, e)

    def tree(self, folder: str, limit: int) -> None:
        """Return None: no file of a commit changes, so nobody needs their states."""

    def _full(self, path: str) -> str:
        """Return the path of a file or folder in the repository. Raises MissingFileError for a path that leads out of
        it: the cache is a folder like others."""
        full = f"{self._where.path}/{path}".strip("/")
        if ".." in full.replace("\\", "/").split("/"):
            raise missing(f"{self.root}/{path}: no file of a repository has such a path")
        return full

    # -- requests

    def _stat(self, path: str) -> FileInfo:
        """Return the state of a file in the listing of its folder: no file of a commit changes."""
        above, _, name = self._full(path).rpartition("/")
        entry = self._shared.entries(above, self._repeated).get(name)
        if entry is None:
            what = _OFFLINE if self._shared.offline else "no such file in this commit. Is the whole checkpoint there?"
            raise missing(f"{self.root}/{path}: {what}")
        if entry.is_dir:
            raise CorruptError(f"{self.root}/{path} is a folder")
        return entry.info

    def _ask_state(self, path: str) -> FileInfo:
        return self._stat(path)

    def _open(self, path: str, start: int, stop: int) -> tuple[FileInfo | None, Iterable[Buffer]]:
        if self._shared.offline:
            raise missing(f"{self.root}/{path}: {_OFFLINE}")
        return self._shared.connection.open(self._where.revision, self._full(path), start, stop)

    def forecast(self, wanted: Mapping[str, tuple[Ints, Ints]]) -> Iterator[tuple[str, Request]]:
        yield from super().forecast({path: runs for path, runs in wanted.items() if self._cached(path) is None})

    # -- the block cache

    def _key_of(self, path: str, info: FileInfo | None = None) -> ObjectKey | None:
        return None if self._cached(path) is not None else super()._key_of(path, info)

    def _access(self) -> Mapping[str, Any]:
        return {"endpoint": self._shared.connection.endpoint}

    def _address_of(self, path: str) -> str:
        """Return the URL of a file without the commit: the version is a hash of the content, so that files which a
        push does not change stay in the cache."""
        return self._where._replace(revision="", path=self._full(path)).url

    # -- files in huggingface_hub's cache

    def _cached(self, path: str) -> FileInfo | None:
        """Return the state of a file that is read from the cache, None if the Hub is asked for it.

        The cache's file must stay as it was at its first use; `LocalStore` checks that."""
        full = self._full(path)
        info = self._shared.cached(full, self.pins.get(path))
        if info is not None and full not in self._shared.local:
            try:
                self._shared.local[full] = self._local.stat(full)
            except MissingFileError:
                self._shared.uncached(full)
                return None
        return info

    def _has_all(self) -> bool:
        """Return whether the cache has all files of the checkpoint."""
        return bool(self.pins) and all(self._cached(path) is not None for path in self.pins)

    def _read_cached(self, path: str, offset: int, target: memoryview) -> FileInfo | None:
        """Fill ``target``, as far as the file goes, and return its state; None if the cache does not have the file."""
        info = self._cached(path)
        if info is None:
            return None
        target = target[: max(0, info.size - offset)]
        try:
            self._local.unguarded(self._full(path), offset, target)
        except MissingFileError:  # removed from the cache since
            self._shared.uncached(self._full(path))
            return None
        self.io.add(hits=1)
        return info

    def _fetch(self, path: str, offset: int, target: memoryview) -> Fetched:
        info = self._read_cached(path, offset, target)
        if info is None:
            return super()._fetch(path, offset, target)
        return max(0, min(len(target), info.size - offset)), info

    def _fetch_pieces(self, path: str, pieces: Sequence[tuple[int, memoryview]]) -> None:
        info = self._cached(path)
        if info is None:
            super()._fetch_pieces(path, pieces)
            return
        if self.closed:
            raise closed_error(self.root)
        self._judge(path, 0, 0, 0, info)
        self.io.add(hits=1)
        try:
            self._local._fetch_pieces(self._full(path), pieces)
        except MissingFileError:
            self._shared.uncached(self._full(path))
            super()._fetch_pieces(path, pieces)

    def _make(self, path: str, start: int, stop: int, pieces: Pieces) -> None:
        if self._cached(path) is None:
            super()._make(path, start, stop, pieces)
            return
        self._fetch_pieces(path, pieces.targets())
        for fetch in pieces.owners():
            fetch.arrived()

    def map(self, path: str) -> Mapped | None:
        info = self._cached(path)
        if info is None:
            return None
        self._judge(path, 0, 0, 0, info)
        return self._local.map(self._full(path))

    def confirm(self, path: str, mapped: Mapped) -> None:
        self._local.confirm(self._full(path), mapped)

    def private(self, path: str) -> Buffer | None:
        return None if self._cached(path) is None else self._local.private(self._full(path))


# -- Opening.


def _check_installed(url: str) -> None:
    try:
        import huggingface_hub  # noqa: F401
    except ImportError:
        raise FormatError(f"{url}: huggingface_hub is not installed: {INSTALL}") from None


def is_offline() -> bool:
    """Return whether huggingface_hub is told to make no requests."""
    from huggingface_hub import constants

    asked = getattr(constants, "is_offline_mode", None)
    return bool(asked() if asked is not None else constants.HF_HUB_OFFLINE)


def split_hub(url: str, options: Mapping[str, Any] | None = None) -> tuple[Store, str]:
    """Return the store of a commit for a user's URL, and the name within the store. A folder has the name ""; a file is
    opened in the store of its parent folder.

    Raises FormatError for a URL that names no repository, for unknown options, and if huggingface_hub is not
    installed; MissingFileError if there is no such repository, revision, file or folder, or no access to it; OSError
    if the Hub does not answer.
    """
    _check_installed(url)
    place = parse(url)
    options = dict(options or {})
    for name in options:
        if name not in (*_OPTIONS, *OWN):
            raise FormatError(f"storage_options: hf:// has no option {name!r}. There are: {', '.join(_OPTIONS)}")
    if not isinstance(options.get("token"), str | bool | None):
        raise FormatError(f"{url}: storage_options: token= is a text, or False for none")
    store = _resolved(place, options)
    if not place.path:
        return store, ""
    above, _, name = place.path.rpartition("/")
    parent = store.below(above) if above else store
    entry = parent.list().get(name)
    if entry is None:
        what = _OFFLINE if parent._shared.offline else "no such file or folder in this commit"
        raise missing(f"{store.root}/{place.path}: {what}")
    return (parent.below(name), "") if entry.is_dir else (parent, name)


def _resolved(place: Place, options: Mapping[str, Any]) -> HubStore:
    """Return the store of the commit that a revision is now."""
    top = place._replace(path="")
    cached = cached_commit(top, options.get("cache_dir"))
    if is_offline():
        if not cached:
            raise missing(
                f"{place.url}: huggingface_hub is offline (HF_HUB_OFFLINE), and its cache has nothing of this "
                f"revision: download it first, with 'hf download {place.repo}'"
            )
        return HubStore(top._replace(revision=cached), options, offline=True)
    if COMMIT.fullmatch(place.revision):
        return HubStore(top, options)
    first = HubStore(top, options)  # of the revision, only to ask for the commit

    def ask() -> str:
        return first._shared.connection.commit(place.revision)

    try:
        commit = _once(first, ask) if cached else first._repeated(ask)
    except Transient as e:
        warnings.warn(f"{e}. Reading commit {cached} from the cache of huggingface_hub instead.", stacklevel=2)
        return HubStore(top._replace(revision=cached), options, first.io, offline=True)
    return HubStore(top._replace(revision=commit), options, first.io)


def _once(store: HubStore, ask: Callable[[], str]) -> str:
    store.io.add(requests=1)
    return ask()
