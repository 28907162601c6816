"""megatron-core's hybrid models (Mamba, attention, MLP and MoE layers) without a GPU.

Their kernels (``mamba_ssm``) and Transformer Engine's layers need one. `kernels` has the same functions in torch, and
`NormedColumnParallelLinear` the parameters of Transformer Engine's linear layer with a norm, under the same names and
in the same order. Everything else is megatron-core's: MambaModel, MambaStack, MambaMixer, and how they are saved.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from .megatron_core import MegatronSpec

SIZES = {"mamba_state_dim": 6, "mamba_head_dim": 4, "mamba_num_groups": 2, "mamba_num_heads": None}


class GatedRMSNorm(nn.Module):
    """mamba_ssm/ops/triton/layernorm_gated.py `RMSNorm`, of groups of columns, and without a gate."""

    def __init__(self, size: int, eps: float, group_size: int, norm_before_gate: bool, device: Any, dtype: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, device=device, dtype=dtype))
        self.eps, self.group_size = eps, group_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        groups = x.float().unflatten(-1, (-1, self.group_size))
        normed = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)
        return (normed.flatten(-2) * self.weight.float()).to(x.dtype)


def scan(
    zxbcdt: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    dt_bias: torch.Tensor,
    a: torch.Tensor,
    D: torch.Tensor,  # noqa: N803
    headdim: int,
    ngroups: int,
    **_: Any,
) -> torch.Tensor:
    """mamba_ssm/ops/triton/ssd_combined.py `mamba_split_conv1d_scan_combined`, step by step as its reference does."""
    heads, length = len(a), zxbcdt.shape[1]
    inner = heads * headdim
    state = (len(weight) - inner) // (2 * ngroups)
    z, xbc, dt = zxbcdt.float().split([inner, len(weight), heads], -1)
    padded = F.pad(xbc.transpose(1, 2), (weight.shape[1] - 1, 0))
    xbc = F.silu(F.conv1d(padded, weight.float().unsqueeze(1), bias.float(), groups=len(weight))).transpose(1, 2)
    x, b, c = xbc.split([inner, ngroups * state, ngroups * state], -1)
    x = x.unflatten(-1, (heads, headdim))
    b, c = (t.unflatten(-1, (ngroups, state)).repeat_interleave(heads // ngroups, 2) for t in (b, c))
    dt = F.softplus(dt + dt_bias)
    held = zxbcdt.new_zeros(len(x), heads, headdim, state, dtype=torch.float32)
    out = []
    for t in range(length):
        held = held * (dt[:, t] * a).exp()[..., None, None]
        held = held + (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None, :]
        out.append((held * c[:, t, :, None, :]).sum(-1) + D.float()[:, None] * x[:, t])
    return (torch.stack(out, 1).flatten(2) * F.silu(z)).to(zxbcdt.dtype)


def kernels() -> dict[str, ModuleType]:
    """The modules that megatron-core imports, by name."""
    names = ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton")
    norm, combined = (f"{names[-1]}.{name}" for name in ("layernorm_gated", "ssd_combined"))
    found = {name: ModuleType(name) for name in (*names, norm, combined)}
    for module in found.values():
        module.__spec__ = None
    inference = ModuleType("megatron.core.inference.contexts.attention_context.triton.tensor_ops")  # needs triton
    vars(inference).update(tensor_get_slice_after=None, tensor_masked_update=None, tensor_merge=None)
    found[inference.__name__] = inference
    vars(found[norm])["RMSNorm"] = GatedRMSNorm
    vars(found[combined]).update(mamba_chunk_scan_combined=None, mamba_split_conv1d_scan_combined=scan)
    return found


def model(spec: MegatronSpec, config: Any, vocab: int) -> Any:
    """This rank's part of a hybrid model: models/mamba/mamba_layer_specs.py `mamba_stack_spec`, of layers that need no
    Transformer Engine."""
    from megatron.core import mpu
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.models.mamba.mamba_model import MambaModel
    from megatron.core.ssm import mamba_block
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import TransformerLayer, TransformerLayerSubmodules
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    class NormedColumnParallelLinear(ColumnParallelLinear):  # type: ignore[misc]
        def __init__(self, size: int, *args: Any, config: Any, **kwargs: Any) -> None:
            super().__init__(size, *args, config=config, **kwargs)
            own = dict(self._parameters)
            self._parameters.clear()
            self.layer_norm_weight = nn.Parameter(torch.ones(size, dtype=config.params_dtype))
            self.layer_norm_weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
            self._parameters.update(own)

        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(F.rms_norm(x, x.shape[-1:], self.layer_norm_weight, 1e-5))

    mamba_block.TENorm = WrappedTorchNorm
    mixer = ModuleSpec(
        module=MambaMixer,
        submodules=MambaMixerSubmodules(in_proj=NormedColumnParallelLinear, out_proj=RowParallelLinear),
    )
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=NormedColumnParallelLinear, core_attention=DotProductAttention, linear_proj=RowParallelLinear
        ),
    )
    mlp = ModuleSpec(
        module=MLP, submodules=MLPSubmodules(linear_fc1=NormedColumnParallelLinear, linear_fc2=RowParallelLinear)
    )
    moe = get_moe_module_spec(use_te=False, num_experts=spec.experts) if spec.experts else None
    of_layers = mamba_block.MambaStackSubmodules(
        mamba_layer=ModuleSpec(
            module=MambaLayer, submodules=MambaLayerSubmodules(mixer=mixer, mamba_bda=get_bias_dropout_add)
        ),
        attention_layer=ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(self_attention=attention, self_attn_bda=get_bias_dropout_add),
        ),
        mlp_layer=ModuleSpec(
            module=MLPLayer, submodules=TransformerLayerSubmodules(mlp=mlp, mlp_bda=get_bias_dropout_add)
        ),
        moe_layer=ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                pre_mlp_layernorm=WrappedTorchNorm, mlp=moe, mlp_bda=get_bias_dropout_add
            ),
        ),
    )
    return MambaModel(
        config,
        ModuleSpec(module=mamba_block.MambaStack, submodules=of_layers),
        vocab_size=vocab,
        max_sequence_length=8,
        pre_process=mpu.is_pipeline_first_stage(),
        post_process=mpu.is_pipeline_last_stage(),
        hybrid_override_pattern=spec.hybrid,
        share_embeddings_and_output_weights=spec.tied,
    )


def parts(mixer: Any, name: str) -> list[int] | None:
    """The numbers of rows of the parts that tensor parallelism cuts one by one in a rank's parameter of a mixer; None
    for parameters that are cut otherwise."""
    inner, states = mixer.d_inner_local_tp, mixer.ngroups_local_tp * mixer.d_state
    if name == "in_proj.weight":
        return [inner, inner, states, states, mixer.nheads_local_tp]
    if name.startswith("conv1d."):
        return [inner, states, states]
    if name in ("A_log", "dt_bias", "D", "norm.weight"):
        return [inner if name == "norm.weight" else mixer.nheads_local_tp]
    return None
