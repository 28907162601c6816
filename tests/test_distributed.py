"""`lazyckpt.distributed` on gloo ranks (what they check is in tests/writers/rank_checks.py), and on views alone."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import lazyckpt
from lazyckpt.distributed import (
    EPDegrees,
    EPSpecInfo,
    drop_ep_dim,
    drop_ep_dims,
    ep_specs,
    restore_ep_dim,
    restore_ep_dims,
)
from lazyckpt.testing.counting import opened
from lazyckpt.testing.oracle import same

from .conftest import complete, once
from .writers import Case, rank_checks, ranks

MODULE = "tests.writers.rank_checks"


@pytest.fixture(scope="module")
def ran(session_folder: Path, dcp_cases: dict[str, Case], zero_cases: dict[str, Case]) -> Path:
    """Where the ranks left what they found."""

    def write(folder: Path) -> Path:
        inputs = {}
        for name in ("fsdp2_uneven", "hsdp", "wrapped", "flat_optimizer", "fsdp1"):
            path = dcp_cases[name].path
            inputs[name] = {"path": str(path), "truth": str(path.parent / "truth.pt")}
        case = complete(zero_cases["zero3_fp32_dp4"])
        torch.save({state: dict(case.truth[state]) for state in case.truth}, folder / "zero3.pt")
        spec = case.info["spec"]
        sizes = [spec["hidden"], spec["layers"], spec["vocab"]]
        inputs["zero3"] = {
            "path": str(case.path), "truth": str(folder / "zero3.pt"), "sizes": sizes, "step": case.info["step"]
        }  # fmt: skip
        (folder / "inputs.json").write_text(json.dumps(inputs))
        return ranks.run_all(MODULE, folder)

    return once(session_folder, "ranks", write)


@pytest.mark.slow
@pytest.mark.parametrize("name", rank_checks.CHECKS)
def test_on_ranks(ran: Path, name: str) -> None:
    said = ranks.verdict(ran, name, rank_checks.CHECKS[name][0])
    assert not said, said


# -- views, without processes


def test_specs_from_the_grid_of_pieces(dcp_cases: dict[str, Case]) -> None:
    """w1 is [3, 5, 7] in 2 x 2, w2 [5, 7, 5] cut twice along its first dimension, b [6, 4] in halves."""
    view = lazyckpt.open(dcp_cases["experts"].path)
    found = ep_specs(view)
    assert found["experts.w1"] == EPSpecInfo("experts.w1", Shard(0), EPDegrees(2, 2), Shard(1))
    assert found["experts.w2"].placement is None and "a plan tells" in found["experts.w2"].note
    assert found["router.weight"].placement == Replicate() and not found["router.weight"].sharded
    planned = ep_specs(view, {"experts.*": Shard(0)})
    assert planned["experts.w2"] == EPSpecInfo("experts.w2", Shard(0), EPDegrees(2, 2), Shard(0))
    assert planned["experts.b"] == EPSpecInfo("experts.b", Shard(0), EPDegrees(2, 2), Replicate())
    assert planned["router.weight"].placement == Replicate()
    alone = ep_specs(view.select("*.b"), {"*.b": Shard(0)})["experts.b"]
    assert alone.mesh is None and "EP ranks" in alone.note
    with pytest.raises(lazyckpt.MeshError, match="EP ranks"):
        _ = alone.degrees
    with pytest.raises(lazyckpt.MeshError, match="without processes"):
        _ = planned["experts.b"].ep_mesh
    with pytest.raises(lazyckpt.MeshError, match="matches none"):
        ep_specs(view, {"nothing.*": Shard(0)})


def test_pieces_that_others_contradict(dcp_cases: dict[str, Case]) -> None:
    view = lazyckpt.open(dcp_cases["experts"].path)
    odd = ep_specs(view, {"*": Shard(0)})["router.weight"]  # [3, 5] over four ranks: one row for each of three
    assert odd.placement == Shard(0) or odd.note


def test_one_rank_s_experts_and_all_again(dcp_cases: dict[str, Case]) -> None:
    case = dcp_cases["experts"]
    truth = case.truth["weights"]
    view, counts = opened(case.path)
    specs = ep_specs(view, {"experts.*": Shard(0)})
    counts.clear()
    parts = [drop_ep_dims(view, specs, rank) for rank in range(2)]
    whole = restore_ep_dims(parts, specs)
    assert counts.bytes == 0
    for rank, part in enumerate(parts):
        assert set(part) == set(truth)
        for name, tensor in part.items():
            want = truth[name].chunk(2)[rank] if name.startswith("experts") else truth[name]
            same(tensor[...], want, name)
    for name, tensor in whole.items():
        same(tensor[...], truth[name], name)
        same(tensor[1:, ..., ::2], truth[name][1:, ..., ::2], name)
    backwards = restore_ep_dim([part["experts.b"] for part in parts[::-1]], specs["experts.b"])
    same(backwards[...], torch.cat(truth["experts.b"].chunk(2)[::-1]), "in the order that is given")
    assert "expert-parallel" in backwards.explain()
    twice = restore_ep_dim([backwards, backwards.lazy[:2]], EPDegrees(2))
    same(twice[...], torch.cat([backwards[...], backwards[:2]]), "of what was put together already")


def test_experts_of_several_folders(tmp_path: Path) -> None:
    """Each EP rank saved its own: two folders, two files of one folder; what is put together travels and pickles."""
    parts = [torch.randn(2, 3), torch.randn(1, 3)]
    for n, part in enumerate(parts):
        torch.save({"w": part, "norm": torch.ones(3)}, tmp_path / f"rank{n}.pt")
        (tmp_path / f"ep{n}").mkdir()
        torch.save({"w": part, "norm": torch.ones(3)}, tmp_path / f"ep{n}" / "model.pt")
    specs = {"w": EPSpecInfo("w", Shard(0), EPDegrees(2))}
    for names in (("rank0.pt", "rank1.pt"), ("ep0/model.pt", "ep1/model.pt"), ("rank0.pt", "ep1/model.pt")):
        whole = restore_ep_dims([lazyckpt.open(tmp_path / name) for name in names], specs)
        assert set(whole) == {"w", "norm"}
        same(whole["w"][...], torch.cat(parts), "w")
        same(pickle.loads(pickle.dumps(whole["w"]))[...], torch.cat(parts), "w")
    first = lazyckpt.open(tmp_path / "rank0.pt")["w"]
    with pytest.raises(lazyckpt.MeshError, match="1 tensors are given"):
        restore_ep_dim([first], EPDegrees(2))
    with pytest.raises(lazyckpt.MeshError, match="do not make one tensor"):
        restore_ep_dim([first, first.lazy[:, :2]], EPDegrees(2))
    with pytest.raises(lazyckpt.MeshError, match="slices without steps"):
        restore_ep_dim([first, first.lazy[::-1]], EPDegrees(2))
    with pytest.raises(lazyckpt.MeshError, match="none of the number 2"):
        drop_ep_dim(first, EPDegrees(2), 2)
    with pytest.raises(lazyckpt.MeshError, match="say which"):
        drop_ep_dim(first, EPDegrees(2))
    with pytest.raises(lazyckpt.MeshError, match="different names"):
        restore_ep_dims([{"w": first}, {"v": first}], specs)
    changed = restore_ep_dims([lazyckpt.open(tmp_path / f"ep{n}" / "model.pt") for n in range(2)], specs)["w"]
    torch.save({"w": torch.randn(5, 5)}, tmp_path / "ep1" / "model.pt")
    with pytest.raises(lazyckpt.ChangedFileError):
        changed[...]
