"""Folders of runs that LitGPT, Composer and others write, by their own functions on the CPU.

These packages, without their dependencies, have to be on the path (``pip install --no-deps litgpt``): what they import
and do not use to save is replaced. ``python -m tests.writers.run_folders FOLDER`` writes every case of :data:`CASES`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.abc
import importlib.machinery
import json
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import Case, frameworks
from .frameworks import _type, _without
from .trainers import Spec, States, _bare, held

__all__ = ["CASES", "load_case", "write_all"]

CASES: dict[str, Spec] = {}


def case(needs: str, world: int = 1, **info: Any) -> Callable[[Callable[[Path], States]], Callable[[Path], States]]:
    """``needs``: the packages that write it."""

    def add(write: Callable[[Path], States]) -> Callable[[Path], States]:
        CASES[write.__name__] = Spec(world, write, tuple(needs.split()), info)
        return write

    return add


# -- LitGPT


_SIZES: dict[str, Any] = {
    "name": "tiny", "block_size": 8, "padded_vocab_size": 20, "n_layer": 1, "n_head": 2, "n_embd": 8, "bias": False,
    "intermediate_size": 12, "mlp_class_name": "LLaMAMLP", "norm_class_name": "RMSNorm", "rotary_percentage": 1.0,
    "n_query_groups": 1,
}  # fmt: skip


def _litgpt() -> nn.Module:
    _without("jsonargparse", "litdata")
    import litgpt
    from litgpt import parser_config

    torch.manual_seed(3)

    def save_hyperparameters(function: Any, folder: Path, *more: Any) -> None:
        (folder / "hyperparameters.yaml").write_text("train:\n  save_interval: 1\n")  # jsonargparse makes this text

    parser_config.save_hyperparameters = save_hyperparameters
    model: nn.Module = litgpt.GPT(litgpt.Config(**_SIZES))
    return model


def _steps(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model(torch.arange(8)[None] + 1).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@case("litgpt lightning", format="litgpt", problems=["other-checkpoint"])
def litgpt_pretrain(out: Path) -> States:
    """Two steps and the last state."""
    model = _litgpt()
    from lightning.fabric import Fabric
    from litgpt import pretrain

    fabric = Fabric(accelerator="cpu", devices=1)
    module = fabric.setup(model)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    optimizer = fabric.setup_optimizers(optimizer)
    state: dict[str, Any] = {"model": module, "optimizer": optimizer, "iter_num": 0, "step_count": 0}
    kept: States = {}
    for step in (1, 2):
        _steps(module, optimizer)
        state |= {"iter_num": 4 * step, "step_count": step}
        kept = held(model.state_dict(), model.named_parameters(), optimizer)
        pretrain.save_checkpoint(fabric, state, None, out / f"step-{step:08d}" / "lit_model.pth")
    pretrain.save_checkpoint(fabric, state, None, out / "final" / "lit_model.pth")
    return kept


@case("litgpt lightning", format="litgpt", file="final")
def litgpt_lora(out: Path) -> States:
    """The adapter alone."""
    _litgpt()
    from lightning.fabric import Fabric
    from litgpt import lora
    from litgpt.finetune.lora import save_lora_checkpoint
    from litgpt.utils import save_config

    config = lora.Config(**_SIZES, lora_r=2, lora_alpha=4, lora_query=True, lora_value=True)
    torch.manual_seed(5)
    model = lora.GPT(config)
    lora.mark_only_lora_as_trainable(model)
    fabric = Fabric(accelerator="cpu", devices=1)
    (out / "final").mkdir(parents=True)
    save_lora_checkpoint(fabric, fabric.setup(model), out / "final" / "lit_model.pth.lora")
    save_config(config, out / "final")
    return {"weights": {name: t.detach().clone() for name, t in model.state_dict().items() if "lora_" in name}}


# -- Composer


class _Unused(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Packages that Composer imports and does not use to save."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] in ("torchvision", "mcli"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        module.__getattr__ = _type  # type: ignore[method-assign]


def _composer() -> None:
    import transformers.modeling_utils  # before torchvision seems to be there

    assert transformers
    sys.meta_path.insert(0, _Unused())


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6)
        self.down = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(x))
        return out


@case("composer torchmetrics coolname", format="torch")
def composer_files(out: Path) -> States:
    """The trainer's run of two batches."""
    _composer()
    from composer import Trainer
    from composer.models import ComposerModel
    from torch.utils.data import DataLoader, TensorDataset

    class Model(ComposerModel):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = _Net()

        def forward(self, batch: Any) -> Any:
            return self.net(batch[0])

        def loss(self, outputs: Any, batch: Any) -> Any:
            return (outputs - batch[1]).square().mean()

    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(16, 4), torch.randn(16, 3))
    with contextlib.chdir(out.parent):
        trainer = Trainer(
            model=model,
            optimizers=optimizer,
            train_dataloader=DataLoader(data, batch_size=4),
            max_duration="2ba",
            save_folder=out.name,  # its checkpoints name their files
            save_interval="1ba",
            device="cpu",
            run_name="tiny",
            progress_bar=False,
        )
        trainer.fit()
    return held(model.state_dict(), model.named_parameters(), optimizer)


@case("composer torchmetrics coolname", 2, format="dcp")
def composer_sharded(out: Path) -> States:
    """What the trainer's callback calls; the trainer itself shards on a GPU only. The state is that of
    composer/core/state.py `State.state_dict`."""
    _composer()
    from composer.utils import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard

    from .torch_dcp import line
    from .trainers import gathered

    torch.manual_seed(4)
    model = _Net()
    fully_shard(model, mesh=line(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    kept: States = {}
    for batch in (1, 2):
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        weights, optim = get_state_dict(model, optimizer)
        timestamp = {"Timestamp": {"epoch": 0, "batch": batch}}
        whole = {"model": weights, "optimizers": {"AdamW": optim}, "timestamp": timestamp, "run_name": "tiny"}
        state = types.SimpleNamespace(
            state_dict=lambda whole=whole: whole,
            fsdp_sharded_state_dict_enabled=True,
            fsdp_config=types.SimpleNamespace(save_planner=None),
            device_mesh=None,
        )
        checkpoint._save_checkpoint(state, f"{out}/ep0-ba{batch}/__{dist.get_rank()}_0.distcp")
        kept = gathered(model, optimizer)
    return kept


# -- ColossalAI


@case("colossalai", format="colossalai", file="epoch-0_step-2")
def colossalai_sharded(out: Path) -> States:
    """As applications/Colossal-LLaMA/colossal_llama/utils/ckpt_io.py `save_checkpoint` does."""
    _bare("colossalai", "colossalai.checkpoint_io")
    parts = ["accelerator", "interface", "interface.model", "tensor", "tensor.d_tensor", "utils", "utils.safetensors"]
    parts.append("logging")
    _without(*(f"colossalai.{part}" for part in parts))
    from colossalai.checkpoint_io import utils
    from colossalai.checkpoint_io.general_checkpoint_io import GeneralCheckpointIO

    utils.is_distributed_tensor = lambda t: False
    model = _Net()
    groups = [{"params": [p for p in model.parameters() if p.ndim == 2]}, {"params": [model.up.bias, model.down.bias]}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    for _ in range(2):
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
    root = out / "epoch-0_step-2"
    root.mkdir(parents=True)
    io = GeneralCheckpointIO()
    io.save_sharded_model(model, str(root / "modeling"), max_shard_size=1e-4)
    io.save_sharded_optimizer(optimizer, str(root / "optimizer"), True, None, 2e-4)
    io.save_lr_scheduler(schedule, str(root / "lr_scheduler"))
    (root / "running_states.json").write_text(json.dumps({"epoch": 0, "step": 2, "sample_start_index": 8}))
    return held(model.state_dict(), model.named_parameters(), optimizer)


# -- MLX


def _mlx_truth(tensors: Mapping[str, Any]) -> States:
    import mlx.core as mx
    import numpy as np

    return {"weights": {name: torch.from_numpy(np.array(mx.array(t))) for name, t in tensors.items()}}


@case("mlx mlx_lm", format="mlx", problems=["other-checkpoint"])
def mlx_adapters(out: Path) -> States:
    """The trainer of mlx-lm: two iterations of a module of layers with LoRA."""
    import mlx.core as mx
    import mlx.nn as nn
    import mlx.optimizers as optim
    from mlx.utils import tree_flatten
    from mlx_lm.tuner.lora import LoRALinear
    from mlx_lm.tuner.trainer import TrainingArgs, train
    from mlx_lm.tuner.utils import print_trainable_parameters

    class Model(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layers = [LoRALinear.from_base(nn.Linear(4, 4), r=2)]

        def __call__(self, x: Any) -> Any:
            return self.layers[0](x)

    mx.random.seed(3)
    model = Model()
    model.freeze()
    model.layers[0].unfreeze(keys=["lora_a", "lora_b"])
    print_trainable_parameters(model)
    out.mkdir(parents=True)
    (out / "adapter_config.json").write_text(json.dumps({"fine_tune_type": "lora", "lora_parameters": {"rank": 2}}))

    def batches(**how: Any) -> Any:
        while True:
            yield mx.ones((2, 4)), mx.array([[0, 4], [0, 4]])

    def loss(model: Any, batch: Any, lengths: Any) -> Any:
        return (model(batch) - 3.0).square().mean(), mx.array(8)

    args = TrainingArgs(
        batch_size=2, iters=2, val_batches=0, steps_per_report=10, steps_per_eval=100, steps_per_save=1,
        adapter_file=str(out / "adapters.safetensors"),
    )  # fmt: skip
    train(model, optim.Adam(learning_rate=0.01), [1] * 4, [1] * 4, args=args, loss=loss, iterate_batches=batches)
    return _mlx_truth(dict(tree_flatten(model.trainable_parameters())))


@case("mlx mlx_lm", format="mlx")
def mlx_npz(out: Path) -> States:
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_flatten

    mx.random.seed(4)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    model.layers[1].set_dtype(mx.float16)
    out.mkdir(parents=True)
    model.save_weights(str(out / "weights.npz"))
    (out / "config.json").write_text('{"model_type": "tiny"}')
    return _mlx_truth(dict(tree_flatten(model.parameters())))


# -- Levanter


@case("levanter jax optax equinox", format="levanter", archives=False)
def levanter_steps(out: Path) -> States:
    """Two steps of optax's AdamW. Levanter's package haliax is replaced: it is for named arrays, here are none."""
    _bare("levanter", "levanter.utils")
    parts = ["jax_utils", "nn", "nn.scan", "partitioning", "types", "util", "_src", "_src.util"]
    _without("haliax", *(f"haliax.{part}" for part in parts))
    _without("braceexpand", "draccus", "levanter.utils.fsspec_utils", "levanter.utils.types")
    for part in parts[:6]:
        if "." not in part:
            setattr(sys.modules["haliax"], part, sys.modules[f"haliax.{part}"])
    named: Any = sys.modules["haliax"]
    named.is_named_array = named.util.is_named_array = lambda leaf: False
    named.jax_utils.is_jax_array_like = lambda leaf: hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    sys.modules["draccus"].field = dataclasses.field  # type: ignore[attr-defined]
    import equinox
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from levanter.checkpoint import save_checkpoint

    class Layer(equinox.Module):  # type: ignore[misc]
        weight: Any
        bias: Any

    class Model(equinox.Module):  # type: ignore[misc]
        embed: Any
        layers: list[Any]

    class State(equinox.Module):  # type: ignore[misc]  # levanter/trainer_state.py `TrainerState`
        step: Any
        model: Any
        opt_state: Any
        training_key: Any

    key = jax.random.PRNGKey(2)
    layer = Layer(jax.random.normal(key, (4, 4)), jnp.ones(4, jnp.bfloat16))
    model = Model(jax.random.normal(key, (7, 4)), [layer])
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    state = optimizer.init(model)
    for step in (1, 2):
        updates, state = optimizer.update(jax.tree.map(lambda x: x * 0.5, model), state, model)
        model = optax.apply_updates(model, updates)
        whole = State(jnp.array(step), model, state, key)
        save_checkpoint(whole, step, f"{out}/step-{step}", is_temporary=False)

    def tensor(leaf: Any) -> Tensor:
        bits = np.asarray(leaf)
        return (
            torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
            if leaf.dtype == jnp.bfloat16
            else torch.tensor(bits)
        )

    def flat(tree: Any) -> dict[str, Tensor]:
        rest = tree.layers[0]
        return {
            "embed": tensor(tree.embed), "layers.0.weight": tensor(rest.weight), "layers.0.bias": tensor(rest.bias)
        }  # fmt: skip

    adam = state[1][0]
    weights = flat(model)
    others = {"step": torch.tensor(2, dtype=torch.int32), "training_key": tensor(key)}
    count = dict.fromkeys(weights, tensor(adam.count))
    return {"weights": weights, "mu": flat(adam.mu), "nu": flat(adam.nu), "count": count, "others": others}


# -- running them


def write_all(folder: Path) -> Path:
    return frameworks.run("run_folders", folder)


def load_case(folder: Path, name: str) -> Case:
    return frameworks.load_case(folder, name)


if __name__ == "__main__":
    frameworks.main("run_folders", Path(sys.argv[1]), sys.argv[2:])
