"""The documents beside the arrays: the tree, the sharding, texts, keys of random numbers, and what the step records.

Writers: orbax/checkpoint/_src/metadata/tree.py `InternalTreeMetadata` (``_METADATA``), sharding.py (``_sharding``),
step_metadata_serialization.py (``_CHECKPOINT_METADATA``), array_metadata_store.py (``array_metadatas/process_N``), and
serialization/type_handlers.py `StringHandler` (``_strings.json``), of orbax-checkpoint 0.12.8.
"""

from __future__ import annotations

import base64
import json
import posixpath
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ...core.index import FileInfo
from ...core.placement import Mesh
from ...errors import CorruptError, Problem
from ...io.limits import Budget, check_levels
from ...io.storage.access import present
from ...io.storage.base import Store
from ..shared.announce import listing
from .trees import Key

TREE, SHARDING, STRINGS, STEP = "_METADATA", "_sharding", "_strings.json", "_CHECKPOINT_METADATA"
ARRAYS = "array_metadatas"
_LARGEST = 1 << 28  # bytes of a document
# names of axes of meshes, as MaxText, T5X, Flax and EasyLM call them
_AXES = {
    "tp": ("tp", "tensor", "tensor_parallel", "tensor_transpose", "tensor_sequence", "model", "mp", "mlp"),
    "pp": ("pp", "stage", "pipe", "pipeline"),
    "ep": ("ep", "expert", "experts"),
    "dp": ("dp", "data", "fsdp", "fsdp_transpose", "replica", "batch", "dcn", "zero"),
}


@dataclass(slots=True)
class Tree:
    """What the documents of one tree say."""

    keys: dict[str, Key] = field(default_factory=dict)
    """Name of an array -> its key."""
    types: dict[Key, str] = field(default_factory=dict)
    """Key of a leaf that has no array -> its type: "None", "Dict", "List", "Tuple", "string"."""
    whole: bool = False
    """Whether all chunks are stored, also those of zeros."""
    strings: dict[str, str] = field(default_factory=dict)
    partitions: dict[str, str] = field(default_factory=dict)
    """Name of an array -> the axes that it is sharded over."""
    axes: list[dict[str, int]] = field(default_factory=list)
    """The meshes of devices: axis -> size."""
    random: dict[str, str] = field(default_factory=dict)
    """Name of an array of random keys -> their implementation."""
    values: dict[str, Any] = field(default_factory=dict)
    """Name of a leaf -> its value, of older versions, which kept numbers beside the arrays."""
    custom: Any = None
    described: bool = False


class Documents:
    """The documents that were read, and their files."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.files: dict[str, FileInfo] = {}

    def read(self, path: str) -> bytes | None:
        """Return a file; None if there is no such file. Raises CorruptError if it is too large."""
        info = present(self.store, path)
        if info is None:
            return None
        if info.size > _LARGEST:
            raise CorruptError(f"{self.store.root}/{path} has {info.size:,} bytes: no document of Orbax is so large")
        self.files[path] = info
        return bytes(self.store.read(path, 0, info.size))

    def json(self, path: str) -> Any:
        """Return a JSON document; None if there is no such file. Raises CorruptError."""
        data = self.read(path)
        return None if data is None else parsed(data, f"{self.store.root}/{path}")


def parsed(data: bytes, where: str) -> Any:
    """Parse JSON. Raises CorruptError."""
    Budget(where, len(data)).objects(data.count(b"{") + data.count(b"["))
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as e:
        raise CorruptError(f"{where} is no JSON ({e!s:.80}): truncated or damaged") from None
    check_levels(where, found)
    return found


def read_tree(documents: Documents, folder: str, names: Mapping[str, Any], problems: list[Problem]) -> Tree:
    """Read the documents of the tree in a folder, whose listing has these names. A damaged document that is not needed
    to read the tensors is a problem. Raises CorruptError if ``_METADATA`` is damaged."""
    tree = Tree()
    where = f"{documents.store.root}/{posixpath.join(folder, TREE)}"
    if TREE in names:
        _described(tree, documents.json(posixpath.join(folder, TREE)), where)

    def optional(name: str, use: Callable[[Any], None]) -> None:
        path = posixpath.join(folder, name)
        try:
            use(documents.json(path))
        except (CorruptError, ValueError, TypeError, LookupError, AttributeError) as e:
            line = f"{path} cannot be read, what it says is not known: {e!s:.200}"
            problems.append(Problem("unreadable-file", line, path))

    if SHARDING in names:
        optional(SHARDING, lambda found: _sharded(tree, found))
    if STRINGS in names:
        optional(STRINGS, lambda found: tree.strings.update(_texts(found)))
    if ARRAYS in names:
        inside = sorted(listing(documents.store, posixpath.join(folder, ARRAYS)))
        if inside:
            optional(f"{ARRAYS}/{inside[0]}", lambda found: _arrays(tree, found))
    return tree


def _texts(found: Mapping[str, Any], start: str = "") -> Iterator[tuple[str, str]]:
    """Yield the names and the texts of leaves. A name is a path in the document, so one with "/" is in dicts."""
    for name, value in found.items():
        if isinstance(value, dict):
            yield from _texts(value, f"{start}{name}/")
        else:
            yield start + str(name), str(value)


def _described(tree: Tree, about: Any, where: str) -> None:
    listed = about.get("tree_metadata") if isinstance(about, dict) else None
    if not isinstance(listed, dict):
        raise CorruptError(f"{where} has no tree_metadata: damaged, or not written by Orbax")
    for entry in listed.values():
        try:
            key = tuple(str(part["key"]) for part in entry["key_metadata"])
            value = entry["value_metadata"]
            kind, skipped = str(value["value_type"]), bool(value.get("skip_deserialize"))
        except (TypeError, LookupError, AttributeError):
            raise CorruptError(f"{where} describes no tree: {entry!r:.80}: damaged") from None
        if skipped or kind == "string":
            tree.types[key] = kind
        else:
            tree.keys[".".join(key)] = key
    tree.whole = about.get("store_array_data_equal_to_fill_value") is True
    tree.custom = about.get("custom_metadata")
    tree.described = True


def _sharded(tree: Tree, about: Any) -> None:
    for encoded, text in about.items():
        name = base64.b64decode(encoded, validate=True).decode()
        found = json.loads(text) if isinstance(text, str) else text
        if found.get("sharding_type") != "NamedSharding":
            continue
        sizes, axes = found["shape"], found["axis_names"]
        if len(sizes) != len(axes) or any(type(n) is not int or n < 1 for n in sizes):
            raise ValueError(f"a mesh of {sizes!r:.40} over {axes!r:.40}")
        mesh = dict(zip(map(str, axes), sizes, strict=True))
        if mesh not in tree.axes:
            tree.axes.append(mesh)
        spec = [part if isinstance(part, list) else [part] for part in found["partition_spec"]]
        parts = ["*".join(map(str, filter(None, part))) or "-" for part in spec]
        tree.partitions[name] = ", ".join(parts)


def _arrays(tree: Tree, about: Any) -> None:
    for entry in about["array_metadatas"]:
        one = entry["array_metadata"]
        extra = one.get("ext_metadata") or {}
        if "random_key_impl" in extra:
            tree.random[str(one["param_name"])] = str(extra["random_key_impl"])


def mesh_of(axes: Mapping[str, int]) -> Mesh:
    """Return the degrees of a mesh of devices, as far as the names of its axes tell them.

    >>> mesh_of({"data": 2, "fsdp": 4, "tensor": 2, "context": 1})
    Mesh(tp=2, pp=1, dp=8, ep=1)
    """
    return Mesh(**{degree: prod(axes[axis] for axis in axes if axis in names) for degree, names in _AXES.items()})
