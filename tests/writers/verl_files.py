"""Checkpoints of verl, written on gloo ranks by its own `MegatronCheckpointManager` and `FSDPCheckpointManager`.

verl itself, without its dependencies, has to be on the path (``pip install --no-deps verl``): what its managers import
and do not use to save is replaced. Megatron's models are trained as in megatron_core.py; FSDP2's model is a tiny Llama
with LoRA of peft. The names of the folders, the file of the data loader and the tracker are those that
verl/trainer/ppo/ray_trainer.py `_save_checkpoint` writes. ``python -m tests.writers.verl_files FOLDER`` writes every
case of :data:`CASES`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from . import Case, frameworks
from .frameworks import _without
from .trainers import Spec, States, _bare

__all__ = ["CASES", "load_case", "write_all"]

CASES: dict[str, Spec] = {}
TRACKER = "latest_checkpointed_iteration.txt"


def case(world: int, **info: Any) -> Callable[[Callable[[Path], States]], Callable[[Path], States]]:
    def add(write: Callable[[Path], States]) -> Callable[[Path], States]:
        CASES[write.__name__] = Spec(world, write, ("verl", "megatron", "peft"), info)
        return write

    return add


def _import_verl() -> None:
    _bare("verl", "verl.utils", "verl.utils.checkpoint", "verl.trainer", "verl.workers")
    _without("omegaconf", "ray", "verl.workers.config", "verl.utils.model", "verl.trainer.config")
    logging.disable(logging.WARNING)


class _Config(dict[str, Any]):
    """verl/trainer/config/config.py `CheckpointConfig`, which needs verl's other packages."""

    async_save = False


def _checkpoint_config(*contents: str, **more: Any) -> _Config:
    return _Config(save_contents=list(contents), load_contents=list(contents), **more)


class _Tokenizer:
    def save_pretrained(self, folder: str) -> None:
        (Path(folder) / "tokenizer_config.json").write_text("{}")


def _tiny_config(**how: Any) -> Any:
    from transformers import LlamaConfig

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaConfig(**{"vocab_size": 61, "num_hidden_layers": 2, "max_position_embeddings": 8, **sizes, **how})


# -- Megatron


class _Megatron:
    """A role that trains: the wrapped chunks of its model, and verl's manager of its checkpoints."""

    def __init__(
        self,
        role: str,
        *contents: str,
        dist_ckpt: bool = True,
        bridge: Any = None,
        reshardable: bool = False,
        **how: Any,
    ) -> None:
        from .megatron_core import MegatronSpec, build, prepare, start

        self.spec = MegatronSpec(groups=2, **how)
        start(self.spec)
        _import_verl()
        from verl.utils.checkpoint.megatron_checkpoint_manager import MegatronCheckpointManager

        chunks = build(self.spec)
        config = chunks[0].config
        config.transformer_impl = "local"  # what it is; verl itself builds Transformer Engine's modules
        self.chunks, self.optimizer, self.schedule = prepare(self.spec, chunks)
        megatron = SimpleNamespace(
            dist_ckpt_optim_fully_reshardable=reshardable, distrib_optim_fully_reshardable_mem_efficient=False
        )
        own = SimpleNamespace(megatron=megatron)
        self.manager = MegatronCheckpointManager(
            config=SimpleNamespace(model=SimpleNamespace(path="tiny"), megatron=megatron, **{role: own}),
            checkpoint_config=_checkpoint_config(*(contents or ("model", "optimizer", "extra"))),
            model_config=None,
            transformer_config=config,
            role=role,
            model=self.chunks,
            arch="LlamaForCausalLM",
            hf_config=_tiny_config(),
            param_dtype=config.params_dtype,
            share_embeddings_and_output_weights=self.spec.tied,
            processing_class=_Tokenizer(),
            optimizer=self.optimizer,
            optimizer_scheduler=self.schedule,
            use_distributed_optimizer=self.spec.distributed,
            use_dist_checkpointing=dist_ckpt,
            bridge=bridge,
        )

    def train(self) -> States:
        from . import megatron_truth
        from .megatron_core import train

        train(self.spec, self.chunks, self.optimizer, self.schedule, steps=1)
        return megatron_truth.gather(self.spec, self.chunks, self.optimizer)


def _step(folder: Path, step: int, **roles: Any) -> None:
    """verl/trainer/ppo/ray_trainer.py `_save_checkpoint`."""
    for name, role in roles.items():
        role.save_checkpoint(str(folder / f"global_step_{step}" / name), None, step, max_ckpt_to_keep=None)
    dist.barrier()
    if dist.get_rank() == 0:
        torch.save({"_sampler_iter_yielded": step}, folder / f"global_step_{step}" / "data.pt")
        (folder / TRACKER).write_text(str(step))
    dist.barrier()


def _both(**roles: States) -> States:
    return {
        state: {f"{role}.{name}": t for role, of in roles.items() for name, t in of.get(state, {}).items()}
        for state in {state: None for of in roles.values() for state in of}
    }


def _without_step(states: States) -> States:
    """The distributed optimizer's step is a number of its groups."""
    return {state: table for state, table in states.items() if state != "step"}


@case(4, format="verl", tp=2, dp=2)
def verl_megatron(out: Path) -> States:
    """A run of two steps: an actor and a critic, each with the distributed optimizer's buckets."""
    with _on_cpu():
        how: dict[str, Any] = {"tp": 2, "dp": 2, "distributed": True, "layers": 1}
        actor = _Megatron("actor", **how, seed=3)
        kept: States = {}
        for step in (1, 2):
            kept = actor.train()
            _step(out, step, actor=actor.manager)
            if step == 1 and dist.get_rank() == 0:
                torch.save(_without_step(kept), out.parent / "older.pt")
        critic = _Megatron("critic", **how, seed=4)
        values = critic.train()
        _step(out, 2, critic=critic.manager)
    return _without_step(_both(actor=kept, critic=values))


@case(4, format="megatron-dist", pp=2, dp=2)
def verl_megatron_vpp(out: Path) -> States:
    with _on_cpu():
        how: dict[str, Any] = {"pp": 2, "vpp": 2, "dp": 2, "layers": 4}
        actor = _Megatron("actor", **how, distributed=True, bf16=True, reshardable=True)
        kept = actor.train()
        actor.manager.save_checkpoint(str(out), None, 7)
    return _without_step(kept)


@case(2, format="megatron-dist", tp=2)
def verl_megatron_flat(out: Path) -> States:
    """The layout until 0.7: all of it in one folder, by the functions that today write three of them."""
    with _on_cpu():
        actor = _Megatron("actor", tp=2)
        kept, m = actor.train(), actor.manager
        metadata = m._build_sharded_state_dict_metadata()
        model = m._build_model_sharded_state_dict(metadata)
        state = {**model, **m._build_optimizer_state_dict(model, metadata), **m._build_extra_state_dict()}
        if dist.get_rank() == 0:
            (out / "dist_ckpt").mkdir(parents=True)
            (out / "huggingface").mkdir()
            m.hf_config.save_pretrained(out / "huggingface")
        dist.barrier()
        m._save_transformer_config(str(out))
        m._save_dist_checkpoint(str(out / "dist_ckpt"), state)
    return kept


class _Bridge:
    """What mbridge does, for a few tensors: they are gathered, and rank 0 writes them under Hugging Face's names."""

    def __init__(self) -> None:
        self.tensors = {"lm_head.weight": torch.randn(61, 16), "model.norm.weight": torch.randn(16)}

    def save_weights(self, models: Any, weights_path: str) -> None:
        from safetensors.torch import save_file

        if dist.get_rank() == 0:
            save_file(self.tensors, Path(weights_path) / "model.safetensors")


@case(2, format="huggingface", dp=2, problems=["undecided-name"])
def verl_bridge(out: Path) -> States:
    """verl's default: weights by mbridge, the optimizer by Megatron."""
    with _on_cpu():
        bridge = _Bridge()
        actor = _Megatron("actor", dp=2, distributed=True, bridge=bridge, dist_ckpt=False, reshardable=True, layers=1)
        kept = actor.train()
        actor.manager.save_checkpoint(str(out), None, 1)
    return _without_step({**kept, "weights": bridge.tensors})


def _on_cpu() -> Any:
    from .megatron_cpu import OnCPU, patch

    patch()
    return OnCPU()


# -- FSDP


def _lora(out: Path, only: bool) -> States:
    _import_verl()
    from peft import LoraConfig, get_peft_model
    from torch.distributed.fsdp import fully_shard
    from transformers import LlamaForCausalLM
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

    from .torch_dcp import line
    from .trainers import gathered

    torch.manual_seed(2)
    model: Any = LlamaForCausalLM(_tiny_config(num_hidden_layers=1))
    model.config.architectures = ["LlamaForCausalLM"]
    model = get_peft_model(model, LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "down_proj"]))
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=line(2))
    fully_shard(model, mesh=line(2))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    manager = FSDPCheckpointManager(
        model=model,
        optimizer=optimizer,
        lr_scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0),
        processing_class=_Tokenizer(),
        checkpoint_config=_checkpoint_config("model", "optimizer", "extra", save_lora_only=only),
    )
    loss = model(torch.arange(8)[None] + dist.get_rank()).logits.float().square().mean()
    loss.backward()
    optimizer.step()
    _step(out, 1, actor=manager)
    wrapper = "base_model.model."
    kept = {
        s: {name.removeprefix(wrapper): t for name, t in table.items()}
        for s, table in gathered(model, optimizer).items()
    }
    if only:
        kept["weights"] = {name: t for name, t in kept["weights"].items() if "lora_" in name}
    return kept


@case(2, format="fsdp-dtensor", dp=2)
def verl_fsdp_lora(out: Path) -> States:
    return _lora(out, only=False)


@case(2, format="fsdp-dtensor", dp=2)
def verl_fsdp_lora_only(out: Path) -> States:
    return _lora(out, only=True)


# -- running them


def write_all(folder: Path) -> Path:
    return frameworks.run("verl_files", folder)


def load_case(folder: Path, name: str) -> Case:
    return frameworks.load_case(folder, name)


if __name__ == "__main__":
    frameworks.main("verl_files", Path(sys.argv[1]), sys.argv[2:])
