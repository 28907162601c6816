"""Folders with a file for each tensor-parallel rank: Meta's Llama, and others by the user's rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import lazyckpt
from lazyckpt.testing import contract
from lazyckpt.testing.contract import Check
from lazyckpt.testing.oracle import same

from .writers import Case

DIM, HEADS, VOCAB, HIDDEN = 24, 4, 34, 20
# fairscale's cuts in Meta's llama/model.py, written down here once more: None is on every rank
CUTS = {
    "attention.wq": 0,
    "attention.wk": 0,
    "attention.wv": 0,
    "attention.wo": 1,
    "feed_forward.w1": 0,
    "feed_forward.w2": 1,
    "feed_forward.w3": 0,
    "attention_norm": None,
    "ffn_norm": None,
}


def llama(folder: Path, tp: int, kv_heads: int, vocab_dim: int) -> Case:
    """As Meta's: torch.save of each rank's state dict. Key-value heads that are fewer than the ranks are repeated."""
    torch.manual_seed(tp)
    rows = DIM // HEADS * kv_heads
    shapes: dict[str, tuple[int, ...]] = {"attention.wk": (rows, DIM), "attention.wv": (rows, DIM)}
    shapes |= {"feed_forward.w1": (HIDDEN, DIM), "feed_forward.w3": (HIDDEN, DIM), "feed_forward.w2": (DIM, HIDDEN)}
    whole = {"tok_embeddings.weight": torch.randn(VOCAB, DIM), "norm.weight": torch.randn(DIM)}
    whole |= {"output.weight": torch.randn(VOCAB, DIM), "rope.freqs": torch.randn(3)}
    cuts: dict[str, int | None] = {"tok_embeddings.weight": vocab_dim, "output.weight": 0}
    for n in range(2):
        for key, dim in CUTS.items():
            shape = (DIM,) if dim is None else shapes.get(key, (DIM, DIM))
            whole[f"layers.{n}.{key}.weight"] = torch.randn(shape)
            cuts[f"layers.{n}.{key}.weight"] = dim
    whole = {name: t.to(torch.bfloat16) for name, t in whole.items()}
    folder.mkdir()
    for rank in range(tp):
        shard = {}
        for name, t in whole.items():
            dim = cuts.get(name)
            times = max(1, tp // kv_heads) if ".wk." in name or ".wv." in name else 1
            shard[name] = t if dim is None else t.chunk(tp // times, dim)[rank // times].clone()
        torch.save(shard, folder / f"consolidated.{rank:02}.pth")
    params = {"dim": DIM, "n_heads": HEADS, "n_kv_heads": kv_heads, "n_layers": 2, "vocab_size": -1}
    (folder / "params.json").write_text(json.dumps(params))
    return Case(folder, {"weights": whole}, {"tied": {}})


@pytest.fixture(params=[(1, 4, 1), (2, 4, 1), (2, 2, 0), (4, 2, 0), (4, 1, 1)], ids=str)
def llama_case(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    return llama(tmp_path / "llama", *request.param)


@pytest.mark.product
@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
def test_contract(llama_case: Case, check: Check) -> None:
    check(llama_case)


def test_llama_says_what_it_did(tmp_path: Path) -> None:
    view = lazyckpt.open(llama(tmp_path / "llama", 4, 2, 0).path)
    assert (view.format, view.mesh.tp, view.problems) == ("llama", 4, ())
    assert view.meta["params"]["dim"] == DIM
    assert "Meta's llama/model.py and the heads of params.json" in view["layers.0.attention.wk.weight"].explain()
    assert "consolidated.03.pth/layers.1.feed_forward.w2.weight" in view.stored


def test_a_lost_rank(tmp_path: Path) -> None:
    case = llama(tmp_path / "llama", 2, 4, 1)
    (case.path / "consolidated.00.pth").unlink()
    view = lazyckpt.open(case.path)
    assert any("consolidated.00.pth" in line for line in view.problems)
    truth = case.truth["weights"]
    same(view["norm.weight"][...], truth["norm.weight"], "on the other rank too")
    same(view["output.weight"][VOCAB // 2 :], truth["output.weight"][VOCAB // 2 :], "the rank that is there")
    with pytest.raises(lazyckpt.MissingFileError, match=r"consolidated\.00\.pth"):
        view["output.weight"][...]


def test_a_broken_params_json(tmp_path: Path) -> None:
    case = llama(tmp_path / "llama", 2, 4, 1)
    (case.path / "params.json").write_text("{")
    view = lazyckpt.open(case.path)
    assert any((line.code, line.path) == ("unreadable-file", "params.json") for line in view.problems)
    same(view["output.weight"][...], case.truth["weights"]["output.weight"], "the rest reads")


def shards() -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    whole = {"a.up.weight": torch.randn(6, 4), "a.down.weight": torch.randn(4, 6), "norm.weight": torch.randn(4)}
    ranks = []
    for rank in range(2):
        up, down = whole["a.up.weight"].chunk(2, 0)[rank], whole["a.down.weight"].chunk(2, 1)[rank]
        ranks.append({"a.up.weight": up.clone(), "a.down.weight": down.clone(), "norm.weight": whole["norm.weight"]})
    return whole, ranks


RULES = {"*.up.weight": "column", "*.down.weight": "row", "norm.*": "replicated"}


@pytest.mark.parametrize("name", ["rank_{}.pt", "model-tp{}.safetensors", "part.{}.bin"])
def test_any_folder_by_rules(tmp_path: Path, name: str) -> None:
    whole, ranks = shards()
    for n, shard in enumerate(ranks):
        save: Any = save_file if name.endswith(".safetensors") else torch.save
        save(shard, tmp_path / name.format(n))
    view = lazyckpt.open(tmp_path, rules=RULES)
    assert (view.format, view.mesh.tp, view.problems) == ("tensor-parallel", 2, ())
    for key, truth in whole.items():
        same(view[key][...], truth, key)
    assert "rules['*.down.weight']" in view["a.down.weight"].explain()


def test_optimizer_states_go_with_the_weights(tmp_path: Path) -> None:
    whole, ranks = shards()
    for n, shard in enumerate(ranks):
        state = {i: {"exp_avg": t * 2, "step": torch.tensor(1.0)} for i, t in enumerate(shard.values())}
        groups = [{"lr": 0.1, "params": [0, 1, 2]}]
        torch.save({"model": shard, "optimizer": {"state": state, "param_groups": groups}}, tmp_path / f"mp_{n}.pt")
    view = lazyckpt.open(tmp_path, rules=RULES)
    for key, truth in whole.items():
        same(view.states["exp_avg"][key][...], truth * 2, key)
    assert view.meta["optimizer"]["param_groups"] == groups


def test_what_no_rule_tells(tmp_path: Path) -> None:
    _, ranks = shards()
    for n, shard in enumerate(ranks):
        torch.save(shard | ({"alone": torch.ones(2)} if n else {}), tmp_path / f"rank_{n}.pt")
    view = lazyckpt.open(tmp_path, rules={"norm.*": "replicated"})
    assert any((line.code, line.path) == ("unmerged-tensor", "a.up.weight") for line in view.problems)
    assert any((line.code, line.path) == ("mismatched-shards", "alone") for line in view.problems)
    with pytest.raises(lazyckpt.DataError, match="cannot be put together"):
        view["a.up.weight"][...]
    same(view["rank_1.pt/a.up.weight"][...], ranks[1]["a.up.weight"], "each shard on its own")


def test_mistrals_consolidated_file(tmp_path: Path) -> None:
    whole = {"layers.0.attention.wq.weight": torch.randn(4, 4), "norm.weight": torch.randn(4)}
    save_file(whole, tmp_path / "consolidated.safetensors")
    (tmp_path / "params.json").write_text(json.dumps({"dim": 4, "n_layers": 1}))
    view = lazyckpt.open(tmp_path)
    assert (set(view), view.problems, view.meta["params"]["dim"]) == (set(whole), (), 4)
    same(view["norm.weight"][...], whole["norm.weight"], "under Mistral's names")
