"""A store behind an imagined network: files in memory that are read by requests, which are counted and may fail."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from ..core.index import FileInfo
from ..core.requests import Policy
from ..errors import MissingFileError
from ..io.storage.base import Buffer, Entry
from ..io.storage.requesting import Requesting

__all__ = ["Served"]


class Served(Requesting):
    """Files in memory, behind requests.

    Parameters
    ----------
    content
        The bytes of each file. A file that is replaced there has another version.
    policy
        How reads become requests.
    piece
        Bytes that arrive at a time.
    before
        Called with the path, the start and the stop of each request before it is answered; it may raise.
    pins
        See `Requesting`.
    """

    def __init__(
        self,
        content: dict[str, bytes],
        policy: Policy | None = None,
        piece: int = 1 << 16,
        before: Callable[[str, int, int], None] | None = None,
        pins: Mapping[str, FileInfo] | None = None,
    ) -> None:
        super().__init__(policy, None, pins)
        self.content, self.piece, self.before = content, piece, before
        self.log: list[tuple[str, int, int]] = []

    @property
    def root(self) -> str:
        return "served://here"

    def below(self, folder: str) -> Served:
        start = f"{folder}/"
        inner = {n.removeprefix(start): data for n, data in self.content.items() if n.startswith(start)}
        return Served(inner, self.policy, self.piece, self.before)

    def _with(self, pins: Mapping[str, FileInfo]) -> Served:
        store = Served(self.content, self.policy, self.piece, self.before, pins)
        store.log, store.io = self.log, self.io
        return store

    def list(self, folder: str = "") -> Mapping[str, Entry]:
        start = f"{folder}/" if folder else ""
        found: dict[str, Entry] = {}
        for name in self.content:
            if name.startswith(start):
                first, _, rest = name.removeprefix(start).partition("/")
                found[first] = Entry(FileInfo(0, 0) if rest else self._ask_state(name), bool(rest))
        return found

    def _ask_state(self, path: str) -> FileInfo:
        data = self.content.get(path)
        if data is None:
            error = MissingFileError(f"{self.root}/{path}: not found")
            error.errno = 2
            raise error
        return FileInfo(len(data), 0, f"{hash(data):x}")

    def _open(self, path: str, start: int, stop: int) -> tuple[FileInfo | None, Iterable[Buffer]]:
        self.log.append((path, start, stop))
        if self.before is not None:
            self.before(path, start, stop)
        info, data = self._ask_state(path), memoryview(self.content[path])[start:stop]
        return info, [data[at : at + self.piece] for at in range(0, len(data), self.piece)]
