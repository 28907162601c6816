"""Pins of very many files, from listings that were made when the checkpoint was opened.

An array in a hierarchy has up to millions of chunks. A listing tells the states of a thousand of them with one request,
and also which of them are absent. Where there is no listing (it is not permitted, or would be too long), a chunk is
pinned when it is first accessed. Then the document that describes its array is compared again: who replaces a hierarchy
replaces its documents. One chunk that is overwritten in place before its first access is not noticed: its time of
modification is that of the server's clock, and answers do not tell what that was when the checkpoint was opened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from ...core.index import FileInfo

ABSENT = FileInfo(0, 0)  # the state of a file that does not exist
_V = TypeVar("_V")


class Folder(NamedTuple):
    """The files of an array.

    Attributes
    ----------
    holds
        Whether a path is that of a file of the array, existing or not. It can be pickled.
    is_listed
        Whether the listing told all of the files.
    document
        A pinned file that is replaced together with those of the array; "" if there is none.
    """

    holds: Callable[[str], bool]
    is_listed: bool
    document: str


class Listed(Mapping[str, FileInfo]):
    """The states of files, of which `get` also knows that they were absent.

    Parameters
    ----------
    files
        The files that exist.
    folders
        The arrays, by their folder.
    """

    def __init__(self, files: Mapping[str, FileInfo], folders: Mapping[str, Folder]) -> None:
        self._files, self._folders = dict(files), dict(folders)

    def __getitem__(self, path: str) -> FileInfo:
        return self._files[path]

    def __contains__(self, path: object) -> bool:
        return path in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def get(self, path: str, default: Any = None) -> Any:
        """Return the state of a file; `ABSENT` if a listing of its array lacked it, ``default`` if nothing is known."""
        found = self._files.get(path)
        if found is not None:
            return found
        folder = self.folder(path)
        return ABSENT if folder is not None and self._folders[folder].is_listed else default

    def document(self, path: str) -> str:
        """Return the document of the array that a file is in, if no listing told the files of that array; else ""."""
        folder = self.folder(path)
        return "" if folder is None or self._folders[folder].is_listed else self._folders[folder].document

    def folder(self, path: str) -> str | None:
        """Return the folder of the array that a file is in or would be in; None if there is none."""
        at = path
        while at:
            at = at.rpartition("/")[0]
            folder = self._folders.get(at)
            if folder is not None:
                return at if folder.holds(path) else None
        return None

    def only(self, paths: Iterable[str], seen: Mapping[str, FileInfo]) -> Mapping[str, FileInfo]:
        """Return what is known of these files. ``seen`` has the first states of others."""
        found = {path: self.get(path) or seen.get(path) for path in paths}
        known = {path: info for path, info in found.items() if info is not None}
        if len(known) == len(found):
            return known
        folders = {at: one for at, one in self._folders.items() if any(map(one.holds, found))}
        documents = {one.document for one in folders.values()} & self._files.keys()
        return Listed(known | {path: self._files[path] for path in documents}, folders)


def portable(pins: Mapping[str, FileInfo]) -> Mapping[str, FileInfo]:
    """Return pins as a pickle has them."""
    return pins if isinstance(pins, Listed) else dict(pins)
