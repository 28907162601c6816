"""Folders of files that tensors are streamed into: staged beside the destination, gone on with file by file.

A file gets its name when all of it stands there. What a reader looks for first is written last.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..errors import DestinationError
from ..io.remote import is_url
from ..tensor import LazyTensor
from .destination import check_room, source_files
from .job import Run, batches
from .places import PART
from .progress import Bar
from .staging import finished, reveal, staged
from .stream import Layout, compare, fill

_TOGETHER = 512 << 20  # bytes of tensors in files that are written at a time, ...
_FILES = 512  # ... and how many these are, at most


class File(NamedTuple):
    """``key``: where it stands in the folder. ``nbytes``: of its tensors. ``layout``: makes it, without them."""

    key: str
    nbytes: int
    layout: Callable[[Path], Layout]


@dataclass(frozen=True, slots=True)
class FolderPlan:
    """``texts``: files that are written whole, after ``files``, in this order. ``marker``: what of a folder tells that
    it is of this kind, ``kind``. ``around``: bytes of a file that no tensor has, about."""

    kind: str
    marker: str
    files: Sequence[File]
    texts: Mapping[str, bytes]
    fingerprint: str
    around: int = 2048

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)


def write_folder(
    plan: FolderPlan,
    place: Path,
    tensors: Sequence[LazyTensor],
    *,
    overwrite: bool,
    verify: bool,
    progress: bool | None,
    run: Run,
) -> None:
    """Write the folder ``place``; ``tensors`` are read for it. Raises DestinationError, CorruptError, and what reading
    raises."""
    sources = source_files(tensors)
    check_folder(place, plan, tensors, sources, overwrite)
    for tensor in tensors:
        tensor.check()
    with staged(place, plan.fingerprint) as (folder, there):
        root = Path(folder.root)
        room = plan.nbytes + plan.around * len(plan.files) + sum(map(len, plan.texts.values()))
        check_room(root, max(0, room - sum(there.values())))
        with Bar(plan.nbytes * (1 + verify), place.name, progress) as bar:
            missing = [file for file in plan.files if file.key not in there]
            bar.add(plan.nbytes - sum(file.nbytes for file in missing))
            for batch in batches(missing, _TOGETHER, _FILES):
                fill([_begun(root, file) for file in batch], run, bar.add)
                for file in batch:
                    os.replace(root / f"{file.key}{PART}", root / file.key)
            if verify:
                for batch in batches(plan.files, _TOGETHER, _FILES):
                    compare([_written(root, file) for file in batch], run, bar.add)
        for key, text in plan.texts.items():
            folder.put(key, [text])
        check_folder(place, plan, tensors, sources, overwrite)  # somebody may have written there meanwhile
        finished(root)
        reveal(folder, place)


def check_folder(
    dest: Path, plan: FolderPlan, tensors: Sequence[LazyTensor], sources: set[Path], overwrite: bool
) -> None:
    """Raises DestinationError if the folder must not appear there."""
    real = Path(os.path.realpath(dest))
    if any(real == source or real in source.parents for source in sources):
        raise DestinationError(f"{dest} holds the checkpoint that is read: choose another place")
    for store in {id(t.store): t.store for t in tensors}.values():
        root = Path(os.path.realpath(store.root))
        # a file was opened in a folder that may hold anything; a folder that was opened is the checkpoint
        if len(store.pins) > 1 and root in real.parents and not is_url(store.root):
            raise DestinationError(f"{dest} is inside of the checkpoint that is read, {root}: choose another place")
    if dest.exists() and not dest.is_dir():
        raise DestinationError(f"{dest} is a file: name a folder")
    if dest.is_dir() and any(dest.iterdir()):
        if not (dest / plan.marker).exists():
            raise DestinationError(f"{dest} is not empty, and no {plan.kind}: choose another folder")
        if not overwrite:
            raise DestinationError(f"{dest} exists already: remove it, choose another place, or pass overwrite=True")


def _begun(root: Path, file: File) -> Layout:
    path = root / f"{file.key}{PART}"
    path.parent.mkdir(parents=True, exist_ok=True)
    return file.layout(path)


def _written(root: Path, file: File) -> Layout:
    """Where the tensors lie in a file that is there: as in a new one, of which nothing else is wanted."""
    layout = _begun(root, file)
    os.unlink(layout.path)
    return Layout(str(root / file.key), layout.placed)
