"""ZenFlow under ZeRO-3, which partitions the transposes of matrices.

Source: runtime/zenflow/engine_stage3.py `_initialize_zenflow_stage3_prologue`, before ZeRO-3 takes the shapes of the
parameters: the shapes in the files are those of the transposes, too. (Modules see the matrices as they were:
runtime/zero/parameter_offload.py turns them around the forward and the backward pass.) ZeRO-1 and 2 turn nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ...core.compose import compose
from ...core.placement import Placement
from ...core.specs import TensorSpec

_RULE = "ZenFlow: ZeRO-3 partitioned the transpose of the matrix"


def uses_zenflow(model: Mapping[Any, Any]) -> bool:
    """Return whether a rank's model states say that ZenFlow was configured."""
    config = model.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    return isinstance(zero, dict) and isinstance(zero.get("zenflow"), dict)


def turn_back(states: Mapping[str, dict[str, TensorSpec]], buffers: Collection[str]) -> None:
    """Replace the matrices of all states, except buffers, by their transposes."""
    for specs in states.values():
        for name, spec in specs.items():
            if len(spec.shape) == 2 and name not in buffers:
                placement = Placement.at(spec.shape, (0, 0), (1, 0))
                rule = "; ".join(filter(None, (spec.rule, _RULE)))
                specs[name] = compose(name, spec.shape[::-1], [(spec, placement)], rule)
