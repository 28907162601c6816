"""What the explorer's pages of the tree, the architecture and the ranks ask, and the numbers behind them."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import lazyckpt
import lazyckpt.demo as demo_files
from lazyckpt.core.placement import Mesh, Rank
from lazyckpt.explore.api import Explorer
from lazyckpt.explore.query import Cancelled
from lazyckpt.explore.subject import Subject
from lazyckpt.inspect.architecture import architecture, layer_and_kind, role_of
from lazyckpt.inspect.costs import memory_per_rank
from lazyckpt.inspect.ranks import ranks_of

Arrays = dict[str, NDArray[Any]]


def packed(explorer: Explorer, path: str, /, **values: str) -> tuple[dict[str, Any], Arrays]:
    answer = explorer.answer(path, values)
    assert answer.status == 200, answer.body
    body = answer.body
    length = int.from_bytes(body[:4], "little")
    header = json.loads(body[4 : 4 + length])
    arrays = {}
    for one in header["arrays"]:
        start = 4 + length + one["offset"]
        arrays[one["name"]] = np.frombuffer(body, one["dtype"], prod(one["shape"]), start).reshape(one["shape"])
    return header, arrays


def asked(explorer: Explorer, path: str, /, **values: str) -> Any:
    answer = explorer.answer(path, values)
    assert answer.status == 200, answer.body
    return json.loads(answer.body)


def saved(path: Path, tensors: dict[str, torch.Tensor]) -> lazyckpt.CheckpointView:
    torch.save(tensors, path)
    return lazyckpt.open(path)


def model(layers: int = 4, experts: int = 2) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    found = {"model.embed_tokens.weight": random(32, 8)}
    for n in range(layers):
        for which in "qkvo":
            found[f"model.layers.{n}.self_attn.{which}_proj.weight"] = random(8, 8)
        found[f"model.layers.{n}.input_layernorm.weight"] = torch.ones(8)
        for e in range(experts if n else 0):
            found[f"model.layers.{n}.mlp.experts.{e}.up_proj.weight"] = random(16, 8)
            found[f"model.layers.{n}.mlp.experts.{e}.down_proj.weight"] = random(8, 16)
        if not n:
            found["model.layers.0.mlp.up_proj.weight"] = random(24, 8)
            found["model.layers.0.mlp.down_proj.weight"] = random(8, 24)
    found["model.norm.weight"] = torch.ones(8)
    found["lm_head.weight"] = found["model.embed_tokens.weight"]
    return found


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return model()


@pytest.fixture
def explorer(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> Explorer:
    return Explorer(Subject(saved(tmp_path / "model.pt", tensors)))


# -- the tree


def test_the_tree_has_every_name_with_its_shape_and_dtype(explorer: Explorer, tensors: dict[str, torch.Tensor]) -> None:
    header, arrays = packed(explorer, "tree")
    names = arrays["text"].tobytes().decode().splitlines()
    assert names == sorted(tensors)
    for name, kind in zip(names, arrays["kind"], strict=True):
        found = header["kinds"][kind]
        assert tuple(found["shape"]) == tensors[name].shape
        assert found["itemsize"] == tensors[name].itemsize
    assert {names[int(n)]: owner for n, owner in header["tied"].items()} == {
        "lm_head.weight": "model.embed_tokens.weight"
    }
    assert [names[n] for n in header["twice"]] == ["lm_head.weight"]


def test_odd_names_come_as_they_are(tmp_path: Path) -> None:
    odd = ["two\nlines.weight", "lone \udc80 surrogate", "<b>\x1b[31m", "ü\u202e", "x" * 10_000]
    explorer = Explorer(Subject(saved(tmp_path / "odd.pt", {name: torch.ones(2) for name in odd})))
    header, arrays = packed(explorer, "tree")
    lines = arrays["text"].tobytes().decode().removesuffix("\n").split("\n")
    assert [header["odd"].get(str(n), line) for n, line in enumerate(lines)] == sorted(odd)


def test_norms_are_those_of_torch(explorer: Explorer, tensors: dict[str, torch.Tensor]) -> None:
    header, arrays = packed(explorer, "tree/norms", low="0")
    assert header["high"] == len(tensors)
    for name, norm, largest in zip(sorted(tensors), arrays["norm"], arrays["largest"], strict=True):
        truth = tensors[name].double()
        assert norm == pytest.approx(float(truth.norm()), rel=1e-9)
        assert largest == float(truth.abs().max())
    assert not arrays["odd"].any()


def test_norms_of_what_is_not_finite_say_so(tmp_path: Path) -> None:
    values = torch.tensor([3.0, float("nan"), 4.0, float("inf")])
    explorer = Explorer(Subject(saved(tmp_path / "x.pt", {"a": values, "b": torch.ones(0)})))
    _, arrays = packed(explorer, "tree/norms")
    assert arrays["odd"].tolist() == [2, 0]
    assert arrays["norm"].tolist() == [5, 0]
    assert explorer.answer("tree/norms", {"low": "3"}).status == 400


def test_norms_end_when_nobody_wants_them(explorer: Explorer) -> None:
    calls = iter([True] * 5)
    with pytest.raises(Cancelled):
        explorer.answer("tree/norms", {}, lambda: next(calls, False))


def test_totals_of_a_group_are_sums(explorer: Explorer, tensors: dict[str, torch.Tensor]) -> None:
    (state,) = asked(explorer, "tree/totals", prefix="model.layers.1")["states"]
    below = [t for name, t in tensors.items() if name.startswith("model.layers.1.")]
    assert (state["tensors"], state["numel"]) == (len(below), sum(t.numel() for t in below))
    assert state["nbytes"] == sum(t.nbytes for t in below)
    (state,) = asked(explorer, "tree/totals")["states"]
    assert state["numel"] == sum(t.numel() for name, t in tensors.items() if name != "lm_head.weight")


# -- architecture


def test_parameters_are_grouped_by_layer_and_kind(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    found = architecture(saved(tmp_path / "model.pt", tensors))
    owned = {name: t for name, t in tensors.items() if name != "lm_head.weight"}
    assert sorted(name for group in found.groups for name in group.names) == sorted(owned)
    assert (found.numel, found.nbytes) == (
        sum(t.numel() for t in owned.values()),
        sum(t.nbytes for t in owned.values()),
    )
    experts = found.of_kind()["model.layers.*.mlp.experts.*.up_proj.weight"]
    assert [(group.layer, len(group.names), group.shape) for group in experts] == [(n, 2, (16, 8)) for n in (1, 2, 3)]
    assert [(block.stack, block.label) for block in found.blocks()] == [
        ("model.layers.", "0"),
        ("model.layers.", "1-3"),
    ]


def test_kinds_and_roles_of_names() -> None:
    assert layer_and_kind("decoder.layers.7.mlp.experts.linear_fc1.weight12") == (
        7,
        "decoder.layers.*.mlp.experts.linear_fc1.weight*",
    )
    assert layer_and_kind("norm.weight") == (None, "norm.weight")
    roles = {
        "model.layers.*.self_attn.q_norm.weight": "norm",
        "model.layers.*.mlp.gate.weight": "router",
        "model.layers.*.mlp.gate_proj.weight": "mlp",
        "model.layers.*.mlp.shared_experts.up_proj.weight": "mlp",
        "decoder.layers.*.mlp.experts.local_experts.*.linear_fc1.weight": "experts",
        "transformer.wte.weight": "embedding",
        "transformer.h.*.ln_1.bias": "norm",
        "transformer.h.*.attn.c_attn.weight": "attention",
        "output_layer.weight": "head",
        "something.else": "other",
    }
    assert {kind: role_of(kind) for kind in roles} == roles


def test_memory_of_one_rank_is_plain_arithmetic(tmp_path: Path) -> None:
    view = saved(tmp_path / "x.pt", {"a": torch.zeros(10, 3, dtype=torch.bfloat16), "b": torch.zeros(5)})
    (stage,) = memory_per_rank(view).stages
    assert {cost.what: cost.nbytes for cost in stage.costs} == {
        "weights": 30 * 2 + 5 * 4,
        "gradients": 35 * 4,
        "fp32 weights": 30 * 4,
        "exp_avg": 35 * 4,
        "exp_avg_sq": 35 * 4,
    }
    served = memory_per_rank(view, dtype="float8_e4m3fn", optimizer="none").stages[0]
    assert [(cost.what, cost.nbytes) for cost in served.costs] == [("weights", 35)]


def test_memory_is_that_of_real_shards(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    view = saved(tmp_path / "model.pt", tensors)
    meshes: tuple[dict[str, Any], ...] = (
        {},
        {"tp": 2},
        {"pp": 2},
        {"tp": 2, "pp": 4},
        {"ep": 2},
        {"tp": 2, "pp": 2, "ep": 2},
    )
    for degrees in meshes:
        found = memory_per_rank(view, **degrees, optimizer="none")
        for stage in found.stages:
            rank = {"pp": stage.stage}
            shard = view.shard(**degrees, rank=rank)
            assert stage.nbytes == shard.nbytes, (degrees, stage.stage)
            assert stage.others + stage.experts == shard.numel
            assert stage.experts == sum(shard[name].numel() for name in shard if ".experts." in name)
            assert stage.tensors == len(shard) - len(shard.aliases)


def test_zero_divides_what_it_says(tmp_path: Path) -> None:
    view = saved(tmp_path / "x.pt", {"w": torch.zeros(64, 4, dtype=torch.bfloat16)})
    whole = {"weights": 512, "gradients": 1024, "fp32 weights": 1024, "exp_avg": 1024, "exp_avg_sq": 1024}
    divided = ({"fp32 weights", "exp_avg", "exp_avg_sq"}, {"gradients"}, {"weights"})
    parts: set[str] = set()
    for zero in (1, 2, 3):
        parts |= divided[zero - 1]
        (stage,) = memory_per_rank(view, dp=4, zero=zero).stages
        assert {c.what: c.nbytes for c in stage.costs} == {k: v // 4 if k in parts else v for k, v in whole.items()}


def test_wrong_meshes_are_answers(explorer: Explorer) -> None:
    assert explorer.answer("architecture/memory", {"ep": "3"}).status == 422  # two experts
    for wrong in ({"tp": "0"}, {"optimizer": "none of these"}, {"dtype": "int3"}, {"zero": "4"}, {"gradients": "x"}):
        assert explorer.answer("architecture/memory", wrong).status == 400, wrong


def test_the_answer_is_what_python_gives(explorer: Explorer) -> None:
    view = explorer.subject.view
    found = asked(explorer, "architecture")
    assert sum(kind["nbytes"] for kind in found["kinds"]) == found["nbytes"] == view.nbytes
    costs = memory_per_rank(view, tp=2, dp=2, zero=1)
    answer = asked(explorer, "architecture/memory", tp="2", dp="2", zero="1")
    assert answer["stages"][0]["nbytes"] == costs.stages[0].nbytes
    assert answer["world"] == 4


# -- ranks


def test_each_rank_holds_its_part(demo: Path) -> None:
    view = lazyckpt.open(demo)
    found = ranks_of(view.states.values())
    assert found.mesh == Mesh(dp=4)
    assert [held.rank for held in found.ranks if held.rank is not None] == [Rank(dp=n) for n in range(4)]
    held = sum(one.nbytes for one in found.ranks)
    assert held >= sum(state.nbytes for state in view.states.values())  # replicas are counted in each file
    assert not found.lost
    assert {path: file.size for path, file in found.files.items()} == {p: i.size for p, i in view.files.items()}


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    demo_files.write(tmp_path)
    return tmp_path / "zero3"


def test_a_lost_rank_is_told_by_tensor(demo: Path) -> None:
    truth = lazyckpt.open(demo).states["fp32"].numel
    (gone,) = demo.glob("*/*rank_2_mp_rank_00_optim_states.pt")
    gone.unlink()
    view = lazyckpt.open(demo)
    found = ranks_of([view.states["fp32"]])
    lost = sum(count for (state, _), count in found.lost.items() if state == "fp32")
    readable = 0
    for t in view.states["fp32"].values():
        try:
            t[...]
        except lazyckpt.MissingFileError:
            continue
        readable += t.numel()
    assert 0 < lost <= truth - readable
    assert {name for _, name in found.lost} <= set(view.states["fp32"])
    explorer = Explorer(Subject(view))
    answer = asked(explorer, "ranks")
    (broken,) = [file for file in answer["files"] if file["missing"]]
    assert broken["path"].endswith(gone.name)
    assert [problem["code"] for problem in broken["problems"]] == ["missing-file"]
    _, arrays = packed(explorer, "tree/marks", state="fp32")
    names = sorted(view.states["fp32"])
    marked = {name for name, bits in zip(names, arrays["marks"], strict=True) if bits & 4}
    fp32, lost_names = view.states["fp32"], {name for _, name in found.lost}
    assert marked == {name for name in fp32 if fp32.owner(name) in lost_names}


def test_a_file_lists_what_it_holds(demo: Path) -> None:
    view = lazyckpt.open(demo)
    explorer = Explorer(Subject(view))
    answer = asked(explorer, "ranks")
    for file in answer["files"]:
        pieces = asked(explorer, "ranks/file", path=file["path"])["pieces"]
        assert sum(piece[3] for piece in pieces) == file["nbytes"]
        assert len({(state, name) for state, name, *_ in pieces}) == file["tensors"]
    assert explorer.answer("ranks/file", {"path": "none"}).status == 404
    assert explorer.answer("ranks/file", {}).status == 400


def test_frozen_parameters_are_marked(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[1].parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    view = lazyckpt.open(tmp_path / "x.pt")
    _, arrays = packed(Explorer(Subject(view)), "tree/marks")
    marked = {name for name, bits in zip(sorted(view), arrays["marks"], strict=True) if bits & 2}
    assert marked == {"0.weight", "0.bias"}
