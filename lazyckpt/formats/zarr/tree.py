"""Where the documents of a hierarchy are: a folder of a store, or a zip.

Writers of zips: zarr/storage/_zip.py `ZipStore`; and whoever packs a folder. Entries that are not compressed are read
where they lie.
"""

from __future__ import annotations

import os
import posixpath
import zipfile
from collections.abc import Iterable, Mapping

from ...core.index import FileInfo
from ...errors import CorruptError, FormatError, LazyckptError
from ...io.limits import Budget
from ...io.remote import is_url
from ...io.store import Store, StoreFile, present
from ...io.zips import read_zip
from .grid import Place

_MAX_DOCUMENT = 1 << 28  # bytes
ROOTS = ("zarr.json", ".zmetadata", ".zgroup", ".zarray")


class Folder:
    """The folder of a store. ``documents``: those that were looked at."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.documents: dict[str, FileInfo] = {}

    def where(self, path: str) -> str:
        return f"{self.store.root}/{path}"

    def listed(self, folder: str) -> Mapping[str, bool]:
        """The names directly inside: whether each is a folder."""
        return {name: entry.is_dir for name, entry in self.store.list(folder).items()}

    def is_circle(self, folder: str) -> bool:
        """Whether a folder is a link to one that it is in."""
        path = os.path.join(self.store.root, folder)
        if is_url(self.store.root) or not os.path.islink(path):
            return False
        real, above = os.path.realpath(path), os.path.realpath(os.path.dirname(path))
        return os.path.commonpath([real, above]) == real

    def document(self, path: str) -> bytes | None:
        """Its bytes; None if it is not there. Raises CorruptError if it is absurdly large."""
        info = present(self.store, path)
        if info is None:
            return None
        if info.size > _MAX_DOCUMENT:
            raise CorruptError(f"{self.where(path)} has {info.size:,} bytes: no document of zarr is so large")
        self.documents[path] = info
        return bytes(self.store.read(path, 0, info.size))


class Zip:
    """A zip; or the only folder in it. Raises CorruptError if it is damaged."""

    def __init__(self, store: Store, path: str) -> None:
        self.store = store
        self.path = path
        file = StoreFile(store, path, tail=1 << 16)
        self.documents = {path: file.info}
        self._budget = Budget(f"{store.root}/{path}", file.info.size)
        self._base = ""
        read_zip(file)  # refuses what other readers could see otherwise
        try:  # zipfile has no error of its own for all damage; NotImplementedError: a zip of a later version
            self._zip = zipfile.ZipFile(file)
        except (zipfile.BadZipFile, ValueError, NotImplementedError) as e:
            raise CorruptError(f"{store.root}/{path} is no zip that can be read ({e}): truncated, or damaged") from None
        self._entries = {info.filename.strip("/"): info for info in self._zip.infolist() if not info.is_dir()}
        tops = {name.split("/")[0] for name in self._entries}
        if len(tops) == 1 and not any(root in tops for root in ROOTS):
            self._base = f"{min(tops)}/"
        self._entries = {name.removeprefix(self._base): info for name, info in self._entries.items()}
        self._folders: dict[str, dict[str, bool]] = {}
        for name in self._entries:
            parts = name.split("/")
            for n in range(len(parts)):
                inside = self._folders.setdefault("/".join(parts[:n]), {})
                if n < len(parts) - 1:
                    inside[parts[n]] = True
                else:
                    inside.setdefault(parts[n], False)

    def where(self, path: str) -> str:
        return f"{self.store.root}/{self.path}/{self._base}{path}"

    def listed(self, folder: str) -> Mapping[str, bool]:
        """The names directly inside: whether each is a folder."""
        return self._folders.get(folder, {})

    def is_circle(self, folder: str) -> bool:
        """A zip has no links that are followed."""
        return False

    def document(self, path: str) -> bytes | None:
        """Its bytes; None if it is not there. Raises CorruptError."""
        info = self._entries.get(path)
        if info is None:
            return None
        limit = min(_MAX_DOCUMENT, self._budget.inflated_left)
        try:
            with self._zip.open(info) as stream:
                data = stream.read(limit + 1)
        except LazyckptError:
            raise
        except Exception as e:  # zipfile passes on what zlib, bz2 and lzma raise
            raise CorruptError(f"{self.where(path)} cannot be read ({e}): the zip is damaged, or encrypted") from None
        self._budget.inflated(len(data))
        if len(data) > limit:
            raise CorruptError(f"{self.where(path)} is too large for a document of zarr")
        return data

    @property
    def names(self) -> list[str]:
        """The paths of all entries, as they stand in the zip."""
        return [f"{self._base}{name}" for name in self._entries]

    def places(self, folders: Iterable[str]) -> dict[str, dict[str, Place]]:
        """For each of these folders, where the keys below it are. Raises CorruptError, FormatError (a compression that
        zarr does not use)."""
        found: dict[str, dict[str, Place]] = {folder: {} for folder in folders}
        size = self.documents[self.path].size
        for name, info in self._entries.items():
            folder = posixpath.dirname(name)
            while folder and folder not in found:
                folder = posixpath.dirname(folder)
            if folder not in found:
                continue
            if not 0 <= info.header_offset <= info.header_offset + info.compress_size <= size:
                raise CorruptError(f"{self.where(name)}: its entry lies outside of the zip: damaged")
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or info.flag_bits & 1:
                raise FormatError(
                    f"{self.where(name)}: entries of a zip are read that are stored as they are or deflated, this one "
                    f"is encrypted or packed in another way ({info.compress_type}): write it again with ZIP_STORED"
                )
            place = Place((info.header_offset, info.compress_size), info.compress_type == zipfile.ZIP_DEFLATED)
            found[folder][name[len(folder) :].lstrip("/")] = place
        return found


Tree = Folder | Zip


def is_zip_of_zarr(path: str, head: bytes) -> bool:
    """By its first bytes and name: a zip that begins with an entry of zarr, or is called .zip and none of torch's."""
    if not head.startswith(b"PK\x03\x04"):
        return False
    name = head[30 : 30 + int.from_bytes(head[26:28], "little")].decode("utf-8", "replace")
    if posixpath.basename(name) in (*ROOTS, ".zattrs"):
        return True
    return path.endswith(".zip") and not name.endswith(("/data.pkl", "/.format_version", "/byteorder"))
