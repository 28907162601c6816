"""The nodes of a hierarchy of either version: from its consolidated metadata, or by going through the folders.

Sources: zarr-python core/group.py `ConsolidatedMetadata` (v3: in the root's zarr.json; v2: .zmetadata); tensorstore,
which writes arrays alone, without groups.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...errors import CorruptError
from ...io.limits import Budget
from ...io.pool import each
from .tree import Tree

_DEPTH = 64  # of groups in groups
_MANY = 1 << 20  # folders that are gone through

Json = dict[str, Any]


@dataclass(slots=True)
class Nodes:
    """``root``: the root's document and attributes, as v3 has them; {} if there is none. ``arrays``: path -> (version,
    document, attributes, the document's path). ``attributes``: path of a group -> its attributes. ``damaged``: path of
    a node that cannot be read -> why."""

    root: Json = field(default_factory=dict)
    arrays: dict[str, tuple[int, Json, Json, str]] = field(default_factory=dict)
    attributes: dict[str, Json] = field(default_factory=dict)
    damaged: dict[str, str] = field(default_factory=dict)


def nodes(tree: Tree) -> Nodes:
    """Raises CorruptError."""
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
    return found


def _walk(tree: Tree, found: Nodes) -> None:
    level, seen = [""], 0
    for _ in range(_DEPTH):
        below: dict[str, list[str]] = {}

        def visit(folder: str, below: dict[str, list[str]] = below) -> None:
            try:
                below[folder] = _visit(tree, folder, found)
            except CorruptError as e:
                if not folder:
                    raise
                found.damaged[folder], below[folder] = str(e), []

        each(visit, level)
        level = [child for folder in level for child in below[folder]]
        seen += len(level)
        if not level:
            return
        if seen > _MANY:
            break
    raise CorruptError(f"{tree.where('')} has more than {_MANY:,} folders, or {_DEPTH} in one another: no hierarchy")


def _visit(tree: Tree, folder: str, found: Nodes) -> list[str]:
    """Note what a folder is; its folders, if it is no array."""
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
            f"{tree.where(path)} is a link to a folder that it is in, which is no hierarchy: remove it"
        )
    return [path for path in inside if path not in circles]


def _attributes(tree: Tree, folder: str, names: Mapping[str, bool]) -> Json:
    path = posixpath.join(folder, ".zattrs")
    return _parsed(tree.document(path), tree.where(path)) if ".zattrs" in names else {}


def _add_v3(found: Nodes, folder: str, about: Any, path: str, tree: Tree) -> bool:
    """Whether it is an array."""
    where = tree.where(path)
    about = _object(about, where)
    attributes = _object(about.get("attributes") or {}, where)
    kind = about.get("node_type")
    if about.get("zarr_format") == 2 and "chunks" in about:  # zarr-python consolidates a hierarchy of both so
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
    """The path of a node, if it is one that lies in the hierarchy."""
    if not isinstance(path, str) or "\0" in path or any(part in ("", ".", "..") for part in path.split("/") if path):
        raise CorruptError(f"{where} lists {path!r:.80}, which is no path of a node: damaged or hostile")
    return path


def _object(value: Any, where: str) -> Json:
    if not isinstance(value, dict):
        raise CorruptError(f"{where}: {value!r:.60} where an object is due: damaged")
    return value


def _parsed(data: bytes | None, where: str) -> Json:
    data = data or b""
    Budget(where, len(data)).objects(data.count(b"{") + data.count(b"["))
    try:
        return _object(json.loads(data), where)
    except (ValueError, RecursionError) as e:
        raise CorruptError(f"{where} is no JSON ({e!s:.80}): truncated or damaged") from None
