"""Pickles of numpy arrays: what was pickled is read, large arrays by ranges; nothing is run."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import lazyckpt
from lazyckpt import CorruptError, FormatError, testing

from .writers import bit_equal

KINDS = ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16", ">i4", ">f8", ">c8")
protocols = pytest.mark.parametrize("protocol", [2, 3, 4, 5])


def arrays() -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    held = {f"kind.{kind}": (rng.standard_normal((3, 5)) * 50).astype(kind) for kind in KINDS}
    big = rng.standard_normal((40, 60)).astype("f4")
    held |= {
        "big": big,
        "fortran": np.asfortranarray(big),
        "swapped": big.astype(">f4"),
        "huge": rng.random((30, 20)),
    }
    held |= {"mixed": rng.random((20, 30, 4)).transpose(1, 0, 2), "step": big[::2, ::3], "scalar": np.array(2.5)}
    return held | {"empty": np.zeros((0, 3), "i4"), "row": rng.integers(0, 9, 700)}


def tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    native = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("=")).reshape(array.shape)
    return torch.from_numpy(native.copy())


def pickled(path: Path, tree: Any, protocol: int) -> Path:
    path.write_bytes(pickle.dumps(tree, protocol))
    return path


@protocols
def test_arrays(protocol: int, tmp_path: Path) -> None:
    held = arrays()
    tree = {"params": held, "list": [held["big"] * 2, 3], "step": 7, "blob": b"x" * 9000}
    view = lazyckpt.open(pickled(tmp_path / "m.pkl", tree, protocol))
    assert view.format == "pickle" and not view.problems
    wanted = {f"params.{name}": array for name, array in held.items()} | {"list.0": tree["list"][0]}
    assert set(view) == set(wanted)
    for name, array in wanted.items():
        assert bit_equal(view[name][...], tensor(array)), name
    assert view.meta["step"] == 7


@pytest.mark.parametrize("check", testing.CHECKS, ids=lambda check: check.__name__)
def test_contract(check: testing.Check, tmp_path: Path) -> None:
    held = {name: array for name, array in arrays().items() if not name.startswith("kind") or name.endswith(">f8")}
    path = pickled(tmp_path / "m.pkl", held | {"same": held["big"]}, 4)
    truth = {name: tensor(array) for name, array in held.items()}
    check(testing.Case(path, {"weights": truth | {"same": truth["big"]}}, {"tied": {"same": "big"}}))


@protocols
def test_dtypes_of_jax(protocol: int, tmp_path: Path) -> None:
    values = np.arange(2100.0).reshape(70, 30) / 9
    held = {name: values.astype(getattr(ml_dtypes, name)) for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2")}
    path = pickled(tmp_path / "m.pkl", held | {"codes": values.astype(ml_dtypes.int4), "w": values}, protocol)
    view = lazyckpt.open(path)
    for name, array in held.items():
        whole = torch.from_numpy(array.view(f"u{array.itemsize}").copy()).view(getattr(torch, name))
        assert bit_equal(view[name][...], whole), name
    assert "codes" not in view and "unsupported-tensor" in {p.code for p in view.problems}


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_elements_are_read_where_they_lie(protocol: int, tmp_path: Path) -> None:
    path = pickled(tmp_path / "m.pkl", {f"w{n}": np.full(1 << 18, n, "f4") for n in range(4)}, protocol)
    view, counts = testing.opened(path)
    assert counts.bytes < 64 << 10
    counts.clear()
    assert view["w3"][1000:1010].tolist() == [3.0] * 10
    assert counts.bytes < 8 << 10


def test_what_is_no_number_is_told(tmp_path: Path) -> None:
    tree = {
        "w": np.ones(3),
        "texts": np.array(["a", "bc"]),
        "times": np.array(["2026-01-01"], "datetime64[D]"),
        "records": np.zeros(3, [("x", "f4"), ("y", "i4")]),
        "objects": np.array([{"a": 1}, None], object),
        "large": np.array(["text"] * 5000),
    }
    view = lazyckpt.open(pickled(tmp_path / "m.pkl", tree, 4))
    assert list(view) == ["w"]
    told = " ".join(str(p) for p in view.problems if p.code == "unsupported-tensor")
    assert all(name in told for name in tree if name != "w")


def test_a_lone_array_and_names(tmp_path: Path) -> None:
    view = lazyckpt.open(pickled(tmp_path / "array.bin", np.arange(6).reshape(2, 3), 4))
    assert bit_equal(view[""][...], torch.arange(6).reshape(2, 3))


@pytest.mark.parametrize("tree", [{"a": 1}, [], {"objects": np.array([None, 1], object)}, {"t": torch.ones(3)}])
def test_pickles_without_arrays_are_refused(tree: Any, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="plain pickle"):
        lazyckpt.open(pickled(tmp_path / "m.pkl", tree, 4))


@pytest.mark.parametrize("raw", [bytes(900), b"." * 900])
def test_files_of_joblib_are_refused(raw: bytes, tmp_path: Path) -> None:
    """joblib.numpy_pickle.NumpyPickler: a record in place of an array, then its bytes, then the rest of the pickle."""
    data = pickle.dumps({"w": 0}, 3)
    record = b"cjoblib.numpy_pickle\nNumpyArrayWrapper\n)\x81}b"
    (tmp_path / "m.joblib").write_bytes(data[:-4] + record + raw + data[-2:])
    with pytest.raises(FormatError, match="joblib"):
        lazyckpt.open(tmp_path / "m.joblib")


def test_several_pickles(tmp_path: Path) -> None:
    path = tmp_path / "m.pkl"
    path.write_bytes(pickle.dumps({"w": np.ones(3)}, 4) + pickle.dumps({"v": np.ones(3)}, 4))
    view = lazyckpt.open(path)
    assert list(view) == ["w"] and [p.code for p in view.problems] == ["oversized-file"]


def test_scan_agrees(tmp_path: Path) -> None:
    class Bad:
        def __reduce__(self) -> Any:
            return exec, (f"open({str(tmp_path / 'ran')!r}, 'w')",)

    path = pickled(tmp_path / "m.pkl", {"w": np.ones(2000), "bad": Bad()}, 4)
    assert "unsafe-pickle" in {p.code for p in lazyckpt.open(path).problems}
    assert lazyckpt.scan(path).worst == "error" and not (tmp_path / "ran").exists()
    good = pickled(tmp_path / "good.pkl", arrays(), 5)
    assert lazyckpt.scan(good).ok and lazyckpt.verify(good, progress=False).ok


@protocols
def test_truncated_and_changed_pickles(protocol: int, tmp_path: Path) -> None:
    data = pickle.dumps({"a": np.arange(900.0), "b": np.arange(9)}, protocol)
    path = tmp_path / "m.pkl"
    for size in range(2, len(data), 397):
        path.write_bytes(data[:size])
        with pytest.raises((CorruptError, FormatError)):
            lazyckpt.open(path)


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04\x95\x05\0\0\0\0\0\0\0B\0\x20\0\0" + bytes(0x2000) + b".",  # a byte string that leaves its frame
        b"\x80\x04\x95\xff\0\0\0\0\0\0\0N.",  # a frame that is longer than the file
        b"\x80\x04\x95\x06\0\0\0\0\0\0\0\x95\x01\0\0\0\0\0\0\0N.",  # a frame in a frame
        b"\x80\x04\x95\x03\0\0\0\0\0\0\0N.N",  # the end within a frame
        b"\x80\x03\x8e" + b"\xff" * 8,
        b"\x80\x03c" + b"x" * 100,
        b"\x80\x03\xff.",
    ],
)
def test_what_cannot_be_right_is_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "m.pkl").write_bytes(data)
    with pytest.raises(CorruptError):
        lazyckpt.open(tmp_path / "m.pkl")


def test_shapes_that_contradict_the_bytes_are_refused(tmp_path: Path) -> None:
    data = pickle.dumps({"w": np.zeros((3, 700))}, 5)
    at = data.rindex(b"K\x03M\xbc\x02")
    (tmp_path / "m.pkl").write_bytes(data[: at + 1] + b"\x04" + data[at + 2 :])
    with pytest.raises(CorruptError, match="bytes"):
        lazyckpt.open(tmp_path / "m.pkl")


def test_persistent_ids_are_not_taken_for_byte_strings(tmp_path: Path) -> None:
    data = pickle.dumps({"w": np.zeros(1000), "n": 0}, 3)
    assert data.endswith(b"K\x00u.")
    (tmp_path / "m.pkl").write_bytes(data[:-2] + b"Qu.")
    with pytest.raises(FormatError, match="persistent"):
        lazyckpt.open(tmp_path / "m.pkl")
