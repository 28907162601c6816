"""Checkpoints of megatron-core, trained by it on gloo ranks: what to train, and the processes that do it.

``python -m tests.writers.megatron_core FOLDER`` writes every case of :data:`CASES` to ``FOLDER/NAME``: ``legacy`` (as
Megatron-LM saves with ``--ckpt-format torch``), ``dist`` (torch_dist), ``truth.pt`` (what the ranks held, gathered
under the names of the model on one rank) and ``logits.pt`` (tokens, and what the parallel model makes of them). One
set of forked ranks serves all cases of the same size. See :mod:`.megatron_cpu` for what Megatron needs on a CPU,
:mod:`.megatron_save` for how it is saved.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from . import Case

__all__ = ["CASES", "MegatronSpec", "load_case", "logits_alone", "write_all"]

STEPS = 3


@dataclass(frozen=True)
class MegatronSpec:
    """One training run. ``dp``: data-parallel ranks of the dense part; experts are spread over ``ep`` of tp * dp.
    ``hybrid``: a letter for each layer, M Mamba, * attention, - MLP, E experts."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    vpp: int | None = None
    ep: int = 1
    etp: int | None = None
    layers: int = 2
    hidden: int = 16
    heads: int = 4
    groups: int | None = None
    ffn: int = 24
    vocab: int = 61
    divisible: int = 4
    gated: bool = True
    bias: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    mla: bool = False
    tied: bool = False
    positions: Literal["rope", "learned_absolute", "none"] = "rope"
    norm: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    bf16: bool = False
    experts: int | None = None
    grouped: bool = False
    shared: int | None = None
    expert_bias: bool = False
    moe_freq: int | tuple[int, ...] = 1
    distributed: bool = False
    layerwise: bool = False
    mtp: int | None = None
    hybrid: str | None = None
    bucket: int | None = None
    first: int | None = None
    last: int | None = None
    account: bool = False
    layout: str | None = None
    dist: Literal["dp_reshardable", "fully_reshardable"] = "dp_reshardable"
    seed: int = 1

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def padded_vocab(self) -> int:
        step = self.divisible * self.tp
        return -(-self.vocab // step) * step


GELU: dict[str, Any] = {"gated": False, "bias": True, "norm": "LayerNorm", "positions": "learned_absolute"}
CASES: dict[str, MegatronSpec] = {
    "single": MegatronSpec(groups=2),
    "tp2_gelu_tied": MegatronSpec(tp=2, tied=True, qkv_bias=True, **GELU),
    "pp2_tied_bf16": MegatronSpec(pp=2, layers=4, tied=True, bf16=True, groups=2, seed=2),
    "pp2_vpp2": MegatronSpec(pp=2, vpp=2, layers=8, groups=1, qkv_bias=True, seed=3),
    "pp2_uneven": MegatronSpec(pp=2, layers=5, first=2, seed=4),
    "pp2_vpp2_account": MegatronSpec(pp=2, vpp=2, layers=6, account=True, seed=5),
    "pp2_vpp2_layout": MegatronSpec(pp=2, vpp=2, layers=5, layout="Et|t*2|t|tL", seed=6),
    "ep2": MegatronSpec(dp=2, ep=2, experts=4, groups=2, shared=12, seed=7),
    "ep2_distopt": MegatronSpec(dp=2, ep=2, experts=4, bf16=True, distributed=True, expert_bias=True, seed=8),
    "ep2_grouped": MegatronSpec(dp=2, ep=2, experts=6, bf16=True, grouped=True, seed=9),
    "tp2_mixed": MegatronSpec(tp=2, layers=4, experts=2, moe_freq=(0, 1, 1, 0), seed=10),
    "dp2_distopt_buckets": MegatronSpec(dp=2, tied=True, distributed=True, bucket=1500, **GELU, seed=11),
    "tp2_mla": MegatronSpec(tp=2, mla=True, seed=12),
    "tp2_pp2_bf16": MegatronSpec(tp=2, pp=2, layers=4, bf16=True, groups=2, qk_norm=True, seed=13),
    "tp2_pp2_vpp2_tied": MegatronSpec(tp=2, pp=2, vpp=2, layers=4, tied=True, bias=True, norm="LayerNorm", seed=14),
    "tp2_dp2_distopt": MegatronSpec(
        tp=2, dp=2, bf16=True, groups=2, distributed=True, seed=15, dist="fully_reshardable"
    ),
    "tp2_pp2_distopt_tied": MegatronSpec(
        tp=2, pp=2, layers=4, tied=True, bf16=True, distributed=True, groups=2, seed=16
    ),
    "tp2_ep2_etp1": MegatronSpec(tp=2, ep=2, etp=1, experts=4, groups=2, bias=True, seed=17),
    "tp2_dp2_ep2_etp2": MegatronSpec(tp=2, dp=2, ep=2, etp=2, experts=4, shared=12, seed=18),
    "pp2_ep2_distopt": MegatronSpec(pp=2, dp=2, ep=2, experts=4, distributed=True, seed=19),
    "tp2_dp2_grouped_etp2": MegatronSpec(tp=2, dp=2, ep=2, etp=2, experts=4, bf16=True, grouped=True, seed=20),
    "tp4_gelu": MegatronSpec(tp=4, groups=4, **GELU, seed=21),
    "tp2_dp2_distopt_buckets": MegatronSpec(
        tp=2, dp=2, groups=2, bf16=True, qk_norm=True, hidden=24, distributed=True, bucket=1500, seed=22
    ),
    "pp2_dp2_vpp2_distopt_tied": MegatronSpec(
        pp=2, dp=2, vpp=2, layers=4, tied=True, qkv_bias=True, distributed=True, **GELU, seed=23
    ),
    "tp2_dp2_ep2_etp1_distopt": MegatronSpec(
        tp=2, dp=2, ep=2, etp=1, experts=4, shared=12, moe_freq=(0, 1, 1), layers=3, distributed=True, seed=24
    ),
    "ep2_grouped_distopt": MegatronSpec(dp=2, ep=2, experts=4, bf16=True, grouped=True, distributed=True, seed=26),
    "tp2_dp2_mla_distopt": MegatronSpec(tp=2, dp=2, mla=True, bf16=True, distributed=True, seed=25),
    "dp2_layerwise": MegatronSpec(dp=2, layers=3, groups=2, bf16=True, qkv_bias=True, layerwise=True, seed=27),
    "tp2_dp2_ep2_layerwise": MegatronSpec(tp=2, dp=2, ep=2, experts=4, etp=2, bf16=True, layerwise=True, seed=28),
    "tp2_dp2_mtp_distopt": MegatronSpec(tp=2, dp=2, mtp=1, groups=2, bf16=True, distributed=True, seed=29),
    "tp2_hybrid": MegatronSpec(tp=2, layers=4, hybrid="M*-M", groups=2, positions="none", seed=40),
    "ep2_hybrid": MegatronSpec(
        dp=2, ep=2, layers=3, hybrid="EM*", experts=4, tied=True, bf16=True, positions="none", seed=41
    ),
    "pp2_dp2_hybrid_distopt": MegatronSpec(
        pp=2, dp=2, layers=4, hybrid="MM*-", bf16=True, distributed=True, positions="none", seed=42
    ),
}


def write_all(folder: Path) -> Path:
    """Write all cases, in a child process of their own."""
    _run("megatron_core", str(folder))
    return folder


def _run(module: str, *args: str) -> str:
    package = __package__ or ""
    root = Path(__file__).resolve().parents[package.count(".") + 1]
    env = os.environ | {
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", f"{package}.{module}", *args],
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode:
        raise RuntimeError(f"{module} failed with code {done.returncode}; its output:\n{done.stdout[-8000:]}")
    return done.stdout


def load_case(folder: Path, name: str, kind: Literal["legacy", "dist"]) -> Case:
    truth = torch.load(folder / name / "truth.pt")
    if kind == "legacy" and CASES[name].distributed:
        del truth["step"]  # a number of the optimizer's groups, in meta
    info = json.loads((folder / name / "info.json").read_text()) | {"tied": {}}
    return Case(folder / name / kind, truth, info | {"logits": str(folder / name / "logits.pt")})


def logits_alone(folder: Path) -> dict[str, dict[str, float]]:
    """Load all checkpoints into the model on one rank, by lazyckpt, in a child process: kind -> name -> how far its
    logits are from the parallel model's, at most, relative to their size."""
    there = [name for name in CASES if (folder / name).is_dir()]  # (not all are recorded)
    names = {"legacy": there, "dist": [name for name in there if not CASES[name].grouped]}
    # (of grouped experts, distributed checkpoints have other names than the model)
    out = _run("megatron_alone", str(folder), json.dumps(names))
    found: dict[str, dict[str, float]] = json.loads(out.splitlines()[-1])
    return found


# -- in the child


def config_of(spec: MegatronSpec, alone: bool = False) -> Any:
    """The model's configuration; ``alone``: on one rank."""
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig
    from torch.nn import functional as F  # noqa: N812

    from .megatron_hybrid import SIZES

    dtype = torch.bfloat16 if spec.bf16 else torch.float32
    values: dict[str, Any] = {
        "num_layers": spec.layers,
        "hidden_size": spec.hidden,
        "num_attention_heads": spec.heads,
        "num_query_groups": spec.groups,
        "ffn_hidden_size": spec.ffn,
        "gated_linear_unit": spec.gated,
        "activation_func": F.silu if spec.gated else F.gelu,
        "add_bias_linear": spec.bias,
        "add_qkv_bias": spec.qkv_bias,
        "qk_layernorm": spec.qk_norm,
        "normalization": spec.norm,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": spec.bf16,
        "init_method_std": 0.2,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
        "deallocate_pipeline_outputs": False,
    }
    if spec.experts:
        values |= {
            "num_moe_experts": spec.experts,
            "moe_ffn_hidden_size": spec.ffn,
            "moe_router_topk": 2,
            "moe_token_dispatcher_type": "allgather",
            "moe_aux_loss_coeff": 0.0 if spec.expert_bias else 1e-2,
            "moe_router_load_balancing_type": "none" if spec.expert_bias else "aux_loss",
            "moe_router_enable_expert_bias": spec.expert_bias,
            "moe_router_score_function": "sigmoid" if spec.expert_bias else "softmax",
            "moe_grouped_gemm": spec.grouped,
            "moe_use_legacy_grouped_gemm": spec.grouped,
            "moe_shared_expert_intermediate_size": spec.shared,
            "moe_layer_freq": list(spec.moe_freq) if isinstance(spec.moe_freq, tuple) else spec.moe_freq,
        }
    if spec.mla:
        values |= {
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_head_dim": 2,
            "qk_pos_emb_head_dim": 2,
            "v_head_dim": 4,
            "rope_type": "rope",
            "multi_latent_attention": True,
        }
    if spec.mtp:
        values |= {"mtp_num_layers": spec.mtp}
    if spec.hybrid:
        values |= {"is_hybrid_model": True, **SIZES}
    if not alone:
        values |= {
            "tensor_model_parallel_size": spec.tp,
            "pipeline_model_parallel_size": spec.pp,
            "virtual_pipeline_model_parallel_size": spec.vpp,
            "expert_model_parallel_size": spec.ep,
            "expert_tensor_parallel_size": spec.etp,
            "sequence_parallel": spec.tp > 1 and bool(spec.experts),
            "num_layers_in_first_pipeline_stage": spec.first,
            "num_layers_in_last_pipeline_stage": spec.last,
            "account_for_embedding_in_pipeline_split": spec.account,
            "account_for_loss_in_pipeline_split": spec.account,
            "pipeline_model_parallel_layout": spec.layout,
        }
    return (MLATransformerConfig if spec.mla else TransformerConfig)(**values)


def build(spec: MegatronSpec, alone: bool = False, vocab: int | None = None) -> list[Any]:
    """This rank's chunks of the model."""
    from megatron.core import mpu
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec

    from .megatron_hybrid import model as hybrid_model

    config = config_of(spec, alone)
    if spec.hybrid:
        return [hybrid_model(spec, config, vocab or spec.padded_vocab)]
    chunks = []
    for i in range((not alone and spec.vpp) or 1):
        stage = i if spec.vpp and not alone else None
        if spec.experts:
            layer_spec = get_gpt_decoder_block_spec(
                config, use_transformer_engine=False, normalization=spec.norm, vp_stage=stage
            )
        else:
            layer_spec = get_gpt_layer_local_spec(
                qk_layernorm=spec.qk_norm, multi_latent_attention=spec.mla, normalization=spec.norm
            )
        chunks.append(
            GPTModel(
                config,
                layer_spec,
                vocab_size=vocab or spec.padded_vocab,
                max_sequence_length=8,
                pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
                post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
                share_embeddings_and_output_weights=spec.tied,
                position_embedding_type=spec.positions,
                vp_stage=stage,
                mtp_block_spec=_mtp_of(spec, config, layer_spec, stage),
            )
        )
    return chunks


def _mtp_of(spec: MegatronSpec, config: Any, layer_spec: Any, stage: int | None) -> Any:
    """The block that predicts further tokens; None if the model has none, or not on this stage."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    made = get_gpt_mtp_block_spec(config, layer_spec, use_transformer_engine=False, vp_stage=stage)
    return made if spec.mtp else None


def tokens_of(spec: MegatronSpec, seed: int) -> torch.Tensor:
    return torch.randint(0, spec.vocab, (2, 8), generator=torch.Generator().manual_seed(seed))


def forward(model: Any, tokens: torch.Tensor, labels: torch.Tensor | None) -> torch.Tensor:
    from .megatron_save import unwrap

    bare = unwrap(model)
    predicts = getattr(bare, "mtp_process", False), bare.config.mtp_num_layers
    if labels is None:  # what predicts further tokens is for training
        bare.mtp_process, bare.config.mtp_num_layers = False, None
    positions = torch.arange(8).expand(2, 8)
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool).triu(1)
    out: torch.Tensor = model(tokens, positions, mask, labels=labels)
    bare.mtp_process, bare.config.mtp_num_layers = predicts
    return out


def prepare(spec: MegatronSpec, chunks: list[Any]) -> tuple[Any, Any, Any]:
    """What trains: (the wrapped chunks, optimizer, scheduler)."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.transformer.module import Float16Module

    config = chunks[0].config
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=spec.distributed,
        overlap_grad_reduce=spec.bucket is not None,
        bucket_size=spec.bucket,
        grad_reduce_in_fp32=spec.bf16,
    )
    wrapped = [Float16Module(config, c) if spec.bf16 else c for c in chunks]
    wrapped = [
        DistributedDataParallel(config, ddp, c, disable_bucketing=n > 0 and spec.bucket is None)
        for n, c in enumerate(wrapped)
    ]
    options = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        min_lr=1e-3,
        weight_decay=0.1,
        clip_grad=1.0,
        bf16=spec.bf16,
        params_dtype=config.params_dtype,
        use_distributed_optimizer=spec.distributed,
    )
    optimizer = _layerwise(options, wrapped) if spec.layerwise else get_megatron_optimizer(options, wrapped)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=1e-2,
        min_lr=1e-3,
        lr_warmup_steps=1,
        lr_decay_steps=10,
        lr_decay_style="cosine",
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=10,
        wd_incr_style="constant",
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    for chunk in wrapped:
        chunk.config = config
    return wrapped, optimizer, scheduler


def _layerwise(options: Any, wrapped: list[Any]) -> Any:
    """Muon, whose data-parallel ranks each update some layers. The package with Megatron's Muon is not on PyPI: torch's
    takes its place, which keeps the same state."""
    from megatron.core.optimizer import muon

    class Muon(torch.optim.Muon):
        def __init__(self, params: Any, lr: float, momentum_beta: float, weight_decay: float, **_: Any) -> None:
            super().__init__(params, lr=lr, momentum=momentum_beta, weight_decay=weight_decay)

    one = muon.LayerWiseDistributedOptimizer
    one.allgather_params = one.broadcast_params  # gloo gathers only what is of one size
    muon.TensorParallelMuon = Muon
    muon.HAVE_EMERGING_OPTIMIZERS = True
    return muon.get_megatron_muon_optimizer(options, wrapped, layer_wise_distributed_optimizer=True)


def train(
    spec: MegatronSpec, wrapped: list[Any], optimizer: Any, scheduler: Any, steps: int = STEPS, alike: bool = False
) -> list[float]:
    """Train some steps. ``alike``: with the same data on all data-parallel ranks. Return the loss of each step, on the
    last stage of the pipeline; elsewhere []."""
    losses = []
    for step in range(steps):
        for chunk in wrapped:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        batches = run_schedule(spec, wrapped, step, alike=alike)
        optimizer.step()
        scheduler.step(increment=1)
        losses += [sum(float(one["loss"]) for one in batches) / len(batches)] if batches else []
    return losses


def run_schedule(
    spec: MegatronSpec, chunks: list[Any], step: int, only_forward: bool = False, alike: bool = False
) -> Any:
    """One pass of the pipeline's schedule: the losses of the microbatches on the last stage; only forward: the logits
    there."""
    from megatron.core import mpu
    from megatron.core.pipeline_parallel import get_forward_backward_func

    seed = 100 if only_forward else 1000 * step + (0 if alike else mpu.get_data_parallel_rank())

    def take(output: torch.Tensor, non_loss_data: bool = False) -> Any:
        if non_loss_data:
            return output
        loss = output.float().mean()
        return loss, {"loss": loss.detach()}

    def forward_step(data: Any, model: Any) -> Any:
        tokens = tokens_of(spec, seed)
        return forward(model, tokens, None if only_forward else tokens.roll(-1, 1)), take

    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(())] * len(chunks) if spec.vpp else None,
        model=chunks if spec.vpp else chunks[0],
        num_microbatches=2,
        seq_length=8,
        micro_batch_size=2,
        forward_only=only_forward,
        collect_non_loss_data=only_forward,
    )


def start(spec: MegatronSpec, instances: int = 1) -> None:
    """``instances``: groups of data-parallel ranks, each of which holds the whole state of the optimizer."""
    from megatron.core import mpu, tensor_parallel
    from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

    mpu.destroy_model_parallel()
    get_moe_layer_wise_logging_tracker().clear()  # it is as long as the first model was deep
    mpu.initialize_model_parallel(
        spec.tp,
        spec.pp,
        spec.vpp,
        expert_model_parallel_size=spec.ep,
        expert_tensor_parallel_size=spec.etp,
        create_gloo_process_groups=True,
        num_distributed_optimizer_instances=instances,
    )
    torch.manual_seed(spec.seed)
    tensor_parallel.model_parallel_cuda_manual_seed(spec.seed, force_reset_rng=True)


def _case(spec: MegatronSpec, rank: int, out: Path) -> None:
    from . import megatron_save, megatron_truth

    start(spec)
    chunks, optimizer, scheduler = prepare(spec, build(spec))
    train(spec, chunks, optimizer, scheduler)
    truth = megatron_truth.gather(spec, chunks, optimizer)
    megatron_save.save_legacy(spec, out / "legacy", chunks, optimizer, scheduler)
    megatron_save.save_dist(spec, out / "dist", chunks, optimizer, scheduler)
    for chunk in chunks:
        chunk.eval()
    with torch.no_grad():
        outputs = run_schedule(spec, chunks, 0, only_forward=True)
    logits = megatron_truth.gather_logits(outputs)
    if rank == 0:
        torch.save(truth, out / "truth.pt")
        torch.save({"tokens": tokens_of(spec, 100), "logits": logits}, out / "logits.pt")
        (out / "info.json").write_text(json.dumps(asdict(spec) | {"world": spec.world}))


def main(folder: Path, only: list[str]) -> None:
    # by their own name: what a rank pickles must not be a class of __main__
    from tests.writers import megatron_core as named

    from .megatron_cpu import patch
    from .megatron_ranks import run_ranks

    patch()
    worlds = {name: spec.world for name, spec in CASES.items() if name in only or not only}
    for name in worlds:
        (folder / name).mkdir()
    run_ranks(worlds, lambda name, rank: named._case(named.CASES[name], rank, folder / name))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
