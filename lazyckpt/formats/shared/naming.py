"""Classification of the tensors of a training state: weights, copies of them (an average), and optimizer states.

A name is not enough, because names contain dots; the path in the state dict decides. Models are everything below
"model", "state_dict" and the like, or else everything that does not belong to an optimizer. Optimizers:
torch/optim/optimizer.py `state_dict` ("optimizer", "state", NUMBER, "exp_avg"),
torch/distributed/checkpoint/state_dict.py `_get_optim_state_dict` (names instead of numbers), or the same flattened
(`_flatten_optim_state_dict`: "optim", "state.NAME.exp_avg").
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from ...core.box import Shape
from ...core.dtypes import U8
from ...core.names import free
from ...core.specs import TensorSpec, renamed
from ...core.units import plural
from ...errors import Problem, only_one, some
from ...io.containers.pickle.plain import Path
from .numbering import CONVENTIONS, MODULES, Assignment, Convention, Wanted, agreed, assign_by_shape, possible_shapes
from .wrappers import by_names, label, owner

MODELS = ("model", "state_dict", "module", "model_state_dict", "model_state")
# composer/utils/checkpoint.py `_save_checkpoint`: random states beside the level of "state", which has all the rest;
# verl/utils/checkpoint/checkpoint_manager.py `get_rng_state`
_RANDOM = "rng"
# torchtitan/components/checkpoint.py: these keys are at the same level as the model's names. They could also be
# names of modules: see `_modules`
_NO_MODELS = ("train_state", "lr_scheduler", "dataloader", _RANDOM)
# bytes of a generator's state: aten/src/ATen/CPUGeneratorImpl.cpp `get_state`, aten/src/ATen/cuda/CUDAGeneratorImpl.cpp
_RANDOM_STATES = ((5056,), (16,))
# such as rng, cuda_rng_state, random, torch_random_states, not random_mask
_RANDOM_NAME = re.compile(r"(?:^|\.)(?:[^.]*rng[^.]*|(?:[^.]*_)?random(?:_?states?)?)$", re.IGNORECASE)

Slots = Mapping[str, Mapping[str, TensorSpec]]  # parameter -> name of the state -> tensor


class Numbered(NamedTuple):
    """The numbered parameters of an optimizer: those with states, those of each group, and the names that the optimizer
    received, if any."""

    numbers: list[str]
    ids: list[list[str]]
    names: list[str] | None


class Known(NamedTuple):
    """The name of a numbered parameter, and the evidence for it."""

    name: str
    by: str


Names = dict[tuple[Path, str], Known]  # (optimizer, number) -> name

# The evidence for the names of numbered parameters. "order": the weights are in the order of the modules; "modules":
# the optimizer's parameters are, too, by the code of their writer; "shape": the weights are in another order;
# "nothing": the weights differ from the parameters that the optimizer had
By = Literal["order", "modules", "shape", "nothing"]
_WHY = {
    "modules": "order and shapes leave more than one way to name them, or none",
    "order": "order and shapes leave more than one way to name them, or none",
    "shape": "shapes leave more than one way to name them (the weights' file does not keep their order)",
    "nothing": "no way is known to name them (the weights were converted when they were saved)",
}


@dataclass(slots=True)
class Sorted:
    """The result of `sort`."""

    states: dict[str, dict[str, TensorSpec]] = field(default_factory=dict)
    """Name of the state -> name of the parameter -> tensor; "weights" is first, if there are any."""
    rest: list[str] = field(default_factory=list)
    """Raw names of tensors that belong to no state."""
    problems: list[Problem] = field(default_factory=list)


def sort(
    tensors: Mapping[str, tuple[Path, TensorSpec]],
    objects: Sequence[Path],
    lookup: Callable[[Path], Any],
    models: Sequence[str] = (),
    tied: Container[str] = (),
    by: By = "order",
) -> Sorted:
    """Sort the tensors of a training state into states.

    Parameters
    ----------
    tensors
        Raw name -> path and tensor, in the order of the state dict.
    objects
        Paths of the objects other than tensors.
    lookup
        Return the object at a path; None if there is none.
    models
        Top keys of the models in the state dict, if known. If there are several, each name starts with its model's key.
    tied
        Raw names of tensors that also have another name.
    by
        The evidence for the names of an optimizer's numbered parameters.
    """
    paths = [path for path, _ in tensors.values()]
    grouped_at_root = any(str(p[0]).startswith("param_groups") for p in objects)
    if not models and not grouped_at_root and all(len(path) == 1 for path in paths):
        # the most common kind of file: a plain state dict
        alone = {str(path[0]): renamed(spec, str(path[0])) for path, spec in tensors.values()}
        return Sorted({"weights": alone} if alone else {})
    doubtful = [item for item in tensors.values() if item[0] and item[0][0] in _NO_MODELS]
    excluded = frozenset(_NO_MODELS) - _modules(doubtful, objects)  # top keys that are not the names of modules
    skip = 0 if models else _wrapper(paths, objects, excluded)
    if not models:
        models = [m for m in MODELS if any(p[skip : skip + 1] == (m,) and len(p) > skip + 1 for p in paths)][:1]
    grouped = {
        p[:n] for p in (*paths, *objects) for n in range(skip, len(p)) if str(p[n]).split(".")[0] == "param_groups"
    }

    weights: dict[str, TensorSpec] = {}
    slots: dict[Path, dict[str, dict[str, TensorSpec]]] = {}  # optimizer -> parameter -> state
    flat: list[tuple[Path, str, TensorSpec]] = []
    random = _random_states(tensors)
    doubled: set[str] = set()
    beside: list[str] = []
    found = Sorted()
    for key, (path, spec) in tensors.items():
        if skip and path[0] == _RANDOM and _RANDOM in excluded:
            beside.append(key)
            continue
        root = _optimizer(path, skip, grouped)
        if root is not None and path[len(root)] == "state" and len(path) > len(root) + 2:
            name, state = str(path[len(root) + 1]), ".".join(map(str, path[len(root) + 2 :]))
            slots.setdefault(root, {}).setdefault(name, {})[state] = spec
        elif root is not None:
            flat.append((root, ".".join(map(str, path[len(root) :])).removeprefix("state."), spec))
        else:
            below = None if key in random else _of_a_model(path, skip, models, excluded)
            if below is None:
                found.rest.append(key)
                continue
            name = free(".".join(map(str, below)), weights)
            weights[name] = renamed(spec, name)
            if not models and len(path) > 1 and path[0] in _NO_MODELS:
                weights[name] = replace(weights[name], rule=f"{path[0]!r} holds what the state dict of a module holds")
            if key in tied:
                doubled.add(name)
    lengths = sorted({len(name) for name in weights}) if flat else []
    for root, text, spec in flat:
        name, state = _split(text, weights, lengths)
        if not name:  # a state of the whole optimizer (Megatron's common_step)
            found.rest.append(spec.name)
            continue
        slots.setdefault(root, {}).setdefault(name, {})[state] = spec

    if weights:
        found.states["weights"] = weights
    candidates = [(n, s.shape) for n, s in weights.items() if n not in doubled and _trainable(n, weights)]
    others = _others(tensors, skip, found.rest)
    owners = {root: owner(root, others) for root in slots}
    numbered = _numbered(slots, lookup, weights)
    mine = {root: slots[root] for root in slots if owners[root] is None}
    names = _without_disputed(_numbers(mine, candidates, numbered, by))
    for top, table in others.items():
        trainable = [(n, s.shape) for n, s in table.items() if _trainable(n, table)]
        names |= _numbers({root: slots[root] for root in slots if owners[root] == top}, trainable, numbered, by)
    lost = _lost(names, numbered, weights, by, found.problems)
    for root, parameters in slots.items():
        of = owners[root]
        for parameter, states in parameters.items():
            named = _in_model(parameter, root, weights, models) if of is None else f"{of}.{parameter}"
            known = names.get((root, parameter))
            name = known.name if known else lost.get((root, parameter), named)
            rule = f"number {parameter} of the optimizer; named by {known.by}" if known else ""
            for state, spec in states.items():
                table = found.states.setdefault(state if state != "weights" else "state.weights", {})
                if name in table:
                    line = f"{spec.name!r} is a second {state} of {name!r}: it is in view.stored only"
                    found.problems.append(Problem("duplicate-tensor", line, name))
                else:
                    spec = renamed(spec, name)
                    table[name] = replace(spec, rule=rule) if rule and not spec.rule else spec
    found.states |= _copies(tensors, skip, weights, found)
    found.rest += beside
    found.problems += _unsorted(tensors, objects, skip, found.rest)
    whole = {state: any(s.shape for s in table.values()) for state, table in found.states.items()}
    found.states = dict(sorted(found.states.items(), key=lambda item: item[0] != "weights" and not whole[item[0]]))
    return found


def _modules(tensors: Iterable[tuple[Path, TensorSpec]], objects: Sequence[Path], level: int = 0) -> set[str | int]:
    """Return the keys at a level of the paths that hold what the state dict of a module holds: tensors under names, one
    of which can be a parameter, and no other objects. Random states, counters and learning rates are none of these."""
    held: dict[str | int, bool] = {}
    foreign = (path for path in objects if len(path) > level and not _of_a_state_dict(path[level + 1 :]))
    unlike = {path[level] for path in foreign}
    for path, spec in tensors:
        if len(path) <= level + 1 or not all(isinstance(part, str) for part in path):
            unlike |= set(path[level : level + 1])
        else:
            held[path[level]] = held.get(path[level], False) or _looks_trained(spec)
    return {key for key, trained in held.items() if trained} - unlike


def _random_states(tensors: Mapping[str, tuple[Path, TensorSpec]]) -> set[str]:
    """Return the raw names of states of torch's generators: by names, dtype and size. What is below a name of them
    beside a possible parameter is of a module that has this name."""
    likely = {key: path for key, (path, spec) in tensors.items() if spec.dtype == U8 and spec.shape in _RANDOM_STATES}
    named = {key: [name for name in _prefixes(path) if _RANDOM_NAME.search(name)] for key, path in likely.items()}
    if not any(named.values()):
        return set()
    modules = {name for path, spec in tensors.values() if _looks_trained(spec) for name in _prefixes(path)}
    return {key for key, names in named.items() if not modules.issuperset(names)}


def _prefixes(path: Path) -> list[str]:
    """Return the dotted names of what a tensor is in, and its own."""
    parts = ".".join(map(str, path)).split(".")
    return [".".join(parts[: n + 1]) for n in range(len(parts))]


def _of_a_state_dict(path: Path) -> bool:
    """Return whether an object's path is one that `torch.nn.Module.state_dict` makes: the versions of modules, or an
    extra state (torch/nn/modules/module.py `_EXTRA_STATE_KEY_SUFFIX`)."""
    return "_metadata" in path or str(path[-1:] and path[-1]).endswith("_extra_state")


def _looks_trained(spec: TensorSpec) -> bool:
    """Return whether a tensor has the dtype and dimensions of a parameter or a moment, not of a counter or a rate."""
    return bool(spec.shape) and (spec.dtype.is_floating_point or spec.dtype.is_complex)


def _of_a_model(path: Path, skip: int, models: Sequence[str], excluded: Container[Any]) -> Path | None:
    """Return the path of a weight within its model, with the model's key if there are several; None if it is not a
    weight. ``excluded`` are top keys that are not the names of modules."""
    nested = len(path) > skip + 1
    if not models:
        return None if nested and path[skip] in excluded else path
    if not nested or path[skip] not in models:
        return None
    return path[skip:] if len(models) > 1 else path[skip + 1 :]


def _in_model(name: str, root: Path, weights: Mapping[str, TensorSpec], models: Sequence[str]) -> str:
    """Prefix a name with its model: the one with the optimizer's number, or the only one that has the name."""
    if name in weights or len(models) < 2:
        return name
    having = [model for model in models if f"{model}.{name}" in weights]
    number = str(root[-1]).rpartition("_")[2]
    same = [m for m in having if (m.rpartition("_")[2] if "_" in m else "0") == (number if number.isdecimal() else "0")]
    chosen = same or having
    return f"{chosen[0]}.{name}" if len(chosen) == 1 else name


def _copies(
    tensors: Mapping[str, tuple[Path, TensorSpec]], skip: int, weights: Mapping[str, TensorSpec], found: Sorted
) -> dict[str, dict[str, TensorSpec]]:
    """Move state dicts with names and shapes of the weights ("ema": {...}) out of the rest; return them as states."""
    groups: dict[str, dict[str, TensorSpec]] = {}
    for key in found.rest:
        path, spec = tensors[key]
        if len(path) > skip + 1:
            below = skip + (2 if path[skip + 1] in MODELS and len(path) > skip + 2 else 1)
            table = groups.setdefault(str(path[skip]), {})
            table[free(".".join(map(str, path[below:])), table)] = spec
    copies = {
        top: {name: renamed(spec, name) for name, spec in table.items()}
        for top, table in groups.items()
        if top not in found.states and all(n in weights and weights[n].shape == s.shape for n, s in table.items())
    }
    found.rest = [key for key in found.rest if str(tensors[key][0][skip]) not in copies or len(tensors[key][0]) == 1]
    return copies


def _unsorted(
    tensors: Mapping[str, tuple[Path, TensorSpec]], objects: Sequence[Path], skip: int, rest: Sequence[str]
) -> list[Problem]:
    """Return a problem if tensors that are in no state look like those of a module."""
    tops = _modules([tensors[key] for key in rest], objects, skip)
    lost = [key for key in rest if tensors[key][0][skip : skip + 1] and tensors[key][0][skip] in tops] if tops else []
    if not lost:
        return []
    line = (
        f"{plural(len(lost), 'tensor')} below {some(sorted(map(repr, tops)))} may be weights of another model, or in a "
        "layout of optimizers that is not known: they are in view.stored only"
    )
    return [Problem("unsorted-tensor", line, only_one(lost))]


def _wrapper(paths: Sequence[Path], objects: Sequence[Path], excluded: Container[Any]) -> int:
    """Return the number of outer levels around the state dict: 1 for {"app": {"model": ..., "optim": ...}}, and for
    {"state": {"model": ..., "optimizers": ...}, "rng": ...} if "rng" is one of ``excluded``."""
    random = ((_RANDOM,),) if _RANDOM in excluded else ()
    everything = [p for p in (*paths, *objects) if p[:1] not in random]
    depth = 0
    while everything and all(len(p) > depth + 1 and p[depth] == everything[0][depth] for p in everything):
        top = everything[0][depth]
        if (
            top in MODELS
            or str(top).startswith("optim")
            or not any(p[depth + 1] in MODELS for p in paths if len(p) > depth + 2 and p[:1] not in random)
        ):
            break
        depth += 1
    return depth


def _optimizer(path: Path, skip: int, grouped: set[Path]) -> Path | None:
    """Return the path of the optimizer that a tensor is a state of, which has param_groups or a name like "optim"."""
    for n in range(skip, min(skip + 3, len(path))):
        part, root = path[n], path[:n]
        state = part == "state" and len(path) > n + 1
        flattened = isinstance(part, str) and part.startswith("state.") and len(path) == n + 1
        named = n > skip and str(root[skip]).startswith("optim")
        if (state or flattened) and (root in grouped or named):
            return root
    return None


def _split(text: str, weights: Mapping[str, TensorSpec], lengths: Sequence[int]) -> tuple[str, str]:
    """Split ``layers.0.weight.exp_avg`` into the parameter and the state, whose name may have dots, too. ``lengths``
    are the distinct lengths of the weights' names, ascending."""
    for length in lengths:
        if text[length : length + 1] == "." and text[:length] in weights:
            return text[:length], text[length + 1 :]
    if text.split(".")[0].isdecimal():
        name, _, state = text.partition(".")
        return name, state
    name, _, state = text.rpartition(".")
    return name, state


def _trainable(name: str, weights: Mapping[str, TensorSpec]) -> bool:
    """Return whether a tensor can be a parameter: not an integer, nor a statistic of a BatchNorm
    (torch/nn/modules/batchnorm.py `_NormBase`: three buffers)."""
    module, _, last = name.rpartition(".")
    statistics = last in ("running_mean", "running_var") and f"{module}.num_batches_tracked" in weights
    dtype = weights[name].dtype
    return (dtype.is_floating_point or dtype.is_complex) and not statistics


def _others(
    tensors: Mapping[str, tuple[Path, TensorSpec]], skip: int, rest: Sequence[str]
) -> dict[str, dict[str, TensorSpec]]:
    """Return further state dicts beside the model's: top key -> name, which starts with the top key -> tensor."""
    found: dict[str, dict[str, TensorSpec]] = {}
    for key in rest:
        path, spec = tensors[key]
        if len(path) > skip + 1:
            table = found.setdefault(str(path[skip]), {})
            table[free(".".join(map(str, path[skip:])), table)] = spec
    return found


def _numbers(
    slots: Mapping[Path, Slots],
    candidates: Sequence[tuple[str, Shape]],
    numbered: Mapping[Path, Numbered],
    by: By,
) -> Names:
    """Return the names of numbered parameters, chosen from the candidates, as far as the evidence determines them."""
    names: Names = {}
    wanted: dict[Path, list[list[Wanted]]] = {}
    shapes = dict(candidates)
    for root, parameters in slots.items():
        if root not in numbered:
            continue
        ids, listed = numbered[root].ids, numbered[root].names
        shown: list[list[Wanted]] = [
            [possible_shapes({k: s.shape for k, s in parameters.get(i, {}).items()}) for i in m] for m in ids
        ]
        if listed is not None:  # the optimizer received named parameters
            flat = [i for m in ids for i in m]
            given = by_names(listed, [w for m in shown for w in m], shapes, root)
            names |= {(root, i): Known(n, "param_names") for i, n in zip(flat, given or (), strict=False)}
        elif by != "nothing":
            wanted[root] = shown
    for root, assigned in _assigned(candidates, wanted, by).items():
        for m, group in zip(numbered[root].ids, assigned.names, strict=True):
            names |= {(root, i): Known(n, assigned.by) for i, n in zip(m, group, strict=True) if n is not None}
    return names


def _numbered(
    slots: Mapping[Path, Slots], lookup: Callable[[Path], Any], weights: Container[str]
) -> dict[Path, Numbered]:
    """Return the optimizers that number their parameters. A number may also be a name (torch.nn.ParameterList); the
    groups distinguish the two."""
    found = {}
    for root, parameters in slots.items():
        if not any(p.isdecimal() for p in parameters):
            continue
        listed_groups = lookup((*root, "param_groups"))
        groups = [g for g in listed_groups if isinstance(g, dict)] if isinstance(listed_groups, list) else []
        ids = [[str(i) for i in m if type(i) is int] if isinstance(m := g.get("params"), list) else [] for g in groups]
        members = {i for m in ids for i in m}
        numbers = [p for p in parameters if p in members or (p.isdecimal() and p not in weights)]
        if not numbers:
            continue
        listed = [n if isinstance(n := g.get("param_names"), list) else [] for g in groups]
        complete = all(n and len(n) == len(m) for n, m in zip(listed, ids, strict=True))
        named = [str(n) for ns in listed for n in ns] if groups and complete else None
        found[root] = Numbered(numbers, ids, named)
    return found


def _lost(
    names: Names,
    numbered: Mapping[Path, Numbered],
    weights: Container[str],
    by: By,
    problems: list[Problem],
) -> dict[tuple[Path, str], str]:
    """Return the keys of parameters that stay under their numbers, and add a problem.

    A number is prefixed with the optimizer's path if it is also a name, or a number of another optimizer."""
    lost = {root: [i for i in of.numbers if (root, i) not in names] for root, of in numbered.items()}
    count = sum(map(len, lost.values()))
    if count:
        total = sum(len(of.numbers) for of in numbered.values())
        line = (
            f"the optimizer numbers its parameters; for {count} of {total} {_WHY[by]}: their states stay under their "
            "numbers"
        )
        problems.append(Problem("undecided-name", line))
    shared = sum(map(bool, lost.values())) > 1
    return {
        (root, i): ".".join(map(str, (*root, i))) if shared or any(i in weights for i in table) else i
        for root, table in lost.items()
        for i in table
    }


def _without_disputed(names: Names) -> Names:
    """Remove the names of optimizers that claim the same names as others.

    At most one of these belongs to the model: the one with a generic name ("optimizer" beside "teacher_optimizer")."""
    claims: dict[str, set[Path]] = {}
    for (root, _), known in names.items():
        claims.setdefault(known.name, set()).add(root)
    losing: set[Path] = set()
    for roots in claims.values():
        if len(roots) > 1:
            plain = [root for root in roots if not any(label(part) for part in root)]
            losing |= roots - (set(plain) if len(plain) == 1 else set())
    return {(root, i): known for (root, i), known in names.items() if root not in losing}


def _assigned(
    candidates: Sequence[tuple[str, Shape]], wanted: Mapping[Path, list[list[Wanted]]], by: By
) -> dict[Path, Assignment]:
    """Return the names of the parameters of each optimizer's groups, as far as the evidence determines them."""
    groups = [group for table in wanted.values() for group in table]
    conventions = (MODULES,) if by == "modules" else CONVENTIONS
    together = None
    if by == "shape":
        together = assign_by_shape(candidates, groups)
    elif len(wanted) > 1 and sum(map(len, groups)) == len(candidates):
        # several optimizers of one model that cover all parameters: no parameter is in two of them
        together = agreed(candidates, groups, conventions)
        together = together if together is not None and together.complete else None
    if together is not None:
        rows = iter(together.names)
        return {root: Assignment([next(rows) for _ in table], together.by) for root, table in wanted.items()}
    if by == "shape":
        return {}
    return {root: _in_order(candidates, table, conventions) for root, table in wanted.items()}


def _in_order(
    candidates: Sequence[tuple[str, Shape]], table: Sequence[Sequence[Wanted]], conventions: Sequence[Convention]
) -> Assignment:
    """Name the parameters by their order, or by their shapes if no known order fits and the optimizer has all
    parameters. (If it has fewer, it may belong to another model that was not saved.)"""
    found = agreed(candidates, table, conventions)
    if found is None and sum(map(len, table)) == len(candidates):
        found = assign_by_shape(candidates, table)
    return Assignment([[None] * len(group) for group in table]) if found is None else found
