"""The distributed optimizer until May 2023: each data-parallel rank's part of the states, in a file of its own.

No package has it: the parts are cut here as Megatron-LM's sources of that time say (`build_model_gbuf_range` and the
other functions that formats/megatron/dpshards.py names, before commit 49e4bd68), and saved with torch.save.
"""

from __future__ import annotations

from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lazyckpt
from lazyckpt.testing.oracle import same

from .megatron_handmade import args, columns, halves, rows
from .megatron_handmade import same as copy

STATES = ("exp_avg", "exp_avg_sq")
LAYER = "encoder.layers.0."
CUTS = {
    "embedding.word_embeddings.weight": ((16, 6), rows),
    f"{LAYER}input_layernorm.weight": ((6,), copy),
    f"{LAYER}self_attention.query_key_value.weight": ((12, 6), rows),
    f"{LAYER}self_attention.query_key_value.bias": ((12,), rows),
    f"{LAYER}self_attention.dense.weight": ((6, 6), columns),
    f"{LAYER}mlp.dense_h_to_4h.weight": ((8, 6), halves),
    f"{LAYER}mlp.dense_4h_to_h.weight": ((6, 4), columns),
    "encoder.final_layernorm.weight": ((6,), copy),
}


def parts(shards: dict[str, Tensor], dp: int, count: int, states: dict[str, dict[str, Tensor]]) -> dict[str, Any]:
    """One data-parallel rank's optimizer (`DistributedOptimizer.state_dict`)."""
    total = at = sum(t.numel() for t in shards.values())
    width = ceil(total / count)
    own: dict[str, slice] = {}
    for name, t in shards.items():  # the last parameter is the first one in the buffer
        at -= t.numel()
        lo, hi = max(at, dp * width), min(at + t.numel(), (dp + 1) * width, total)
        if lo < hi:
            own[name] = slice(lo - at, hi - at)
    decay = [name for name in own if shards[name].ndim > 1 and not name.endswith(".bias")]
    groups, mains, state, first = [], [], {}, 0
    for names, multiple in ((decay, 1.0), ([name for name in own if name not in decay], 0.0)):
        if not names:
            continue
        groups.append({"wd_mult": multiple, "lr_mult": 1.0, "params": list(range(first, first + len(names)))})
        for name in names:
            state[first] = {key: states[key][name].flatten()[own[name]].clone() for key in STATES}
            first += 1
        mains.append([states["fp32"][name].flatten()[own[name]].clone() for name in names])
    half = next(iter(shards.values())).dtype == torch.bfloat16
    return {
        "optimizer": {
            "optimizer": {"state": state, "param_groups": groups},
            "shard_fp32_from_float16_groups": mains if half else [[] for _ in groups],
        },
        "opt_param_scheduler": {},
    }


def nested(shards: dict[str, Tensor]) -> dict[str, Any]:
    table: dict[str, Any] = {"embedding": {"word_embeddings": {}}, "encoder": {}}
    for name, t in shards.items():
        head, _, tail = name.partition(".")
        if head == "embedding":
            table[head]["word_embeddings"]["weight"] = t
        else:
            table[head][tail] = t
    return {"language_model": table}


def written(folder: Path, tp: int, dp: int, dtype: torch.dtype) -> dict[str, dict[str, Tensor]]:
    torch.manual_seed(dp)
    wholes = {state: {name: torch.randn(shape) for name, (shape, _) in CUTS.items()} for state in ("fp32", *STATES)}
    wholes["weights"] = {name: t.to(dtype) for name, t in wholes["fp32"].items()}
    for rank in range(tp):
        own = {s: {n: CUTS[n][1](t, rank, tp).clone() for n, t in table.items()} for s, table in wholes.items()}
        path = folder / "iter_0000005" / f"mp_rank_{rank:02d}"
        path.mkdir(parents=True)
        options = args(
            tensor_model_parallel_size=tp, data_parallel_size=dp, num_layers=1, hidden_size=6, num_attention_heads=2,
            swiglu=True, use_distributed_optimizer=True, accumulate_allreduce_grads_in_fp32=True,
        )  # fmt: skip
        model = {"args": options, "checkpoint_version": 3.0, "iteration": 5, "model": nested(own["weights"])}
        torch.save(model, path / "model_rng.pt")
        for d in range(dp):
            part = Path(f"{path}_{d:03d}")
            part.mkdir()
            torch.save(parts(own["weights"], d, dp, own), part / "optim.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("5")
    if dtype == torch.float32:
        del wholes["fp32"]
    return wholes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("tp", "dp"), [(1, 1), (2, 1), (1, 3), (2, 4)])
def test_states_by_parameter(tmp_path: Path, tp: int, dp: int, dtype: torch.dtype) -> None:
    wholes = written(tmp_path, tp, dp, dtype)
    view = lazyckpt.open(tmp_path)
    assert view.problems == () and set(view.states) == set(wholes)
    for state, table in wholes.items():
        assert {name.removeprefix("language_model.") for name in view.states[state]} == set(table)
        for name, whole in table.items():
            tensor = view.states[state][f"language_model.{name}"]
            same(tensor[...], whole, (state, name))
            same(tensor[1:5], whole[1:5], (state, name, "a slice"))
    assert any(name.startswith("mp_rank_00_000/optim.pt/") for name in view.stored)


def test_a_lost_file(tmp_path: Path) -> None:
    wholes = written(tmp_path, 1, 3, torch.bfloat16)
    lost = "iter_0000005/mp_rank_00_001/optim.pt"
    (tmp_path / lost).unlink()
    view = lazyckpt.open(tmp_path)
    assert [(p.code, p.path) for p in view.problems] == [("missing-file", lost)]
    readable = 0
    for name, tensor in view.states["exp_avg"].items():
        try:
            same(tensor[...], wholes["exp_avg"][name.removeprefix("language_model.")], name)
            readable += 1
        except lazyckpt.MissingFileError as e:
            assert lost in str(e)
    assert 0 < readable < len(CUTS)


def test_parts_of_other_sizes_stay_undecided(tmp_path: Path) -> None:
    written(tmp_path, 1, 3, torch.bfloat16)
    folder = tmp_path / "iter_0000005"
    data = (folder / "mp_rank_00_000" / "optim.pt").read_bytes()
    (folder / "mp_rank_00_001" / "optim.pt").write_bytes(data)
    view = lazyckpt.open(tmp_path)
    assert [p.code for p in view.problems] == ["undecided-layout"] and list(view.states) == ["weights"]
