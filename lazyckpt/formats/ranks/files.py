"""The rank files of one save in a folder, by their names.

Writers: verl/utils/checkpoint/fsdp_checkpoint_manager.py `save_checkpoint` (``model_world_size_8_rank_0.pt``, likewise
with ``optim`` and ``extra_state``); accelerate/utils/fsdp_utils.py `save_fsdp_model`
(``pytorch_model_fsdp_rank0.bin``, ``pytorch_model_fsdp_0_rank0.bin``) and `save_fsdp_optimizer`
(``optimizer_0_rank0.bin``); composer/callbacks/checkpoint_saver.py (``ep1-ba300-rank0.pt``, a file for each save, and
``latest-rank0.pt``, a link to the last one); scripts (``rank0.pt``, ``model_rank_0.pt``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from ...errors import Problem, only_one, some
from ...io.storage.base import Entry

_NAME = re.compile(
    r"(?P<stem>.*?)(?:(?:^|[._-])world_size_(?P<world>\d{1,7}))?(?:^|[._-])rank[._-]?(?P<rank>\d{1,7})\.(?:pt|pth|bin|ckpt)"
)
_SAVES = re.compile(r"ep\d+-ba\d+|latest")  # of Composer: one item, saved several times
_WHOLE = re.compile(r"(?:ep\d+-ba\d+|latest)-rank0\.pt")  # without sharding, rank 0 saves all, and each file is a save
_OTHERS = ("optim", "extra", "rng", "random", "sched", "lr_sched", "dataloader", "train_state", "trainer")
# if these are in the folder, they are the model, and the rank files are another part of the save
_MODELS = re.compile(r".*\.safetensors|pytorch_model.*\.bin|.*\.index\.json")


@dataclass(slots=True)
class Series:
    """The files whose names differ only in the rank. ``item`` is what they hold ("model", "optim", ...)."""

    item: str
    world: int | None
    before: str
    width: int
    after: str
    files: dict[int, Entry] = field(default_factory=dict)

    def path(self, rank: int) -> str:
        """Return the name of a rank's file, also if the file is missing."""
        return f"{self.before}{rank:0{self.width}d}{self.after}"

    @property
    def complete(self) -> bool:
        count = self.world if self.world is not None else max(self.files) + 1
        return all(rank in self.files for rank in range(count))

    @property
    def latest(self) -> int:
        return max(entry.info.mtime_ns for entry in self.files.values())

    @property
    def is_model(self) -> bool:
        """Whether the files hold weights or a whole training state."""
        return not self.item.startswith(_OTHERS)


def recognised(entries: Mapping[str, Entry]) -> bool:
    """Return whether a folder is one of rank files, from its listing."""
    names = {name: m for name, e in entries.items() if not e.is_dir and (m := _NAME.fullmatch(name))}
    stems = {m["stem"] for m in names.values()}
    if all(map(_WHOLE.fullmatch, names)):
        return False
    if not any(not stem.startswith(_OTHERS) for stem in stems):
        return False
    return not any(_MODELS.fullmatch(name) and not _NAME.fullmatch(name) for name in entries)


def chosen(entries: Mapping[str, Entry], problems: list[Problem]) -> list[Series]:
    """Return the series of one save, the model's first, and add problems for files left over from other saves.

    If there are several series of the same item (a save of another world size leaves its files behind), the complete
    one is taken; if that does not decide, the one that was written last.
    """
    found: dict[tuple[str, str], Series] = {}
    for name, entry in sorted(entries.items()):
        match = _NAME.fullmatch(name)
        if match is None or entry.is_dir:
            continue
        before, after = name[: match.start("rank")], name[match.end("rank") :]
        digits = match["rank"]
        world = match["world"]
        series = found.get((before, after))
        if series is None:
            item = match["stem"].rstrip("._-")
            item = "" if _SAVES.fullmatch(item) else item
            series = found[before, after] = Series(item, int(world) if world else None, before, len(digits), after)
        series.width = (
            min(series.width, len(digits)) if digits.startswith("0") or len(digits) < series.width else series.width
        )
        series.files[int(digits)] = entry
    items: dict[str, list[Series]] = {}
    for series in found.values():
        items.setdefault(series.item, []).append(series)
    taken: list[Series] = []
    for candidates in sorted(items.values(), key=lambda c: not c[0].is_model):
        fitting = [s for s in candidates if not taken or s.world == taken[0].world]
        best = max(fitting, key=lambda s: (s.complete, s.latest, len(s.files)), default=None)
        if best is not None:
            taken.append(best)
        read = {e.info for e in best.files.values()} if best is not None else set()  # a link is the file that it names
        others = [(s.path(rank), s.files[rank]) for s in candidates if s is not best for rank in sorted(s.files)]
        rest = [path for path, entry in others if entry.info not in read]
        if rest:
            kept = "the complete set" if best is not None and best.complete else "the newest"
            which = f"{best.path(min(best.files))}, ... is {kept}" if best is not None else "they fit no other file"
            line = f"{len(rest):,} files are left over from another save and not read: {some(rest)} ({which})"
            problems.append(Problem("left-over-file", line, only_one(rest)))
    for series in taken:  # names such as _rank_7 with a world size of 4
        if series.world is not None:
            extra = [r for r in series.files if r >= series.world]
            for rank in extra:
                line = f"{series.path(rank)} is left over: its name says that there are {series.world} ranks"
                problems.append(Problem("left-over-file", line, series.path(rank)))
                del series.files[rank]
    return taken
