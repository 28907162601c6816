"""megatron-core without a GPU: what it does to "cuda" happens on the CPU, and gloo carries what NCCL would.

Nothing of it touches what is computed or written. Megatron asks for device "cuda" by name, compares ``Tensor.type()``
with "torch.cuda...", keeps the generator of each tensor-parallel rank as the state of a CUDA generator, and coalesces
collectives, which gloo cannot. Without apex and Transformer Engine it takes torch's AdamW and its own modules.
"""

from __future__ import annotations

import copy
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from queue import Queue
from types import ModuleType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from . import megatron_hybrid


class OnCPU(TorchFunctionMode):
    """Every "cuda" is the CPU, and the CPU's tensors say that they are CUDA's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.to:
            args = tuple("cpu" if isinstance(a, str | torch.device) and "cuda" in str(a) else a for a in args)
        return func(*args, **kwargs)


class _Works:
    """What a coalescing manager gives: waits for each of the collectives."""

    def __init__(self) -> None:
        self.works: list[Any] = []

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def patch() -> None:
    """Before anything of Megatron is made, in the process that forks the ranks."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # Megatron compiles small functions when it is imported
    sys.modules["grouped_gemm"] = _grouped_gemm()
    sys.modules.update(megatron_hybrid.kernels())

    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.distributed import param_and_grad_buffer as buffers
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = None  # 0.16.1 forgets to define it without Transformer Engine
    _complete_local_modules()
    cuda: Any = torch.cuda
    cuda.current_device = lambda: "cpu"
    cuda.synchronize = cuda.empty_cache = cuda.set_device = lambda *_: None
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = cuda.random.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    logging.getLogger(random.__name__).disabled = True  # it finds the generator of the CPU changed
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    plain = {name: getattr(torch.distributed, name) for name in ("all_reduce", "reduce_scatter_tensor")}
    gather = torch.distributed.all_gather_into_tensor

    @contextmanager
    def one_by_one(group: Any, device: Any = None, async_ops: bool = False) -> Iterator[_Works]:
        """Each collective on its own. (A reduce-scatter writes into its own input: gloo needs them apart.)"""
        yield _Works()

    def reduce_scatter(output: Any, data: Any, op: Any = None, group: Any = None, async_op: bool = False) -> None:
        whole = data.clone()
        plain["all_reduce"](whole, op=op, group=group)
        output.copy_(whole.chunk(torch.distributed.get_world_size(group))[torch.distributed.get_rank(group)])

    def all_gather(output: Any, data: Any, group: Any = None, async_op: bool = False) -> None:
        gather(output, data.clone(), group=group)

    buffers._coalescing_manager = one_by_one
    buffers.dist_reduce_scatter_func = reduce_scatter
    buffers.dist_all_gather_func = all_gather
    parallel_state.get_nccl_options = lambda *_: None
    # a queue for what saves in the background tell; nothing is saved there, and its process would import torch again
    filesystem_async._get_write_results_queue = cache(Queue)


def _complete_local_modules() -> None:
    """Two things that only Transformer Engine's modules take: norms under sequence parallelism (their parameters are
    marked, so that Megatron sums their gradients), and attention of MLA (here its keys and values are as wide)."""
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    make, attend = WrappedTorchNorm.__new__, DotProductAttention.__init__

    def norm(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        made = make(cls, replace_sequence_parallel(config), *args, **kwargs)
        for p in made.parameters():
            p.sequence_parallel = config.sequence_parallel
        return made

    def replace_sequence_parallel(config: Any) -> Any:
        config = copy.copy(config)
        config.sequence_parallel = False
        return config

    def attention(self: Any, *args: Any, k_channels: Any = None, v_channels: Any = None, **kwargs: Any) -> None:
        attend(self, *args, **kwargs)

    WrappedTorchNorm.__new__ = norm
    DotProductAttention.__init__ = attention
    for name in ("TELinear", "TEColumnParallelLinear"):
        setattr(multi_latent_attention, name, type(name, (), {}))


def _grouped_gemm() -> ModuleType:
    """The product of each expert's tokens with its matrix: what the package of that name does on a GPU."""

    def gmm(a: torch.Tensor, b: torch.Tensor, sizes: torch.Tensor, trans_b: bool = False) -> torch.Tensor:
        parts = a.split([int(n) for n in sizes])
        return torch.cat([x @ (w.t() if trans_b else w) for x, w in zip(parts, b, strict=True)])

    module, ops = ModuleType("grouped_gemm"), ModuleType("grouped_gemm.ops")
    ops.gmm = gmm  # type: ignore[attr-defined]
    module.ops = ops  # type: ignore[attr-defined]
    module.__spec__ = None
    return module
