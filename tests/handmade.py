"""Pickles put together opcode by opcode, and zip files around them: what no honest writer would make."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lazyckpt.io.containers.pickle.machine import Pickle
from lazyckpt.io.containers.pickle.rebuild import REBUILD, persistent_storage

MEMO = 1 << 16  # `laughs` and its like use memo entries from here on


def named(module: str, name: str) -> bytes:
    return b"c" + module.encode() + b"\n" + name.encode() + b"\n"


def text(value: str) -> bytes:
    raw = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(raw)) + raw


def raw_bytes(value: bytes) -> bytes:
    return b"B" + struct.pack("<I", len(value)) + value


def number(value: int) -> bytes:
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return (b"\x8a" + bytes([len(raw)]) if len(raw) < 256 else b"\x8b" + struct.pack("<I", len(raw))) + raw


def tuple_of(*items: bytes) -> bytes:
    return b"(" + b"".join(items) + b"t"


def list_of(*items: bytes) -> bytes:
    return b"](" + b"".join(items) + b"e"


def dict_of(*items: bytes) -> bytes:
    return b"}(" + b"".join(items) + b"u"


def call(function: bytes, *args: bytes) -> bytes:
    return function + tuple_of(*args) + b"R"


def put(n: int) -> bytes:
    return b"r" + struct.pack("<I", n)


def get(n: int) -> bytes:
    return b"j" + struct.pack("<I", n)


def storage(key: bytes = text("0"), numel: int = 4, kind: str = "FloatStorage", location: bytes = text("cpu")) -> bytes:
    return tuple_of(text("storage"), named("torch", kind), key, location, number(numel)) + b"Q"


def tensor(
    storage: bytes = storage(),
    offset: bytes = number(0),
    size: bytes = tuple_of(number(4)),
    stride: bytes = tuple_of(number(1)),
) -> bytes:
    hooks = call(named("collections", "OrderedDict"))
    return call(named("torch._utils", "_rebuild_tensor_v2"), storage, offset, size, stride, b"\x89", hooks)


def program(body: bytes, protocol: int = 2) -> bytes:
    return b"\x80" + bytes([protocol]) + body + b"."


def laughs(levels: int, width: int, kind: str = "list", leaf: bytes = text("ha")) -> bytes:
    """A value that is tiny in the file and ``width ** levels`` times its leaf when it is written out."""
    out = leaf + put(MEMO) + b"0"
    for n in range(levels):
        refs = get(MEMO + n) * width
        match kind:
            case "tuple":
                made = b"(" + refs + b"t"
            case "dict":
                made = dict_of(*(text(str(k)) + get(MEMO + n) for k in range(width)))
            case "record":
                made = named("a", "Record") + b"(" + refs + b"tR"
            case "deque":
                made = call(named("collections", "deque"), b"](" + refs + b"e")
            case _:
                made = b"](" + refs + b"e"
        out += made + put(MEMO + n + 1) + b"0"
    return out + get(MEMO + levels)


def nested(levels: int, kind: str) -> bytes:
    """One element inside the other, a few bytes per level."""
    match kind:
        case "tuple":
            return b")" + b"\x85" * levels
        case "dict":
            return b"}K\x01" * levels + b"N" + b"s" * levels
        case "dict value":
            return b"}X\x01\0\0\0a" * levels + b"N" + b"s" * levels
        case "frozenset":
            return b"(" * levels + b"N" + b"\x91" * levels
        case "record" | "slice" | "deque":
            what = {"slice": ("builtins", "slice"), "deque": ("collections", "deque")}.get(kind, ("a", "Record"))
            start = named(*what) + put(MEMO) + b"0"
            if kind == "deque":
                return start + (get(MEMO) + b"](") * levels + b"N" + b"e\x85R" * levels
            return start + get(MEMO) * levels + b"N" + b"\x85R" * levels
        case "state":
            start = named("a", "Record") + b")R" + put(MEMO) + b"0"
            return start + named("a", "Record") + b")R" + (named("a", "Record") + b")R") * levels + b"b" * levels
        case _:
            return b"]" * levels + b"N" + b"a" * levels


def torch_zip(
    data: bytes,
    storages: Mapping[str, bytes] | None = None,
    more: Mapping[str, bytes] | None = None,
    prefix: str = "archive/",
) -> bytes:
    """The bytes of a zip laid out as torch.save does, written by Python's zipfile."""
    records = {"data.pkl": data, "byteorder": b"little"} | dict(more or {})
    records |= {f"data/{key}": value for key, value in (storages or {"0": bytes(range(16))}).items()}
    return zip_of({prefix + name: value for name, value in (records | {"version": b"3\n"}).items()})


def zip_of(records: Mapping[str, bytes], **options: Any) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", **options) as archive:
        for name, value in records.items():
            archive.writestr(name, value)
    return file.getvalue()


def legacy(root: bytes, keys: bytes, storages: bytes = struct.pack("<q4f", 4, 1, 2, 3, 4)) -> bytes:
    """A file as torch.save wrote it before 1.6, of these two pickles."""
    magic, version = pickle.dumps(0x1950A86A20F9469CFC6C, 2), pickle.dumps(1001, 2)
    system = pickle.dumps({"protocol_version": 1001, "little_endian": True, "type_sizes": {"short": 2}}, 2)
    return magic + version + system + root + keys + storages


def write_pickle(path: Path, data: bytes) -> Path:
    """A torch file whose data.pkl is this very pickle."""
    path.write_bytes(torch_zip(data))
    return path


def machine(data: bytes) -> Any:
    """What the inert machine makes of a pickle."""
    return Pickle(data, "test.pt", REBUILD, persistent_storage).value
