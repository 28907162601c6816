"""Small files that ask for much: memory, time, stack. Each is opened, printed and read in a process of its own, where
it must end soon, in an error that names the file or in a view that is harmless, without taking much memory."""

from __future__ import annotations

import json
import os
import pickle
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyckpt

from .bomb_range import SECONDS
from .handmade import (
    MEMO,
    call,
    dict_of,
    get,
    laughs,
    legacy,
    list_of,
    named,
    nested,
    number,
    program,
    put,
    raw_bytes,
    storage,
    tensor,
    text,
    torch_zip,
    tuple_of,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="limits and measures as Linux has them"),
]
Bomb = Callable[[], bytes]
ORDERED = named("collections", "OrderedDict")
RECORD = named("a", "Record")
DTYPE = named("numpy", "dtype")
U64 = struct.Struct("<Q").pack


def numpy_scalar(value: int) -> bytes:
    dtype = call(DTYPE, text("i8"), b"\x89", b"\x88")
    return call(named("numpy._core.multiarray", "scalar"), dtype, raw_bytes(struct.pack("<q", value)))


def numpy_array(shape: bytes, dtype: bytes, data: bytes) -> bytes:
    empty = call(
        named("numpy._core.multiarray", "_reconstruct"), named("numpy", "ndarray"), tuple_of(number(0)), b"C\x01b"
    )
    return empty + tuple_of(number(1), shape, dtype, b"\x89", data) + b"b"


def field_dtype(*fields: bytes) -> bytes:
    """A structured dtype whose fields are dtypes on the memo."""
    names = [chr(97 + n) for n in range(len(fields))]
    table = dict_of(*(part for n, f in zip(names, fields, strict=True) for part in (text(n), tuple_of(f, number(0)))))
    state = tuple_of(number(3), text("|"), b"N", tuple_of(*map(text, names)), table, number(8), number(1), number(0))
    return state + b"b"


def dtype_laughs(levels: int) -> bytes:
    void = call(DTYPE, text("V8"), b"\x89", b"\x88")
    out = call(DTYPE, text("i4"), b"\x89", b"\x88") + put(MEMO) + b"0"
    for n in range(levels):
        out += void + field_dtype(get(MEMO + n), get(MEMO + n)) + put(MEMO + n + 1) + b"0"
    return out + get(MEMO + levels)


def dtype_of_itself() -> bytes:
    return call(DTYPE, text("V8"), b"\x89", b"\x88") + put(7) + field_dtype(get(7))


def range_of(n: int) -> bytes:
    return call(named("builtins", "range"), number(n))


def shared(element: bytes, count: int, times: int) -> bytes:
    """A list of ``count`` elements, referred to ``times`` times."""
    return element + put(1) + b"0](" + get(1) * count + b"e" + put(2) + b"0" + list_of(get(2) * times)


def key_of(value: bytes) -> bytes:
    return b"}" + value + b"Ns"


CLAIMS: dict[str, bytes] = {
    "BINBYTES8": b"\x8e" + U64(1 << 62),
    "BYTEARRAY8": b"\x96" + U64(1 << 62),
    "BINUNICODE8": b"\x8d" + U64(1 << 62),
    "BINBYTES8, all bits": b"\x8e" + U64((1 << 64) - 1),
    "BINBYTES": b"B\xff\xff\xff\xff",
    "BINUNICODE": b"X\xff\xff\xff\xff",
    "BINSTRING": b"T\xff\xff\xff\x7f",
    "LONG4": b"\x8b\xff\xff\xff\x7f",
    "LONG4, negative": b"\x8b\xff\xff\xff\xff",
    "FRAME": b"\x95" + U64(1 << 62),
}
REFUSED: dict[str, Bomb] = {
    "laughs as a scheme": lambda: call(
        named("torch._utils", "_rebuild_qtensor"), storage(), number(0), tuple_of(number(4)), tuple_of(number(1)),
        tuple_of(laughs(20, 10))
    ),
    "dtype laughs": lambda: dtype_laughs(40),
    "a million marks": lambda: b"(" * 1_000_000 + b"t",
    "a million frames": lambda: b"".join(b"\x95" + U64(9 * (1_000_000 - n - 1)) for n in range(1_000_000)) + b"N",
    "nested frozensets": lambda: nested(1_000_000, "frozenset"),
    "nested rebuilds": lambda: named("torch._tensor", "_rebuild_from_type_v2") + put(1) + b"0" + get(1)
                               + (b"(" + get(1) + b"N") * 3000 + b")" + b"Nt" * 3000 + b"R",
    **{f"{name} claims": lambda claim=claim: claim + b"N" for name, claim in CLAIMS.items()},  # type: ignore[misc]
    **{f"nested {kind}": lambda kind=kind, levels=levels: nested(levels, kind)  # type: ignore[misc]
       for kind, levels in {"list": 1_000_000, "tuple": 1_000_000, "dict": 1_000_000, "dict value": 200_000,
                            "record": 200_000, "state": 200_000, "slice": 200_000, "deque": 200_000}.items()},
    **{f"nested {kind} as a key": lambda kind=kind: key_of(nested(100_000, kind))  # type: ignore[misc]
       for kind in ("tuple",)},
    "nested tuple in a set": lambda: b"\x8f(" + nested(1_000_000, "tuple") + b"\x90",
    "nested tuple in a frozenset": lambda: b"(" + nested(1_000_000, "tuple") + b"\x91",
    "nested tuple in set()": lambda: call(named("builtins", "set"), list_of(nested(100_000, "tuple"))),
    "nested tuple in pairs": lambda: call(ORDERED, list_of(list_of(nested(1_000_000, "tuple"), b"N"))),
    "nested tuple in tuple pairs": lambda: call(ORDERED, list_of(tuple_of(nested(1_000_000, "tuple"), b"N"))),
    "nested list in a persistent id": lambda: tuple_of(
        text("storage"), nested(100_000, "list"), b"N", b"N", b"N"
    ) + b"Q",
    "nested list as a storage key": lambda: dict_of(text("w"), tensor(storage(nested(100_000, "list")))),
    "nested list as a device": lambda: dict_of(text("w"), tensor(storage(location=nested(100_000, "list")))),
    **{f"laughs: {kind}": lambda kind=kind: laughs(30, 10, kind)  # type: ignore[misc]
       for kind in ("list", "tuple", "dict", "record", "deque")},
    "laughs as a key": lambda: key_of(laughs(15, 100, "tuple")),
    "thin laughs as a key": lambda: key_of(laughs(40, 2, "tuple")),
    "wide laughs as a key": lambda: key_of(laughs(3, 5000, "tuple")),
    "laughs in a set": lambda: b"\x8f(" + laughs(14, 30, "tuple") + b"\x90",
    "laughs in frozenset()": lambda: call(named("builtins", "frozenset"), list_of(laughs(14, 30, "tuple"))),
    "laughs in pairs": lambda: call(ORDERED, list_of(list_of(laughs(14, 30, "tuple"), b"N"))),
    "laughs in a Counter": lambda: call(
        named("collections", "Counter"), list_of(list_of(laughs(14, 30, "tuple"), b"N"))
    ),
    "laughs as a storage key": lambda: dict_of(text("w"), tensor(storage(laughs(20, 10)))),
    "laughs as sizes": lambda: dict_of(text("w"), tensor(size=laughs(20, 10))),
    "laughs as an offset": lambda: dict_of(text("w"), tensor(offset=laughs(20, 10))),
    "laughs as a layout": lambda: call(named("torch.serialization", "_get_layout"), laughs(20, 10)),
    "laughs in a slice": lambda: call(named("builtins", "slice"), laughs(20, 10)),
    "laughs as a dtype": lambda: call(
        named("torch._utils", "_rebuild_tensor_v3"), storage(), number(0), tuple_of(number(4)), tuple_of(number(1)),
        b"\x89", b"N", laughs(20, 10)
    ),
    "leaves, squared": lambda: shared(b"K\x01", 200_000, 100_000),
    "text, squared": lambda: shared(text("x" * 1000), 100_000, 100_000),
    "tensors, squared": lambda: shared(tensor(), 20_000, 20_000),
    "empty lists, squared": lambda: shared(b"]", 100_000, 100_000),
    "long names": lambda: tensor() + put(1) + b"0" + dict_of(text("k" * 1_000_000), b"](" + get(1) * 50_000 + b"e"),
    "names that grow": lambda: b"".join(b"}" + text("k" * 10_000) for _ in range(140)) + tensor() + put(1)
                               + b"0](" + get(1) * 10_000 + b"e" + b"s" * 140,
    "sizes of a range": lambda: dict_of(text("w"), tensor(size=range_of(10**12))),
    "strides of a range": lambda: dict_of(text("w"), tensor(stride=range_of(10**12))),
    "a tensor of 2**62 sizes": lambda: dict_of(
        text("w"), tensor(size=laughs(62, 2, "tuple"), stride=laughs(62, 2, "tuple"))
    ),
    "an expanded tensor of 2**70 elements": lambda: dict_of(
        text("w"), tensor(size=tuple_of(number(1 << 40), number(1 << 30)), stride=tuple_of(number(0), number(0)))
    ),
    "a tensor of 2**122 times nothing": lambda: dict_of(
        text("w"), tensor(size=tuple_of(number(1 << 61), number(1 << 61), number(0)), stride=tuple_of(*[number(0)] * 3))
    ),
    "a meta tensor of 2**122 elements": lambda: call(
        named("torch._utils", "_rebuild_meta_tensor_no_storage"), named("torch", "float32"),
        tuple_of(number(1 << 61), number(1 << 61)), tuple_of(number(1), number(1)), b"\x89"
    ),
    "a storage of 2**61 elements": lambda: dict_of(text("w"), tensor(storage(numel=1 << 61))),
    "an int of 100,000 digits in text": lambda: b"L" + b"9" * 100_000 + b"L\n",
    "a list that is its own key": lambda: b"]" + put(1) + b"0}" + get(1) + b"Ns",
}  # fmt: skip
HARMLESS: dict[str, Bomb] = {
    "memo index 2**31": lambda: b"N" + put(1 << 31) + b"0" + get(1 << 31),
    "memo index 2**32-1": lambda: b"N" + put((1 << 32) - 1),
    "memo index of 4,000 digits": lambda: b"Np" + b"9" * 4000 + b"\n",
    "one memo entry a million times": lambda: (b"]" + put(1) + b"0") * 1_000_000 + get(1),
    "a million memo entries": lambda: b"N\x94" * 1_000_000,
    "300,000 globals": lambda: b"".join(b"ca\nb%d\n0" % n for n in range(300_000)) + b"N",
    "100,000 dangerous globals": lambda: b"".join(b"cos\nb%d\n0" % n for n in range(100_000)) + b"N",
    "100,000 records": lambda: b"](" + (RECORD + b")R") * 100_000 + b"e",
    "bytearray(10**12)": lambda: call(named("builtins", "bytearray"), number(10**12)),
    "bytearray of a numpy number": lambda: call(named("builtins", "bytearray"), numpy_scalar(3 * 10**9)),
    "bytearray of a range": lambda: call(named("builtins", "bytearray"), range_of(10**12)),
    "bytes(10**12)": lambda: call(named("builtins", "bytes"), number(10**12)),
    "bytes of a numpy number": lambda: call(named("builtins", "bytes"), numpy_scalar(3 * 10**9)),
    **{f"{kind}(range(10**12))": lambda kind=kind: call(named("builtins", kind), range_of(10**12))  # type: ignore[misc]
       for kind in ("list", "tuple", "set", "frozenset", "dict", "range", "slice", "complex")},
    "deque(range(10**12))": lambda: call(named("collections", "deque"), range_of(10**12)),
    "Counter(range(10**12))": lambda: call(named("collections", "Counter"), range_of(10**12)),
    "OrderedDict(range(10**12))": lambda: call(ORDERED, range_of(10**12)),
    "torch.Size(range(10**12))": lambda: call(named("torch", "Size"), range_of(10**12)),
    "torch.Size of a huge number": lambda: call(named("torch", "Size"), list_of(number(10**30))),
    "range(10**12)": lambda: range_of(10**12),
    "an int of 8 MB": lambda: number(1 << (64 << 20)),
    "an int of 1 MB as a key": lambda: key_of(number(1 << (8 << 20))),
    "an int of 1 MB before a tensor": lambda: b"}" + number(1 << (8 << 20)) + dict_of(text("w"), tensor()) + b"s",
    "a Decimal of a huge int": lambda: call(named("decimal", "Decimal"), number(1 << (16 << 20))),
    "a Decimal of a long text": lambda: call(named("decimal", "Decimal"), text("1" * 3_000_000)),
    "a Decimal with a huge exponent": lambda: key_of(call(named("decimal", "Decimal"), text("1e999999999"))),
    "a timedelta of a huge number": lambda: call(named("datetime", "timedelta"), number(10**400)),
    "a list in itself": lambda: b"]" + put(1) + get(1) + b"a",
    "a dict in itself": lambda: b"}" + put(1) + text("a") + get(1) + b"s",
    "a record in its state": lambda: call(RECORD) + put(1) + dict_of(text("a"), get(1)) + b"b",
    "a record that is its own state": lambda: call(RECORD) + put(1) + get(1) + b"b",
    "a namespace in itself": lambda: call(named("argparse", "Namespace")) + put(1) + dict_of(text("a"), get(1)) + b"b",
    "attributes that hold their owner": lambda: call(ORDERED) + put(1) + dict_of(text("a"), get(1)) + b"b",
    "an array that holds itself": lambda: call(
        named("numpy._core.multiarray", "_reconstruct"), named("numpy", "ndarray"), tuple_of(number(0)), b"C\x01b"
    ) + put(1) + tuple_of(number(1), tuple_of(number(1)), call(DTYPE, text("O8"), b"\x89", b"\x88"), b"\x89",
                          list_of(get(1))) + b"b",
    "a tensor with itself as an attribute": lambda: tensor() + put(1) + dict_of(text("a"), get(1)) + b"b",
    "a dtype of itself": dtype_of_itself,
    "an object array of a range": lambda: numpy_array(
        tuple_of(number(1)), call(DTYPE, text("O8"), b"\x89", b"\x88"), range_of(2 * 10**8)
    ),
    "an array of 10**12 times nothing": lambda: numpy_array(
        tuple_of(number(10**12), number(0)), call(DTYPE, text("f4"), b"\x89", b"\x88"), b"C\x00"
    ),
    "an array with a huge shape": lambda: numpy_array(
        tuple_of(number(1 << 62), number(1 << 62)), call(DTYPE, text("f4"), b"\x89", b"\x88"), b"C\x04abcd"
    ),
    "a dtype of huge arrays": lambda: call(DTYPE, text("i4,(100000,100000)f8"), b"\x89", b"\x88"),
    "a dtype of huge text": lambda: numpy_array(
        tuple_of(number(1)), call(DTYPE, text("U2000000000"), b"\x89", b"\x88"), b"C\x04abcd"
    ),
    "laughs in a persistent id": lambda: tuple_of(laughs(20, 10)) + b"Q",
    "laughs as a sparse layout": lambda: call(
        named("torch._utils", "_rebuild_sparse_tensor"), laughs(20, 10), tuple_of(tensor(), tensor())
    ),
    "a name of 50,000 dots": lambda: dict_of(text("a." * 50_000), tensor()),
    "a name of 5,000 digits": lambda: dict_of(text("9" * 5000), tensor()),
    "two names of 5,000 digits": lambda: dict_of(text("9" * 5000), tensor(), text("9" * 4999 + "8"), tensor()),
    "long keys without tensors": lambda: dict_of(text("k" * 1_000_000), b"](" + b"K\x01" * 500_000 + b"e"),
    "an expanded tensor of 128 GiB": lambda: dict_of(
        text("w"), tensor(size=tuple_of(number(1 << 35)), stride=tuple_of(number(0)))
    ),
    "30,000 tied tensors": lambda: tensor() + put(1) + b"0](" + get(1) * 30_000 + b"e",
}  # fmt: skip
BOMBS = REFUSED | HARMLESS
LEGACY: dict[str, Bomb] = {
    "nested tuple as a key": lambda: legacy(
        program(dict_of(text("w"), tensor())), program(list_of(nested(200_000, "tuple")))
    ),
    "laughs as a key": lambda: legacy(
        program(dict_of(text("w"), tensor())), program(list_of(laughs(15, 100, "tuple")))
    ),
    "a nested root": lambda: legacy(program(nested(1_000_000, "list")), program(b"]")),
    "a claim": lambda: legacy(program(CLAIMS["BINBYTES8"]), program(b"]")),
    "a pickle that does not end": lambda: legacy(program(b"N"), b"\x80\x02" + b"K\x01" * 3_000_000),
    "a million keys": lambda: legacy(
        program(dict_of(text("w"), tensor())), program(b"](" + text("0") * 1_000_000 + b"e")
    ),
}


class Range:
    """The process that opens the bombs; started once, as its imports take seconds."""

    def __init__(self) -> None:
        root = Path(__file__).parent.parent
        path = os.pathsep.join(
            [str(root), str(Path(lazyckpt.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
        )
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.bomb_range"], cwd=root, env=os.environ | {"PYTHONPATH": path}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )  # fmt: skip

    def explode(self, path: Path) -> dict[str, Any]:
        assert self.process.stdin
        assert self.process.stdout
        print(path, file=self.process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer


@pytest.fixture(scope="module")
def bomb_range(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Range, int]]:
    """The process, and the memory that it takes to open a harmless file."""
    made = Range()
    try:
        path = tmp_path_factory.mktemp("harmless") / "harmless.pt"
        path.write_bytes(torch_zip(program(dict_of(text("w"), tensor()))))
        answer = made.explode(path)
        assert answer["outcome"] == "view", answer
        yield made, answer["memory"]
    finally:
        made.process.stdin.close()  # type: ignore[union-attr]
        made.process.wait(30)


@pytest.mark.parametrize("name", BOMBS)
def test_bomb(name: str, tmp_path: Path, bomb_range: tuple[Range, int]) -> None:
    made, usual = bomb_range
    path = tmp_path / "bomb.pt"
    path.write_bytes(torch_zip(program(BOMBS[name](), 4)))
    answer = made.explode(path)
    assert answer["seconds"] < SECONDS
    assert answer["outcome"] == ("LazyckptError" if name in REFUSED else "view"), answer
    if name in REFUSED:
        assert path.name in answer["message"]
    assert len(answer["message"]) < 1500
    assert answer["memory"] < usual + (200 << 20) + 20 * path.stat().st_size  # nested dicts take CPython 64 each


@pytest.mark.parametrize("name", LEGACY)
def test_legacy_bomb(name: str, tmp_path: Path, bomb_range: tuple[Range, int]) -> None:
    made, usual = bomb_range
    path = tmp_path / "bomb.pt"
    path.write_bytes(LEGACY[name]())
    answer = made.explode(path)
    assert answer["outcome"] == "LazyckptError", answer
    assert path.name in answer["message"]
    assert answer["seconds"] < SECONDS
    assert answer["memory"] < usual + (200 << 20) + 20 * path.stat().st_size


def test_bomb_range_detects_excess(tmp_path: Path, bomb_range: tuple[Range, int]) -> None:
    """Else a test above could pass for nothing."""
    made, usual = bomb_range
    path = tmp_path / "large.pt"
    path.write_bytes(torch_zip(pickle.dumps({"a": [str(n) for n in range(1_000_000)]}, 2)))
    answer = made.explode(path)
    assert answer["outcome"] == "view"
    assert answer["memory"] > usual + (50 << 20)
    assert made.explode(tmp_path / "nothing.pt")["outcome"] == "LazyckptError"


def test_a_long_key_of_many_dicts_is_refused(tmp_path: Path) -> None:
    """A hundred kilobytes of key, which a pickle refers to 80,000 times, would be gigabytes of text."""
    torch.save(
        {"w": torch.zeros(2), "m": [{"x" * 100_000: 1}] + [{"x" * 100_000: n} for n in range(3)]}, tmp_path / "few.pt"
    )
    assert len(repr(lazyckpt.open(tmp_path / "few.pt").meta)) > 400_000
    key = "x" * 100_000
    torch.save({"w": torch.zeros(2), "m": [{key: n} for n in range(80_000)]}, tmp_path / "many.pt")
    with pytest.raises(lazyckpt.CorruptError, match=r"many\.pt"):
        lazyckpt.open(tmp_path / "many.pt")


def test_ints_that_python_does_not_print_are_records(tmp_path: Path) -> None:
    wide = 9**9999
    torch.save({"w": torch.zeros(2), "m": [wide, {wide: 5}, 7], "n": wide}, tmp_path / "x.pt")
    meta = lazyckpt.open(tmp_path / "x.pt").meta
    assert "builtins.int" in repr(meta) and meta["m"][2] == 7
    assert int(*meta["n"].args) == int(*meta["m"][0].args) == wide
    assert meta["m"][1] == {hex(wide): 5}


def test_wide_ints_inside_keys_sets_and_ranges_are_printed(tmp_path: Path) -> None:
    wide = 1 << 40_000
    held = [
        {(wide, 1): 1},
        {wide},
        [1, frozenset([wide])],
        range(wide),
        slice(wide),
        {"a": range(wide)},
        [range(3), None],
    ]
    for n, value in enumerate(held):
        torch.save({"w": torch.zeros(2), "m": value}, tmp_path / f"{n}.pt")
        view = lazyckpt.open(tmp_path / f"{n}.pt")
        assert len(repr(view.meta)) < 30_000 and repr(view)
    assert view.meta["m"] == [range(3), None]
