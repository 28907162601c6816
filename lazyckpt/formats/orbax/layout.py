"""The folders of an Orbax checkpoint: items in the folder of a step, their names, and the signs of an unfinished save.

A step of a `CheckpointManager` has a folder for each item (``default/``, ``state/``, ``params/``, ``metrics/``); a
`Checkpointer` writes one item without such a folder. An item is a tree of arrays or a JSON document. While a folder is
written, its name has the suffix ``.orbax-checkpoint-tmp`` (with numbers in older versions), or, on object stores, it
lacks ``commit_success.txt`` (orbax/checkpoint/_src/path/atomicity.py, step.py; 0.12.8).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ...io.storage.base import Entry
from ..reader import Source
from .aggregate import NAME as AGGREGATE
from .metadata import SHARDING, STEP, TREE
from .ocdbt import MANIFEST

TEMPORARY = ".orbax-checkpoint-tmp"
COMMITTED = "commit_success.txt"
PROCESS = re.compile(r"ocdbt\.process_(?:[A-Za-z0-9_]+?_)?\d+")
JSON = "metadata"  # the file of a JSON item; that of metrics has the item's name
_NUMBER = re.compile(r"(?:.*_)?\d+")
_ITEMS = 64  # maximum number of folders that are looked into


def is_tree(names: Mapping[str, Entry]) -> bool:
    """Return whether a listing is that of a tree of arrays."""
    return TREE in names or MANIFEST in names or any(map(PROCESS.fullmatch, names)) or _is_old(names)


def _is_old(names: Mapping[str, Entry]) -> bool:
    """Return whether a listing is that of a tree of older versions: arrays in folders, and one file beside them."""
    files = {name for name, entry in names.items() if not entry.is_dir}
    return AGGREGATE in files and not files - {AGGREGATE, COMMITTED, SHARDING} and len(names) - len(files) > 0


def is_step_name(name: str) -> bool:
    """Return whether a folder's name can be that of a step: a number, perhaps behind a prefix and "_"."""
    return _NUMBER.fullmatch(name) is not None


def recognises(source: Source) -> bool:
    """Return whether a folder is a step or an item."""
    if source.path:
        return False
    entries = source.entries
    if STEP in entries or is_tree(entries):
        return True
    return bool(items(source, trees=True))


def items(source: Source, trees: bool = False) -> dict[str, Mapping[str, Entry]]:
    """Return the items in subfolders of a step, with their listings; with ``trees``, only those with arrays."""
    if any(not entry.is_dir for name, entry in source.entries.items() if name not in (STEP, COMMITTED, "_SUCCESS")):
        return {}
    folders = [name for name, entry in source.entries.items() if entry.is_dir and not _left_out(name)]
    if len(folders) > _ITEMS:
        return {}
    source.list_all(folders)
    found = {name: source.inside(name) for name in sorted(folders)}
    if trees:
        return {name: names for name, names in found.items() if is_tree(names)}
    return {name: names for name, names in found.items() if is_tree(names) or document(name, names)}


def _left_out(name: str) -> bool:
    return is_step_name(name) or TEMPORARY in name or name in ("d", "array_metadatas", "descriptor")


def document(item: str, names: Mapping[str, Entry]) -> str:
    """Return the file of a JSON item; "" if there is none."""
    for name in (JSON, item):
        if name in names and not names[name].is_dir:
            return name
    return ""
