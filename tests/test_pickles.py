"""The inert pickle machine against CPython's: what plain values come back as, at every protocol, from both picklers."""

from __future__ import annotations

import collections
import datetime
import decimal
import io
import math
import pathlib
import pickle
import pickletools
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lazyckpt
from lazyckpt import CorruptError
from lazyckpt.io.containers.pickle.plain import Plain

from .handmade import machine, program, write_pickle
from .lanes import rounds

PROTOCOLS = range(6)


def same(a: Any, b: Any) -> bool:
    """Equal with equal types all the way down; NaN equals itself and -0.0 is not 0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    return bool(a == b)


def all_pickles(value: Any, protocol: int) -> list[bytes]:
    """As the C and the Python pickler write it, and without the memo entries that nothing refers to."""
    file = io.BytesIO()
    pickle._Pickler(file, protocol).dump(value)  # type: ignore[attr-defined]
    data = pickle.dumps(value, protocol)
    return [data, file.getvalue(), pickletools.optimize(data)]


leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.builds(lambda bits, sign: sign * (1 << bits) + sign, st.integers(8, 3000), st.sampled_from([1, -1]))
    | st.sampled_from([n + d for n in (0, 1 << 7, 1 << 8, 1 << 15, 1 << 16, 1 << 31, 1 << 63) for d in (-1, 0, 1)])
    | st.floats(allow_nan=True)
    | st.complex_numbers(allow_nan=False)
    | st.text(st.characters(exclude_categories=()))
    | st.text(min_size=250, max_size=300)
    | st.binary()
    | st.binary(min_size=250, max_size=260)
    | st.binary().map(bytearray)
    | st.builds(range, st.integers(), st.integers(), st.integers(1))
    | st.builds(slice, st.none() | st.integers(), st.none() | st.integers())
)
atoms = st.none() | st.booleans() | st.integers() | st.text() | st.binary()
pairs = st.tuples(atoms, atoms) | st.frozensets(atoms, max_size=3)
hashable = atoms | pairs | st.tuples(pairs, atoms) | st.frozensets(pairs, max_size=3)
values: st.SearchStrategy[Any] = st.deferred(
    lambda: (
        leaves
        | hashable
        | st.sets(hashable)
        | st.lists(values)
        | st.lists(values).map(tuple)
        | st.dictionaries(hashable, values)
        | values.map(lambda v: [v, v])
    )
)


@settings(max_examples=rounds(150), deadline=None)
@given(values, st.sampled_from(PROTOCOLS))
def test_plain_values_come_back(value: Any, protocol: int) -> None:
    for data in all_pickles(value, protocol):
        assert same(machine(data), pickle.loads(data))


def _expanded(value: Any) -> int:
    """How many objects a value is if nothing in it is shared."""
    inner = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    return 1 + (sum(map(_expanded, inner)) if isinstance(value, dict | list | tuple | set | frozenset) else 0)


@settings(max_examples=rounds(100), deadline=None)
@given(st.dictionaries(st.text(min_size=1), values), st.sampled_from(PROTOCOLS))
def test_plain_values_come_through_the_walk(value: dict[str, Any], protocol: int) -> None:
    """The walk that takes tensors out leaves everything else as it was."""
    data = pickle.dumps(value, protocol)
    try:
        rest = Plain(machine(data), "test.pt", len(data)).rest
    except CorruptError as e:  # a list of twice the same list, often enough, is what bombs are made of
        assert "expand to far more objects" in str(e) and _expanded(value) > 10_000 + len(data)
        return
    assert same(rest, pickle.loads(data))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_shared_values_stay_shared(protocol: int) -> None:
    inner: list[Any] = [1]
    found = machine(pickle.dumps([inner, inner, {"k": inner}], protocol))
    assert found[0] is found[1] is found[2]["k"]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_many_memo_entries(protocol: int) -> None:
    """More than one byte can count, with references to the first and the last."""
    strings = [f"string {n}" for n in range(70_000)]
    assert machine(pickle.dumps([strings, strings[:10], strings[-10:]], protocol)) == [
        strings, strings[:10], strings[-10:]
    ]  # fmt: skip


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_cycles(protocol: int, tmp_path: Path) -> None:
    ring: list[Any] = [1]
    ring.append(ring)
    table: dict[str, Any] = {"ring": ring}
    table["table"] = table
    found = machine(pickle.dumps(table, protocol))
    assert found["table"] is found
    assert found["ring"][1] is found["ring"]
    meta = lazyckpt.open(write_pickle(tmp_path / "ring.pt", pickle.dumps(table, protocol))).meta
    assert meta["ring"][0] == 1
    assert "further up" in meta["ring"][1]
    assert "further up" in meta["table"]


class Colour(collections.UserString):
    """A class of ours: never made, only recorded."""


STANDARD: dict[str, Any] = {
    "OrderedDict": collections.OrderedDict(b=1, a=2),
    "defaultdict": collections.defaultdict(list, {"a": [1]}),
    "Counter": collections.Counter("hello"),
    "deque": collections.deque([1, 2, 3], maxlen=5),
    "datetime": datetime.datetime(2024, 2, 29, 23, 59, 58, 123456),
    "datetime with a zone": datetime.datetime(2024, 2, 29, tzinfo=datetime.timezone(datetime.timedelta(hours=-3))),
    "datetime in utc": datetime.datetime(2024, 2, 29, tzinfo=datetime.UTC),
    "date": datetime.date(1, 1, 1),
    "timedelta": datetime.timedelta(days=-1, microseconds=3),
    "Decimal": decimal.Decimal("1.50"),
    "Path": pathlib.PurePosixPath("/a/b.c"),
    "WindowsPath": pathlib.PureWindowsPath("C:\\a"),
    "complex": -0.0 + 1j,
    "empty containers": [[], {}, (), set(), frozenset(), b"", "", bytearray()],
    "torch.Size": torch.Size([2, 3]),
    "torch.device": torch.device("cuda:1"),
    "torch.dtype": [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint16],
    "random": random.Random(1).getstate(),
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", STANDARD)
def test_standard_classes_come_back(name: str, protocol: int, tmp_path: Path) -> None:
    """As themselves in view.meta (dicts of all kinds as dicts)."""
    value = STANDARD[name]
    view = lazyckpt.open(write_pickle(tmp_path / "x.pt", pickle.dumps({"v": value}, protocol)))
    assert view.meta["v"] == value
    assert isinstance(view.meta["v"], dict if isinstance(value, dict) else type(value))
    assert not view.problems


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_ordered_dict_keeps_its_order_and_its_attributes(protocol: int) -> None:
    value = collections.OrderedDict(b=1, a=2)
    value._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]
    found = machine(pickle.dumps(value, protocol))
    assert list(found.items()) == [("b", 1), ("a", 2)]
    assert found.state == {"_metadata": {"": {"version": 1}}}


# -- numpy

ARRAYS: dict[str, Any] = {
    **{f"dtype {c}": np.arange(6).reshape(2, 3).astype(c) for c in "?bBhHiIlLqQefdgFDG"},
    "big-endian": np.arange(6, dtype=">i4").reshape(2, 3),
    "big-endian floats": np.arange(6, dtype=">f8"),
    "Fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "strided": np.arange(24).reshape(4, 6)[::2, ::3],
    "transposed": np.arange(24).reshape(2, 3, 4).transpose(2, 0, 1),
    "0-d": np.array(5.5),
    "empty": np.empty((0, 3), np.float32),
    "bytes": np.array([b"a", b"bcd", b""]),
    "unicode": np.array(["a", "été", "\U0001f600"]),
    "big-endian unicode": np.array(["a", "été"]).astype(">U3"),
    "void": np.array([b"abc", b"defg"], dtype="V4"),
    "datetime64": np.array(["2024-02-29", "NaT"], dtype="M8[ns]"),
    "timedelta64": np.array([1, 2], dtype="m8[25s]"),
    "structured": np.array([(1, 2.5), (3, 4.5)], dtype=[("a", "<i2"), ("b", ">f8")]),
    "structured, aligned": np.array([(1, 2.5)], dtype=np.dtype([("a", "i1"), ("b", "f8")], align=True)),
    "structured, nested": np.array([((1, 2), 3)], dtype=[("p", [("x", "i4"), ("y", "i4")]), ("z", "u1")]),
    "structured with arrays": np.array([([1, 2, 3], 4)], dtype=[("v", "f4", (3,)), ("n", "i8")]),
    "structured with text": np.array([("ab", b"c")], dtype=[("u", "U2"), ("s", "S1")]),
    "objects": np.array([1, "two", None, [3]], dtype=object),
    "objects, 2-d Fortran": np.asfortranarray(np.array([[1, "b"], [None, 4.5]], dtype=object)),
    "large": np.arange(100_000, dtype=np.uint8),
}
DTYPES = ["i4", ">f8", "U7", "S3", "V5", "M8[us]", "O", "?", [("a", "i4"), ("b", "f8", (2, 2))]]


def both_spellings(value: Any, protocol: int) -> list[bytes]:
    """As numpy 2 names its modules and (where that is text) as numpy 1 did."""
    data = pickle.dumps(value, protocol)
    return [data, data.replace(b"numpy._core", b"numpy.core")] if protocol < 4 else [data]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", ARRAYS)
def test_numpy_arrays(name: str, protocol: int, tmp_path: Path) -> None:
    array = ARRAYS[name]
    for n, data in enumerate(both_spellings({"array": array, "more": [array]}, protocol)):
        meta = lazyckpt.open(write_pickle(tmp_path / f"{n}.pt", data)).meta
        for found in (meta["array"], meta["more"][0]):
            assert type(found) is np.ndarray
            assert found.dtype == array.dtype
            assert found.dtype.isnative == array.dtype.isnative
            assert found.shape == array.shape
            if array.dtype.hasobject or array.dtype.names:  # the bytes between two fields mean nothing
                assert repr(found.tolist()) == repr(array.tolist())
            else:
                assert found.tobytes() == array.tobytes()
            assert found.flags.writeable


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", [n for n, a in ARRAYS.items() if a.dtype != object and a.size])
def test_numpy_scalars(name: str, protocol: int) -> None:
    scalar = ARRAYS[name].reshape(-1)[0]
    (expected,) = pickle.loads(pickle.dumps([scalar], protocol))  # int64 may have two classes
    for data in both_spellings([scalar], protocol):
        (found,) = Plain(machine(data), "test.pt", len(data)).rest
        assert type(found) is type(expected)
        assert found.dtype == expected.dtype
        assert repr(found.tolist()) == repr(expected.tolist()) or found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("code", DTYPES, ids=str)
def test_numpy_dtypes(code: Any, protocol: int) -> None:
    dtype = np.dtype(code)
    data = pickle.dumps([dtype], protocol)
    assert Plain(machine(data), "test.pt", len(data)).rest == [dtype]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_numpy_random_states(protocol: int, tmp_path: Path) -> None:
    legacy = np.random.RandomState(3).get_state()
    generator = np.random.default_rng(3)
    data = pickle.dumps({"legacy": legacy, "generator": generator, "state": generator.bit_generator.state}, protocol)
    view = lazyckpt.open(write_pickle(tmp_path / "rng.pt", data))
    assert view.meta["legacy"][0] == "MT19937"
    assert np.array_equal(view.meta["legacy"][1], legacy[1])
    assert view.meta["legacy"][2:] == legacy[2:]
    assert view.meta["state"] == generator.bit_generator.state
    assert view.meta["generator"].module.startswith("numpy.random")
    assert not view.problems


# -- damage


def test_an_empty_pickle_is_refused() -> None:
    for data in (b"", b"\x80\x02", b".", b"\x80\x02.", b"N"):
        with pytest.raises(CorruptError, match=r"test\.pt"):
            machine(data)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_prefix_of_a_pickle_is_refused(protocol: int) -> None:
    data = pickle.dumps(
        {"a": [1, 2.5, "x", b"y", (None, True)], "b": np.arange(3), "c": STANDARD["datetime"]}, protocol
    )
    for n in range(len(data)):
        with pytest.raises(CorruptError, match=r"test\.pt"):
            machine(data[:n])


@pytest.mark.slow
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_mutated_pickles_are_read_or_refused(protocol: int) -> None:
    """Thousands of random changes: a value or a CorruptError, nothing else, and the walk over it the same."""
    rng = random.Random(protocol)
    tree = {
        "s": STANDARD,
        "a": ARRAYS["structured, nested"],
        "o": ARRAYS["objects"],
        "n": [1, -1, 1 << 70, 2.5, math.pi],
    }
    data = pickle.dumps(tree, protocol)
    refused = 0
    for _ in range(rounds(1500)):
        changed = bytearray(data)
        for _ in range(rng.choice([1, 1, 1, 2, 5])):
            at = rng.randrange(len(changed))
            match rng.randrange(4):
                case 0:
                    changed[at] ^= 1 << rng.randrange(8)
                case 1:
                    changed[at] = rng.randrange(256)
                case 2:
                    del changed[at : at + rng.randrange(1, 9)]
                case _:
                    changed[at:at] = changed[rng.randrange(len(changed)) :][: rng.randrange(1, 9)]
        try:
            plain = Plain(machine(bytes(changed)), "test.pt", len(changed))
            repr(plain.rest)
        except CorruptError as e:
            assert "test.pt" in str(e)
            refused += 1
    assert 200 < refused < 1500, "the changes hit nothing, or nothing survives them"


def test_what_follows_the_pickle_is_left_alone() -> None:
    assert machine(program(b"K\x05") + b"\xff\xff anything") == 5
