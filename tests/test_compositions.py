"""Views of views of views: what is computed lazily equals the same steps on tensors that were written in between."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import lazyckpt
from lazyckpt import CheckpointView

UP, EMBED = "model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight"
GOLDEN = Path(__file__).parent / "golden" / "quantized"


def model(folder: Path, seed: int) -> CheckpointView:
    torch.manual_seed(seed)
    tensors = {EMBED: torch.randn(20, 64), UP: torch.randn(64, 64), UP.replace("0", "1"): torch.randn(64, 64)}
    save_file(tensors, folder / f"{seed}.safetensors")
    return lazyckpt.open(folder / f"{seed}.safetensors", cache=False)


MERGES: dict[str, dict[str, Any]] = {
    "slerp": {"t": 0.3},
    "nuslerp": {"weights": [0.6, 0.7]},
    "karcher": {},
    "model_stock": {"base": True},
    "ties": {"base": True, "density": 0.5},
    "dare_ties": {"base": True, "density": 0.5},
    "breadcrumbs": {"base": True, "density": 0.5},
}


@pytest.mark.parametrize("method", MERGES)
def test_parts_of_merges(tmp_path: Path, method: str) -> None:
    """What a merge needs of whole tensors, and its random masks, are those of the whole model in a shard, too."""
    views = [model(tmp_path, seed) for seed in (1, 2)]
    options = dict(MERGES[method])
    if options.pop("base", False):
        options["base"] = model(tmp_path, 3)
    merged = lazyckpt.merge(views, method=method, **options)
    fresh = lazyckpt.merge(views, method=method, **options)  # nothing of it was computed before
    whole = {name: merged[name][...] for name in merged}
    shards = [fresh.shard(tp=2, rank=n) for n in range(2)]
    assert torch.equal(shards[0][EMBED][...], whole[EMBED][:10])
    assert torch.equal(shards[1].shard(tp=2, rank=1)[EMBED][...], whole[EMBED][-len(shards[1][EMBED]) // 2 :])
    back = lazyckpt.unshard(shards)
    assert all(torch.equal(back[name][...], tensor) for name, tensor in whole.items())
    fresh = lazyckpt.merge(views, method=method, **options)
    part = pickle.loads(pickle.dumps(fresh[UP].lazy[40:50]))  # as Dask sends it
    assert torch.equal(part[...], whole[UP][40:50])


@pytest.mark.parametrize("kind", ["nf4", "nf4-double", "fp8-block"])
def test_a_selection_is_quantized(tmp_path: Path, kind: str) -> None:
    view = model(tmp_path, 1).select("model.layers.0*")
    quantized = view.quantize(kind)
    assert all(name.startswith(UP) for name in quantized)
    assert set(quantized.dequantize()) == {UP}
    assert set(view["model.layers"].quantize(kind).dequantize()) == {"0.mlp.up_proj.weight"}


def test_a_selection_is_sharded_and_put_together(tmp_path: Path) -> None:
    view = model(tmp_path, 1)
    for part in (view.select("model.layers.0*"), view.select(EMBED)):
        back = lazyckpt.unshard([part.shard(tp=2, rank=n) for n in range(2)])
        assert set(back) == set(part)
        assert all(torch.equal(back[name][...], part[name][...]) for name in part)


def test_what_is_written_of_a_dequantized_view_is_not_quantized(tmp_path: Path) -> None:
    view = lazyckpt.open(GOLDEN / "deepseek_fp8").dequantize()
    assert "quantization_config" not in view.meta["config"]
    view.to_zarr(tmp_path / "plain", progress=False)
    plain = lazyckpt.open(tmp_path / "plain")
    again = plain.dequantize()
    assert not again.problems and set(again) == set(view)
    assert set(plain.quantize("int8").dequantize()) == set(view)
