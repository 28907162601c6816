"""Folders that hold the checkpoints of a run, one for each step that was saved: which of them is opened.

Names: `checkpoint-N` (transformers/trainer.py), `checkpoint_N` (accelerate/accelerator.py `save_state`), `step-N`
(torchtitan/components/checkpoint.py `_create_checkpoint_id`), `epoch_N` and `dist_epoch_N` (torchtune's checkpointers),
`epoch=N-step=M.ckpt` (lightning/pytorch/callbacks/model_checkpoint.py), and files of scripts (`ckpt_10.pt`,
`model_step_100.safetensors`). DeepSpeed's and Megatron's readers find their tags themselves.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ..core.index import Index
from ..core.names import natural
from ..errors import FormatError, LazyckptError, MissingFileError, Problem, only_one, some
from ..io.storage.base import Entry, Store
from .megatron.files import TRACKER, tracked
from .reader import Reader, Source
from .registry import checkpoints_in, is_checkpoint_file, only_checkpoint, recognising
from .zarr.tree import ROOTS

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
    """The newest that can be read, with a problem for each that is newer. Raises the error of the newest if none of the
    first `_TRIED` can be read."""
    names = [save.name for save in saves]
    finished, others = _finished(source, names)
    notes = {
        name: Problem("unfinished-save", f"{name} was not finished (other checkpoints here have {last})", name)
        for name, last in others.items()
    }
    first: LazyckptError | None = None
    for name in (*finished, *others)[:_TRIED]:
        sub = _sub(source, name, source.entries[name].is_dir)
        try:
            index = read(sub)
        except LazyckptError as e:
            first = first or e
            notes[name] = Problem("skipped-checkpoint", f"{name} cannot be read: {e}", name)
            continue
        at = names.index(name)
        newer = [notes[n] for n in names[:at] if n in notes]
        problems = [Problem(note.code, f"{note}; {name} is read", note.path) for note in newer]
        same = (saves[at].counts, saves[at].version)
        twins = [save.name for save in saves if save.name != name and (save.counts, save.version) == same]
        if twins:
            line = f"{name} is read; of the same step there is also {some(twins)} (tag={twins[0]!r})"
            problems.append(Problem("other-checkpoint", line, only_one(twins)))
        return sub, replace(index, problems=(*problems, *index.problems))
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
    listed = {name: source.inside(name) for name in names if source.entries[name].is_dir}
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


# -- The checkpoints that a run's folder holds, and the step of each.

OPENERS = 8  # checkpoints that are opened at a time: mostly they wait for a disk, or for a network
_SURE = re.compile(
    r"(?:.*?(?<![A-Za-z]))??(?:global_?step|step|iter|iteration)s?[-_=]?(\d{1,18})(?!\d).*|checkpoint-(\d{1,18})"
)
_FOLDER = re.compile(  # what no reader has to recognise before it counts as a checkpoint, if perhaps a broken one
    r"(?:global_step|checkpoint[-_]|step[-_]|epoch_|dist_epoch_|iter_)\d{1,18}(?:_universal)?"
    r"|epoch=\d{1,18}(?:-step=\d{1,18})?(?:-v\d+)?(?:\.ckpt)?"
)
_ITERATION = re.compile(r"iter_(\d{1,18})")
_NUMBER = re.compile(r"\d{1,18}")
_ZIP = ".zip"  # of a zarr hierarchy
_FILES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors", _ZIP)
_SHARD = re.compile(r".*\d-of-\d.*")
# what stands in the folder of a checkpoint, and not among checkpoints
_WEIGHTS = ("model.safetensors", "pytorch_model.bin", "model.safetensors.index.json", "pytorch_model.bin.index.json")
_HIDDEN = re.compile(r"\..*|tmp-.*|.*[._](?:tmp|part|incomplete)")
_SIDE = re.compile(r"optim|sched|(?<![a-z])rng|random_state|scaler|training_args", re.IGNORECASE)
_SERIES = re.compile(r"(?<![a-z])(?:checkpoint|ckpt|(?:dist_)?epoch|model)[-_=]?\d", re.IGNORECASE)
_NAMED = re.compile(r"best|last|latest|final|release", re.IGNORECASE)
_ANY = ("huggingface", "zarr-arrays")  # readers that take any safetensors, and any hierarchies, in a folder for one
_DEEP = 3  # folders between that of the run and a checkpoint, at most
# where writers put the step, in the order of their trustworthiness
_TOLD = ("global_steps", "global_step", "iteration", "step", "iter_num", "steps")
_WITHIN = ("trainer_state", "train_state")


class Found(NamedTuple):
    """A checkpoint: its ``name`` from the run's folder on ("" for that folder itself), the number in it, and whether
    that is surely the step. ``side``: it is named as an optimizer's file, or the like, beside the model's.
    ``numbered``: the name is one of a series (and not "best_step_5"; other numbers may tell experiments apart).
    ``here``: weights that lie beside checkpoints."""

    name: str
    number: int | None
    sure: bool
    is_dir: bool
    side: bool = False
    numbered: bool = True
    here: bool = False


def find(store: Store) -> list[Found]:
    """The checkpoints in a folder and in the folders in it, as far as names and first bytes tell."""
    return list(_find_steps(store, "", (store.list(),)))


def told_step(meta: Mapping[str, Any]) -> int | None:
    """The step that a checkpoint says it is of; None if it does not.

    >>> told_step({"trainer_state": {"global_step": 500}, "epoch": 3})
    500
    """
    for table in (meta, *(meta[key] for key in _WITHIN if isinstance(meta.get(key), Mapping))):
        for key in _TOLD:
            value = table.get(key)
            if type(value) is int and value >= 0:
                return value
    return None


def unfinished(store: Store, found: Sequence[Found]) -> dict[str, str]:
    """The checkpoints whose save did not come to its end, although what there is may be readable -> how that is known:
    their folder lacks what others beside it have and what their writer puts there last (`runs.LAST`), or Megatron's
    tracker does not name their iteration yet."""
    series: dict[str, list[str]] = {}
    for f in found:
        if f.is_dir and f.numbered and f.name:
            series.setdefault(f.name.rpartition("/")[0], []).append(f.name)
    lines: dict[str, str] = {}
    for folder, names in series.items():
        listed = {name: store.list(name) for name in names}
        for last in LAST:
            if any(last in inside for inside in listed.values()):
                lines |= {n: f"others beside it have {last}" for n, inside in listed.items() if last not in inside}
        told = tracked(Source(store.below(folder) if folder else store))
        if told is not None:
            late = [(n, _ITERATION.fullmatch(n.rpartition("/")[2])) for n in names]
            lines |= {n: f"{TRACKER} still names {told}" for n, match in late if match and int(match[1]) > told}
    return lines


def _find_steps(store: Store, folder: str, listings: tuple[Mapping[str, Entry], ...]) -> Iterator[Found]:
    """``listings``: of the run's folder, and so on down to this one."""
    entries = listings[-1]
    here = any(name in entries for name in _WEIGHTS)
    groups = any(name in entries for name in ROOTS)  # of a zarr hierarchy: no checkpoints, unless they are called so
    candidates = [name for name, entry in entries.items() if not entry.is_dir and name.endswith(_FILES)]
    single = not here and not (candidates and _is_one(store, folder))  # files are checkpoints of their own
    if here:
        yield Found(folder, None, False, True, numbered=False, here=True)
    for name, entry in entries.items():
        path = f"{folder}/{name}" if folder else name
        if _HIDDEN.fullmatch(name):
            continue
        if entry.is_dir:
            if _FOLDER.fullmatch(name):
                yield _found(path, name, True)
            elif len(listings) <= _DEEP and not groups:
                yield from _inside(store, path, name, listings)
        elif single and name in candidates and not _SHARD.fullmatch(name) and entry.info.size:
            if name.endswith(_ZIP) and _recognised(Source(store, path)) is None:
                continue  # any zip
            found = _found(path, name.rpartition(".")[0], False)
            if found.number is not None or not found.side:
                yield found


def _inside(store: Store, path: str, name: str, above: tuple[Mapping[str, Entry], ...]) -> Iterator[Found]:
    """A folder that may be a checkpoint, or a folder of checkpoints."""
    entries = store.list(path)
    if entries in above:  # a link back to a folder that this one lies in
        return
    if any(e.is_dir and _FOLDER.fullmatch(n) for n, e in entries.items()):
        yield from _find_steps(store, path, (*above, entries))
        return
    if _recognised(Source(store.below(path))) is not None:
        yield _found(path, name, True)
        return
    # of what lies deeper only names that leave no doubt: there are folders of all kinds beside checkpoints
    yield from (f for f in _find_steps(store, path, (*above, entries)) if f.sure)


def _is_one(store: Store, folder: str) -> bool:
    """Whether the files in a folder are those of one checkpoint."""
    source = Source(store.below(folder) if folder else store)
    reader = _recognised(source)
    if reader is None or reader.name in _ANY:
        return False
    return not (reader.tags and any(entry.is_dir for entry in source.entries.values()))


def _recognised(source: Source) -> Reader | None:
    try:
        return recognising(source)
    except LazyckptError:  # it cannot even be looked at
        return None


def _found(path: str, name: str, is_dir: bool) -> Found:
    sure = _SURE.fullmatch(name)
    numbers = _NUMBER.findall(name)
    number = sure[1] or sure[2] if sure else numbers[-1] if numbers else None
    return Found(
        path,
        None if number is None else int(number),
        sure is not None,
        is_dir,
        _SIDE.search(name) is not None,
        (sure is not None or _SERIES.search(name) is not None) and _NAMED.search(name) is None,
    )
