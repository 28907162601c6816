"""megatron-core goes on from checkpoints of rank files: what its ranks hold then, and after one more step.

``python -m tests.writers.megatron_resume FOLDER`` reads ``FOLDER/jobs.json``, name -> {"load": path, "spec": of the
run}, and writes ``FOLDER/NAME.pt``: ``loaded`` and ``stepped`` (as :mod:`.megatron_truth` gathers them), ``logits``,
the ``iteration``, and the ``losses`` of that step and of the next one. No package has megatron.training; its steps are
followed here, each with the name of the function.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .megatron_core import MegatronSpec, _run, build, prepare, run_schedule, start, train

Jobs = Mapping[str, tuple[Path, MegatronSpec]]


def resume(folder: Path, jobs: Jobs, module: str = "megatron_resume") -> dict[str, dict[str, Any]]:
    """Run the jobs, in child processes of a module beside this one: what each of them wrote."""
    folder.mkdir(parents=True, exist_ok=True)
    listed = {name: {"load": str(path), "spec": asdict(spec)} for name, (path, spec) in jobs.items()}
    (folder / "jobs.json").write_text(json.dumps(listed))
    _run(module, str(folder))
    return {name: torch.load(folder / f"{name}.pt") for name in jobs}


# -- in the child


def checkpoint_name(root: Path) -> tuple[Path, bool]:
    """``read_metadata`` and ``get_checkpoint_name``: this rank's file, and whether it is a release."""
    from megatron.core import mpu

    text = (root / "latest_checkpointed_iteration.txt").read_text().strip()
    release = text == "release"
    if not release and int(text) <= 0:
        raise RuntimeError(f"error parsing metadata file: {text}")
    name = f"mp_rank_{mpu.get_tensor_model_parallel_rank():02d}"
    if mpu.get_pipeline_model_parallel_world_size() > 1:
        name += f"_{mpu.get_pipeline_model_parallel_rank():03d}"
    if mpu.get_expert_model_parallel_world_size() > 1:
        name += f"_{mpu.get_expert_model_parallel_rank():03d}"
    return root / ("release" if release else f"iter_{int(text):07d}") / name / "model_optim_rng.pt", release


def check_checkpoint_args(args: Any, spec: MegatronSpec) -> None:
    """The function of that name: what the run's arguments are compared with has to be there."""
    wanted = {
        "num_layers": spec.layers,
        "hidden_size": spec.hidden,
        "num_attention_heads": spec.heads,
        "tensor_model_parallel_size": spec.tp,
        "pipeline_model_parallel_size": spec.pp,
        "padded_vocab_size": spec.padded_vocab,
    }
    for name, value in wanted.items():
        if getattr(args, name) != value:
            raise RuntimeError(f"{name} value from checkpoint ({getattr(args, name)}) is not {value}")


def load_checkpoint(root: Path, spec: MegatronSpec, chunks: list[Any], optimizer: Any, scheduler: Any) -> int:
    """``_load_base_checkpoint`` and ``load_checkpoint`` of --ckpt-format torch: the iteration. --no-load-rng."""
    from megatron.core.safe_globals import register_safe_globals

    register_safe_globals()
    path, release = checkpoint_name(root)
    if (path.parents[1] / "metadata.json").exists():
        return load_dist(path.parents[1], spec, chunks, optimizer, scheduler)
    state = torch.load(path, map_location="cpu", weights_only=True)  # as torch does by default
    if state.get("checkpoint_version", 0) != 3.0:
        raise RuntimeError("rows of q, k and v would be put in another order")
    if not isinstance(state["args"], Namespace):
        raise RuntimeError(f"args: {state['args']}")
    check_checkpoint_args(state["args"], spec)
    for i, chunk in enumerate(chunks):
        chunk.load_state_dict(state[f"model{i}" if len(chunks) > 1 else "model"], strict=True)
    if release:
        return 0
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["opt_param_scheduler"])
    return int(state["iteration"])


def _prepare_adamw(spec: MegatronSpec, chunks: list[Any], optimizer: Any, scheduler: Any) -> None:
    """Prepare the distributed optimizer for loading, which it does only with Transformer Engine's FusedAdam: torch's
    AdamW has to have done a step, and keeps its count of steps, which the groups have, with each parameter."""
    train(spec, chunks, optimizer, scheduler, steps=1, alike=True)
    scheduler.num_steps = 0  # (loading adds to it)
    for one in optimizer.chained_optimizers:

        def set_states(
            parameter: Any, tensors: Any, one: Any = one, real: Any = one._set_main_param_and_optimizer_states
        ) -> None:
            with torch.no_grad():  # (of float32 weights, the copies are views of them)
                real(parameter, one._get_main_param_and_optimizer_states(parameter) | tensors)

        one._set_main_param_and_optimizer_states = set_states


def load_dist(folder: Path, spec: MegatronSpec, chunks: list[Any], optimizer: Any, scheduler: Any) -> int:
    """``load_checkpoint`` of --ckpt-format torch_dist: the iteration. --no-load-rng."""
    from megatron.core import dist_checkpointing, mpu

    from .megatron_save import unwrap

    content = dist_checkpointing.load_content_metadata(str(folder)) or {}
    metadata = content | {"dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True)}
    models: dict[str, Any] = {
        f"model{i}" if len(chunks) > 1 else "model": unwrap(c).sharded_state_dict(metadata=metadata)
        for i, c in enumerate(chunks)
    }
    wanted = dict(models)
    if folder.name != "release":
        if spec.distributed:
            _prepare_adamw(spec, chunks, optimizer, scheduler)
        wanted["optimizer"] = optimizer.sharded_state_dict(models, is_loading=True, metadata=metadata)
    state = dist_checkpointing.load(wanted, str(folder))
    if state["args"].num_layers != spec.layers:
        raise RuntimeError(f"args: {state['args']}")
    for key, chunk in zip(models, chunks, strict=True):
        unwrap(chunk).load_state_dict(state[key], strict=True)
    if folder.name == "release":
        return 0
    optimizer.load_state_dict(state["optimizer"])
    for one in optimizer.chained_optimizers if spec.distributed else ():
        for group in one.optimizer.param_groups:  # (they share one count, which each parameter would raise)
            for p in group["params"]:
                states = one.optimizer.state[p]
                states["step"] = torch.as_tensor(float(group.get("step", states["step"])))
    scheduler.load_state_dict(state["opt_param_scheduler"])
    return int(state["iteration"])


def _job(root: Path, spec: MegatronSpec, rank: int, out: Path) -> None:
    from . import megatron_truth

    start(spec)
    chunks, optimizer, scheduler = prepare(spec, build(spec))
    iteration = load_checkpoint(root, spec, chunks, optimizer, scheduler)
    found: dict[str, Any] = {"iteration": iteration}
    for chunk in chunks:
        chunk.eval()
    with torch.no_grad():
        outputs = run_schedule(spec, chunks, 0, only_forward=True)
    found["logits"] = megatron_truth.gather_logits(outputs)
    if iteration:  # else the optimizer has no states yet
        found["loaded"] = megatron_truth.gather(spec, chunks, optimizer)
        for chunk in chunks:
            chunk.train()
        losses = train(spec, chunks, optimizer, scheduler, steps=1, alike=True)
        found["stepped"] = megatron_truth.gather(spec, chunks, optimizer)
        losses += train(spec, chunks, optimizer, scheduler, steps=1, alike=True)
        everyone: list[list[float]] = [[]] * dist.get_world_size()
        dist.all_gather_object(everyone, losses)
        (found["losses"],) = {tuple(one) for one in everyone if one}  # (the same on all ranks of the last stage)
    if rank == 0:
        torch.save(found, out)


def main(folder: Path) -> None:
    # by their own name: what a rank pickles must not be a class of __main__
    from tests.writers import megatron_resume as named

    from .megatron_cpu import patch

    patch()
    named.run_jobs(folder, named._job)


def run_jobs(folder: Path, job: Callable[[Path, MegatronSpec, int, Path], None]) -> None:
    """Run what `resume` has listed in ``folder``. A job gets the checkpoint, the run, the rank and its result file."""
    from .megatron_ranks import run_ranks

    listed = json.loads((folder / "jobs.json").read_text())
    jobs = {name: (Path(given["load"]), MegatronSpec(**_tuples(given["spec"]))) for name, given in listed.items()}
    worlds = {name: spec.world for name, (_, spec) in jobs.items()}
    run_ranks(worlds, lambda name, rank: job(*jobs[name], rank, folder / f"{name}.pt"))


def _tuples(spec: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in spec.items()}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
