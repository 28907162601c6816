"""Which number of a torch optimizer is which parameter: the orders that people use, and which of them fit. Pure.

torch/optim/optimizer.py `state_dict` numbers the parameters in the order of the groups, within a group in the order in
which the client listed them. No file says which order that was. `CONVENTIONS` has those that are in use; `assign` finds
every way to deal the parameters to the groups in one of them, and `agreed` gives the names that all conventions that
fit the shapes have in common. What they disagree on stays without a name.
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

_TRIES = 500_000  # states of a search, times the groups; past that the order is called undetermined

Wanted = Collection[Shape] | None  # the shapes that a parameter may have; None: any
State = tuple[int, ...]  # how many parameters of each group have a name


@dataclass(slots=True)
class Effort:
    """What is left of the work that a search, or several of them together, may take."""

    left: int = _TRIES


class Assignment(NamedTuple):
    """For every parameter of every group its name, or None where several are possible. ``by``: how that is known."""

    names: list[list[str | None]]
    by: str = ""

    @property
    def complete(self) -> bool:
        return all(name is not None for group in self.names for name in group)


def assign(
    names: Sequence[tuple[str, Shape]], groups: Sequence[Sequence[Wanted]], effort: Effort | None = None
) -> Assignment | None:
    """Names for the parameters of each group: each group lists some of the names, in their order, of the shapes it
    wants; no name stands in two; some may stand in none (frozen, buffers). A parameter has a name if it is
    the same in every way to do that. None if there is no way, or if there are too many to look at.

    >>> assign([("w", (2, 3)), ("frozen", (9,)), ("b", (2,))], [[{(2, 3)}], [{(2,)}]]).names
    [['w'], ['b']]
    >>> assign([("a", (2,)), ("w", (2, 3)), ("b", (2,))], [[{(2, 3)}, {(2,)}]]).names
    [['w', 'b']]
    >>> assign([("a", (2,)), ("b", (2,)), ("w", (2, 3))], [[{(2,)}, {(2, 3)}]]).names
    [[None, 'w']]
    """
    goal = tuple(map(len, groups))
    unused = len(names) - sum(goal)  # so many names stand in no group
    if unused < 0:
        return None
    # before each name: the states that can be reached ...
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
    # ... and from there on back, which of them lead to the goal
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


# -- the orders that people use

Named = tuple[str, Shape]


class Convention(NamedTuple):
    """An order of all parameters, from which each group takes some. ``order``: from that of the modules to it."""

    name: str
    order: Callable[[Sequence[Named]], list[Named]]


def _tops(names: Sequence[Named]) -> list[str]:
    """Of each name the first component that not all names share."""
    parts = [name.split(".") for name, _ in names]
    shared = 0
    while parts and all(len(p) > shared + 1 and p[shared] == parts[0][shared] for p in parts):
        shared += 1
    return [p[shared] for p in parts]


def _head_first(names: Sequence[Named]) -> list[Named]:
    """The parameters of the last top-level module come first, if its name is that of a head.

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
    """
    >>> [name for name, _ in _sorted_by_value([("10.w", (2,)), ("9.w", (2,)), ("9.b", (2,))])]
    ['9.b', '9.w', '10.w']
    """
    return sorted(names, key=lambda item: re.sub(r"\d+", lambda number: number[0].zfill(20), item[0]))


def _reversed(names: Sequence[Named]) -> list[Named]:
    return list(names)[::-1]


def _module(item: Named) -> str:
    """The module whose own parameter it is."""
    return item[0].rpartition(".")[0]


def _modules_reversed(names: Sequence[Named]) -> list[Named]:
    """
    >>> _modules_reversed([("0.w", (2, 2)), ("0.b", (2,)), ("1.w", (2, 2)), ("1.b", (2,))])
    [('1.w', (2, 2)), ('1.b', (2,)), ('0.w', (2, 2)), ('0.b', (2,))]
    """
    return _blocks_reversed(names, _module)


def _parts_reversed(names: Sequence[Named]) -> list[Named]:
    """
    >>> _parts_reversed([("m.a.0.w", (2,)), ("m.a.1.w", (2,)), ("m.b.w", (2,))])
    [('m.b.w', (2,)), ('m.a.0.w', (2,)), ('m.a.1.w', (2,))]
    """
    tops = dict(zip(names, _tops(names), strict=True))
    return _blocks_reversed(names, lambda item: tops[item])


def _blocks_reversed(names: Sequence[Named], key: Callable[[Named], str]) -> list[Named]:
    """The last of the neighbours of one key first, these in their order."""
    blocks = [list(block) for _, block in itertools.groupby(names, key)]
    return [item for block in blocks[::-1] for item in block]


def _by_shape(key: Callable[[Shape], Any], *before: Callable[[Sequence[Named]], list[Named]]) -> tuple[Convention, ...]:
    """Sorted by ``key`` of the shape, ascending and descending; equal ones keep one of the orders ``before``."""

    def made(first: Callable[[Sequence[Named]], list[Named]], down: bool) -> Convention:
        def order(names: Sequence[Named]) -> list[Named]:
            return sorted(first(names), key=lambda item: key(item[1]), reverse=down)

        return Convention("the order of their shapes", order)

    return tuple(made(first, down) for down in (False, True) for first in before)


# The order of the modules, dealt to groups in any way: one for all; with and without weight decay; head and body; one
# for each layer, in either direction; biases, weights of norms and other weights (ultralytics, yolov5); one for each
# shape. Who makes one group of all parameters gives model.parameters().
MODULES = Convention("the order of the modules", list)
_HEAD_FIRST = Convention("the order of the modules, the head first", _head_first)
# The others may stand in one group or be dealt, too. karpathy/minGPT `configure_optimizers` sorts names.
CONVENTIONS = (
    MODULES,
    Convention("sorted names", _sorted),
    Convention("sorted names, numbers by their value", _sorted_by_value),
    Convention("the reversed order of the modules", _reversed),
    _HEAD_FIRST,
)
# Those that are looked at only where the order of the modules does not fit. KellerJordan/Muon `MuonWithAuxAdam` sorts
# each group by shape.
_RARE = (
    Convention("sorted names, reversed", lambda names: _sorted(names)[::-1]),
    *_by_shape(prod, list, _sorted, _reversed),
    *_by_shape(tuple, list, _sorted, _reversed),
    *_by_shape(len, list, _sorted, _reversed),
)
# And of one group, although the order of the modules fits: whole modules in another order. A model of equal layers fits
# all of these.
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
    """The names that every convention gives that fits all groups; ``names`` are in the order of the modules. None if
    none fits, or if there are too many ways to look at (``effort``: what all conventions may take together; without it
    the order of the modules has one of its own, and the others have one together).

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
    """What each convention gives that fits; nothing if there are too many ways to look at. ``deal``: finds the ways in
    one order. Any parameters may be left out (frozen ones, buffers) where the order of the modules fits; where it does
    not, only those whose shapes no group has: an order that is found by trying has to be that of everything."""
    found: list[Assignment] = []
    tried: list[list[Named]] = []
    left = effort or Effort()

    def attempt(convention: Convention) -> bool:
        """Whether there are not too many ways."""
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
    """The names that all of these give. Where two disagree on a parameter, none of its shape has a name: what fits by
    chance decides nothing."""
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
    """The parameters whose shapes the groups have."""
    if any(shapes is None for group in groups for shapes in group):
        return names
    shapes = {shape for group in groups for wanted in group for shape in wanted or ()}
    return [item for item in names if item[1] in shapes]


def assign_by_shape(names: Sequence[tuple[str, Shape]], groups: Sequence[Sequence[Wanted]]) -> Assignment:
    """Names for the parameters whose shape one name and one parameter have, whatever the order: for groups that the
    client did not list in the module's order.

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
    """The shapes that a parameter may have whose optimizer states have these; None if it has none.

    A single number (a step) shows nothing. Not every state is of the parameter's shape: 8-bit optimizers keep tables
    and scales besides, and Adafactor a state of the rows and one of the columns, of transformers or of torch.
    """
    shapes = {shape for shape in states.values() if shape != ()}
    if "exp_avg_sq_row" in states and "exp_avg_sq_col" in states:
        shapes.add((*states["exp_avg_sq_row"], *states["exp_avg_sq_col"][-1:]))
    if "row_var" in states and "col_var" in states:
        shapes.add((*states["row_var"][:-1], *states["col_var"][-1:]))
    return frozenset(shapes or {()}) if states else None


def _steps(state: State, shape: Shape, groups: Sequence[Sequence[Wanted]]) -> list[tuple[int, State]]:
    """The groups whose next parameter may be of that shape, and the states after it."""
    return [
        (g, (*state[:g], state[g] + 1, *state[g + 1 :]))
        for g, wanted in enumerate(groups)
        if state[g] < len(wanted) and ((shapes := wanted[state[g]]) is None or shape in shapes)
    ]
