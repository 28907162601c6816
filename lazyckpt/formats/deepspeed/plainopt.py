"""ZeRO-0: a torch optimizer's state_dict, whose parameters are numbers; which number is which name follows from order
and shapes, where they leave no choice.

Sources: runtime/engine.py (``optimizer`` in the model states; ``expp_rank_*`` with experts), runtime/fp16/
unfused_optimizer.py `state_dict`, torch/optim/optimizer.py `state_dict`: parameters are numbered in the order of the
groups, within a group in the order the client listed them, which is that of the module for every usual way to make
groups (weight decay or not, frozen or not).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...core.box import Shape
from ...core.index import Rank
from ...io.rebuild import StoredTensor
from ...io.torchfile import TorchFile
from .building import ALONE, Building, Local, Shapes, Shards, local

_TRIES = 200_000  # states of the search; past that the order is called undetermined


def optimizer_shards(
    b: Building, file: TorchFile, optimizer: Any, names: Mapping[str, Shape], rank: Rank, where: str
) -> Shards:
    """The states of a plain optimizer per parameter, or under its numbers if the names are not determined.

    ``names``: every tensor that may be a parameter, in the module's order.
    """
    if not isinstance(optimizer, dict):
        return {}
    by_id, ids, masters, shapes = _numbered(optimizer)
    found = assign(list(names.items()), shapes)
    if found is None:
        b.tell(
            f"{where}: the optimizer numbers its parameters, and order and shapes leave more than one way to name "
            "them: its states stand under their numbers"
        )
    name_of = {
        i: (found[g][n] if found else f"{where}.{i}") for g, group in enumerate(ids) for n, i in enumerate(group)
    }
    shards: Shards = {}
    for i, name in name_of.items():
        state = by_id.get(i)
        values: dict[Any, Any] = dict(state) if isinstance(state, dict) else {}
        if i in masters:
            values["fp32"] = masters[i]
        for key, value in values.items():
            if isinstance(value, StoredTensor):
                tensor: Local = local(file, f"{name}: {key}", value, rank)
                shards.setdefault(str(key), {}).setdefault(name, {})[rank.tp if found else ALONE] = tensor
    return shards


def _numbered(
    optimizer: Mapping[Any, Any],
) -> tuple[dict[Any, Any], list[list[int]], dict[int, StoredTensor], list[list[Shape | None]]]:
    """-> (number -> state, the numbers of each group, number -> fp32 copy, the shapes of each group)."""
    inner = optimizer.get("optimizer_state_dict", optimizer)
    by_id = inner.get("state") if isinstance(inner, dict) else None
    groups = inner.get("param_groups") if isinstance(inner, dict) else None
    if not isinstance(by_id, dict) or not isinstance(groups, list):
        return {}, [], {}, []
    ids = [[i for i in g.get("params", ()) if isinstance(i, int)] for g in groups if isinstance(g, dict)]
    masters = _masters(optimizer, ids)
    return by_id, ids, masters, [[_shape(by_id.get(i), masters.get(i)) for i in group] for group in ids]


def stage_names(optimizers: Sequence[Any], layers: Sequence[Shapes], shared: Shapes) -> list[Shapes] | None:
    """Which layers each pipeline stage has, if there is exactly one way to cut them into consecutive runs so that every
    stage's optimizer fits its run. ``shared``: what any stage may have besides, first (runtime/pipe/module.py registers
    tied modules before the layers)."""
    groups = [_numbered(o)[3] if isinstance(o, Mapping) else [] for o in optimizers]
    runs: list[list[Shapes]] = []
    tries = 0

    def extend(at: int, chosen: list[Shapes]) -> None:
        nonlocal tries
        stage = len(chosen)
        if len(runs) > 1 or tries > 10_000:
            return
        if stage == len(groups):
            if at == len(layers):
                runs.append(list(chosen))
            return
        count = sum(map(len, groups[stage]))
        own: Shapes = {}
        for end in range(at + 1, len(layers) - (len(groups) - stage - 1) + 1):
            own = {**own, **layers[end - 1]}
            for names in ({**shared, **own}, own) if shared else (own,):
                # every layer of a run but its last few has to be needed: a longer run than that fits nothing better
                if count <= len(names) <= 2 * count + 8:
                    tries += 1
                    if assign(list(names.items()), groups[stage]) is not None:
                        extend(end, [*chosen, names])
            if len(own) > 2 * count + 8:
                break

    extend(0, [])
    return runs[0] if len(runs) == 1 and tries <= 10_000 else None


def _masters(optimizer: Mapping[Any, Any], ids: Sequence[Sequence[int]]) -> dict[int, StoredTensor]:
    """The fp32 copies of FP16_UnfusedOptimizer: a list per group, in the order of its parameters."""
    groups = optimizer.get("fp32_groups")
    if not isinstance(groups, list) or len(groups) != len(ids):
        return {}
    return {
        i: t
        for group, numbers in zip(groups, ids, strict=True)
        if isinstance(group, list) and len(group) == len(numbers)
        for i, t in zip(numbers, group, strict=True)
        if isinstance(t, StoredTensor)
    }


def _shape(state: Any, master: StoredTensor | None) -> Shape | None:
    """The shape of a parameter, as far as its states show it: all that are no single number agree."""
    tensors = [master] if master is not None else []
    tensors += [t for t in state.values() if isinstance(t, StoredTensor)] if isinstance(state, dict) else []
    shapes = {t.shape for t in tensors if t.shape != ()}
    return next(iter(shapes)) if len(shapes) == 1 else (() if tensors and not shapes else None)


def assign(names: Sequence[tuple[str, Shape]], groups: Sequence[Sequence[Shape | None]]) -> list[list[str]] | None:
    """Names for the parameters of each group, if there is exactly one way: each group lists some of the names, in
    their order, with its shapes (None: not known); no name stands in two; some may stand in none (frozen, buffers).
    None otherwise.

    >>> assign([("w", (2, 3)), ("frozen", (9,)), ("b", (2,))], [[(2, 3)], [(2,)]])
    [['w'], ['b']]
    >>> assign([("a", (2,)), ("b", (2,))], [[(2,)]]) is None
    True
    """
    goal = tuple(map(len, groups))
    # For every name, the states (how many of each group are named) from which the goal can be reached, counted to 2.
    ahead: list[set[tuple[int, ...]]] = [{(0,) * len(groups)}]
    tries = 0
    for _, shape in names:
        following = set(ahead[-1])
        for state in ahead[-1]:
            for g, wanted in enumerate(groups):
                if state[g] < len(wanted) and wanted[state[g]] in (shape, None):
                    following.add((*state[:g], state[g] + 1, *state[g + 1 :]))
        tries += len(following)
        if tries > _TRIES:
            return None
        ahead.append(following)
    if goal not in ahead[-1]:
        return None
    ways = {goal: 1}
    choice: list[dict[tuple[int, ...], int]] = []  # for every name: state before it -> the group that takes it, or -1
    for at in range(len(names) - 1, -1, -1):
        shape = names[at][1]
        before: dict[tuple[int, ...], int] = {}
        took: dict[tuple[int, ...], int] = {}
        for state in ahead[at]:
            options = [(-1, state)]
            for g, wanted in enumerate(groups):
                if state[g] < len(wanted) and wanted[state[g]] in (shape, None):
                    options.append((g, (*state[:g], state[g] + 1, *state[g + 1 :])))
            for g, after in options:
                if after in ways:
                    before[state] = min(2, before.get(state, 0) + ways[after])
                    took[state] = g
        ways = before
        choice.append(took)
    start = (0,) * len(groups)
    if ways.get(start) != 1:
        return None
    result: list[list[str]] = [[] for _ in groups]
    state = start
    for (name, _), took in zip(names, reversed(choice), strict=True):
        g = took[state]
        if g >= 0:
            result[g].append(name)
            state = (*state[:g], state[g] + 1, *state[g + 1 :])
    return result
