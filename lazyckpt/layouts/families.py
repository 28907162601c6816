"""Merge rules by the parameter names of known model families.

Sources: Megatron-LM megatron/core/tensor_parallel/layers.py (which layers are column- and row-parallel), the names of
GPT, Llama-like and Megatron models. Only names whose meaning does not depend on the model's configuration are listed: a
fused gate-and-up or query-key-value weight is not, unless the order of its parts is known.
"""

from __future__ import annotations

from .merge import Rule, Source, concatenated, in_parts, replicated
from .tables import patterns


def family_rules(gated: bool | None = None) -> Source:
    """Return the source of rules by name.

    ``gated`` says whether the first matrix of an MLP is a fused gate and up (Megatron's args.swiglu); None means
    unknown, and then the source has no rule for this matrix.
    """
    table: dict[str, Rule] = {
        "families.replicated": replicated,
        "families.row": concatenated(1),
        "families.column": concatenated(0),
    }
    if gated is not None:
        table["families.column_or_gated"] = in_parts(0, 2) if gated else concatenated(0)

    def find(name: str) -> tuple[Rule, str] | None:
        for which, rule in table.items():
            for pattern in patterns(which):
                if pattern.search(name):
                    return rule, f"the family's name pattern {pattern.pattern!r}"
        return None

    return Source(find, "names")
