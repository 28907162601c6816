"""Where Python's own unpicklers differ on a pickle, it is refused; else it is read as they read it."""

from __future__ import annotations

import io
import pickle
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import lazyckpt
from lazyckpt.errors import CorruptError
from lazyckpt.io.containers.pickle.machine import Pickle

from .handmade import dict_of, legacy, list_of, program, tensor, text, torch_zip
from .lanes import rounds


def frame(length: int) -> bytes:
    return b"\x95" + struct.pack("<Q", length)


def _finding(base: Any) -> Any:
    class Finding(base):  # type: ignore[misc]
        def find_class(self, module: str, name: str) -> Any:
            return module, name

    return Finding


class Stream:
    """A file that cannot look ahead, as records of archives are."""

    def __init__(self, data: bytes) -> None:
        file = io.BytesIO(data)
        self.read, self.readline, self.readinto = file.read, file.readline, file.readinto


def readings(data: bytes) -> list[Any]:
    """What the unpicklers of Python make of it, the one in C and the one in Python, on every kind of file."""
    in_c, in_python = _finding(pickle.Unpickler), _finding(pickle._Unpickler)  # type: ignore[attr-defined]
    ways: list[Callable[[], Any]] = [
        lambda: in_c(io.BytesIO(data)).load(),
        lambda: in_c(io.BufferedReader(io.BytesIO(data))).load(),  # type: ignore[arg-type]
        lambda: in_c(Stream(data)).load(),
        lambda: in_python(io.BytesIO(data)).load(),
    ]
    found = []
    for way in ways:
        try:
            found.append(repr(way()))
        except Exception:
            found.append("an error")
    return found


def ours(data: bytes) -> str:
    """Ours, in their words."""
    try:
        value = Pickle(data, "here", {}, lambda pid: pid).value
    except CorruptError:
        return "an error"
    return (
        repr((value.module, value.name))
        if isinstance(value, lazyckpt.io.containers.pickle.records.Opaque)
        else repr(value)
    )


CUT = {
    "a global's name": frame(6) + b"cos\nsys" + b"tem\n.",
    "a line of text": frame(3) + b"I12" + b"34\n.",
    "text": frame(4) + b"\x8c\x03abc.",
    "a number": frame(3) + b"J\1\0" + b"\0\0.",
    "a long frame's opcode": frame(30) + frame(2) + b"N0" + b"N.",
    "a frame within a frame": frame(14) + b"K\x01" + frame(2) + b"0N" + b".",
    "a frame that goes on behind the end": frame(10) + b"K\x01.1234567",
    "a frame longer than the file": frame(10) + b"K\x01.",
}


@pytest.mark.parametrize("name", CUT)
def test_opcode_cut_by_a_frame_is_refused(name: str, tmp_path: Path) -> None:
    data = b"\x80\x04" + CUT[name]
    assert ours(data) == "an error"
    path = tmp_path / "model.pt"
    path.write_bytes(torch_zip(data))
    with pytest.raises(CorruptError, match=r"model\.pt"):
        lazyckpt.open(path)


def test_the_frames_of_picklers_are_read() -> None:
    value = {"text": ["x" * n for n in range(500)], "bytes": b"y" * 200_000, "more": list(range(70_000)), "last": (1,)}
    for protocol in (4, 5):
        for data in (pickle.dumps(value, protocol), pickle._dumps(value, protocol)):  # type: ignore[attr-defined]
            assert Pickle(data, "here", {}, lambda pid: pid).value == value


NUMBERS = [b"I010\n", b"I0x10\n", b"I1_0\n", b"I 1\n", b"L010L\n", b"L1_0L\n", b"F1_0\n", b"F 1\n", b"I1L\n", b"I-5\n",
           b"I01\n", b"I00\n", b"L12L\n", b"L-7L\n", b"F1.5\n", b"F-inf\n", b"Fnan\n", b"S'\\u006fs'\n", b"S'a\\x41'\n",
           b'S"b"\n', b"Vabc\\u0041\n", b"S'a\n", b"Np-1\n", b"Np 1\n"]  # fmt: skip


@pytest.mark.parametrize("line", NUMBERS)
def test_lines_of_protocol_0_are_read_as_python_reads_them_or_refused(line: bytes) -> None:
    found = ours(line + b".")
    assert found in ("an error", *readings(line + b".")[:1])
    assert found == "an error" or len(set(readings(line + b"."))) == 1


OPS = [b"K\x01", b"N", b"\x8c\x02ab", b"X\x02\0\0\0ab", b"I12\n", b"cos\nsystem\n", b"0", b"\x85", b"]", b"}", b"\x94",
       b"(", b"t", b"l", b"2", b"B\x01\0\0\0x", b"a", b"J\x01\x02\x03\x04", b"q\x01", b"h\x01"]  # fmt: skip


@example(2427065)  # something is appended to a function
@settings(max_examples=rounds(400), deadline=None)
@given(st.integers(0, 1 << 32))
def test_any_pickle_with_frames_is_read_as_all_unpicklers_read_it(seed: int) -> None:
    chance = random.Random(seed)
    data = b"\x80\x04"
    for _ in range(chance.randrange(1, 9)):
        if chance.random() < 0.4:
            data += frame(chance.randrange(14))
        data += chance.choice(OPS)
    data += b"N."
    found = ours(data)
    if found != "an error":
        assert set(readings(data)) == {found}


@pytest.mark.parametrize("behind", [b"x", b"N.", program(dict_of(text("w"), tensor())), b"\0" * 1000])
def test_bytes_behind_the_end_are_refused(behind: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(torch_zip(program(dict_of(text("w"), tensor())) + behind))
    with pytest.raises(CorruptError, match=r"model\.pt"):
        lazyckpt.open(path)


def test_legacy_files_have_data_after_each_pickle(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(legacy(program(dict_of(text("w"), tensor())), program(list_of(text("0")))))
    assert torch.equal(lazyckpt.open(path)["w"][...], torch.tensor([1.0, 2, 3, 4]))
