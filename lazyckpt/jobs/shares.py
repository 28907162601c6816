"""An export that independent processes share, each of which does its part of the work without knowing the others.

Share ``i`` of ``n`` writes its files to a folder of its own beside the destination, ``.NAME.share-i-of-n``, by the same
engine as a whole export: a killed share resumes, and its folder appears only when the share is complete. The share that
finds all folders complete moves the files together and publishes the export. Which share that is does not matter, and
calling a complete share again only tries to finish. The processes need a common file system, and nothing else.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from ..errors import DataError, DestinationError
from .destination import Destination, Files, Whole, check_unchanged
from .executor import Run
from .guard import is_own
from .ledger import Ledger
from .passing import Passed
from .places import PART, Folder, Place
from .plan import Chunk, Chunks, Manifest, WritePlan
from .publish import Busy, content, discard, is_unique, moved, reveal, staged
from .write import put_manifests, put_texts, write

HASHES = ".lazyckpt-hashes"  # the file with the hashes of what a share has written, for the manifest
MARK = ".lazyckpt-share"  # the file that completes the folder of a share, in which `_Mark` is
_RETRY = 0.05  # seconds between attempts to finish while another share does
_PATIENCE = 600.0  # seconds after which a share stops waiting for another one that finishes

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Share:
    """Share number ``index`` (from 0) of ``count``."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


def share_of(value: object) -> Share:
    """Return the share for ``(i, n)``. Raises DataError unless 0 <= i < n."""
    match value:
        case (int(index), int(count)) if 0 <= index < count:
            return Share(index, count)
    raise DataError(f"share={value!r:.100}: give (i, n), share i of n, counted from 0 as ranks are: (0, 4) to (3, 4)")


def write_share(plan: WritePlan, share: Share, *, verify: bool, progress: bool | None, run: Run) -> tuple[int, bool]:
    """Do a share of a plan, and finish the export if all others are complete. Return the size of the share's files in
    bytes, and whether the export is finished.

    Raises what `write` raises, and DestinationError for a destination that cannot be shared or is shared otherwise.
    """
    dest = plan.destination
    if not isinstance(dest, Files | Whole) or plan.build is not None:
        raise DestinationError(
            "work is shared only between writers of several local files: write to a folder on a file system that all "
            "of them have in common, or use executor="
        )
    if is_unique(plan.fingerprint):
        raise DestinationError("work with tensors in memory is not shared: every process has its own")
    _check_others(dest.place, share.count)
    folder = folder_of_share(dest.place, share)
    mark = _Mark.of(folder)
    if mark is None or mark.fingerprint != plan.fingerprint:
        write(_part(plan, dest, share, folder), verify=verify, progress=progress, run=run)
        own = (path for path in folder.rglob("*") if path.name not in (MARK, HASHES))
        mark = _Mark(plan.fingerprint, sum(path.stat().st_size for path in own if path.is_file()))
        mark.put(folder)  # last: as soon as the mark is there, another share may move the files and remove the folder
    return mark.nbytes, _finish(plan, dest, share.count, verify, run)


def discard_share(dest: Path, share: Share) -> None:
    """Remove what a share has written, so that it starts anew."""
    folder = folder_of_share(dest, share)
    discard(folder)
    if _Mark.of(folder) is not None:
        (folder / MARK).unlink()
        shutil.rmtree(folder)


# -- a share


@dataclass(frozen=True, slots=True)
class _Mark:
    """What completes the folder of a share: the fingerprint of the whole job, and the size of the share's files in
    bytes."""

    fingerprint: str
    nbytes: int

    @classmethod
    def of(cls, folder: Path) -> _Mark | None:
        """Return the mark in a folder; None if the share is not complete."""
        try:
            if is_own(folder):
                fingerprint, nbytes = (folder / MARK).read_text().split()
                return cls(fingerprint, int(nbytes))
        except (FileNotFoundError, NotADirectoryError, ValueError):
            pass
        return None

    def put(self, folder: Path) -> None:
        """Write the mark into a folder, complete or not at all."""
        part = folder / f"{MARK}{PART}"
        part.write_text(f"{self.fingerprint} {self.nbytes}")
        os.replace(part, folder / MARK)


@dataclass(frozen=True, slots=True)
class _Own(Destination):
    """The folder of a share."""

    place: Path
    whole: Destination

    def path(self, key: str) -> Path:
        return self.place / key

    def check(self, there: Set[str] = frozenset()) -> None:
        self.whole.check()
        if os.path.lexists(self.place) and not is_own(self.place):
            raise DestinationError(
                f"{self.place}: the files of a share are kept there, and it belongs to another user or is no folder. "
                "Remove it, or choose another destination"
            )

    def publish(self, content: Folder) -> None:
        reveal(content, self.place)  # in place of one of another job
        os.chmod(self.place, 0o700)


def _part(plan: WritePlan, dest: Destination, share: Share, folder: Path) -> WritePlan:
    """Return the plan of a share: consecutive files, of about the same number of bytes as every other share."""
    total = plan.nbytes
    files = [file for file, _ in _mine(((file, file.nbytes) for file in plan.files), share, total, 0)]
    begin = sum(file.nbytes for file in plan.files)
    chunks = None
    if plan.chunks is not None:
        at = plan.chunks.at
        sizes = list(_sizes(plan.chunks))
        nbytes = sum(size for _, size in _mine(enumerate(sizes), share, total, begin))

        def mine(place: Place) -> Iterator[Chunk]:
            return (chunk for chunk, _ in _mine(((c, c.nbytes) for c in at(place)), share, total, begin))

        chunks = Chunks(nbytes, mine)
    return replace(
        plan,
        destination=_Own(folder, dest),
        fingerprint=f"{plan.fingerprint}-{share.index}-{share.count}",
        files=files,
        chunks=chunks,
        texts={},
        manifests=[Manifest(HASHES, one.algorithm, _hashes) for one in plan.manifests[:1]],
        room=plan.room // share.count,
        paths=(folder,),
    )


def _hashes(root: str, passed: Passed, run: Run) -> bytes:
    return passed.as_json()


def _sizes(chunks: Chunks) -> Iterator[int]:
    return (chunk.nbytes for chunk in chunks.at(Folder("")))


def _mine(items: Iterable[tuple[T, int]], share: Share, total: int, begin: int) -> Iterator[tuple[T, int]]:
    """Yield the items of a share with their sizes. The share of an item is where its middle lies in ``total`` bytes."""
    at = begin
    for item, nbytes in items:
        middle = at + nbytes // 2
        if min(share.count - 1, share.count * middle // max(total, 1)) == share.index:
            yield item, nbytes
        at += nbytes


# -- all shares


class _Lost(DestinationError):
    """Files of complete shares are gone."""


def _finish(plan: WritePlan, dest: Files | Whole, count: int, verify: bool, run: Run) -> bool:
    """Publish the export if all shares are complete; return whether it is published."""
    folders = [folder_of_share(dest.place, Share(n, count)) for n in range(count)]
    deadline = time.monotonic() + _PATIENCE
    while True:
        if not any(os.path.lexists(folder) for folder in folders):
            return True  # another share has just finished
        if _marks(plan, folders) is None:
            return False
        try:
            _gather(plan, dest, folders, verify, run)
        except DestinationError as e:
            if isinstance(e, _Lost):
                raise
            if _marks(plan, folders) is not None:
                if not isinstance(e, Busy) or time.monotonic() > deadline:
                    raise
                time.sleep(_RETRY)
            continue  # another share finishes, or has finished meanwhile
        return True


def _gather(plan: WritePlan, dest: Files | Whole, folders: Sequence[Path], verify: bool, run: Run) -> None:
    """Move the files of all shares together and publish them. The marks are removed before: a share without a mark is
    not complete, so no other process can publish the folders that are empty now."""

    def there() -> set[str]:
        return moved(dest.place, plan.fingerprint, plan.keys, verify) if dest.one_by_one else set()

    has_files = False
    dest.check(there())
    with staged(dest.place, plan.fingerprint, lambda _: has_files) as staging, Ledger(staging) as ledger:
        already = there()
        where = content(staging, plan.fingerprint, plain=plan.chunks is not None)
        where.make()
        expected = {*plan.keys, *(chunk.key for chunk in (plan.chunks.at(where) if plan.chunks is not None else ()))}
        expected.difference_update(one.key for one in plan.manifests)
        has_files = bool(already) or not expected.isdisjoint(where.find())  # of a call that was killed
        if (marks := _marks(plan, folders)) is None:
            raise Busy(f"{dest.place}: another share has finished")  # the caller looks again
        if not already:
            ledger.anew()
        check_unchanged(plan.tensors)
        dest.check(already)
        has_files = True
        put_texts(plan, where, already)
        passed = Passed()
        for folder in folders:
            source = Folder(str(folder))
            for key in source.find():
                if key == HASHES:
                    passed.take((folder / HASHES).read_bytes())
                elif key != MARK:
                    where.take(source, key)
        lost = expected - already - set(where.find())
        if not lost and not already:
            put_manifests(plan, str(where), where, passed, run)
        for folder in folders:
            (folder / MARK).unlink()
        if lost:
            raise _Lost(
                f"{dest.place}: {len(lost):,} of {len(expected):,} files that shares have written are gone, such as "
                f"{min(lost)!r:.200}. Nothing was published. Call every share again"
            )
        try:
            ledger.move(verify)
            dest.publish(where)
        except BaseException:
            if os.path.lexists(str(where)):  # else it is published
                for mark, folder in zip(marks, folders, strict=True):
                    mark.put(folder)
            raise
    for folder in folders:
        shutil.rmtree(folder)


def folder_of_share(dest: Path, share: Share) -> Path:
    """Return the folder that holds the files of a share when it is complete."""
    return dest.parent / f".{dest.name}.share-{share.index}-of-{share.count}"


def _marks(plan: WritePlan, folders: Sequence[Path]) -> list[_Mark] | None:
    """Return the marks of all shares of a job, or None if one of them is not complete."""
    marks = [mark for folder in folders if (mark := _Mark.of(folder)) and mark.fingerprint == plan.fingerprint]
    return marks if len(marks) == len(folders) else None


def _check_others(dest: Path, count: int) -> None:
    """Raise DestinationError if the work is divided into another number of shares."""
    folder = re.compile(rf"\.?{re.escape(f'.{dest.name}.share-')}\d+-of-(\d+)(\.incomplete)?")
    if not dest.parent.is_dir():
        return
    for name in os.listdir(dest.parent):
        if (found := folder.fullmatch(name)) is not None and int(found[1]) != count:
            raise DestinationError(
                f"{dest.parent / name}: another export to {dest} was divided into other shares. Finish it, or remove "
                "this folder and the others like it"
            )
