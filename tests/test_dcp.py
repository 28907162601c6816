"""Distributed checkpoints of torch: the contract on each kind of them, names and states, what a read costs."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import SerializationFormat

import lazyckpt
from lazyckpt.core.extents import Archive, Hole
from lazyckpt.formats.dcp.chunks import ChunkFragments, in_chunks
from lazyckpt.formats.dcp.items import Item
from lazyckpt.testing import contract
from lazyckpt.testing.contract import Check
from lazyckpt.testing.counting import opened
from lazyckpt.testing.oracle import same

from .writers import Case
from .writers.dcp_contents import Reversed, Zstd, odd_objects


@pytest.mark.product
@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
def test_contract(dcp_case: Case, check: Check) -> None:
    check(dcp_case)


def test_format_and_problems(dcp_case: Case) -> None:
    view = lazyckpt.open(dcp_case.path)
    assert view.format == dcp_case.info.get("format", "dcp")
    assert view.mesh == lazyckpt.Mesh()
    zeros = [line for line in view.problems if line.code == "replaced-tensor"]
    assert list(view.problems) == zeros
    assert bool(zeros) == (dcp_case.path.parent.name == "hub_consolidated")


# -- names and states


def test_a_key_is_what_its_path_says(dcp_cases: dict[str, Case]) -> None:
    view = lazyckpt.open(dcp_cases["odd"].path)
    assert "key.with.dots" in view and "tied.one" in view
    assert "model.key.with.dots" in view.stored and "list.0" in view.stored and "list.0" not in list(view)
    assert "pair.0" in view.stored, "the tensor inside an object"
    same(view.stored["pair.0"][...], torch.arange(4.0), "inside an object")
    same(view.stored["3"][...], torch.zeros(2), "a key that was a number")


def test_objects_are_in_meta(dcp_cases: dict[str, Case]) -> None:
    meta: Any = lazyckpt.open(dcp_cases["odd"].path).meta
    want = odd_objects()
    assert {k: meta[k] for k in want if k != "array"} == {k: v for k, v in want.items() if k != "array"}
    assert np.array_equal(meta["array"], want["array"])
    assert repr(meta["list"]) == "[<tensor 'list.0'>, 5, {'x': <tensor 'list.2.x'>}]"
    assert repr(meta["rng"]) == "<tensor 'rng'>"
    assert "model" not in meta


@pytest.mark.parametrize("name", ["fsdp2", "no_collectives", "background", "fsdp1", "tensor_parallel"])
def test_param_groups_are_in_meta(dcp_cases: dict[str, Case], name: str) -> None:
    view = lazyckpt.open(dcp_cases[name].path)
    (group,) = view.meta["optimizer" if name == "fsdp1" else "optim"]["param_groups"]
    assert (group["lr"], group["betas"]) == (0.01, (0.9, 0.999))
    assert set(group["params"]) == set(view.states["exp_avg"])


def test_numbers_of_an_optimizer_become_names(dcp_cases: dict[str, Case]) -> None:
    for name in ("numbered", "not_flattened"):
        view = lazyckpt.open(dcp_cases[name].path)
        assert "layers.1.up.weight" in view.states["exp_avg"]
        assert view.meta["optimizer"]["param_groups"][0]["params"] == list(range(len(view.states["exp_avg"])))


def _saved(folder: Path, state: dict[str, Any]) -> Path:
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.filterwarnings("ignore")
def test_numbers_that_nothing_determines_stay(tmp_path: Path) -> None:
    model = {"a": torch.zeros(3), "b": torch.zeros(3), "c": torch.zeros(2)}
    state = {0: {"exp_avg": torch.ones(3)}, 1: {"exp_avg": torch.ones(2)}}
    groups = [{"lr": 0.1, "params": [0, 1]}]
    view = lazyckpt.open(_saved(tmp_path / "x", {"model": model, "opt": {"state": state, "param_groups": groups}}))
    assert set(view.states["exp_avg"]) == {"0", "c"}
    assert any(line.code == "undecided-name" for line in view.problems)
    groups[0]["param_names"] = ["b", "c"]
    view = lazyckpt.open(_saved(tmp_path / "y", {"model": model, "opt": {"state": state, "param_groups": groups}}))
    assert set(view.states["exp_avg"]) == {"b", "c"}
    assert view.problems == ()


@pytest.mark.filterwarnings("ignore")
def test_an_optimizer_alone(tmp_path: Path) -> None:
    state = {"a.b": {"step": torch.tensor(1.0), "exp_avg": torch.ones(3)}}
    groups = [{"lr": 0.1, "params": ["a.b"]}]
    for name, saved in (("in", {"optimizer": {"state": state, "param_groups": groups}}),
                        ("root", {"state": state, "param_groups": groups})):  # fmt: skip
        view = lazyckpt.open(_saved(tmp_path / name, saved))
        assert list(view.states) == ["exp_avg", "step"], "first what has a value for each element"
        assert list(view) == ["a.b"]


@pytest.mark.filterwarnings("ignore")
def test_many_objects_are_read_when_asked_for(tmp_path: Path) -> None:
    many = {f"p{n}": {"lr": n, "pair": (torch.full((2,), n), n)} for n in range(200)}
    _saved(tmp_path / "x", {"model": {"w": torch.zeros(4)}, "options": many, "epoch": 3})
    view, counts = opened(tmp_path / "x")
    assert counts.paths == {".metadata"}
    counts.clear()
    assert set(view.meta) == {"options", "epoch"} and view.meta["epoch"] == 3
    assert counts.requests == 1
    os.utime(tmp_path / "x" / "__0_0.distcp", ns=(1, 1))
    with pytest.raises(lazyckpt.errors.ChangedFileError):
        view.meta["options"]
    view = lazyckpt.open(tmp_path / "x")
    again = pickle.loads(pickle.dumps(view))
    assert again.meta["options"]["p7"]["lr"] == 7
    assert len(view.stored) == 201
    same(view.stored["options.p7.pair.0"][...], torch.full((2,), 7), "inside an object")
    assert view.problems == ()


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_of_objects_alone(tmp_path: Path) -> None:
    view = lazyckpt.open(_saved(tmp_path / "x", {"epoch": 3}))
    assert len(view) == 0 and view.meta["epoch"] == 3 and repr(view)


# -- what a read costs


@pytest.mark.filterwarnings("ignore")
def test_a_row_costs_its_bytes_and_the_archive_directory_once(tmp_path: Path) -> None:
    whole = torch.arange(512 * 2048, dtype=torch.float32).view(512, 2048)
    _saved(tmp_path / "x", {"model": {"w": whole, "other": torch.zeros(100_000)}})
    view, counts = opened(tmp_path / "x")
    assert counts.paths == {".metadata"}, "opening reads no item"
    counts.clear()
    same(view["w"][5], whole[5], "a row")
    assert counts.bytes <= 2048 * 4 + 4096 and counts.requests <= 3
    counts.clear()
    same(view["w"][77], whole[77], "another")
    assert (counts.bytes, counts.requests) == (2048 * 4, 1)
    text = view["w"].explain((slice(3, 5), slice(0, 8)))
    assert "__0_0.distcp" in text and "64 bytes" in text


def test_only_the_shards_that_hold_a_slice_are_touched(dcp_cases: dict[str, Case]) -> None:
    view, counts = opened(dcp_cases["fsdp2"].path)
    t = view["emb.weight"]
    assert len({f.extent.path for f in t.fragments}) == 2
    counts.clear()
    t[0]
    assert len(counts.paths) == 1


def test_thousands_of_chunks_are_found_without_making_them_all() -> None:
    items = [((n * 2, 0), (2, 3), Item("f", n * 100, 100)) for n in reversed(range(5000))]
    spec = in_chunks("t", torch.float32, (10_000, 3), [*items, ((10_000, 0), (0, 3), Item("f", 0, 100))])
    assert isinstance(spec.fragments, ChunkFragments) and len(spec.fragments) == 5000
    near = spec.fragments.meeting((range(4001, 4003), range(3)))
    assert sorted(f.extent.offset for f in near if isinstance(f.extent, Archive)) == [200_000, 200_100]
    assert spec.fragments.meeting((range(0), range(3))) == []
    assert len(spec.fragments[3:5]) == 2 and spec.fragments[-1].extent == spec.fragments[4999].extent


def test_what_is_packed_reads_in_slices(dcp_cases: dict[str, Case]) -> None:
    view, counts = opened(dcp_cases["zstd"].path)
    large = dcp_cases["zstd"].truth["weights"]["large"]
    same(view["large"][5:7, ::3], large[5:7, ::3], "a slice")
    counts.clear()
    same(view["large"][:, 400], large[:, 400], "a column")
    assert counts.requests == 0, "it is unpacked already"
    assert "within the archive" in view["large"].explain()
    assert view.meta["epoch"] == 3


@pytest.mark.filterwarnings("ignore")
def test_a_codec_leaves_safetensors_unpacked(tmp_path: Path) -> None:
    """torch packs an object as always, nothing for each tensor, and no safetensors file."""
    tensors = {"w": torch.arange(4000.0), "v": torch.ones(3, 2), "none": torch.zeros(0, 3), "one": torch.tensor(2.5)}
    for n, extension in enumerate((Zstd(), Reversed())):
        writer = dcp.FileSystemWriter(
            tmp_path / str(n), serialization_format=SerializationFormat.SAFETENSORS, _extensions=[extension]
        )
        dcp.save({"model": tensors, "epoch": 3}, storage_writer=writer, no_dist=True)
        view, counts = opened(tmp_path / str(n))
        assert view.format == "dcp-safetensors" and bool(view.problems) == n
        for name, tensor in tensors.items():
            same(view[name][...], tensor, name)
        counts.clear()
        view["w"][:2]
        assert counts.bytes == 8
        assert n or view.meta["epoch"] == 3


def test_an_unknown_codec_is_told_and_refused(dcp_cases: dict[str, Case]) -> None:
    view = lazyckpt.open(dcp_cases["unknown_codec"].path)
    assert view["w"].shape == (4,)
    assert any("stream.reversed" in line for line in view.problems)
    with pytest.raises(lazyckpt.errors.DataError, match=r"stream\.reversed"):
        view["w"][...]
    with pytest.raises(KeyError):
        view.meta["epoch"]


# -- lost, truncated and left-over files


def _copy(case: Case, tmp_path: Path) -> Path:
    return Path(shutil.copytree(case.path, tmp_path / "copy"))


@pytest.mark.parametrize("name", ["fsdp2", "as_safetensors", "no_collectives"])
@pytest.mark.parametrize("how", ["missing", "truncated"])
def test_a_lost_file_is_a_hole(dcp_cases: dict[str, Case], tmp_path: Path, name: str, how: str) -> None:
    case = dcp_cases[name]
    folder = _copy(case, tmp_path)
    victim = folder / "__1_0.distcp"
    if how == "missing":
        victim.unlink()
    else:
        victim.write_bytes(victim.read_bytes()[:100])
    view = lazyckpt.open(folder)
    assert any("__1_0.distcp" in line and how in line for line in view.problems)
    read = lost = 0
    for key, whole in case.truth["weights"].items():
        t = view[key]
        holes = [f for f in t.fragments if isinstance(f.extent, Hole)]
        assert bool(holes) == any(f.extent.path == "__1_0.distcp" for f in t.fragments)
        if not holes:
            same(t[...], whole, key)
            read += 1
            continue
        lost += 1
        with pytest.raises(lazyckpt.errors.MissingFileError, match=r"__1_0\.distcp"):
            t[...]
        with pytest.raises(lazyckpt.errors.MissingFileError):
            t._check()
        if len(t.fragments) > 1:
            n = t.fragments[0].local_shape[0]
            same(t[:n] if whole.ndim == 1 else t[:n, :1], whole[:n] if whole.ndim == 1 else whole[:n, :1], key)
    assert read and lost


def test_left_over_files_are_told(dcp_cases: dict[str, Case], tmp_path: Path) -> None:
    folder = _copy(dcp_cases["fsdp2"], tmp_path)
    shutil.copy(folder / "__1_0.distcp", folder / "__7_0.distcp")
    (folder / ".metadata.tmp").write_bytes(b"")
    lines = lazyckpt.open(folder).problems
    assert any("__7_0.distcp" in line for line in lines) and any(".metadata.tmp" in line for line in lines)


@pytest.mark.parametrize("left", ["nothing", "tmp"])
def test_an_unfinished_save_is_refused(dcp_cases: dict[str, Case], tmp_path: Path, left: str) -> None:
    folder = _copy(dcp_cases["fsdp2"], tmp_path)
    (folder / ".metadata").rename(folder / ".metadata.tmp") if left == "tmp" else (folder / ".metadata").unlink()
    with pytest.raises(lazyckpt.errors.MissingFileError, match="not finished"):
        lazyckpt.open(folder)


def test_the_metadata_file_stands_for_its_folder(dcp_cases: dict[str, Case]) -> None:
    folder = dcp_cases["fsdp2"].path
    assert list(lazyckpt.open(folder / ".metadata")) == list(lazyckpt.open(folder))
    with pytest.raises(lazyckpt.errors.FormatError, match="open its folder"):
        lazyckpt.open(folder / "__0_0.distcp")


def test_a_lost_rank_of_the_hub_writer(dcp_cases: dict[str, Case], tmp_path: Path) -> None:
    case = dcp_cases["hub_ranks"]
    folder = _copy(case, tmp_path)
    (folder / "shard-00002-model-00001-of-00001.safetensors").unlink()
    view = lazyckpt.open(folder)
    assert any("shard-00002" in line for line in view.problems) and any(
        line.code == "missing-elements" for line in view.problems
    )
    with pytest.raises(lazyckpt.errors.DataError):
        view["uneven"][...]
    same(view["uneven"][:2], case.truth["weights"]["uneven"][:2], "what is there")


def test_sharded_files_are_read_where_consolidation_failed(dcp_cases: dict[str, Case], tmp_path: Path) -> None:
    case = dcp_cases["hub_consolidated"]
    folder = _copy(case, tmp_path)
    (data,) = folder.glob("model*.safetensors")
    index = folder / "model.safetensors.index.json"
    for how in ("damaged", "unfinished", "none"):
        if how == "damaged":
            index.write_text("{")
        elif how == "unfinished":
            index.unlink()
            data.write_bytes(data.read_bytes()[:-64] + bytes(64))
        else:
            data.unlink()
        view = lazyckpt.open(folder)
        assert view.format == "huggingface-dcp" and len(view.problems) == (how != "none")
        for key, whole in case.truth["weights"].items():
            same(view[key][...], whole, key)


# -- other writers' files


@pytest.mark.filterwarnings("ignore")
def test_what_older_torch_leaves_out(dcp_cases: dict[str, Case], tmp_path: Path) -> None:
    """torch 2.3: three attributes, and objects that are not taken apart."""
    folder = _copy(dcp_cases["fsdp2"], tmp_path)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for name in ("storage_meta", "version"):
        delattr(metadata, name)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata, 2))
    view = lazyckpt.open(folder)
    for key, whole in dcp_cases["fsdp2"].truth["exp_avg"].items():
        same(view.states["exp_avg"][key][...], whole, key)


def test_over_a_url(dcp_cases: dict[str, Case]) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.put(f"{dcp_cases['fsdp2'].path}/", "/lazyckpt-dcp/", recursive=True)
    view = lazyckpt.open("memory://lazyckpt-dcp")
    for key, whole in dcp_cases["fsdp2"].truth["weights"].items():
        same(view[key][...], whole, key)
    memory.rm("/lazyckpt-dcp", recursive=True)


def test_exports(dcp_cases: dict[str, Case], tmp_path: Path) -> None:
    for name in ("tensor_parallel", "zstd"):
        view = lazyckpt.open(dcp_cases[name].path).select(lambda key: "complex128" not in key)
        view.to_safetensors(tmp_path / name)
        for key, tensor in lazyckpt.open(tmp_path / name).to().items():
            same(tensor, dcp_cases[name].truth["weights"][key], key)


def test_ranks_that_all_write_the_same_leave_nothing_over(tmp_path: Path) -> None:
    """DDP without collectives: every rank's metadata lists its own copy of every tensor."""
    weight = torch.arange(6.0).view(2, 3)
    dcp.save({"weight": weight}, storage_writer=dcp.FileSystemWriter(tmp_path))
    metadata: Any = pickle.loads((tmp_path / ".metadata").read_bytes())
    (tmp_path / ".metadata").rename(tmp_path / "__0.metadata")
    shutil.copy(tmp_path / "__0_0.distcp", tmp_path / "__1_0.distcp")
    for item in metadata.storage_data.values():
        item.relative_path = "__1_0.distcp"
    (tmp_path / "__1.metadata").write_bytes(pickle.dumps(metadata))
    view = lazyckpt.open(tmp_path)
    assert view.problems == ()
    same(view["weight"][...], weight, "once")
