"""Pickles that would exhaust memory or call what a program has registered: each is refused, or a line in problems."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

import lazyckpt

from .handmade import call, dict_of, laughs, named, number, program, put, tensor, text, tuple_of, write_pickle

SILENT = {
    "bytearray of a huge claim": b"\x96" + struct.pack("<Q", 1 << 40) + b"abc",
    "bytes of a huge claim": b"\x8e" + struct.pack("<Q", 1 << 40) + b"abc",
    "bytearray(n)": call(named("builtins", "bytearray"), number(1 << 40)),
    "bytes(n)": call(named("builtins", "bytes"), number(1 << 40)),
    "memo entry (LONG_BINPUT)": b"K\x01" + put(0xFFFFFFF0),
    "memo entry (PUT)": b"K\x01p99999999999999999999\n",
    "memo entries": b"K\x01" + b"".join(put(n * 50_000_000) for n in range(1, 80)),
    "billion laughs": laughs(9, 10),
    "billion laughs of tuples": laughs(9, 10, "tuple"),
    "extension code (EXT1)": b"\x82\x07",
    "extension code (EXT2)": b"\x83\x07\x01",
    "extension code (EXT4)": b"\x84\x07\x01\0\0",
    "call of an extension code": b"\x82\x07)R",
    "persistent id (PERSID)": b"Pmodel.42\n",
    "persistent id, a text": text("model.42") + b"Q",
    "persistent id, a number": number(3) + b"Q",
    "persistent id, a tuple": tuple_of(text("pickle"), text("x")) + b"Q",
    "persistent id, half a storage": tuple_of(text("storage"), text("x")) + b"Q",
}


@pytest.mark.parametrize("name", SILENT)
def test_nothing_hostile_opens_without_a_word(name: str, tmp_path: Path) -> None:
    body = dict_of(text("w"), tensor(), text("x"), SILENT[name])
    path = write_pickle(tmp_path / "model.pt", program(body, 5))
    try:
        with lazyckpt.open(path, cache=False) as view:
            problems = [p for p in view.problems if p.code == "unsafe-pickle"]
    except lazyckpt.errors.CorruptError as e:
        assert "model.pt" in str(e)
        return
    assert problems and problems[0].path == "model.pt"
    assert {"unsafe-pickle"} <= {finding.code for finding in lazyckpt.verify(path).findings}
