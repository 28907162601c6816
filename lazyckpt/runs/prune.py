"""Select the checkpoints of a run to keep, and remove the others safely.

Trainers do this while they run, by counting folders (transformers/trainer_utils.py `rotate_checkpoints`, accelerate's
``total_limit``, torchtitan's ``keep_latest_k``). `prune` does it for any run, and opens each checkpoint first:

- the newest complete checkpoints stay, and those that something points to: ``latest``,
  ``latest_checkpointed_iteration.txt``, the best and the last of the Trainer and of Lightning, links. Links, and names
  that are not a series ("best"), are never removed;
- an incomplete checkpoint stays unless the caller asks for its removal, because it may still be being written;
- a checkpoint is first renamed to a hidden name, atomically, so that no reader finds half of one. The next `prune`
  finishes an interrupted one. A second `prune` in the same folder waits for the first.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from ..core.compose import readable
from ..errors import DestinationError, FormatError, LazyckptError, MissingFileError
from ..formats.catalog import OPENERS, Found, find, recorded_step, unfinished
from ..formats.megatron.files import TRACKER, tracked
from ..formats.reader import Source
from ..formats.registry import recognising
from ..io.storage.fsspec import is_url
from ..io.storage.local import LocalStore
from ..io.system import Directory, alone_in
from ..jobs.guard import local_path
from ..namespace import plain_meta
from ..view import CheckpointView

_HIDDEN = re.compile(r"\..+\.[0-9a-f]{8}\.pruned")
_POINTERS = ("latest", "latest_universal")  # files whose text is a name
_LIGHTNING = ("best_model_path", "last_model_path")  # lightning/pytorch/callbacks/model_checkpoint.py `state_dict`
_TEXT = 4096  # bytes of a pointer, at most


_PARTS = re.compile(  # names of files in a checkpoint, also of files that are being written
    r".*\.(?:pt|pth|bin|ckpt|pkl|safetensors|distcp|json|txt|model|jinja|ya?ml|tmp|py)|\.metadata(?:\.tmp)?|latest"
)


@dataclass(frozen=True, slots=True)
class Item:
    """A checkpoint in the folder.

    Attributes
    ----------
    name
        Its name in the folder.
    step
        Its step; None if unknown.
    nbytes
        Bytes of its files.
    reason
        Why it stays or is removed.
    """

    name: str
    step: int | None
    nbytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class Pruned:
    """The result of `prune`.

    Attributes
    ----------
    root
        The folder.
    deleted
        Whether checkpoints were removed; False for a dry run.
    remove
        The checkpoints that were removed, or that would be.
    keep
        The checkpoints that stay.
    leftovers
        Remains of an interrupted prune, which are removed, too.
    failed
        A line for each checkpoint that could not be removed.
    """

    root: str
    deleted: bool
    remove: tuple[Item, ...]
    keep: tuple[Item, ...]
    leftovers: tuple[Item, ...]
    failed: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes that are freed, or would be."""
        return sum(item.nbytes for item in (*self.remove, *self.leftovers))

    def as_dict(self) -> dict[str, Any]:
        """Return all fields and ``nbytes`` as plain objects."""
        return asdict(self) | {"nbytes": self.nbytes}


@dataclass(frozen=True, slots=True)
class _State:
    """What opening a checkpoint has shown. ``lacks``: why it is incomplete, or "". ``known``: whether it certainly is a
    checkpoint. ``step``: None if the number in its name may be something else."""

    step: int | None
    lacks: str
    known: bool
    meta: Mapping[str, Any]


def prune(path: str | os.PathLike[str], keep: int, *, delete: bool = False, incomplete: bool = False) -> Pruned:
    """Remove all checkpoints in a folder but the newest complete ones and those that something points to.

    A checkpoint is complete if it opens and no part of a tensor is missing; checking that reads what `lazyckpt.open`
    reads. Only entries of the folder itself are considered, with a name of a series of steps or epochs
    (``model_1000.pt`` only if the file records its step, too); links are not followed. Other files of a step
    (``optimizer_1000.pt``) are removed with the model's file.

    Parameters
    ----------
    path
        The folder. A URL is refused.
    keep
        The number of complete checkpoints to keep, at least 1.
    delete
        Remove the checkpoints. By default nothing is changed, and the result says what would be removed.
    incomplete
        Remove incomplete checkpoints, too. Do not use it while a trainer is writing.

    Returns
    -------
    Pruned
        What is removed, and what stays, with reasons.

    Raises
    ------
    DestinationError
        ``path`` is a URL, ``keep`` is below 1, or permissions are missing.
    MissingFileError
        The folder does not exist.
    FormatError
        The folder has no checkpoint in it.
    """
    if keep < 1:
        raise DestinationError(f"keep={keep}: at least one checkpoint has to stay (remove the folder itself otherwise)")
    if is_url(os.fspath(path)):
        raise DestinationError(f"{os.fspath(path)}: only folders of this machine are pruned, not what is behind a URL")
    root = Path(os.path.abspath(local_path(path)))
    if not root.is_dir():
        kind = "is a file, not a folder of checkpoints" if root.exists() else "no such folder"
        raise MissingFileError(f"{root}: {kind}")
    if not delete:
        return _plan(root, keep, incomplete)
    with alone_in(root) as folder:  # a lock file would be among the checkpoints, which trainers count
        plan = _plan(root, keep, incomplete)
        return _carry_out(root, folder, plan)


def _plan(root: Path, keep: int, incomplete: bool) -> Pruned:
    store = LocalStore(root)
    found = [f for f in find(store) if f.name and "/" not in f.name]
    leftovers = [name for name in sorted(os.listdir(root)) if _HIDDEN.fullmatch(name) and not _is_link(root / name)]
    if not found and not leftovers:
        raise FormatError(f"{root} has no checkpoints in it that lazyckpt knows: nothing is removed")
    late = unfinished(store, found)
    looked = [f for f in found if _may_go(root, f)]
    with ThreadPoolExecutor(OPENERS) as pool:
        states = dict(zip([f.name for f in looked], pool.map(lambda f: _looked_at(root, f, late), looked), strict=True))
    complete = {s.step for s in states.values() if s.step is not None and not s.lacks}
    newest = set(sorted(complete, reverse=True)[:keep])
    pointed = _pointed(root, found, states)
    own = recognising(Source(store))
    whole = own is not None and not own.tags  # the files of the folder belong to one checkpoint
    goes: dict[str, bool] = {}
    reasons: dict[str, str] = {}
    for f in found:
        state = states.get(f.name)
        if f.name in pointed:
            goes[f.name], reasons[f.name] = False, pointed[f.name]
        elif state is None or state.step is None or (whole and not f.is_dir and not f.sure):
            goes[f.name], reasons[f.name] = False, _untouched(root, f)
        elif state.lacks:
            goes[f.name], reasons[f.name] = incomplete and state.known, f"not complete: {state.lacks}"
        else:
            goes[f.name] = state.step not in newest
            reasons[f.name] = "older" if goes[f.name] else f"of the newest {keep}"
    # an optimizer's file is removed with the model's file of the same step
    files = {f.number: f.name for f in found if not f.is_dir and f.name in states}
    for f in found:
        if f.side and not f.is_dir and not _is_link(root / f.name) and f.number in files and f.name not in pointed:
            model = files[f.number]
            goes[f.name], reasons[f.name] = goes[model], f"with {model}"
    items: dict[bool, list[Item]] = {True: [], False: []}
    steps = {f.name: states[f.name].step if f.name in states else f.number if f.sure or f.side else None for f in found}
    for f in sorted(found, key=lambda f: (steps[f.name] or 0, f.name)):
        items[goes[f.name]].append(Item(f.name, steps[f.name], _nbytes(root / f.name), reasons[f.name]))
    rest = tuple(Item(name, None, _nbytes(root / name), "left of a prune that was stopped") for name in leftovers)
    return Pruned(str(root), False, tuple(items[True]), tuple(items[False]), rest)


def _carry_out(root: Path, folder: Directory, plan: Pruned) -> Pruned:
    """Hide everything to remove, then remove it. ``folder`` is open, so that nothing outside of it is removed if the
    path is replaced meanwhile. Raises DestinationError if the path is another folder by now."""
    failed: list[str] = []
    kept: list[Item] = []
    hidden = [(item.name, item.name) for item in plan.leftovers]
    for item in plan.remove:
        place = f".{item.name[:200]}.{uuid4().hex[:8]}.pruned"
        _check_same(root, folder)
        try:
            os.rename(root / item.name, root / place)
        except FileNotFoundError:  # another process has removed it
            continue
        except OSError as e:
            failed.append(f"{item.name}: {e.strerror or e}")
            kept.append(replace(item, reason="could not be removed"))
            continue
        hidden.append((item.name, place))
    for name, place in hidden:
        try:
            folder.remove(place)
        except FileNotFoundError:  # somebody else has removed it
            continue
        except OSError as e:
            failed.append(f"{name} (now {place}): {e.strerror or e}: {e.filename}")
    gone = tuple(item for item in plan.remove if item.name not in {k.name for k in kept})
    return replace(plan, deleted=True, remove=gone, keep=(*plan.keep, *kept), failed=tuple(failed))


def _check_same(root: Path, folder: Directory) -> None:
    with suppress(FileNotFoundError):
        if os.path.samestat(os.stat(root), folder.status()):
            return
    raise DestinationError(f"{root}: the folder was replaced by another one while it was pruned: prune it again")


# -- the state of checkpoints, and pointers to them


def _may_go(root: Path, found: Found) -> bool:
    return found.numbered and not found.side and not _is_link(root / found.name)


def _untouched(root: Path, found: Found) -> str:
    if _is_link(root / found.name):
        return "a link: never touched"
    return "its name is not of a series of steps: never touched"


def _looked_at(root: Path, found: Found, late: Mapping[str, str]) -> _State:
    try:
        view = CheckpointView(root / found.name, cache=False)
    except LazyckptError as e:
        return _State(found.number, " ".join(str(e).split()), _like_checkpoint(root / found.name), {})
    step = recorded_step(plain_meta(view))
    if not found.is_dir and not found.sure and step is None and found.name.lower().startswith("model"):
        return _State(None, "", True, plain_meta(view))  # model_3.pt may also be the third of three models
    return _State(
        found.number if found.sure or step is None else step, _lacks(found, view, late), True, plain_meta(view)
    )


def _lacks(found: Found, view: CheckpointView, late: Mapping[str, str]) -> str:
    if found.name in late:
        return late[found.name]
    for state, part in view.states.items():
        lost = next((name for name, spec in part.specs.items() if not readable(spec)), None)
        if lost is not None:
            return f"of {lost!r} ({state}) parts are lost"
    if view.unreadable:
        return next(iter(view.unreadable.values()))
    return "" if any(map(len, view.states.values())) else "there is no tensor in it"


def _like_checkpoint(path: Path) -> bool:
    """Return whether all files look like those of a checkpoint: a folder that cannot be opened may be another thing."""
    if not path.is_dir():
        return True  # a file of tensors with a name of a series
    return all(_PARTS.fullmatch(name) for _, _, names in os.walk(path) for name in names)


def _pointed(root: Path, found: list[Found], states: Mapping[str, _State]) -> dict[str, str]:
    """Return the names that something points to -> what points to them."""
    pointed = [(_text(root / pointer).partition("/")[0], f"named by {pointer}") for pointer in _POINTERS]
    number = tracked(Source(LocalStore(root)))
    if number is not None:
        pointed.append((f"iter_{number:07d}", f"named by {TRACKER}"))
    real = os.path.realpath(root)
    for name in sorted(os.listdir(root)):
        if _is_link(root / name):
            inner = os.path.relpath(os.path.realpath(root / name), real)
            pointed.append((inner.partition(os.sep)[0], f"the link {name} leads to it"))
    newest = sorted(states, key=lambda name: (states[name].step or 0, name), reverse=True)
    metas = [states[name].meta for name in newest]
    trainers = [m["trainer_state"] for m in metas if isinstance(m.get("trainer_state"), Mapping)]
    pointed += [  # only the newest state: older ones name the best checkpoint of their time
        (_last(state.get("best_model_checkpoint")), "the best, as trainer_state.json says")
        for state in (*trainers[:1], _json(root / "trainer_state.json"))
    ]
    callbacks = [m["callbacks"] for m in metas if isinstance(m.get("callbacks"), Mapping)]
    states_of = [c for c in callbacks[0].values() if isinstance(c, Mapping)] if callbacks else []
    pointed += [(_last(c.get(key)), f"Lightning's {key}") for c in states_of for key in _LIGHTNING]
    names = {f.name for f in found}
    return {name: why for name, why in reversed(pointed) if name in names}


def _is_link(path: Path) -> bool:
    return path.is_symlink()


def _text(path: Path) -> str:
    """Return the text of a pointer; "" if there is none."""
    try:
        with path.open("rb") as file:
            return file.read(_TEXT).decode("utf-8", "replace").strip()
    except (FileNotFoundError, IsADirectoryError):
        return ""


def _json(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (FileNotFoundError, IsADirectoryError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _last(path: object) -> str:
    """Return the last name of a path, which may be a path of another machine."""
    return path.rstrip("/").rpartition("/")[2] if isinstance(path, str) else ""


def _nbytes(path: Path) -> int:
    """Return the bytes of the files of a checkpoint, without links."""
    if path.is_symlink():
        return 0
    paths = [path] if path.is_file() else [Path(folder, n) for folder, _, names in os.walk(path) for n in names]
    total = 0
    for each in paths:
        with suppress(FileNotFoundError):  # another process removes it meanwhile
            info = each.lstat()
            total += info.st_size if stat.S_ISREG(info.st_mode) else 0
    return total
