"""Links to the checkpoints of a run: links of the file system, and Composer's texts in buckets.

Composer (composer/callbacks/checkpoint_saver.py, composer/utils/file_helpers.py `create_symlink_file`) names its newest
save by ``latest-rank0.pt``, a link, and in a bucket by ``latest-rank0.pt.symlink``, a text with the path of a file or
folder there. Lightning's ``last.ckpt`` may be a link, too. What they name lies beside them, so the last part of the
path is enough.
"""

from __future__ import annotations

import os
import re

from ..errors import CorruptError, LazyckptError, MissingFileError, Problem, cannot_read
from ..io.storage.base import Listing, Store
from .reader import Source

LINK = ".symlink"
_LONGEST = 4096  # bytes of a link's text
_MOST = 16  # texts of a folder that are read
_NAMED = re.compile(r"(?:best|last|latest|final|release)(?![a-z])", re.IGNORECASE)


def followed(source: Source) -> Source:
    """Return the checkpoint that a text of Composer names.

    Raises CorruptError for anything but a path, MissingFileError if the checkpoint is not there."""
    target, name = _target(source.store, source.path, source.size)
    around = source.around()
    entry = around.entries.get(name)
    if entry is None:
        raise MissingFileError(
            f"{source.where} names {target[:200]!r}, and there is no {name[:80]!r} beside it: open another checkpoint "
            "by its own path"
        )
    if not entry.is_dir:
        return Source(source.store, name, rules=source.rules)
    known = {"": around.inside(name)} if name in around.folders else None
    return Source(source.store.below(name), rules=source.rules, listings=known)


def lost(source: Source) -> list[Problem]:
    """Return problems of the links in a folder that name a missing checkpoint, as far as the folder was listed."""
    if source.path or "" not in source.folders:
        return []
    entries, found = source.entries, []
    for name, target in sorted(entries.dangling.items()) if isinstance(entries, Listing) else ():
        last = _last(target.replace(os.sep, "/"))
        if _NAMED.match(name) and last not in entries:
            found.append(_missing(name, target, last))
    for name in sorted(n for n, e in entries.items() if n.endswith(LINK) and not e.is_dir)[:_MOST]:
        try:
            target, last = _target(source.store, name, entries[name].info.size)
        except LazyckptError as e:
            found.append(cannot_read(name, e))
            continue
        if last not in entries:
            found.append(_missing(name, target, last))
    return found


def _missing(link: str, target: str, name: str) -> Problem:
    line = f"{link} names {target[:200]!r}, which is missing: what is read is another save"
    return Problem("missing-file", line, name)


def _target(store: Store, path: str, size: int) -> tuple[str, str]:
    """Return the text of a link, and the name beside it that the text means. Raises CorruptError."""
    text = bytes(store.read(path, 0, min(size, _LONGEST))) if size else b""
    target = text.decode("utf-8", "replace").strip()
    name = _last(target)
    if size > _LONGEST or not name.isprintable() or name in ("", ".", "..") or name.endswith(LINK):
        where = f"{store.root}/{path}"
        raise CorruptError(f"{where} names no checkpoint: it is damaged. Open the checkpoint by its own path")
    return target, name


def _last(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]
