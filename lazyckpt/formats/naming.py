"""What the tensors of a saved training state are: weights, copies of them (an average), or optimizer states.

A name alone does not tell (names have dots): where it stood in the state dict does. Models: whatever stands below
"model", "state_dict" and the like; else everything that is no optimizer's. Optimizers: torch/optim/optimizer.py
`state_dict` ("optimizer", "state", NUMBER, "exp_avg"), torch/distributed/checkpoint/state_dict.py
`_get_optim_state_dict` (names for numbers), or the same flattened (`_flatten_optim_state_dict`: "optim",
"state.NAME.exp_avg").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..core.index import TensorSpec, renamed
from ..io.plain import Path
from .numbering import assign, possible_shapes

MODELS = ("model", "state_dict", "module", "model_state_dict", "model_state")


@dataclass(slots=True)
class Sorted:
    """``states``: name of the state -> name of the parameter -> tensor; "weights" first, if there are any. ``rest``:
    raw names of what is neither."""

    states: dict[str, dict[str, TensorSpec]] = field(default_factory=dict)
    rest: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def sort(
    tensors: Mapping[str, tuple[Path, TensorSpec]], objects: Sequence[Path], lookup: Callable[[Path], Any]
) -> Sorted:
    """``tensors``: raw name -> path and tensor, in the order of the state dict. ``objects``: the paths of what is no
    tensor. ``lookup`` reads the object at a path (None if there is none)."""
    paths = [path for path, _ in tensors.values()]
    if all(len(path) == 1 for path in paths) and not any(str(p[0]).startswith("param_groups") for p in objects):
        # a state dict and no more: the common file
        alone = {str(path[0]): renamed(spec, str(path[0])) for path, spec in tensors.values()}
        return Sorted({"weights": alone} if alone else {})
    skip = _wrapper(paths, objects)
    model = next((m for m in MODELS if any(p[skip : skip + 1] == (m,) and len(p) > skip + 1 for p in paths)), None)
    grouped = {
        p[:n] for p in (*paths, *objects) for n in range(skip, len(p)) if str(p[n]).split(".")[0] == "param_groups"
    }

    weights: dict[str, TensorSpec] = {}
    slots: dict[Path, dict[str, dict[str, TensorSpec]]] = {}  # optimizer -> parameter -> state
    flat: list[tuple[Path, str, TensorSpec]] = []
    found = Sorted()
    for key, (path, spec) in tensors.items():
        root = _optimizer(path, skip, grouped)
        if root is not None and path[len(root)] == "state" and len(path) > len(root) + 2:
            name, state = str(path[len(root) + 1]), ".".join(map(str, path[len(root) + 2 :]))
            slots.setdefault(root, {}).setdefault(name, {})[state] = spec
        elif root is not None:
            flat.append((root, ".".join(map(str, path[len(root) :])).removeprefix("state."), spec))
        elif model is None or (path[skip : skip + 1] == (model,) and len(path) > skip + 1):
            name = _free(".".join(map(str, path if model is None else path[skip + 1 :])), weights)
            weights[name] = renamed(spec, name)
        else:
            found.rest.append(key)
    for root, text, spec in flat:
        name, state = _split(text, weights)
        if not name:  # of the optimizer as a whole (Megatron's common_step)
            found.rest.append(spec.name)
            continue
        slots.setdefault(root, {}).setdefault(name, {})[state] = spec

    if weights:
        found.states["weights"] = weights
    for root, parameters in slots.items():
        names = _numbered(weights, parameters, lookup((*root, "param_groups")), found.problems)
        for parameter, states in parameters.items():
            for state, spec in states.items():
                name = names.get(parameter, parameter)
                table = found.states.setdefault(state if state != "weights" else "state.weights", {})
                if name in table:
                    found.problems.append(f"{spec.name!r} is a second {state} of {name!r}: it is in view.stored only")
                else:
                    table[name] = renamed(spec, name)
    found.states |= _copies(tensors, skip, weights, found)
    whole = {state: any(s.shape for s in table.values()) for state, table in found.states.items()}
    found.states = dict(sorted(found.states.items(), key=lambda item: item[0] != "weights" and not whole[item[0]]))
    return found


def _copies(
    tensors: Mapping[str, tuple[Path, TensorSpec]], skip: int, weights: Mapping[str, TensorSpec], found: Sorted
) -> dict[str, dict[str, TensorSpec]]:
    """Whole further state dicts of the same model ("ema": {...}), taken out of the rest: states of their own."""
    groups: dict[str, dict[str, TensorSpec]] = {}
    for key in found.rest:
        path, spec = tensors[key]
        if len(path) > skip + 1:
            below = skip + (2 if path[skip + 1] in MODELS and len(path) > skip + 2 else 1)
            table = groups.setdefault(str(path[skip]), {})
            table[_free(".".join(map(str, path[below:])), table)] = spec
    copies = {
        top: {name: renamed(spec, name) for name, spec in table.items()}
        for top, table in groups.items()
        if top not in found.states and all(n in weights and weights[n].shape == s.shape for n, s in table.items())
    }
    found.rest = [key for key in found.rest if str(tensors[key][0][skip]) not in copies or len(tensors[key][0]) == 1]
    return copies


def _free(name: str, taken: Mapping[str, TensorSpec]) -> str:
    """The name, or the next like it: two paths may give the same dotted name."""
    found, number = name, 2
    while found in taken:
        found, number = f"{name}#{number}", number + 1
    return found


def _wrapper(paths: Sequence[Path], objects: Sequence[Path]) -> int:
    """How many levels all of the state dict stands below: {"app": {"model": ..., "optim": ...}}."""
    everything = [*paths, *objects]
    depth = 0
    while everything and all(len(p) > depth + 1 and p[depth] == everything[0][depth] for p in everything):
        top = everything[0][depth]
        if (
            top in MODELS
            or str(top).startswith("optim")
            or not any(p[depth + 1] in MODELS for p in paths if len(p) > depth + 2)
        ):
            break
        depth += 1
    return depth


def _optimizer(path: Path, skip: int, grouped: set[Path]) -> Path | None:
    """The path of the optimizer that a tensor is a state of: it has param_groups, or a name that says so."""
    for n in range(skip, min(skip + 3, len(path))):
        part, root = path[n], path[:n]
        state = part == "state" and len(path) > n + 1
        flattened = isinstance(part, str) and part.startswith("state.") and len(path) == n + 1
        named = n > skip and str(root[skip]).startswith("optim")
        if (state or flattened) and (root in grouped or named):
            return root
    return None


def _split(text: str, weights: Mapping[str, TensorSpec]) -> tuple[str, str]:
    """``layers.0.weight.exp_avg`` -> the parameter and the state; the names of states may have dots too."""
    at = text.find(".")
    while at >= 0:
        if text[:at] in weights:
            return text[:at], text[at + 1 :]
        at = text.find(".", at + 1)
    if text.split(".")[0].isdecimal():
        name, _, state = text.partition(".")
        return name, state
    name, _, state = text.rpartition(".")
    return name, state


def _trainable(name: str, weights: Mapping[str, TensorSpec]) -> bool:
    """Whether it can be a parameter: no integers, and no statistics of a BatchNorm (torch/nn/modules/batchnorm.py
    `_NormBase`: three buffers)."""
    module, _, last = name.rpartition(".")
    statistics = last in ("running_mean", "running_var") and f"{module}.num_batches_tracked" in weights
    dtype = weights[name].dtype
    return (dtype.is_floating_point or dtype.is_complex) and not statistics


def _numbered(
    weights: Mapping[str, TensorSpec],
    parameters: Mapping[str, Mapping[str, TensorSpec]],
    param_groups: Any,
    problems: list[str],
) -> dict[str, str]:
    """Number -> name, for an optimizer that numbers its parameters, as far as order and shapes tell."""
    numbers = [p for p in parameters if p.isdecimal() and p not in weights]
    if not numbers:
        return {}
    groups = [g for g in param_groups if isinstance(g, dict)] if isinstance(param_groups, list) else []
    members = [[str(i) for i in g.get("params") or () if type(i) is int] for g in groups]
    names: dict[str, str] = {}
    # of an optimizer that was given named parameters
    listed = [n if isinstance(n := g.get("param_names"), list) else [] for g in groups]
    if all(n and len(n) == len(m) for n, m in zip(listed, members, strict=True)):
        names = {
            i: n for ns, m in zip(listed, members, strict=True) for i, n in zip(m, ns, strict=True) if n in weights
        }
    else:
        wanted = [[possible_shapes({k: s.shape for k, s in parameters.get(i, {}).items()}) for i in m] for m in members]
        found = assign([(name, spec.shape) for name, spec in weights.items() if _trainable(name, weights)], wanted)
        for ids, group in zip(members, found.names if found else (), strict=False):
            names |= {i: name for i, name in zip(ids, group, strict=True) if name is not None}
    open_ones = [i for i in numbers if i not in names]
    if open_ones:
        problems.append(
            f"the optimizer numbers its parameters; for {len(open_ones)} of {len(numbers)} order and shapes leave more "
            "than one way to name them, or none: their states stand under their numbers"
        )
    return names
