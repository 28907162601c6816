"""Map the keys of Megatron-FSDP's checkpoints (``--ckpt-format fsdp_dtensor``) to the names of the model on one rank.

Writer: Megatron-LM megatron/training/checkpointing.py `generate_state_dict`, `preprocess_fsdp_dtensor_state_dict`, and
megatron/core/transformer/fsdp_dtensor_checkpoint.py: a folder of torch.distributed.checkpoint whose tensors are
those of the whole model, in chunks of uneven sizes. Wrappers put "module." before the names, more often in the
optimizer than in the model. `handle_swiglu_in_state_dict` cuts gated matrices into ``weight_w`` and ``weight_v``,
`handle_gdn_in_state_dict` the matrices of delta nets into ``in_proj.weight.query``, ...;
`handle_experts_in_state_dict` numbers experts as the whole model does. optimizer/distrib_optimizer.py
`sharded_param_state_fsdp_dtensor`: states by the name of their parameter, and the options of each parameter
(``param_to_group_meta``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...core.index import Index
from ...core.specs import TensorSpec, renamed
from ...errors import Problem, some
from ...io.containers.pickle.plain import Path
from ...layouts.megatron import number
from ...layouts.tables import pattern
from ..dcp.objects import Meta
from ..shared.members import Member
from .mesh import mesh_of
from .stacks import joined

_WRAPPER = "module."


def is_fsdp(member: Member) -> bool:
    """Return whether the content of a DCP folder is what Megatron-FSDP saves."""
    names = [_name(path[1:]) for path, _ in member.tensors.values() if path[0] == "model" and len(path) > 1]
    if not names or not all(name.startswith(_WRAPPER) for name in names):
        return False
    # (also of objects whose file is lost: names must not depend on that)
    paths = member.meta.paths.values() if isinstance(member.meta, Meta) else member.objects
    return any(path == ("checkpoint_version",) or path[1:2] == ("param_to_group_meta",) for path in paths)


def in_model_names(member: Member) -> Index:
    """Return the index of a folder for which `is_fsdp` is true."""
    states: dict[str, dict[str, TensorSpec]] = {"weights": {}}
    rest: list[tuple[Path, str]] = []
    names: dict[str, str] = {}  # raw name -> name of a weight
    problems: list[Problem] = []
    for key, (path, spec) in member.tensors.items():
        state, parameter = _place(path)
        if not state:
            rest.append((path, key))
            continue
        name = _unwrapped(parameter)
        table = states.setdefault(state, {})
        if name in table:
            line = f"{key!r} is a second {state} of {name!r}: it is in view.stored only"
            problems.append(Problem("duplicate-tensor", line, name))
            continue
        table[name] = renamed(spec, name)
        if state == "weights":
            names[key] = name
    aliases = {names[a]: names[o] for a, o in member.aliases.items() if a in names and o in names}
    states["weights"] = {name: spec for name, spec in states["weights"].items() if name not in aliases}
    if isinstance(member.meta, Meta):
        problems += member.meta.check()
    meta = member.named(rest)
    args = meta.get("args")  # (Megatron-Bridge saves none)
    problems += _overwritten(states["weights"], args)
    return Index(
        format="megatron-fsdp",
        states={state: joined(table) for state, table in states.items()},
        files=member.files,
        stored=member.raw,
        aliases=aliases,
        meta=meta,
        mesh=mesh_of(args),
        problems=(*member.problems, *problems),
    )


def _name(path: Path) -> str:
    return ".".join(map(str, path))


def _place(path: Path) -> tuple[str, str]:
    """Return the state and the parameter's name at a path; ("", "") if there is another tensor."""
    if path[0] == "model" and len(path) > 1:
        return "weights", _name(path[1:])
    # a chained optimizer puts its number between the two
    at = next((n for n in (1, 2) if path[n : n + 1] == ("state",)), 0)
    if path[0] == "optimizer" and at and len(path) > at + 2:
        state = str(path[-1])
        return ("state.weights" if state == "weights" else state), _name(path[at + 1 : -1])
    return "", ""


def _unwrapped(name: str) -> str:
    while name.startswith(_WRAPPER):
        name = name.removeprefix(_WRAPPER)
    return name


def _overwritten(weights: Mapping[str, TensorSpec], args: Any) -> list[Problem]:
    """Report tensors that ranks saved under one name, so that those of one rank are in the files."""
    problems = []
    layers, stages = number(args, "num_layers"), number(args, "pipeline_model_parallel_size") or 1
    layer, bias = pattern("megatron.decoder_layer"), pattern("megatron.grouped_bias")
    there = {int(match[1]) for name in weights if (match := layer.match(name))}
    if layers is not None and there and stages > 1 and len(there) < layers:
        line = (
            f"{layers - len(there):,} of {layers:,} layers are missing: each of the {stages} pipeline stages numbered "
            "its layers from 0, and Megatron-FSDP saved those of one stage under each number. Which one is not known"
        )
        problems.append(Problem("missing-tensor", line))
    biases = [name for name in weights if bias.match(name)]
    ranks = number(args, "expert_model_parallel_size") or 1
    if biases and ranks > 1:
        line = (
            f"{len(biases):,} biases of experts ({some(biases)}) are those of one of {ranks} expert-parallel ranks: "
            "Megatron-FSDP saved those of all ranks under the same names. Which one is not known"
        )
        problems.append(Problem("missing-tensor", line))
    return problems
