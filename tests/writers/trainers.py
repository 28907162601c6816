"""Checkpoints of trainers, written by these themselves on the CPU; the truth is what the process held when it saved.

``python -m tests.writers.trainers FOLDER`` writes every case of :data:`CASES` to ``FOLDER/NAME/ckpt``, and what the
process held to ``FOLDER/NAME/truth.pt``. Each case has processes of its own, forked from one that has imported all:
trainers keep global state.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import traceback
import types
import warnings
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from . import Case
from .dcp_contents import TinyNet, adam, train

__all__ = ["CASES", "can_write", "load_case", "write_all"]

States = dict[str, dict[str, Tensor]]


class Spec(NamedTuple):
    world: int
    write: Callable[[Path], States]
    needs: tuple[str, ...]
    info: Mapping[str, Any]


CASES: dict[str, Spec] = {}


def case(needs: str, world: int = 1, **info: Any) -> Callable[[Callable[[Path], States]], Callable[[Path], States]]:
    """``needs``: the packages that write it."""

    def add(write: Callable[[Path], States]) -> Callable[[Path], States]:
        CASES[write.__name__] = Spec(world, write, tuple(needs.split()), info)
        return write

    return add


def can_write(name: str) -> bool:
    return all(importlib.util.find_spec(package) for package in CASES[name].needs)


# -- what the process holds


def held(
    weights: Mapping[str, Tensor], named: Iterable[tuple[str, nn.Parameter]], *optimizers: torch.optim.Optimizer
) -> States:
    """Weights, and the states of optimizers by the names of their parameters."""
    names = {id(p): name for name, p in named}
    found: States = {"weights": {name: t.detach().clone() for name, t in weights.items()}}
    for optimizer in optimizers:
        for p, states in optimizer.state.items():
            for state, value in states.items():
                if isinstance(value, Tensor):
                    found.setdefault(state, {})[names[id(p)]] = value.detach().clone()
    return found


def gathered(model: nn.Module, optimizer: torch.optim.Optimizer) -> States:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    from .torch_dcp import full, states_of  # it has cases of its own

    weights, optim = get_state_dict(model, optimizer)
    return states_of(full(weights), full(optim["state"]))


class Net(nn.Module):
    """Shapes that tell the parameters apart, a BatchNorm, a frozen layer; called with what a trainer passes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.bn = nn.BatchNorm1d(6)
        self.frozen = nn.Linear(6, 5)
        self.last = nn.Linear(5, 3)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.frozen(self.bn(self.first(x)).relu()))
        return out


# -- transformers


def _train(out: Path, model: Any, **options: Any) -> States:
    import transformers

    kept: dict[int, States] = {}

    class Keep(transformers.TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **now: Any) -> None:
            inner = getattr(now["optimizer"], "optimizer", now["optimizer"])
            kept[state.global_step] = held(model.state_dict(), model.named_parameters(), inner)

    torch.manual_seed(3)
    tokens = torch.randint(0, 60, (16, 5))
    labels = tokens if "LM" in type(model).__name__ else tokens[:, 0] % 2
    data = [{"input_ids": t, "labels": y} for t, y in zip(tokens, labels, strict=True)]
    arguments = transformers.TrainingArguments(
        output_dir=str(out), max_steps=4, save_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True,
        disable_tqdm=True, logging_strategy="no", **options,
    )  # fmt: skip
    transformers.Trainer(model=model, args=arguments, train_dataset=data, callbacks=[Keep()]).train()  # type: ignore[arg-type]
    torch.save(kept[2], out.parent / "older.pt")
    return kept[4]


SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 24,  # as wide as the rest: only the order tells the matrices apart
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@case("transformers accelerate", format="hf-trainer", tied={"lm_head.weight": "model.embed_tokens.weight"})
def trainer_llama(out: Path) -> States:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SIZES, num_key_value_heads=4, tie_word_embeddings=True, attention_bias=True)
    return _train(out, LlamaForCausalLM(config))


@case("transformers accelerate", format="hf-trainer", open_numbers=True)
def trainer_bert_frozen(out: Path) -> States:
    from transformers import BertConfig, BertForSequenceClassification

    model = BertForSequenceClassification(BertConfig(**SIZES, max_position_embeddings=17))
    model.bert.embeddings.requires_grad_(False)
    return _train(out, model, optim="sgd", optim_args="momentum=0.5")


@case("transformers accelerate", format="hf-trainer", tied={"lm_head.weight": "transformer.wte.weight"})
def trainer_gpt2(out: Path) -> States:
    from transformers import GPT2Config, GPT2LMHeadModel

    return _train(out, GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=16, n_layer=2, n_head=2, n_positions=9)),
                  optim="adafactor")  # fmt: skip


# -- accelerate


def _steps(accelerator: Any, model: nn.Module, *optimizers: Any) -> None:
    torch.manual_seed(5 + accelerator.process_index)
    for _ in range(2):
        accelerator.backward(model(torch.randn(4, 4)).square().mean())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def _accelerated(out: Path, **how: Any) -> States:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer = Net(), None
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.01, amsgrad=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    prepared = accelerator.prepare(model, optimizer, scheduler)
    accelerator.register_for_checkpointing(torch.optim.lr_scheduler.ConstantLR(optimizer))
    _steps(accelerator, *prepared[:2])
    accelerator.save_state(str(out), **how)
    return held(model.state_dict(), model.named_parameters(), optimizer)


@case("accelerate", format="accelerate", open_numbers=True)
def accelerate_safetensors(out: Path) -> States:
    return _accelerated(out)


@case("accelerate", format="accelerate")
def accelerate_bin(out: Path) -> States:
    return _accelerated(out, safe_serialization=False)


@case("accelerate", format="accelerate", open_numbers=True)
def accelerate_two(out: Path) -> States:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    models = [Net(), nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 2))]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]
    prepared = accelerator.prepare(*models, *optimizers)
    for m, o in zip(prepared[:2], prepared[2:], strict=True):
        _steps(accelerator, m, o)
    accelerator.save_state(str(out))
    both = nn.ModuleDict({"model": models[0], "model_1": models[1]})
    return held(both.state_dict(), both.named_parameters(), *optimizers)


def _fsdp(out: Path, version: int, kind: str) -> States:
    """What `save_state` calls for FSDP; choosing FSDP needs a GPU."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.checkpointing import save_accelerator_state
    from accelerate.utils import save_fsdp_model, save_fsdp_optimizer
    from torch.distributed.fsdp import FullyShardedDataParallel

    from .torch_dcp import line, sharded

    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, state_dict_type=kind, use_orig_params=version == 1)
    if version == 2:
        model, optimizer = sharded(line(2))
    else:
        model = FullyShardedDataParallel(TinyNet(), use_orig_params=True, device_id=torch.device("cpu"))  # type: ignore[assignment]
        optimizer = adam(model)
        train(model, optimizer)
    accelerator = Accelerator(cpu=True)
    save_fsdp_model(plugin, accelerator, model, str(out))
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, str(out))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    save_accelerator_state(str(out), [], [], [scheduler], [], dist.get_rank(), 5)
    return gathered(model, optimizer)


@case("accelerate", 2, format="accelerate")
def accelerate_fsdp1(out: Path) -> States:
    return _fsdp(out, 1, "SHARDED_STATE_DICT")


@case("accelerate", 2, format="accelerate")
def accelerate_fsdp2_full(out: Path) -> States:
    return _fsdp(out, 2, "FULL_STATE_DICT")


@case("accelerate", 2, format="accelerate")
def accelerate_fsdp2(out: Path) -> States:
    return _fsdp(out, 2, "SHARDED_STATE_DICT")


# -- Lightning


def _loader() -> Any:
    return torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=4)  # type: ignore[arg-type]


@case("lightning", format="torch", file="last.ckpt")
def lightning_two_optimizers(out: Path) -> States:
    import lightning

    class Gan(lightning.LightningModule):
        def __init__(self, width: int = 7) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.automatic_optimization = False
            self.generator, self.discriminator = Net(), nn.Linear(3, width)

        def training_step(self, batch: Tensor, number: int) -> None:
            self.manual_backward(self.discriminator(self.generator(batch)).square().mean())
            for optimizer in self.optimizers():  # type: ignore[union-attr]
                optimizer.step()
                optimizer.zero_grad()

        def configure_optimizers(self) -> Any:
            ours = [p for p in self.generator.parameters() if p.requires_grad]
            return [torch.optim.Adam(ours), torch.optim.AdamW(self.discriminator.parameters())]

    module = Gan()
    trainer = lightning.Trainer(
        max_steps=4, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, _loader())
    out.mkdir(parents=True)
    trainer.save_checkpoint(out / "last.ckpt")
    inner = [o.optimizer if hasattr(o, "optimizer") else o for o in module.optimizers()]  # type: ignore[union-attr]
    return held(module.state_dict(), module.named_parameters(), *inner)


def _sharded() -> tuple[nn.Module, torch.optim.Optimizer]:
    from .torch_dcp import line, sharded

    return sharded(line(2))


@case("lightning", 2, format="lightning")
def fabric_sharded(out: Path) -> States:
    from lightning.fabric.strategies.model_parallel import ModelParallelStrategy

    model, optimizer = _sharded()
    strategy = SimpleNamespace(broadcast=lambda p: p, _save_distributed_checkpoint=True, global_rank=dist.get_rank())
    state = {"net": model, "adam": optimizer, "iteration": 7, "ema": torch.arange(3.0)}
    ModelParallelStrategy.save_checkpoint(strategy, out, state)  # type: ignore[arg-type]
    return gathered(model, optimizer)


@case("lightning", 2, format="lightning")
def lightning_fsdp(out: Path) -> States:
    """What a Trainer hands to the strategy: its own part needs a GPU."""
    from lightning.pytorch.strategies.fsdp import FSDPStrategy
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = _sharded()
    weights, optim = get_state_dict(model, optimizer)
    checkpoint = {"epoch": 2, "global_step": 9, "state_dict": weights, "optimizer_states": [optim], "loops": {}}
    strategy = SimpleNamespace(broadcast=lambda p: p, _state_dict_type="sharded", global_rank=dist.get_rank())
    FSDPStrategy.save_checkpoint(strategy, checkpoint, out)  # type: ignore[arg-type]
    return gathered(model, optimizer)


@case("lightning deepspeed", 2, format="deepspeed-zero2", open_numbers=True)
def lightning_deepspeed(out: Path) -> States:
    """What a Trainer hands to the strategy, with the module that Lightning wrapped models in before 2.1."""
    import deepspeed
    from lightning.pytorch.strategies.deepspeed import DeepSpeedStrategy

    from .deepspeed_held import held as held_by

    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    wrapper = nn.Module()
    wrapper._forward_module = net = Net()
    wrapper.forward = net.forward  # type: ignore[method-assign]
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad])
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2},
              "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}  # fmt: skip
    engine, *_ = deepspeed.initialize(model=wrapper, optimizer=optimizer, config=config)
    for _ in range(2):
        engine.backward(engine(torch.randn(4, 4)).square().mean())
        engine.step()
    strategy: Any = SimpleNamespace(
        broadcast=lambda p: p, zero_stage_3=False, deepspeed_engine=engine, exclude_frozen_parameters=False
    )
    checkpoint = {"epoch": 2, "global_step": 9, "state_dict": {}, "loops": {"fit_loop": {"total": 3}}}
    DeepSpeedStrategy.save_checkpoint(strategy, checkpoint, out)
    states = held_by(engine)
    return {s: {n.removeprefix("_forward_module."): t for n, t in table.items()} for s, table in states.items()}


# -- PyTorch's own


def _bare(*names: str) -> None:
    """Packages without what their __init__ imports: theirs needs GPU packages that saving does not."""
    for name in names:
        package = types.ModuleType(name)
        package.__path__ = [folder for p in sys.path if os.path.isdir(folder := os.path.join(p, *name.split(".")))]
        sys.modules.setdefault(name, package)


class _Progress:
    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(2, dtype=torch.int32), "ntokens_seen": 700}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def _floats(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without what consolidation fails on, or writes as zeros."""
    return {name: t for name, t in state.items() if t.is_floating_point() and t.ndim}


def _titan(out: Path, steps: int, **how: Any) -> tuple[nn.Module, Any]:
    _bare("torchtitan")
    from torch.distributed.fsdp import fully_shard
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.lr_scheduler import LRSchedulersContainer
    from torchtitan.components.optimizer import OptimizersContainer
    from torchtitan.config.job_config import Checkpoint

    from .torch_dcp import line

    model = TinyNet()
    for layer in model.layers:
        fully_shard(layer, mesh=line(2))
    fully_shard(model, mesh=line(2))
    optimizers = OptimizersContainer([model], torch.optim.AdamW, {"lr": 0.01})
    manager = CheckpointManager(
        dataloader=None, model_parts=[model], optimizers=optimizers,
        lr_schedulers=LRSchedulersContainer(optimizers, lambda step: 1.0), states={"train_state": _Progress()},
        checkpoint_config=Checkpoint(enable=True, interval=1, enable_ft_dataloader_checkpoints=False, **how),
        sd_adapter=SimpleNamespace(to_hf=_floats, fqn_to_index_mapping=None), base_folder=str(out),
    )  # fmt: skip
    for step in range(1, steps + 1):
        train(model, optimizers.optimizers[0])
        manager.save(step, last_step=step == steps and bool(how))
    return model, optimizers.optimizers[0]


@case("torchtitan", 2, format="dcp", file="checkpoint")
def torchtitan(out: Path) -> States:
    return gathered(*_titan(out, 2))


@case("torchtitan", 2, format="huggingface", file="checkpoint")
def torchtitan_last(out: Path) -> States:
    model, optimizer = _titan(out, 2, last_save_model_only=True, last_save_in_hf=True)
    return {"weights": _floats(gathered(model, optimizer)["weights"])}


def _tune_checkpointers() -> Any:
    _bare("torchtune", "torchtune.training", "torchtune.training.checkpointing")
    from torchtune.training.checkpointing import _checkpointer, _utils

    for name in ("MODEL_KEY", "OPT_KEY", "ADAPTER_KEY", "ADAPTER_CONFIG"):  # its package has them
        setattr(sys.modules["torchtune.training"], name, getattr(_utils, name))
    return _checkpointer


def _tune(out: Path, kind: str, weights: dict[str, Tensor], **more: Any) -> Any:
    base = out.parent / "base"
    base.mkdir()
    name = "model-00001-of-00001.bin"
    torch.save(weights, base / name)
    config = {"num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 8, "model_type": "llama"}
    (base / "config.json").write_text(json.dumps(config))
    make = getattr(_tune_checkpointers(), kind)
    return make(checkpoint_dir=str(base), checkpoint_files=[name], model_type="LLAMA3", output_dir=str(out), **more)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Tuned(nn.Module):
    """With torchtune's names."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(11, 8)
        attention = {f"{name}_proj": nn.Linear(8, 8, bias=False) for name in ("q", "k", "v")}
        self.layers = nn.ModuleList([nn.ModuleDict({"attn": nn.ModuleDict(attention), "sa_norm": Norm()})])
        self.norm = Norm()
        self.output = nn.Linear(8, 11, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tok_embeddings(x)
        for layer in self.layers:
            h = h + sum(proj(layer["sa_norm"](h)) for proj in layer["attn"].values())  # type: ignore[index]
        out: Tensor = self.output(self.norm(h))
        return out


def _tuned(out: Path, kind: str, **more: Any) -> tuple[Tuned, torch.optim.Optimizer]:
    model = Tuned()
    optimizer = torch.optim.AdamW(model.parameters())
    converted = "HF" in kind
    weights = model.state_dict()
    if converted:
        _tune_checkpointers()
        from torchtune.models.convert_weights import tune_to_hf

        weights = tune_to_hf(weights, num_heads=2, num_kv_heads=2, dim=8)
    checkpointer = _tune(out, kind, weights, **more)
    checkpointer.load_checkpoint()
    for epoch in range(2):
        model(torch.arange(6)).square().mean().backward()
        optimizer.step()
        progress = {"seed": 1, "epochs_run": epoch + 1, "total_epochs": 3, "max_steps_per_epoch": 1}
        adapter = {"layers.0.attn.q_proj.lora_a.weight": torch.arange(6.0).view(2, 3) + epoch}
        state = {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict(), **progress}
        state |= {} if converted else {"adapter": adapter}
        if epoch == 0:
            torch.save(held(model.state_dict(), model.named_parameters(), optimizer), out.parent / "older.pt")
        checkpointer.save_checkpoint(state, epoch=epoch, intermediate_checkpoint=True)
    return model, optimizer


@case("torchtune", format="torchtune")
def torchtune(out: Path) -> States:
    model, optimizer = _tuned(out, "FullModelTorchTuneCheckpointer")
    return held(model.state_dict(), model.named_parameters(), optimizer)


@case("torchtune", format="torchtune", open_numbers=True)
def torchtune_converted(out: Path) -> States:
    """To the names and the layout of transformers; the optimizer's states stay torchtune's."""
    model, optimizer = _tuned(out, "FullModelHFCheckpointer", safe_serialization=True)
    return held({}, model.named_parameters(), optimizer)


@case("torchtune", format="dcp")
def torchtune_distributed(out: Path) -> States:
    make = _tune_checkpointers().DistributedCheckpointer
    model = Tuned()
    optimizer = torch.optim.AdamW(model.parameters())
    for epoch in (9, 10):
        model(torch.arange(6)).square().mean().backward()
        optimizer.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epochs_run": epoch + 1}
        make(str(out.parent / "base"), str(out)).save_checkpoint(state, epoch=epoch)
    return held(model.state_dict(), model.named_parameters(), optimizer)


def _checkpointing(out: Path, layouts: Mapping[str, Any], resharding: bool = True) -> States:
    import torch_checkpointing as tc
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.metadata_manager import DefaultMetadataManager
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    def gather(self: Any, data: Any, *_: Any) -> dict[int, Any]:  # its own asks for a GPU
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, data)
        return dict(enumerate(everyone))

    DefaultMetadataManager._all_gather_pickled_data = gather  # type: ignore[method-assign]
    model, optimizer = _sharded()
    weights, optim = get_state_dict(model, optimizer)
    resharder = DefaultResharder() if resharding else None
    items = {
        name: tc.ItemSpec(resharder=resharder if name != "train" else None, layout=layouts.get(name))
        for name in ("model", "optimizer", "train")
    }
    config = tc.CheckpointManager.Config(
        items=items, save=tc.SyncCheckpointSaverConfig(),
        storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
    )  # fmt: skip
    manager = config.build()
    train_state = {"step": 3, "rank": dist.get_rank()}
    manager.save(str(out), {"model": weights, "optimizer": optim, "train": train_state})
    manager.close()
    return gathered(model, optimizer)


@case("torch_checkpointing", 2, format="torch-checkpointing")
def torch_checkpointing(out: Path) -> States:
    return _checkpointing(out, {})


@case("torch_checkpointing", 2, format="torch-checkpointing", open={"format": "torch-checkpointing"})
def torch_checkpointing_bare(out: Path) -> States:
    return _checkpointing(out, {}, resharding=False)


@case("torch_checkpointing", 2, format="torch-checkpointing")
def torch_checkpointing_safetensors(out: Path) -> States:
    from torch_checkpointing.checkpoint_layout import JsonSerialization, LayoutInfo, SafetensorsSerialization

    return _checkpointing(
        out,
        {
            "model": LayoutInfo("model_{rank}.safetensors", SafetensorsSerialization()),
            "optimizer": None,
            "train": LayoutInfo("train_{rank}.json", JsonSerialization()),
        },
    )


# -- running them


def write_all(folder: Path) -> Path:
    """Write all cases, in a child process of their own."""
    package = __package__ or ""
    root = Path(__file__).resolve().parents[package.count(".") + 1]
    env = os.environ | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, "-m", f"{package}.trainers", str(folder)],
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode:
        raise RuntimeError(f"the writer failed with code {done.returncode}; its output:\n{done.stdout[-8000:]}")
    return folder


def load_case(folder: Path, name: str) -> Case:
    truth = torch.load(folder / name / "truth.pt")
    info = {"tied": {}, "archives": True, **json.loads((folder / name / "info.json").read_text())}
    return Case(folder / name / "ckpt" / info.get("file", ""), truth, info)


def _rank(rank: int, name: str, folder: Path, rendezvous: Path) -> None:
    spec = CASES[name]
    torch.set_num_threads(1)
    torch.manual_seed(1)
    if spec.world > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(spec.world)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
        store = f"file://{rendezvous}"
        dist.init_process_group("gloo", store, rank=rank, world_size=spec.world, timeout=timedelta(seconds=120))
    out = folder / name / "ckpt"
    if rank == 0:
        out.parent.mkdir()
    if dist.is_initialized():
        dist.barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        truth = spec.write(out)
    if rank == 0:
        torch.save(truth, folder / name / "truth.pt")
        (folder / name / "info.json").write_text(json.dumps(dict(spec.info)))
    if dist.is_initialized():
        dist.barrier()


def main(folder: Path, names: list[str]) -> None:
    for package in (
        "accelerate",
        "deepspeed",
        "lightning",
        "transformers.trainer",
    ):  # before forking: they take seconds
        if importlib.util.find_spec(package.split(".")[0]):
            importlib.import_module(package)
    # by their own name: what a rank pickles must not be a class of __main__
    from tests.writers import trainers as named

    failed = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in names or filter(can_write, CASES):
            print(f"=== {name}", flush=True)
            args = (name, folder, Path(scratch) / f"store_{name}")
            try:
                mp.start_processes(named._rank, args=args, nprocs=CASES[name].world, start_method="fork")  # type: ignore[attr-defined,no-untyped-call]
            except Exception:
                traceback.print_exc()
                failed.append(name)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
