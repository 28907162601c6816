"""Folders that hold the checkpoints of a run, one for each step that was saved: which of them is opened.

Names: `checkpoint-N` (transformers/trainer.py), `checkpoint_N` (accelerate/accelerator.py `save_state`), `step-N`
(torchtitan/components/checkpoint.py `_create_checkpoint_id`), `epoch_N` and `dist_epoch_N` (torchtune's checkpointers),
`epoch=N-step=M.ckpt` (lightning/pytorch/callbacks/model_checkpoint.py), and files of scripts (`ckpt_10.pt`,
`model_step_100.safetensors`). DeepSpeed's and Megatron's readers find their tags themselves.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from ..core.index import Index
from ..core.names import natural
from ..errors import FormatError, LazyckptError, MissingFileError
from ..io.store import Entry, Store
from .paths import some
from .reader import Source
from .registry import checkpoints_in, is_checkpoint_file, only_checkpoint, recognising

# A word and the number that it counts.
_COUNT = re.compile(
    r"(?<![A-Za-z])(?:(?P<step>(?:global_?)?steps?|iter(?:ation)?s?)|(?P<epoch>epochs?)|(?P<save>checkpoint|ckpt))"
    r"[-_=]?(?P<number>\d{1,18})(?!\d|[.e]\d)",  # "1.5" and "1e6" are other numbers than 1
    re.IGNORECASE,
)
_TRIED = 16  # checkpoints that are tried, from the newest on
_KINDS = ("step", "epoch", "save")  # the first of them that all names have orders them
_VERSION = re.compile(r"-v(\d{1,18})$")  # what Lightning adds where the name is taken
_ENDING = re.compile(r"\.[A-Za-z]+$")
_FOLDERS = ("", "dist_")  # what may stand before the word in a folder's name: others are not checkpoints (eval_step_5)
# A file that is a part of a checkpoint, or is named for something else than its step.
_OTHER = re.compile(
    r"\d-of-\d|rank[-_.]?\d|(?<![a-z])(?:best|last|latest|final|release)(?![a-z])"
    r"|optim|sched|(?<![a-z])rng|random_state|scaler|training_args",
    re.IGNORECASE,
)
# What a trainer writes last. A folder without it, beside others that have it, is a save that was not finished.
LAST = ("trainer_state.json", "random_states_0.pkl")


class Save(NamedTuple):
    """A checkpoint of a run. ``series``: what its name has in common with those of the same run. ``counts``: "step",
    "epoch", "save" -> the number in the name."""

    name: str
    series: tuple[str, str]
    counts: Mapping[str, int]
    version: int
    mtime_ns: int


def read_one(source: Source, read: Callable[[Source], Index]) -> tuple[Source, Index]:
    """The index of a source, or of the checkpoint in it that was meant: what ``tag`` names, else, if the folder is no
    checkpoint itself, the newest that was saved completely, or the only one there is. -> (the source that was read, its
    index).

    Raises MissingFileError if there is no such tag (a single checkpoint has none), FormatError if nothing tells which
    of several checkpoints is meant, and what ``read`` raises.
    """
    if source.path:
        if source.tag is not None:
            raise MissingFileError(f"{source.where} is a file, there is no {source.tag!r} in it: open it without tag=")
        return source, read(source)
    if source.tag is not None:
        return _tagged(source, source.tag, read)
    saves = _saves(source.entries)
    known = recognising(source) if saves else None
    if saves and (known is None or known.name == "zarr-arrays"):  # which takes any hierarchies
        return _newest(source, _ordered(source, saves), read)
    try:
        return source, read(source)
    except FormatError:
        name = only_checkpoint(source) if recognising(source) is None else None
        if name is None:
            raise
    only = _sub(source, name, source.entries[name].is_dir)
    return only, read(only)


def _tagged(source: Source, tag: str, read: Callable[[Source], Index]) -> tuple[Source, Index]:
    reader = recognising(source)
    if reader is not None and reader.tags:
        return source, read(source)
    entry = _find(source.store, tag)
    if entry is not None:
        sub = _sub(source, tag, entry.is_dir)
        return sub, read(sub)
    names = sorted((save.name for save in _saves(source.entries)), key=natural, reverse=True)
    if not names and reader is not None:
        raise MissingFileError(
            f"{source.where} is one checkpoint ({reader.name}), there is no {tag!r} in it: open it without tag="
        )
    names = names or checkpoints_in(source)
    there = f"there are: {some(names, 8)}" if names else "nor any other checkpoint"
    raise MissingFileError(f"{source.where} has no checkpoint {tag!r}; {there}")


def _newest(source: Source, saves: list[Save], read: Callable[[Source], Index]) -> tuple[Source, Index]:
    """The newest that can be read, with a line for each that is newer. Raises the error of the newest if none of the
    first `_TRIED` can be read."""
    names = [save.name for save in saves]
    finished, others = _finished(source, names)
    notes = {name: f"{name} was not finished (other checkpoints here have {last})" for name, last in others.items()}
    first: LazyckptError | None = None
    for name in (*finished, *others)[:_TRIED]:
        sub = _sub(source, name, source.entries[name].is_dir)
        try:
            index = read(sub)
        except LazyckptError as e:
            first = first or e
            notes[name] = f"{name} cannot be read: {e}"
            continue
        at = names.index(name)
        lines = [f"{notes[n]}; {name} is read" for n in names[:at] if n in notes]
        same = (saves[at].counts, saves[at].version)
        twins = [save.name for save in saves if save.name != name and (save.counts, save.version) == same]
        if twins:
            lines.append(f"{name} is read; of the same step there is also {some(twins)} (tag={twins[0]!r})")
        return sub, replace(index, problems=(*lines, *index.problems))
    assert first is not None  # there is at least one save, and reading it raised
    raise first


def _saves(entries: Mapping[str, Entry]) -> list[Save]:
    """The checkpoints that are named by their step, epoch or number."""
    return [save for name, entry in entries.items() if (save := _save(name, entry))]


def _save(name: str, entry: Entry) -> Save | None:
    if not entry.is_dir and not is_checkpoint_file(name):
        return None
    if _OTHER.search(name) or name.startswith("."):
        return None
    stem = name if entry.is_dir and not name.endswith(".ckpt") else _ENDING.sub("", name)
    version = _VERSION.search(stem)
    stem = stem[: version.start()] if version else stem
    matches = list(_COUNT.finditer(stem))
    if not matches:
        return None
    series = stem[: matches[0].start()], re.sub(r"\d+", "#", stem[matches[-1].end() :])
    if entry.is_dir and (series[0] not in _FOLDERS or series[1]):
        return None
    counts: dict[str, int] = {}
    for match in matches:
        kind = next(kind for kind in _KINDS if match[kind])
        counts.setdefault(kind, int(match["number"]))
    return Save(name, series, counts, int(version[1]) if version else -1, entry.info.mtime_ns)


def _ordered(source: Source, saves: list[Save]) -> list[Save]:
    """Newest first. Raises FormatError if the names do not tell."""
    kind = next((kind for kind in _KINDS if all(kind in save.counts for save in saves)), None)
    if kind is None or len({save.series for save in saves}) > 1:
        names = sorted((save.name for save in saves), key=natural)
        raise FormatError(
            f"{source.where} has checkpoints whose names do not tell which is the newest: {some(names, 8)}. Say which "
            f"with tag={names[0]!r}, or open its own path."
        )
    return sorted(saves, key=lambda s: (s.counts[kind], _rest(s), s.version, s.mtime_ns, s.name), reverse=True)


def _rest(save: Save) -> list[int]:
    return [save.counts.get(kind, -1) for kind in _KINDS]


def _finished(source: Source, names: list[str]) -> tuple[list[str], dict[str, str]]:
    """-> (those that were finished, the others with the file that they lack)."""
    listed = {name: source.store.list(name) for name in names if source.entries[name].is_dir}
    lacking: dict[str, str] = {}
    for last in LAST:
        if any(last in inside for inside in listed.values()):
            lacking |= {name: last for name, inside in listed.items() if last not in inside}
    return [name for name in names if name not in lacking], lacking


def _find(store: Store, tag: str) -> Entry | None:
    """What a tag names inside the store: a folder or file, of one name or of several (``runs/step-5``)."""
    folder, entry = "", None
    for part in tag.split("/"):
        entry = store.list(folder).get(part) if part not in ("", ".", "..") and "\\" not in part else None
        if entry is None:
            return None
        folder = f"{folder}/{part}" if folder else part
    return entry


def _sub(source: Source, name: str, is_dir: bool) -> Source:
    if is_dir:
        return Source(source.store.below(name), rules=source.rules)
    return Source(source.store, name, rules=source.rules)
