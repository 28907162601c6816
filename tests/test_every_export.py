"""Every export, read by its format's own reader, has every tensor that the view has: names, shapes, dtypes and bits.

What a format cannot hold raises or is listed as left out; nothing vanishes. The readers are safetensors', torch.load,
torch.distributed.checkpoint, zarr-python and tensorstore; none of lazyckpt's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lazyckpt
from lazyckpt.errors import DataError, DestinationError, LazyckptError

from .contract import open_case
from .oracle import as_ints
from .writers import Case

zarr = pytest.importorskip("zarr")
safetensors = pytest.importorskip("safetensors")
Bits = tuple[tuple[int, ...], str, bytes]  # shape, dtype, elements in C order


def bits(tensor: torch.Tensor) -> Bits:
    raw = as_ints(tensor.detach().cpu()).contiguous().view(-1)
    data = raw.numpy().tobytes() if raw.numel() else b""
    return tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), data


def of_state(view: Any, state: str) -> dict[str, Bits]:
    return {name: bits(t[...]) for name, t in view.states[state].items()}


def agree(found: Mapping[str, Bits], wanted: Mapping[str, Bits], what: str) -> None:
    assert set(found) == set(wanted), (what, set(found) ^ set(wanted))
    for name, (shape, dtype, data) in wanted.items():
        assert found[name][:2] == (shape, dtype), (what, name)
        assert found[name][2] == data, (what, name)


# -- the readers of the formats


_SAFETENSORS = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "U16": "uint16", "U32": "uint32", "U64": "uint64", "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "C64": "complex64",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip


def check_safetensors(view: Any, dest: Path) -> None:
    found: dict[str, Bits] = {}
    for path in view.to_safetensors(dest, max_shard_size="40KB"):
        if path.suffix == ".json":
            continue
        data = path.read_bytes()
        for name, about in safetensors.deserialize(data):
            found[name] = tuple(about["shape"]), _SAFETENSORS[about["dtype"]], bytes(about["data"])
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        tied = {a: o for a, o in header.get("__metadata__", {}).items() if a != "format"}
        found |= {alias: found[owner] for alias, owner in tied.items()}
    agree(found, of_state(view, view.state), "safetensors")


def check_torch(view: Any, dest: Path) -> None:
    found: dict[str, Bits] = {}
    for path in view.to_torch(dest, max_shard_size="40KB"):
        if path.suffix != ".json":
            found |= {name: bits(t) for name, t in torch.load(path, weights_only=True).items()}
    agree(found, of_state(view, view.state), "torch")


def check_dcp(view: Any, dest: Path) -> None:
    from torch.distributed.checkpoint import FileSystemReader, load

    view.to_dcp(dest)
    metadata = FileSystemReader(dest).read_metadata()
    state: dict[str, Any] = {
        key: torch.zeros(about.size, dtype=torch.int8).new_empty(about.size, dtype=about.properties.dtype)
        for key, about in metadata.state_dict_metadata.items()
        if hasattr(about, "size")
    }
    load(state, storage_reader=FileSystemReader(dest), no_dist=True)
    found = {key.removeprefix("model."): bits(t) for key, t in state.items() if key.startswith("model.")}
    agree(found, of_state(view, view.state), "dcp")
    for name in view.states:
        if name not in ("weights", "fp32"):
            moments = {key: bits(state[f"optim.state.{key}.{name}"]) for key in view.states[name]}
            agree(moments, of_state(view, name), name)


def check_universal(view: Any, dest: Path) -> None:
    lost = view.to_universal(dest)
    folders = {path.name for path in (dest / "zero").iterdir() if path.is_dir()}
    aliases = dict(view.aliases)
    weights = view.states["fp32" if "fp32" in view.states else view.state]
    for name in weights:
        t = weights[name][...]
        wanted = bits(t.float() if t.is_floating_point() else t)
        loaded = torch.load(dest / "zero" / aliases.get(name, name) / "fp32.pt", weights_only=False)
        assert bits(loaded["param"] if isinstance(loaded, dict) else loaded) == wanted, name
    assert folders >= {name for name in weights if name not in aliases}
    for state in view.states:
        if state in ("weights", "fp32"):
            continue
        for name in view.states[state]:
            listed = any(key.startswith(f"{state}.{name}") or key == state for key in lost)
            assert listed or (dest / "zero" / name / f"{state}.pt").exists(), (state, name)


def _of_hierarchy(root: Any, about: Mapping[str, Any]) -> dict[str, dict[str, Bits]]:
    found: dict[str, dict[str, Bits]] = {state: {} for state in about["states"]}
    groups = dict(zip([n for n in root if isinstance(root[n], zarr.Group)], found, strict=False))
    for path, node in root.members(max_depth=None):
        if isinstance(node, zarr.Array):
            own = node.attrs["lazyckpt"]
            data = np.ascontiguousarray(np.asarray(node[...])).tobytes()
            state = next(s for g, s in groups.items() if path.split("/")[0] == g)
            found[state][own["name"]] = tuple(node.shape), str(node.dtype), data
    for tensors in found.values():
        tensors |= {alias: tensors[owner] for alias, owner in about["aliases"].items() if owner in tensors}
    return found


def check_zarr(view: Any, dest: Path) -> None:
    import lazyckpt.interop.zarr_dtypes as dtypes  # bfloat16 and float8 for zarr-python

    assert dtypes
    view.to_zarr(dest, chunk="8KB")
    root = zarr.open_group(dest, mode="r")
    found = _of_hierarchy(root, root.attrs["lazyckpt"])
    for state in view.states:
        wanted = of_state(view, state)
        full = {**found[state]}
        agree({name: full[name] for name in full if name in wanted}, wanted, state)
        assert set(full) - set(wanted) <= set(view.aliases)


def check_tensorstore(view: Any, dest: Path) -> None:
    ts = pytest.importorskip("tensorstore")
    view.to_zarr(dest, codec="zstd", states=[view.state])
    documents = [path for path in dest.rglob("zarr.json") if json.loads(path.read_text())["node_type"] == "array"]
    found = {}
    for path in documents:
        name = json.loads(path.read_text())["attributes"]["lazyckpt"]["name"]
        if "fnuz" in path.read_text() or "e8m0" in path.read_text():
            found[name] = bits(view[name][...])  # tensorstore lacks some of them
            continue
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path.parent}/"}}
        array = ts.open(spec, read=True, open=True).result().read().result()
        found[name] = tuple(array.shape), str(array.dtype), np.ascontiguousarray(array).tobytes()
    wanted = {name: b for name, b in of_state(view, view.state).items() if name not in view.aliases}
    agree(found, wanted, "tensorstore")


def check_virtual(view: Any, dest: Path) -> None:
    import fsspec

    dest = dest.with_suffix(".json")
    left_out = view.to_virtual(dest)
    fs = fsspec.filesystem("reference", fo=str(dest), asynchronous=False)
    about = json.loads(fs.cat("zarr.json"))["attributes"]["lazyckpt"]
    arrays = {}
    for path in fs.find(""):
        if path.endswith("/zarr.json"):
            document = json.loads(fs.cat(path))
            if document["node_type"] == "array":
                arrays[path.removesuffix("/zarr.json")] = document
    told = {(path.split("/")[0], d["attributes"]["lazyckpt"]["name"]) for path, d in arrays.items()}
    count = sum(len({view.states[s].owner(n) for n in view.states[s]}) for s in about["states"])
    assert len(told) + len(left_out) == count, "each tensor is there or listed"
    assert about["left_out"] == left_out


CHECKS: dict[str, Callable[[Any, Path], None]] = {
    "safetensors": check_safetensors,
    "torch": check_torch,
    "dcp": check_dcp,
    "universal": check_universal,
    "zarr": check_zarr,
    "tensorstore": check_tensorstore,
    "virtual": check_virtual,
}
every = pytest.mark.parametrize("to", CHECKS)


@every
def test_fixtures(case: Case, tmp_path: Path, to: str) -> None:
    """Where a format takes the checkpoint at all; what it refuses, it refuses before anything is there."""
    view = open_case(case)
    try:
        CHECKS[to](view, tmp_path / "out")
    except DataError as e:
        assert any(word in str(e) for word in ("float", "complex", "uint", "int", "qint", "folder", "shape", "two")), e
        assert not (tmp_path / "out").exists()


# -- tensors of every dtype, and odd ones


def _zoo() -> dict[str, torch.Tensor]:
    """A tensor of every dtype that torch can save and load."""
    g = torch.Generator().manual_seed(0)
    found = {}
    for name, dtype in vars(torch).items():
        small = re.fullmatch(r"u?int[1-7]|bits\w*|qu?int\w*", name)
        if isinstance(dtype, torch.dtype) and str(dtype) == f"torch.{name}" and not small:
            raw = torch.randint(0, 2 if dtype == torch.bool else 256, (30 * dtype.itemsize,), generator=g)
            found[f"of.{name}"] = raw.to(torch.uint8).view(dtype).view(5, 6)
    return found


@pytest.mark.parametrize("dtype", _zoo())
@every
def test_dtypes(tmp_path: Path, to: str, dtype: str) -> None:
    tensor = _zoo()[dtype]
    state = {"w": tensor, "scalar": tensor[0, 0].clone(), "none": tensor[:0].clone(), "wide": tensor[:, :0].clone()}
    torch.save(state, tmp_path / "m.pt")
    view = lazyckpt.open(tmp_path / "m.pt")
    assert set(view) == set(state) and all(view[n].dtype == tensor.dtype for n in state)
    try:
        CHECKS[to](view, tmp_path / "out")
    except LazyckptError as e:
        assert dtype.removeprefix("of.") in str(e), "what cannot be written is named"
        assert not (tmp_path / "out").exists()


ODD = [
    "plain", "a", "a.b", "a.b.c", "A", "A.B", "with space", "ünï.cødé", "重み.層",
    "a/b", "..", "../up", "a..b", ".", "x.",
    ".x", "zarr.json", ".zarray", "c", "c.0", "__x", "%", "a%2Fb", "con", "tab\tand\nline", "back\\slash", "x" * 120,
    "a.%", "%empty", "model.safetensors", "-dash", "e\u0301", "\u00e9", "$ref", "optim.state", "module", "state_dict.z",
]  # fmt: skip


@pytest.mark.parametrize("to", [name for name in CHECKS if name != "universal"])
def test_odd_names(tmp_path: Path, to: str) -> None:
    state = {name: torch.full((2, 3), float(n)) for n, name in enumerate(ODD)} | {"": torch.ones(1)}
    state["tied/name"] = state["plain"]
    from lazyckpt.distributed import save_state_dict

    save_state_dict(state, tmp_path / "m.pt", safe_serialization=False)
    view = lazyckpt.open(tmp_path / "m.pt")
    assert set(view) == set(state)
    CHECKS[to](view, tmp_path / "out")
    if to in ("safetensors", "torch", "zarr", "dcp"):
        again = lazyckpt.open(tmp_path / "out")
        agree(of_state(again, again.state), of_state(view, view.state), "read again")


@pytest.mark.parametrize("name", ODD)
def test_odd_names_of_parameters_in_universal_checkpoints(tmp_path: Path, name: str) -> None:
    torch.save({name: torch.ones(2, 3), "other": torch.zeros(2)}, tmp_path / "m.pt")
    view = lazyckpt.open(tmp_path / "m.pt")
    try:
        check_universal(view, tmp_path / "out")
    except DataError as e:
        assert repr(name)[1:-1] in str(e) and not (tmp_path / "out").exists()


@pytest.mark.parametrize("length", [200, 255, 256, 300, 1000, 5000])
@pytest.mark.parametrize("to", ["zarr", "safetensors", "torch", "dcp", "universal"])
def test_long_names(tmp_path: Path, to: str, length: int) -> None:
    """Names of files end at 255 bytes: the name itself is not cut."""
    names = ["n" * length, "n" * (length - 1) + "m", "層" * (length // 3), "deep." + "x" * length + ".w"]
    torch.save({name: torch.full((3,), float(n)) for n, name in enumerate(names)}, tmp_path / "m.pt")
    view = lazyckpt.open(tmp_path / "m.pt")
    try:
        CHECKS[to](view, tmp_path / "out")
    except (DataError, DestinationError) as e:
        assert to == "universal" and isinstance(e, DataError) and len(str(e)) < 600
        assert not (tmp_path / "out").exists()
        return
    again = lazyckpt.open(tmp_path / "out")
    agree(of_state(again, again.state), of_state(view, view.state), "read again")


@pytest.mark.parametrize("to", ["zarr", "universal"])
def test_names_that_are_one_file_where_case_does_not_count(
    tmp_path: Path, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On such a file system one tensor would silently replace the other."""
    torch.save({"Block.w": torch.ones(1), "block.w": torch.zeros(1), "other": torch.ones(2)}, tmp_path / "m.pt")
    view = lazyckpt.open(tmp_path / "m.pt")
    CHECKS[to](view, tmp_path / "here")
    monkeypatch.setattr("lazyckpt.export.places.ignores_case", lambda *_: True)
    with pytest.raises(DestinationError, match=r"Block.*block"):
        CHECKS[to](view, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    CHECKS[to](view.select("other"), tmp_path / "out")


def test_states_that_an_engine_of_zero_3_does_not_load_are_told_of(tmp_path: Path) -> None:
    weights = {"a": torch.ones(3), "b": torch.ones(2, 2)}
    for states, told in (
        (("exp_avg", "exp_avg_sq"), set()),
        (("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), {"max_exp_avg_sq"}),
        (("square_avg",), {"square_avg"}),
    ):
        state = {n: {kind: torch.ones_like(t) for kind in states} for n, t in enumerate(weights.values())}
        optimizer = {"state": state, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
        torch.save({"model": weights, "optimizer": optimizer}, tmp_path / "m.pt")
        lost = lazyckpt.open(tmp_path / "m.pt", cache=False).to_universal(tmp_path / "u", overwrite=True)
        assert set(lost) == told and all("ZeRO-3" in why for why in lost.values())


def test_a_head_that_megatron_does_not_have_is_named(tmp_path: Path) -> None:
    names = ["embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "score.weight"]
    torch.save({name: torch.ones(4, 4) for name in names}, tmp_path / "m.pt")
    with pytest.raises(DataError) as raised:
        lazyckpt.open(tmp_path / "m.pt").to_megatron(tmp_path / "out")
    assert "score.weight" in str(raised.value) and "rename('megatron')" not in str(raised.value)
