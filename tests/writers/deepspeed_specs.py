"""What the further DeepSpeed writers can be asked for (see :mod:`.deepspeed_more`); light, for both processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

__all__ = ["HF_MODELS", "AutoEPSpec", "AutoTPSpec", "HFSpec", "MegatronSpec", "MoeSpec", "PipeSpec", "ResumeSpec"]

Dtype = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True, kw_only=True)
class PipeSpec:
    """A pipeline of eight layers (:mod:`.pipe_model`)."""

    writer: ClassVar[str] = "deepspeed_pipe"

    stage: Literal[0, 1]
    dtype: Dtype = "bf16"
    pp: int = 2
    dp: int = 1
    seed: int = 0
    hidden: int = 22
    vocab: int = 83
    optimizer: Literal["adamw", "lion", "sgd"] = "adamw"
    bf16_optimizer: bool = False
    """DeepSpeed's choice for bf16 without ZeRO; with ZeRO-1, asked for through fp32 gradient accumulation."""
    model_axis: bool = False
    """PipeModelDataParallelTopology, which puts ``-model_00`` into the names of the layer files."""
    head_file: bool = False
    """The re-used embedding is a layer with a file: its own stage's copy."""
    parallel_write: bool = False
    """The data-parallel ranks share the writing of the layer files."""
    exclude_frozen: bool = False
    named_groups: bool = False
    """The optimizer is given named parameters."""
    more_ties: bool = False
    """Two more shared modules, of the same shape."""

    @property
    def world(self) -> int:
        return self.pp * self.dp


@dataclass(frozen=True, kw_only=True)
class MoeSpec:
    """Two MoE layers of DeepSpeed's own among dense ones."""

    writer: ClassVar[str] = "deepspeed_moe"

    stage: Literal[0, 1, 2]
    dtype: Dtype = "bf16"
    dp: int = 2
    ep: tuple[int, int] = (2, 2)
    """Over how many ranks the experts of each layer are spread."""
    experts: tuple[int, int] = (4, 2)
    """How many each layer has in all."""
    residual: bool = False
    """The second layer is a residual MoE: a dense expert beside the others."""
    data_before_expert: bool = False
    """``use_data_before_expert_parallelism``: which ranks share experts is the other way round."""
    bf16_optimizer: bool = False
    optimizer: Literal["adamw", "lion", "sgd"] = "adamw"
    seed: int = 0
    hidden: int = 18
    vocab: int = 61

    @property
    def world(self) -> int:
        return self.dp


@dataclass(frozen=True, kw_only=True)
class AutoEPSpec:
    """DeepSpeed's automatic expert parallelism of a tiny Mixtral."""

    writer: ClassVar[str] = "deepspeed_autoep"

    stage: Literal[0, 1, 2, 3]
    dtype: Dtype = "bf16"
    dp: int = 2
    tp: int = 1
    """With AutoTP, too: expert-parallel ranks are then consecutive ranks, whatever their tensor-parallel rank."""
    ep: int = 2
    experts: int = 4
    seed: int = 0
    vocab: int = 61
    layers: int = 2
    mlp: int = 23

    @property
    def world(self) -> int:
        return self.dp * self.tp


@dataclass(frozen=True, kw_only=True)
class AutoTPSpec:
    """DeepSpeed's automatic tensor parallelism of a tiny Llama, or of a model with fused parameters."""

    writer: ClassVar[str] = "deepspeed_autotp"

    stage: Literal[0, 1, 2, 3]
    dtype: Dtype = "bf16"
    dp: int = 1
    tp: int = 2
    """More ranks than key-value heads leave some with no attention at all."""
    fused: bool = False
    """Query, key and value in one parameter, gate and up in another, split part by part (``partition_config``)."""
    vocab_parallel: bool = False
    """Tied embeddings, both ends split by vocabulary."""
    frozen: bool = False
    """A split and a replicated parameter of the last layer are frozen."""
    bf16_optimizer: bool = False
    optimizer: Literal["adamw", "lion", "sgd", "adafactor"] = "adamw"
    seed: int = 0
    heads: int = 6
    kv_heads: int = 3
    head_size: int = 4
    mlp: int = 45
    vocab: int = 97
    layers: int = 2

    @property
    def world(self) -> int:
        return self.tp * self.dp


@dataclass(frozen=True, kw_only=True)
class MegatronSpec:
    """A pipeline of tensor-parallel layers, as Megatron-DeepSpeed has them (:mod:`.megatron_model`)."""

    writer: ClassVar[str] = "deepspeed_megatron"

    stage: Literal[0, 1] = 1
    dtype: Dtype = "bf16"
    tp: int = 2
    pp: int = 2
    dp: int = 1
    bf16_optimizer: bool = False
    uneven: bool = True
    """Three key-value heads over two ranks, six query heads, and universal checkpoint info of version 0.4, which says
    who has what.  Otherwise as many of each, an even split, and version 0.2."""
    optimizer: Literal["adamw", "lion", "sgd"] = "adamw"
    seed: int = 0
    hidden: int = 24
    mlp: int = 19
    vocab: int = 101
    layers: int = 3

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def heads(self) -> tuple[int, int, int]:
        """How many heads query, key and value have."""
        return (6, 3, 3) if self.uneven else (4, 4, 4)

    @property
    def padded_vocab(self) -> int:
        unit = 8 * self.tp
        return -(-self.vocab // unit) * unit


@dataclass(frozen=True, kw_only=True)
class HFSpec:
    """``out/ckpt``: the checkpoint; ``out/truth.pt``: weights, and the logits of ``ids``."""

    writer: ClassVar[str] = "deepspeed_hf"

    kind: Literal["zero3", "dcp", "ranks"]
    tied: bool = False
    lora: bool = False
    dp: int = 2

    @property
    def world(self) -> int:
        return self.dp


@dataclass(frozen=True, kw_only=True)
class ResumeSpec:
    """A run: from the start, saved after three steps and gone on with for three; or three from ``load`` on."""

    writer: ClassVar[str] = "deepspeed_resume"

    stage: int
    dp: int
    dtype: str = "fp32"
    optimizer: str = "adamw"
    """One of `.optimizers.make_optimizer`; "torch": AdamW without DeepSpeed (the start only, on one rank)."""
    scheduler: bool = True
    one_group: bool = False
    """ZeRO-3 gives all groups the options of the first when it loads a universal checkpoint, and one count of steps,
    which each of them then raises: it goes on as before with one group only."""
    load: str | None = None

    @property
    def world(self) -> int:
        return self.dp


_HF_KINDS: tuple[Literal["zero3", "dcp", "ranks"], ...] = ("zero3", "dcp", "ranks")
HF_MODELS = {
    **{kind: HFSpec(kind=kind) for kind in _HF_KINDS},
    **{f"{kind}_tied": HFSpec(kind=kind, tied=True) for kind in _HF_KINDS},
    "zero3_lora": HFSpec(kind="zero3", lora=True),
}
