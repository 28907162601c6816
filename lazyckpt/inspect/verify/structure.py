"""Checks that read no tensor data: shapes of optimizer states, marks of finished saves, places and ages of files."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from math import prod
from typing import Any

import numpy as np

from ...core.extents import Archive, Extent
from ...core.fragments import fragments_of
from ...core.index import FileInfo
from ...core.units import plural
from ...errors import LazyckptError, some
from ...io.reading.packed import locate_all
from ...io.storage.base import Store
from ...lazy import LazyArray, shape_of
from ..report import Finding
from .sweep import Target

_HOUR = 3600 * 10**9
_LOCATED = 1024  # archives that are located at once
_SHAPED = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "fp32")  # as their parameters


def shapes(states: Mapping[str, Mapping[str, LazyArray]]) -> Iterator[Finding]:
    """Yield the states of the optimizer whose shapes are not those of their parameters."""
    names = list(states)
    if not names:
        return
    weights = states[names[0]]
    for state in names[1:]:
        if state not in _SHAPED:
            continue
        for name, tensor in states[state].items():
            own = weights.get(name) if name in weights else None
            if own is None:
                continue
            have, want = shape_of(tensor), shape_of(own)
            if have != want and not (len(have) == 1 and have[0] == prod(want)):  # flat parameters are undecided
                text = f"{state}: {name} has shape {list(have)}, its parameter has {list(want)}"
                yield Finding("wrong-moment", text, tensor=name, details={"state": state})


def overlaps(archives: Mapping[str, Sequence[Archive]]) -> Iterator[Finding]:
    """Yield the archives inside a file that overlap without being the same bytes, as those of tied tensors are."""
    for path, held in archives.items():
        reach, owner = 0, None
        for one in sorted(set(held), key=lambda one: (one.offset, -one.length)):
            if owner is not None and one.offset < reach and (one.offset, one.length) != (owner.offset, owner.length):
                text = f"{path}: {owner} and {one} share {min(reach, one.offset + one.length) - one.offset:,} bytes"
                yield Finding("overlapping-data", text, path)
            if one.offset + one.length > reach:
                reach, owner = one.offset + one.length, one


def ages(infos: Mapping[str, FileInfo]) -> Iterator[Finding]:
    """Yield findings about files that were written long before all others of their kind."""
    kinds: dict[str, dict[str, int]] = {}
    for path, info in infos.items():
        if info.mtime_ns:
            kinds.setdefault(posixpath.splitext(path)[1], {})[path] = info.mtime_ns
    for times in kinds.values():
        if len(times) < 4:
            continue
        ordered = sorted(times.values())
        gaps = np.diff(np.array(ordered, np.int64))
        widest = int(gaps.argmax())
        gap, rest = int(gaps[widest]), ordered[-1] - ordered[widest + 1]
        if widest + 1 > len(ordered) // 4 or gap < max(_HOUR, 10 * rest):
            continue
        old = sorted(path for path, time in times.items() if time <= ordered[widest])
        more = len(ordered) - len(old)
        text = f"{some(old)}: written {gap / _HOUR:,.1f} hours before the other {more:,} files of the kind"
        yield Finding("stale-file", text, old[0] if len(old) == 1 else None, details={"files": old})


def archives_of(targets: Sequence[Target]) -> tuple[dict[str, list[Archive]], list[Archive]]:
    """Return the archives of torch.save inside files: path -> those that are not compressed; and those that are."""
    plain: dict[str, list[Archive]] = {}
    packed: dict[Any, Archive] = {}
    for target in targets:
        fragments = target.tensor.fragments
        if type(fragments) is tuple and len(fragments) == 1 and type(fragments[0].extent) is Extent:
            continue  # most, of hundreds of thousands
        for one in fragments_of(fragments).packed():
            if isinstance(one, Archive) and one.codecs:
                packed[one.key] = one
            elif isinstance(one, Archive):
                plain.setdefault(one.path, []).append(one)
    return plain, list(packed.values())


def located(store: Store, archives: Mapping[str, Sequence[Archive]]) -> None:
    """Locate the tensors in archives, many with one request where the store is behind a network. An archive that cannot
    be read is reported by what reads it next."""
    stream = iter([(one, one.path) for some in archives.values() for one in some] if store.joins else ())
    while group := list(islice(stream, _LOCATED)):
        with suppress(LazyckptError, OSError):
            locate_all(store, group)


# Format -> the file that its writer writes last, beside the folders of the checkpoints; or another that does for it.
_MARKS = {"deepspeed": ("latest", "latest_universal"), "megatron": ("latest_checkpointed_iteration.txt",)}
_VERL = "dist_ckpt/"
_STEP = re.compile(r"(?:checkpoint|global_step|step|iter)[-_]?0*(\d+)")


def marks(store: Store, view_format: str, paths: Iterable[str]) -> Iterator[Finding]:
    """Yield a finding if the folder lacks the file that says which of the checkpoints in it was saved last."""
    names = next((names for family, names in _MARKS.items() if view_format.split("-")[0] == family), ())
    if not names or any(("/" not in path and path not in names) or _VERL in path for path in paths):
        return  # the folder of one checkpoint, whose mark is beside it, or (verl) beside the folder around it
    try:
        there = set(store.list())
    except (LazyckptError, OSError):
        return
    if there and not there & set(names):
        text = f"there is no file {names[0]}, which is written when a save is finished"
        yield Finding("unfinished-save", text, names[0], severity="warning")


def step_of_folder(root: str, meta: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield a finding if the name of a trainer's folder and the state in it are of different steps."""
    state = meta.get("trainer_state")
    found = _STEP.fullmatch(posixpath.basename(root.rstrip("/")))
    step = state.get("global_step") if isinstance(state, Mapping) else None
    if found is not None and type(step) is int and step != int(found[1]):
        text = f"the folder is of step {int(found[1]):,}, trainer_state.json in it of step {step:,}"
        yield Finding("step-mismatch", text, "trainer_state.json")


def total_size(meta: Mapping[str, Any], tensors: Mapping[str, LazyArray]) -> Iterator[Finding]:
    """Yield a note if the index of Hugging Face says another size than the tensors have. Loaders ignore it."""
    index = meta.get("index")
    said = index.get("total_size") if isinstance(index, Mapping) else None
    if type(said) is not int:
        return
    held = sum(t.nbytes for t in tensors.values())
    if said != held:
        text = f"the index says that the tensors have {said:,} bytes (total_size), they have {held:,}"
        yield Finding("index-mismatch", text, severity="note")


def lost(unreadable: Mapping[str, str]) -> Iterator[Finding]:
    """Yield a finding for each reason that tensors cannot be read."""
    reasons: dict[str, list[str]] = {}
    for name, why in unreadable.items():
        reasons.setdefault(" ".join(why.split()).replace(repr(name), "it"), []).append(name)
    for why, names in reasons.items():
        text = f"{plural(len(names), 'tensor')} cannot be read ({some(names)}): {why}"
        details = {"tensors": names[:1000]}
        yield Finding("missing-tensor", text, tensor=names[0] if len(names) == 1 else None, details=details)
