"""megatron-core's MambaModel without a GPU (for `megatron_logits`).

Its mixer calls kernels of the package mamba_ssm, which need one. Here plain loops take their place, under the same
names: what megatron-core computes before and after them, and which rows it takes for what, is its own.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

PATTERNS = {"mamba": "M", "attention": "*", "moe": "E", "mlp": "-"}


class _Norm(torch.nn.Module):
    """mamba_ssm.ops.triton.layernorm_gated.RMSNorm, with groups of columns."""

    def __init__(self, size: int, eps: float = 1e-5, group_size: int | None = None, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size))
        self.eps, self.group_size = eps, group_size or size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        groups = x.unflatten(-1, (-1, self.group_size))
        return F.rms_norm(groups, (self.group_size,), None, self.eps).flatten(-2) * self.weight


def _scan(
    given: torch.Tensor,
    conv: torch.Tensor,
    conv_bias: torch.Tensor,
    dt_bias: torch.Tensor,
    decay: torch.Tensor,
    D: torch.Tensor,  # noqa: N803
    chunk_size: int,
    headdim: int,
    ngroups: int,
    **_: Any,
) -> torch.Tensor:
    """mamba_split_conv1d_scan_combined: [b, l, z x B C dt] -> [b, l, heads * headdim], gated by z."""
    heads, size = dt_bias.shape[0], headdim
    inner = heads * size
    state = (conv.shape[0] - inner) // (2 * ngroups)
    z, x, dt = given.split([inner, inner + 2 * ngroups * state, heads], -1)
    mixed = F.conv1d(F.pad(x.mT, (conv.shape[1] - 1, 0)), conv[:, None], conv_bias, groups=conv.shape[0])
    x, into, out = F.silu(mixed).mT.split([inner, ngroups * state, ngroups * state], -1)
    x = x.unflatten(-1, (heads, size))
    into, out = (one.unflatten(-1, (ngroups, state)).repeat_interleave(heads // ngroups, 2) for one in (into, out))
    step = F.softplus(dt + dt_bias)  # [b, l, heads]
    hidden = torch.zeros(given.shape[0], heads, size, state)
    rows = []
    for n in range(given.shape[1]):
        fresh = (step[:, n, :, None] * x[:, n])[..., None] * into[:, n, :, None]
        hidden = hidden * (step[:, n] * decay).exp()[..., None, None] + fresh
        rows.append((hidden * out[:, n, :, None]).sum(-1) + D[:, None] * x[:, n])
    return torch.stack(rows, 1).flatten(2) * F.silu(z)


def patch() -> None:
    """Before megatron-core's mixer is imported."""
    names = ["mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton"]
    ends = ("layernorm_gated", "ssd_combined", "selective_state_update")
    modules: dict[str, Any] = {name: ModuleType(name) for name in (*names, *(f"{names[-1]}.{end}" for end in ends))}
    modules[f"{names[-1]}.layernorm_gated"].RMSNorm = _Norm
    modules[f"{names[-1]}.ssd_combined"].mamba_split_conv1d_scan_combined = _scan
    modules[f"{names[-1]}.ssd_combined"].mamba_chunk_scan_combined = None
    modules[f"{names[-1]}.selective_state_update"].selective_state_update = None
    inference = ModuleType("megatron.core.inference.contexts.attention_context.triton.tensor_ops")  # (needs triton)
    for name in ("tensor_get_slice_after", "tensor_masked_update", "tensor_merge"):
        setattr(inference, name, None)
    sys.modules.update(modules | {inference.__name__: inference})


def build(config: Any, kinds: list[str], tied: bool) -> Any:
    """A model with layers of these kinds."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.mamba import MambaModel
    from megatron.core.ssm import mamba_block
    from megatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    mamba_block.TENorm = WrappedTorchNorm  # the last norm, which has no place in a specification
    mixer = ModuleSpec(MambaMixer, submodules=MambaMixerSubmodules(ColumnParallelLinear, RowParallelLinear))
    inner = MambaLayerSubmodules(norm=WrappedTorchNorm, mixer=mixer, mamba_bda=get_bias_dropout_add)
    whole = get_gpt_layer_local_spec(config.num_moe_experts, normalization="RMSNorm").submodules
    attention = TransformerLayerSubmodules(
        input_layernorm=whole.input_layernorm, self_attention=whole.self_attention, self_attn_bda=get_bias_dropout_add
    )
    fed = TransformerLayerSubmodules(
        pre_mlp_layernorm=whole.pre_mlp_layernorm, mlp=whole.mlp, mlp_bda=get_bias_dropout_add
    )
    layers = MambaStackSubmodules(
        mamba_layer=ModuleSpec(MambaLayer, submodules=inner),
        attention_layer=ModuleSpec(TransformerLayer, submodules=attention),
        moe_layer=ModuleSpec(TransformerLayer, submodules=fed),
    )
    return MambaModel(
        config,
        ModuleSpec(MambaStack, submodules=layers),
        vocab_size=32,
        max_sequence_length=32,
        hybrid_override_pattern="".join(PATTERNS[kind] for kind in kinds),
        share_embeddings_and_output_weights=tied,
    ).eval()
