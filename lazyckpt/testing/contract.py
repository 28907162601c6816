"""The contract of a view and its tensors: what must hold whatever the format.

`CHECKS` are functions of a `Case`. Each raises AssertionError where a view breaks the contract.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import random
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import lazyckpt

from ..tensor import LazyTensor
from ..view import CheckpointView
from .case import Case
from .counting import opened
from .oracle import as_ints, indexed, keys, same, same_values, some_keys

__all__ = ["CHECKS", "Check", "open_case"]

Check = Callable[[Case], None]

FULL_STATES = ("weights", "fp32")
_NO_CONVERSION = {torch.float4_e2m1fn_x2}  # torch itself converts it to nothing

# -- a case, opened


def open_case(case: Case) -> CheckpointView:
    """Open the checkpoint of a case."""
    return lazyckpt.open(case.path, **case.info.get("open", {}))


def each(view: CheckpointView, case: Case) -> Iterator[tuple[str, str, LazyTensor, Tensor]]:
    """(state, name, lazy tensor, truth) of everything there is."""
    for state in case.truth:
        for name, whole in case.truth[state].items():
            yield state, name, view.states[state][name], whole


def default_state(case: Case) -> str:
    return next(s for s in FULL_STATES if s in case.truth)


def _digests(view: CheckpointView) -> dict[str, str]:
    return {p: hashlib.sha256((Path(view.root) / p).read_bytes()).hexdigest() for p in view.files}


# -- what it is


def names_shapes_dtypes(case: Case) -> None:
    view = open_case(case)
    assert set(view.states) == set(case.truth)
    assert next(iter(view.states)) == view.state == default_state(case)
    for state, truth in case.truth.items():
        part = view.states[state]
        assert isinstance(part, CheckpointView)
        assert part.state == state
        assert set(part) == set(truth)
        assert len(part) == len(truth)
        for name, whole in truth.items():
            t = part[name]
            assert isinstance(t, LazyTensor)
            assert name in part
            assert t.name == name
            assert (type(t.shape), t.shape) == (torch.Size, whole.shape), name
            assert t.dtype == whole.dtype, name
            assert (t.ndim, t.numel(), t.itemsize) == (whole.ndim, whole.numel(), whole.element_size()), name
            assert t.nbytes == whole.numel() * whole.element_size(), name
            if whole.ndim:
                assert len(t) == len(whole)
            else:
                with pytest.raises(TypeError):
                    len(t)
    assert set(view) == set(case.truth[view.state])


def sizes_count_each_tensor_once(case: Case) -> None:
    view = open_case(case)
    tied = case.info.get("tied", {})
    for state, truth in case.truth.items():
        owned = [t for name, t in truth.items() if name not in tied]
        assert view.states[state].numel == sum(t.numel() for t in owned), state
        assert view.states[state].nbytes == sum(t.numel() * t.element_size() for t in owned), state


def aliases(case: Case) -> None:
    view, tied = open_case(case), case.info.get("tied", {})
    assert dict(view.aliases) == tied
    for state, truth in case.truth.items():
        part, read = view.states[state], view.states[state].to()
        assert set(read) == set(truth)
        for alias, owner in tied.items():
            if owner not in truth:
                assert alias not in part
                continue
            assert (alias in list(part)) == (state in FULL_STATES), "moments are listed under the owner's name"
            assert part[alias].name == alias
            same(part[alias][...], truth[owner], (state, alias))
            if alias in read:
                assert read[alias] is read[owner], "one tensor under both names"
            alone = part.select({alias}.__contains__).to() if alias in read else {}
            for tensor in alone.values():
                same(tensor, truth[owner], (state, alias, "alone"))


def files(case: Case) -> None:
    view = open_case(case)
    assert view.files
    for path, info in view.files.items():
        stat = os.stat(Path(view.root) / path)
        assert (info.size, info.mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    for state in view.states.values():
        for name, t in state.items():
            stands_on = {fragment.extent.path for fragment in t.fragments}
            assert stands_on <= set(view.files)
            if t.numel():
                assert stands_on, name
    first = next(iter(view))
    alone = view.select(lambda name: name == first)
    assert set(alone.files) == {fragment.extent.path for fragment in view[first].fragments}


def stored(case: Case) -> None:
    view = open_case(case)
    raw = view.stored
    assert raw.state == "stored"
    assert len(set(raw)) == len(raw) > 0
    for name, tensor in raw.to().items():
        assert (raw[name].shape, raw[name].dtype) == (tensor.shape, tensor.dtype)
        same(raw[name][...], tensor, name)
    if case.stored:
        assert set(raw) == set(case.stored)
        for name, truth in case.stored.items():
            if name or name in list(view):  # the empty name is the whole view, if no tensor has it
                same(view[name][...], truth, (name, "a name that it is stored under finds it, too"))
    part = view.select(lambda name: False)
    assert len(part) == 0
    assert list(part.stored) == list(raw), "of the whole checkpoint"


def looking_reads_nothing(case: Case) -> None:
    view, counts = opened(case.path, **case.info.get("open", {}))
    counts.clear()
    for part in (view, *view.states.values(), view.select("*e*"), view.select(re.compile("."))):
        assert repr(part) and str(part) and part.explain() and part._repr_html_()
        assert part.tree() == part.tree(depth=None)
        assert len(part.tree(1).splitlines()) <= len(part.tree().splitlines())
        assert part.numel >= 0 and part.nbytes >= 0 and part.files is not None
        assert part._ipython_key_completions_() or not len(part)
        part.to("meta")
        pickle.dumps(part)
    assert view.format and view.mesh and isinstance(view.problems, tuple) and view.meta is not None
    for state, name, t, whole in each(view, case):
        assert repr(t) and t.explain() and t.fragments is not None and t._repr_html_() and t.show()
        assert name.rsplit(".", 1)[-1] in repr(t)
        for key in some_keys(t.shape, f"{state} {name}", 3):
            part_of = t.lazy[key]
            assert (part_of.shape, part_of.dtype) == (indexed(whole, key).shape, whole.dtype), (name, key)
            assert repr(part_of) and part_of._repr_html_() and part_of.explain() and t.explain(key)
            assert part_of.nbytes == part_of.numel() * whole.element_size()
        pickle.dumps(t)
    assert counts.requests == 0, f"looking has read: {counts}"


# -- what it reads


def whole_tensors(case: Case) -> None:
    view = open_case(case)
    for state, name, t, whole in each(view, case):
        same(t[...], whole, (state, name))
        same(t.to("cpu"), whole, (state, name))
        same(t.to(copy=False), whole, (state, name))
        same(t.detach(), whole, (state, name))
    for state, truth in case.truth.items():
        for read in (view.states[state].to(), view.states[state].to("cpu", copy=False)):
            assert read.keys() == truth.keys()
            for name, tensor in read.items():
                same(tensor, truth[name], (state, name))


def random_slices(case: Case) -> None:
    view = open_case(case)
    for state, name, t, whole in each(view, case):
        for key in keys(t.shape, f"{state} {name}"):
            same(t[key], indexed(whole, key), (state, name, key))


def slices_of_slices(case: Case) -> None:
    view = open_case(case)
    for state, name, t, whole in each(view, case):
        for n, key in enumerate(some_keys(t.shape, f"of slices {state} {name}", 3)):
            want, part = indexed(whole, key), t.lazy[key]
            assert isinstance(part, LazyTensor)
            same(part[...], want, (state, name, key))
            for inner in some_keys(want.shape, f"{n} {name}", 2):
                what = (state, name, key, inner)
                same(part[inner], indexed(want, inner), what)
                same(part.lazy[inner].to(), indexed(want, inner), what)


def reads_what_it_returns(case: Case) -> None:
    """The elements that a slice wants and nothing else; with a store that states a gap, at most that between two."""
    for gap in (0, 64):
        view, counts = opened(case.path, gap=gap, **case.info.get("open", {}))
        for state, name, t, whole in each(view, case):
            if case.info.get("archives"):
                t[...]
            for key in some_keys(t.shape, f"{state} {name} {gap}", 3):
                counts.clear()
                same(t[key], indexed(whole, key), (state, name, key))
                elements = len(np.unique(indexed(torch.arange(whole.numel()).view(whole.shape), key).numpy()))
                limit = elements * t.itemsize + gap * max(0, elements - 1)
                assert counts.bytes <= limit, f"{name}[{key}] of {whole.shape} may read {limit}: {counts}"
                assert counts.paths <= {fragment.extent.path for fragment in t.fragments}


def wrong_keys(case: Case) -> None:
    view = open_case(case)
    for _, name, t, _ in each(view, case):
        bad: list[Any] = [1.5, "x", True, (..., ...), (*[slice(None)] * t.ndim, 0), [[0]], [0.5], object()]
        if t.ndim:
            n = t.shape[0]
            bad += [n, -n - 1, [n], np.array([-n - 1]), slice(None, None, 0), slice("a"), torch.ones(n + 1).bool()]
        if t.ndim > 1:
            bad.append(([], []))
        for key in bad:
            for use in (t.__getitem__, t.lazy.__getitem__, t.explain):
                with pytest.raises(lazyckpt.SelectionError) as error:
                    use(key)
                assert str(error.value), (name, key)


def results_are_yours(case: Case) -> None:
    """Writing to what was read changes neither a file nor what is read next."""
    view = open_case(case)
    before = _digests(view)
    reads: tuple[Callable[[LazyTensor], Tensor], ...] = (
        lambda t: t[...],
        lambda t: t[1:] if t.ndim else t[None],
        lambda t: t[..., -1:] if t.ndim else t[()],
        lambda t: t.to("cpu"),
        lambda t: t.to(copy=False),
        lambda t: t.lazy[...].to(copy=False),
    )
    for state, name, t, whole in each(view, case):
        for read in reads:
            mine = read(t)
            as_ints(mine).fill_(0x55)
            same(t[...], whole, (state, name))
    for state, truth in case.truth.items():
        for copy in (True, False):
            for tensor in view.states[state].to(copy=copy).values():
                as_ints(tensor).fill_(0x55)
            for name, tensor in view.states[state].to(copy=copy).items():
                same(tensor, truth[name], (state, name))
    assert _digests(view) == before
    assert _digests(open_case(case)) == before


def devices_and_dtypes(case: Case) -> None:
    view = open_case(case)
    for state, truth in case.truth.items():
        part = view.states[state]
        meta, wide = part.to("meta"), part.to(torch.device("meta"), torch.float64)
        able = {name for name, whole in truth.items() if whole.dtype not in _NO_CONVERSION}
        narrow = part.select(able.__contains__).to(dtype=torch.bfloat16)
        assert meta.keys() == wide.keys() == truth.keys()
        assert narrow.keys() == able
        for name, whole in truth.items():
            t = part[name]
            floating = whole.is_floating_point() or whole.is_complex()
            assert t.to("meta").is_meta and meta[name].is_meta and wide[name].is_meta
            assert (meta[name].shape, meta[name].dtype) == (whole.shape, whole.dtype)
            assert (wide[name].shape, wide[name].dtype) == (whole.shape, torch.float64 if floating else whole.dtype)
            assert t.to("meta", torch.int8).dtype == torch.int8
            assert t.device == torch.device("cpu")
            if name not in able:
                continue
            for dtype in (torch.bfloat16, torch.float64):
                want = _converted(whole, dtype)
                for got in (t.to(dtype), t.to("cpu", dtype), t.to(dtype=dtype, copy=False)):
                    same_values(got, want, (name, dtype))
            if floating:
                same_values(narrow[name], _converted(whole, torch.bfloat16), name)
            else:
                same(narrow[name], whole, name)


def _converted(whole: Tensor, dtype: torch.dtype) -> Tensor:
    return whole.detach().resolve_conj().resolve_neg().to(dtype)


# -- travelling, and company


def pickling(case: Case) -> None:
    view = open_case(case)
    for state, name, t, whole in each(view, case):
        data = pickle.dumps(t)
        assert len(data) < 20_000, f"{name}: a description, not {len(data):,} bytes"
        again = pickle.loads(data)
        assert (again.name, again.shape, again.dtype) == (name, t.shape, t.dtype)
        same(again[...], whole, (state, name))
        for key in some_keys(t.shape, f"pickled {state} {name}", 2):
            part = pickle.loads(pickle.dumps(t.lazy[key]))
            same(part[...], indexed(whole, key), (state, name, key))
    some = next(iter(view))
    parts = [view, view.stored, *view.states.values()]
    parts += [part[prefix] for part in parts for prefix in _prefixes(part)[:2]]
    parts += [select for part in parts[:3] for select in _selections(part, some)]
    for part in parts:
        again = pickle.loads(pickle.dumps(part))
        assert isinstance(again, CheckpointView)
        assert (list(again), again.state, again.format) == (list(part), part.state, part.format)
        assert (again.problems, again.aliases, again.files) == (part.problems, part.aliases, part.files)
        names = list(part)
        for name in random.Random(len(names)).sample(names, min(6, len(names))):  # (each of them was read above)
            same(again[name][...], part[name][...], (part.state, name))


def _prefixes(view: CheckpointView) -> list[str]:
    return sorted({name.split(".")[0] for name in view if "." in name} - {"", *view})


def _selections(view: CheckpointView, some: str) -> list[CheckpointView]:
    chosen = view.select(lambda name: name.count("e") % 2 == 0)  # a function of this very place, which has no name
    return [view.select(some), view.select("*e*"), view.select(re.compile("[ae]")), chosen, chosen.select("*a*")]


def several_threads(case: Case) -> None:
    view = open_case(case)
    truth = {state: dict(tensors) for state, tensors in case.truth.items()}
    work = [(state, name) for state, tensors in truth.items() for name in tensors]
    count = 8
    ready = threading.Barrier(count)

    def read(number: int) -> int:
        mine = random.Random(number).sample(work, min(15, len(work)))  # others in every thread
        ready.wait(60)
        for state, name in mine:
            t, whole = view.states[state][name], truth[state][name]
            for key in some_keys(t.shape, f"{number} {name}", 3):
                same(t[key], indexed(whole, key), (number, state, name, key))
        for name, tensor in view.to().items():
            same(tensor, truth[view.state][name], (number, name))
        return len(mine)

    with ThreadPoolExecutor(count) as pool:
        assert min(pool.map(read, range(count))) > 0


def mapping(case: Case) -> None:
    view = open_case(case)
    assert isinstance(view, Mapping)
    truth = case.truth[view.state]
    assert list(view) == list(view.keys())
    assert [t.name for t in view.values()] == [name for name, _ in view.items()]
    first = next(iter(view))
    found = view.get(first)
    assert found is not None and found.name == first
    assert view.get("no such tensor") is None
    assert "no such tensor" not in view and 5 not in view  # type: ignore[comparison-overlap]
    assert {name: tuple(t.shape) for name, t in view.items()} == {name: tuple(t.shape) for name, t in truth.items()}


def lookups_agree(case: Case) -> None:
    """``in``, ``get`` and ``[]`` agree on every path: names, prefixes, paths inside names, stored names, wrong ones."""
    view = open_case(case)
    for part in (view, *view.states.values(), view.stored, *(view[prefix] for prefix in _prefixes(view)[:2])):
        listed = list(part)
        assert listed == list(part.keys()) and len(set(listed)) == len(listed) == len(part)
        for name in listed:
            found = part[name]
            assert isinstance(found, LazyTensor)
            assert name in part and part.get(name) is part[name] is found
        for path in _paths(view, part):
            try:
                wanted: Any = part[path]
            except lazyckpt.TensorNotFoundError as e:
                # (a view's keys are texts to a type checker; what else is asked for is not found)
                assert path not in part and part.get(path) is None and part.get(path, 7) == 7, (path, e)
                continue
            got: Any = part.get(path)
            assert path in part and type(got) is type(wanted), path
            if isinstance(wanted, LazyTensor):
                assert got.name == wanted.name, path
            else:
                assert list(got) == list(wanted) and len(wanted), path
    states = view.states
    for state in (*case.truth, "no such state", "stored"):
        assert (state in states) == (state in list(states)) == (states.get(state) is not None)


def states_keep_to_their_own(case: Case) -> None:
    """No look-up in a state gives a tensor of another one, whatever it is called there or in the files."""
    view, tied = open_case(case), case.info.get("tied", {})
    for state, truth in case.truth.items():
        part = view.states[state]
        own = {*truth, *(alias for alias, owner in tied.items() if owner in truth)}
        elsewhere = {name for other in case.truth.values() for name in other} - own
        assert all(name not in part or not isinstance(part[name], LazyTensor) for name in elsewhere), state
        for path in (*_paths(view, part), *elsewhere):
            found: Any = part.get(path)
            if found is None:
                continue
            assert found is part or found.state == state if isinstance(found, CheckpointView) else found.name in own
            for one in found.values() if isinstance(found, CheckpointView) else [found]:
                assert part.owner(one.name) in truth, (state, path)
                assert one.spec.fragments == part[one.name].spec.fragments, (state, path)


def _paths(view: CheckpointView, part: CheckpointView) -> list[str]:
    """Paths to try on a part of the view."""
    names = [*part, *view, *(name for state in view.states.values() for name in state)]
    names += [*view.aliases, *view.stored, *(t.spec.stored_as or "" for t in part.values())]
    rng = random.Random(len(names))
    names = rng.sample(names, min(60, len(names)))
    cut = [name.split(".") for name in names]
    found = {".".join(parts[:n]) for parts in cut for n in range(1, len(parts))}
    found |= {".".join(parts[n:]) for parts in cut for n in range(1, len(parts))}
    found |= {f"{name}x" for name in names[:5]} | {name[1:] for name in names[:5]}
    return sorted({*names, *found} - {"", "."})


CHECKS: tuple[Check, ...] = (
    names_shapes_dtypes,
    sizes_count_each_tensor_once,
    aliases,
    files,
    stored,
    looking_reads_nothing,
    whole_tensors,
    random_slices,
    slices_of_slices,
    reads_what_it_returns,
    wrong_keys,
    results_are_yours,
    devices_and_dtypes,
    pickling,
    several_threads,
    mapping,
    lookups_agree,
    states_keep_to_their_own,
)
