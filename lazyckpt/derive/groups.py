"""Optimizer options by parameter names, as far as a checkpoint has them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from ..core.specs import TensorSpec
from ..lazy import LazyArray

_GROUPS_DEPTH = 5
# torch/optim/adam.py, adamw.py: defaults of options that state dicts of other Adam implementations lack
_ADAM = {
    "amsgrad": False, "maximize": False, "foreach": None, "capturable": False, "differentiable": False, "fused": None,
    "decoupled_weight_decay": True,
}  # fmt: skip
_WEIGHTS = ("weights", "fp32")


class Part(Protocol):
    """The tensors of one state of a view."""

    def __iter__(self) -> Iterator[str]: ...
    def __getitem__(self, name: str, /) -> LazyArray: ...
    def items(self) -> Iterable[tuple[str, LazyArray]]: ...
    def once(self) -> tuple[Mapping[str, LazyArray], Mapping[str, str]]: ...


class Training(Protocol):
    """The part of a view that this module uses."""

    @property
    def meta(self) -> Mapping[str, Any]: ...
    @property
    def states(self) -> Mapping[str, Part]: ...


def param_groups(view: Training, complete: bool = True) -> list[dict[str, Any]]:
    """Return the parameter groups with names in ``params``; [] if the checkpoint does not have them. ``complete`` adds
    the options of torch's Adam that other implementations (DeepSpeed's, apex') lack.

    Parameter numbers are resolved to names with DeepSpeed's flat groups (``param_shapes``), with states that have both
    a number and a name, or with the names that the optimizer was given.
    """
    made = [
        {**{k: v for k, v in group.items() if k not in ("params", "param_names")}, "params": names}
        for group, names in _named(view)
    ]
    if complete and "exp_avg" in view.states and "exp_avg_sq" in view.states:
        made = [{**_ADAM, **group} for group in made]
    return made


def unnamed(view: Training) -> bool:
    """Return whether the optimizer has parameters that `param_groups` cannot name: numbers without states."""
    if isinstance(view.meta.get("param_shapes"), list):
        return False
    return any(len(group["params"]) > len(names) for group, names in _named(view))


def _named(view: Training) -> list[tuple[dict[str, Any], list[str]]]:
    """Return the groups, each with the names of its parameters."""
    shapes, numbers = view.meta.get("param_shapes"), _numbers(view)
    for groups in _found(view.meta, 0):
        named = [(group, list(_names(group, shapes, numbers))) for group in groups]
        if any(names for _, names in named):
            return named
    return []


class Steps(NamedTuple):
    """An optimizer's step count: ``done`` steps. ``option`` says whether the count is in the groups, ``whole`` whether
    it is an int."""

    done: float
    option: bool = False
    whole: bool = False


def step_of(view: Training) -> Steps | None:
    """Return the optimizer's step count if it is not a tensor: from an option of its groups, a number among its states,
    or the training's step count."""
    for groups in _found(view.meta, 0):
        for group in groups:
            step = group.get("step")
            if isinstance(step, int | float):
                return Steps(float(step), option=True)
    for state in below(view.meta, "state", 0):
        for entry in state.values() if isinstance(state, Mapping) else ():
            step = entry.get("step") if isinstance(entry, Mapping) else None
            if isinstance(step, int | float):
                return Steps(float(step), whole=isinstance(step, int))
    step = view.meta.get("step")
    return Steps(float(step)) if type(step) is int else None


def _found(value: Any, depth: int) -> Iterator[list[dict[str, Any]]]:
    """Yield every list of groups in nested dicts and lists, outer ones first."""
    for groups in below(value, "param_groups", depth):
        if isinstance(groups, list) and groups and all(isinstance(g, dict) and _listed(g) for g in groups):
            yield groups


def below(value: Any, key: str, depth: int) -> Iterator[Any]:
    """Yield the values of a key in nested dicts and lists, outer ones first."""
    inner: Iterable[Any] = ()
    if isinstance(value, Mapping):
        if key in value:
            yield value[key]
        inner = value.values()
    elif isinstance(value, list):
        inner = value[:8]
    if depth < _GROUPS_DEPTH:
        for part in inner:
            yield from below(part, key, depth + 1)


def _listed(group: Mapping[str, Any]) -> bool:
    return isinstance(group.get("params"), list)


def _names(group: Mapping[str, Any], shapes: Any, numbers: Mapping[str, str]) -> Iterator[str]:
    given = group.get("param_names")
    names = given if isinstance(given, list) and len(given) == len(group["params"]) else [None] * len(group["params"])
    for param, name in zip(group["params"], names, strict=True):
        if type(param) is str:
            yield param
        elif isinstance(shapes, list) and type(param) is int and param < len(shapes):
            flat = shapes[param]
            yield from map(str, flat if isinstance(flat, Mapping) else ())
        elif str(param) in numbers:
            yield numbers[str(param)]
        elif type(name) is str:
            yield name


def _numbers(view: Training) -> dict[str, str]:
    """Return number -> name, from raw names of states that end like "state.NUMBER.exp_avg"."""
    found: dict[str, str] = {}
    for state, tensors in view.states.items():
        if state in _WEIGHTS:
            continue
        for name, tensor in tensors.items():
            raw = (tensor.spec.stored_as or "").removesuffix(f".{state}")
            head, _, number = raw.rpartition(".")
            if number.isdecimal() and head.endswith("state"):
                found.setdefault(number, name)
    return found


# -- The options of each parameter, as far as the groups tell them.


class Recorded(NamedTuple):
    """What the checkpoint records of the options of parameters."""

    named: Mapping[str, Mapping[str, Any]]
    """Name, or raw name -> options of the parameter's group."""
    others: tuple[Mapping[str, Any], ...]
    """The options of the groups whose parameters have no known names."""
    step: float | None
    """The number of steps, if it is recorded as a number and is the same for all parameters."""

    def of(self, name: str, raw: str, ndim: int) -> tuple[dict[str, Any], dict[str, list[Any]], bool]:
        """Return the options of a parameter, those that the checkpoint does not decide, with their values, and whether
        Megatron's rule has told the parameter's group.

        Megatron's groups do not list names. megatron/core/optimizer/__init__.py `_get_param_groups` puts biases and
        parameters of one dimension into groups without weight decay (``wd_mult`` 0), unless the training script passes
        another rule.
        """
        own = self.named.get(name) or self.named.get(raw)
        groups = [own] if own is not None else list(self.others)
        multiples = {group.get("wd_mult") for group in groups}
        by_rule = own is None and multiples == {0.0, 1.0}
        if by_rule:
            still = 0.0 if ndim == 1 or name.endswith(".bias") else 1.0
            groups = [group for group in groups if group["wd_mult"] == still]
        known: dict[str, Any] = {}
        differing: dict[str, list[Any]] = {}
        for option in dict.fromkeys(key for group in groups for key in group):
            values = {repr(group.get(option, _ABSENT)): group.get(option, _ABSENT) for group in groups}
            if len(values) == 1:
                known[option] = next(iter(values.values()))
            else:
                differing[option] = [value for value in values.values() if value is not _ABSENT]
        return known, differing, by_rule


_ABSENT = object()


def recorded(meta: Mapping[str, Any], states: Mapping[str, Mapping[str, TensorSpec]]) -> Recorded:
    """Return the options that a checkpoint records.

    Parameters
    ----------
    meta
        The view's ``meta``.
    states
        State -> name -> tensor, by full names.
    """
    named: dict[str, dict[str, Any]] = {}
    others: list[Mapping[str, Any]] = []
    lists = list(_lists(meta, "", 0))
    for path, groups in lists:
        shapes = meta.get("param_shapes")
        numbers = _numbered(states, path if len(lists) > 1 else "")
        for group in groups:
            options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
            names = list(_names(group, shapes, numbers)) if _listed(group) else []
            if not names or (not isinstance(shapes, list) and len(names) < len(group["params"])):
                others.append(options)
            for name in names:
                if repr(named.setdefault(name, options)) != repr(options):  # of two optimizers: what they agree on
                    named[name] = {k: v for k, v in options.items() if repr(named[name].get(k, _ABSENT)) == repr(v)}
    for flat in _flat(meta, 0):
        for key, value in flat.items():
            name, _, option = key.removeprefix("param_groups.").rpartition(".")
            named.setdefault(name, {})[option] = value
    steps = {
        float(entry["step"])
        for state in below(meta, "state", 0)
        for entry in (state.values() if isinstance(state, Mapping) else ())
        if isinstance(entry, Mapping) and isinstance(entry.get("step"), int | float)
    }
    return Recorded(named, tuple(others), steps.pop() if len(steps) == 1 else None)


def _lists(value: Any, path: str, depth: int) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield every list of groups with the dotted path of the optimizer that it is in, outer ones first."""
    if not isinstance(value, Mapping | list) or depth > _GROUPS_DEPTH:
        return
    groups = value.get("param_groups") if isinstance(value, Mapping) else None
    if isinstance(groups, list) and groups and all(isinstance(g, dict) for g in groups):
        yield path, groups
    for key, part in value.items() if isinstance(value, Mapping) else enumerate(value[:64]):
        if key not in ("param_groups", "state"):
            yield from _lists(part, f"{path}.{key}" if path else str(key), depth + 1)


def _flat(value: Any, depth: int) -> Iterator[dict[str, Any]]:
    """Yield flattened groups, as torch's ``flatten_optimizer_state_dict`` writes them: ``param_groups.NAME.OPTION``."""
    if isinstance(value, Mapping) and depth <= _GROUPS_DEPTH:
        found = {k: v for k, v in value.items() if isinstance(k, str) and k.startswith("param_groups.")}
        if found:
            yield found
        for part in value.values():
            yield from _flat(part, depth + 1)


def _numbered(states: Mapping[str, Mapping[str, TensorSpec]], path: str) -> dict[str, str]:
    """Return number -> name, from the raw names of states: "state.NUMBER.exp_avg", below ``path`` if there is one."""
    found: dict[str, str] = {}
    for state, tensors in states.items():
        if state in _WEIGHTS:
            continue
        for name, spec in tensors.items():
            head, _, number = (spec.stored_as or "").removesuffix(f".{state}").rpartition(".")
            if number.isdecimal() and (head == f"{path}.state" if path else head.endswith("state")):
                found.setdefault(number, name)
    return found
