"""What a step of Orbax records of itself, and its items that are no trees of arrays.

Writers: orbax/checkpoint/_src/metadata/step_metadata_serialization.py; handlers/json_checkpoint_handler.py,
proto_checkpoint_handler.py and random_key_checkpoint_handler.py (orbax-checkpoint 0.12.8).
"""

from __future__ import annotations

import posixpath
from typing import Any

from ...errors import CorruptError, Problem, cannot_read, only_one, some
from ..reader import Source
from .layout import COMMITTED, TEMPORARY
from .metadata import STEP, Documents, parsed

_FEW = 1 << 20  # bytes of an item that is a text, at most


def of_step(source: Source, documents: Documents, meta: dict[str, Any], problems: list[Problem]) -> list[str]:
    """Read what the step records of itself, and whether it was finished. Return the names of its items."""
    name = source.store.root.rstrip("/").rpartition("/")[2]
    if TEMPORARY in name:
        line = f"{name} has the name of a folder that is being written: the save was not finished"
        problems.append(Problem("unfinished-save", line, name))
    if STEP not in source.entries:
        return []
    try:
        about = documents.json(STEP)
        if not isinstance(about, dict):
            raise CorruptError(f"{source.where}/{STEP} is no JSON object: damaged")
    except CorruptError as e:
        problems.append(cannot_read(STEP, e))
        return []
    begun, done = about.get("init_timestamp_nsecs"), about.get("commit_timestamp_nsecs")
    if begun and not done and TEMPORARY not in name:
        line = f"{STEP} has no time of the commit: the save was not finished"
        problems.append(Problem("unfinished-save", line, STEP))
    for key in ("metrics", "custom_metadata"):
        if about.get(key):
            meta[key] = about[key]
    handlers = about.get("item_handlers")
    return [name for name in handlers if name in source.entries] if isinstance(handlers, dict) else []


def other_items(
    source: Source, documents: Documents, handlers: list[str], meta: dict[str, Any], problems: list[Problem]
) -> None:
    """Put items of one small text, such as a protobuf message as text or JSON under another name, into the metadata,
    and report the others, such as random keys and messages as bytes."""
    left = []
    for folder in handlers:
        names = source.inside(folder)
        files = [name for name in names if name != COMMITTED]
        if not files:
            continue
        info = names[files[0]].info
        if len(files) > 1 or names[files[0]].is_dir or info.size > _FEW:
            left.append(folder)
            continue
        path = posixpath.join(folder, files[0])
        data = documents.read(path) or b""
        try:
            meta[folder] = parsed(data, path) if path.endswith(".json") else data.decode("utf-8")
        except UnicodeDecodeError:
            left.append(folder)
        except CorruptError as e:
            problems.append(Problem("unreadable-object", str(e), path))
    if left:
        line = f"{len(left):,} items of other handlers than those of trees, arrays and JSON are not read: {some(left)}"
        problems.append(Problem("ignored-file", line, only_one(left)))


def json_item(documents: Documents, path: str, meta: dict[str, Any], problems: list[Problem]) -> None:
    """Put an item that is JSON into the metadata, by the name of its folder."""
    folder = posixpath.dirname(path)
    try:
        meta[folder] = documents.json(path)
    except CorruptError as e:
        problems.append(Problem("unreadable-object", str(e), path))
