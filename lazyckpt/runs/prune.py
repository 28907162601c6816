"""Select the checkpoints of a run to keep, and remove the others safely.

Trainers do this while they run, by counting folders (transformers/trainer_utils.py `rotate_checkpoints`, accelerate's
``total_limit``, torchtitan's ``keep_latest_k``). `prune` does it for any run, and opens each checkpoint first:

- the newest complete checkpoints stay, and those that something points to: ``latest``,
  ``latest_checkpointed_iteration.txt``, the best and the last of the Trainer and of Lightning, links. Links, and names
  that are not a series ("best"), are never removed;
- an incomplete checkpoint stays unless the caller asks for its removal, because it may still be being written;
- a checkpoint is first renamed to a hidden name, atomically, so that no reader finds half of one. The next `prune`
  finishes an interrupted one. A second `prune` in the same folder waits for the first. In a bucket, where nothing can
  be renamed, a checkpoint gets a marker object first, with which it is not opened;
- a checkpoint that a delta is made over stays as long as the delta does. With ``thin`` the older checkpoints become
  deltas (thin.py).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..core.compose import readable
from ..derive.deltas import without_ending
from ..errors import DataError, DestinationError, FormatError, LazyckptError, some
from ..export.writer import WEIGHTS
from ..formats.catalog import OPENERS, Found, find, recorded_step, unfinished
from ..formats.megatron.files import TRACKER, tracked
from ..formats.reader import Source
from ..formats.registry import recognising
from ..formats.zarr.documents import JOB
from ..io.storage.urls import is_remote
from ..namespace import plain_meta
from ..view import CheckpointView
from ..view.bases import ABOUT
from .folders import LocalFolder, RemoteFolder, RunFolder, alone
from .thin import CHAIN, LIST, Thinned, base_name, finish, forecast, thin_one

_OLDER = "older"
_WITH = "with "  # the reason of a file of an optimizer, before the name of the model's file
_POINTERS = ("latest", "latest_universal")  # files whose text is a name
_LIGHTNING = ("best_model_path", "last_model_path")  # lightning/pytorch/callbacks/model_checkpoint.py `state_dict`
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
        A line for each checkpoint that could not be removed or thinned.
    thinned
        The checkpoints that became deltas, or that would.
    """

    root: str
    deleted: bool
    remove: tuple[Item, ...]
    keep: tuple[Item, ...]
    leftovers: tuple[Item, ...]
    failed: tuple[str, ...] = ()
    thinned: tuple[Thinned, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes that are freed, or would be."""
        saved = sum(one.before - one.nbytes for one in self.thinned)
        return saved + sum(item.nbytes for item in (*self.remove, *self.leftovers))

    def as_dict(self) -> dict[str, Any]:
        """Return all fields and ``nbytes`` as plain objects."""
        return asdict(self) | {"nbytes": self.nbytes}


@dataclass(frozen=True, slots=True)
class _State:
    """What opening a checkpoint has shown. ``lacks``: why it is incomplete, or "". ``known``: whether it certainly is a
    checkpoint. ``step``: None if the number in its name may be something else. ``base``: the checkpoint that it is a
    delta over, None if there is none; ``states``: those that it needs of the base. ``is_delta``: whether it is one.
    ``held``: the names of its states."""

    step: int | None
    lacks: str
    known: bool
    meta: Mapping[str, Any]
    base: str | None = None
    states: tuple[str, ...] = ()
    is_delta: bool = False
    held: tuple[str, ...] = ()


def prune(
    path: str | os.PathLike[str],
    keep: int,
    *,
    delete: bool = False,
    incomplete: bool = False,
    thin: bool | Sequence[str] = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Pruned:
    """Remove all checkpoints in a folder but the newest complete ones and those that something points to.

    Or thin the others: keep their weights, as deltas over the next newer checkpoint (`lazyckpt.delta`). The run opens
    as before.

    A checkpoint is complete if it opens and no part of a tensor is missing; checking that reads what `lazyckpt.open`
    reads. Only entries of the folder itself are considered, with a name of a series of steps or epochs
    (``model_1000.pt`` only if the file records its step, too); links are not followed. Other files of a step
    (``optimizer_1000.pt``) are removed with the model's file.

    Parameters
    ----------
    path
        The folder, or a URL such as ``s3://bucket/run``.
    keep
        The number of complete checkpoints to keep, at least 1.
    delete
        Remove the checkpoints. By default nothing is changed, and the result says what would be removed.
    incomplete
        Remove incomplete checkpoints, too. Do not use it while a trainer is writing.
    thin
        Make deltas of the older checkpoints instead of removing them. Each delta is read back and compared before files
        of the old checkpoint are removed. A single file (``step_100.pt``) becomes a folder (``step_100``). In a bucket,
        a delta is first written to a temporary folder of this machine, then sent. True keeps the weights and their
        fp32 copies, and drops the moments of the optimizer; names of states (``("weights",)``) keep these.
    storage_options
        Credentials and other options for a URL, as for `lazyckpt.open`.

    Returns
    -------
    Pruned
        What is removed, and what stays, with reasons.

    Raises
    ------
    DestinationError
        ``path`` is a URL that is only read, ``keep`` is below 1, or permissions are missing.
    DataError
        ``thin`` names a state that no checkpoint has.
    MissingFileError
        The folder does not exist.
    FormatError
        The folder has no checkpoint in it.
    """
    if keep < 1:
        raise DestinationError(f"keep={keep}: at least one checkpoint has to stay (remove the folder itself otherwise)")
    text = os.fspath(path)
    wanted = None if thin is True or not thin else (thin,) if isinstance(thin, str) else tuple(thin)
    if is_remote(text):
        return _pruned(RemoteFolder(text, storage_options), keep, delete, incomplete, bool(thin), wanted)
    local = LocalFolder(text)
    if not delete:
        return _pruned(local, keep, delete, incomplete, bool(thin), wanted)
    with alone(local) as local.opened:
        return _pruned(local, keep, delete, incomplete, bool(thin), wanted)


def _pruned(
    folder: RunFolder, keep: int, delete: bool, incomplete: bool, thin: bool, wanted: Sequence[str] | None
) -> Pruned:
    if delete:
        for name in folder.having(LIST):
            finish(folder, name)
    found, states = _plan(folder, keep, incomplete)
    if not thin:
        return _carry_out(folder, found) if delete else found
    found, chosen, beside = _to_thin(folder, found, states, wanted)
    if not delete:
        thinned = forecast(folder, [(i.name, i.step or 0, base) for i, base in chosen], wanted)
        return replace(found, thinned=thinned)
    later = {item.name for items in beside.values() for item in items}
    now = replace(found, remove=tuple(item for item in found.remove if item.name not in later))
    return _thin(folder, _carry_out(folder, now), chosen, states, wanted, beside)


def _to_thin(
    folder: RunFolder, plan: Pruned, states: Mapping[str, _State], wanted: Sequence[str] | None
) -> tuple[Pruned, list[tuple[Item, str]], dict[str, list[Item]]]:
    """Return the plan with the older checkpoints kept; those that are thinned, oldest first, each with its base; and
    the files of optimizers that are removed after a checkpoint is thinned, by its name."""
    kept, chosen = list(plan.keep), []
    older = [item for item in plan.remove if item.reason == _OLDER]
    whole = {name: state for name, state in states.items() if state.step is not None and not state.lacks}
    gone = {item.name for item in plan.remove if item.reason != _OLDER}
    half = {item.name for item in plan.leftovers}
    for item in older:
        newer = sorted((s.step or 0, n) for n, s in whole.items() if n not in gone and (s.step or 0) > (item.step or 0))
        if states[item.name].is_delta:
            kept.append(replace(item, reason="thinned already"))
        elif folder.is_file(item.name) and not without_ending(item.name):
            kept.append(replace(item, reason="a file with such an ending is not thinned"))
        elif folder.is_file(item.name) and (into := without_ending(item.name)) not in half and folder.sizes(into):
            kept.append(replace(item, reason=f"{into}, which it would become, exists already"))
        else:
            chosen.append((item, newer[0][1]))
    names = {item.name for item, _ in chosen}
    if wanted is not None and chosen:
        _check_states(folder, wanted, {name for one in names for name in states[one].held}, plan)
    moments = wanted is None or set(wanted) <= set(WEIGHTS)  # whether the states in the files of optimizers may go
    beside: dict[str, list[Item]] = {}
    removed = []
    for item in (item for item in plan.remove if item.reason != _OLDER):
        model = item.reason.removeprefix(_WITH)
        left = moments and model in states and states[model].is_delta  # by a process that was stopped
        if model == item.reason or model in gone or left:
            removed.append(item)
        elif moments and model in names:
            removed.append(item)
            beside.setdefault(model, []).append(item)
        else:
            kept.append(replace(item, reason=f"{model} stays"))
    kept.sort(key=lambda item: (item.step or 0, item.name))
    return replace(plan, remove=tuple(removed), keep=tuple(kept)), chosen, beside


def _check_states(folder: RunFolder, wanted: Sequence[str], held: set[str], plan: Pruned) -> None:
    """Raise DataError for a state that is to be kept and that no checkpoint has, nor the file of an optimizer beside
    one: thinning would drop the one that is meant."""
    for item in plan.remove if not held.issuperset(wanted) else ():
        if item.reason.startswith(_WITH):
            with suppress(LazyckptError):
                held |= set(CheckpointView(folder.path(item.name), cache=False, storage_options=folder.options).states)
    unknown = [name for name in wanted if name not in held]
    if unknown:
        raise DataError(
            f"{folder}: no checkpoint that is thinned has the state {unknown[0]!r}: nothing is changed. There are "
            f"{some(sorted(held), 8)}"
        )


def _thin(
    folder: RunFolder,
    plan: Pruned,
    chosen: Sequence[tuple[Item, str]],
    states: Mapping[str, _State],
    wanted: Sequence[str] | None,
    beside: Mapping[str, Sequence[Item]],
) -> Pruned:
    below = dict.fromkeys(states, 0)  # deltas over each other that a checkpoint is the base of
    needed: dict[str, set[str]] = {}  # states that deltas need of a checkpoint
    for name, state in sorted(states.items(), key=lambda one: one[1].step or 0):
        if state.base is not None:
            below[state.base] = max(below.get(state.base, 0), below[name] + 1)
            needed.setdefault(state.base, set()).update(state.states)
    done, failed, kept = [], list(plan.failed), list(plan.keep)
    late: list[Item] = []
    for item, newer in chosen:
        base = newer if below[item.name] < CHAIN else ""
        try:
            one = thin_one(folder, item.name, item.step or 0, base, wanted, needed.get(item.name, ()))
        except (LazyckptError, OSError) as e:
            failed.append(f"{item.name}: {' '.join(str(e).split())}")
            kept.append(replace(item, reason="could not be thinned"))
            kept += [replace(other, reason=f"{item.name} could not be thinned") for other in beside.get(item.name, ())]
            continue
        done.append(one)
        late += beside.get(item.name, ())
        if base:
            below[base] = max(below[base], below[item.name] + 1)
            needed.setdefault(base, set()).update(one.states)
    rest = _carry_out(folder, replace(plan, remove=tuple(late), keep=tuple(kept), leftovers=(), failed=()))
    return replace(
        rest,
        remove=(*plan.remove, *rest.remove),
        leftovers=plan.leftovers,
        failed=(*failed, *rest.failed),
        thinned=tuple(done),
    )


def _plan(folder: RunFolder, keep: int, incomplete: bool) -> tuple[Pruned, dict[str, _State]]:
    store = folder.store
    leftovers = folder.leftovers()
    found = [f for f in find(store) if f.name and "/" not in f.name and f.name not in leftovers]
    if not found and not leftovers:
        raise FormatError(f"{folder} has no checkpoints in it that lazyckpt knows: nothing is removed")
    late = unfinished(store, found)
    looked = [f for f in found if _may_go(folder, f)]
    with ThreadPoolExecutor(OPENERS) as pool:
        opened = pool.map(lambda f: _looked_at(folder, f, late), looked)
        states = dict(zip([f.name for f in looked], opened, strict=True))
    complete = {s.step for s in states.values() if s.step is not None and not s.lacks}
    newest = set(sorted(complete, reverse=True)[:keep])
    pointed = _pointed(folder, found, states)
    own = recognising(Source(store))
    # whether the files of the folder belong to one checkpoint; zarr-arrays recognises folders of any hierarchies
    whole = own is not None and not own.tags and own.name != "zarr-arrays"
    goes: dict[str, bool] = {}
    reasons: dict[str, str] = {}
    for f in found:
        state = states.get(f.name)
        if f.name in pointed:
            goes[f.name], reasons[f.name] = False, pointed[f.name]
        elif state is None or state.step is None or (whole and not f.is_dir and not f.sure):
            goes[f.name], reasons[f.name] = False, _untouched(folder, f)
        elif state.lacks:
            goes[f.name], reasons[f.name] = incomplete and state.known, f"not complete: {state.lacks}"
        else:
            goes[f.name] = state.step not in newest
            reasons[f.name] = _OLDER if goes[f.name] else f"of the newest {keep}"
    for name, state in states.items():
        if state.base is not None and state.base not in states and without_ending(state.base) in states:
            states[name] = replace(state, base=without_ending(state.base))  # the base was thinned, too
    for name, state in sorted(states.items(), key=lambda one: one[1].step or 0):  # the base of a delta is newer
        if state.base in goes and not goes[name] and goes[state.base]:
            goes[state.base], reasons[state.base] = False, f"the base of {name}"
    # an optimizer's file is removed with the model's file of the same step
    files = {f.number: f.name for f in found if f.name in states and (not f.is_dir or states[f.name].is_delta)}
    for f in found:
        if f.side and not f.is_dir and not folder.is_link(f.name) and f.number in files and f.name not in pointed:
            model = files[f.number]
            goes[f.name], reasons[f.name] = goes[model], f"{_WITH}{model}"
    items: dict[bool, list[Item]] = {True: [], False: []}
    steps = {f.name: states[f.name].step if f.name in states else f.number if f.sure or f.side else None for f in found}
    for f in sorted(found, key=lambda f: (steps[f.name] or 0, f.name)):
        items[goes[f.name]].append(Item(f.name, steps[f.name], folder.nbytes(f.name), reasons[f.name]))
    rest = tuple(Item(name, None, folder.nbytes(name), "left of a prune that was stopped") for name in leftovers)
    return Pruned(str(folder), False, tuple(items[True]), tuple(items[False]), rest), states


def _carry_out(folder: RunFolder, plan: Pruned) -> Pruned:
    names = [item.name for item in plan.remove]
    failed = folder.remove(names, [item.name for item in plan.leftovers])
    kept = [replace(item, reason="could not be removed") for item in plan.remove if item.name in failed]
    gone = tuple(item for item in plan.remove if item.name not in failed)
    for item in gone:
        folder.tidy(item.name)  # of thinning that was stopped
    return replace(plan, deleted=True, remove=gone, keep=(*plan.keep, *kept), failed=tuple(failed.values()))


# -- the state of checkpoints, and pointers to them


def _may_go(folder: RunFolder, found: Found) -> bool:
    return found.numbered and not found.side and not folder.is_link(found.name)


def _untouched(folder: RunFolder, found: Found) -> str:
    if folder.is_link(found.name):
        return "a link: never touched"
    return "its name is not of a series of steps: never touched"


def _looked_at(folder: RunFolder, found: Found, late: Mapping[str, str]) -> _State:
    try:
        view = CheckpointView(folder.path(found.name), cache=False, storage_options=folder.options)
    except LazyckptError as e:
        return _State(found.number, " ".join(str(e).split()), _like_checkpoint(folder, found), {})
    step = recorded_step(plain_meta(view))
    if not found.is_dir and not found.sure and step is None and found.name.lower().startswith("model"):
        return _State(None, "", True, plain_meta(view))  # model_3.pt may also be the third of three models
    step = found.number if found.sure or step is None else step
    state = _State(step, _lacks(found, view, late), True, plain_meta(view), held=tuple(view.states))
    if ABOUT not in view.kept:
        return state
    base = base_name(view, folder)
    tables = view.kept[ABOUT][1].states.items()
    needs = tuple(name for name, table in tables if any(entry.how != "whole" for entry in table.values()))
    return replace(state, base=base, states=needs, is_delta=True)


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


def _like_checkpoint(folder: RunFolder, found: Found) -> bool:
    """Return whether all files look like those of a checkpoint: a folder that cannot be opened may be another thing."""
    return all(_PARTS.fullmatch(name) or name == JOB for name in folder.files(found.name))


def _pointed(folder: RunFolder, found: list[Found], states: Mapping[str, _State]) -> dict[str, str]:
    """Return the names that something points to -> what points to them."""
    pointed = [(folder.text(pointer).partition("/")[0], f"named by {pointer}") for pointer in _POINTERS]
    number = tracked(Source(folder.store))
    if number is not None:
        pointed.append((f"iter_{number:07d}", f"named by {TRACKER}"))
    pointed += [(inner, f"the link {name} leads to it") for name, inner in folder.links()]
    newest = sorted(states, key=lambda name: (states[name].step or 0, name), reverse=True)
    metas = [states[name].meta for name in newest]
    trainers = [m["trainer_state"] for m in metas if isinstance(m.get("trainer_state"), Mapping)]
    pointed += [  # only the newest state: older ones name the best checkpoint of their time
        (_last(state.get("best_model_checkpoint")), "the best, as trainer_state.json says")
        for state in (*trainers[:1], _json(folder.read("trainer_state.json")))
    ]
    callbacks = [m["callbacks"] for m in metas if isinstance(m.get("callbacks"), Mapping)]
    states_of = [c for c in callbacks[0].values() if isinstance(c, Mapping)] if callbacks else []
    pointed += [(_last(c.get(key)), f"Lightning's {key}") for c in states_of for key in _LIGHTNING]
    names = {f.name for f in found}
    return {name: why for name, why in reversed(pointed) if name in names}


def _json(text: bytes) -> Mapping[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _last(path: object) -> str:
    """Return the last name of a path, which may be a path of another machine."""
    return path.rstrip("/").rpartition("/")[2] if isinstance(path, str) else ""
