"""Files of flax.serialization: recorded ones, and damaged and hostile ones made of bytes."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import msgpack  # a package of the tests' writers
import numpy as np
import pytest
import torch

import lazyckpt
from lazyckpt import CorruptError, LazyckptError, testing

from .fuzz.targets.sources import golden
from .lanes import rounds

FLAX = golden("flax", "files")
ODD = {"bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn}


def truth(group: str) -> dict[str, torch.Tensor]:
    found = {}
    with np.load(FLAX / "truth.npz") as held:
        for key in held.files:
            if key.startswith(group + "/"):
                name = key.removeprefix(group + "/")
                tensor = torch.from_numpy(held[key].copy())
                found[name] = tensor.view(ODD.get(name.rpartition(".")[2], tensor.dtype))
    return found


CASES = {
    "params": testing.Case(FLAX / "params.msgpack", {"weights": truth("params")}, {}),
    "pieces": testing.Case(FLAX / "pieces.msgpack", {"weights": truth("pieces")}, {}),
    "state": testing.Case(
        FLAX / "state.msgpack", {name: truth(f"state:{name}") for name in ("weights", "mu", "nu")}, {}
    ),
}


@pytest.mark.parametrize("check", testing.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", CASES)
def test_contract(name: str, check: testing.Check) -> None:
    check(CASES[name])


def test_objects() -> None:
    view = lazyckpt.open(FLAX / "params.msgpack")
    held = {"step": 7, "name": "x", "rate": 0.5, "none": None, "turn": 1 + 2j, "list": [1, 2]}
    assert {key: view.meta[key] for key in held} == held
    assert not view.problems


def test_a_training_state() -> None:
    view = lazyckpt.open(FLAX / "state.msgpack")
    assert view.meta["step"] == 2
    assert not view.problems
    assert view.stored["opt_state.0.count"][...] == 2
    assert set(view.states["mu"]) == set(view.states["nu"]) == set(view) == {
        "up.kernel", "up.bias", "Dense_0.kernel", "Dense_0.bias",
    }  # fmt: skip


def array(values: np.ndarray[Any, Any], kind: str | None = None, shape: Any = None) -> msgpack.ExtType:
    shape = values.shape if shape is None else shape
    return msgpack.ExtType(1, msgpack.packb((shape, kind or values.dtype.name, values.tobytes())))


def written(path: Path, tree: Any) -> Path:
    path.write_bytes(msgpack.packb(tree))
    return path


def test_no_elements_are_read_on_opening(tmp_path: Path) -> None:
    tree = {f"w{n}": array(np.full(1 << 18, n, "f4")) for n in range(4)}
    view, counts = testing.opened(written(tmp_path / "m.msgpack", tree))
    assert counts.bytes < 64 << 10
    counts.clear()
    assert view["w3"][17] == 3
    assert counts.bytes == 4


def test_states_that_could_be_of_two_parameters_stay_raw(tmp_path: Path) -> None:
    one = array(np.ones(3, "f4"))
    params = {"b": one, "a": {"b": one}}
    tree = {"params": params, "opt_state": {"0": {"mu": params}}, "step": 1}
    view = lazyckpt.open(written(tmp_path / "m.msgpack", tree))
    assert set(view) == {"b", "a.b"}
    assert [p.code for p in view.problems] == ["undecided-name"]
    assert "opt_state.0.mu.a.b" in view.stored


def test_two_states_of_one_name(tmp_path: Path) -> None:
    params = {"a": array(np.ones(3, "f4"))}
    tree = {"params": params, "opt_state": {"0": {"mu": params}, "1": {"mu": params}}, "step": 1}
    assert set(lazyckpt.open(written(tmp_path / "m.msgpack", tree)).states) == {"weights", "0.mu", "1.mu"}


def test_what_torch_lacks_is_told(tmp_path: Path) -> None:
    tree = {"ok": array(np.ones(2)), "i": array(np.zeros(2, "u1"), "int4"), "e": msgpack.ExtType(9, b"abc")}
    view = lazyckpt.open(written(tmp_path / "m.msgpack", tree))
    assert set(view) == {"ok"}
    assert {p.path for p in view.problems} == {"i", "e"}


F = np.ones(2, "f4")
CHUNKED = {"__msgpack_chunked_array__": True, "shape": {"0": 2}}
HOSTILE: dict[str, bytes] = {
    "elements beyond the file": msgpack.packb({"a": array(F)})[:-1],
    "bytes behind it": msgpack.packb({"a": array(F)}) + b"\0",
    "another size": msgpack.packb({"a": array(F, shape=(3,))}),
    "a negative size": msgpack.packb({"a": array(F, shape=(-2,))}),
    "a huge shape": msgpack.packb({"a": array(F, shape=(2**62, 2**62))}),
    "a shape that is none": msgpack.packb({"a": array(F, shape="x")}),
    "a map of four billion": b"\xdf\xff\xff\xff\xff\xa1a\x01",
    "a list of four billion": b"\x81\xa1a\xdd\xff\xff\xff\xff",
    "deep lists": b"\x81\xa1a" + b"\x91" * 50_000 + b"\x01",
    "a key twice": b"\x82\xa1a\x01\xa1a\x02",
    "a key that is a list": b"\x81\x91\x01\x02",
    "no text": b"\x81\xa1\xff\x01",
    "no object": b"\x81\xa1a\xc1",
    "an ext object beyond the file": b"\x81\xa1a\xc9" + struct.pack(">I", 1 << 31) + b"\x01",
    "pieces of another size": msgpack.packb({"a": CHUNKED | {"chunks": {"0": array(F), "1": array(F)}}}),
    "pieces of other dtypes": msgpack.packb(
        {"a": CHUNKED | {"shape": {"0": 4}, "chunks": {"0": array(F), "1": array(F.view("i4"))}}}
    ),
    "a piece too few": msgpack.packb({"a": CHUNKED | {"chunks": {"1": array(F)}}}),
    "no pieces": msgpack.packb({"a": CHUNKED}),
    "nothing": b"",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile(name: str, tmp_path: Path) -> None:
    (tmp_path / "m.msgpack").write_bytes(HOSTILE[name])
    with pytest.raises(CorruptError):
        lazyckpt.open(tmp_path / "m.msgpack")


def test_changed_bytes(tmp_path: Path) -> None:
    data = (FLAX / "state.msgpack").read_bytes()
    rng = np.random.default_rng(2)
    for n in range(rounds(80)):
        changed = bytearray(data)
        changed[int(rng.integers(400))] ^= 1 << int(rng.integers(8))
        (tmp_path / f"x{n}.msgpack").write_bytes(changed)
        try:
            view = lazyckpt.open(tmp_path / f"x{n}.msgpack")
            for name in view:
                view[name][...]
        except LazyckptError:
            pass
