"""Every export, read by its format's own reader, has every tensor that the view has: names, shapes, dtypes and bits.

What a format cannot hold raises or is listed as left out; nothing vanishes. The readers are safetensors', torch.load,
torch.distributed.checkpoint, zarr-python and tensorstore; none of lazyckpt's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lazyckpt
from lazyckpt.errors import DataError, DestinationError
from lazyckpt.testing.contract import open_case
from lazyckpt.testing.oracle import as_ints

from .conftest import HUGGINGFACE, MEGATRON_KINDS, TORCH, ZERO_KINDS
from .lanes import sampled
from .writers import Case, orbax_files, rank_files, torch_dcp, trainers

zarr = pytest.importorskip("zarr")
pytest.importorskip("lazyckpt.interop.zarr_dtypes")  # bfloat16 and float8 for zarr-python
safetensors = pytest.importorskip("safetensors")
Bits = tuple[tuple[int, ...], str, bytes]  # shape, dtype, elements in C order
_WHOLE = ("weights", "fp32")


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
            assert name not in found, "it is in one shard"
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
    paths: Any = metadata.planner_data  # key -> where it stood in the state dict

    def below(*top: str) -> dict[str, Bits]:
        return {paths[key][-1]: bits(t) for key, t in state.items() if paths[key][:-1] == top}

    agree(below("model"), of_state(view, view.state), "dcp")
    for name in view.states:
        if name not in _WHOLE:
            keys = [key for key, path in paths.items() if path[:2] == ("optim", "state") and path[3] == name]
            agree({paths[key][2]: bits(state[key]) for key in keys}, of_state(view, name), name)
        elif name != view.state:
            owned = {n: b for n, b in of_state(view, name).items() if n not in view.aliases}
            agree(below(name), owned, name)


def check_universal(view: Any, dest: Path) -> None:
    lost = view.to_universal(dest)
    masters = of_state(view, "fp32") if "fp32" in view.states else {}
    masters = {name: bits(t[...]) for name, t in view.items()} | masters
    owned = {name: b for name, b in masters.items() if name not in view.aliases}
    found: dict[str, dict[str, Any]] = {}
    for path in dest.glob("zero/*/*.pt"):
        loaded = torch.load(path, weights_only=False)
        found.setdefault(path.parent.name, {})[path.stem] = loaded["param"] if path.stem != "step" else loaded
    agree({name: bits(files["fp32"]) for name, files in found.items()}, {n: _wide(b) for n, b in owned.items()}, "fp32")
    written = {(name, state) for name, files in found.items() for state in files} - {(name, "fp32") for name in owned}
    for state in view.states:
        for name, wanted in of_state(view, state).items() if state not in _WHOLE else ():
            if (name, state) in written:
                written.remove((name, state))
                value = found[name][state]
                assert bits(value) == wanted if isinstance(value, torch.Tensor) else state == "step", (name, state)
            elif state != "step":  # which stands there for parameters
                fits = name in owned and np.prod(owned[name][0]) == np.prod(wanted[0])
                assert f"{state}.{name}" in lost and not fits, (name, state)
    for name, state in written:  # of parameters that never had a gradient, or from options
        assert state == "step" or not found[name][state].any(), (name, state)
    saved = torch.load(dest / "mp_rank_00_model_states.pt", weights_only=False)["module"]
    if view.state == "weights":
        agree({name: bits(t) for name, t in saved.items()}, of_state(view, "weights"), "module")
    else:
        assert set(saved) == set(view)


def _wide(b: Bits) -> Bits:
    """As float32, where it is a float. torch keeps the bits of some NaN of float16: here all are torch.nan."""
    dtype = getattr(torch, b[1])
    if not dtype.is_floating_point:
        return b
    raw = torch.frombuffer(bytearray(b[2]), dtype=torch.uint8) if b[2] else torch.empty(0, dtype=torch.uint8)
    wide = raw.view(dtype).view(b[0]).float()
    if dtype == torch.float16:
        wide[wide.isnan()] = torch.nan
    return bits(wide)


def _of_hierarchy(root: Any, nodes: Iterable[tuple[str, Any]]) -> dict[str, dict[str, Bits]]:
    about = root.attrs["lazyckpt"]
    found: dict[str, dict[str, Bits]] = {state: {} for state in about["states"]}
    for path, node in nodes:
        if isinstance(node, zarr.Array):
            name = node.attrs["lazyckpt"]["name"]
            data = np.ascontiguousarray(np.asarray(node[...])).tobytes()
            state = path.split("/")[0]
            assert name not in found[state]
            found[state][name] = tuple(node.shape), str(node.dtype), data
    for state in set(_WHOLE) & set(found):
        tied = {alias: owner for alias, owner in about["aliases"].items() if owner in found[state]}
        found[state] |= {alias: found[state][owner] for alias, owner in tied.items()}
    return found


def check_zarr(view: Any, dest: Path) -> None:
    view.to_zarr(dest, chunk="8KB")
    root = zarr.open_group(dest, mode="r")
    found = _of_hierarchy(root, root.members(max_depth=None))
    assert set(found) == set(view.states)
    for state in view.states:
        agree(found[state], of_state(view, state), state)


def check_tensorstore(view: Any, dest: Path) -> None:
    ts = pytest.importorskip("tensorstore")
    view.to_zarr(dest, codec="zstd", states=[view.state])
    found = {}
    for path in dest.rglob("zarr.json"):
        document = json.loads(path.read_text())
        if document["node_type"] == "array":
            spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path.parent}/"}}
            array = ts.open(spec, read=True, open=True).result().read().result()
            name = document["attributes"]["lazyckpt"]["name"]
            assert name not in found
            found[name] = tuple(array.shape), str(array.dtype), np.ascontiguousarray(array).tobytes()
    wanted = {name: b for name, b in of_state(view, view.state).items() if name not in view.aliases}
    agree(found, wanted, "tensorstore")


# why a tensor cannot be described by references (docs/how-to/zarr.md): all that there is
_NO_REFERENCES = re.compile(
    r"zarr has no |its bytes are packed|its bytes in .* are not its values|it is \S+ in .* and read as "
    r"|it is the mean of several copies|its pieces lie so that "
)


def check_virtual(view: Any, dest: Path) -> None:
    import fsspec
    from zarr.storage import FsspecStore

    dest = dest.with_suffix(".json")
    left_out = view.to_virtual(dest).left_out
    fs = fsspec.filesystem("reference", fo=str(dest), remote_protocol="file", asynchronous=True)
    root = zarr.open_group(FsspecStore(fs, read_only=True, path=""), mode="r")
    # zarr lists nothing below the first groups there, but opens whatever it is asked for
    documents = fsspec.filesystem("reference", fo=str(dest), remote_protocol="file").find("")
    paths = [path.removesuffix("/zarr.json") for path in documents if path.endswith("/zarr.json")]
    found = _of_hierarchy(root, ((path, root[path]) for path in paths))
    assert root.attrs["lazyckpt"]["left_out"] == left_out
    assert set(found) == set(view.states)
    for state in view.states:
        wanted = of_state(view, state)
        lacking = set(wanted) - set(found[state]) - set(view.aliases)
        listed = [path for path in left_out if path.split("/")[0] == state]
        assert len(listed) == len(lacking), (state, lacking)
        agree(found[state], {name: b for name, b in wanted.items() if name in found[state]}, state)
        for name in lacking:
            path, of_its_name = next((p, p.split("/")[1:]) for p in listed if p.endswith(f"/{name.replace('.', '/')}"))
            assert of_its_name == name.split(".") and _NO_REFERENCES.match(left_out[path]), left_out[path]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama_single", "llama_sharded"])
def test_models_in_gguf(huggingface_cases: Mapping[str, Case], tmp_path: Path, name: str) -> None:
    """`to_gguf` writes models of a few families only, with names and an order of rows of their own."""
    gguf = pytest.importorskip("gguf")
    view = open_case(huggingface_cases[name])
    settings = view.meta["config"]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, settings["num_hidden_layers"])
    wanted: dict[str, Bits] = {}
    for key, tensor in view.items():
        if key in view.aliases:
            continue
        value = tensor[...].float()
        heads = {"q_proj": settings["num_attention_heads"], "k_proj": settings["num_key_value_heads"]}
        if count := heads.get(key.split(".")[-2]):
            value = value.view(count, 2, -1, value.shape[-1]).transpose(1, 2).reshape(value.shape)
        wanted[names.get_name(key, (".weight", ".bias"))] = bits(value)
    view.to_gguf(tmp_path / "m.gguf", dtype="f32")
    found = {t.name: bits(torch.from_numpy(t.data.copy())) for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    agree(found, wanted, "gguf")


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
FIXTURES = {
    "zero_cases": ZERO_KINDS,
    "huggingface_cases": HUGGINGFACE,
    "torch_cases": tuple(TORCH),
    "dcp_cases": tuple(name for name in torch_dcp.CASES if name != "unknown_codec"),
    "rank_cases": tuple(name for name in rank_files.CASES if name != "partial"),
    "megatron_cases": MEGATRON_KINDS,
    "program_cases": ("script", "export"),
    "orbax_cases": tuple(name for name in orbax_files.CASES if not name.startswith("dtypes")),
    "trainer_cases": tuple(name for name, spec in trainers.CASES.items() if "open_numbers" not in spec.info),
}
# what a format cannot hold of a fixture, and the word that names it
REFUSED = {
    ("torch_cases-flat", "safetensors"): "torch.complex128",
    ("torch_cases-flat", "universal"): "torch.float4_e2m1fn_x2",
    ("torch_cases-flat", "zarr"): "torch.float4_e2m1fn_x2",
    ("torch_cases-flat", "tensorstore"): "torch.float4_e2m1fn_x2",
    ("torch_cases-legacy", "safetensors"): "torch.complex128",
    ("torch_cases-big_endian", "safetensors"): "torch.complex128",
    ("dcp_cases-zstd", "safetensors"): "torch.complex128",
    ("dcp_cases-odd", "safetensors"): "torch.complex128",
    ("torch_cases-single", "universal"): "''",  # the name of a tensor that is the whole file
}


# Every fixture in every format. The default lane has each format of each family, and each fixture in some format.
PAIRS = [(f"{family}-{name}", to) for family, names in FIXTURES.items() for name, to in product(names, CHECKS)]
SOME = {
    (f"{family}-{names[n % len(names)]}", list(CHECKS)[n % len(CHECKS)])
    for family, names in FIXTURES.items()
    for n in range(max(len(names), len(CHECKS)))
}
EACH = sampled(PAIRS, SOME | REFUSED.keys())


@pytest.fixture
def fixture(request: pytest.FixtureRequest) -> tuple[str, Case]:
    family, _, name = request.param.partition("-")
    found: Case = request.getfixturevalue(family)[name]
    return request.param, found


@pytest.mark.slow
@pytest.mark.parametrize(("fixture", "to"), EACH, indirect=["fixture"])
def test_fixtures(fixture: tuple[str, Case], tmp_path: Path, to: str) -> None:
    """What a format refuses, it refuses before anything is there."""
    name, case = fixture
    view = open_case(case)
    if (name, to) not in REFUSED:
        CHECKS[to](view, tmp_path / "out")
        return
    with pytest.raises(DataError, match=re.escape(REFUSED[name, to])):
        CHECKS[to](view, tmp_path / "out")
    assert not any(tmp_path.iterdir())


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


# the dtypes that a format has no name for: all that there are
UNKNOWN = {
    "safetensors": ("of.complex32", "of.complex128", "of.float4_e2m1fn_x2"),
    "universal": ("of.float4_e2m1fn_x2",),  # which torch does not convert to float32
    "zarr": ("of.complex32", "of.float4_e2m1fn_x2"),
    "tensorstore": ("of.complex32", "of.float4_e2m1fn_x2"),
}


@pytest.mark.parametrize("dtype", _zoo())
@every
def test_dtypes(tmp_path: Path, to: str, dtype: str) -> None:
    tensor = _zoo()[dtype]
    state = {"w": tensor, "scalar": tensor[0, 0].clone(), "none": tensor[:0].clone(), "wide": tensor[:, :0].clone()}
    torch.save(state, tmp_path / "m.pt")
    view = lazyckpt.open(tmp_path / "m.pt")
    assert set(view) == set(state) and all(view[n].dtype == tensor.dtype for n in state)
    if dtype not in UNKNOWN.get(to, ()):
        CHECKS[to](view, tmp_path / "out")
        if to == "virtual":
            left_out = view.to_virtual(tmp_path / "again.json").left_out
            assert len(left_out) == (len(state) if dtype in UNKNOWN["zarr"] else 0)
        return
    with pytest.raises(DataError, match=dtype.removeprefix("of.")):
        CHECKS[to](view, tmp_path / "out")
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


@pytest.mark.parametrize("name", [*ODD, ""])
def test_odd_names_of_parameters_in_universal_checkpoints(tmp_path: Path, name: str) -> None:
    from lazyckpt.distributed import save_state_dict

    state = {name: torch.ones(2, 3), "other": torch.zeros(2)}
    save_state_dict(state, tmp_path / "m.pt", safe_serialization=False)
    view = lazyckpt.open(tmp_path / "m.pt")
    assert set(view) == set(state)
    if name not in ("", ".", "..") and "/" not in name:
        check_universal(view, tmp_path / "out")
        return
    with pytest.raises(DataError, match=re.escape(repr(name))):
        check_universal(view, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("length", [200, 255, 256, 300, 1000, 5000])
@pytest.mark.parametrize("to", ["zarr", "safetensors", "torch", "dcp", "universal"])
def test_long_names(tmp_path: Path, to: str, length: int) -> None:
    """Names of files end at 255 bytes: the name itself is not cut."""
    names = ["n" * length, "n" * (length - 1) + "m", "層" * (length // 3), "deep." + "x" * length + ".w"]
    torch.save({name: torch.full((3,), float(n)) for n, name in enumerate(names)}, tmp_path / "m.pt")
    view = lazyckpt.open(tmp_path / "m.pt")
    if to == "universal" and any(len(name.encode()) > 255 for name in names):  # which are names of folders there
        with pytest.raises(DataError) as raised:
            CHECKS[to](view, tmp_path / "out")
        assert len(str(raised.value)) < 600 and not (tmp_path / "out").exists()
        return
    CHECKS[to](view, tmp_path / "out")
    again = lazyckpt.open(tmp_path / "out")
    agree(of_state(again, again.state), of_state(view, view.state), "read again")


@pytest.mark.parametrize("to", ["zarr", "universal"])
def test_names_that_collide_on_a_file_system_that_ignores_case(
    tmp_path: Path, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On such a file system one tensor would silently replace the other."""
    torch.save({"Block.w": torch.ones(1), "block.w": torch.zeros(1), "other": torch.ones(2)}, tmp_path / "m.pt")
    view = lazyckpt.open(tmp_path / "m.pt")
    CHECKS[to](view, tmp_path / "here")
    monkeypatch.setattr("lazyckpt.jobs.places.ignores_case", lambda *_: True)
    with pytest.raises(DestinationError, match=r"Block.*block"):
        CHECKS[to](view, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    CHECKS[to](view.select("other"), tmp_path / "out")


def test_states_that_zero_3_does_not_load_are_reported(tmp_path: Path) -> None:
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
        assert set(lost.left_out) == told and all("ZeRO-3" in why for why in lost.values())


def test_tensors_unknown_to_megatron_are_named(tmp_path: Path) -> None:
    names = ["embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "score.weight"]
    torch.save({name: torch.ones(4, 4) for name in names}, tmp_path / "m.pt")
    with pytest.raises(DataError) as raised:
        lazyckpt.open(tmp_path / "m.pt").to_megatron(tmp_path / "out")
    assert "score.weight" in str(raised.value) and "rename('megatron')" not in str(raised.value)
