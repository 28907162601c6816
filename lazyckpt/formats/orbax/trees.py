"""Trees of JAX as tensors by state and name: which leaves are weights, and which are an optimizer's for which weight.

A leaf has a key: the keys of dicts, indices of lists, and names of fields on the way to it. The moments of optax are
trees of the same structure as the parameters: ``opt_state.1.0.mu`` has a leaf for each parameter (optax,
_src/transform.py `ScaleByAdamState`; `multi_transform`, `MultiSteps` and `inject_hyperparams` put other fields around).
So a tree whose leaves all have the keys of parameters is a state, and its last key is the name of the state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ...errors import Problem, some

Key = tuple[str, ...]
WEIGHTS, OTHERS = "weights", "others"
# fields of optax's states that are trees like the parameters, in the order in which states are listed
_MOMENTS = (
    "mu", "nu", "nu_max", "trace", "acc_grads", "v_row", "v_col", "v", "m", "z", "ema", "sum_of_squares", "mean_grad",
    "prev_updates", "notfinite_count",
)  # fmt: skip
_COUNT = "count"  # of a transformation's steps, beside its moments
_PARAMS = ("params", "target", "model")  # Flax and MaxText, T5X, Flax NNX by convention
_VALUE = "value"  # the last key of all leaves of a state of Flax NNX


@dataclass(frozen=True, slots=True)
class Named:
    """State -> name -> key of the leaf, and what could not be decided."""

    states: dict[str, dict[str, Key]]
    prefix: Key = ()
    """The keys above the weights."""
    problems: list[Problem] = field(default_factory=list)


def named(keys: Iterable[Key]) -> Named:
    """Return the leaves by state and name.

    >>> found = named([("params", "w"), ("opt_state", "0", "mu", "w"), ("opt_state", "0", "count"), ("step",)])
    >>> found.states
    {'weights': {'w': ('params', 'w')}, 'mu': {'w': ('opt_state', '0', 'mu', 'w')}, \
'count': {'w': ('opt_state', '0', 'count')}, 'others': {'step': ('step',)}}
    """
    leaves = dict.fromkeys(keys)
    problems: list[Problem] = []
    prefix = _weights(leaves, problems)
    if not prefix:
        return Named({WEIGHTS: _once((".".join(key), key) for key in leaves)}, (), problems)
    weights = {key[len(prefix) :]: key for key in leaves if key[: len(prefix)] == prefix}
    tail = 1 if all(len(rest) > 1 and rest[-1] == _VALUE for rest in weights) else 0  # of Flax NNX
    names = {rest: ".".join(rest[: len(rest) - tail]) for rest in weights}
    groups, left = _groups(leaves, prefix, names)
    states: dict[str, dict[str, Key]] = {WEIGHTS: {names[rest]: key for rest, key in weights.items()}}
    called = _called(groups, prefix)
    for group in sorted(groups, key=lambda group: _order(called[group])):
        states.setdefault(called[group], {}).update(groups[group])
    _count(states, groups, left, tail)
    if left:
        states[OTHERS] = _once((".".join(key), key) for key in left)
    return Named(states, prefix, problems)


def _once(pairs: Iterable[tuple[str, Key]]) -> dict[str, Key]:
    found: dict[str, Key] = {}
    for name, key in pairs:
        found.setdefault(name, key)
    return found


def _weights(leaves: Mapping[Key, None], problems: list[Problem]) -> Key:
    """Return the key of the tree of weights; () if all leaves are weights."""
    trees: dict[Key, set[Key]] = {}
    for key in leaves:
        for n, part in enumerate(key[:-1]):
            if part in _MOMENTS and n:
                trees.setdefault(key[: n + 1], set()).add(key[n + 1 :])
    ends: dict[str, list[Key]] = {}
    for key in leaves:
        ends.setdefault(key[-1], []).append(key)
    found: dict[Key, None] = {}
    for tree, rests in trees.items():
        first = next(iter(rests))
        for key in ends[first[-1]]:
            above = key[: len(key) - len(first)]
            if key[len(above) :] != first or above == tree or not above or above in trees:
                continue
            if all((*above, *rest) in leaves for rest in rests):
                found[above] = None
    likely = [above for above in found if above[-1] in _PARAMS] or list(found)
    if len(likely) == 1:
        return likely[0]
    if likely:
        line = (
            f"the optimizer's states may be those of {some(['.'.join(above) for above in likely])}: all tensors "
            "have the names of the tree"
        )
        problems.append(Problem("undecided-name", line))
        return ()
    for name in _PARAMS:
        above_all = {key[: n + 1] for key in leaves for n in (0, 1) if len(key) > n + 1 and key[n] == name}
        if (name,) in above_all:  # (optax's L-BFGS keeps older ones in its state, as opt_state.params)
            return (name,)
        outer = list(above_all)
        if len(outer) == 1:
            return outer[0]
    return ()


def _groups(
    leaves: Mapping[Key, None], prefix: Key, names: Mapping[Key, str]
) -> tuple[dict[tuple[Key, str], dict[str, Key]], list[Key]]:
    """Return the trees like that of the weights, by what is above and below the key of the weight, and other leaves."""
    groups: dict[tuple[Key, str], dict[str, Key]] = {}
    left: list[Key] = []
    for key in leaves:
        if key[: len(prefix)] == prefix:
            continue
        for n in range(1, len(key)):
            if key[n:] in names:
                groups.setdefault((key[:n], ""), {})[names[key[n:]]] = key
                break
            if key[-1] in _MOMENTS and key[n:-1] in names:  # T5X: param_states.NAME.v_row
                groups.setdefault((key[:n], key[-1]), {})[names[key[n:-1]]] = key
                break
        else:
            left.append(key)
    return groups, left


def _called(groups: Mapping[tuple[Key, str], Mapping[str, Key]], prefix: Key) -> dict[tuple[Key, str], str]:
    """Return the name of the state of each group. Groups with one name are one state unless they share a weight."""
    short = {(above, below): below or above[-1] for above, below in groups}
    seen: dict[str, set[str]] = {}
    twice: set[str] = {WEIGHTS, OTHERS, _COUNT, *_PARAMS}
    for group, name in short.items():
        have = seen.setdefault(name, set())
        if have & groups[group].keys():
            twice.add(name)
        have.update(groups[group])
    return {
        (above, below): ".".join((*above, *([below] if below else []))) if name in twice or name.isdecimal() else name
        for (above, below), name in short.items()
    }


def _order(state: str) -> tuple[int, str]:
    return (_MOMENTS.index(state), "") if state in _MOMENTS else (len(_MOMENTS), state)


def _count(
    states: dict[str, dict[str, Key]],
    groups: Mapping[tuple[Key, str], Mapping[str, Key]],
    left: list[Key],
    tail: int,
) -> None:
    """Give each weight the count of the transformation that has its moments, and take the counts off ``left``."""
    beside: dict[Key, dict[str, Key]] = {}
    for (above, below), group in groups.items():
        if not below and above[-1] in _MOMENTS:
            beside.setdefault(above[:-1], {}).update(group)
    found: dict[str, Key] = {}
    for key in list(left):
        own = key[:-1] if tail and key[-1] == _VALUE else key
        group = beside.get(own[:-1], {})
        if own[-1] == _COUNT and group and not group.keys() & found.keys():
            found |= dict.fromkeys(group, key)
            left.remove(key)
    if found:
        states[_COUNT] = found
