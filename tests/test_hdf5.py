"""HDF5 files that h5py and Keras wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lazyckpt
from lazyckpt import CorruptError, FormatError, LazyckptError, testing

from .fuzz.targets.sources import golden
from .lanes import rounds

h5py = pytest.importorskip("h5py")
KERAS = golden("keras", "files")


def tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(np.array(array, array.dtype.newbyteorder("="), order="C", copy=True))


def values(code: str, shape: tuple[int, ...] = (7, 9)) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(len(code))
    return rng.random(shape) < 0.5 if code == "?" else (rng.standard_normal(shape) * 50).astype(code)


CODES = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "c8", "c16", "?", ">f4", ">i8", ">c8")


@pytest.fixture(scope="module")
def contiguous(tmp_path_factory: pytest.TempPathFactory) -> testing.Case:
    path, truth = tmp_path_factory.mktemp("h5") / "m.h5", {}
    with h5py.File(path, "w") as f:
        for code in CODES:
            name = "bool" if code == "?" else code.replace(">", "big_")
            f[f"block/{name}/kernel"] = values(code)
            truth[f"block.{name}.kernel"] = tensor(values(code))
        f["scalar"] = np.float32(3)
        f["empty"] = np.zeros((0, 4), "i4")
    return testing.Case(path, {"weights": truth | {"scalar": torch.tensor(3.0), "empty": torch.zeros(0, 4).int()}}, {})


FILTERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gzip": {"compression": "gzip"},
    "lzf": {"compression": "lzf"},
    "shuffled": {"compression": "gzip", "shuffle": True},
    "shuffled_lzf": {"compression": "lzf", "shuffle": True},
    "checked": {"fletcher32": True},
    "all": {"compression": "gzip", "shuffle": True, "fletcher32": True},
}


@pytest.fixture(scope="module")
def chunked(tmp_path_factory: pytest.TempPathFactory) -> testing.Case:
    path, truth = tmp_path_factory.mktemp("h5") / "m.h5", {}
    with h5py.File(path, "w") as f:
        for name, options in FILTERS.items():
            for code in ("f4", ">f8", "i2"):
                key = f"{name}/{code.replace('>', 'big_')}"
                # repeated values, which lzf and deflate pack by references of any distance
                array = np.tile(values(code, (5, 10)), (4, 3))
                f.create_dataset(key, data=array, chunks=(6, 8), **options)
                truth[key.replace("/", ".")] = tensor(array)
        part = f.create_dataset("partly", (20, 12), "f4", chunks=(8, 5), fillvalue=2.5, compression="gzip")
        part[9:12, 3:4] = 7
        truth["partly"] = torch.full((20, 12), 2.5)
        truth["partly"][9:12, 3:4] = 7
        f.create_dataset("unwritten", (3, 2), ">i4", fillvalue=9)
        truth["unwritten"] = torch.full((3, 2), 9, dtype=torch.int32)
        f.create_dataset("one", data=np.arange(5.0), chunks=(5,))
        truth["one"] = torch.arange(5.0, dtype=torch.float64)
    return testing.Case(path, {"weights": truth}, {})


@pytest.mark.parametrize("check", testing.CHECKS, ids=lambda check: check.__name__)
def test_contract(contiguous: testing.Case, check: testing.Check) -> None:
    check(contiguous)


@pytest.mark.parametrize("check", testing.CHECKS, ids=lambda check: check.__name__)
def test_contract_of_chunks(chunked: testing.Case, check: testing.Check) -> None:
    if check.__name__ != "reads_what_it_returns":  # a compressed chunk is read as a whole
        check(chunked)


def test_a_slice_reads_its_chunks(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "m.h5", "w") as f:
        f.create_dataset("a", data=values("f4", (64, 64)), chunks=(16, 16), compression="gzip")
        sizes = [f["a"].id.get_chunk_info(n).size for n in range(16)]
    view, counts = testing.opened(tmp_path / "m.h5")
    counts.clear()
    assert torch.equal(view["a"][0:3, 20:40], tensor(values("f4", (64, 64)))[0:3, 20:40])
    assert counts.bytes == sizes[1] + sizes[2]


def test_opening_reads_no_elements(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "m.h5", "w") as f:
        f["a"] = np.zeros(4 << 20, "f4")
    _, counts = testing.opened(tmp_path / "m.h5")
    assert counts.bytes < 32 << 10


def test_a_file_of_keras_2() -> None:
    view = lazyckpt.open(KERAS / "old.h5")
    assert view.format == "keras" and view.problems == ()
    with np.load(KERAS / "truth.npz") as truth:
        held = {tuple(key.split("/")[1:]): truth[key] for key in truth.files if key.startswith("old/")}
    assert {(state, name) for state, names in view.states.items() for name in names} == set(held)
    for (state, name), array in held.items():
        assert testing.bit_equal(view.states[state][name][...], tensor(array)), (state, name)
    assert "optimizer_weights.adam.iteration" in view.stored and "model_config" in view.meta["attributes"][""]


@pytest.mark.parametrize("style", ["training/Adam/{}/{}:0", "Adam/{1}/{0}:0"])
def test_optimizers_of_keras_2(tmp_path: Path, style: str) -> None:
    """As keras/saving/hdf5_format.py of Keras 2 names variables: `save_optimizer_weights_to_hdf5_group`."""
    shapes = {"up/kernel": (3, 4), "up/bias": (4,), "m/up/kernel": (2, 2)}
    with h5py.File(tmp_path / "m.h5", "w") as f:
        f.attrs["keras_version"] = "2.10.0"
        for n, (name, shape) in enumerate(shapes.items()):
            f[f"model_weights/layer_{n}/{name}:0"] = np.full(shape, n, "f4")
            for slot in ("m", "v") if n < 2 else ():
                f[f"optimizer_weights/{style.format(name, slot)}"] = np.full(shape, 10 * n + ord(slot), "f4")
        f["optimizer_weights/Adam/iter:0"] = np.int64(7)
        f["optimizer_weights/Adam/else/m:0"] = np.zeros(3, "f4")
    view = lazyckpt.open(tmp_path / "m.h5")
    assert set(view) == {name.replace("/", ".") for name in shapes}
    assert [p.code for p in view.problems] == ["undecided-name"] and "else" in view.problems[0]
    for n, name in enumerate(("up.kernel", "up.bias")):
        for slot in ("m", "v") if name == "up.bias" or "{1}" not in style else ("v",):
            assert (view.states[slot][name][...] == 10 * n + ord(slot)).all(), (slot, name)


@pytest.mark.parametrize("name", ["model.keras", "model.weights.h5", "half.weights.h5"])
def test_keras(name: str) -> None:
    view = lazyckpt.open(KERAS / name)
    with np.load(KERAS / "truth.npz") as truth:
        group = f"{name.partition('.')[0]}/"
        held = {key.removeprefix(group): truth[key] for key in truth.files if key.startswith(group)}
    assert view.format == "keras"
    assert set(view) == {key for key in held if not key.startswith("optimizer.")}
    assert set(view.stored) == set(held)
    for key, array in held.items():
        want = tensor(array).view(torch.bfloat16) if name.startswith("half") else tensor(array)
        assert testing.bit_equal(view.stored[key][...], want), key
    assert [p.code for p in view.problems] == ([] if name.startswith("half") else ["undecided-name"])
    if name == "model.keras":
        assert view.meta["config"]["class_name"] == "Sequential"
        assert view.meta["metadata"]["keras_version"] == "3.15.1"


def test_nothing_outside_the_file_is_opened(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "secret.h5", "w") as f:
        f["a"] = np.ones(3)
    (tmp_path / "raw").write_bytes(b"\1" * 24)
    with h5py.File(tmp_path / "m.h5", "w") as f:
        f["own"] = np.zeros(2, "f4")
        f["linked"] = h5py.ExternalLink("secret.h5", "/a")
        f["soft"] = h5py.SoftLink("/own")
        f["dangling"] = h5py.SoftLink("/nothing")
        f.create_dataset("raw", (3,), "f8", external=[(str(tmp_path / "raw"), 0, 24)])
        layout = h5py.VirtualLayout((3,), "f8")
        layout[:] = h5py.VirtualSource(str(tmp_path / "secret.h5"), "a", (3,))
        f.create_virtual_dataset("virtual", layout)
    view = lazyckpt.open(tmp_path / "m.h5")
    assert set(view) == set(view.stored) == {"own"}
    told = " ".join(p.message for p in view.problems if p.code == "unsupported-tensor")
    assert all(name in told for name in ("linked", "soft", "dangling", "raw", "virtual"))


def test_what_is_not_a_tensor_is_told(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "m.h5", "w") as f:
        f["ok"] = np.zeros(2, "f4")
        f["ok"].attrs["units"] = "m"
        f["text"] = ["a", "b"]
        f["records"] = np.zeros(2, [("a", "f4"), ("b", "i4")])
        f["null"] = h5py.Empty("f4")
        f.create_dataset("scaled", data=np.arange(9), chunks=(9,), scaleoffset=0)
        f["twice"] = f["ok"]
        f["group/again"] = f["/"]
    view = lazyckpt.open(tmp_path / "m.h5")
    assert set(view.stored) == {"ok"}
    assert dict(view.aliases) == {"twice": "ok"}
    told = " ".join(p.message for p in view.problems)
    assert all(name in told for name in ("text", "records", "null", "scaled", "again"))
    assert view.meta["attributes"]["ok"] == {"units": "m"}


def test_attributes_of_any_kind(tmp_path: Path) -> None:
    held: dict[str, Any] = {
        "int": 3,
        "huge": np.uint64(1 << 63),
        "float": 1.5,
        "nan": np.nan,
        "flag": True,
        "text": "ë\n",
    }
    held |= {"list": np.arange(4), "bytes": np.array([b"x", b"yy"]), "half": np.float16(0.5)}
    with h5py.File(tmp_path / "m.h5", "w") as f:
        f["a"] = np.zeros(2)
        f["a"].attrs.update(held)
    with h5py.File(tmp_path / "m.h5") as f:  # h5py's own values
        want = {key: value.tolist() if hasattr(value, "tolist") else value for key, value in f["a"].attrs.items()}
    found = lazyckpt.open(tmp_path / "m.h5").meta["attributes"]["a"]
    assert repr(sorted(found.items())) == repr(sorted(want.items()))


def test_a_changed_chunk_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "m.h5"
    with h5py.File(path, "w") as f:
        f.create_dataset("a", data=np.arange(64, dtype="u1"), chunks=(64,), fletcher32=True)
    data = bytearray(path.read_bytes())
    data[data.index(bytes(range(64))) + 5] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptError):
        lazyckpt.open(path)["a"][...]


def test_a_file_behind_a_user_block_is_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "m.h5", "w", userblock_size=512) as f:
        f["a"] = np.arange(3.0)
    with pytest.raises(FormatError):
        lazyckpt.open(tmp_path / "m.h5")


def test_damage(tmp_path: Path) -> None:
    """Truncated files and changed bytes of the metadata: an error, or the values."""
    path = tmp_path / "m.h5"
    with h5py.File(path, "w") as f:
        f["a/b"] = np.arange(12.0)
        f.create_dataset("c", data=np.arange(100), chunks=(30,), compression="lzf", shuffle=True)
    data = path.read_bytes()
    rng = np.random.default_rng(3)
    for n in range(rounds(80)):
        changed = bytearray(data)
        if n % 4 == 0:
            del changed[int(rng.integers(len(data))) :]
        else:
            changed[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
        (tmp_path / f"x{n}.h5").write_bytes(changed)
        try:
            view = lazyckpt.open(tmp_path / f"x{n}.h5")
            for name in view:
                view[name][...]
        except LazyckptError:
            pass
