"""Small checkpoints for the notebooks, written by the frameworks themselves, on ranks that are processes of the CPU.

    checkpoints.temporary_folder()                              # work there; it is removed when the kernel ends
    checkpoints.write("deepspeed", "zero3", ranks=4, stage=3)   # a small Llama, trained with ZeRO-3 and saved

The model is transformers' Llama with four layers. It learns to go on counting: 5, 8, 11, 14, ... (modulo the size of
the vocabulary). Training happens in processes of its own (``python checkpoints.py``), so a notebook's kernel
has neither DeepSpeed nor process groups in it.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MODEL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LEARNING_RATE = 3e-3

# -- for the notebooks


def temporary_folder() -> None:
    """Make a temporary folder and work in it. It is removed with its contents when the kernel ends."""
    folder = tempfile.TemporaryDirectory(prefix="lazyckpt-notebook-")
    os.chdir(folder.name)

    def leave() -> None:
        os.chdir(Path(folder.name).parent)
        folder.cleanup()

    atexit.register(leave)


def write(kind: str, folder: str, ranks: int = 1, **options: Any) -> None:
    """Train on this many ranks and save to ``folder``. ``kind`` is the name of a function below ("deepspeed", "fsdp2",
    "huggingface"), which gets the ``options``."""
    with tempfile.TemporaryDirectory() as scratch:
        job = {"kind": kind, "folder": os.path.abspath(folder), "ranks": ranks, "scratch": scratch, "options": options}
        done = subprocess.run(
            [sys.executable, __file__, json.dumps(job)],
            env=os.environ | {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0", "OMP_NUM_THREADS": "1", "TMPDIR": scratch},
            cwd=scratch,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    if done.returncode:
        raise RuntimeError(f"{kind} could not write {folder}:\n{done.stdout}")


def run(command: str) -> None:
    """Run ``lazyckpt ...`` as in a shell, with this kernel's Python, and print what it prints."""
    words = shlex.split(command)
    env = {key: value for key, value in os.environ.items() if key not in ("FORCE_COLOR", "CLICOLOR_FORCE")}
    done = subprocess.run(
        [sys.executable, "-m", *words], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    print(done.stdout, end="")
    if done.returncode:
        print(f"exit code {done.returncode}")


# -- in the processes that train


def deepspeed(folder: Path, rank: int, stage: int, steps: int = 3, saves: int = 1) -> None:
    """Train with ZeRO in bfloat16, with float32 master weights and moments. Save the last ``saves`` steps."""
    import deepspeed
    import torch

    # its all-reduce through shared memory would be compiled now; gloo's does
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)  # takes the process group that there is
    model = new_model()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01),
        config={
            "train_micro_batch_size_per_gpu": 8,
            "bf16": {"enabled": True},
            "zero_allow_untested_optimizer": True,  # torch's own AdamW, which needs no compiler
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        },
    )
    for step, ids in batches(rank, steps):
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
        if step > steps - saves:
            engine.save_checkpoint(str(folder))


def fsdp2(folder: Path, rank: int, steps: int = 48, every: int = 6) -> None:
    """Train fully sharded and save with torch.distributed.checkpoint to step-1, step-6, step-12, ..."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard

    model = new_model()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    for step, ids in batches(rank, steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % every == 0 or step == 1:
            weights, states = get_state_dict(model, optimizer)
            state = {"model": weights, "optim": states, "step": step, "loss": loss.item()}
            dcp.save(state, checkpoint_id=folder / f"step-{step}")


def huggingface(folder: Path, rank: int) -> None:
    """Save an untrained model in bfloat16, in several safetensors files."""
    import torch

    new_model().to(torch.bfloat16).save_pretrained(folder, max_shard_size="150KB")


def new_model() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**MODEL))


def batches(rank: int, steps: int) -> Iterator[tuple[int, Any]]:
    """Yield (step from 1, 8 sequences of tokens that count up in steps of 1 to 4)."""
    import torch

    draw = torch.Generator().manual_seed(rank)
    for step in range(1, steps + 1):
        start = torch.randint(MODEL["vocab_size"], (8, 1), generator=draw)
        stride = torch.randint(1, 5, (8, 1), generator=draw)
        yield step, (start + stride * torch.arange(24)) % MODEL["vocab_size"]


def run_rank(rank: int, job: dict[str, Any]) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(job["ranks"])}
    store = f"file://{job['scratch']}/store"  # where the ranks find each other
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=job["ranks"])
    globals()[job["kind"]](Path(job["folder"]), rank, **job["options"])
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def main(job: dict[str, Any]) -> None:
    import torch.multiprocessing as mp

    # once, not in every rank
    late = {
        "deepspeed": ("deepspeed", "torch._inductor.compile_fx"),
        "fsdp2": ("torch.distributed.checkpoint.state_dict",),
    }
    for module in (*late.get(job["kind"], ()), "transformers.models.llama.modeling_llama"):
        importlib.import_module(module)
    mp.start_processes(run_rank, (job,), nprocs=job["ranks"], start_method="fork")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
