"""The manifest that lies beside a checkpoint, used in place of reading the checkpoint as long as it is of its files.

A manifest records what identifies the files that it is of: paths, sizes and times of modification. Of files that were
copied without their times, or written to since, it is not used.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import LazyckptError
from ..io.storage.fsspec import is_url
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
        for text in _texts(view):
            found = Digest.from_json(text)
            if found.files == mark:
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


def _texts(view: Namespace[Any]) -> Iterator[bytes]:
    """Yield the manifests beside a checkpoint: in its folder, or beside the file or Zarr hierarchy that it is."""
    names = [MANIFEST, *(beside(path) for path in view.files if len(view.files) == 1)]
    if is_url(view.root):
        return  # a request for each name, which mostly does not exist
    paths = [Path(view.root, name) for name in names]
    for path in (*paths, Path(beside(os.path.abspath(view.root)))):
        if path.is_file() and path.stat().st_size <= _MOST:
            yield path.read_bytes()
