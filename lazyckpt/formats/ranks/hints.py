"""Names and shapes of a model's parameters, in the module's order, as an optimizer's states tell them.

Writer: torch/distributed/fsdp/_optim_utils.py `_optim_state_dict`: states per name, in the parameters' own shapes, and
``param_groups`` with the names in the optimizer's order. accelerate/utils/fsdp_utils.py `save_fsdp_optimizer` puts that
into a folder of torch.distributed.checkpoint beside a local state dict (``optimizer_0``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...core.box import Shape
from ...core.index import TensorSpec
from ...errors import LazyckptError
from ...io.within import Within
from ..reader import Reader, Source
from .flat import Hints


def from_states(states: Mapping[str, Mapping[str, TensorSpec]], param_groups: Any, source: str) -> Hints:
    """From states by name; in the order of the groups, if these list names."""
    shapes: dict[str, Shape] = {}
    for state, table in states.items():
        if state != "weights":
            for name, spec in table.items():
                if spec.shape != ():
                    shapes.setdefault(name, spec.shape)
    groups = param_groups if isinstance(param_groups, list) else []
    order = [n for g in groups if isinstance(g, dict) for n in g.get("params") or () if isinstance(n, str)]
    if not order or not shapes:
        return Hints()
    return Hints({name: shapes[name] for name in order if name in shapes}, source)


def beside(source: Source, reader: Reader, problems: list[str]) -> Hints:
    """From the optimizer's folder, if there is one."""
    for name, entry in sorted(source.entries.items()):
        if not entry.is_dir or not name.startswith("optim") or ".metadata" not in source.store.list(name):
            continue
        try:
            index = reader.read(Source(Within(source.store, name)))
            for top in index.meta:
                inner = index.meta[top]
                groups = inner.get("param_groups") if isinstance(inner, dict) else None
                if groups is None and top == "param_groups":
                    groups = inner
                hints = from_states(index.states, groups, f"the optimizer's states in {name}")
                if hints.shapes:
                    return hints
        except LazyckptError as e:
            problems.append(f"{name} cannot be read, which could tell the shapes of parameters: {e}")
    return Hints()
