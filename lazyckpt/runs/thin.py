"""Thinning of a run: the older checkpoints become deltas over the next newer one, in their own folders.

`lazyckpt.prune(..., thin=True)` does it. The order of the work keeps every step readable at every moment:

1. the delta is written to a hidden folder beside the checkpoint, and read back: its digests must be those of the
   tensors of the checkpoint;
2. its files are moved into the checkpoint's folder, ``zarr.json`` of its root last. Until then the folder is the old
   checkpoint, from then on it is the delta, which readers look for first;
3. the files of the old checkpoint that hold tensors are removed. A list of them, written before step 2, lets the next
   `prune` finish that.

The newest checkpoints stay whole. Configurations, tokenizers and other small files stay where they are.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ..derive.deltas import HOWS, located, payload
from ..errors import CorruptError
from ..export.writer import WEIGHTS
from ..formats.zarr.documents import component
from ..inspect.changes import estimate
from ..io.storage.urls import is_url
from ..view import CheckpointView
from ..view.bases import ABOUT
from .delta import Delta, recorded_digest
from .folders import LocalFolder, RunFolder

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
    folder: LocalFolder, names: Sequence[tuple[str, int, str]], wanted: Sequence[str] | None
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
        view = CheckpointView(folder.path(name), cache=False)
        old = CheckpointView(folder.path(base), cache=False) if base else None
        states = kept_states(view, wanted)
        with view:
            nbytes = estimate(Delta(view, old, states)._pairs.values())
        rest = sum(folder.nbytes(f"{name}/{path}") for path in _others(folder, name, _doomed(view)))
        dropped = tuple(state for state in view.states if state not in states)
        found.append(Thinned(name, step, base, folder.nbytes(name), nbytes + rest, dropped, tuple(states)))
        if old is not None:
            old.close()
    return tuple(found)


def thin_one(
    folder: LocalFolder,
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
    place, hidden = folder.root / name, folder.root / f".{name}.thin"
    before = folder.nbytes(name)
    with CheckpointView(place, cache=False) as view:
        old = CheckpointView(folder.path(base), cache=False) if base else None
        try:
            states = kept_states(view, wanted)
            states = [state for state in view.states if state in states or state in needed]
            delta = Delta(view, old, states)
            delta.write(hidden, location=f"../{base}" if base else "", overwrite=True, progress=False)
            _verify(hidden, delta, old)
        except CorruptError:
            shutil.rmtree(hidden, ignore_errors=True)
            raise
        finally:
            if old is not None:
                old.close()
        doomed = _doomed(view)
        dropped = tuple(state for state in view.states if state not in states)
    moved = sorted(path.relative_to(hidden).as_posix() for path in hidden.rglob("*") if path.is_file())
    listed = [path for path in doomed if path not in moved]
    _put(place / LIST, json.dumps(listed))
    for path in moved:
        if path != ROOT:
            (place / path).parent.mkdir(parents=True, exist_ok=True)
            os.replace(hidden / path, place / path)
    os.replace(hidden / ROOT, place / ROOT)  # from here on the folder is the delta
    finish(folder, name)
    return Thinned(name, step, base, before, folder.nbytes(name), dropped, tuple(states))


def finish(folder: LocalFolder, name: str) -> bool:
    """Remove the files that a thinned checkpoint has no use for. Return whether there were some.

    Does nothing if the folder is not a delta: thinning was stopped before its files were complete.
    """
    place, hidden = folder.root / name, folder.root / f".{name}.thin"
    try:
        listed = json.loads((place / LIST).read_text())
    except (OSError, ValueError):
        return False
    view = CheckpointView(place, cache=False)
    if ABOUT not in view.kept:
        return False
    own = set(_own(view))
    for path in listed:
        if isinstance(path, str) and path not in own and _inside(place, path):
            (place / path).unlink(missing_ok=True)
    for above in sorted({parent for path in listed for parent in PurePosixPath(path).parents}, reverse=True):
        with suppress(OSError):  # not empty, or removed already
            if str(above) not in ("", ".") and _inside(place, str(above)):
                (place / above).rmdir()
    if hidden.is_dir() and not hidden.is_symlink():
        shutil.rmtree(hidden)
    (place / LIST).unlink()
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


def _others(folder: LocalFolder, name: str, doomed: Sequence[str]) -> list[str]:
    place = folder.root / name
    paths = {path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file()}
    return sorted(paths - set(doomed))


def _own(view: CheckpointView) -> list[str]:
    """Return the paths of a delta's own files."""
    place = Path(view.kept[ABOUT][0])
    groups = [component(payload(state, how)) for state in view.states for how in HOWS]
    inside = [path for group in groups for path in (place / group).rglob("*") if path.is_file()]
    return [ROOT, *(path.relative_to(place).as_posix() for path in inside)]


def _inside(place: Path, path: str) -> bool:
    """Return whether a path is below a folder, also when links are followed."""
    real = Path(os.path.realpath(place))
    return real in Path(os.path.realpath(place / path)).parents


def _put(path: Path, text: str) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    os.replace(part, path)
