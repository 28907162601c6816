"""A pickle that is read among others is read as if it were alone, whatever the others hold or do."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lazyckpt
from lazyckpt.io.containers.pickle.plain import Plain
from lazyckpt.io.containers.torch_file import Pickles, read_torch_file
from lazyckpt.io.storage.local import LocalStore

from .handmade import (
    call,
    dict_of,
    get,
    list_of,
    named,
    number,
    program,
    put,
    storage,
    tensor,
    text,
    torch_zip,
    tuple_of,
)
from .lanes import rounds

FILLER = text("x" * 5000)  # makes an item long enough to be shared
ORDERED = named("collections", "OrderedDict")
RECORD = named("a", "Record")
TENSOR = tensor(storage(text("0")))
OTHER = tensor(storage(text("1")))


def described(value: Any, seen: tuple[int, ...] = ()) -> Any:
    """All that was read, as text that tells -0.0, True and 1 apart."""
    if id(value) in seen:
        return "again"
    seen = (*seen, id(value))
    if isinstance(value, dict):
        state = described(getattr(value, "state", None), seen)
        return type(value).__name__, [(described(k, seen), described(v, seen)) for k, v in value.items()], state
    if isinstance(value, list | tuple):
        return type(value).__name__, [described(v, seen) for v in value]
    if isinstance(value, set | frozenset):
        return type(value).__name__, sorted(repr(described(v, seen)) for v in value)
    slots = [s for cls in type(value).__mro__ for s in cls.__dict__.get("__slots__", ())]
    if slots:
        return type(value).__name__, [(s, described(getattr(value, s, None), seen)) for s in slots]
    if hasattr(value, "__dict__") and not callable(value):
        return type(value).__name__, described(vars(value), seen)
    return repr(value)


def outcome(path: Path, pickles: Pickles | None) -> Any:
    try:
        file = read_torch_file(LocalStore(path.parent), path.name, pickles or Pickles())
        plain = Plain(file.root, path.name, file.pickle_size)
        extents = {name: t.storage and file.extent(t, name) for name, t in plain.tensors.items()}
    except lazyckpt.LazyckptError as e:
        return type(e)
    return described(file.root), file.globals, described(plain.rest), plain.notes, extents


def read_among(paths: list[Path]) -> list[Any]:
    """Read files one after the other, each among those before it."""
    among = Pickles()
    return [outcome(path, among) for path in paths]


def check(folder: Path, programs: list[bytes]) -> list[Any]:
    """Read them among each other, in this order and back, and each alone."""
    paths = []
    for n, data in enumerate(programs):
        paths.append(folder / f"{n}.pt")
        paths[-1].write_bytes(torch_zip(data, {"0": bytes(16), "1": struct.pack("<4f", 1, 2, 3, 4)}))
    alone = [outcome(path, Pickles()) for path in paths]
    among = Pickles()
    for path, expected in [*zip(paths, alone, strict=True), *reversed(list(zip(paths, alone, strict=True)))]:
        assert outcome(path, among) == expected, path.name
    return alone


def family(poison: bytes, shared: bytes = dict_of(text("w"), TENSOR) + put(0)) -> list[bytes]:
    """Ranks that share an item; the second has something more, which comes after it or before the dict is filled."""

    def rank(n: int, more: bytes, after: bytes = b"") -> bytes:
        items = b"(" + text("rank") + number(n) + text("model") + FILLER + b"0" + shared
        return program(b"}" + items + text("more") + more + b"u" + after)

    late = put(1) + b"0" + poison + b"0" + get(1)
    return [rank(0, b"N"), rank(1, poison), rank(2, b"N"), rank(3, b"N", late), rank(4, b"N"), rank(5, poison),
            rank(6, b"N"), rank(7, b"N")]  # fmt: skip


POISONS = {
    "SETITEMS": get(0) + b"(" + text("w") + OTHER + b"u",
    "SETITEM": get(0) + text("w") + OTHER + b"s",
    "a key more": get(0) + text("v") + OTHER + b"s",
    "after DUP": get(0) + b"2" + text("w") + OTHER + b"s0",
}


@pytest.mark.parametrize("name", POISONS)
def test_a_rank_that_edits_a_dict_changes_no_other(name: str, tmp_path: Path) -> None:
    check(tmp_path, family(POISONS[name]))


def test_others_read_their_own_tensor_beside_a_poisoned_rank(tmp_path: Path) -> None:
    """What torch.load reads of each file."""
    programs = family(POISONS["SETITEMS"])
    check(tmp_path, programs)
    pickles = Pickles()
    for n in range(len(programs)):
        path = tmp_path / f"{n}.pt"
        file = read_torch_file(LocalStore(tmp_path), path.name, pickles)
        mine = Plain(file.root, path.name, file.pickle_size).tensors["model.w"]
        theirs = torch.load(path, weights_only=False)["model"]["w"]
        extent = file.extent(mine, "model.w")
        raw = path.read_bytes()[extent.offset : extent.offset + 16]
        assert torch.equal(torch.frombuffer(bytearray(raw), dtype=torch.float32), theirs)


EDITED = {
    "a list": (list_of(TENSOR) + put(0), get(0) + OTHER + b"a"),
    "a list, APPENDS": (list_of(TENSOR) + put(0), get(0) + b"(" + OTHER + b"e"),
    "an OrderedDict": (call(ORDERED) + put(0), get(0) + text("w") + OTHER + b"s"),
    "attributes of an OrderedDict": (call(ORDERED) + put(0), get(0) + dict_of(text("_metadata"), OTHER) + b"b"),
    "a set": (b"\x8f" + put(0), get(0) + b"(" + text("a") + b"\x90"),
    "a record's state": (call(RECORD) + put(0), get(0) + dict_of(text("w"), OTHER) + b"b"),
    "a record's items": (call(RECORD) + put(0), get(0) + OTHER + b"a"),
    "a record's keys": (call(RECORD) + put(0), get(0) + text("w") + OTHER + b"s"),
    "a namespace": (call(named("argparse", "Namespace")) + put(0), get(0) + dict_of(text("w"), OTHER) + b"b"),
    "a class": (RECORD + put(0), get(0) + dict_of(text("w"), OTHER) + b"b"),
    "a class by its name": (RECORD, RECORD + dict_of(text("w"), OTHER) + b"b"),
    "a tensor's attributes": (TENSOR + put(0), get(0) + dict_of(text("a"), OTHER) + b"b"),
    "whether it needs gradients": (
        TENSOR + put(0), call(named("torch._utils", "_rebuild_parameter"), get(0), b"\x88", call(ORDERED))
    ),
    "a dict in a tuple": (tuple_of(dict_of(text("w"), TENSOR)) + put(0) + b"0" + get(0), b"N"),
    "what rebuilds it returns": (
        tuple_of(dict_of(text("w"), TENSOR), b"\x88", b"N") + put(0),
        named("torch._utils", "_rebuild_parameter") + get(0) + b"R" + text("w") + OTHER + b"s",
    ),
    "keys of a record by another": (
        dict_of(text("w"), TENSOR) + put(0),
        call(named("copyreg", "_reconstructor"), RECORD, named("builtins", "dict"), get(0)) + text("w") + OTHER + b"s",
    ),
    "the memo": (dict_of(text("w"), TENSOR) + put(0), OTHER + put(0)),
    "the stack": (dict_of(text("w"), TENSOR) + put(0), b"000" + OTHER + text("more") + b"N"),
}  # fmt: skip


@pytest.mark.parametrize("name", EDITED)
def test_modified_objects_are_not_shared(name: str, tmp_path: Path) -> None:
    shared, poison = EDITED[name]
    check(tmp_path, family(poison, shared))


def test_item_that_modifies_an_earlier_object(tmp_path: Path) -> None:
    def rank(n: int, first: bytes) -> bytes:
        change = get(0) + text("w") + OTHER + b"s" + FILLER + b"0"
        return program(dict_of(text("a"), first + put(0), text("b"), number(n), text("c"), change, text("d"), b"N"))

    ranks = [rank(n, dict_of(text("w"), TENSOR)) for n in range(4)]
    check(tmp_path, ranks + [rank(n, call(ORDERED)) for n in range(3)])


def test_item_that_refers_to_a_differing_object(tmp_path: Path) -> None:
    """Values that Python calls equal, and are not the same."""

    def rank(n: int, value: bytes) -> bytes:
        return program(dict_of(text("a"), value + put(0), text("n"), number(n), text("b"),
                               tuple_of(get(0), FILLER), text("c"), b"N"))  # fmt: skip

    zero, minus, nan = (b"G" + struct.pack(">d", x) for x in (0.0, -0.0, float("nan")))
    values = [zero, zero, minus, zero, b"K\x01", b"\x88", b"K\x01", b"G" + struct.pack(">d", 1.0), nan, nan, nan]
    check(tmp_path, [rank(n, value) for n, value in enumerate(values)])
    check(tmp_path, [rank(n, tuple_of(value)) for n, value in enumerate(values)])


def test_the_names_of_a_rank_are_listed_with_it_alone(tmp_path: Path) -> None:
    clean = family(b"N")
    poisoned = family(call(named("os", "system"), text("true")))
    check(tmp_path, clean)
    check(tmp_path, poisoned)
    alone = [outcome(tmp_path / f"{n}.pt", Pickles()) for n in range(8)]
    assert [("os", "system") in names for _, names, *_ in alone] == [n in (1, 3, 5) for n in range(8)]
    among = Pickles()
    for n in range(8):
        assert outcome(tmp_path / f"{n}.pt", among)[1] == alone[n][1]


def test_a_class_that_is_a_key_is_one_key_wherever_it_is_named(tmp_path: Path) -> None:
    both = b"}" + get(0) + number(1) + b"s" + RECORD + number(2) + b"s"
    check(tmp_path, family(both, tuple_of(RECORD + put(0), FILLER)))


PIECES = [
    b"N", number(7), text("k"), TENSOR, OTHER, dict_of(text("w"), TENSOR), list_of(number(1)), b"]", b"}",
    call(ORDERED), call(RECORD), RECORD, b"\x8f", tuple_of(text("a"), number(1)), FILLER,
    call(named("argparse", "Namespace")),
    *(get(n) for n in range(4)), get(0) + b"2",
]  # fmt: skip
EDITS = [
    b"", b"", b"", text("w") + OTHER + b"s", b"(" + text("v") + number(3) + b"u", number(2) + b"a",
    dict_of(text("a"), OTHER) + b"b", b"(" + text("e") + b"\x90", b"0N", b"2", b"\x94",
]  # fmt: skip


@settings(max_examples=rounds(150), deadline=None)
@given(st.integers(0, 1 << 32))
def test_any_family_reads_as_each_rank_alone(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    """Items put together at random, some of them common to all ranks, with edits of anything on the memo."""
    random_ = random.Random(seed)

    def value() -> bytes:
        made = random_.choice(PIECES) + random_.choice(EDITS)
        return made + (put(random_.randrange(3)) if random_.random() < 0.6 else b"")

    common = [value() for _ in range(3)]
    programs = []
    for n in range(4):
        items = text("n") + number(n) if random_.random() < 0.8 else b""
        for k in range(3):
            own = value() if random_.random() < 0.3 else common[k]
            items += text(f"i{k}") + FILLER + b"0" + own
        after = b"" if random_.random() < 0.7 else put(4) + b"0" + value() + b"0" + get(4)
        programs.append(program(b"}(" + items + b"u" + after))
    check(tmp_path_factory.mktemp("family"), programs)
