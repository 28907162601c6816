"""The manifest that lies beside a checkpoint, used in place of reading the checkpoint as long as it is of its files.

A manifest records what identifies the files that it is of: paths, sizes and times of modification. It is not used for
files that were copied or written to since. A time of modification can be set back, so no file may have a later time of
change (ctime, which the system sets) than the manifest itself. Windows has no such time: there the others decide.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import LazyckptError
from ..io.storage.urls import is_url
from ..namespace import Namespace
from .manifest import MANIFEST, Digest, beside, files_mark

OPENED = "opened"  # key of `Namespace.kept`: the view is that of a checkpoint as it was opened
_MOST = 1 << 30  # bytes of a manifest that is read without being asked for


def kept_digest(view: Namespace[Any]) -> Digest | None:
    """Return the digests of a checkpoint from the manifest beside it. Reads no tensor data.

    Parameters
    ----------
    view
        A view of a whole checkpoint, as it was opened.

    Returns
    -------
    Digest or None
        None if there is no manifest, if it is of other files, or of the same files before they were changed, or if the
        view is a part of the checkpoint or shows its tensors under other names.
    """
    if not view.kept.get(OPENED):
        return None
    try:
        mark = now_mark(view)
        for path in _beside(view):
            found = Digest.from_json(path.read_bytes())
            if found.files == mark and not _changed_since(view, path):
                return found
    except (LazyckptError, OSError):
        pass  # a damaged manifest, or one of a later version: the checkpoint is read
    return None


def now_mark(view: Namespace[Any]) -> str:
    """Return what identifies the state of a checkpoint's files; of local ones, as they are now."""
    files = view.files
    return files_mark(files if is_url(view.root) else {path: view._stat(path) for path in files})


def with_files(view: Namespace[Any], found: Digest) -> Digest:
    """Return the digests of a view, with what identifies its files if they are of the whole checkpoint."""
    whole = view.kept.get(OPENED) and set(found.states) == set(view.states)
    return replace(found, files=now_mark(view)) if whole else found


def _beside(view: Namespace[Any]) -> Iterator[Path]:
    """Yield the manifests beside a checkpoint: in its folder, or beside the file or Zarr hierarchy that it is."""
    names = [MANIFEST, *(beside(path) for path in view.files if len(view.files) == 1)]
    if is_url(view.root):
        return  # a request for each name, which mostly does not exist
    paths = [Path(view.root, name) for name in names]
    for path in (*paths, Path(beside(os.path.abspath(view.root)))):
        if path.is_file() and path.stat().st_size <= _MOST:
            yield path


def _changed_since(view: Namespace[Any], manifest: Path) -> bool:
    """Return whether a file was changed, renamed or created after the manifest."""
    if os.name != "posix":
        return False
    since = manifest.stat().st_ctime_ns
    return any(os.stat(os.path.join(view.root, path)).st_ctime_ns > since for path in view.files)
