"""The checkpoints that a run's folder holds, and the step of each.

A step is told by the name where its writer puts it there: `global_stepN` (deepspeed/runtime/engine.py
`save_checkpoint`), `iter_N` (Megatron-LM megatron/training/checkpointing.py `get_checkpoint_name`), `checkpoint-N`
(transformers/trainer.py `_save_checkpoint`), `step-N` (torchtitan/components/checkpoint.py), `epoch=N-step=M.ckpt`
(lightning/pytorch/callbacks/model_checkpoint.py), `step_N.pt`. Other numbers may count epochs or saves: then what the
checkpoint itself says comes first (`told_step`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import LazyckptError
from ..io.store import Entry, Store
from .megatron.files import TRACKER, tracked
from .reader import Reader, Source
from .registry import recognising
from .runs import LAST
from .zarr.tree import ROOTS

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
    return list(_find(store, "", (store.list(),)))


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


def _find(store: Store, folder: str, listings: tuple[Mapping[str, Entry], ...]) -> Iterator[Found]:
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
        yield from _find(store, path, (*above, entries))
        return
    if _recognised(Source(store.below(path))) is not None:
        yield _found(path, name, True)
        return
    # of what lies deeper only names that leave no doubt: there are folders of all kinds beside checkpoints
    yield from (f for f in _find(store, path, (*above, entries)) if f.sure)


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
