"""The parallel degrees in the arguments of Megatron-LM."""

from __future__ import annotations

from typing import Any

from ...core.placement import Mesh


def mesh_of(args: Any) -> Mesh:
    """Return the degrees of ``args`` (an argparse.Namespace; anything else has none)."""

    def degree(name: str) -> int:
        value = getattr(args, f"{name}_parallel_size", None)
        return value if type(value) is int and value > 0 else 1

    tp, pp, ep = degree("tensor_model"), degree("pipeline_model"), degree("expert_model")
    dp = getattr(args, "data_parallel_size", None)
    return Mesh(tp=tp, pp=pp, dp=dp if type(dp) is int and dp > 0 else 1, ep=ep)
