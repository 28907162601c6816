"""The DeepSpeed universal checkpoint format: a folder per parameter with a file per state, and the model states.

``zero/NAME/`` has the parameter in float32 (fp32.pt), the states that have its shape, for any optimizer, and step.pt.
Buffers and frozen parameters have only fp32.pt. The model states, ``mp_rank_00_model_states.pt``, contain what the
engine needs to resume: for a DeepSpeed source its counters, scheduler, client state and universal_checkpoint_info; for
other sources, ``meta["step"]`` as ``global_steps`` and defaults (there is no scheduler: pass
``load_lr_scheduler_states=False`` if the engine has one). The optimizer's options are written if the checkpoint has
them, in the source's order of groups; else the engine keeps its own. Objects of DeepSpeed's own classes (the state of
fp16's loss scaler) are left out. ZeRO-3 engines load only exp_avg and exp_avg_sq.

Source: deepspeed/checkpoint/ds_to_universal.py (what it writes), universal_checkpoint.py `load_hp_checkpoint_state`
(ZeRO-1, 2 and BF16_Optimizer read it: every file of a parameter), runtime/base_optimizer.py
`load_hp_checkpoint_state_from_checkpoint_dir` (the groups' options), runtime/zero/stage3.py
`load_hp_checkpoint_state_from_checkpoint_dir_stage3` (ZeRO-3: other keys of the same files), runtime/engine.py
`_load_checkpoint` (the model states). Engines of any ZeRO stage read the export.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Mapping
from functools import partial
from math import prod
from typing import Any

import torch

from ..derive.groups import param_groups, step_of, unnamed
from ..errors import DataError
from ..jobs.destination import Kind
from ..jobs.plan import File, Writable, WritePlan
from ..jobs.publish import fingerprint
from ..layouts.universal import cut_of
from ..lazy import LazyArray, named
from .options import WriteOptions
from .torch import Held, Item, layout_of, row
from .training import Lost, NotLoaded, restored
from .writer import (
    BY_NAMES,
    NO_RANKS,
    WEIGHTS,
    Amount,
    Forecast,
    View,
    Writer,
    check_names,
    forecast_of_folder,
    plan_of_folder,
)

_OF_STAGE_3 = ("exp_avg", "exp_avg_sq")  # the states that a ZeRO-3 engine loads
_VERSION = "0.4"  # deepspeed/checkpoint/constants.py UNIVERSAL_CHECKPOINT_VERSION_VALUE
_NO_GROUPS = 1024  # empty groups; an engine loads states only for as many groups as are listed
# entries of a source's model states that are created anew or do not belong there
_OURS = ("module", "optimizer", "tag", "step", "frozen_parameters", "param_shapes", "frozen_param_fragments")
_DEEPSPEED = "0.16.0"  # the DeepSpeed version that is written if the source is not from DeepSpeed


def _plan(view: View, dest: str | os.PathLike[str], options: WriteOptions) -> WritePlan:
    if view.state not in WEIGHTS:
        raise DataError(f"a universal checkpoint is of weights and their states, this is a view of {view.state!r}")
    lost: Lost = {}
    masters, aliases = _masters(view)
    _check(masters)
    info = view.meta.get("universal_checkpoint_info")
    info = info if isinstance(info, Mapping) else {}
    steps = _steps(view, masters)
    states: dict[str, dict[str, Writable]] = _states(view, masters, lost)
    groups = param_groups(view, complete=False)
    if states:
        kinds = dict.fromkeys(state for of_one in states.values() for state in of_one)
        lost |= _not_for_stage_3(kinds)
        count = next(iter(steps.values()), None)
        for name in _without_states(view, masters, states, groups):
            zero = Held(torch.zeros((), device="cpu").expand(masters[name].shape))  # takes no memory
            states[name] = dict.fromkeys(kinds, zero)
            if count is not None:
                steps[name] = count

    files: list[File] = []
    where: list[tuple[LazyArray, object]] = []
    for name, tensor in masters.items():
        for state, value in (("fp32", tensor), *states.get(name, {}).items()):
            key = f"zero/{name}/{state}.pt"
            if isinstance(value, LazyArray):
                where.append((value, (key, str(value.dtype))))
            item = Item(0, value, tuple(cut_of(info, name).items()))
            files.append(File(key, value.nbytes, partial(row, [item])))
    model = _model_states(view, masters, aliases, groups, states, info, lost)
    module = _module(view, masters)
    kept = list(dict.fromkeys(t for t in module.values() if isinstance(t, LazyArray)))
    where += [(t, ("module", str(t.dtype))) for t in kept]
    whole = {"module": {**module, **{a: module[o] for a, o in aliases.items() if o in module}}, **model}
    files.append(File("mp_rank_00_model_states.pt", sum(t.nbytes for t in kept), partial(layout_of, value=whole)))
    # the model states for a ZeRO-3 engine, whose file has no parameters
    empty = dict.fromkeys(whole["module"], Held(torch.empty(0, device="cpu")))
    counts = {id(step): _saved(step) for step in {id(step): step for step in steps.values()}.values()}  # mostly one
    texts = {f"zero/{name}/step.pt": counts[id(step)] for name, step in steps.items()}
    texts["zero_pp_rank_0_mp_rank_00_model_states.pt"] = _saved(_with_tensors({**model, "module": empty}))
    texts["zero/optimizer_state.pt"] = _saved(_optimizer_state(view, groups, steps, lost))
    texts["latest_universal"] = b"."
    same = fingerprint(where, texts.values())
    return plan_of_folder(
        dest, options, Kind("universal checkpoint", ("zero",)), [t for t, _ in where], same, files, texts, lost
    )


def _forecast(view: View, dest: str, options: WriteOptions) -> Forecast:
    """Forecast the float32 copies of all weights and the states that have their shapes."""
    weights = view.once()[0]
    masters = dict(view.states["fp32"].once()[0]) if "fp32" in view.states else {}
    masters = {**weights, **masters}
    states = {"fp32": Amount.of(masters.values(), torch.float32)}
    for state, part in view.states.items():
        if state not in (*WEIGHTS, "step"):
            states[state] = Amount.of(t for n, t in part.items() if n in masters and t.numel() == masters[n].numel())
    if view.state == "weights":
        states = {"weights": Amount.of(weights.values()), **states}
    return forecast_of_folder(states)


# -- the parameters


def _masters(view: View) -> tuple[dict[str, LazyArray], Mapping[str, str]]:
    """Return the parameters in float32, and the aliases of tied ones. Tensors that are not floating-point (buffers) are
    not converted."""
    part = view.states.get("fp32", view)
    tensors, aliases = part.once()
    weights = view.once()[0] if view.state == "weights" else {}
    whole = {**tensors, **{name: t for name, t in weights.items() if name not in tensors and name not in aliases}}
    return {n: t.astype(torch.float32) if t.dtype.is_floating_point else t for n, t in whole.items()}, aliases


def _check(names: Mapping[str, object]) -> None:
    """Raise DataError for names that cannot be folder names, because each parameter is a folder."""
    check_names(names)
    for name in names:
        if name in ("", ".", "..") or "/" in name or "\0" in name or len(os.fsencode(name)) > 255:
            raise DataError(
                f"{name!r:.80} cannot be the name of a folder, which a universal checkpoint has for a parameter"
            )


def _states(view: View, masters: Mapping[str, LazyArray], lost: Lost) -> dict[str, dict[str, Writable]]:
    """Return, for each parameter, the states that have its shape."""
    found: dict[str, dict[str, Writable]] = {}
    for state, tensors in view.states.items():
        if state in (*WEIGHTS, "step"):
            continue
        if "/" in state or len(os.fsencode(state)) > 200:
            lost[state] = "the name of a state that no file can have"
            continue
        for name, tensor in tensors.items():
            if name not in masters:
                lost[f"{state}.{name}"] = "a state of a tensor that is no parameter of this view"
            elif prod(tensor.shape) != prod(masters[name].shape):
                lost[f"{state}.{name}"] = f"a state of shape {tuple(tensor.shape)}: DeepSpeed takes a parameter's shape"
            else:
                found.setdefault(name, {})[state] = tensor
    return found


def _not_for_stage_3(states: Iterable[str]) -> Lost:
    """Return notes about states that are written but that not every engine loads."""
    there = list(states)
    if not all(state in there for state in _OF_STAGE_3):
        why = f"an engine of ZeRO-3 loads no optimizer that lacks {' or '.join(_OF_STAGE_3)}"
    else:
        why = "an engine of ZeRO-3 does not load this state"
    return {state: NotLoaded(f"written, but {why} (ZeRO-1 and 2 do)") for state in there if state not in _OF_STAGE_3}


def _without_states(
    view: View, masters: Mapping[str, LazyArray], states: Mapping[str, object], groups: list[dict[str, Any]]
) -> list[str]:
    """Return the parameters without states, because they never had a gradient. DeepSpeed requires all parameters of a
    group to have the same states. If the optimizer only has numbers for them, return all candidates."""
    names = {name for group in groups for name in group["params"]}
    if unnamed(view):
        others = [view.meta.get(key) for key in ("buffer_names", "frozen_parameters")]
        known = {name for listed in others if isinstance(listed, list) for name in listed}
        names |= {n for n, t in masters.items() if t.dtype.is_floating_point and n not in known}
    return [name for name in masters if name in names and name not in states]


def _steps(view: View, masters: Mapping[str, LazyArray]) -> dict[str, Any]:
    """Return the step count of each parameter in the optimizer's form: a tensor or a number."""
    if "step" in view.states:
        return {name: tensor[...] for name, tensor in view.states["step"].items() if name in masters}
    step = step_of(view)
    if step is None or step.option or "exp_avg" not in view.states:
        return {}
    value = int(step.done) if step.whole else torch.tensor(step.done, dtype=torch.float32, device="cpu")
    return {name: value for name in view.states["exp_avg"] if name in masters}


# -- the model states


def _module(view: View, masters: Mapping[str, LazyArray]) -> dict[str, Writable]:
    """Return the weights in their training dtype. If the view has none, do as ZeRO-3: empty parameters, and all other
    tensors."""
    if view.state == "weights":
        return dict(view.once()[0])
    return {n: Held(torch.empty(0, device="cpu")) if t.dtype.is_floating_point else t for n, t in masters.items()}


def _model_states(
    view: View,
    masters: Mapping[str, LazyArray],
    aliases: Mapping[str, str],
    groups: list[dict[str, Any]],
    states: Mapping[str, object],
    info: Mapping[str, Any],
    lost: Lost,
) -> dict[str, Any]:
    """Return all model states except the module: the entries that DeepSpeed's engine needs, and those of the source."""

    def tensor(name: str) -> Any:
        found = named(view.stored, name)
        return None if found is None else found[...]

    theirs: dict[str, Any] = {}
    if view.format.startswith("deepspeed"):
        for key, value in view.meta.items():
            if key not in _OURS:
                made = restored(value, str(key), tensor, lost)
                if made is not None or value is None:
                    theirs[str(key)] = made
    listed = [[n for n in group["params"] if n in masters] for group in groups] or [[]]
    known = {name for group in listed for name in group}
    listed[0] += [name for name in states if name not in known]
    shapes = [{name: torch.Size(masters[name].shape) for name in group} for group in listed]
    step = step_of(view)
    count = int(step.done) if step is not None else 0
    usual: dict[str, Any] = {
        "buffer_names": [],
        "lr_scheduler": None,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": 0,
        "global_steps": count,
        "dp_world_size": 1,
        "ds_config": {},
        "ds_version": _DEEPSPEED,
        "universal_checkpoint_info": {"universal_checkpoint_version": float(_VERSION)},
    }
    return {
        **usual,
        **theirs,
        "optimizer": None,
        "param_shapes": [group for group in shapes if group] or None,
        "frozen_param_fragments": None,
        "shared_params": dict(aliases),
        "mp_world_size": 1,  # one file, which any number of ranks can read
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
    }


def _optimizer_state(view: View, groups: list[dict[str, Any]], steps: Mapping[str, Any], lost: Lost) -> dict[str, Any]:
    """Return the optimizer without its states: at the top level for engines of ZeRO-1 and 2, and in
    "optimizer_state_dict" for those of ZeRO-3. If no options are known, empty groups make the engine keep its own."""
    named = restored(groups, "optimizer.param_groups", lambda name: None, lost) or []
    options = [{**{k: v for k, v in g.items() if k != "params"}, "params": [n]} for n, g in enumerate(named)]
    options = options or [{"params": [n]} for n in range(_NO_GROUPS)]
    theirs = _scalars(view.meta)
    step = next(iter(steps.values()), None)
    if step is None:
        known = step_of(view)
        step = torch.tensor(known.done if known is not None else 0.0, dtype=torch.float32, device="cpu")
    return {
        "ds_version": view.meta.get("ds_version") or _DEEPSPEED,
        **theirs,
        "param_groups": options,
        "optimizer_state_dict": {"state": {0: {"step": step}}, "param_groups": [_common(options)]},
    }


def _common(groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the options that all groups share, because a ZeRO-3 engine applies those of the first group to all."""
    first = groups[0]
    return {k: v for k, v in first.items() if k == "params" or all(k in g and g[k] == v for g in groups)}


def _scalars(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scalar entries of a ZeRO optimizer besides groups and states, such as loss scaling and clipping."""
    saved = meta.get("optimizer")
    inner = saved.get("optimizer_state_dict") if isinstance(saved, Mapping) else None
    table = inner if isinstance(inner, Mapping) else {}
    return {k: v for k, v in table.items() if isinstance(k, str) and type(v) in (bool, int, float, str)}


def _with_tensors(value: Any) -> Any:
    """Replace each `Held` in an object by its torch tensor."""
    if isinstance(value, Held):
        return value.tensor
    return {k: _with_tensors(v) for k, v in value.items()} if isinstance(value, dict) else value


def _saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


WRITER = Writer(
    name="universal",
    what="DeepSpeed's universal checkpoint",
    plan=_plan,
    forecast=_forecast,
    refused={"dtype": "it always is in float32", "mesh": NO_RANKS, "stored": BY_NAMES},
)
