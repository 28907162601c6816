"""Files that tensors are streamed into, from the first check to their appearance: one road for all that is written.

They are made in the staging folder of their destination, and named when all are complete. A call that was interrupted
is gone on with, run by run, as the ledger there tells.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from ..io.progress import Bar
from ..lazy import LazyArray
from .destination import check_room, check_unchanged
from .job import Run
from .ledger import Ledger
from .places import Folder
from .staging import content, moved, staged
from .stream import File, compare, fill

Check = Callable[[Set[str]], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """``texts``: files that are written whole, after ``files``, in this order. ``fingerprint``: see `staging`.
    ``around``: bytes of a file that no tensor has, about."""

    files: Sequence[File]
    texts: Mapping[str, bytes]
    fingerprint: str
    around: int = 2048

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)

    @property
    def room(self) -> int:
        return self.nbytes + self.around * len(self.files) + sum(map(len, self.texts.values()))

    @property
    def keys(self) -> list[str]:
        return [*(file.key for file in self.files), *self.texts]


def write(
    plan: Plan,
    place: Path,
    tensors: Sequence[LazyArray],
    *,
    check: Check,
    reveal: Callable[[Folder], None],
    verify: bool,
    progress: bool | None,
    run: Run,
) -> None:
    """Write the files of a plan, for which ``tensors`` are read. ``check`` raises DestinationError if they must not
    appear at ``place``; it is called first, and again before they do, because somebody else may have written there
    meanwhile; with the keys of what an earlier call has moved there already. ``reveal`` moves them there, from the
    folder in which they are complete.

    Raises DestinationError, CorruptError (``verify``: what was written differs), ChangedFileError (a source was written
    to meanwhile), and what reading raises.
    """
    check(moved(place, plan.fingerprint, plan.keys, verify))
    for tensor in tensors:
        tensor.check()
    with staged(place, plan.fingerprint) as staging, Ledger(staging) as ledger:
        there = moved(place, plan.fingerprint, plan.keys, verify)
        where = content(staging, plan.fingerprint)
        files = [file for file in plan.files if file.key not in there]
        if not there:
            ledger.anew()
            staging.check_distinct(plan.keys)
            where.make()
            where.tidy(set(plan.keys).__contains__)
            check_room(Path(staging.root), max(0, plan.room - ledger.nbytes))
        with Bar(sum(file.nbytes for file in files) * (1 + verify), place.name, progress) as bar:
            layouts = fill(files, where, ledger, run, bar.add)
            if verify:
                compare(layouts, run, bar.add)
        for key, text in plan.texts.items():
            if key not in there:
                where.put(key, [text])
        check_unchanged(tensors)
        ledger.move(verify)
        check(there)
        reveal(where)
