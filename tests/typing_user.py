"""The public API as a user types it. tests/test_typing.py has mypy check it; nothing here is ever run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, assert_type

import numpy as np
import torch
import xarray as xr
from matplotlib.axes import Axes

import lazyckpt
from lazyckpt import CheckpointView, Diff, Difference, LazyTensor, Mesh, Pruned, RunView, WriteResult, interop, recipes
from lazyckpt.core.index import FileInfo
from lazyckpt.core.specs import Fragment
from lazyckpt.deepspeed import RankFile, get_fp32_state_dict_from_zero_checkpoint, parse_ckpt_name
from lazyckpt.distributed import LazyReader, get_shard_info
from lazyckpt.inspect.table import Histogram, Stats, Table
from lazyckpt.interop.zarr_store import ViewStore
from lazyckpt.runs.view import StepTensor
from lazyckpt.show.plot import RunPlots, ViewPlots
from lazyckpt.show.plot_tensor import StepPlots, TensorPlots


def names_and_sides(path: Path) -> None:
    view = lazyckpt.open(path, tag="global_step9", rules={"*.o_proj.weight": "row"})
    assert_type(view, CheckpointView)
    assert_type(list(view), list[str])
    assert_type(len(view), int)
    assert_type(view.states, Mapping[str, CheckpointView])
    assert_type(view.states["exp_avg"], CheckpointView)
    assert_type(view.states.get("exp_avg"), CheckpointView | None)
    assert_type(view.stored, CheckpointView)
    assert_type(view.search("mlp weight"), CheckpointView)
    assert_type(view.select("*.weight"), CheckpointView)
    assert_type(view.select(lambda name: name.endswith("bias")), CheckpointView)
    assert_type(view.rename("hf"), CheckpointView)
    assert_type(view.shard(tp=2, rank={"tp": 1}), CheckpointView)
    assert_type(lazyckpt.unshard([view.shard(tp=2, rank=n) for n in range(2)]), CheckpointView)
    assert_type(view.meta, Mapping[str, Any])
    assert_type(view.mesh, Mesh)
    assert_type(view.files, Mapping[str, FileInfo])
    assert_type(view.aliases, Mapping[str, str])
    assert_type(view.problems, tuple[lazyckpt.Problem, ...])
    assert_type((view.numel, view.nbytes, view.format), tuple[int, int, str])
    assert_type(view.tree(2) + view.explain(), str)


def items(view: CheckpointView) -> None:
    """What a name stands for depends on the checkpoint: Any, which a user narrows by saying what is expected."""
    assert_type(view["layers.3.mlp"], Any)
    part: CheckpointView = view["layers.3.mlp"]
    tensor: LazyTensor = view["layers.3.mlp.up.weight"]
    assert_type(part.to("cpu"), dict[str, torch.Tensor])
    assert_type(tensor[:8], torch.Tensor)
    for name, t in view.items():
        assert_type((name, t), tuple[str, LazyTensor])
    for t in view.values():
        assert_type(t, LazyTensor)
    assert_type(view.get("up.weight"), LazyTensor | None)
    assert_type(view.tensor("layers.3.mlp.up.weight"), LazyTensor)
    assert_type(view.tensor("layers.3.mlp.up.weight")[:8], torch.Tensor)
    assert_type(view.prefix("layers.3.mlp"), CheckpointView)
    assert_type(view.prefix("layers.3.mlp").tensor("up.weight").nbytes, int)
    assert_type(view.states["exp_avg"].tensor("up.weight"), LazyTensor)
    assert_type(view.exact("up.weight"), LazyTensor | None)


def tensors(t: LazyTensor) -> None:
    assert_type(t.name, str)
    assert_type(t.shape, torch.Size)
    assert_type(t.dtype, torch.dtype)
    assert_type((t.ndim, t.numel(), t.nbytes), tuple[int, int, int])
    assert_type((t.size(), t.size(0)), tuple[torch.Size, int])
    assert_type(t[1:5, ::2], torch.Tensor)
    assert_type(t[..., 0], torch.Tensor)
    assert_type(t[[3, 1]], torch.Tensor)
    assert_type(t.lazy[1:5], LazyTensor)
    assert_type(t.lazy[1:5][0], torch.Tensor)
    assert_type(t.to("cuda", torch.float32), torch.Tensor)
    assert_type(t.astype(torch.float32), LazyTensor)
    assert_type((t.float(), t.T, t.cpu()), tuple[torch.Tensor, torch.Tensor, torch.Tensor])
    assert_type(t.item(), int | float | bool | complex)
    assert_type(t.numpy(), np.ndarray[Any, Any])
    assert_type(t.fragments, Sequence[Fragment])
    assert_type(t.explain(slice(0, 2)), str)
    for row in t:
        assert_type(row, torch.Tensor)


def out(view: CheckpointView, module: torch.nn.Module) -> None:
    assert_type(view.to("cuda", dtype=torch.bfloat16, copy=False), dict[str, torch.Tensor])
    assert_type(view.to_safetensors("folder", max_shard_size="5GB", verify=True), WriteResult)
    assert_type(view.to_torch("x.pt", dtype=torch.float32), WriteResult)
    result = view.to_dcp("dcp", overwrite=True)
    assert_type((result.paths, result.nbytes, result.left_out), tuple[tuple[Path | str, ...], int, Mapping[str, str]])
    assert_type((result[0], result["optimizer"], list(result)), tuple[Path | str, str, list[Path | str]])
    assert_type(view.to_universal("universal"), WriteResult)
    assert_type(view.to_megatron("megatron", tp=2, overwrite=True), WriteResult)
    assert_type(view.to_virtual("references.json"), WriteResult)
    assert_type(view.to_zarr("x.zarr", codec="blosc", memory="2GB"), WriteResult)
    keys = view.load_into(module, strict=False)
    print(keys.missing_keys, keys.unexpected_keys)
    assert_type(view.state_dict(), dict[str, torch.Tensor])
    assert_type(view.to_xarray(chunks={}), xr.DataTree)
    assert_type(interop.zarr_store.ViewStore(view), ViewStore)
    assert_type(interop.xarray.to_f32(view.to_xarray()), xr.DataTree)


def looked_at(view: CheckpointView, t: LazyTensor) -> None:
    row = t.stats(bins=20)
    assert_type(row, Stats)
    assert_type((row.count, row.mean, row.histogram), tuple[int, float | None, Histogram | None])
    table = view.stats(memory="2GB")
    assert_type(table, Table)
    assert_type((table[0], table["up.weight"], table[1:], table.total), tuple[Stats, Stats, Table, Stats])
    assert_type(t.plot.hist(50), Axes)
    assert_type(t.plot.layout(ax=t.plot.singular_values()), Axes)
    assert_type(view.plot.norms(), Axes)
    assert_type((view.plot, t.plot), tuple[ViewPlots, TensorPlots])
    t.show(histogram=True)


def compared(a: CheckpointView, b: Path) -> None:
    found = lazyckpt.diff(a, b, states="all", memory="2GB")
    assert_type(found, Diff)
    assert_type((found.equal, found[0], found[:2]), tuple[bool, Difference, tuple[Difference, ...]])
    for row in found.differing:
        assert_type(row, Difference)
        assert_type((row.count, row.max_abs, row.at), tuple[int | None, float | None, tuple[int, ...] | None])


def asked_for(folder: Path) -> None:
    assert_type(recipes.one_layer(folder, 77), CheckpointView)
    assert_type(recipes.to_hf(folder, "hf", config="base", dtype=torch.bfloat16), list[Path])
    assert_type(recipes.zero3_to_hf(folder, "hf"), list[Path])
    assert_type(recipes.torch_dist_to_hf(folder, "hf", config="base"), list[Path])
    assert_type(recipes.adapters(folder, "adapter"), list[Path])
    assert_type(recipes.dcp_to_safetensors(folder, "model.safetensors"), Path | str)
    assert_type(recipes.fsdp_ranks_to_file(folder, "model.pt"), Path | str)
    assert_type(recipes.resume_zero(folder, "universal"), dict[str, dict[str, bool]])
    assert_type(recipes.moments_over_time(folder, "up.weight"), xr.Dataset)


def runs(folder: Path) -> None:
    run = lazyckpt.open_run(folder, steps={"export": 5000})
    assert_type(run, RunView)
    assert_type(run.steps, tuple[int, ...])
    assert_type(run.paths, Mapping[int, str])
    assert_type(run.at(1000), CheckpointView)
    assert_type(run.plot.steps("up.weight", "absmax"), Axes)
    w: StepTensor = run["up.weight"]
    assert_type(w.steps, tuple[int, ...])
    assert_type(w.plot.steps(lambda t: t.norm()), Axes)
    assert_type(run.tensor("up.weight"), StepTensor)
    assert_type(run.tensor("up.weight").plot, StepPlots)
    assert_type([t.steps for t in run.values()], list[tuple[int, ...]])
    assert_type((run.prefix("layers.3"), run.states["exp_avg"], run.select("*")), tuple[RunView, RunView, RunView])
    assert_type(run.plot, RunPlots)
    assert_type(run.to_xarray(), xr.DataTree)
    done = lazyckpt.prune(folder, 2)
    assert_type(done, Pruned)
    assert_type(done.nbytes, int)


def errors(path: Path) -> torch.Tensor | None:
    try:
        tensor: LazyTensor = lazyckpt.open(path)["lm_head.weight"]
        return tensor[...]
    except lazyckpt.TensorNotFoundError:
        return None
    except lazyckpt.LazyckptError as e:
        raise SystemExit(str(e)) from e


def others(path: Path) -> None:
    assert_type(parse_ckpt_name("mp_rank_00_model_states.pt"), RankFile | None)
    weights = get_fp32_state_dict_from_zero_checkpoint(str(path))
    assert_type(weights, dict[str, torch.Tensor])
    assert_type(get_fp32_state_dict_from_zero_checkpoint(path, lazy_mode=True), dict[str, LazyTensor])
    reader = LazyReader(path, tag="global_step9")
    assert_type(reader.checkpoint_id, str)
    assert_type(get_shard_info(lazyckpt.open(path), "bfloat16").is_sharded, bool)
