"""The documents of a hierarchy in a folder of a store or in a zip.

Writers of zips: zarr/storage/_zip.py `ZipStore`, or any tool that packs a folder. Uncompressed entries are read in
place.
"""

from __future__ import annotations

import json
import os
import posixpath
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...core.extents import ZipEntry
from ...core.index import FileInfo
from ...errors import CorruptError, FormatError
from ...io.containers.needs import WHOLE
from ...io.containers.zip import DEFLATED, ENCRYPTED, STORED, read_zip
from ...io.containers.zip_offsets import data_offset
from ...io.limits import Budget, check_levels
from ...io.pool import each
from ...io.storage.access import present
from ...io.storage.base import Store
from ...io.storage.streams import StoreFile
from ...io.storage.urls import is_url
from ..shared.announce import announce, announce_folders, listing
from .grid import Place

_MAX_DOCUMENT = 1 << 28  # maximum size of a document, in bytes
_DOCUMENTS = ("zarr.json", ".zarray", ".zattrs", ".zgroup")
ROOTS = ("zarr.json", ".zmetadata", ".zgroup", ".zarray")


class Folder:
    """The folder of a store. ``documents`` has the files of all documents that have been read."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.documents: dict[str, FileInfo] = {}

    def where(self, path: str) -> str:
        return f"{self.store.root}/{path}"

    def listed(self, folder: str) -> Mapping[str, bool]:
        """Return the names directly inside a folder, each with whether it is a folder."""
        return {name: entry.is_dir for name, entry in listing(self.store, folder).items()}

    def announce(self, folders: Sequence[str]) -> None:
        """Announce that these folders are listed, and their documents read."""
        announce_folders(self.store, folders)
        if isinstance(self.store, Store) and self.store.ahead is not None:
            names = {folder: self.listed(folder) for folder in folders}
            announce(self.store, [posixpath.join(f, n) for f in folders for n in _DOCUMENTS if n in names[f]], WHOLE)

    def is_circle(self, folder: str) -> bool:
        """Return whether a folder is a link to one of its parents."""
        path = os.path.join(self.store.root, folder)
        if is_url(self.store.root) or not os.path.islink(path):
            return False
        real, above = os.path.realpath(path), os.path.realpath(os.path.dirname(path))
        return os.path.commonpath([real, above]) == real

    def document(self, path: str) -> bytes | None:
        """Read a document; return None if it does not exist. Raises CorruptError if it is too large."""
        info = present(self.store, path)
        if info is None:
            return None
        if info.size > _MAX_DOCUMENT:
            raise CorruptError(f"{self.where(path)} has {info.size:,} bytes: no document of zarr is so large")
        self.documents[path] = info
        return bytes(self.store.read(path, 0, info.size))


class Zip:
    """A zip, or the only folder in it. The constructor raises CorruptError if the zip is damaged."""

    def __init__(self, store: Store, path: str) -> None:
        self.store = store
        self.path = path
        self._file = StoreFile(store, path, tail=1 << 16)
        self.documents = {path: self._file.info}
        self._budget = Budget(f"{store.root}/{path}", self._file.info.size)
        self._base = ""
        start, entries = read_zip(self._file)  # refuses zips that other programs could read differently
        ordered = sorted(entries, key=lambda e: e.header)
        entries = [a._replace(after=b) for a, b in zip(ordered, [*(e.header for e in ordered[1:]), start], strict=True)]
        self._entries = {entry.name: entry for entry in entries if not entry.name.endswith("/")}
        tops = {name.split("/")[0] for name in self._entries}
        if len(tops) == 1 and not any(root in tops for root in ROOTS):
            self._base = f"{min(tops)}/"
        self._entries = {name.removeprefix(self._base): entry for name, entry in self._entries.items()}
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
        """Return the names directly inside a folder, each with whether it is a folder."""
        return self._folders.get(folder, {})

    def announce(self, folders: Sequence[str]) -> None:
        """Do nothing, because the directory of the zip has all names."""

    def is_circle(self, folder: str) -> bool:
        """Return False, because links in a zip are not followed."""
        return False

    def document(self, path: str) -> bytes | None:
        """Read a document; return None if it does not exist. Raises CorruptError, or FormatError if it is encrypted or
        compressed by a method other than deflate."""
        entry = self._entries.get(path)
        if entry is None:
            return None
        self._check_packing(path, entry)
        data = self._file.at(data_offset(self._file, entry), entry.stored)
        limit = min(_MAX_DOCUMENT, self._budget.inflated_left)
        if entry.method == DEFLATED:
            stream = zlib.decompressobj(-zlib.MAX_WBITS)
            try:
                data = stream.decompress(data, limit + 1)
            except zlib.error as e:
                raise CorruptError(f"{self.where(path)} cannot be unpacked ({e}): the zip is damaged") from None
        self._budget.inflated(len(data))
        if len(data) > limit:
            raise CorruptError(f"{self.where(path)} is too large for a document of zarr")
        if len(data) != entry.nbytes or zlib.crc32(data) != entry.crc:
            raise CorruptError(f"{self.where(path)} fails its checksum in the zip: damaged, copy it again")
        return data

    def _check_packing(self, name: str, entry: ZipEntry) -> None:
        if entry.method not in (STORED, DEFLATED) or entry.flags & ENCRYPTED:
            raise FormatError(
                f"{self.where(name)}: entries of a zip are read that are stored as they are or deflated, this one "
                f"is encrypted or packed in another way ({entry.method}): write it again with ZIP_STORED"
            )

    @property
    def names(self) -> list[str]:
        """The paths of all entries in the zip."""
        return [f"{self._base}{name}" for name in self._entries]

    def places(self, folders: Iterable[str]) -> dict[str, dict[str, Place]]:
        """Return the places of the keys below each folder. Raises CorruptError, or FormatError for a compression method
        that zarr does not use."""
        found: dict[str, dict[str, Place]] = {folder: {} for folder in folders}
        for name, entry in self._entries.items():
            folder = posixpath.dirname(name)
            while folder and folder not in found:
                folder = posixpath.dirname(folder)
            if folder not in found:
                continue
            self._check_packing(name, entry)
            found[folder][name[len(folder) :].lstrip("/")] = Place(entry, entry.method == DEFLATED)
        return found


Tree = Folder | Zip


def is_zip_of_zarr(path: str, head: bytes) -> bool:
    """Return whether a file is a zip of zarr: its first entry is one of zarr, or its name ends with .zip and the first
    entry is not one of torch."""
    if not head.startswith(b"PK\x03\x04"):
        return False
    name = head[30 : 30 + int.from_bytes(head[26:28], "little")].decode("utf-8", "replace")
    if posixpath.basename(name) in (*ROOTS, ".zattrs"):
        return True
    return path.endswith(".zip") and not name.endswith(("/data.pkl", "/.format_version", "/byteorder"))


# -- The nodes of a hierarchy of either version, from its consolidated metadata or by walking its folders.

_DEPTH = 64  # maximum depth of groups
_MANY = 1 << 20  # maximum number of folders to walk

Json = dict[str, Any]


@dataclass(slots=True)
class Nodes:
    """The nodes of a hierarchy."""

    root: Json = field(default_factory=dict)
    """The root's v3 document; {} if there is none."""
    arrays: dict[str, tuple[int, Json, Json, str]] = field(default_factory=dict)
    """Path -> (version, document, attributes, path of the document)."""
    attributes: dict[str, Json] = field(default_factory=dict)
    """Path of a group -> its attributes."""
    damaged: dict[str, str] = field(default_factory=dict)
    """Path of a node that cannot be read -> reason."""


def nodes(tree: Tree) -> Nodes:
    """Read the nodes of a hierarchy. Raises CorruptError."""
    found = Nodes()
    data = tree.document("zarr.json")
    if data is not None:
        found.root = _parsed(data, tree.where("zarr.json"))
        listed = found.root.get("consolidated_metadata")
        if isinstance(listed, dict) and isinstance(listed.get("metadata"), dict):
            _add_v3(found, "", found.root, "zarr.json", tree)
            for path, about in listed["metadata"].items():
                _add_v3(found, _inside(path, tree.where("zarr.json")), about, "zarr.json", tree)
            return found
    elif (data := tree.document(".zmetadata")) is not None:
        where = tree.where(".zmetadata")
        listed = _parsed(data, where).get("metadata")
        if not isinstance(listed, dict):
            raise CorruptError(f"{where} has no metadata: damaged")
        for path, about in listed.items():
            if posixpath.basename(path) == ".zarray":
                folder = _inside(posixpath.dirname(path), where)
                attributes = listed.get(posixpath.join(folder, ".zattrs"))
                found.arrays[folder] = 2, _object(about, where), _object(attributes or {}, where), ".zmetadata"
            elif posixpath.basename(path) == ".zgroup":
                folder = _inside(posixpath.dirname(path), where)
                found.attributes[folder] = _object(listed.get(posixpath.join(folder, ".zattrs")) or {}, where)
        return found
    _walk(tree, found)
    tree.documents = dict(sorted(tree.documents.items()))  # threads have added them in any order
    return found


def _walk(tree: Tree, found: Nodes) -> None:
    level, seen = [""], 0
    for _ in range(_DEPTH):
        below: dict[str, list[str]] = {}
        tree.announce(level)

        def visit(folder: str, below: dict[str, list[str]] = below) -> None:
            try:
                below[folder] = _visit(tree, folder, found)
            except CorruptError as e:
                if not folder:
                    raise
                found.damaged[folder], below[folder] = str(e), []

        each(visit, level)
        tables: tuple[dict[str, Any], ...] = (found.arrays, found.attributes, found.damaged)
        for table in tables:
            for folder in level:  # in the order of their names, not in that in which threads have read them
                if folder in table:
                    table[folder] = table.pop(folder)
        level = [child for folder in level for child in below[folder]]
        seen += len(level)
        if not level:
            # threads found them in any order
            found.arrays = {path: found.arrays[path] for path in sorted(found.arrays)}
            found.attributes = {path: found.attributes[path] for path in sorted(found.attributes)}
            found.damaged = {path: found.damaged[path] for path in sorted(found.damaged)}
            return
        if seen > _MANY:
            break
    raise CorruptError(f"{tree.where('')} has more than {_MANY:,} folders, or {_DEPTH} in one another: no hierarchy")


def _visit(tree: Tree, folder: str, found: Nodes) -> list[str]:
    """Record the node of a folder; return its subfolders unless it is an array."""
    names = tree.listed(folder)
    if "zarr.json" in names:
        path = posixpath.join(folder, "zarr.json")
        about = found.root if not folder else _parsed(tree.document(path), tree.where(path))
        if _add_v3(found, folder, about, path, tree):
            return []
    elif ".zarray" in names:
        path = posixpath.join(folder, ".zarray")
        about = _parsed(tree.document(path), tree.where(path))
        found.arrays[folder] = 2, about, _attributes(tree, folder, names), path
        return []
    elif ".zgroup" in names:
        found.attributes[folder] = _attributes(tree, folder, names)
    inside = [posixpath.join(folder, name) for name, is_folder in sorted(names.items()) if is_folder]
    circles = [path for path in inside if tree.is_circle(path)]
    for path in circles:
        found.damaged[path] = (
            f"{tree.where(path)} is a link to a folder that contains it, which is no hierarchy: remove the link"
        )
    return [path for path in inside if path not in circles]


def _attributes(tree: Tree, folder: str, names: Mapping[str, bool]) -> Json:
    path = posixpath.join(folder, ".zattrs")
    found = _parsed(tree.document(path), tree.where(path)) if ".zattrs" in names else {}
    check_levels(tree.where(path), found)
    return found


def _add_v3(found: Nodes, folder: str, about: Any, path: str, tree: Tree) -> bool:
    """Record a node from its v3 document; return whether it is an array."""
    where = tree.where(path)
    about = _object(about, where)
    attributes = _object(about.get("attributes") or {}, where)
    check_levels(where, attributes)
    kind = about.get("node_type")
    if about.get("zarr_format") == 2 and "chunks" in about:  # zarr-python's consolidation of mixed versions
        found.arrays[folder] = 2, about, attributes, path
    elif kind == "array" and about.get("zarr_format") == 3:
        found.arrays[folder] = 3, about, attributes, path
    elif kind == "group" and about.get("zarr_format") == 3:
        found.attributes[folder] = attributes
        return False
    else:
        raise CorruptError(f"{where}: {folder!r:.80} is neither an array nor a group of zarr v3 ({kind!r:.20})")
    return True


def _inside(path: Any, where: str) -> str:
    """Return the path of a node, or raise CorruptError if it is outside the hierarchy."""
    if not isinstance(path, str) or "\0" in path or any(part in ("", ".", "..") for part in path.split("/") if path):
        raise CorruptError(f"{where} lists {path!r:.80}, which is no path of a node: damaged or hostile")
    return path


def _object(value: Any, where: str) -> Json:
    if not isinstance(value, dict):
        raise CorruptError(f"{where}: {value!r:.60} instead of a JSON object: damaged")
    return value


def _parsed(data: bytes | None, where: str) -> Json:
    data = data or b""
    Budget(where, len(data)).objects(data.count(b"{") + data.count(b"["))
    try:
        return _object(json.loads(data), where)
    except (ValueError, RecursionError) as e:
        raise CorruptError(f"{where} is no JSON ({e!s:.80}): truncated or damaged") from None
