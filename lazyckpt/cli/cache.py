"""`lazyckpt cache`: what is kept in the user's cache folder: indexes of checkpoints, and bytes of remote objects."""

from __future__ import annotations

import json
import os
import time
from enum import StrEnum
from typing import Annotated, Any

import typer

from ..core.units import human_bytes, plural, size_in_bytes
from ..errors import DataError
from ..formats.cache import folder
from ..formats.cache.opening import clear, kept
from ..io.storage.cache import BlockCache, Kept, configured
from ..io.storage.urls import is_remote, without_protocol
from ..io.user_folder import Refused
from .console import write_line, write_text
from .options import JsonOption

_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


class Action(StrEnum):
    """What to do."""

    ls = "ls"
    clear = "clear"
    path = "path"


def cache(
    action: Annotated[Action, typer.Argument(help="List what is kept, remove it, or print the folder of the indexes.")],
    path: Annotated[
        str | None, typer.Argument(metavar="PATH", help="With clear: remove only what is kept of this checkpoint.")
    ] = None,
    limit: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="With clear: remove only bytes of remote objects, until SIZE of them remain."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List or remove what is kept in the user's cache folder.

    The second opening of a large checkpoint, or of a folder at a URL, reads its index from there. `ls` lists the
    indexes, the last used first: valid, changed (the checkpoint is no longer the one that was indexed), remote, not
    kept (and why), or unusable (damaged, or not written by this user). Then it lists the remote objects of which bytes
    are kept (`bytes`), if the block cache is on or was. Removing anything is always safe.

    Environment: LAZYCKPT_CACHE=0 disables all caches. LAZYCKPT_CACHE=disk keeps bytes of remote objects; a size
    (50GiB) does, too, up to this size (default: 20GiB), and so does a path, or a path and a size (/scratch/me:50GiB).
    LAZYCKPT_CACHE_DIR is another folder for all, LAZYCKPT_CACHE_SIZE the most bytes of all indexes together (default:
    1GiB).
    """
    if (path is not None or limit is not None) and action is not Action.clear:
        raise DataError(f"`lazyckpt cache {action.value}` takes no path and no --limit")
    if path is not None and limit is not None:
        raise DataError("--limit concerns all remote objects: leave out the path")
    blocks = configured() or BlockCache()
    try:
        if action is Action.path:
            write_text(str(folder.location()))
        elif action is Action.clear:
            _clear(blocks, path, limit, as_json)
        else:
            _list(_there(kept, []), _there(blocks.kept, []), _there(blocks.most, 0), as_json)
    except Refused as e:
        raise DataError(f"the cache is not used: {e}. `lazyckpt cache path` prints its folder") from None


def _clear(blocks: BlockCache, path: str | None, limit: str | None, as_json: bool) -> None:
    where = None if path is None else _where(path)
    if limit is None:
        count = _there(lambda: clear(where), 0)
        files = _there(lambda: blocks.clear(where), 0)
    else:
        size = size_in_bytes(limit)
        count, files = 0, _there(lambda: blocks.trim(size), 0)
    if as_json:
        write_text(json.dumps({"removed": count, "files": files}))
    elif path is not None and not count and not files:
        write_text(f"no index of {path} is kept")
    else:
        also = f" and {plural(files, 'file')} with bytes of remote objects" if files else ""
        write_text(f"removed {plural(count, 'entry', 'entries')}{also}")


def _there(work: Any, otherwise: Any) -> Any:
    """Return the result of a function, or another value if there is no cache."""
    try:
        return work()
    except FileNotFoundError:
        return otherwise


def _where(path: str) -> str:
    """Return a path as entries have it."""
    return path.rstrip("/") if is_remote(path) else os.path.abspath(os.path.expanduser(without_protocol(path)))


def _list(rows: list[dict[str, Any]], objects: list[Kept], most: int, as_json: bool) -> None:
    if as_json:
        found = [{"kind": "index", **row} for row in rows]
        write_text(json.dumps([*found, *({"kind": "bytes", **one._asdict()} for one in objects)], indent=2))
        return
    now = time.time()
    for row in rows:
        good = row["state"] in ("valid", "remote")
        write_line((f"{row['state']:<8} ", "green" if good else "yellow"), (row.get("where", row["name"]), "bold"))
        about = [human_bytes(row["nbytes"]), f"used {_age(now - row['used'])} ago"]
        if "where" in row:
            tag = [f"tag {row['tag']}"] if row["tag"] else []
            counts = [f"{row['tensors']:,} tensors", f"{row['files']:,} files"]
            about = [*tag, row["format"], *counts, about[0], f"written {_age(now - row['written'])} ago", about[1]]
        write_line((f"         {', '.join(about)}", "dim"))
    total = human_bytes(sum(row["nbytes"] for row in rows))
    write_line((f"{plural(len(rows), 'entry', 'entries')}, {total} of {human_bytes(folder.limit())}", ""))
    for one in objects:
        write_line(("bytes    ", "green"), (one.url, "bold"))
        size = f"{human_bytes(one.nbytes)}, {plural(one.files, 'file')}, version {one.version[:40]}"
        write_line((f"         {size}, used {_age(now - one.used)} ago", "dim"))
    if objects:
        total = human_bytes(sum(one.nbytes for one in objects))
        write_line((f"bytes of {plural(len(objects), 'object')}, {total} of {human_bytes(most)}", ""))


def _age(seconds: float) -> str:
    for unit, name in _UNITS:
        if seconds >= unit:
            return f"{int(seconds // unit)} {name}"
    return "0 s"
