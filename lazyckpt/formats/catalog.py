"""Folders that hold the checkpoints of a run, one for each saved step, and the choice of the one to open.

Names: `checkpoint-N` (transformers/trainer.py), `checkpoint_N` (accelerate/accelerator.py `save_state`), `step-N`
(torchtitan/components/checkpoint.py `_create_checkpoint_id`), `epoch_N` and `dist_epoch_N` (torchtune's checkpointers),
`N` beside ``latest.txt`` (nanotron/trainer.py `save_checkpoint`), `epoch=N-step=M.ckpt`
(lightning/pytorch/callbacks/model_checkpoint.py), and files of scripts (`ckpt_10.pt`, `model_step_100.safetensors`),
`ep0-ba300` and `ep0-ba300-rank0.pt` (composer/callbacks/checkpoint_saver.py), and steps of Orbax, which are any numbers
(orbax/steps.py). The readers of DeepSpeed and Megatron resolve tags themselves.
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
from . import links
from .megatron.files import TRACKER, marker_of, tracked
from .orbax.layout import COMMITTED, is_step_name
from .orbax.steps import is_temporary, steps, temporary
from .reader import Reader, Source
from .registry import checkpoints_in, is_checkpoint_file, only_checkpoint, recognising
from .shared.announce import announce_folders, listing, looking_ahead
from .zarr.tree import ROOTS

# A word and its number.
_COUNT = re.compile(
    r"(?<![A-Za-z])(?:(?P<step>(?:global_?)?steps?|iter(?:ation)?s?|ba(?=\d))|(?P<epoch>epochs?|ep(?=\d))"
    r"|(?P<save>checkpoint|ckpt))"
    r"[-_=]?(?P<number>\d{1,18})(?!\d|[.e]\d)",  # "1.5" and "1e6" are numbers other than 1
    re.IGNORECASE,
)
_TRIED = 16  # maximum number of checkpoints to try, newest first
_KINDS = ("step", "epoch", "save")  # checkpoints are ordered by the first kind of number that all names have
_VERSION = re.compile(r"-v(\d{1,18})$")  # Lightning's suffix for a name that is already taken
_ENDING = re.compile(r"\.[A-Za-z]+$")
_FOLDERS = ("", "dist_")  # allowed prefixes of a folder's name; eval_step_5 is not a checkpoint
# A file that is part of a checkpoint, or that is named after something other than its step.
_OTHER = re.compile(
    r"\d-of-\d|rank[-_.]?\d|(?<![a-z])(?:best|last|latest|final|release)(?![a-z])"
    r"|optim|sched|(?<![a-z])rng|random_state|scaler|training_args",
    re.IGNORECASE,
)
# Files that trainers write last. A folder that lacks one while other folders have it is an unfinished save.
LAST = ("trainer_state.json", "random_states_0.pkl", "checkpoint_metadata.json", ".metadata.json", COMMITTED)
_FINAL = "final"
_LATEST = "latest.txt"  # beside it, nanotron's folders are named by their step alone


# Composer's saves of the only rank that saves, without the folder's other files
_COMPOSER = re.compile(r"(ep\d{1,18}-ba(\d{1,18}))(?:-rank0)?(?=\.pt$|$)")


class Save(NamedTuple):
    """A checkpoint of a run.

    ``series`` is the part of the name that all checkpoints of the run share; ``counts`` maps "step", "epoch" and "save"
    to the numbers in the name."""

    name: str
    series: tuple[str, str]
    counts: Mapping[str, int]
    version: int
    mtime_ns: int


def read_one(source: Source, read: Callable[[Source], Index]) -> tuple[Source, Index]:
    """Read the index of a source, or of a checkpoint in it; return the source that was read and its index.

    The checkpoint is the one that ``tag`` names. Without a tag, and if the folder is not a checkpoint itself, it is the
    newest completely saved one, or the only one.

    Raises MissingFileError for an unknown tag (a single checkpoint has none), FormatError if the names of several
    checkpoints do not identify the newest one, and the errors of ``read``.
    """
    if source.path:
        if source.tag is not None:
            raise MissingFileError(f"{source.where} is a file, there is no {source.tag!r} in it: open it without tag=")
        source = links.followed(source) if source.path.endswith(links.LINK) else source
        return source, read(source)
    if source.tag is not None:
        return _tagged(source, source.tag, read)
    saves = _saves(source.entries) or _numbered(source)
    known = recognising(source) if saves else None
    if saves and (known is None or known.name == "zarr-arrays"):  # zarr-arrays recognises folders of any hierarchies
        return _newest(source, _ordered(source, saves), read)
    return _only(source, read)


def _only(source: Source, read: Callable[[Source], Index]) -> tuple[Source, Index]:
    """Read a source, or the only checkpoint in a folder that is none itself; return what was read and its index."""
    try:
        return source, read(source)
    except FormatError:
        name = None if source.path or recognising(source) is not None else only_checkpoint(source)
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
        return _only(_sub(source, tag, entry.is_dir), read)
    saves = _saves(source.entries) or _numbered(source)
    names = sorted((save.name for save in saves), key=natural, reverse=True)
    if not names and reader is not None:
        raise MissingFileError(
            f"{source.where} is one checkpoint ({reader.name}), there is no {tag!r} in it: open it without tag="
        )
    names = names or checkpoints_in(source)
    there = f"there are: {some(names, 8)}" if names else "it has no other checkpoint either"
    raise MissingFileError(f"{source.where} has no checkpoint {tag!r}; {there}")


def _newest(source: Source, saves: list[Save], read: Callable[[Source], Index]) -> tuple[Source, Index]:
    """Read the newest readable checkpoint, with a problem for each newer one.

    Raises the error of the newest checkpoint if none of the first `_TRIED` can be read."""
    names = [save.name for save in saves]
    finished, others = _finished(source, saves)
    notes = {name: Problem("unfinished-save", f"{name} was not finished ({why})", name) for name, why in others.items()}
    first: LazyckptError | None = None
    for name in (*finished, *others)[:_TRIED]:
        try:
            sub, index = _only(_sub(source, name, source.entries[name].is_dir), read)
        except LazyckptError as e:
            first = first or e
            notes[name] = Problem("skipped-checkpoint", f"{name} cannot be read: {e}", name)
            continue
        at = names.index(name)
        newer = [notes[n] for n in names[:at] if n in notes] + temporary(source.entries, saves[at].counts)
        problems = [Problem(note.code, f"{note}; {name} is read", note.path) for note in newer]
        same = (saves[at].counts, saves[at].version)
        twins = [save.name for save in saves if save.name != name and (save.counts, save.version) == same]
        if twins:
            line = f"{name} is read; of the same step there is also {some(twins)} (tag={twins[0]!r})"
            problems.append(Problem("other-checkpoint", line, only_one(twins)))
        if _has_final(source):
            line = f"{name} is read; there is also {_FINAL}, which may be newer (tag={_FINAL!r})"
            problems.append(Problem("other-checkpoint", line, _FINAL))
        return sub, replace(index, problems=(*problems, *index.problems))
    assert first is not None  # there is at least one save, and reading it raised
    raise first


def _has_final(source: Source) -> bool:
    """Return whether a folder of the last state, which has no number, is beside the steps (LitGPT)."""
    entry = source.entries.get(_FINAL)
    return entry is not None and entry.is_dir and _recognised(_sub(source, _FINAL, True)) is not None


def _saves(entries: Mapping[str, Entry]) -> list[Save]:
    """Return the checkpoints that are named by their step, epoch or number."""
    saves = [save for name, entry in entries.items() if (save := _save(name, entry))]
    if not saves and _LATEST in entries:
        steps = [(name, entry) for name, entry in entries.items() if entry.is_dir and _NUMBER.fullmatch(name)]
        saves = [Save(name, ("", ""), {"step": int(name)}, -1, entry.info.mtime_ns) for name, entry in steps]
    return saves


def _numbered(source: Source) -> list[Save]:
    """Return the steps of Orbax whose names are numbers, perhaps with a prefix of the user's."""
    if any(root in source.entries for root in ROOTS):  # numbers are chunks there
        return []
    return [
        Save(name, ("", ""), {"step": step}, -1, source.entries[name].info.mtime_ns)
        for name, step in steps(source).items()
    ]


def _save(name: str, entry: Entry) -> Save | None:
    if not entry.is_dir and not is_checkpoint_file(name):
        return None
    if _OTHER.search(_COMPOSER.sub(r"\1", name)) or name.startswith(".") or is_temporary(name):
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
    """Sort checkpoints, newest first. Raises FormatError if their names do not determine the order."""
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


def _finished(source: Source, saves: list[Save]) -> tuple[list[str], dict[str, str]]:
    """Split checkpoints into finished ones and unfinished ones, the latter with the evidence."""
    names = [save.name for save in saves]
    source.list_all(name for name in names if source.entries[name].is_dir)
    listed = {name: source.inside(name) for name in names if source.entries[name].is_dir}
    lacking: dict[str, str] = {}
    for last in LAST:
        if any(last in inside for inside in listed.values()):
            lacking |= {n: f"other checkpoints here have {last}" for n, inside in listed.items() if last not in inside}
    lacking |= {name: f"{marker_of(name)} is beside it" for name in names if marker_of(name) in source.entries}
    done = tracked(source)
    if done is not None:  # of verl
        lacking |= {s.name: f"{TRACKER} still names {done}" for s in saves if s.counts.get("step", 0) > done}
    return [name for name in names if name not in lacking], lacking


def _find(store: Store, tag: str) -> Entry | None:
    """Return the entry of the folder or file that a tag names in the store; the tag may be a path (``runs/step-5``)."""
    folder, entry = "", None
    for part in tag.split("/"):
        entry = listing(store, folder).get(part) if part not in ("", ".", "..") and "\\" not in part else None
        if entry is None:
            return None
        folder = f"{folder}/{part}" if folder else part
    return entry


def _sub(source: Source, name: str, is_dir: bool) -> Source:
    if is_dir:
        known = {"": source.inside(name)} if name in source.folders else None
        return Source(source.store.below(name), rules=source.rules, listings=known)
    return Source(source.store, name, rules=source.rules)


# -- The checkpoints in a run's folder, and the step of each.

OPENERS = 8  # checkpoints opened at the same time: opening mostly waits for a disk or a network
_SURE = re.compile(
    r"(?:.*?(?<![A-Za-z]))??(?:global_?step|step|iter|iteration)s?[-_=]?(\d{1,18})(?!\d).*|checkpoint-(\d{1,18})"
)
_FOLDER = re.compile(  # a folder with such a name counts as a checkpoint, perhaps a broken one, without asking a reader
    r"(?:global_step|checkpoint[-_]|step[-_]|epoch_|dist_epoch_|iter_)\d{1,18}(?:_universal)?"
    r"|epoch=\d{1,18}(?:-step=\d{1,18})?(?:-v\d+)?(?:\.ckpt)?|ep\d{1,18}-ba\d{1,18}"
)
_ITERATION = re.compile(r"(?:iter|global_step)_(\d{1,18})")
_NUMBER = re.compile(r"\d{1,18}")
_ZIP = ".zip"  # a zip may contain a zarr hierarchy
FILES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors", _ZIP)  # endings of single files that are checkpoints of a run
_SHARD = re.compile(r".*\d-of-\d.*")
# files in the folder of one checkpoint; a folder of several checkpoints does not have them
_WEIGHTS = ("model.safetensors", "pytorch_model.bin", "model.safetensors.index.json", "pytorch_model.bin.index.json")
_HIDDEN = re.compile(  # also the parts that processes write of one checkpoint of Orbax
    r"\..*|tmp-.*|.*[._](?:tmp|part|incomplete)|.*\.orbax-checkpoint-tmp.*|ocdbt\.process_\d+"
)
_SIDE = re.compile(r"optim|sched|(?<![a-z])rng|random_state|scaler|training_args", re.IGNORECASE)
_SERIES = re.compile(r"(?<![a-z])(?:checkpoint|ckpt|(?:dist_)?epoch|model)[-_=]?\d", re.IGNORECASE)
_NAMED = re.compile(r"best|last|latest|final|release", re.IGNORECASE)
# readers that recognise any safetensors files, or any hierarchies, of a folder, or the last of several files (mlx)
_ANY = ("huggingface", "mlx", "zarr-arrays")
_DEEP = 3  # maximum number of folders between the run's folder and a checkpoint
# keys under which writers store the step, the most reliable first
_TOLD = ("global_steps", "global_step", "iteration", "step", "iter_num", "steps")
_WITHIN = ("trainer_state", "train_state")


def is_step_folder(name: str) -> bool:
    """Return whether a folder's name is that of a checkpoint of a run."""
    return _FOLDER.fullmatch(name) is not None


class Found(NamedTuple):
    """A checkpoint of a run's folder."""

    name: str
    """Path relative to the run's folder; "" for that folder itself."""
    number: int | None
    """The number in the name."""
    sure: bool
    """Whether the number is certainly the step."""
    is_dir: bool
    side: bool = False
    """Whether the name is that of an optimizer's file or the like, beside the model's file."""
    numbered: bool = True
    """Whether the name belongs to a series; the number of "best_step_5" or of an experiment does not count."""
    here: bool = False
    """Whether this is the weights of a folder that also contains checkpoints."""


def find(store: Store) -> list[Found]:
    """Find the checkpoints in a folder and its subfolders by names and first bytes."""
    with looking_ahead(store) as store:
        return list(_find_steps(store, "", (listing(store),)))


def recorded_step(meta: Mapping[str, Any]) -> int | None:
    """Return the step in the metadata of a checkpoint; None if there is none.

    >>> recorded_step({"trainer_state": {"global_step": 500}, "epoch": 3})
    500
    """
    for table in (meta, *(meta[key] for key in _WITHIN if isinstance(meta.get(key), Mapping))):
        for key in _TOLD:
            value = table.get(key)
            if type(value) is int and value >= 0:
                return value
    return None


def unfinished(store: Store, found: Sequence[Found]) -> dict[str, str]:
    """Return the unfinished checkpoints, which may be readable nevertheless, each with the evidence.

    The folder of an unfinished checkpoint lacks a file that its writer writes last (`LAST`) and that other folders
    have, or its iteration is later than the one in the tracker of Megatron or verl, or NeMo's mark is beside it."""
    series: dict[str, list[str]] = {}
    for f in found:
        if f.is_dir and f.numbered and f.name:
            series.setdefault(f.name.rpartition("/")[0], []).append(f.name)
    with looking_ahead(store) as store:
        announce_folders(store, (name for names in series.values() for name in names))
        return _unfinished(store, series)


def _unfinished(store: Store, series: Mapping[str, list[str]]) -> dict[str, str]:
    lines: dict[str, str] = {}
    for folder, names in series.items():
        listed = {name: listing(store, name) for name in names}
        for last in LAST:
            if any(last in inside for inside in listed.values()):
                lines |= {n: f"others beside it have {last}" for n, inside in listed.items() if last not in inside}
        around = listing(store, folder)
        lines |= {n: f"{mark} is beside it" for n in names if (mark := marker_of(n.rpartition("/")[2])) in around}
        last_done = tracked(Source(store.below(folder) if folder else store))
        if last_done is not None:
            late = [(n, _ITERATION.fullmatch(n.rpartition("/")[2])) for n in names]
            lines |= {
                n: f"{TRACKER} still names {last_done}" for n, match in late if match and int(match[1]) > last_done
            }
    return lines


def _find_steps(store: Store, folder: str, listings: tuple[Mapping[str, Entry], ...]) -> Iterator[Found]:
    """Yield the checkpoints in a folder; ``listings`` are those of all folders from the run's down to this one."""
    entries = listings[-1]
    here = any(name in entries for name in _WEIGHTS)
    groups = any(name in entries for name in ROOTS)  # folders of a zarr hierarchy are checkpoints only by their names
    candidates = [name for name, entry in entries.items() if not entry.is_dir and name.endswith(FILES)]
    single = not here and not (candidates and _is_one(store, folder))  # each file is a checkpoint
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
            if _NAMED.match(name) and any(entries[other].info == entry.info for other in candidates if other != name):
                continue  # a link to one of the others (Composer)
            if name.endswith(_ZIP) and _recognised(Source(store, path)) is None:
                continue  # a zip of something else
            found = _found(path, name.rpartition(".")[0], False)
            if found.number is not None or not found.side:
                yield found


def _inside(store: Store, path: str, name: str, above: tuple[Mapping[str, Entry], ...]) -> Iterator[Found]:
    """Yield the checkpoints of a folder that may be a checkpoint or contain checkpoints."""
    entries = listing(store, path)
    if entries in above:  # a link to a parent folder
        return
    if any(e.is_dir and _FOLDER.fullmatch(n) for n, e in entries.items()):
        yield from _find_steps(store, path, (*above, entries))
        return
    reader = _recognised(Source(store.below(path), listings={"": entries}))
    if reader is not None:
        found = _found(path, name, True)
        if reader.name == "orbax" and is_step_name(name):
            found = found._replace(sure=True, numbered=True)
        yield found
        return
    # folders of all kinds lie beside checkpoints, so deeper down only unambiguous names count
    yield from (f for f in _find_steps(store, path, (*above, entries)) if f.sure)


def _is_one(store: Store, folder: str) -> bool:
    """Return whether the files of a folder belong to one checkpoint."""
    source = Source(store.below(folder) if folder else store)
    reader = _recognised(source)
    if reader is None or reader.name in _ANY:
        return False
    return not (reader.tags and any(entry.is_dir for entry in source.entries.values()))


def _recognised(source: Source) -> Reader | None:
    try:
        return recognising(source)
    except LazyckptError:  # not even its names and first bytes can be read
        return None


def _found(path: str, name: str, is_dir: bool) -> Found:
    sure = _COMPOSER.fullmatch(name) or _SURE.fullmatch(name)
    numbers = _NUMBER.findall(name)
    number = sure[2] or sure[1] if sure else numbers[-1] if numbers else None
    return Found(
        path,
        None if number is None else int(number),
        sure is not None,
        is_dir,
        _SIDE.search(name) is not None,
        (sure is not None or _SERIES.search(name) is not None) and _NAMED.search(name) is None,
    )
