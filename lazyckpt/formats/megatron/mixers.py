"""Layers that mix tokens without softmax (Mamba, gated delta nets): what is fused in their matrices.

Sources: megatron/core/ssm/mamba_mixer.py, ssm/gated_delta_net.py (`sharded_state_dict`: the parts, and their names in
distributed checkpoints). A rank has its piece of each part, one behind the other; so has the convolution after them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ...core.box import Shape
from ..merge import Merge, Rule, concatenated, in_parts, replicated
from .degrees import number

# the parts that a distributed checkpoint keeps as tensors of their own, in their order in the model's
PARTS = (
    ("in_proj", ("z", "x", "B", "C", "dt")),
    ("in_proj", ("query", "key", "value", "z", "beta", "alpha")),
    ("conv1d", ("x", "B", "C")),
    ("conv1d", ("query", "key", "value")),
)
_MIXER = re.compile(r"(^|\.)(mixer|self_attention)\.(in_proj|conv1d)\.(weight|bias)$")
_BY_HEAD = re.compile(r"(^|\.)(mixer|self_attention)\.(A_log|dt_bias|D)$|(^|\.)mixer\.norm\.weight$")
_ROW = re.compile(r"(^|\.)mixer\.out_proj\.(weight|bias)$")


def mixer_rule(name: str, args: Any) -> tuple[Rule, str] | None:
    """The rule for a parameter of such a layer, and how it is known; None for others."""
    if _BY_HEAD.search(name):
        return concatenated(0), "its name: of each head, or each group of them"
    row = _ROW.search(name)
    if row is not None:
        return (concatenated(1) if row[2] == "weight" else replicated), "its name"
    match = _MIXER.search(name)
    if match is None:
        return None
    sizes = _mamba(args) if match[2] == "mixer" else _delta_net(args)
    return _fused(sizes, match[3] == "conv1d"), "args.mamba_*" if match[2] == "mixer" else "args.linear_*"


def _mamba(args: Any) -> list[int] | None:
    """The rows of z, x, B, C and dt."""
    hidden, heads = number(args, "hidden_size"), number(args, "mamba_num_heads")
    state, dim, groups = (number(args, f"mamba_{key}") for key in ("state_dim", "head_dim", "num_groups"))
    if state is None or dim is None or groups is None or (heads is None and hidden is None):
        return None
    inner = heads * dim if heads is not None else 2 * (hidden or 0)
    return [inner, inner, groups * state, groups * state, inner // dim]


def _delta_net(args: Any) -> list[int] | None:
    """The rows of q, k, v, z, beta and alpha."""
    keys = ("key_head_dim", "num_key_heads", "value_head_dim", "num_value_heads")
    key, keys_, value, values = (number(args, f"linear_{name}") for name in keys)
    if key is None or keys_ is None or value is None or values is None:
        return None
    return [key * keys_, key * keys_, value * values, value * values, values, values]


def _fused(sizes: list[int] | None, convolution: bool) -> Rule:
    def rule(shapes: Sequence[Shape]) -> Merge:
        if sizes is None:
            raise ValueError("the arguments do not tell how wide the parts are that are fused in it")
        wanted = sizes if not convolution else sizes[1:4] if len(sizes) == 5 else sizes[:3]
        return in_parts(0, wanted)(shapes)

    return rule
