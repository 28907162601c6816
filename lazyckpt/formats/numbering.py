"""Which number of a torch optimizer is which parameter: a search over the orders that shapes allow. Pure.

torch/optim/optimizer.py `state_dict` numbers the parameters in the order of the groups, within a group in the order the
client listed them, which is that of the module for every usual way to make groups (weight decay or not, frozen or not).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..core.box import Shape

_TRIES = 500_000  # states of a search, times the groups; past that the order is called undetermined

Wanted = Collection[Shape] | None  # the shapes that a parameter may have; None: any
State = tuple[int, ...]  # how many parameters of each group have a name


@dataclass(slots=True)
class Effort:
    """What is left of the work that a search, or several of them together, may take."""

    left: int = _TRIES


class Assignment(NamedTuple):
    """For every parameter of every group its name, or None where several are possible."""

    names: list[list[str | None]]

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

    return Assignment([[find(shapes) for shapes in group] for group in groups])


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
