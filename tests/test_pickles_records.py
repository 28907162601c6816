"""Every opcode, and what would be made by calling: records of it, never the thing itself."""

from __future__ import annotations

import collections
import copy
import copyreg
import dataclasses
import enum
import pickle
import pickletools
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyckpt
from lazyckpt import CorruptError
from lazyckpt.io.containers.pickle.records import Opaque

from .handmade import (
    call,
    dict_of,
    list_of,
    machine,
    named,
    nested,
    number,
    program,
    raw_bytes,
    text,
    tuple_of,
    write_pickle,
)

PROTOCOLS = range(6)
RECORD = named("some.module", "Thing")


def is_record(value: Any, args: Any = (), module: str = "some.module", name: str = "Thing") -> bool:
    return isinstance(value, Opaque) and (value.module, value.name, value.args) == (module, name, args)


# opcode -> (a pickle's body that uses it, what comes back or a test of it)
OPCODES: dict[str, tuple[bytes, Any]] = {
    "INT": (b"I-7\n", -7),
    "BININT": (b"J\xff\xff\xff\xff", -1),
    "BININT1": (b"K\xff", 255),
    "BININT2": (b"M\x01\x02", 513),
    "LONG": (b"L-123456789012345678901234567890L\n", -123456789012345678901234567890),
    "LONG1": (b"\x8a\x02\x00\x80", -32768),
    "LONG4": (b"\x8b\x03\x00\x00\x00\x00\x00\x01", 65536),
    "STRING": (b"S'a\\x62\\n'\n", "ab\n"),
    "BINSTRING": (b"T\x02\x00\x00\x00\xe9b", "éb"),
    "SHORT_BINSTRING": (b"U\x01\xe9", "é"),
    "BINBYTES": (b"B\x02\x00\x00\x00ab", b"ab"),
    "SHORT_BINBYTES": (b"C\x02ab", b"ab"),
    "BINBYTES8": (b"\x8e\x02\0\0\0\0\0\0\0ab", b"ab"),
    "BYTEARRAY8": (b"\x96\x02\0\0\0\0\0\0\0ab", bytearray(b"ab")),
    "NONE": (b"N", None),
    "NEWTRUE": (b"\x88", True),
    "NEWFALSE": (b"\x89", False),
    "UNICODE": (b"Va\\u20ac\n", "a€"),
    "SHORT_BINUNICODE": (b"\x8c\x03\xe2\x82\xac", "€"),
    "BINUNICODE": (b"X\x03\x00\x00\x00\xe2\x82\xac", "€"),
    "BINUNICODE8": (b"\x8d\x03\0\0\0\0\0\0\0\xe2\x82\xac", "€"),
    "FLOAT": (b"F-1.5e3\n", -1500.0),
    "BINFLOAT": (b"G\xc0\x09\x21\xfb\x54\x44\x2d\x18", -3.141592653589793),
    "EMPTY_LIST": (b"]", []),
    "APPEND": (b"]K\x01a", [1]),
    "APPENDS": (b"](K\x01K\x02e", [1, 2]),
    "LIST": (b"(K\x01K\x02l", [1, 2]),
    "EMPTY_TUPLE": (b")", ()),
    "TUPLE": (b"(K\x01K\x02K\x03K\x04t", (1, 2, 3, 4)),
    "TUPLE1": (b"K\x01\x85", (1,)),
    "TUPLE2": (b"K\x01K\x02\x86", (1, 2)),
    "TUPLE3": (b"K\x01K\x02K\x03\x87", (1, 2, 3)),
    "EMPTY_DICT": (b"}", {}),
    "DICT": (b"(K\x01K\x02d", {1: 2}),
    "SETITEM": (b"}K\x01K\x02s", {1: 2}),
    "SETITEMS": (b"}(K\x01K\x02K\x03K\x04u", {1: 2, 3: 4}),
    "EMPTY_SET": (b"\x8f", set()),
    "ADDITEMS": (b"\x8f(K\x01K\x02\x90", {1, 2}),
    "FROZENSET": (b"(K\x01K\x02\x91", frozenset({1, 2})),
    "POP": (b"K\x01K\x020", 1),
    "DUP": (b"K\x012\x86", (1, 1)),
    "MARK": (b"(K\x01t", (1,)),
    "POP_MARK": (b"K\x01(K\x02K\x031", 1),
    "GET": (b"K\x01p300\n0g300\n", 1),
    "BINGET": (b"K\x01q\x070h\x07", 1),
    "LONG_BINGET": (b"K\x01r\x00\x01\x00\x000j\x00\x01\x00\x00", 1),
    "PUT": (b"K\x01p5\n", 1),
    "BINPUT": (b"K\x01q\x05", 1),
    "LONG_BINPUT": (b"K\x01r\xff\xff\xff\xff", 1),
    "MEMOIZE": (b"K\x01\x94K\x02\x94h\x00\x87", (1, 2, 1)),
    "EXT1": (b"\x82\x05", lambda v: isinstance(v, Opaque) and "5" in v.name),
    "EXT2": (b"\x83\x05\x01", lambda v: isinstance(v, Opaque) and "261" in v.name),
    "EXT4": (b"\x84\x05\x00\x01\x00", lambda v: isinstance(v, Opaque) and "65541" in v.name),
    "GLOBAL": (RECORD, lambda v: is_record(v, None)),
    "STACK_GLOBAL": (text("some.module") + text("Thing") + b"\x93", lambda v: is_record(v, None)),
    "REDUCE": (RECORD + b"K\x01\x85R", lambda v: is_record(v, (1,))),
    "BUILD": (RECORD + b")R}K\x01K\x02sb", lambda v: is_record(v) and v.state == {1: 2}),
    "INST": (b"(K\x01isome.module\nThing\n", lambda v: is_record(v, (1,))),
    "OBJ": (b"(" + RECORD + b"K\x01o", lambda v: is_record(v, (1,))),
    "NEWOBJ": (RECORD + b"K\x01\x85\x81", lambda v: is_record(v, (1,))),
    "NEWOBJ_EX": (RECORD + b")}X\x01\0\0\0aK\x01s\x92", lambda v: is_record(v) and v.kwargs == {"a": 1}),
    "PROTO": (b"\x80\x05N", None),
    "STOP": (b"N", None),
    "FRAME": (b"\x95\x02\0\0\0\0\0\0\0N", None),
    "PERSID": (b"Pabc\n", lambda v: isinstance(v, Opaque) and "abc" in v.name),
    "BINPERSID": (text("abc") + b"Q", lambda v: isinstance(v, Opaque) and "abc" in v.name),
    "NEXT_BUFFER": (b"\x97", CorruptError),
    "READONLY_BUFFER": (b"C\x01a\x98", b"a"),
}


def test_the_table_has_every_opcode() -> None:
    assert {op.name for op in pickletools.opcodes} == set(OPCODES)


@pytest.mark.parametrize("name", OPCODES)
def test_opcode(name: str) -> None:
    body, expected = OPCODES[name]
    if expected is CorruptError:
        with pytest.raises(CorruptError, match=r"test\.pt"):
            machine(program(body))
        return
    found = machine(program(body))
    if callable(expected):
        assert expected(found)
    else:
        assert type(found) is type(expected)
        assert found == expected


@pytest.mark.parametrize("byte", sorted(set(range(256)) - {ord(op.code) for op in pickletools.opcodes}))
def test_unknown_opcodes_are_refused(byte: int) -> None:
    with pytest.raises(CorruptError, match=r"test\.pt.*0x"):
        machine(program(bytes([byte])))


@pytest.mark.parametrize("protocol", [6, 7, 255])
def test_later_protocols_are_refused(protocol: int) -> None:
    with pytest.raises(CorruptError, match=f"protocol {protocol}"):
        machine(program(b"N", protocol))


# -- classes


class Plain:
    def __init__(self) -> None:
        self.lr, self.name = 0.5, "sgd"


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self) -> None:
        self.a, self.b = 1, 2


class Mixed(Slotted):
    def __init__(self) -> None:
        super().__init__()
        self.c = 3


class Table(dict[str, int]):
    """A subclass of dict, with an attribute."""


class Row(list[int]):
    pass


class Bag(set[int]):
    pass


class Whole(int):
    pass


class Letters(str):
    pass


class Named(collections.namedtuple("Named", "x y")):
    pass


@dataclasses.dataclass
class Config:
    lr: float = 0.1
    layers: tuple[int, ...] = (1, 2)


class Level(enum.Enum):
    LOW = "low"


class Grade(enum.IntEnum):
    ONE = 1


class WithNew:
    def __getnewargs_ex__(self) -> tuple[tuple[int], dict[str, int]]:
        return (1,), {"k": 2}

    def __new__(cls, *args: int, **kwargs: int) -> WithNew:
        return super().__new__(cls)


class WithReduce:
    def __reduce__(self) -> Any:
        return WithReduce, (), {"s": 1}, iter([10, 20]), iter([("k", "v")])


class Outer:
    class Inner:
        def __init__(self) -> None:
            self.deep = True


def table() -> Table:
    made = Table(a=1)
    made.note = "ours"  # type: ignore[attr-defined]
    return made


def within(record: Any, wanted: Any) -> bool:
    """Whether a record holds a value, at any depth."""
    if isinstance(record, Opaque):
        inner = [
            *(record.args or ()),
            *(record.kwargs or {}).items(),
            record.state,
            *record.items,
            *record.entries.items(),
        ]
        return any(within(value, wanted) for value in inner)
    if isinstance(record, list | tuple | set) and record != wanted:
        return any(within(value, wanted) for value in record)
    return bool(record == wanted)


CLASSES: dict[str, tuple[Any, Any]] = {
    "plain": (Plain(), lambda r: r.attributes == {"lr": 0.5, "name": "sgd"} and r.lr == 0.5),
    "slots": (Slotted(), lambda r: r.attributes == {"a": 1, "b": 2} and r.b == 2),
    "slots and dict": (Mixed(), lambda r: r.attributes == {"a": 1, "b": 2, "c": 3}),
    "dict": (table(), lambda r: (r.entries == {"a": 1} or within(r, {"a": 1})) and r.note == "ours"),
    "list": (Row([1, 2]), lambda r: r.items == [1, 2] or within(r, [1, 2])),
    "set": (Bag({1, 2}), lambda r: within(r, [1, 2]) or within(r, {1, 2})),
    "int": (Whole(7), lambda r: within(r, 7)),
    "str": (Letters("abc"), lambda r: within(r, "abc")),
    "namedtuple": (Named(1, 2), lambda r: r.args == (1, 2) or within(r, (1, 2))),
    "dataclass": (Config(), lambda r: r.lr == 0.1 and r.layers == (1, 2)),
    "enum": (Level.LOW, lambda r: r.args == ("low",)),
    "int enum": (Grade.ONE, lambda r: r.args == (1,)),
    "newargs": (WithNew(), lambda r: within(r, 1) and within(r, 2)),
    "reduce": (WithReduce(), lambda r: (r.state, r.items, r.entries) == ({"s": 1}, [10, 20], {"k": "v"})),
    "nested": (Outer.Inner(), lambda r: r.deep is True),
}


# Python writes no slots before protocol 2, and does not ask __getnewargs_ex__ there
BEFORE_2 = CLASSES.keys() - {"slots", "slots and dict", "newargs"}


@pytest.mark.parametrize(("name", "protocol"), [(n, p) for n in CLASSES for p in PROTOCOLS if p >= 2 or n in BEFORE_2])
def test_objects_become_records(name: str, protocol: int, tmp_path: Path) -> None:
    """With their class, and what would have become of their attributes, items and keys."""
    value, check = CLASSES[name]
    view = lazyckpt.open(write_pickle(tmp_path / "x.pt", pickle.dumps({"v": value}, protocol)))
    record = view.meta["v"]
    assert type(record) is Opaque, "something was made"
    assert (record.module, record.name.split(".")[-1]) == (__name__, type(value).__name__) or name == "newargs"
    assert check(record)
    assert type(value).__name__ in repr(record) or name == "newargs"
    assert len(repr(record)) < 1000
    again = pickle.loads(pickle.dumps(record))
    assert repr(again) == repr(record) == repr(copy.deepcopy(record))
    assert not view.problems


def test_functions_and_classes_are_only_named() -> None:
    for value in (test_functions_and_classes_are_only_named, Plain, len, torch.nn.Linear, torch.nn.functional.relu):
        record = machine(pickle.dumps(value, 2))
        assert type(record) is Opaque
        assert record.args is None


def test_extension_codes_are_not_looked_up() -> None:
    copyreg.add_extension(__name__, "Plain", 77)
    try:
        for protocol in (2, 3, 4, 5):
            found = machine(pickle.dumps(Plain, protocol))
            assert type(found) is Opaque
            assert "77" in found.name
    finally:
        copyreg.remove_extension(__name__, "Plain", 77)


def test_cyclic_objects(tmp_path: Path) -> None:
    a, b = Plain(), Plain()
    a.other, b.other = b, a  # type: ignore[attr-defined]
    record = machine(pickle.dumps(a, 2))
    assert record.other.other is record
    view = lazyckpt.open(write_pickle(tmp_path / "x.pt", pickle.dumps({"v": a}, 2)))
    assert "further up" in view.meta["v"].other.other
    repr(view.meta["v"])


def test_result_of_calling_a_record_is_a_record() -> None:
    """Calls of calls, states of what a call returned, keys and items of it: all recorded."""
    inner = call(named("a", "f"), number(1))
    found = machine(program(call(inner, number(2)) + dict_of(text("k"), number(3)) + b"b"))
    assert type(found) is Opaque
    assert found.module == "a"
    assert found.args == (2,)
    assert found.state == {"k": 3}


def test_records_have_no_special_attributes() -> None:
    """Whatever its state says: it is no array, no context manager, no number."""
    names = [
        "__array__",
        "__torch_function__",
        "__len__",
        "__class__",
        "__reduce_ex__",
        "__call__",
        "keys",
        "__index__",
    ]
    state = dict_of(*(part for n in names for part in (text(n), number(1))))
    record = machine(program(call(RECORD) + state + b"b"))
    assert type(record) is Opaque
    for name in ("__array__", "__torch_function__", "__len__", "__call__", "__index__"):
        assert not hasattr(record, name)
    assert record.__class__ is Opaque
    with pytest.raises(AttributeError, match=r"some\.module\.Thing"):
        _ = record.nothing
    with pytest.raises(TypeError):
        torch.zeros(1) + record


WRONG: dict[str, bytes] = {
    "a call of a number": number(1) + b")R",
    "a call of a list": b"])R",
    "arguments that are no tuple": RECORD + b"]R",
    "a class name that is no text": text("a") + number(1) + b"\x93",
    "a class name of bytes": raw_bytes(b"a") + raw_bytes(b"b") + b"\x93",
    "a key without a value": b"}(K\x01u",
    "a key that cannot be hashed": dict_of(b"]", b"N"),
    "a set of lists": b"\x8f(]\x90",
    "items for a tuple": b")K\x01a",
    "items for text": text("a") + b"K\x01a",
    "keys for a list": b"]K\x01K\x02s",
    "a state for a list": b"]}b",
    "a state for a number": b"K\x01}b",
    "an unknown memo entry": b"h\x05",
    "a memo entry that is no number": b"K\x01px\n",
    "more taken than there is": b"K\x01\x86",
    "a tuple without its mark": b"K\x01t",
    "a list without its mark": b"e",
    "text that is no UTF-8": b"X\x01\0\0\0\xff",
    "a number that is none": b"Iabc\n",
    "a float that is none": b"Fabc\n",
    "a string without quotes": b"Sabc\n",
    "a line without an end": b"Iabc",
    "a frame beyond the end": b"\x95\xff\0\0\0\0\0\0\0N",
    "a persistent id that is no storage": tuple_of(text("storage"), b"N", b"N", b"N", b"N") + b"Q",
    "a storage of a negative size": tuple_of(text("storage"), named("torch", "FloatStorage"), text("0"), text("cpu"),
                                             number(-1)) + b"Q",
    "a storage key of a list": tuple_of(text("storage"), named("torch", "FloatStorage"), list_of(), text("cpu"),
                                        number(1)) + b"Q",
    "a deep key": dict_of(nested(100, "tuple"), b"N"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_nonsense_is_refused(name: str) -> None:
    with pytest.raises(CorruptError, match=r"test\.pt"):
        machine(program(WRONG[name]))
