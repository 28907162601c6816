"""Megatron-FSDP goes on from checkpoints of its format: what its ranks hold then, and the losses of two more steps.

``python -m tests.writers.megatron_fsdp_resume FOLDER`` reads ``FOLDER/jobs.json``, name -> {"load": path, "spec": of
the run}, and writes ``FOLDER/NAME.pt``: ``loaded`` (as :func:`.megatron_fsdp.gather` has it), the ``iteration``, the
``losses`` and the ``lost`` keys, which the run asked for in vain. No package has megatron.training; its steps are
followed here, each with the name of the function.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from . import megatron_resume
from .megatron_core import MegatronSpec, build, start
from .megatron_fsdp import as_fused, gather, prepare, train
from .megatron_resume import Jobs, check_checkpoint_args
from .megatron_save import args_of


def resume(folder: Path, jobs: Jobs) -> dict[str, dict[str, Any]]:
    """Run the jobs, in child processes: what each of them wrote."""
    return megatron_resume.resume(folder, jobs, "megatron_fsdp_resume")


# -- in the child


def load_checkpoint(root: Path, spec: MegatronSpec, model: Any, optimizer: Any) -> tuple[int, list[str]]:
    """``load_checkpoint``, ``_load_fsdp_dtensor_base_checkpoint`` and ``preprocess_fsdp_dtensor_state_dict``: the
    iteration, and the keys that the checkpoint does not have, which are passed over. --no-load-rng."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import preprocess_state_dict_for_uneven_dtensor
    from megatron.core.transformer import fsdp_dtensor_checkpoint as of
    from megatron.core.utils import unwrap_model
    from torch.distributed import checkpoint as dcp

    text = (root / "latest_checkpointed_iteration.txt").read_text().strip()
    folder = root / ("release" if text == "release" else f"iter_{int(text):07d}")
    reader = dcp.FileSystemReader(folder)
    (inner,) = unwrap_model([model])
    weights = inner.state_dict_for_save_checkpoint()
    optim = optimizer.sharded_state_dict({}, metadata={"distrib_optim_sharding_type": "fsdp_dtensor"})
    # generate_state_dict
    state: dict[str, Any] = {"args": args_of(spec), "checkpoint_version": 3.0, "iteration": 1, "model": weights}
    if text != "release":
        state["optimizer"] = optim
    # preprocess_fsdp_dtensor_state_dict
    raw = {key: state[key].copy() for key in ("model", "optimizer") if key in state}
    of.handle_fp8_extra_state_case(state["model"])
    if spec.gated:
        state["model"], more = of.handle_swiglu_in_state_dict(inner, state["model"], state.get("optimizer"))
        state |= {"optimizer": more} if more is not None else {}
    if spec.experts:
        state["model"] = of.handle_experts_in_state_dict(state["model"], spec.experts)
    preprocess_state_dict_for_uneven_dtensor(state)
    flat = of.flatten_state_dict({key: state[key] for key in raw})
    lost = sorted(flat.keys() - reader.read_metadata().state_dict_metadata.keys())
    dcp.load(state, storage_reader=reader, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    check_checkpoint_args(state["args"], spec)
    model.load_state_dict(raw["model"], strict=True)
    if "optimizer" in raw:
        for name, options in raw["optimizer"]["param_to_group_meta"].items():
            if "step" in options:  # as FusedAdam has it; here torch's AdamW goes on
                raw["optimizer"]["state"][name]["step"] = torch.tensor(float(options["step"]))
        optimizer.load_state_dict(raw["optimizer"])
    return int(state["iteration"]), lost


def _job(root: Path, spec: MegatronSpec, rank: int, out: Path) -> None:
    start(spec)
    (chunk,) = build(spec)
    model, optimizer = prepare(spec, chunk)
    fused = spec.dp > 1  # (see `as_fused`)
    if fused:
        as_fused(optimizer, after=False)
    optimizer._init_optimizer_states_with_dummy_values()  # as sharded_state_dict does for loading
    if fused:
        as_fused(optimizer, after=True)
    iteration, lost = load_checkpoint(root, spec, model, optimizer)
    loaded = gather(spec, model, optimizer)
    found = {"iteration": iteration, "lost": lost, "loaded": loaded}
    found["losses"] = train(spec, model, optimizer, range(2), alike=True)
    if rank == 0:
        torch.save(found, out)


def main(folder: Path) -> None:
    # by their own name: what a rank pickles must not be a class of __main__
    from tests.writers import megatron_fsdp_resume as named

    from .megatron_cpu import patch
    from .megatron_fsdp import on_cpu
    from .megatron_resume import run_jobs

    patch()
    on_cpu()
    run_jobs(folder, named._job)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
