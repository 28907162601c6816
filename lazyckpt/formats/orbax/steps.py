"""Steps of a `CheckpointManager`: folders whose names are numbers, with any prefix, and folders that are being written.

Writer: orbax/checkpoint/_src/path/step.py `_StandardNameFormat` (``1000``, ``PREFIX_1000``, ``00001000``) and
temporary_paths.py (orbax-checkpoint 0.12.8).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ...errors import Problem
from ...io.storage.base import Entry
from ..reader import Source
from .layout import COMMITTED, TEMPORARY, is_step_name, is_tree
from .metadata import STEP

_NUMBER = re.compile(r"(?:.*_)?(\d{1,18})")
_LOOKED = 4  # steps that are looked into, the newest first


def is_temporary(name: str) -> bool:
    """Return whether a folder's name is one that Orbax gives while it writes.

    >>> is_temporary("1000.orbax-checkpoint-tmp-17"), is_temporary("1000")
    (True, False)
    """
    return TEMPORARY in name


def number_of(name: str) -> int | None:
    """Return the step that a folder's name tells; None if it tells none.

    >>> number_of("1000"), number_of("run_00020"), number_of("default")
    (1000, 20, None)
    """
    found = _NUMBER.fullmatch(name.partition(TEMPORARY)[0])
    return None if found is None else int(found[1])


def steps(source: Source) -> dict[str, int]:
    """Return the folders that are steps of Orbax, by name; {} if none of the newest is one."""
    found = {
        name: number
        for name, entry in source.entries.items()
        if entry.is_dir and is_step_name(name) and (number := number_of(name)) is not None
    }
    newest = sorted(found, key=lambda name: found[name], reverse=True)[:_LOOKED]
    source.list_all(newest)
    if not any(map(_is_step, map(source.inside, newest))):
        return {}
    prefixes = {name.rpartition("_")[0] for name in found}
    return found if len(prefixes) == 1 else {}


def _is_step(names: Mapping[str, Entry]) -> bool:
    """Return whether a listing is that of a step, also an unfinished one: it has folders only."""
    if STEP in names or COMMITTED in names or is_tree(names):
        return True
    return bool(names) and all(entry.is_dir for entry in names.values()) and "default" in names


def temporary(entries: Mapping[str, Entry], counts: Mapping[str, int]) -> list[Problem]:
    """Return a problem for each folder of a later step that is, or was, being written.

    Parameters
    ----------
    entries
        The listing of the run's folder.
    counts
        The numbers of the checkpoint that is read.
    """
    least = max(counts.values(), default=-1)
    found = []
    for name, entry in entries.items():
        number = number_of(name) if entry.is_dir and is_temporary(name) else None
        if number is not None and number > least:
            line = f"{name} was not finished, or is being written now"
            found.append(Problem("unfinished-save", line, name))
    return found
