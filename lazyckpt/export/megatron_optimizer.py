"""The non-distributed optimizer in a Megatron-LM rank file: numbered states and fp32 copies.

Source: megatron/core/optimizer/__init__.py `_get_param_groups` (groups: no weight decay for biases and 1-d parameters;
within one, the order of the model's parameters), optimizer.py `Float16OptimizerWithFloat16Params.state_dict`,
`FP32Optimizer.state_dict`, `ChainedOptimizer.state_dict` (with expert parallelism a list: dense parameters, experts),
`_filter_and_reorder_param_groups` (wd_mult, lr_mult, is_expert_parallel, is_decoupled_lr distinguish groups; the n-th
group's parameters are those of the n-th group of the run).

The step count is among each parameter's states (torch's AdamW) or in the groups (FusedAdam of Transformer Engine and
apex, whose `load_state_dict` accepts only its own states). Neither optimizer loads the other's form.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from ..core.box import Shape
from ..core.specs import TensorSpec
from ..derive.groups import below, step_of
from ..errors import some
from ..jobs.plan import Writable
from ..layouts.megatron import is_buffer, is_expert
from ..lazy import named
from .torch import Held
from .training import Lost, restored
from .writer import View

_FULL = ("weights", "fp32")
_TRAINED = ("exp_avg", "exp_avg_sq", "momentum_buffer")  # the states that Megatron's optimizers have
_DECOUPLED = ("word_embeddings", "output_layer")
_OPTIONS = {"lr": 0.0, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
NO_OPTIM = "load with --no-load-optim"


class Group(NamedTuple):
    """A parameter group, identified by the properties that distinguish groups in Megatron."""

    decays: bool
    decoupled: bool
    expert: bool


class Steps(NamedTuple):
    """The step count: written into the groups (``in_groups``) or to each parameter (``each``). If both are None, the
    source has it as a state."""

    in_groups: int | None = None
    each: float | None = None


@dataclass(frozen=True, slots=True)
class Optimizer:
    """The part of the optimizer that is the same on all ranks.

    ``chain`` has the groups of each optimizer with their options, ``states`` the names of each parameter's states.
    ``each`` is the step count of each parameter if it is not one of the states. ``half`` says whether the weights have
    16 bits and fp32 copies; ``scaler`` is the state of fp16's loss scaler."""

    chain: Sequence[Mapping[Group, Mapping[str, Any]]]
    states: Sequence[str]
    each: float | None
    half: bool
    scaler: Any

    def of_rank(
        self, names: Iterable[str], shapes: Mapping[str, Shape], tensors: Mapping[str, Mapping[str, Writable]]
    ) -> Any:
        """Return the optimizer of a rank with these parameters in the model's order. ``shapes`` are the shapes in the
        file."""
        made = []
        trained = [name for name in names if not is_buffer(name)]
        for groups in self.chain:
            decoupled = any(g.decoupled for g in groups)
            members: dict[Group, list[str]] = {group: [] for group in groups}
            for name in trained:
                group = _group(name, shapes[name], decoupled, len(self.chain) > 1)
                if group in members:
                    members[group].append(name)
            made.append(self._one(groups, members, tensors))
        return made if len(made) > 1 else made[0]

    def options_of(self, shapes: Mapping[str, Shape]) -> dict[str, Mapping[str, Any]]:
        """Return the options of each parameter's group."""
        groups = {group: options for chained in self.chain for group, options in chained.items()}
        decoupled = any(group.decoupled for group in groups)
        return {name: groups[_group(name, shape, decoupled, len(self.chain) > 1)] for name, shape in shapes.items()}

    def _one(
        self,
        groups: Mapping[Group, Mapping[str, Any]],
        members: Mapping[Group, Sequence[str]],
        tensors: Mapping[str, Mapping[str, Writable]],
    ) -> dict[str, Any]:
        state: dict[int, dict[str, Any]] = {}
        listed = []
        for group, options in groups.items():
            numbers = range(len(state), len(state) + len(members[group]))
            for n, name in zip(numbers, members[group], strict=True):
                counted = {}
                if self.each is not None:
                    counted = {"step": Held(torch.tensor(self.each, dtype=torch.float32, device="cpu"))}
                state[n] = {**counted, **{kind: tensors[kind][name] for kind in self.states}}
            listed.append({**options, "params": list(numbers)})
        inner = {"state": state, "param_groups": listed}
        if not self.half:
            return inner
        masters = [[tensors["fp32"][name] for name in members[group]] for group in groups]
        scaler = {} if self.scaler is None else {"grad_scaler": self.scaler}
        return {"optimizer": inner, **scaler, "fp32_from_fp16_params": masters}


def optimizer_of(
    view: View, states: Mapping[str, Mapping[str, TensorSpec]], half: bool, ep: int, lost: Lost
) -> Optimizer | None:
    """Return the optimizer to write; None if the view has none, or lacks states of some parameters (the reason is added
    to ``lost``). ``states`` are the view's, with the model's names."""
    shapes = {name: spec.shape for name, spec in states["weights"].items() if not is_buffer(name)}
    kinds = [kind for kind in states if kind not in (*_FULL, "step")]
    for kind in kinds:
        if kind not in _TRAINED:
            lost[kind] = "not one of the states that Megatron's optimizers have"
    kinds = [kind for kind in kinds if kind in _TRAINED]
    if not kinds:
        return None
    if len({states["weights"][name].dtype == torch.float32 for name in shapes}) > 1:
        lost["optimizer"] = f"some weights are float32 and others are not: {NO_OPTIM}"
        return None
    for kind in (*(["fp32"] if half else []), *kinds):
        found = states.get(kind, {})
        missing = [name for name, shape in shapes.items() if name not in found or found[name].shape != shape]
        if missing:
            lost["optimizer"] = f"there is no {kind} of {some(missing)}: {NO_OPTIM}"
            return None
    groups = _source_groups(view)
    steps = _steps(view, groups, states.get("step", {}), shapes, lost) if "exp_avg" in kinds else Steps(each=None)
    if steps is None:
        return None
    options = restored(groups, "optimizer.param_groups", lambda name: None, lost) or []
    known = {key for group in options for key in group}
    for key in ("betas", "eps"):  # the scheduler sets the other options
        if "exp_avg" in kinds and key not in known:
            lost[f"optimizer.param_groups.{key}"] = f"it is not known, {_OPTIONS[key]} is written"
    counted = ["step"] if "exp_avg" in kinds and steps == Steps() else []
    chain = _chain(shapes, options, ep, steps.in_groups)
    return Optimizer(chain, [*counted, *kinds], steps.each, half, _scaler(view, lost) if half else None)


def _group(name: str, shape: Shape, decoupled: bool, chained: bool) -> Group:
    own = decoupled and any(part in name for part in _DECOUPLED)
    return Group(len(shape) > 1 and not name.endswith(".bias"), own, chained and is_expert(name))


def _chain(
    shapes: Mapping[str, Shape], options: Sequence[Mapping[str, Any]], ep: int, step: int | None
) -> list[dict[Group, dict[str, Any]]]:
    """Return the groups of each optimizer: the source's in its order, then new ones with the options of the most
    similar group."""
    theirs = [(_of(group), group) for group in options]
    decoupled = any(group.decoupled for group, _ in theirs)
    wanted = {_group(name, shape, decoupled, ep > 1) for name, shape in shapes.items()}
    places = {group: n for n, (group, _) in reversed(list(enumerate(theirs)))}
    order = sorted(wanted, key=lambda g: (places.get(g, places.get(g._replace(expert=False), len(theirs))), not g[0]))
    chain: list[dict[Group, dict[str, Any]]] = [{} for _ in range(2 if ep > 1 else 1)]
    for group in order:
        found = max(theirs, key=lambda one: _nearness(one[0], group), default=(group, {}))
        chain[group.expert][group] = _options(group, *found, step)
    return chain


def _nearness(theirs: Group, ours: Group) -> tuple[bool, ...]:
    return tuple(a == b for a, b in zip(theirs, ours, strict=True))


def _options(group: Group, of: Group, theirs: Mapping[str, Any], step: int | None) -> dict[str, Any]:
    """Return the options of a group, derived from those of a group of the source."""
    kept = {k: v for k, v in theirs.items() if k not in ("params", "param_names", "step")}
    decay = kept.get("weight_decay", 0.0) if group.decays or not of.decays else 0.0
    return {
        **({} if "wd_mult" in theirs else {**_OPTIONS, "bias_correction": True}),
        "lr_mult": 1.0,
        **kept,
        "is_expert_parallel": group.expert,
        "is_decoupled_lr": group.decoupled,
        "wd_mult": kept.get("wd_mult", 1.0) if group.decays == of.decays and "wd_mult" in kept else float(group.decays),
        "weight_decay": decay,
        **({} if step is None else {"step": step}),
    }


def _of(group: Mapping[str, Any]) -> Group:
    """Classify a group of the source, by Megatron's properties or else by its weight decay."""
    decays = group.get("wd_mult", group.get("weight_decay", 0.0)) != 0.0
    return Group(decays, group.get("is_decoupled_lr") is True, group.get("is_expert_parallel") is True)


def _source_groups(view: View) -> list[dict[str, Any]]:
    """Return the groups of the source's optimizers: all of Megatron's if there are any, else the first list.

    Megatron-FSDP saves the options of each parameter instead: equal ones are a group."""
    found = [
        [group for group in groups if isinstance(group, dict)]
        for groups in below(view.meta, "param_groups", 0)
        if isinstance(groups, list)
    ]
    megatrons = [group for groups in found for group in groups if "wd_mult" in group]
    for options in below(view.meta, "param_to_group_meta", 0) if not megatrons else ():
        each = options.values() if isinstance(options, dict) else ()
        for group in each:
            if isinstance(group, dict) and "wd_mult" in group and group not in megatrons:
                megatrons.append(group)
    return megatrons or next((groups for groups in found if groups), [])


def _steps(
    view: View,
    groups: Sequence[Mapping[str, Any]],
    counts: Mapping[str, TensorSpec],
    shapes: Mapping[str, Shape],
    lost: Lost,
) -> Steps | None:
    """Return the step count in the form of a Megatron source, or in the groups for other sources. If it is unknown,
    return None and add the reason to ``lost``."""
    stated = shapes.keys() <= counts.keys()
    if any("wd_mult" in group for group in groups):
        counts_of_groups = [group["step"] for group in groups if type(group.get("step")) in (int, float)]
        if counts_of_groups:
            # A float comes from torch's Adam, which has it with each parameter; the distributed optimizer moved it.
            most = max(counts_of_groups)
            return Steps(most) if type(most) is int else Steps(each=most)
        if stated:
            return Steps()
    if stated:
        done = {float(view.states["step"][name][...].max()) for name in shapes}
        if len(done) == 1:
            return Steps(int(done.pop()))
        lost["optimizer"] = (
            f"its parameters have done {min(done):g} to {max(done):g} steps, Megatron has one count for all"
        )
    else:
        step = step_of(view)
        if step is not None:
            return Steps(int(step.done))
        lost["optimizer"] = "how many steps it has done is not known"
    lost["optimizer"] += f": {NO_OPTIM}"
    return None


def _scaler(view: View, lost: Lost) -> Any:
    found: Iterator[Any] = below(view.meta.get("optimizer"), "grad_scaler", 0)
    return restored(next(found, None), "optimizer.grad_scaler", partial(named, view.stored), lost)
