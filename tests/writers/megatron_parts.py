"""Layers that megatron-core's models do not have, as the bridges make them of its modules (for `megatron_logits`).

Sources: Megatron-Bridge, gemma/modules.py and gemma2_provider.py (norms behind linear layers), mbridge,
mbridge/models/glm4_vl/transformer_layer.py (norms behind attention and MLP), NeMo, llm/bert/model/bert_spec.py and
nlp/models/language_modeling/megatron/falcon/falcon_decoder_layer.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.nn import functional as F  # noqa: N812


def replaced(spec: Any, new: Mapping[Any, Any]) -> Any:
    """A specification with other modules in place of some."""
    if isinstance(spec, list):
        return [replaced(one, new) for one in spec]
    if isinstance(spec, ModuleSpec):
        return replace(spec, module=replaced(spec.module, new), submodules=replaced(spec.submodules, new))
    if is_dataclass(spec) and not isinstance(spec, type):
        return replace(spec, **{one.name: replaced(getattr(spec, one.name), new) for one in fields(spec)})
    return new.get(spec, spec) if isinstance(spec, type) else spec


class LessOneRMS(torch.nn.Module):
    """An RMSNorm whose weights are stored less 1 (``layernorm_zero_centered_gamma``)."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(hidden_size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight + 1, self.eps)


class LessOneLayerNorm(LessOneRMS):
    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(config, hidden_size, eps)
        self.bias = torch.nn.Parameter(torch.zeros(hidden_size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight + 1, self.bias, self.eps)


class _NormBehind(RowParallelLinear):
    norm: Any = WrappedTorchNorm

    def __init__(self, input_size: int, output_size: int, *, config: Any, **more: Any) -> None:
        super().__init__(input_size, output_size, config=config, **more)
        self.post_layernorm = self.norm(config, output_size, eps=config.layernorm_epsilon)

    def forward(self, x: torch.Tensor) -> Any:
        out, bias = super().forward(x)
        return self.post_layernorm(out), bias


class NormBehind(_NormBehind):
    """A linear layer with a norm behind it (EXAONE 4)."""


class LessOneBehind(_NormBehind):
    """The same with weights less 1 (Gemma 2 and 3)."""

    norm = LessOneRMS


class Layer(TransformerLayer):
    """A layer whose steps others change."""

    def attended(self, x: torch.Tensor, mask: Any, more: Mapping[str, Any]) -> torch.Tensor:
        given = {key: more[key] for key in ("rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin") if key in more}
        out, bias = self.self_attention(x, attention_mask=mask, **given)
        return out if bias is None else out + bias

    def fed(self, x: torch.Tensor) -> torch.Tensor:
        out, bias = self.mlp(x)
        return out if bias is None else out + bias

    def norm(self) -> Any:
        return WrappedTorchNorm(self.config, self.config.hidden_size, self.config.layernorm_epsilon)


class SideBySide(Layer):
    """Attention and MLP side by side, from two norms or one (GPT-NeoX, Falcon)."""

    def forward(self, hidden_states: torch.Tensor, attention_mask: Any = None, **more: Any) -> Any:
        x = self.input_layernorm(hidden_states)
        second = x if isinstance(self.pre_mlp_layernorm, IdentityOp) else self.pre_mlp_layernorm(hidden_states)
        return hidden_states + self.attended(x, attention_mask, more) + self.fed(second), None


class OldFalcon(Layer):
    """Falcon RW: attention, then MLP, with another name for the norm between them."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.post_self_attn_layernorm = self.norm()

    def forward(self, hidden_states: torch.Tensor, attention_mask: Any = None, **more: Any) -> Any:
        x = hidden_states + self.attended(self.input_layernorm(hidden_states), attention_mask, more)
        return x + self.fed(self.post_self_attn_layernorm(x)), None


class PostNorm(Layer):
    """Norms behind attention and MLP, on what goes on (BERT)."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.post_att_layernorm, self.post_mlp_layernorm = self.norm(), self.norm()

    def forward(self, hidden_states: torch.Tensor, attention_mask: Any = None, **more: Any) -> Any:
        x = self.post_att_layernorm(hidden_states + self.attended(hidden_states, attention_mask, more))
        return self.post_mlp_layernorm(x + self.fed(x)), None


class Sandwich(Layer):
    """Norms before and behind attention and MLP (GLM-4)."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.post_self_attn_layernorm, self.post_mlp_layernorm = self.norm(), self.norm()

    def forward(self, hidden_states: torch.Tensor, attention_mask: Any = None, **more: Any) -> Any:
        attended = self.attended(self.input_layernorm(hidden_states), attention_mask, more)
        x = hidden_states + self.post_self_attn_layernorm(attended)
        return x + self.post_mlp_layernorm(self.fed(self.pre_mlp_layernorm(x))), None


class BesideMamba(Layer):
    """Mamba 2 and attention side by side, from one norm (Falcon-H1)."""

    def __init__(self, config: Any, *args: Any, **more: Any) -> None:
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear

        super().__init__(config, *args, **more)
        self._modules["norm"] = self.norm()
        self.mamba_mixer = MambaMixer(
            config,
            MambaMixerSubmodules(ColumnParallelLinear, RowParallelLinear),
            config.hidden_size,
            layer_number=self.layer_number,
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )

    def forward(self, hidden_states: torch.Tensor, attention_mask: Any = None, **more: Any) -> Any:
        x = self._modules["norm"](hidden_states)
        x = hidden_states + self.mamba_mixer(x)[0] + self.attended(x, attention_mask, more)
        return x + self.fed(self.pre_mlp_layernorm(x)), None


class Biased(DotProductAttention):
    """Attention with relative positions, which only Transformer Engine's has."""

    def forward(
        self, query: Any, key: Any, value: Any, attention_mask: Any, *_: Any, attention_bias: Any = None, **__: Any
    ) -> torch.Tensor:
        scores = torch.einsum("ibhd,jbhd->bhij", query, key) * self.softmax_scale
        scores = scores if attention_bias is None else scores + attention_bias
        scores = scores if attention_mask is None else scores.masked_fill(attention_mask, -1e4)
        return torch.einsum("bhij,jbhd->ibhd", scores.softmax(-1), value).flatten(2)


def delta_net() -> ModuleSpec:
    """Gated delta nets of local modules; their kernels are those that megatron-core has for determinism."""
    from megatron.core.ssm import gated_delta_net
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    gated_delta_net.HAVE_FLA = True
    gated_delta_net.l2norm = lambda x: x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
    modules = gated_delta_net.GatedDeltaNetSubmodules(
        in_proj=ColumnParallelLinear, out_norm=LessOneRMS, out_proj=RowParallelLinear
    )
    return ModuleSpec(module=gated_delta_net.GatedDeltaNet, submodules=modules)
