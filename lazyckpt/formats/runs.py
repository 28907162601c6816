"""Folders that hold the checkpoints of a run, one for each step that was saved: which of them is opened.

Names: `checkpoint-N` (transformers/trainer.py), `checkpoint_N` (accelerate/accelerator.py `save_state`), `step-N`
(torchtitan/components/checkpoint.py `_create_checkpoint_id`), `epoch_N` and `dist_epoch_N` (torchtune's checkpointers),
`epoch=N-step=M.ckpt` (lightning/pytorch/callbacks/model_checkpoint.py). DeepSpeed's tags are its reader's affair.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from ..core.index import Index
from ..errors import LazyckptError, MissingFileError
from ..io.store import Entry, Store
from .reader import Source, recognising

_STEP = re.compile(
    r"(?:checkpoint|step|epoch|dist_epoch)[-_]?(\d+)"  # always folders
    r"|epoch=(\d+)(?:-step=(\d+))?(?:-v(\d+))?(?:\.ckpt)?"
)
# What a trainer writes last. A folder without it, beside others that have it, is a save that was not finished.
LAST = ("trainer_state.json", "random_states_0.pkl")


def read_one(source: Source, read: Callable[[Source], Index]) -> tuple[Source, Index]:
    """The index of a source, or of the checkpoint in it that was meant: what ``tag`` names, else, if the folder is no
    checkpoint itself, the newest that was saved completely. -> (the source that was read, its index).

    Raises MissingFileError if there is no such tag (a single checkpoint has none), and what ``read`` raises.
    """
    if source.path:
        if source.tag is not None:
            raise MissingFileError(f"{source.where} is a file, there is no {source.tag!r} in it: open it without tag=")
        return source, read(source)
    reader = recognising(source) if source.tag is not None else None
    if reader is not None and reader.tags:
        return source, read(source)
    steps = _steps(source.entries)
    if source.tag is not None:
        found = _find(source.store, source.tag)
        if found is not None:
            sub = _sub(source, source.tag, found)
            return sub, read(sub)
        if steps:
            raise MissingFileError(f"{source.where} has no checkpoint {source.tag!r}; there are: {', '.join(steps)}")
        if reader is not None:
            raise MissingFileError(
                f"{source.where} is one checkpoint ({reader.name}), "
                f"there is no {source.tag!r} in it: open it without tag="
            )
        return source, read(source)
    known = recognising(source) if steps else None
    if not steps or (known is not None and known.name != "zarr-arrays"):  # which takes any hierarchies
        return source, read(source)
    finished, others = _finished(source, steps)
    notes = [f"{name} was not finished (other checkpoints here have {last})" for name, last in others.items()]
    errors: list[LazyckptError] = []
    for name in (*finished, *others):
        sub = _sub(source, name, source.entries[name])
        try:
            index = read(sub)
        except LazyckptError as e:
            errors.append(e)
            notes.append(f"{name} cannot be read: {e}")
            continue
        newer = steps[: steps.index(name)]
        told = [note for note in notes if note.partition(" ")[0] in newer]
        return sub, replace(index, problems=(*(f"{t}; {name} is read" for t in told), *index.problems))
    raise errors[0]


def _steps(entries: Mapping[str, Entry]) -> list[str]:
    """The names of checkpoints, newest first."""
    found = []
    for name, entry in entries.items():
        match = _STEP.fullmatch(name)
        if match and (entry.is_dir or name.endswith(".ckpt")):
            found.append(([int(n or 0) for n in match.groups()], entry.info.mtime_ns, name))
    return [name for *_, name in sorted(found, reverse=True)]


def _finished(source: Source, steps: list[str]) -> tuple[list[str], dict[str, str]]:
    """-> (those that were finished, the others with the file that they lack)."""
    listed = {name: source.store.list(name) for name in steps if source.entries[name].is_dir}
    lacking: dict[str, str] = {}
    for last in LAST:
        if any(last in names for names in listed.values()):
            lacking |= {name: last for name, names in listed.items() if last not in names}
    return [name for name in steps if name not in lacking], lacking


def _find(store: Store, tag: str) -> Entry | None:
    """What a tag names inside the store: a folder or file, of one name or of several (``runs/step-5``)."""
    folder, entry = "", None
    for part in tag.split("/"):
        entry = store.list(folder).get(part) if part not in ("", ".", "..") and "\\" not in part else None
        if entry is None:
            return None
        folder = f"{folder}/{part}" if folder else part
    return entry


def _sub(source: Source, name: str, entry: Entry) -> Source:
    if entry.is_dir:
        return Source(source.store.below(name), rules=source.rules)
    return Source(source.store, name, rules=source.rules)
