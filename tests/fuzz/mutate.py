"""Mutators: from genuine inputs to damaged and hostile ones, blindly or by the structure of their format.

Each grammar is a function from a random generator and seeds to an input. A few inputs of each grammar are mutated
byte by byte, too, so that also what is no longer of the format is tried.
"""

from __future__ import annotations

import io
import json
import pickletools
import random
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from lazyckpt.io.containers.pickle.rebuild import REBUILD

from ..hostility import Entry, raw_zip

Seeds = Sequence[bytes]
Mutator = Callable[[random.Random, Seeds], bytes]

NUMBERS = (
    0, 1, 2, 3, 4, 7, 8, 16, 63, 64, 65, 127, 128, 255, 256, 1000, 32767, 32768, 65535, 65536, 1 << 20, (1 << 24) + 1,
    (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 40, 1 << 53, (1 << 62) - 1, 1 << 62, (1 << 63) - 1, 1 << 63,
    (1 << 64) - 1, 1 << 70, -1, -2, -128, -(1 << 31), -(1 << 63), -(1 << 70),
)  # fmt: skip


def number(rng: random.Random) -> int:
    return rng.choice(NUMBERS) + rng.choice((0, 0, 0, 1, -1))


# -- bytes


def of_bytes(rng: random.Random, seeds: Seeds) -> bytes:
    data = bytearray(rng.choice(seeds))
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        _change_bytes(rng, data, seeds)
    return bytes(data)


def _change_bytes(rng: random.Random, data: bytearray, seeds: Seeds) -> None:
    at = rng.randrange(len(data) + 1)
    match rng.randrange(9):
        case 0 if data:
            data[at % len(data)] ^= 1 << rng.randrange(8)
        case 1 if data:
            data[at % len(data)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        case 2:
            del data[at : at + rng.choice((1, 2, 4, 16, 100))]
        case 3:
            data[at:at] = rng.randbytes(rng.choice((1, 2, 4, 16)))
        case 4:
            data[at:at] = data[at : at + rng.choice((1, 4, 16, 64, 256))]
        case 5:
            width = rng.choice((2, 4, 8))
            value = number(rng) & ((1 << 8 * width) - 1)
            data[at : at + width] = value.to_bytes(width, rng.choice(("little", "big")))
        case 6:
            other = rng.choice(seeds)
            start = rng.randrange(len(other) + 1)
            data[at : at + rng.choice((0, 4, 64))] = other[start : start + rng.choice((1, 8, 64, 512))]
        case 7:
            del data[at:]
        case _:
            data[at : at + 4] = bytes((rng.randrange(256),)) * rng.choice((1, 4, 300))


# -- pickles

_NAMES = [
    *REBUILD, ("os", "system"), ("builtins", "eval"), ("a", "Record"), ("functools", "partial"),
    ("copyreg", "__newobj__"),
    ("torch._utils", "_rebuild_tensor_v2"), ("collections", "OrderedDict"), ("argparse", "Namespace"),
]  # fmt: skip


def _text(value: str) -> bytes:
    raw = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(raw)) + raw


def _opcode(rng: random.Random) -> bytes:
    """Return an opcode with its argument, or a short sequence of them."""
    n = number(rng)
    match rng.randrange(24):
        case 0:
            module, name = rng.choice(_NAMES)
            return b"c" + module.encode() + b"\n" + name.encode() + b"\n"
        case 1:
            module, name = rng.choice(_NAMES)
            return _text(module) + _text(name) + b"\x93"
        case 2:
            return rng.choice((b"q", b"h")) + bytes((n & 255,))
        case 3:
            return rng.choice((b"r", b"j")) + struct.pack("<I", n & 0xFFFFFFFF)
        case 4:
            return rng.choice((b"p", b"g")) + str(n).encode() + b"\n"
        case 5:
            return rng.choice((b"J" + struct.pack("<I", n & 0xFFFFFFFF), b"K" + bytes((n & 255,))))
        case 6:
            raw = n.to_bytes(10, "little", signed=True)
            return rng.choice((b"\x8a" + bytes((rng.choice((10, 10, 0, 255)),)), b"\x8b" + struct.pack("<i", 10))) + raw
        case 7:
            return rng.choice((b"\x82\x01", b"\x83\x01\x00", b"\x84" + struct.pack("<I", n & 0xFFFFFFFF)))
        case 8:
            return rng.choice((b"Pid\n", b"Q", _text("0") + b"Q"))
        case 9:
            raw = rng.randbytes(rng.choice((0, 1, 5)))
            size = rng.choice((len(raw), len(raw), n & (1 << 64) - 1))
            return rng.choice((b"\x96", b"\x8e", b"\x8d")) + struct.pack("<Q", size) + raw
        case 10:
            return b"\x95" + struct.pack("<Q", rng.choice((n & (1 << 64) - 1, rng.randrange(200))))
        case 11:
            return _text(rng.choice(("", "a", "storage", "cpu", "torch", "\ud800", "a" * 300, "state_dict")))
        case 12:
            return rng.choice((b"I01\n", b"I" + str(n).encode() + b"\n", b"L" + str(n).encode() + b"L\n", b"F1e400\n"))
        case 13:
            return b"G" + rng.choice((bytes(8), b"\x7f\xf8" + bytes(6), rng.randbytes(8)))
        case 14:
            return b"(" + rng.choice((b"t", b"l", b"d", b"e", b"u", b"\x90", b"\x91", b"1", b"o", b"ia\nb\n"))
        case 15:
            return rng.choice((b"R", b"b", b"\x81", b"\x92", b"\x93", b"a", b"s", b"e", b"u", b"t", b"\x90", b"\x91"))
        case 16:
            return rng.choice((b"\x94", b"2", b"0", b"1", b"(", b".", b"\x97", b"\x98"))
        case 17:
            return rng.choice((b"]", b"}", b")", b"\x8f", b"N", b"\x88", b"\x89"))
        case 18:
            return rng.choice((b"\x85", b"\x86", b"\x87"))
        case 19:
            return b"2" * rng.choice((2, 50)) + rng.choice((b"t", b"\x87", b""))
        case 20:  # one level of a value that doubles with each
            return b"q\x07h\x07h\x07\x86" * rng.choice((1, 4, 30))
        case 21:
            return rng.choice((b"]", b"(", b"}K\x01", b")\x85")) * rng.choice((3, 2000))
        case 22:
            return b"U" + bytes((3,)) + rng.randbytes(3)
        case _:
            return bytes((rng.randrange(256),))


def _opcodes(data: bytes) -> list[bytes]:
    """Return a pickle as its opcodes with their arguments; what cannot be parsed is one piece at the end."""
    starts: list[int] = []
    with suppress(Exception):  # any damage
        starts.extend(at for _, _, at in pickletools.genops(data) if at is not None)
    if not starts:
        return [data]
    pieces = [data[a:b] for a, b in zip(starts, [*starts[1:], len(data)], strict=True)]
    end = pieces[-1]
    return [*pieces[:-1], end[:1], end[1:]] if end[:1] == b"." and len(end) > 1 else pieces


def of_pickles(rng: random.Random, seeds: Seeds) -> bytes:
    if rng.random() < 0.25:
        return of_bytes(rng, seeds)
    ops = _opcodes(rng.choice(seeds))
    for _ in range(rng.choice((1, 1, 2, 3, 6))):
        at = rng.randrange(len(ops))
        match rng.randrange(8):
            case 0:
                del ops[at : at + rng.choice((1, 1, 2, 5))]
            case 1 | 2:
                ops[at:at] = [_opcode(rng) for _ in range(rng.choice((1, 1, 3)))]
            case 3:
                ops[at] = _opcode(rng)
            case 4:
                ops[at:at] = ops[at : at + rng.choice((1, 2, 10, 50))] * rng.choice((1, 1, 2, 40))
            case 5:
                other = _opcodes(rng.choice(seeds))
                start = rng.randrange(len(other))
                ops[at:at] = other[start : start + rng.choice((1, 5, 40))]
            case 6:
                b = rng.randrange(len(ops))
                ops[at], ops[b] = ops[b], ops[at]
            case _:
                ops[at] = _new_argument(rng, ops[at])
        if not ops:
            ops = [b"."]
    return b"".join(ops)


def _new_argument(rng: random.Random, op: bytes) -> bytes:
    n = number(rng)
    if op[:1] in b"JrjK\x4dqh" and len(op) > 1:
        width = len(op) - 1
        return op[:1] + (n & ((1 << 8 * width) - 1)).to_bytes(width, "little")
    if op[:1] in b"X\x8c" and rng.random() < 0.7:
        return _text(rng.choice(("", "0", "1", "storage", "cpu", "cuda:0", "chunks", "fqn", "x" * 70)))
    if op[:1] == b"c":
        module, name = rng.choice(_NAMES)
        return b"c" + module.encode() + b"\n" + name.encode() + b"\n"
    raw = bytearray(op or b".")
    raw[-1] ^= 1 << rng.randrange(8)
    return bytes(raw)


# -- zips


def of_zips(rng: random.Random, seeds: Seeds) -> bytes:
    """Change the pickle of a torch file, keeping its checksum right, or a field of a zip's records, or its bytes."""
    seed = rng.choice(seeds)
    choice = rng.random()
    if choice < 0.2 or not zipfile.is_zipfile(io.BytesIO(seed)):
        return of_bytes(rng, [seed])
    members = _members(seed)
    if not members:
        return of_bytes(rng, [seed])
    if choice < 0.75:
        (pickled,) = [name for name in members if name.endswith("data.pkl")] or [rng.choice(list(members))]
        members[pickled] = of_pickles(rng, [members[pickled], members[pickled], b"\x80\x02}."])
        return _packed(members)
    if choice < 0.85:
        name = rng.choice(list(members))
        members[name] = of_bytes(rng, [members[name]])
        return _packed(members)
    entries = [Entry(name.encode(), data) for name, data in members.items()]
    for _ in range(rng.choice((1, 1, 2))):
        _change_entry(rng, entries)
    return raw_zip(entries, comment=rng.choice((b"", b"", b"x", b"PK\5\6" + bytes(18))))


# -- tars


_FIELDS = ((0, 100), (124, 12), (156, 1), (157, 100), (257, 8), (345, 155))  # name, size, kind, link, magic, prefix


def of_tars(rng: random.Random, seeds: Seeds) -> bytes:
    """Change a field of a header, keeping its checksum right, or bytes of members, or their order."""
    data = bytearray(rng.choice(seeds))
    if rng.random() < 0.25:
        return of_bytes(rng, [bytes(data)])
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
            found = archive.getmembers()
    except tarfile.TarError:
        found = []
    starts = [block for member in found for block in range(member.offset, member.offset_data, 512)]
    if not starts:
        return of_bytes(rng, [bytes(data)])
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.choice(starts)
        offset, length = rng.choice(_FIELDS)
        n = number(rng) & (1 << 80) - 1
        match length:
            case 12:
                value = rng.choice(
                    (b"%011o\0" % (n % (1 << 33)), b"\x80" + (n % (1 << 88)).to_bytes(11, "big"), b"-1\0", b"\xff" * 12)
                )
            case 1:
                value = bytes([rng.choice(b"01234567xgLKSDMVXN\0QA")])
            case 8:
                value = rng.choice((b"ustar  \0", b"ustar\00000", bytes(8)))
            case _:
                value = rng.choice(
                    (b"", b"../x", b"/x", b"a/../../x", b"run/sub", b"config.json", b"run/", b".", b"\xff" * 90)
                )
        data[at + offset : at + offset + length] = value.ljust(length, b"\0")[:length]
        data[at + 148 : at + 156] = b" " * 8
        data[at + 148 : at + 156] = b"%06o\0 " % sum(data[at : at + 512])
    if rng.random() < 0.2:
        end = rng.choice(starts)
        return bytes(data[:end] + rng.choice((b"", bytes(512), bytes(data[rng.choice(starts) :]))))
    return bytes(data)


def _members(seed: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(seed)) as archive:
        for info in archive.infolist():  # torch may have written no checksums
            info.CRC = None  # type: ignore[assignment]
        return {info.filename: archive.read(info) for info in archive.infolist()}


def _packed(members: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(name), data)  # (which has no time of its own)
    return file.getvalue()


def _change_entry(rng: random.Random, entries: list[Entry]) -> None:
    one = rng.choice(entries)
    n = number(rng) & (1 << 64) - 1
    match rng.randrange(10):
        case 0:
            one.name = rng.choice((b"", b"../x", b"/x", b"archive/data/0", b"a" * 500, b"\xff\xfe", b"archive/version"))
        case 1:
            one.method = rng.choice((0, 8, 12, 14, 99, n & 0xFFFF))
        case 2:
            one.flags = rng.choice((1, 8, 0x800, 0x2000, n & 0xFFFF))
        case 3:
            one.crc = rng.choice((0, n & 0xFFFFFFFF))
        case 4:
            one.size = n
        case 5:
            one.stored = n
        case 6:
            one.offset = rng.choice((0, 1, n))
        case 7:
            entries.append(Entry(one.name, one.data))
        case 8:
            entries.remove(one)
            if not entries:
                entries.append(one)
        case _:
            one.extra = rng.choice((b"\1\0\x18\0" + bytes(24), b"\1\0\xff\xff", rng.randbytes(9), b"FB\4\0ZZZZ"))


# -- JSON

_TEXTS = (
    "", "a", "../x", "/etc/passwd", "a" * 5000, "\u0000", "\ud800", "NaN", "0x1", "-Infinity", "F32", "float32", "<f4",
    "model.safetensors", "[0]", "1" * 400, "a/b", "..", ".", "c:x", "a\\b", "$tuple", "$bytes", "regular", "default",
)  # fmt: skip


def _value(rng: random.Random) -> Any:
    match rng.randrange(12):
        case 0 | 1 | 2:
            return number(rng)
        case 3:
            return rng.choice(_TEXTS)
        case 4:
            return rng.choice((None, True, False))
        case 5:
            return rng.choice((0.5, -1.0, 1e300, 1e-320, float("nan"), float("inf")))
        case 6:
            return [number(rng) for _ in range(rng.choice((0, 1, 2, 70)))]
        case 7:
            return {rng.choice(_TEXTS): number(rng)}
        case 8:
            return {rng.choice(_TAGS): rng.choice((number(rng), rng.choice(_TEXTS), [number(rng)], [[1], "x"], {}))}
        case 9:
            return [rng.choice(_TEXTS)] * rng.choice((1, 3, 100))
        case 10:
            nested: Any = 1
            for _ in range(rng.choice((3, 50, 400))):
                nested = [nested] if rng.random() < 0.5 else {"a": nested}
            return nested
        case _:
            return rng.choice(([], {}))


_TAGS = (
    "$int", "$float", "$surrogates", "$dict", "$namespace", "$tensor", "$opaque", "$size", "$tuple", "$set",
    "$frozenset", "$deque", "$bytes", "$bytearray", "$complex", "$range", "$slice", "$path", "$datetime", "$date",
    "$timedelta", "$timezone", "$decimal", "$torch.dtype", "$torch.device", "$numpy.dtype", "$numpy.array",
    "$numpy.scalar", "$numpy.objects", "$torch.tensor", "name", "configuration", "id",
)  # fmt: skip


def _places(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Return all places in a document: (container, key)."""
    for key, inner in list(value.items() if isinstance(value, dict) else enumerate(value)):
        found.append((value, key))
        if isinstance(inner, dict | list):
            _places(inner, found)
    return found


def changed_json(rng: random.Random, document: Any) -> Any:
    """Return a document with some of its values changed."""
    root = [document]
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        places = _places(root, [])
        container, key = rng.choice(places)
        old = container[key]
        match rng.randrange(7):
            case 0 if container is not root:
                del container[key]
            case 1 if isinstance(container, dict):
                container[rng.choice((*_TEXTS, *_TAGS))] = old
            case 2 if isinstance(old, list):
                old.append(_value(rng) if not old or rng.random() < 0.5 else rng.choice(old))
            case 3 if isinstance(old, int):
                container[key] = old + rng.choice((-1, 1, 8, -8))
            case 4:
                other, place = rng.choice(places)
                container[key] = json.loads(json.dumps(other[place])) if len(json.dumps(other[place])) < 4096 else 0
            case _:
                container[key] = _value(rng)
    return root[0]


def of_json(rng: random.Random, seeds: Seeds) -> bytes:
    seed = rng.choice(seeds)
    if rng.random() < 0.25:
        return of_bytes(rng, [seed, *seeds[:1]])
    try:
        text = json.dumps(changed_json(rng, json.loads(seed)))
    except (ValueError, RecursionError):  # damaged, or nested too deeply by several changes
        return of_bytes(rng, [seed])
    if rng.random() < 0.05:  # a key twice, or numbers that Python's json does not write
        text = rng.choice((text[:-1] + ',"a":1,"a":2}', text.replace("1", "1" * 5000, 1), "[" * 100_000))
    return text.encode("utf-8", "surrogatepass")


def of_lines(rng: random.Random, seeds: Seeds) -> bytes:
    """Change lines of JSON, as in ledgers."""
    lines = rng.choice(seeds).splitlines(keepends=True) or [b"\n"]
    for _ in range(rng.choice((1, 2, 3))):
        at = rng.randrange(len(lines))
        match rng.randrange(4):
            case 0:
                del lines[at]
            case 1:
                lines.insert(at, rng.choice(lines))
            case _:
                lines[at] = of_json(rng, [lines[at]]) + rng.choice((b"\n", b"\n", b""))
        lines = lines or [b"\n"]
    return b"".join(lines)


# -- texts: TOML, names, indices

_TOKENS = (
    b"[", b"]", b"{", b"}", b'"', b"'", b"=", b".", b"*", b"?", b":", b",", b"-", b"0", b"1e999", b"...", b"None",
    b"True", b"\\", b"\n", b"#", b"[rules]", b"0:1", b"::-1", b"9" * 30, b"inf", b"1979-05-27", b"[" * 3000, b"{l}",
    b"\\d+", b"(a+)+$", b"\xf0\x9f\x98\x80", b"[[a]]", b"-" * 500,
)  # fmt: skip


def of_texts(rng: random.Random, seeds: Seeds) -> bytes:
    data = bytearray(rng.choice(seeds))
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(data) + 1)
        if rng.random() < 0.6:
            data[at : at + rng.choice((0, 0, 1, 3))] = rng.choice(_TOKENS)
        else:
            _change_bytes(rng, data, seeds)
    return bytes(data)


# -- safetensors


def of_safetensors(rng: random.Random, seeds: Seeds) -> bytes:
    seed = rng.choice(seeds)
    length = int.from_bytes(seed[:8], "little")
    if rng.random() < 0.2 or length > len(seed) - 8:
        return of_bytes(rng, [seed])
    header, data = seed[8 : 8 + length], seed[8 + length :]
    match rng.randrange(4):
        case 0:
            header = of_bytes(rng, [header])
        case 1:
            header = of_json(rng, [header])
        case _:
            separators = rng.choice(((",", ":"), (", ", ": ")))
            with suppress(ValueError, RecursionError):
                text = json.dumps(changed_json(rng, json.loads(header)), separators=separators, ensure_ascii=False)
                header = text.encode("utf-8", "surrogatepass")
    header += b" " * rng.choice((0, 0, -len(header) % 8))
    size = len(header) if rng.random() < 0.9 else number(rng) & (1 << 64) - 1
    return size.to_bytes(8, "little") + header + data[: rng.choice((len(data), len(data), len(data) // 2))]


# -- chunks with a first byte that chooses the codecs


def of_packed(rng: random.Random, seeds: Seeds) -> bytes:
    data = of_bytes(rng, seeds)
    if rng.random() < 0.1:  # a checksum that is right, over damaged bytes
        return data + zlib.crc32(data).to_bytes(4, "little")
    return data


GRAMMARS: dict[str, Mutator] = {
    "bytes": of_bytes, "pickle": of_pickles, "zip": of_zips, "json": of_json, "lines": of_lines, "text": of_texts,
    "safetensors": of_safetensors, "tar": of_tars, "packed": of_packed,
}  # fmt: skip
