"""A description of a checkpoint: its layout, size and training progress, and its metadata as an indented tree.

The texts come from untrusted files: control characters are escaped and long values are cut.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..core.units import human_bytes, human_count, plural
from ..errors import printable
from ..formats.catalog import recorded_step
from ..formats.dcp.objects import Meta
from ..io.containers.pickle.records import Opaque, short
from ..namespace import Namespace, plain_meta
from .outline import outline

LINES = 400  # default limit for lines of metadata
_ITEMS = 8  # items of a list that are shown on its line
_WIDTH = 160  # characters of a value
_ALIKE = 4  # minimum number of equal entries that are folded into one line
_SMALL = 8  # items of an entry that is compared with others
_NAMED = 3  # keys of folded entries that are written out
_LOSSES = ("loss", "train_loss", "training_loss", "lm_loss", "lm loss", "val_loss", "eval_loss", "best_loss")
_DEEP = 4  # levels of metadata that are searched for a loss
_LOOKED_AT = 10_000  # entries of metadata that are searched for a loss


class Line(NamedTuple):
    """A line of the tree of metadata: its depth, key and value; an empty value means that its items follow."""

    depth: int
    key: str
    value: str


def facts_of(view: Namespace[Any]) -> list[tuple[str, str]]:
    """Return the facts about a checkpoint as (label, value) pairs. No tensor data is read."""
    mesh = view.mesh
    degrees = {"tp": mesh.tp, "pp": mesh.pp, "dp": mesh.dp, "ep": mesh.ep}
    found = [
        ("format", view.format),
        ("root", view.root),
        ("mesh", " ".join(f"{name}={n}" for name, n in degrees.items() if n > 1) or "one rank"),
        ("elements", f"{human_count(view.numel)}, {human_bytes(view.nbytes)} in {plural(len(view), 'tensor')}"),
        ("dtypes", ", ".join(f"{dtype.short} {human_bytes(nbytes)}" for dtype, nbytes in outline(view).dtypes())),
        ("states", ", ".join(f"{state} ({plural(len(part), 'tensor')})" for state, part in view.states.items())),
        ("files", f"{plural(len(view.files), 'file')}, {human_bytes(sum(info.size for info in view.files.values()))}"),
    ]
    step = recorded_step(plain_meta(view))
    if step is not None:
        found.append(("step", f"{step:,}"))
    loss = loss_of(plain_meta(view))
    if loss is not None:
        found.append(("loss", f"{loss[1]:.6g} ({loss[0]})"))
    if view.problems:
        found.append(("problems", f"{len(view.problems):,}"))
    return [(what, printable(value)) for what, value in found]


def loss_of(meta: Mapping[str, Any]) -> tuple[str, float] | None:
    """Return the path and the value of the first loss in the metadata; a list is searched from its end. Items of very
    many objects are left out.

    >>> loss_of({"epoch": 2, "trainer_state": {"log_history": [{"loss": 3.5}, {"loss": 2.25}, {"eval_runtime": 1.0}]}})
    ('trainer_state.log_history.1.loss', 2.25)
    """
    left: list[tuple[tuple[str, ...], Any]] = [((), meta.outline() if isinstance(meta, Meta) else meta)]
    for _ in range(_LOOKED_AT):
        if not left:
            return None
        path, value = left.pop(0)
        if isinstance(value, Mapping):
            for key in _LOSSES:
                if type(value.get(key)) in (int, float):
                    return ".".join((*path, key)), float(value[key])
        if len(path) < _DEEP:
            left += [((*path, str(key)), item) for key, item in _inside(value)]
    return None


def _inside(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the (key, item) pairs that may hold a loss: the values of a dict, the last 100 items of a list in
    reverse."""
    if isinstance(value, Mapping):
        yield from ((key, item) for key, item in value.items() if isinstance(key, str))
    elif isinstance(value, list):
        yield from ((n, value[n]) for n in range(len(value) - 1, max(-1, len(value) - 100), -1))


def meta_lines(
    meta: Any, depth: int | None = None, limit: int | None = LINES, fold: bool = True
) -> tuple[list[Line], int]:
    """Return the metadata as the lines of a tree, and the number of lines that are left out.

    Parameters
    ----------
    meta
        The result of `plain_meta`, `CheckpointView.meta`, or a part of either.
    depth
        Number of levels to show; None shows all.
    limit
        Maximum number of lines; None shows all.
    fold
        Whether entries with equal items have one line: the versions of all modules in a state dict's ``_metadata``.
    """
    lines: list[Line] = []
    left_out = 0
    for line in _walk(meta, 0, depth, fold):
        if limit is not None and len(lines) >= limit:
            left_out += 1
            if left_out >= _LOOKED_AT:
                break
        else:
            lines.append(line)
    return lines, left_out


def _walk(value: Any, level: int, depth: int | None, fold: bool) -> Iterator[Line]:
    def items(of: Any) -> list[tuple[str, Any]]:
        found = _items(of)
        return _folded(found) if fold else [(_key(key), item) for key, item in found]

    left: list[tuple[int, str, Any]] = [(level, key, item) for key, item in reversed(items(value))]
    while left:
        at, key, item = left.pop()
        inner = [] if depth is not None and at + 1 >= depth else items(item)
        yield Line(at, key, _headline(item) if inner else _cut(_value(item)))
        left += [(at + 1, k, v) for k, v in reversed(inner)]


def _key(key: str, width: int = _WIDTH) -> str:
    return _cut(printable(key), width) or "''"


def _folded(pairs: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return (key, item) pairs with one pair for all equal items, if all are small mappings and few of them differ."""
    groups: dict[object, list[tuple[str, Any]]] = {}
    if len(pairs) >= _ALIKE:
        for key, item in pairs:
            mark = _mark(item)
            if mark is None:
                groups = {}
                break
            groups.setdefault(mark, []).append((key, item))
    if not groups or len(groups) * _ALIKE > len(pairs):
        return [(_key(key), item) for key, item in pairs]
    found = []
    for members in groups.values():
        label = ", ".join(_key(key, 40) for key, _ in members[:_NAMED])
        more = len(members) - _NAMED
        found.append((f"{label} and {more:,} more alike" if more > 0 else label, members[0][1]))
    return found


def _mark(item: Any) -> object:
    """Return what equal small mappings of plain values have in common; None for everything else."""
    if not isinstance(item, Mapping) or not 0 < len(item) <= _SMALL:
        return None
    if any(type(part) not in (int, float, bool, str, type(None)) for pair in item.items() for part in pair):
        return None
    return tuple((repr(key), repr(value)) for key, value in item.items())


def _items(value: Any) -> list[tuple[str, Any]]:
    """Return the (key, item) pairs of a value that are shown on lines of their own."""
    if isinstance(value, argparse.Namespace):
        value = vars(value)
    if isinstance(value, Opaque):
        parts = {"args": value.args, "kwargs": value.kwargs, "state": value.state, "items": value.items}
        parts["entries"] = value.entries
        return [(name, part) for name, part in parts.items() if part]
    if isinstance(value, Mapping):
        return [(str(key) if type(key) is str else short(key), item) for key, item in value.items()]
    if isinstance(value, list | tuple) and any(isinstance(item, Mapping | list | tuple | Opaque) for item in value):
        return [(str(n), item) for n, item in enumerate(value)]
    return []


def _headline(value: Any) -> str:
    """Return the text beside the key of a value whose items follow on their own lines."""
    if isinstance(value, Opaque):
        return f"<{value.module:.80}.{value.name:.80}>"
    return ""


def _value(value: Any) -> str:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list | tuple) and len(value) > 0:
        shown = ", ".join(_cut(_value(item), 40) for item in value[:_ITEMS])
        return f"[{shown}{f', ... {len(value):,} items' if len(value) > _ITEMS else ''}]"
    if isinstance(value, Sequence | Mapping):
        return printable(short(value))
    return printable(repr(value) if type(value) in (int, float, bool, type(None)) else short(value))


def _cut(text: str, width: int = _WIDTH) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."
