"""Names for the numbered parameters of a torch optimizer, from the orders in common use and the shapes. Pure.

torch/optim/optimizer.py `state_dict` numbers the parameters in the order of the groups, within a group in the order in
which the client listed them. No file records that order. `CONVENTIONS` has the orders in use, `assign` finds all ways
to distribute the parameters over the groups in one of them, and `agreed` returns the names on which all conventions
that fit the shapes agree. Other parameters stay without a name.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from ...core.box import Shape
from ...layouts.tables import pattern

_TRIES = 500_000  # maximum number of search states times groups; beyond that the order counts as undetermined

Wanted = Collection[Shape] | None  # the shapes that a parameter may have; None allows any
State = tuple[int, ...]  # number of parameters of each group that have a name


@dataclass(slots=True)
class Effort:
    """The remaining budget of one search, or of several searches together."""

    left: int = _TRIES


class Assignment(NamedTuple):
    """The name of every parameter of every group, or None if several are possible. ``by`` names the evidence."""

    names: list[list[str | None]]
    by: str = ""

    @property
    def complete(self) -> bool:
        return all(name is not None for group in self.names for name in group)


def assign(
    names: Sequence[tuple[str, Shape]], groups: Sequence[Sequence[Wanted]], effort: Effort | None = None
) -> Assignment | None:
    """Assign names to the parameters of each group.

    Every group contains some of the names, in their order, with the shapes that it wants. No name is in two groups;
    some may be in none (frozen parameters, buffers). A parameter gets a name if the name is the same in all such
    assignments. Return None if there is no assignment, or if there are too many to examine.

    >>> assign([("w", (2, 3)), ("frozen", (9,)), ("b", (2,))], [[{(2, 3)}], [{(2,)}]]).names
    [['w'], ['b']]
    >>> assign([("a", (2,)), ("w", (2, 3)), ("b", (2,))], [[{(2, 3)}, {(2,)}]]).names
    [['w', 'b']]
    >>> assign([("a", (2,)), ("b", (2,)), ("w", (2, 3))], [[{(2,)}, {(2, 3)}]]).names
    [[None, 'w']]
    """
    goal = tuple(map(len, groups))
    unused = len(names) - sum(goal)  # number of names that are in no group
    if unused < 0:
        return None
    # forward pass: the states that can be reached before each name
    ahead: list[set[State]] = [{(0,) * len(groups)}]
    effort = effort or Effort()
    for n, (_, shape) in enumerate(names):
        following = {s for s in ahead[-1] if sum(s) + unused > n}
        for state in ahead[-1]:
            following.update(after for _, after in _steps(state, shape, groups))
        effort.left -= len(following) * len(groups)
        if effort.left < 0:
            return None
        if not following:
            return None
        ahead.append(following)
    # backward pass: the reachable states that lead to the goal
    good = {goal} & ahead[-1]
    if not good:
        return None
    possible: list[list[set[int]]] = [[set() for _ in group] for group in groups]
    for n in range(len(names) - 1, -1, -1):
        before = set()
        for state in ahead[n]:
            if state in good:
                before.add(state)
            for g, after in _steps(state, names[n][1], groups):
                if after in good:
                    before.add(state)
                    possible[g][state[g]].add(n)
        good = before
    return Assignment([[names[next(iter(p))][0] if len(p) == 1 else None for p in group] for group in possible])


# -- the orders in common use

Named = tuple[str, Shape]


class Convention(NamedTuple):
    """An order of all parameters, of which each group contains some. ``order`` converts from the order of the
    modules."""

    name: str
    order: Callable[[Sequence[Named]], list[Named]]


def _tops(names: Sequence[Named]) -> list[str]:
    """Return the first component of each name that not all names share."""
    parts = [name.split(".") for name, _ in names]
    shared = 0
    while parts and all(len(p) > shared + 1 and p[shared] == parts[0][shared] for p in parts):
        shared += 1
    return [p[shared] for p in parts]


def _head_first(names: Sequence[Named]) -> list[Named]:
    """Move the parameters of the last top-level module to the front if its name is that of a head.

    >>> _head_first([("m.up.w", (2,)), ("m.up.b", (2,)), ("m.head.w", (2,))])
    [('m.head.w', (2,)), ('m.up.w', (2,)), ('m.up.b', (2,))]
    """
    tops = _tops(names)
    if not tops or not pattern("model.head").fullmatch(tops[-1]):
        return list(names)
    return [item for own in (True, False) for item, top in zip(names, tops, strict=True) if (top == tops[-1]) is own]


def _sorted(names: Sequence[Named]) -> list[Named]:
    return sorted(names, key=lambda item: item[0])


def _sorted_by_value(names: Sequence[Named]) -> list[Named]:
    """Sort by name, with numbers in numeric order.

    >>> [name for name, _ in _sorted_by_value([("10.w", (2,)), ("9.w", (2,)), ("9.b", (2,))])]
    ['9.b', '9.w', '10.w']
    """
    return sorted(names, key=lambda item: re.sub(r"\d+", lambda number: number[0].zfill(20), item[0]))


def _reversed(names: Sequence[Named]) -> list[Named]:
    return list(names)[::-1]


def _module(item: Named) -> str:
    """Return the name of the module that directly owns a parameter."""
    return item[0].rpartition(".")[0]


def _modules_reversed(names: Sequence[Named]) -> list[Named]:
    """Reverse the order of the modules, but not that of the parameters of each module.

    >>> _modules_reversed([("0.w", (2, 2)), ("0.b", (2,)), ("1.w", (2, 2)), ("1.b", (2,))])
    [('1.w', (2, 2)), ('1.b', (2,)), ('0.w', (2, 2)), ('0.b', (2,))]
    """
    return _blocks_reversed(names, _module)


def _parts_reversed(names: Sequence[Named]) -> list[Named]:
    """Reverse the order of the top-level modules, but not that of their parameters.

    >>> _parts_reversed([("m.a.0.w", (2,)), ("m.a.1.w", (2,)), ("m.b.w", (2,))])
    [('m.b.w', (2,)), ('m.a.0.w', (2,)), ('m.a.1.w', (2,))]
    """
    tops = dict(zip(names, _tops(names), strict=True))
    return _blocks_reversed(names, lambda item: tops[item])


def _blocks_reversed(names: Sequence[Named], key: Callable[[Named], str]) -> list[Named]:
    """Group adjacent names by key, and reverse the order of the groups."""
    blocks = [list(block) for _, block in itertools.groupby(names, key)]
    return [item for block in blocks[::-1] for item in block]


def _by_shape(key: Callable[[Shape], Any], *before: Callable[[Sequence[Named]], list[Named]]) -> tuple[Convention, ...]:
    """Return conventions that sort by ``key`` of the shape, ascending and descending; ties keep an order of
    ``before``."""

    def made(first: Callable[[Sequence[Named]], list[Named]], down: bool) -> Convention:
        def order(names: Sequence[Named]) -> list[Named]:
            return sorted(first(names), key=lambda item: key(item[1]), reverse=down)

        return Convention("the order of their shapes", order)

    return tuple(made(first, down) for down in (False, True) for first in before)


# The order of the modules, distributed over groups in any way: one group for all; with and without weight decay; head
# and body; one for each layer, in either direction; biases, weights of norms and other weights (ultralytics, yolov5);
# one for each shape. A single group of all parameters is usually model.parameters().
MODULES = Convention("the order of the modules", list)
_HEAD_FIRST = Convention("the order of the modules, the head first", _head_first)
# Other orders, also of one group or of several. karpathy/minGPT `configure_optimizers` sorts names.
CONVENTIONS = (
    MODULES,
    Convention("sorted names", _sorted),
    Convention("sorted names, numbers by their value", _sorted_by_value),
    Convention("the reversed order of the modules", _reversed),
    _HEAD_FIRST,
)
# Orders that are tried only if the order of the modules does not fit. KellerJordan/Muon `MuonWithAuxAdam` sorts each
# group by shape.
_RARE = (
    Convention("sorted names, reversed", lambda names: _sorted(names)[::-1]),
    *_by_shape(prod, list, _sorted, _reversed),
    *_by_shape(tuple, list, _sorted, _reversed),
    *_by_shape(len, list, _sorted, _reversed),
)
# Orders that are tried for a single group even if the order of the modules fits: whole modules in another order. A
# model of equal layers fits all of these.
_ALSO_IN_ONE_GROUP = (
    Convention("sorted names, reversed", lambda names: _sorted(names)[::-1]),
    Convention("the reversed order of the modules, of each its parameters in order", _modules_reversed),
    Convention("the modules sorted by name", lambda names: sorted(names, key=_module)),
    Convention("the parts of the model, the last first", _parts_reversed),
)


Deal = Callable[[Sequence[Named], Sequence[Sequence[Wanted]], Effort], Assignment | None]


def agreed(
    names: Sequence[Named],
    groups: Sequence[Sequence[Wanted]],
    conventions: Sequence[Convention] = CONVENTIONS,
    effort: Effort | None = None,
    deal: Deal = assign,
) -> Assignment | None:
    """Return the names on which all conventions that fit all groups agree.

    ``names`` are in the order of the modules. Return None if no convention fits, or if there are too many assignments
    to examine. ``effort`` is the budget of all conventions together; by default the order of the modules has its own
    budget, and the other conventions share one.

    >>> names = [("up.w", (2, 3)), ("up.b", (2,)), ("out.w", (5, 2)), ("out.b", (5,))]
    >>> agreed(names, [[{(2, 3)}, {(2,)}, {(5, 2)}, {(5,)}]])
    Assignment(names=[['up.w', 'up.b', 'out.w', 'out.b']], by='the order of the modules')
    >>> agreed(names, [[{(5,)}, {(5, 2)}, {(2,)}, {(2, 3)}]])
    Assignment(names=[['out.b', 'out.w', 'up.b', 'up.w']], by='sorted names')
    >>> layers = [(f"layers.{n}.w", (2, 2)) for n in range(12)]
    >>> agreed(layers, [[{(2, 2)}] * 12]).names[0][:2]
    [None, None]
    """
    found = fitting(names, groups, conventions, effort, deal)
    return common(found, groups) if found else None


def fitting(
    names: Sequence[Named],
    groups: Sequence[Sequence[Wanted]],
    conventions: Sequence[Convention] = CONVENTIONS,
    effort: Effort | None = None,
    deal: Deal = assign,
) -> list[Assignment]:
    """Return the assignment of each convention that fits; none if there are too many to examine.

    ``deal`` finds the assignments in one order. If the order of the modules fits, any parameters may be unassigned
    (frozen ones, buffers). If it does not, only parameters whose shapes no group has may be, because an order that is
    found by trial must explain all parameters."""
    found: list[Assignment] = []
    tried: list[list[Named]] = []
    left = effort or Effort()

    def attempt(convention: Convention) -> bool:
        """Try a convention; return False if there are too many assignments to examine."""
        ordered = convention.order(names)
        if ordered not in tried:
            tried.append(ordered)
            one = deal(ordered, groups, left)
            if left.left < 0:
                return False
            found.extend([] if one is None else [one._replace(by=convention.name)])
        return True

    if MODULES in conventions and not attempt(MODULES):
        return []
    left = effort or Effort()
    others = [c for c in conventions if c is not MODULES]
    if found and len(groups) > 1:
        others = [c for c in others if c is not _HEAD_FIRST]
    elif found:
        others += _ALSO_IN_ONE_GROUP if others else ()
    else:
        names = _wanted(names, groups)
        if len(names) != sum(map(len, groups)):
            return []
        others = [*conventions, *(_RARE if len(conventions) > 1 else ())]
    return found if all(map(attempt, others)) else []


def common(found: Sequence[Assignment], groups: Sequence[Sequence[Wanted]]) -> Assignment:
    """Return the names on which all assignments agree.

    If two disagree on a parameter, no parameter of its shape gets a name, because the fit may be by chance."""
    if len(found) == 1:
        return found[0]
    given = [list(zip(*tables, strict=True)) for tables in zip(*(one.names for one in found), strict=True)]
    keys = [[None if shapes is None else frozenset(shapes) for shapes in group] for group in groups]
    pairs = [pair for row, of in zip(given, keys, strict=True) for pair in zip(row, of, strict=True)]
    disputed = {key for names, key in pairs if len(set(names)) > 1}
    names = [
        [None if key in disputed else row[0] for row, key in zip(rows, of, strict=True)]
        for rows, of in zip(given, keys, strict=True)
    ]
    return Assignment(names, " and ".join(dict.fromkeys(one.by for one in found)))


def _wanted(names: Sequence[Named], groups: Sequence[Sequence[Wanted]]) -> Sequence[Named]:
    """Return the parameters whose shapes occur in the groups."""
    if any(shapes is None for group in groups for shapes in group):
        return names
    shapes = {shape for group in groups for wanted in group for shape in wanted or ()}
    return [item for item in names if item[1] in shapes]


def assign_by_shape(names: Sequence[tuple[str, Shape]], groups: Sequence[Sequence[Wanted]]) -> Assignment:
    """Assign names by shapes that exactly one name and one parameter have, whatever the order.

    This is for groups that the client did not list in the order of the modules.

    >>> assign_by_shape([("a", (2,)), ("b", (3,)), ("w", (2, 3))], [[{(2, 3)}, {(2,)}]]).names
    [['w', 'a']]
    >>> assign_by_shape([("a", (2,)), ("b", (2,)), ("w", (2, 3))], [[{(2, 3)}, {(2,)}]]).names
    [['w', None]]
    """
    named: dict[Shape, list[str]] = {}
    for name, shape in names:
        named.setdefault(shape, []).append(name)
    wanted = Counter(shape for group in groups for shapes in group for shape in shapes or ())

    def find(shapes: Wanted) -> str | None:
        shape = next(iter(shapes)) if shapes is not None and len(shapes) == 1 else ()
        return named[shape][0] if shape and wanted[shape] == len(named.get(shape, ())) == 1 else None

    return Assignment([[find(shapes) for shapes in group] for group in groups], "shapes that no other has")


def possible_shapes(states: Mapping[Any, Shape]) -> frozenset[Shape] | None:
    """Return the shapes that a parameter may have, given the shapes of its optimizer states; None if it has no states.

    A scalar state (a step) is no evidence. Not every state has the parameter's shape: 8-bit optimizers also have tables
    and scales, and Adafactor, in transformers and in torch, has one state of the rows and one of the columns.
    """
    shapes = {shape for shape in states.values() if shape != ()}
    if "exp_avg_sq_row" in states and "exp_avg_sq_col" in states:
        shapes.add((*states["exp_avg_sq_row"], *states["exp_avg_sq_col"][-1:]))
    if "row_var" in states and "col_var" in states:
        shapes.add((*states["row_var"][:-1], *states["col_var"][-1:]))
    return frozenset(shapes or {()}) if states else None


def _steps(state: State, shape: Shape, groups: Sequence[Sequence[Wanted]]) -> list[tuple[int, State]]:
    """Return the groups whose next parameter may have the shape, each with the state after it."""
    return [
        (g, (*state[:g], state[g] + 1, *state[g + 1 :]))
        for g, wanted in enumerate(groups)
        if state[g] < len(wanted) and ((shapes := wanted[state[g]]) is None or shape in shapes)
    ]
