"""The folder of the index cache: files that only the user can have written, up to a total size.

Any process may read, write, replace or remove an entry at any time: entries are published by renaming, and a reader
verifies what it has read. A file is used only if the user owns it, if no one else may write to it, if it is no link,
and if its code of authentication is right. The key of these codes is in the folder, too, readable by the user only; so
an entry that somebody else has made, or that was copied from another machine, is not used.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from ...core.units import size_in_bytes
from ...errors import DataError
from ...io import user_folder
from ...io.directories import Directory
from ...io.user_folder import Refused, check

MAGIC = b"LZCKIDX\x01"  # the last byte is the version of the layout
HEAD = len(MAGIC) + 32  # bytes before the payload
SIZE = 1 << 30  # bytes; the default limit of all entries together
_ENDING = ".index"
_KEY = "key"
_STALE = 3600  # seconds after which an unfinished file is that of a process that was killed


class Stored(NamedTuple):
    """An entry as a file. ``used`` is the time of its last use, in seconds."""

    name: str
    nbytes: int
    used: float


def location() -> Path:
    """Return the folder of the entries. Raises Refused if there is none."""
    return user_folder.location() / "index"


def limit() -> int:
    """Return the most bytes of all entries together (``LAZYCKPT_CACHE_SIZE``). Raises Refused for an invalid size."""
    chosen = os.environ.get("LAZYCKPT_CACHE_SIZE")
    try:
        return size_in_bytes(chosen) if chosen else SIZE
    except DataError as e:
        raise Refused(f"LAZYCKPT_CACHE_SIZE: {e}") from None


@contextmanager
def opened(make: bool = False) -> Iterator[Folder]:
    """Yield the folder. ``make`` creates it. Raises Refused if it is not the user's own, OSError if it is absent."""
    with user_folder.opened(location(), make) as directory:
        yield Folder(directory)


class Folder:
    """The open folder."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._secret: bytes | None = None

    @property
    def path(self) -> str:
        return self._directory.path

    def secret(self, make: bool = False) -> bytes:
        """Return the key of the codes of authentication. Raises Refused, and OSError if there is none."""
        if self._secret is None:
            if make:
                with suppress(FileExistsError):
                    fd = self._directory.open(_KEY, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                    with os.fdopen(fd, "wb") as file:
                        file.write(secrets.token_bytes(32))
            fd = self._directory.open(_KEY, os.O_RDONLY)
            try:
                status = os.fstat(fd)
                check(status, _KEY, private=True)
                self._secret = os.read(fd, 33)
            finally:
                os.close(fd)
            if len(self._secret) != 32:  # another process is about to write it, or it is damaged
                self._secret = None
                raise Refused(f"{_KEY} does not have 32 bytes")
        return self._secret

    def code(self, payload: bytes | memoryview) -> bytes:
        """Return the code of authentication of a payload."""
        return hmac.digest(self.secret(), payload, hashlib.sha256)

    def fingerprint(self, text: str) -> str:
        """Return a hash of a text that reveals nothing about it to those who do not know the key."""
        return hmac.digest(self.secret(), text.encode("utf-8", "surrogatepass"), hashlib.sha256).hex()

    def read(self, name: str, use: bool = True) -> memoryview:
        """Return the payload of an entry; ``use`` notes the time. Raises Refused if it must not be used, and OSError if
        there is none."""
        fd = self._directory.open(name + _ENDING, os.O_RDONLY)
        try:
            status = os.fstat(fd)
            check(status, name)
            with os.fdopen(os.dup(fd), "rb", buffering=0) as file:
                data = file.readall()
            if use:
                with suppress(OSError):  # a folder that cannot be written to can still be read
                    os.utime(fd if os.utime in os.supports_fd else os.path.join(self.path, name + _ENDING))
        finally:
            os.close(fd)
        if len(data) < HEAD or not data.startswith(MAGIC):
            raise Refused(f"{name} is of another version, or no entry")
        payload = memoryview(data)[HEAD:]
        if not hmac.compare_digest(self.code(payload), data[len(MAGIC) : HEAD]):
            raise Refused(f"{name} was not written by this user's lazyckpt, or is damaged")
        return payload

    def write(self, name: str, payload: bytes) -> None:
        """Write or replace an entry, and remove others if all together are too large. Raises Refused, OSError."""
        most = limit()
        if HEAD + len(payload) > most:
            raise Refused(f"an entry of {len(payload):,} bytes is larger than the whole cache may be")
        head = MAGIC + self.code(payload)
        part = f".{name}.{os.getpid()}.{secrets.token_hex(4)}"
        fd = self._directory.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(fd, "wb", buffering=0) as file:
                for data in (head, payload):
                    rest = memoryview(data)
                    while rest:
                        rest = rest[file.write(rest) :]
            self._directory.replace(part, name + _ENDING)
        except BaseException:
            with suppress(OSError):
                self._directory.unlink(part)
            raise
        self._evict(most, name)

    def entries(self) -> list[Stored]:
        """Return all entries, the last used first."""
        found = []
        for name in self._directory.names():
            if name.endswith(_ENDING):
                with suppress(OSError):  # another process has removed it
                    status = self._directory.stat(name)
                    found.append(Stored(name.removesuffix(_ENDING), status.st_size, status.st_mtime))
        return sorted(found, key=lambda entry: entry.used, reverse=True)

    def remove(self, name: str) -> None:
        """Remove an entry, if it is there."""
        with suppress(FileNotFoundError):
            self._directory.unlink(name + _ENDING)

    def _evict(self, most: int, kept: str) -> None:
        """Remove the entries that were not used for the longest time, and what killed processes have left."""
        total = 0
        for entry in self.entries():
            total += entry.nbytes
            if total > most and entry.name != kept:
                self.remove(entry.name)
                total -= entry.nbytes
        for name in self._directory.names():
            if name.startswith(".") and not name.endswith(_ENDING):
                with suppress(OSError):
                    if self._directory.stat(name).st_mtime < time.time() - _STALE:
                        self._directory.unlink(name)
