"""Objects of S3, Google Cloud Storage and Azure, and files of web servers, through obstore.

Every answer carries the object's ETag and size, which are compared with its pin. A key is what a bucket calls it,
whatever characters it has; in the URL of a web server, names are percent-encoded.

A web server has no listings. Where it shows a folder as a page of links, those are the listing; else the files that
checkpoints begin with (`index_page.KNOWN`) are looked for.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Any

from ...core.index import FileInfo
from ...core.requests import Policy
from ...errors import FormatError, MissingFileError
from ..pool import each
from .access import guarded
from .base import Buffer, Entry, Fetched, Guard, Store, raise_unreadable
from .connecting import Address, NoRangesError, address, asking, connect, is_unsigned, with_defaults
from .credentials import Sealed, seal, unseal
from .forked import Recipe, by_helper, obstore_works
from .index_page import HIDDEN, candidates, links
from .listed import portable
from .repeating import Transient
from .requesting import Requesting
from .traffic import Traffic

_KEY = os.urandom(32)  # of this process, so that hashes of options reveal nothing about them elsewhere
_CHUNK = 256 << 10  # bytes that obstore collects before it hands them over: it copies them twice, in the L2 cache
_PLAIN = ("", "identity", "aws-chunked")  # encodings of answers that leave the bytes as they are
_NAMES = 1000  # that an answer to a listing has
_PER_PAGE = 100  # a listing of a multiple of so many names may be one whose next page was not announced
_LAST = "\U0010ffff"  # sorts behind all characters of names
_PAGE = 4 << 20  # the longest page of links in bytes


def _restored(sealed: Sealed, pins: Mapping[str, FileInfo], guards: Mapping[str, Guard]) -> Store:
    return guarded(ObjectStore(*unseal(sealed), pins=pins), guards)


class ObjectStore(Requesting):
    """A prefix of a bucket, or a folder of a web server.

    Parameters
    ----------
    url
        The URL of the folder.
    options
        ``storage_options``, see `connecting`.
    traffic, pins
        See `Requesting`.
    connection
        The store of obstore to use; None connects to the URL.
    """

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any] | None = None,
        traffic: Traffic | None = None,
        pins: Mapping[str, FileInfo] | None = None,
        connection: Any = None,
    ) -> None:
        self._options = dict(options or {})
        super().__init__(Policy.of(self._options.get("requests")), traffic, pins)
        self._url = url
        self._address: Address = address(url)
        self._all = with_defaults(url, self._options)
        self._store = connection or connect(self._address, self._all, self.policy)
        self._asking = partial(asking, options=self._all, unsigned=is_unsigned(self._address, self._store))
        self._listed: Mapping[str, Entry] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (seal(self._url, self._options, self._shown), portable(self.pins), dict(self.guards))

    def __repr__(self) -> str:
        return f"ObjectStore({self.root!r})"

    @property
    def options(self) -> Mapping[str, Any]:
        """The options that were passed to `open`."""
        return self._options

    @property
    def root(self) -> str:
        return f"{self._address.shown}/{self._address.key}".rstrip("/")

    def address(self, name: str) -> str:
        return self._address.at(self.full(name))

    @property
    def _shown(self) -> str:
        """The URL without credentials."""
        where = self._address
        return where._replace(query="", user="").at(where.key) if where.query or where.user else self._url

    @property
    def key(self) -> str:
        text = repr((self._url, sorted(self._options.items(), key=lambda item: item[0])))
        return f"{self.root} {hashlib.blake2b(text.encode('utf-8', 'surrogatepass'), key=_KEY).hexdigest()}"

    @property
    def listable(self) -> bool:
        return self._address.kind != "http"

    def below(self, folder: str) -> ObjectStore:
        store = ObjectStore(self._address.at(self.full(folder)), self._options, self.io, connection=self._store)
        return self._like_this(store)

    def _with(self, pins: Mapping[str, FileInfo]) -> ObjectStore:
        return ObjectStore(self._url, self._options, self.io, pins, self._store)

    def parent(self) -> tuple[ObjectStore, str] | None:
        """Return the store of the folder that this one is in, and the name in it; None for a bucket."""
        folder, _, name = self._address.key.rpartition("/")
        if not name:
            return None
        return ObjectStore(self._address.at(folder), self._options, self.io, connection=self._store), name

    def there(self, path: str) -> bool:
        """Return whether there is a file."""
        try:
            self.stat(path)
        except MissingFileError:
            return False
        return True

    def is_page(self, path: str) -> bool | None:
        """Return whether the server has an HTML page in place of a file; None if it has nothing there.

        Raises FormatError if the server does not serve ranges of the file, PermissionError, and MissingFileError if no
        answer can be had."""
        try:
            return self._repeated(lambda: self._is_html(path, {"range": (0, 1)}))
        except FileNotFoundError:
            return None
        except NoRangesError as e:
            if self._repeated(lambda: self._is_html(path, None)):
                return True
            raise FormatError(str(e)) from None
        except PermissionError:
            raise
        except OSError as e:
            raise_unreadable(self.root, path, e)

    def full(self, path: str) -> str:
        """Return the key of a file."""
        return f"{self._address.key}/{path}".strip("/")

    def _access(self) -> Mapping[str, Any]:
        return self._all

    def _address_of(self, path: str) -> str:
        return f"{self.root}/{path}?{self._address.query}" if self._address.query else f"{self.root}/{path}"

    # -- requests; where obstore does not work, `forked` makes them

    def recipe(self) -> Recipe:
        """Return how to make a store like this one, without pins."""
        return ObjectStore, (self._url, self._options)

    @by_helper
    def _fill(self, path: str, start: int, target: memoryview) -> Fetched:
        """Make one request for the bytes of ``target``, and fill it as far as they come."""
        info, chunks = self._open(path, start, start + len(target))
        at = 0
        for chunk in chunks:
            data = memoryview(chunk).cast("B")
            if at + len(data) > len(target):
                raise Transient(f"{self.root}/{path}: the server sends more bytes than it was asked for")
            target[at : at + len(data)] = data
            at += len(data)
        return at, info

    @by_helper
    def _is_html(self, path: str, options: Any) -> bool:
        import obstore

        with self._asking(f"{self.root}/{path}"):
            answer = obstore.get(self._store, self.full(path), options=options)
            return str(answer.attributes.get("Content-Type", "")).startswith("text/html")

    def _open(self, path: str, start: int, stop: int) -> tuple[FileInfo | None, Iterable[Buffer]]:
        if not obstore_works():
            memory = memoryview(bytearray(stop - start))
            count, info = self._fill(path, start, memory)
            return info, (memory[:count],)
        import obstore

        url = f"{self.root}/{path}"
        try:
            with self._asking(url):
                answer = obstore.get(self._store, self.full(path), options={"range": (start, stop)})
                info = _info(answer.meta)
                if answer.range[0] != start:
                    raise Transient(f"{url}: the server answers with other bytes than the range that was asked for")
                _refuse_packed(url, answer)
        except FileNotFoundError as e:
            raise self._gone(path, e) from None
        except OSError as e:
            if "416" in str(e) or "Range started at" in str(e):  # the file ends before
                return self._ask_state(path), ()
            raise
        return info, self._chunks(url, answer)

    def _chunks(self, url: str, answer: Any) -> Iterator[Buffer]:
        with self._asking(url):
            start, stop = answer.range
            if stop - start <= _CHUNK:
                yield memoryview(answer.bytes())
                return
            for chunk in answer.stream(min_chunk_size=_CHUNK):
                yield memoryview(chunk)

    @by_helper
    def _ask_state(self, path: str) -> FileInfo:
        import obstore

        try:
            with self._asking(f"{self.root}/{path}"):
                return _info(obstore.head(self._store, self.full(path)))
        except FileNotFoundError as e:
            raise self._gone(path, e) from None
        except OSError:
            if self._address.kind != "http":
                raise
        # a server that answers GET but not HEAD, as for a signed address
        info, _ = self._open(path, 0, 1)
        assert info is not None
        return info

    def list(self, folder: str = "") -> Mapping[str, Entry]:
        if not folder and self._listed is not None:
            found, self._listed = self._listed, None
            return found
        try:
            return self._list(folder) if self.listable else self._list_page(folder)
        except PermissionError as e:
            if self.listable:  # without the permission to list, files may be readable
                with suppress(PermissionError):
                    if found := self._named(folder):
                        return found
            error = MissingFileError(str(e))
            error.errno = errno.EACCES
            raise error from None
        except FileNotFoundError:
            return {}
        except OSError as e:
            raise_unreadable(self.root, folder, e)

    def _list(self, folder: str) -> Mapping[str, Entry]:
        return self._repeated(lambda: self._ask_list(folder))

    @by_helper
    def _ask_list(self, folder: str) -> Mapping[str, Entry]:
        """Make one request for the listing of a folder (or one for each thousand of names)."""
        import obstore

        prefix = self.full(folder)
        with self._asking(f"{self.root}/{folder}".rstrip("/")):
            found: Mapping[str, Any] = obstore.list_with_delimiter(self._store, prefix or None)
        folder_entry = Entry(FileInfo(0, 0), True)
        entries = {name.rstrip("/").rpartition("/")[2]: folder_entry for name in found["common_prefixes"]}
        for meta in found["objects"]:
            name = meta["path"].rpartition("/")[2]
            if name and meta["path"].strip("/") != prefix:
                entries[name] = Entry(_info(meta), False)
        folders = [f"{name.rstrip('/')}/{_LAST}" for name in found["common_prefixes"]]
        self._check_complete(folder, [*folders, *(meta["path"] for meta in found["objects"])])
        return entries

    def _check_complete(self, folder: str, keys: Sequence[str]) -> None:
        """Raise OSError if there are names behind those of a listing of S3. A server of an older protocol says that
        there are more, but not where they begin, and obstore takes such a listing for all of it."""
        import obstore

        if self._address.kind != "s3" or not keys or len(keys) % _PER_PAGE:
            return
        where, last = f"{self.root}/{folder}".rstrip("/"), max(keys)
        with self._asking(where):
            more = next(iter(obstore.list(self._store, self.full(folder) or None, offset=last, chunk_size=1)), ())
        self.io.add(requests=1)
        # the marker of a folder, "name/", is listed behind "name", which obstore shows it as
        behind = any(meta["path"] > last for meta in more)
        anew = any(meta["path"] < last for meta in more) and not len(keys) % _NAMES  # as if it was not told where
        if behind or anew:
            raise OSError(
                f"{where}: the server's listing ends after {len(keys):,} names, and there are more: it does not speak "
                "version 2 of S3's listings. Open files by their own URLs"
            )

    def tree(self, folder: str, limit: int) -> Mapping[str, FileInfo] | None:
        """See `Store.tree`. One request lists a thousand files."""
        if not self.listable:
            return None
        try:
            found, pages = self._repeated(lambda: self._ask_tree(folder, limit))
        except PermissionError:
            return None
        except FileNotFoundError:
            return {}
        except OSError as e:
            raise_unreadable(self.root, folder, e)
        self.io.add(requests=pages - 1)
        return found

    @by_helper
    def _ask_tree(self, folder: str, limit: int) -> tuple[Mapping[str, FileInfo] | None, int]:
        """Make the requests for the listing of a folder and all folders below it. Return also how many."""
        import obstore

        prefix = self.full(folder)
        found: dict[str, FileInfo] = {}
        pages = 0
        with self._asking(f"{self.root}/{folder}".rstrip("/")):
            for page in obstore.list(self._store, prefix or None, chunk_size=_NAMES):
                pages += 1
                for meta in page:
                    path = str(meta["path"])[len(prefix) :].lstrip("/") if prefix else str(meta["path"])
                    found[f"{folder}/{path}" if folder else path] = _info(meta)
                if len(found) > limit:
                    return None, pages
        self._check_complete(folder, [self.full(path) for path in found])
        return found, max(1, pages)

    def listed(self, entries: Mapping[str, Entry]) -> ObjectStore:
        """Return this store, whose next listing is ``entries``, which was asked for a moment ago."""
        self._listed = entries
        return self

    def _list_page(self, folder: str) -> Mapping[str, Entry]:
        """Return the listing that the page of a folder shows, or the well-known files that are there."""
        files, folders = links(self._page(folder))
        if not files and not folders:
            return self._named(folder)
        if not any(name.startswith(".") for name in files):
            files += HIDDEN
        return {name: Entry(FileInfo(0, 0), True) for name in folders} | self._present(folder, files)

    def names(self, folder: str = "") -> Mapping[str, bool] | None:
        if self.listable:
            try:
                return {name: entry.is_dir for name, entry in self._list(folder).items()}
            except PermissionError:
                return None
            except OSError as e:
                raise_unreadable(self.root, folder, e)
        files, folders = links(self._page(folder))
        if not files and not folders:
            return None
        hidden = () if any(name.startswith(".") for name in files) else self._present(folder, HIDDEN)
        return dict.fromkeys(folders, True) | dict.fromkeys([*files, *hidden], False)

    def _named(self, folder: str) -> Mapping[str, Entry]:
        """Return those of the well-known files of checkpoints that are in a folder."""
        return self._present(folder, candidates(lambda name: self._page(f"{folder}/{name}".lstrip("/"))))

    def _present(self, folder: str, names: Sequence[str]) -> dict[str, Entry]:
        """Return those of the files that are in a folder. Raises PermissionError if access to all of them is denied."""
        found: dict[str, Entry] = {}
        denied: list[PermissionError] = []

        def look(name: str) -> None:
            try:
                found[name] = Entry(self._stat(f"{folder}/{name}".lstrip("/")), False)
            except FileNotFoundError:
                return
            except PermissionError as e:  # without the permission to list, 403 may be absence
                denied.append(e)

        each(look, names, self.width)
        if denied and not found:
            raise denied[0]
        return {name: found[name] for name in names if name in found}

    def _page(self, path: str) -> bytes:
        """Return a page or a small file; b"" if there is none that may be read. Raises OSError for other reasons."""
        try:
            return self._repeated(lambda: self._ask_page(path))
        except (FileNotFoundError, PermissionError):
            return b""

    @by_helper
    def _ask_page(self, path: str) -> bytes:
        import obstore

        with self._asking(f"{self.root}/{path}"):
            answer = obstore.get(self._store, self.full(path))
            _refuse_packed(f"{self.root}/{path}", answer)
            return bytes(answer.bytes()) if answer.meta["size"] <= _PAGE else b""

    def _gone(self, path: str, e: OSError) -> MissingFileError:
        error = MissingFileError(f"{self.root}/{path}: not found. Is the whole checkpoint there?")
        error.errno = e.errno
        return error


def _refuse_packed(url: str, answer: Any) -> None:
    """Raise OSError for an answer whose bytes are not the file's. No request allows packing."""
    packed = str(answer.attributes.get("Content-Encoding", "")).lower()
    if packed not in _PLAIN:
        raise OSError(f"{url}: the server sends it packed (Content-Encoding: {packed}): upload it without")


def _info(meta: Mapping[str, Any]) -> FileInfo:
    """Return the state of an object. The same ETag is written differently in listings and in answers."""
    version = str(meta.get("e_tag") or meta.get("version") or "").removeprefix("W/").strip('"')
    changed: datetime | None = meta.get("last_modified")
    return FileInfo(int(meta["size"]), int(changed.timestamp()) * 10**9 if changed else 0, version)
