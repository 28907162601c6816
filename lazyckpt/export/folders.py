"""Folders of files that tensors are streamed into: the whole folder appears when all of it is there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ..errors import DestinationError
from ..io.storage.fsspec import is_url
from ..jobs.destination import source_files
from ..jobs.executor import Run
from ..jobs.guard import followed
from ..jobs.publish import check_replaceable, reveal
from ..jobs.write import Plan, write
from ..lazy import LazyArray


class Kind(NamedTuple):
    """A kind of folder: what it is called, and what in it tells that it is one."""

    name: str
    marker: str


def write_folder(
    kind: Kind,
    plan: Plan,
    place: Path,
    tensors: Sequence[LazyArray],
    *,
    overwrite: bool,
    verify: bool,
    progress: bool | None,
    run: Run,
) -> None:
    """Write the folder ``place``; ``tensors`` are read for it. Raises as `output.write`."""
    place = followed(place)
    sources = source_files(tensors)
    write(
        plan,
        place,
        tensors,
        check=lambda _: check_folder(place, kind, tensors, sources, overwrite),
        reveal=lambda content: reveal(content, place),
        verify=verify,
        progress=progress,
        run=run,
    )


def check_folder(dest: Path, kind: Kind, tensors: Sequence[LazyArray], sources: set[Path], overwrite: bool) -> None:
    """Raises DestinationError if the folder must not appear there."""
    real = Path(os.path.realpath(dest))
    if any(real == source or real in source.parents for source in sources):
        raise DestinationError(f"{dest} holds the checkpoint that is read: choose another place")
    for store in {id(t.store): t.store for t in tensors}.values():
        root = Path(os.path.realpath(store.root))
        # a file was opened in a folder that may hold anything; a folder that was opened is the checkpoint
        if len(store.pins) > 1 and root in real.parents and not is_url(store.root):
            raise DestinationError(f"{dest} is inside of the checkpoint that is read, {root}: choose another place")
    check_replaceable(dest)
    if dest.exists() and not dest.is_dir():
        raise DestinationError(f"{dest} is a file: name a folder")
    if dest.is_dir() and any(dest.iterdir()):
        if not (dest / kind.marker).exists():
            raise DestinationError(f"{dest} is not empty, and no {kind.name}: choose another folder")
        if not overwrite:
            raise DestinationError(f"{dest} exists already: remove it, choose another place, or pass overwrite=True")
