"""`lazyckpt cache`: the indexes of large checkpoints that are kept in the user's cache folder."""

from __future__ import annotations

import json
import os
import time
from enum import StrEnum
from typing import Annotated, Any

import typer

from ..core.units import human_bytes, plural
from ..errors import DataError
from ..formats.cache import folder
from ..formats.cache.opening import clear, kept
from ..io.storage.fsspec import is_url
from .console import write_line, write_text
from .options import JsonOption

_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


class Action(StrEnum):
    """What to do."""

    ls = "ls"
    clear = "clear"
    path = "path"


def cache(
    action: Annotated[Action, typer.Argument(help="List the indexes, remove them, or print their folder.")],
    path: Annotated[
        str | None, typer.Argument(metavar="[PATH]", help="With clear: remove only those of this checkpoint.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List or remove the indexes of large checkpoints that are kept.

    The second opening of a large checkpoint reads its index from the user's cache folder. `ls` lists the indexes, the
    last used first: valid, changed (the checkpoint is no longer the one that was indexed), not kept (and why), or
    unusable (damaged, or not written by this user). Removing them is always safe.

    Environment: LAZYCKPT_CACHE=0 disables the cache, LAZYCKPT_CACHE_DIR is another folder, LAZYCKPT_CACHE_SIZE the most
    bytes of all indexes together (default: 1GiB).
    """
    if path is not None and action is not Action.clear:
        raise DataError(f"`lazyckpt cache {action.value}` takes no path")
    try:
        if action is Action.path:
            write_text(str(folder.location()))
        elif action is Action.clear:
            count = _there(lambda: clear(None if path is None else _where(path)), 0)
            removed = f"removed {plural(count, 'entry', 'entries')}"
            text = removed if count or path is None else f"no index of {path} is kept"
            write_text(json.dumps({"removed": count}) if as_json else text)
        else:
            _list(_there(kept, []), as_json)
    except folder.Refused as e:
        raise DataError(f"the cache is not used: {e}. `lazyckpt cache path` prints its folder") from None


def _there(work: Any, otherwise: Any) -> Any:
    """Return the result of a function, or another value if there is no cache."""
    try:
        return work()
    except FileNotFoundError:
        return otherwise


def _where(path: str) -> str:
    """Return a path as entries have it."""
    return path.rstrip("/") if is_url(path) else os.path.abspath(os.path.expanduser(path))


def _list(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        write_text(json.dumps(rows, indent=2))
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


def _age(seconds: float) -> str:
    for unit, name in _UNITS:
        if seconds >= unit:
            return f"{int(seconds // unit)} {name}"
    return "0 s"
