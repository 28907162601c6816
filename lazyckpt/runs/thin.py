"""Thinning of a run: the older checkpoints become deltas over the next newer one, in their own folders.

`lazyckpt.prune(..., thin=True)` does it. The order of the work keeps every step readable at every moment:

1. the delta is written to a folder on a disk that nobody reads, and read back: its digests must be those of the tensors
   of the checkpoint;
2. its files are put into the checkpoint's folder, ``zarr.json`` of its root last. Until then the folder is the old
   checkpoint, from then on it is the delta, which readers look for first. In a bucket they are sent, and compared with
   what was sent;
3. the files of the old checkpoint that hold tensors are removed. A list of them, written before step 2, lets the next
   `prune` finish that.

A checkpoint that is a single file (``step_100.pt``) becomes a folder with its name less the ending (``step_100``). The
folder appears as a whole, and then the file is removed. Deltas over the file find the folder (`view.bases`).

The newest checkpoints stay whole. Configurations, tokenizers and other small files stay where they are.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from ..derive.deltas import HOWS, located, payload, without_ending
from ..errors import CorruptError, LazyckptError
from ..export.writer import WEIGHTS
from ..formats.zarr.documents import component
from ..inspect.changes import estimate
from ..io.storage.urls import is_url
from ..view import CheckpointView
from ..view.bases import ABOUT
from .delta import Delta, recorded_digest
from .folders import RunFolder

LIST = ".lazyckpt-thinned"  # in a checkpoint's folder: the files of the old checkpoint that are to be removed
ROOT = "zarr.json"
CHAIN = 16  # deltas over each other; then a checkpoint is stored without a base
_KEPT = (".json", ".txt", ".model", ".jinja", ".yaml", ".yml", ".md", ".py", ".toml")  # endings of files that stay


@dataclass(frozen=True, slots=True)
class Thinned:
    """A checkpoint that is thinned, or that would be.

    Attributes
    ----------
    name
        Its name in the folder.
    step
        Its step.
    base
        The name of the checkpoint that the delta is made over; "" if it is stored without one.
    before, nbytes
        Bytes of its files before and after. ``nbytes`` is estimated from samples in a dry run.
    dropped, states
        Names of the states that are dropped, and of those that are kept.
    """

    name: str
    step: int
    base: str
    before: int
    nbytes: int
    dropped: tuple[str, ...]
    states: tuple[str, ...]


def kept_states(view: CheckpointView, wanted: Sequence[str] | None) -> list[str]:
    """Return the states of a checkpoint that thinning keeps: those of ``wanted``, by default the weights and their fp32
    copies; at least the default state."""
    names = WEIGHTS if wanted is None else wanted
    found = [state for state in view.states if state in names]
    return found or [next(iter(view.states))]


def forecast(
    folder: RunFolder, names: Sequence[tuple[str, int, str]], wanted: Sequence[str] | None
) -> tuple[Thinned, ...]:
    """Return what thinning would do, from samples of the tensors.

    Parameters
    ----------
    folder
        The folder of the run.
    names
        Name, step and base of each checkpoint.
    wanted
        See `kept_states`.
    """
    found = []
    for name, step, base in names:
        with _opened(folder, name) as view, _opened(folder, base) if base else nullcontext() as old:
            states = kept_states(view, wanted)
            nbytes = estimate(Delta(view, old, states)._pairs.values())
            doomed = _doomed(view)
            dropped = tuple(state for state in view.states if state not in states)
        before = folder.nbytes(name)
        rest = 0 if folder.is_file(name) else sum(n for path, n in folder.sizes(name).items() if path not in doomed)
        found.append(Thinned(name, step, base, before, nbytes + rest, dropped, tuple(states)))
    return tuple(found)


def thin_one(
    folder: RunFolder,
    name: str,
    step: int,
    base: str,
    wanted: Sequence[str] | None,
    needed: Collection[str] = (),
) -> Thinned:
    """Thin a checkpoint.

    Parameters
    ----------
    folder
        The folder of the run, in which nobody else prunes.
    name, step
        The checkpoint.
    base
        The checkpoint that it becomes a delta over; "" for none.
    wanted
        See `kept_states`.
    needed
        Names of states that deltas over this checkpoint need.

    Raises
    ------
    CorruptError
        The delta that was written does not hold the tensors of the checkpoint, which stays as it is.
    LazyckptError, OSError
        What reading and writing raise. The checkpoint stays as it is.
    """
    before, single = folder.nbytes(name), folder.is_file(name)
    place = without_ending(name) if single else name
    with folder.scratch(name) as hidden:
        with _opened(folder, name) as view, _opened(folder, base) if base else nullcontext() as old:
            states = kept_states(view, wanted)
            states = [state for state in view.states if state in states or state in needed]
            delta = Delta(view, old, states)
            delta.write(hidden, location=f"../{base}" if base else "", overwrite=True, progress=False)
            _verify(hidden, delta, old)
            doomed = _doomed(view)
            dropped = tuple(state for state in view.states if state not in states)
        files = sorted(path.relative_to(hidden).as_posix() for path in hidden.rglob("*") if path.is_file())
        if single:
            (hidden / LIST).write_text(json.dumps({"file": name}))
            folder.add(place, hidden, [*files, LIST])
        else:
            stale = [path for path in folder.sizes(name) if path.startswith(_groups(delta)) and path not in files]
            folder.drop(name, [path for path in stale if path not in doomed])  # of a process that was stopped
            folder.write_file(name, LIST, json.dumps([path for path in doomed if path not in files]))
            folder.fill(name, hidden, [path for path in files if path != ROOT])
            folder.fill(name, hidden, [ROOT])  # from here on the folder is the delta
    finish(folder, place)
    return Thinned(name, step, base, before, folder.nbytes(place), dropped, tuple(states))


def finish(folder: RunFolder, name: str) -> bool:
    """Remove the files that a thinned checkpoint has no use for. Return whether there were some.

    Does nothing if the folder is not a delta, or cannot be opened: thinning was stopped before its files were complete.
    """
    try:
        listed = json.loads(folder.read_file(name, LIST))
        view = _opened(folder, name)
    except (ValueError, LazyckptError):
        return False
    if ABOUT not in view.kept:
        return False
    groups = tuple(f"{component(payload(state, how))}/" for state in view.states for how in HOWS)
    if isinstance(listed, list):
        folder.drop(name, [p for p in listed if isinstance(p, str) and p and p != ROOT and not p.startswith(groups)])
    elif isinstance(listed, dict) and without_ending(str(listed.get("file"))) == name:
        folder.drop(listed["file"], [""])
    folder.tidy(name)
    folder.drop(name, [LIST])
    return True


def base_name(view: CheckpointView, folder: RunFolder) -> str | None:
    """Return the name in the folder of the checkpoint that a delta is made over; None if it is no delta, has no base or
    has one elsewhere."""
    if ABOUT not in view.kept:
        return None
    where, about = view.kept[ABOUT]
    if not about.needs_base:
        return None
    place, root = located(about.base.location, where, is_url), str(folder)
    if not is_url(place):
        place, root = os.path.realpath(place), os.path.realpath(root)
    place = place.replace(os.sep, "/")
    root = root.replace(os.sep, "/")
    return place[len(root) + 1 :].partition("/")[0] if place.startswith(f"{root}/") else None


def _opened(folder: RunFolder, name: str) -> CheckpointView:
    return CheckpointView(folder.path(name), cache=False, storage_options=folder.options)


def _verify(hidden: Path, delta: Delta, old: CheckpointView | None) -> None:
    with CheckpointView(hidden, cache=False, base=old) as written:
        wanted = recorded_digest(written)
        found = written.digest(states=list(written.states), progress=False)
        if wanted is None or found != delta.digest or found != wanted:
            raise CorruptError(
                f"{hidden}: the delta does not hold what {delta.new.root} holds: the disk or the memory is faulty. The "
                "checkpoint is kept as it was. Try again on another disk"
            )


def _doomed(view: CheckpointView) -> list[str]:
    """Return the files of a checkpoint that are removed: all but small ones that describe the model."""
    documents = view.format == "zarr"
    return [path for path in view.files if documents or not path.endswith(_KEPT)]


def _groups(delta: Delta) -> tuple[str, ...]:
    """Return what the paths of a delta's arrays begin with."""
    return tuple(f"{component(payload(state, how))}/" for state in delta.new.states for how in HOWS)
