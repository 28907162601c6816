"""Small tensors of a Zarr export that are packed: ``to_zarr(pack=...)`` and opening the result."""

from __future__ import annotations

import json
import math
import pickle
import zipfile
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import zarr
from safetensors.torch import save_file

import lazyckpt
from lazyckpt.core.dtypes import DTYPES
from lazyckpt.core.packs import InOnePiece, Pack, packed
from lazyckpt.errors import CorruptError, FormatError
from lazyckpt.export import zarr as export
from lazyckpt.interop import zarr_dtypes
from lazyckpt.io.storage.local import LocalStore
from lazyckpt.lazy import LazyArray
from lazyckpt.testing.oracle import same, some_keys

from .writers import Case

zarr_dtypes.register()


def _state(seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    state: dict[str, torch.Tensor] = {"embed.weight": torch.randn(240, 70, generator=g)}  # too large for pack=True
    for n in range(40):
        state[f"layers.{n}.norm.weight"] = torch.randn(1 + n % 7, 3, generator=g)
        state[f"layers.{n}.norm.scale"] = torch.randn(5, generator=g).bfloat16()
        state[f"layers.{n}.step"] = torch.tensor(n)
        state[f"layers.{n}.none"] = torch.empty(0, 4)
        state[f"layers.{n}.norm"] = torch.rand(2, 2, 2, generator=g) > 0.5
    return state | {
        "x/y": torch.randn(2, 3, dtype=torch.complex64, generator=g),
        "f8": torch.randn(33, 17, generator=g).to(torch.float8_e4m3fn),
        "turned": torch.randn(6, 5, generator=g).T,
        "every second": torch.arange(20.0)[::2],
    }


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    state = _state()
    state["tied"] = state["layers.3.norm.weight"]
    torch.save(state, tmp_path / "x.pt")
    return tmp_path / "x.pt", state


@pytest.mark.product
@pytest.mark.parametrize(
    "options", [{}, {"codec": "zstd"}, {"shard": True}, {"shard": "1KiB", "chunk": 64}, {"chunk": 100}]
)
@pytest.mark.parametrize("pack", [True, "1KiB", 40])
@pytest.mark.parametrize("ending", ["zarr", "zarr.zip"])
def test_it_opens_as_the_view_that_was_written(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, pack: Any, options: dict[str, Any], ending: str
) -> None:
    path, state = saved
    source = lazyckpt.open(path)
    source.to_zarr(tmp_path / f"out.{ending}", pack=pack, verify=True, **options)
    view = lazyckpt.open(tmp_path / f"out.{ending}")
    assert list(view) == list(source) and view.aliases == source.aliases and not view.problems
    for name, tensor in state.items():
        same(view[name][...], tensor, name)
        assert view[name].shape == tensor.shape and view[name].dtype == tensor.dtype
        assert view[name].name == source[name].name
        for key in some_keys(tensor.shape, name, 4):
            same(view[name][key], source[name][key], (name, key))


def test_a_thousand_tensors_take_a_few_files(tmp_path: Path) -> None:
    state = {f"l.{n}.w": torch.full((7, n % 5), float(n)) for n in range(1000)}
    save_file(state, tmp_path / "x.safetensors")
    lazyckpt.open(tmp_path / "x.safetensors").to_zarr(tmp_path / "out.zarr", pack=True)
    files = [path for path in (tmp_path / "out.zarr").rglob("*") if path.is_file()]
    assert sorted(str(path.relative_to(tmp_path / "out.zarr")) for path in files) == [
        "weights/%packed/float32/c/0", "weights/%packed/float32/zarr.json", "weights/%packed/zarr.json",
        "weights/zarr.json", "zarr.json",
    ]  # fmt: skip
    for name, tensor in lazyckpt.open(tmp_path / "out.zarr").to().items():
        same(tensor, state[name], name)


@pytest.mark.parametrize(
    "case", ["zero1_fp16_dp3", "zero2_aligned_round_robin", "zero3_sub_groups", "bf16_optimizer_dp3"]
)
def test_small_tensors_of_partitioned_states(zero_cases: Mapping[str, Case], tmp_path: Path, case: str) -> None:
    _all_states(zero_cases[case].path, tmp_path)


@pytest.mark.parametrize("case", ["flat", "fsdp2_uneven", "zstd", "file_per_item"])
def test_small_tensors_in_chunks(dcp_cases: Mapping[str, Case], tmp_path: Path, case: str) -> None:
    _all_states(dcp_cases[case].path, tmp_path)


def test_small_tensors_of_tensor_parallel_ranks(megatron_cases: Mapping[str, Case], tmp_path: Path) -> None:
    _all_states(megatron_cases["tp2_pp2_distopt_tied"].path, tmp_path)


def _all_states(path: Path, tmp_path: Path) -> None:
    source = lazyckpt.open(path)
    source.to_zarr(tmp_path / "out.zarr", pack="1MiB", verify=True)
    view = lazyckpt.open(tmp_path / "out.zarr")
    assert list(view.states) == list(source.states)
    for state in source.states:
        assert list(view.states[state]) == list(source.states[state])
        for name, tensor in source.states[state].items():
            same(view.states[state][name][...], tensor[...], (state, name))
    assert any("%packed" in name for name in view.stored)


@pytest.mark.parametrize("options", [{"codec": "zstd"}, {"shard": True, "chunk": 16}])
def test_a_pack_of_packed_tensors(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, options: dict[str, Any]
) -> None:
    """Scalars and others that lie somewhere in a compressed chunk, or in a shard, are packed again."""
    path, state = saved
    lazyckpt.open(path).to_zarr(tmp_path / "first.zarr", pack=True, **options)
    lazyckpt.open(tmp_path / "first.zarr").to_zarr(tmp_path / "second.zarr", pack=True)
    view = lazyckpt.open(tmp_path / "second.zarr")
    for name, tensor in state.items():
        same(view[name][...], tensor, name)


def test_a_converted_view(saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    """Tensors that are stored in several dtypes are one pack of the dtype that they are converted to."""
    path, state = saved
    lazyckpt.open(path).select("layers.**").astype(torch.float16).to_zarr(tmp_path / "out.zarr", pack=True)
    view = lazyckpt.open(tmp_path / "out.zarr")
    for name in view:
        wanted = state[name].half() if state[name].is_floating_point() else state[name]
        same(view[name][...], wanted, name)


def test_neighbours_in_a_file_are_read_together(tmp_path: Path) -> None:
    save_file({f"l.{n}.w": torch.full((64,), float(n)) for n in range(1000)}, tmp_path / "x.safetensors")
    view = lazyckpt.open(tmp_path / "x.safetensors")
    with mock.patch.object(LocalStore, "_fetch_pieces", autospec=True, side_effect=LocalStore._fetch_pieces) as reads:
        view.to_zarr(tmp_path / "out.zarr", pack=True)
    assert 1 <= len(reads.mock_calls) <= 2


def test_other_programs_read_the_packs(saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    path, state = saved
    lazyckpt.open(path).to_zarr(tmp_path / "out.zarr", pack=True, shard=True)
    for use_consolidated in (True, False):
        group = zarr.open_group(tmp_path / "out.zarr", mode="r", use_consolidated=use_consolidated)
        found = {}
        for _, array in group["weights/%packed"].arrays():
            about, at = array.attrs["lazyckpt"]["packed"], 0
            for name, number in zip(about["names"], about["shape"], strict=True):
                shape = about["shapes"][number]
                found[name] = array[at : at + math.prod(shape)].reshape(shape)
                at += math.prod(shape)
            assert at == array.shape[0]
        assert found.keys() == state.keys() - {"tied", "embed.weight"}  # the embedding is too large
        for name in ("layers.3.norm.weight", "turned", "every second", "layers.39.step", "layers.1.norm"):
            assert np.array_equal(found[name], state[name].numpy())
        assert np.array_equal(group["weights/embed/weight"][...], state["embed.weight"].numpy())


@pytest.mark.parametrize("options", [{}, {"shard": True}, {"codec": "zstd"}])
def test_packed_again(saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, options: dict[str, Any]) -> None:
    """The tensors of a pack, also numbers, are parts of chunks; they are packed with other neighbours."""
    path, state = saved
    lazyckpt.open(path).to_zarr(tmp_path / "a.zarr", pack=True, **options)
    lazyckpt.open(tmp_path / "a.zarr").select("layers.*.step").to_zarr(tmp_path / "b.zarr", pack=True, **options)
    lazyckpt.open(tmp_path / "a.zarr").to_zarr(tmp_path / "c.zarr", pack="1KiB", **options)
    for where in ("b.zarr", "c.zarr"):
        for name, tensor in lazyckpt.open(tmp_path / where).items():
            same(tensor[...], state[name], name)


def test_a_slice_reads_its_own_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {f"l.{n}": torch.arange(64.0) + n for n in range(100)}
    save_file(state, tmp_path / "x.safetensors")
    lazyckpt.open(tmp_path / "x.safetensors").to_zarr(tmp_path / "out.zarr", pack=True)
    view = lazyckpt.open(tmp_path / "out.zarr")
    tensor = view["l.7"]
    assert [f.extent.offset for f in tensor.fragments] == [
        list(view).index("l.7") * 64 * 4
    ] and "256 bytes" in tensor.explain()
    assert tensor[3:5].tolist() == [10.0, 11.0]


def test_pickled_and_in_other_processes(saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    path, state = saved
    with ProcessPoolExecutor(2) as pool:
        lazyckpt.open(path).to_zarr(tmp_path / "out.zarr", pack=True, chunk=128, executor=pool)
        view = lazyckpt.open(tmp_path / "out.zarr")
        again = pickle.loads(pickle.dumps(view.select("layers.**")))
        for name in again:
            same(again[name][...], state[name], name)
        view.to_safetensors(tmp_path / "back.safetensors", executor=pool)
        view.to_zarr(tmp_path / "again.zarr", pack="1MiB", executor=pool)
    for where in ("back.safetensors", "again.zarr"):
        back = lazyckpt.open(tmp_path / where)
        for name in state:
            same(back[name][...], state[name], name)


def test_an_export_without_packs_is_as_before(saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    path, _ = saved
    view = lazyckpt.open(path)
    large = view.select("embed.**")
    for name, part, pack in (("none", view, None), ("false", view, False), ("large", large, True)):
        part.to_zarr(tmp_path / f"{name}.zarr", pack=pack)
        root = json.loads((tmp_path / f"{name}.zarr/zarr.json").read_text())
        assert root["attributes"]["lazyckpt"]["layout"] == 1 and "%packed" not in json.dumps(root)
    view.to_zarr(tmp_path / "packed.zarr", pack=True)
    root = json.loads((tmp_path / "packed.zarr/zarr.json").read_text())
    assert root["attributes"]["lazyckpt"]["layout"] == 2


def test_another_source_is_another_job(tmp_path: Path) -> None:
    """Names, shapes and files are the same, but the tensors lie elsewhere."""
    save_file({n: torch.full((4,), float(ord(n))) for n in "abcd"}, tmp_path / "x.safetensors")
    view = lazyckpt.open(tmp_path / "x.safetensors")
    specs = [view[name].spec for name in "abcd"]
    orders = ((0, 1, 2, 3), (0, 2, 1, 3), (0, 1, 2, 3))
    packs = [
        packed("p", [replace(specs[n], name=name) for n, name in zip(order, "abcd", strict=True)]) for order in orders
    ]
    first, swapped, again = (
        export.Item(
            LazyArray(view["a"].store, spec), "p", export.Cut((16,), None, export.encoding(None, torch.float32))
        )
        for spec in packs
    )
    assert first.identity == again.identity != swapped.identity


def test_columns_only_of_raw_elements() -> None:
    dtype = next(d for d in DTYPES if d.name == "float32")
    from lazyckpt.core.extents import Extent
    from lazyckpt.core.specs import Fragment, TensorSpec

    def spec(path: str, **changes: Any) -> TensorSpec:
        extent = Extent(path, 0, changes.pop("dtype", dtype), (3,), (1,), **changes)
        return TensorSpec("w", (3,), dtype, (Fragment(extent, (3,)),))

    half = next(d for d in DTYPES if d.name == "float16")
    assert isinstance(packed("p", [spec("a"), spec("b")]).fragments, InOnePiece)
    for other in (spec("b", swapped=True), spec("b", neg=True), spec("b", dtype=half)):
        assert isinstance(packed("p", [spec("a"), other]).fragments, Pack)
        assert isinstance(packed("p", [other, spec("a")]).fragments, Pack)


def _changed(about: Any, **changes: Any) -> Any:
    return about | changes


DAMAGE: dict[str, Any] = {
    "no list": lambda about: 7,
    "names are gone": lambda about: {k: v for k, v in about.items() if k != "names"},
    "a name is a number": lambda about: _changed(about, names=[7, *about["names"][1:]]),
    "a name twice": lambda about: _changed(about, names=[about["names"][1], *about["names"][1:]]),
    "one name less": lambda about: _changed(about, names=about["names"][1:]),
    "a shape that is not there": lambda about: _changed(about, shape=[99, *about["shape"][1:]]),
    "a shape of -1": lambda about: _changed(about, shape=[-1, *about["shape"][1:]]),
    "a negative size": lambda about: _changed(about, shapes=[[-1], *about["shapes"][1:]]),
    "a huge size": lambda about: _changed(about, shapes=[[1 << 40, 1 << 40], *about["shapes"][1:]]),
    "a size that is true": lambda about: _changed(about, shapes=[[True], *about["shapes"][1:]]),
    "other sizes": lambda about: _changed(about, shapes=[[3], *about["shapes"][1:]]),
    "fewer positions": lambda about: _changed(about, order=about["order"][:-1]),
    "a position that is a text": lambda about: _changed(about, order=["0", *about["order"][1:]]),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_lists(tmp_path: Path, damage: str) -> None:
    save_file({f"l.{n}": torch.arange(4.0 + n % 2) for n in range(10)}, tmp_path / "x.safetensors")
    lazyckpt.open(tmp_path / "x.safetensors").to_zarr(tmp_path / "out.zarr", pack=True)
    root = tmp_path / "out.zarr/zarr.json"
    document = json.loads(root.read_text())
    own = document["consolidated_metadata"]["metadata"]["weights/%packed/float32"]["attributes"]["lazyckpt"]
    own["packed"] = DAMAGE[damage](own["packed"])
    root.write_text(json.dumps(document))
    with pytest.raises(CorruptError, match=r"%packed|the same name") as found:
        lazyckpt.open(tmp_path / "out.zarr")
    assert len(str(found.value).splitlines()) <= 3


def test_an_empty_tensor_of_a_size_that_no_number_of_torch_holds(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3), "b": torch.empty(0, 4)}, tmp_path / "x.safetensors")
    lazyckpt.open(tmp_path / "x.safetensors").to_zarr(tmp_path / "out.zarr", pack=True)
    root = tmp_path / "out.zarr/zarr.json"
    assert "[0,4]" in root.read_text()
    root.write_text(root.read_text().replace("[0,4]", f"[0,{1 << 63}]"))
    with pytest.raises(CorruptError, match="%packed"):
        lazyckpt.open(tmp_path / "out.zarr")


def test_a_name_in_a_pack_and_beside_it(tmp_path: Path) -> None:
    state = {"big": torch.zeros(200, 200), "a": torch.ones(3), "b": torch.ones(3)}
    save_file(state, tmp_path / "x.safetensors")
    lazyckpt.open(tmp_path / "x.safetensors").to_zarr(tmp_path / "out.zarr", pack=True)
    root = tmp_path / "out.zarr/zarr.json"
    root.write_text(root.read_text().replace('["a","b"]', '["a","big"]'))
    with pytest.raises(CorruptError, match="same name"):
        lazyckpt.open(tmp_path / "out.zarr")


def test_a_pack_of_two_dimensions(tmp_path: Path) -> None:
    save_file({"big": torch.zeros(200, 200), "a": torch.ones(3), "b": torch.ones(3)}, tmp_path / "x.safetensors")
    lazyckpt.open(tmp_path / "x.safetensors").to_zarr(tmp_path / "out.zarr", pack=True)
    root = tmp_path / "out.zarr/zarr.json"
    document = json.loads(root.read_text())
    nodes = document["consolidated_metadata"]["metadata"]
    nodes["weights/big"]["attributes"]["lazyckpt"]["packed"] = {"names": [], "shapes": [], "shape": [], "order": []}
    root.write_text(json.dumps(document))
    with pytest.raises(CorruptError, match="2 dimensions"):
        lazyckpt.open(tmp_path / "out.zarr")


def test_a_layout_of_later_versions(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3), "b": torch.ones(3)}, tmp_path / "x.safetensors")
    lazyckpt.open(tmp_path / "x.safetensors").to_zarr(tmp_path / "out.zarr", pack=True)
    root = tmp_path / "out.zarr/zarr.json"
    root.write_text(root.read_text().replace('"layout":2', '"layout":3'))
    with pytest.raises(FormatError, match="layout 3"):
        lazyckpt.open(tmp_path / "out.zarr")


def test_a_zip_with_packs_is_stored_uncompressed(tmp_path: Path) -> None:
    save_file({f"l.{n}": torch.arange(4.0) for n in range(10)}, tmp_path / "x.safetensors")
    lazyckpt.open(tmp_path / "x.safetensors").to_zarr(tmp_path / "out.zarr.zip", pack=True)
    with zipfile.ZipFile(tmp_path / "out.zarr.zip") as archive:
        assert "weights/%packed/float32/c/0" in archive.namelist()


def test_tensors_of_one_file_are_packed_without_looking_at_each(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {name: t.contiguous() for name, t in saved[1].items() if name != "tied" and not t.is_complex()}
    save_file(state, tmp_path / "x.safetensors")
    made: list[str] = []
    exact = lazyckpt.CheckpointView.exact

    def counted(self: Any, name: str) -> Any:
        made.append(name)
        return exact(self, name)

    with mock.patch.object(lazyckpt.CheckpointView, "exact", counted):
        lazyckpt.open(tmp_path / "x.safetensors").to_zarr(tmp_path / "columns", pack=4096)
    assert 0 < len(set(made)) < 5  # those that are not packed, and one for its store
    monkeypatch.setattr("lazyckpt.export.packs.columns_of", lambda part: None)
    lazyckpt.open(tmp_path / "x.safetensors").to_zarr(tmp_path / "each", pack=4096)
    files = {p.relative_to(tmp_path / "each"): p.read_bytes() for p in (tmp_path / "each").rglob("*") if p.is_file()}
    assert files == {
        p.relative_to(tmp_path / "columns"): p.read_bytes() for p in (tmp_path / "columns").rglob("*") if p.is_file()
    }
    view = lazyckpt.open(tmp_path / "columns")
    assert list(view) == list(lazyckpt.open(tmp_path / "x.safetensors"))
    for name, t in state.items():
        same(view[name][...], t, name)


@pytest.mark.parametrize("shape", [(0, 3), ()])
def test_packs_of_only_empty_tensors_and_of_scalars(tmp_path: Path, shape: tuple[int, ...]) -> None:
    state = {f"t{n}": torch.ones(shape) for n in range(3)}
    save_file(state, tmp_path / "x.safetensors")
    lazyckpt.open(tmp_path / "x.safetensors").to_zarr(tmp_path / "out", pack=True)
    view = lazyckpt.open(tmp_path / "out")
    for name, t in state.items():
        same(view[name][...], t, name)


def test_a_name_that_looks_like_a_document(tmp_path: Path) -> None:
    state = {'"names":["a"]': torch.ones(2), "é\\": torch.zeros(1)}
    save_file(state, tmp_path / "x.safetensors")
    lazyckpt.open(tmp_path / "x.safetensors").to_zarr(tmp_path / "out", pack=True)
    assert set(lazyckpt.open(tmp_path / "out")) == set(state)
