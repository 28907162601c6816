"""Files of numpy: what numpy.save, savez and savez_compressed write, and what is refused or told."""

from __future__ import annotations

import io
import struct
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import lazyckpt
from lazyckpt import CorruptError, FormatError, LazyckptError, testing

from .lanes import rounds

DTYPES = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "c8", "c16", "?")


def arrays() -> dict[str, np.ndarray[Any, Any]]:
    """Arrays of every dtype, byte order, memory order and kind of shape."""
    rng = np.random.default_rng(0)
    found: dict[str, np.ndarray[Any, Any]] = {}
    for code in DTYPES:
        values = (rng.standard_normal((5, 6)) * 50).astype(code) if code != "?" else rng.random((5, 6)) < 0.5
        found[f"little.{code.strip('?') or 'bool'}"] = values
        found[f"big.{code.strip('?') or 'bool'}"] = values.astype(np.dtype(code).newbyteorder(">"))
    wide = rng.standard_normal((4, 3, 5)).astype("f4")
    return found | {
        "params/Dense_0/kernel": np.asfortranarray(wide),
        "fortran.big": np.asfortranarray(wide.astype(">f8")),
        "strided": wide[::2, :, ::-1],
        "empty": np.zeros((0, 3), "f4"),
        "scalar": np.array(7, "i8"),
        "many.dimensions": np.ones((1,) * 30, "i2"),
        "large": rng.standard_normal((70, 80)).astype("f4"),
    }


def tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(np.array(array, array.dtype.newbyteorder("="), order="C", copy=True))


@pytest.fixture(scope="module", params=["stored", "compressed", "npy", "npy.fortran"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> testing.Case:
    folder, found = tmp_path_factory.mktemp("numpy"), arrays()
    if request.param.startswith("npy"):
        array = found["fortran.big" if "fortran" in request.param else "large"]
        np.save(folder / "one.npy", array)
        return testing.Case(folder / "one.npy", {"weights": {"array": tensor(array)}}, {})
    save = np.savez if request.param == "stored" else np.savez_compressed
    save(folder / "model.npz", **found)  # type: ignore[arg-type]
    truth = {"weights": {name: tensor(a) for name, a in found.items()}}
    return testing.Case(folder / "model.npz", truth, {"compressed": save is np.savez_compressed})


@pytest.mark.parametrize("check", testing.CHECKS, ids=lambda check: check.__name__)
def test_contract(case: testing.Case, check: testing.Check) -> None:
    if case.info.get("compressed") and check.__name__ == "reads_what_it_returns":
        pytest.skip("a compressed array is read as a whole: see test_a_compressed_array_is_read_once")
    check(case)


def test_a_compressed_array_is_read_once(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "m.npz", a=np.arange(9000.0), b=np.arange(5000.0))
    view, counts = testing.opened(tmp_path / "m.npz")
    counts.clear()
    assert view["b"][7] == 7
    assert view["b"][8:10].tolist() == [8, 9]
    with zipfile.ZipFile(tmp_path / "m.npz") as archive:
        assert counts.bytes == archive.getinfo("b.npy").compress_size


def test_no_elements_are_read_on_opening(tmp_path: Path) -> None:
    np.savez(tmp_path / "model.npz", **{f"w{n}": np.zeros((500, 500), "f4") for n in range(5)})
    _, counts = testing.opened(tmp_path / "model.npz")
    assert counts.bytes < 16 << 10


def test_zip64_records(tmp_path: Path) -> None:
    """numpy writes every record with zip64 fields, others may write the directory with them, too."""
    array = np.arange(6.0)
    with zipfile.ZipFile(tmp_path / "model.npz", "w") as archive, archive.open("a.npy", "w", force_zip64=True) as f:
        np.lib.format.write_array(f, array)
    assert torch.equal(lazyckpt.open(tmp_path / "model.npz")["a"][...], torch.arange(6.0, dtype=torch.float64))


def test_what_is_not_a_tensor_is_told(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "model.npz",
        weight=np.ones(3, "f4"),
        objects=np.array([{"a": 1}], object),
        records=np.zeros(2, [("a", "f4"), ("b", "i4")]),
        text=np.array(["x"]),
        when=np.array(["2020-01-01"], "M8[D]"),
        wide=np.ones(2, np.longdouble),
    )
    view = lazyckpt.open(tmp_path / "model.npz")
    assert set(view) == {"weight"}
    assert [p.code for p in view.problems] == ["unsupported-tensor"] * 5
    told = " ".join(p.message for p in view.problems)
    assert all(name in told for name in ("objects", "records", "text", "when", "wide"))


def test_an_object_array_alone_is_refused_unread(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "executed",))

    np.save(tmp_path / "a.npy", np.array([Bomb()], object), allow_pickle=True)
    with pytest.raises(FormatError, match="pickle"):
        lazyckpt.open(tmp_path / "a.npy")
    assert not (tmp_path / "executed").exists()


def test_dtypes_of_ml_dtypes_are_raw_bytes_with_a_problem(tmp_path: Path) -> None:
    values = np.array([1.5, -2.0, 3.25])
    np.savez(
        tmp_path / "m.npz", b=values.astype(ml_dtypes.bfloat16), e=values.astype(ml_dtypes.float8_e4m3fn), ok=values
    )
    view = lazyckpt.open(tmp_path / "m.npz")
    assert view["b"].dtype == torch.uint16
    assert torch.equal(view["b"][...].view(torch.bfloat16), torch.tensor(values, dtype=torch.bfloat16))
    about = {p.path for p in view.problems if p.code == "unsupported-tensor"}
    raw = {name for name in ("b", "e") if view[name].dtype in (torch.uint8, torch.uint16)}
    assert about == raw


def test_several_arrays_in_one_npy(tmp_path: Path) -> None:
    with open(tmp_path / "two.npy", "wb") as f:
        np.save(f, np.ones(3))
        np.save(f, np.zeros(4))
    view = lazyckpt.open(tmp_path / "two.npy")
    assert torch.equal(view["array"][...], torch.ones(3, dtype=torch.float64))
    assert [p.code for p in view.problems] == ["oversized-file"]


def npy(header: bytes, data: bytes = b"", version: tuple[int, int] = (1, 0)) -> bytes:
    length = struct.pack("<H" if version == (1, 0) else "<I", len(header))
    return b"\x93NUMPY" + bytes(version) + length + header + data


GOOD = b"{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }\n"
HOSTILE = {
    "no header": b"\x93NUMPY",
    "a header beyond the file": b"\x93NUMPY\x01\x00\xff\xff{",
    "elements beyond the file": npy(GOOD, b"\0" * 7),
    "a larger shape than any file": npy(GOOD.replace(b"(2,)", b"(2**70,)").replace(b"2**70", b"9" * 40)),
    "negative sizes": npy(GOOD.replace(b"(2,)", b"(-2,)"), b"\0" * 8),
    "a call": npy(GOOD.replace(b"(2,)", b"exit(1)"), b"\0" * 8),
    "a comprehension": npy(GOOD.replace(b"(2,)", b"[x for x in ()]"), b"\0" * 8),
    "deep brackets": npy(b"(" * 9000 + b")" * 900),
    "deep signs": npy(b"-" * 9000 + b"1"),
    "unknown keys": npy(GOOD.replace(b"'shape'", b"'shop'"), b"\0" * 8),
    "booleans as sizes": npy(GOOD.replace(b"(2,)", b"(True,)"), b"\0" * 8),
    "a dtype that is none": npy(GOOD.replace(b"<f4", b"<q9"), b"\0" * 8),
    "a later version": npy(GOOD, b"\0" * 8, (9, 0)),
    "a long header": npy(b" " * 60000 + GOOD, b"\0" * 8, (2, 0)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers(name: str, tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_bytes(HOSTILE[name])
    with pytest.raises((CorruptError, FormatError)):
        lazyckpt.open(tmp_path / "a.npy")


def test_headers_of_python_2_and_of_version_3(tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_bytes(npy(GOOD.replace(b"(2,)", b"(2L,)"), struct.pack("<2f", 1, 2)))
    (tmp_path / "b.npy").write_bytes(npy(GOOD, struct.pack("<2f", 1, 2), (3, 0)))
    for name in "ab":
        assert lazyckpt.open(tmp_path / f"{name}.npy")["array"][...].tolist() == [1, 2]


def test_a_damaged_record_does_not_hide_the_others(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "m.npz", "w") as archive:
        archive.writestr("good.npy", npy(GOOD, struct.pack("<2f", 1, 2)))
        archive.writestr("short.npy", npy(GOOD, b"\0" * 5))
        archive.writestr("notes.txt", "text")
    view = lazyckpt.open(tmp_path / "m.npz")
    assert view["good"][...].tolist() == [1, 2]
    assert set(view.unreadable) == {"short"}
    assert {p.code for p in view.problems} == {"unreadable-file", "unsupported-tensor"}


def test_two_records_of_one_name(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "m.npz", "w") as archive:
        archive.writestr("a.npy", npy(GOOD, b"\0" * 8))
        archive.writestr("a", npy(GOOD, b"\1" * 8))
    with pytest.raises(CorruptError):
        lazyckpt.open(tmp_path / "m.npz")


def test_a_changed_compressed_array_is_noticed(tmp_path: Path) -> None:
    """deflate has no checksum of its own: the one of the zip is compared."""
    path = tmp_path / "m.npz"
    held = io.BytesIO()
    np.lib.format.write_array(held, np.arange(64, dtype="u1"))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=0) as archive:
        archive.writestr("a.npy", held.getvalue())
    data = bytearray(path.read_bytes())
    at = data.index(bytes(range(40, 60)))
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptError, match="checksum"):
        lazyckpt.open(path)["a"][...]


def test_flipped_bytes(tmp_path: Path) -> None:
    """Whatever byte is changed, the arrays are read, or an error says why not."""
    np.savez_compressed(tmp_path / "m.npz", a=np.arange(20, dtype="f4"), b=np.ones((3, 4)))
    data = (tmp_path / "m.npz").read_bytes()
    rng = np.random.default_rng(1)
    for n in range(rounds(60)):
        changed = bytearray(data)
        changed[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
        (tmp_path / f"x{n}.npz").write_bytes(changed)
        try:
            view = lazyckpt.open(tmp_path / f"x{n}.npz")
            for name in view:
                view[name][...]
        except LazyckptError:
            pass
