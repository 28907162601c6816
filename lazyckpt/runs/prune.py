"""Which checkpoints of a run to keep, and how to remove the others safely.

What trainers do while they run (transformers/trainer_utils.py `rotate_checkpoints`, accelerate's ``total_limit``,
torchtitan's ``keep_latest_k``) by counting folders, done for any run, and only with checkpoints that were read before:

- the newest complete ones stay, and what a pointer names: ``latest``, ``latest_checkpointed_iteration.txt``, the
  Trainer's and Lightning's best and last, links; links and names that are no series ("best") are never touched;
- one that is not complete stays unless it is asked for: it may be being written;
- a checkpoint gets a hidden name first, in one step, so that no reader ever finds half of one; a killed `prune` is
  finished by the next. While one works, another in the same folder waits, and then finds what is left.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from ..core.compose import readable
from ..errors import DestinationError, FormatError, LazyckptError, MissingFileError
from ..formats.catalog import OPENERS, Found, find, told_step, unfinished
from ..formats.megatron.files import TRACKER, tracked
from ..formats.reader import Source
from ..formats.registry import recognising
from ..io.storage.fsspec import is_url
from ..io.storage.local import LocalStore
from ..jobs.guard import local_path
from ..namespace import plain_meta
from ..view import CheckpointView

_HIDDEN = re.compile(r"\..+\.[0-9a-f]{8}\.pruned")
_POINTERS = ("latest", "latest_universal")  # files whose text is a name
_LIGHTNING = ("best_model_path", "last_model_path")  # lightning/pytorch/callbacks/model_checkpoint.py `state_dict`
_TEXT = 4096  # bytes of a pointer, at most


_PARTS = re.compile(  # names of files in a checkpoint, also of those that are half written
    r".*\.(?:pt|pth|bin|ckpt|pkl|safetensors|distcp|json|txt|model|jinja|ya?ml|tmp|py)|\.metadata(?:\.tmp)?|latest"
)


@dataclass(frozen=True, slots=True)
class Item:
    """A checkpoint in the folder: its ``name`` there, its step (None where nothing tells it), the bytes of its files,
    and why it stays, or goes."""

    name: str
    step: int | None
    nbytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class Pruned:
    """What `prune` found. ``remove``: what goes, or went if ``deleted``; ``keep``: what stays; ``leftovers``: remains
    of a prune that was killed, which go, too; ``failed``: what could not be removed, a line each."""

    root: str
    deleted: bool
    remove: tuple[Item, ...]
    keep: tuple[Item, ...]
    leftovers: tuple[Item, ...]
    failed: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes that are freed."""
        return sum(item.nbytes for item in (*self.remove, *self.leftovers))

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain objects."""
        return asdict(self) | {"nbytes": self.nbytes}


@dataclass(frozen=True, slots=True)
class _State:
    """``lacks``: why a checkpoint is not complete, "" if it is. ``known``: whether it is surely one at all. ``step``:
    None if nothing tells that its number is one."""

    step: int | None
    lacks: str
    known: bool
    meta: Mapping[str, Any]


def prune(path: str | os.PathLike[str], keep: int, *, delete: bool = False, incomplete: bool = False) -> Pruned:
    """Remove all checkpoints in a folder but the newest ``keep`` complete ones and those that something points to.

    Without ``delete`` nothing is changed: the answer says what would go. A checkpoint counts as complete if it opens
    and no part of a tensor is missing, which reads what `lazyckpt.open` reads of it. ``incomplete``: those that are not
    go, too; do not ask for that while a trainer is writing. Files of one step beside the model's
    (``optimizer_1000.pt``) go with it. Only what lies in the folder itself, under a name of a series of steps or epochs
    (``model_1000.pt`` if the file tells its step, too), is considered; nothing is followed out of it.

    Raises DestinationError (a URL; ``keep`` below 1; no right to write), MissingFileError (no such folder), FormatError
    (no checkpoint in it).
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
    with _alone(root) as fd:
        plan = _plan(root, keep, incomplete)
        return _carry_out(root, fd, plan)


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
    whole = own is not None and not own.tags  # files in it are of one checkpoint
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
    # a file of an optimizer goes with that of the model
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


def _carry_out(root: Path, fd: int, plan: Pruned) -> Pruned:
    """Hide all that goes, then remove what is hidden. ``fd``: the folder's descriptor: nothing outside of it is
    removed, whatever has its path by now. Raises DestinationError if that is another folder."""
    failed: list[str] = []
    kept: list[Item] = []
    hidden = [(item.name, item.name) for item in plan.leftovers]
    for item in plan.remove:
        place = f".{item.name[:200]}.{uuid4().hex[:8]}.pruned"
        _check_same(root, fd)
        try:
            os.rename(root / item.name, root / place)
        except FileNotFoundError:  # somebody else has removed it: so it is gone
            continue
        except OSError as e:
            failed.append(f"{item.name}: {e.strerror or e}")
            kept.append(replace(item, reason="could not be removed"))
            continue
        hidden.append((item.name, place))
    for name, place in hidden:
        try:
            _remove(place, fd)
        except OSError as e:
            failed.append(f"{name} (now {place}): {e.strerror or e}: {e.filename}")
    gone = tuple(item for item in plan.remove if item.name not in {k.name for k in kept})
    return replace(plan, deleted=True, remove=gone, keep=(*plan.keep, *kept), failed=tuple(failed))


def _check_same(root: Path, fd: int) -> None:
    with suppress(FileNotFoundError):
        if os.path.samestat(os.stat(root), os.fstat(fd)):
            return
    raise DestinationError(f"{root}: the folder was replaced by another one while it was pruned: prune it again")


def _remove(name: str, root: int) -> None:
    """A folder with all that is in it, or a file. Links in it are removed, what they lead to is not."""
    with suppress(FileNotFoundError):
        if stat.S_ISDIR(os.stat(name, dir_fd=root, follow_symlinks=False).st_mode):
            shutil.rmtree(name, dir_fd=root)
        else:
            os.unlink(name, dir_fd=root)


@contextmanager
def _alone(root: Path) -> Iterator[int]:
    """Waits until no other prune works in the folder. The lock is on the folder itself and ends with the process: a
    file for it would stand among the checkpoints, which trainers count."""
    fd = os.open(root, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # a file system without locks: then only renaming tells who removes what
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield fd
    finally:
        os.close(fd)


# -- what a checkpoint is, and what stays


def _may_go(root: Path, found: Found) -> bool:
    return found.numbered and not found.side and not _is_link(root / found.name)


def _untouched(root: Path, found: Found) -> str:
    if _is_link(root / found.name):
        return "a link: never touched"
    return "its name is of no series of steps: never touched"


def _looked_at(root: Path, found: Found, late: Mapping[str, str]) -> _State:
    try:
        view = CheckpointView(root / found.name, cache=False)
    except LazyckptError as e:
        return _State(found.number, " ".join(str(e).split()), _like_checkpoint(root / found.name), {})
    told = told_step(plain_meta(view))
    if not found.is_dir and not found.sure and told is None and found.name.lower().startswith("model"):
        return _State(None, "", True, plain_meta(view))  # model_3.pt may as well be the third of three models
    return _State(
        found.number if found.sure or told is None else told, _lacks(found, view, late), True, plain_meta(view)
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
    """Whether there is nothing but what checkpoints are made of: what cannot be opened may be something else."""
    if not path.is_dir():
        return True  # a file of tensors with a name of a series
    return all(_PARTS.fullmatch(name) for _, _, names in os.walk(path) for name in names)


def _pointed(root: Path, found: list[Found], states: Mapping[str, _State]) -> dict[str, str]:
    """Names that something points to -> what does."""
    told = [(_text(root / pointer).partition("/")[0], f"named by {pointer}") for pointer in _POINTERS]
    number = tracked(Source(LocalStore(root)))
    if number is not None:
        told.append((f"iter_{number:07d}", f"named by {TRACKER}"))
    real = os.path.realpath(root)
    for name in sorted(os.listdir(root)):
        if _is_link(root / name):
            inner = os.path.relpath(os.path.realpath(root / name), real)
            told.append((inner.partition(os.sep)[0], f"the link {name} leads to it"))
    newest = sorted(states, key=lambda name: (states[name].step or 0, name), reverse=True)
    metas = [states[name].meta for name in newest]
    trainers = [m["trainer_state"] for m in metas if isinstance(m.get("trainer_state"), Mapping)]
    told += [  # older ones name what was the best then
        (_last(state.get("best_model_checkpoint")), "the best, as trainer_state.json says")
        for state in (*trainers[:1], _json(root / "trainer_state.json"))
    ]
    callbacks = [m["callbacks"] for m in metas if isinstance(m.get("callbacks"), Mapping)]
    states_of = [c for c in callbacks[0].values() if isinstance(c, Mapping)] if callbacks else []
    told += [(_last(c.get(key)), f"Lightning's {key}") for c in states_of for key in _LIGHTNING]
    names = {f.name for f in found}
    return {name: why for name, why in reversed(told) if name in names}


def _is_link(path: Path) -> bool:
    return path.is_symlink()


def _text(path: Path) -> str:
    """What a pointer says; "" if there is none."""
    try:
        with path.open("rb") as file:
            return file.read(_TEXT).decode("utf-8", "replace").strip()
    except (FileNotFoundError, IsADirectoryError):
        return ""


def _json(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (FileNotFoundError, IsADirectoryError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _last(path: object) -> str:
    """The name at the end of a path, which may be of another machine's."""
    return path.rstrip("/").rpartition("/")[2] if isinstance(path, str) else ""


def _nbytes(path: Path) -> int:
    """Bytes of the files of a checkpoint; links count nothing."""
    if path.is_symlink():
        return 0
    paths = [path] if path.is_file() else [Path(folder, n) for folder, _, names in os.walk(path) for n in names]
    total = 0
    for each in paths:
        with suppress(FileNotFoundError):  # somebody removes it while we look
            info = each.lstat()
            total += info.st_size if stat.S_ISREG(info.st_mode) else 0
    return total
