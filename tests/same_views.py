"""Whether two views are the same in every public respect: the oracle of the index cache."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import numpy as np

from lazyckpt import CheckpointView
from lazyckpt.core.specs import TensorSpec
from lazyckpt.errors import LazyckptError, Problem
from lazyckpt.io.containers.pickle.records import Attributed, Opaque

_MOST = 2000  # fragments of a tensor that are compared one by one


def check_same(a: CheckpointView, b: CheckpointView, stored: bool = True) -> None:
    """Raise AssertionError, which says where they differ. ``stored``: compare the raw names, too, which may be read."""
    for name in ("format", "mesh", "root", "aliases", "unreadable", "numel", "nbytes", "state", "whole"):
        equal(getattr(a, name), getattr(b, name), name)
    equal(list(a.files.items()), list(b.files.items()), "files")
    equal(a.problems, b.problems, "problems")
    equal(_plain(a._index.meta), _plain(b._index.meta), "the metadata as read")
    equal(_plain(a.meta), _plain(b.meta), "meta")
    assert list(a.states) == list(b.states)
    assert dict(a._index.guards).keys() == dict(b._index.guards).keys()
    assert a._index.ruled == b._index.ruled
    for state in a.states:
        _same_state(a.states[state], b.states[state], state)
    if stored:
        _same_state(a.stored, b.stored, "stored")
    assert a.explain() == b.explain()
    assert a.tree() == b.tree()
    assert repr(a) == repr(b)
    for word in ("weight", "0", "no such name"):
        assert list(a.search(word)) == list(b.search(word))


def _same_state(a: CheckpointView, b: CheckpointView, state: str) -> None:
    assert list(a) == list(b), state
    assert len(a) == len(b)
    for name in a.specs:
        _same_spec(a.specs[name], b.specs[name])
    for name in a:
        assert _explained(a, name) == _explained(b, name)
        assert a.owner(name) == b.owner(name)
    raw = list(dict.fromkeys(spec.stored_as for spec in a.specs.values() if spec.stored_as))[:20]
    for name in (*raw, "no such name"):
        assert _looked_up(a, name) == _looked_up(b, name), name


def _explained(view: CheckpointView, name: str) -> str:
    try:
        return str(view[name].explain())
    except LazyckptError as e:
        return f"{type(e).__name__}: {e}"


def _looked_up(view: CheckpointView, name: str) -> str:
    try:
        return repr(view[name])
    except LazyckptError as e:
        return f"{type(e).__name__}: {e}"


def _same_spec(a: TensorSpec, b: TensorSpec) -> None:
    for field in ("name", "shape", "dtype", "expr", "rule", "stored_as", "nbytes"):
        equal(getattr(a, field), getattr(b, field), f"{a.name}: {field}")
    assert type(a.fragments) is type(b.fragments), a.name
    assert len(a.fragments) == len(b.fragments), a.name
    for n, (one, other) in enumerate(zip(a.fragments, b.fragments, strict=True)):
        assert one == other, f"{a.name}: fragment {n}"
        if n > _MOST:
            break


def _plain(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping, which may be lazy, as a dict."""
    return {key: mapping[key] for key in mapping}


def equal(a: Any, b: Any, where: str, seen: set[tuple[int, int]] | None = None) -> None:
    """Raise AssertionError if two objects differ, also by type, at any depth. They may be in themselves."""
    seen = set() if seen is None else seen
    assert type(a) is type(b), f"{where}: {type(a)} and {type(b)}"
    if (id(a), id(b)) in seen:
        return
    seen.add((id(a), id(b)))
    if isinstance(a, Mapping):
        assert list(map(repr, a)) == list(map(repr, b)), where
        for (key, one), (other_key, other) in zip(a.items(), b.items(), strict=True):
            equal(key, other_key, where, seen)
            equal(one, other, f"{where}[{key!r}]", seen)
        if isinstance(a, Attributed):
            equal(getattr(a, "state", None), getattr(b, "state", None), f"{where}.state", seen)
    elif isinstance(a, argparse.Namespace):
        equal(vars(a), vars(b), where, seen)
    elif isinstance(a, Opaque):
        equal(a.__getstate__(), b.__getstate__(), where, seen)
    elif isinstance(a, np.ndarray):
        assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes(), where
        assert a.flags.writeable == b.flags.writeable, where
    elif isinstance(a, Problem):
        assert (a.code, str(a), a.path) == (b.code, str(b), b.path), where
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for n, (one, other) in enumerate(zip(a, b, strict=True)):
            equal(one, other, f"{where}[{n}]", seen)
    elif isinstance(a, float):
        assert repr(a) == repr(b), where
    else:
        assert a == b, where
