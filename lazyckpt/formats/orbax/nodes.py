"""Decoding of what an OCDBT database consists of: the manifest, nodes of the version tree, and nodes of the B+tree.

All three are framed alike: a magic number, the length, a version, a compression, the body, and a CRC32C of it all. The
body is columns of numbers of variable length.
Source: tensorstore, kvstore/ocdbt/index.rst ("Storage format") and kvstore/ocdbt/format/ (codec_util.cc,
config_codec.h, manifest.cc, version_tree_codec.h, btree.cc, btree_codec.h, data_file_id_codec.cc).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...errors import CorruptError, FormatError
from ...io.codecs import unpack_zstd
from ..shared.paths import inside

MANIFEST, VERSIONS, BTREE = 0x0CDB3A2A, 0x0CDB1234, 0x0CDB20DE
_LEAST = 16  # bytes of a magic number, a length and a checksum
_MOST = 1 << 31  # bytes of an unpacked node
_ARITY = 1 << 20  # entries of a node
_KEY = (1 << 16) - 1  # bytes of a key, and of the path of a file
_INLINE = 1 << 20  # bytes of a value that is in a node
_FEW = 32  # numbers that are decoded one by one
_NONE = (1 << 63) - 1  # an offset that no file has


class Ref(NamedTuple):
    """Where a node is. ``base`` is the part of the file's path that the paths in the node begin with."""

    path: str
    offset: int
    length: int
    base: str = ""


class Root(NamedTuple):
    """The root of a B+tree: one version of the database. ``node`` is None if the version has no keys."""

    generation: int
    height: int
    node: Ref | None


@dataclass(frozen=True, slots=True)
class Manifest:
    """The latest versions of a database, the newest last. ``numbered``: they are in other files, with numbers."""

    numbered: bool
    versions: tuple[Root, ...]


@dataclass(frozen=True, slots=True)
class Leaf:
    """Keys and their values: in files, or inline."""

    keys: list[bytes]
    lengths: NDArray[np.int64]
    files: list[str]
    numbers: NDArray[np.int64]
    """For each key the number of its file in ``files``; -1 if the value is inline."""
    offsets: NDArray[np.int64]
    inline: dict[int, bytes]


@dataclass(frozen=True, slots=True)
class Interior:
    """The children of a node, each with its first key and the length of the prefix that all of its keys share."""

    keys: list[bytes]
    shared: list[int]
    children: list[Ref]


class _Body:
    """A body that is read from its start to its end."""

    def __init__(self, data: bytes, where: str) -> None:
        self.data, self.where = data, where
        self._bytes = np.frombuffer(data, np.uint8)
        self.at = 0

    def take(self, count: int) -> bytes:
        if count < 0 or self.at + count > len(self.data):
            raise self.damaged("it ends too early")
        self.at += count
        return self.data[self.at - count : self.at]

    def byte(self) -> int:
        return self.take(1)[0]

    def number(self) -> int:
        """A number: seven bits in each byte, the lowest first."""
        value = shift = 0
        while True:
            byte = self.byte()
            value |= (byte & 127) << shift
            if byte < 128:
                break
            shift += 7
            if shift > 63:
                raise self.damaged("a number has more than 64 bits")
        return min(value, _NONE)  # 64 bits, all of them set, stand for a node that is not there

    def numbers(self, count: int) -> NDArray[np.int64]:
        """A column of numbers."""
        if count > len(self.data) - self.at:
            raise self.damaged(f"a column of {count:,} numbers in {len(self.data) - self.at:,} bytes")
        if count <= _FEW:
            return np.array([self.number() for _ in range(count)], np.int64)
        width = 2 * count
        while True:
            rest = self._bytes[self.at : self.at + width]
            ends = np.flatnonzero(rest < 128)[:count]
            if len(ends) == count:
                break
            if self.at + width >= len(self.data):
                raise self.damaged("it ends too early")
            width *= 2
        starts = np.concatenate(([0], ends[:-1] + 1))
        sizes = ends - starts + 1
        longest = int(sizes.max())
        if longest > 9:
            return np.array([self.number() for _ in range(count)], np.int64)
        values = np.zeros(count, np.int64)
        for n in range(longest):
            have = sizes > n
            values[have] |= (rest[starts[have] + n].astype(np.int64) & 127) << (7 * n)
        self.at += int(ends[-1]) + 1
        return values

    def strings(self, prefixes: list[int], suffixes: list[int]) -> list[bytes]:
        """Texts, each of which shares a prefix with the one before it."""
        if sum(suffixes) > len(self.data) - self.at:
            raise self.damaged("it ends too early")
        data, at, last = self.data, self.at, b""
        found = []
        for prefix, suffix in zip(prefixes, suffixes, strict=True):
            if prefix > len(last) or prefix + suffix > _KEY:
                raise self.damaged(f"a text of {prefix + suffix:,} bytes shares {prefix:,} with one of {len(last):,}")
            last = last[:prefix] + data[at : at + suffix]
            at += suffix
            found.append(last)
        self.at = at
        return found

    def files(self, base: str) -> list[tuple[str, str]]:
        """The table of files: for each, its path and the base of the paths in it. ``base`` is that of this node. What
        is not there has an empty path."""
        count = self.number()
        if not count:
            return []
        prefixes = [0, *self.numbers(count - 1).tolist()]
        suffixes = self.numbers(count).tolist()
        bases = self.numbers(count).tolist()
        found = []
        for path, length in zip(self.strings(prefixes, suffixes), bases, strict=True):
            try:
                text = path.decode()
                own = path[:length].decode()
            except UnicodeDecodeError:
                raise self.damaged(f"the path {path!r:.80} of a file") from None
            if length > len(path) or (path and not inside(base + text)) or ".." in (base + text).split("/"):
                raise CorruptError(
                    f"{self.where} refers to {base + text!r:.80}, outside its folder: damaged or hostile"
                )
            found.append((base + text, base + own))
        return found

    def refs(self, count: int, files: list[tuple[str, str]]) -> list[Ref | None]:
        """References to nodes; None where there is none."""
        numbers, offsets, lengths = (self.numbers(count).tolist() for _ in range(3))
        found: list[Ref | None] = []
        for number, offset, length in zip(numbers, offsets, lengths, strict=True):
            if offset == length == 0 or offset >= _NONE:
                found.append(None)
                continue
            if number >= len(files) or not files[number][0]:
                raise self.damaged(f"file {number:,} of {len(files):,}")
            found.append(Ref(files[number][0], offset, length, files[number][1]))
        return found

    def times(self, count: int) -> None:
        self.take(8 * count)

    def end(self) -> None:
        if self.at != len(self.data):
            raise self.damaged(f"{len(self.data) - self.at:,} bytes are left over")

    def damaged(self, why: str) -> CorruptError:
        return CorruptError(f"{self.where} is damaged: {why}. Copy it again from its source")


def _unframed(data: bytes, magic: int, where: str) -> _Body:
    """Check the frame of a node and unpack its body. Raises CorruptError, or FormatError for a later version."""
    import google_crc32c

    if len(data) < _LEAST or int.from_bytes(data[:4], "big") != magic:
        raise CorruptError(f"{where} is no part of an OCDBT database (it begins with {data[:4].hex()!r}): damaged")
    length = int.from_bytes(data[4:12], "little")
    if length != len(data):
        raise CorruptError(f"{where} has {len(data):,} bytes and says {length:,}: truncated or damaged")
    if google_crc32c.value(data[:-4]) != int.from_bytes(data[-4:], "little"):
        raise CorruptError(f"{where} does not have its checksum: damaged. Copy it again from its source")
    head = _Body(data[12:-4], where)
    version, packing = head.number(), head.number()
    if version or packing > 1:
        raise FormatError(
            f"{where} is of version {version} and compression {packing} of OCDBT; lazyckpt reads version 0, "
            "and none or zstd (1)"
        )
    body = head.data[head.at :]
    return _Body(bytes(unpack_zstd(body, where, min(_MOST, 64 * len(body)))) if packing else body, where)


def manifest(data: bytes, where: str) -> Manifest:
    """Decode a manifest. Raises CorruptError or FormatError."""
    body = _unframed(data, MANIFEST, where)
    body.take(16)  # the database's id
    kind = body.byte()
    body.numbers(2)  # limits for writers
    arity = body.byte()
    if kind > 1 or not 0 < arity <= 16:
        raise FormatError(f"{where}: a manifest of kind {kind}, which lazyckpt does not know")
    packing = body.number()
    if packing == 1:
        body.take(4)
    if kind == 1 and body.at == len(body.data):
        return Manifest(True, ())
    files = body.files("")
    versions = _roots(body, files)
    count = body.number()  # of the nodes with older versions
    body.numbers(count)
    body.refs(count, files)
    body.numbers(count)
    body.times(count)
    body.take(count)
    body.end()
    return Manifest(False, versions)


def _roots(body: _Body, files: list[tuple[str, str]]) -> tuple[Root, ...]:
    count = body.number()
    generations = body.numbers(count).tolist()
    heights = body.take(count)
    nodes = body.refs(count, files)
    for _ in range(3):  # statistics
        body.numbers(count)
    body.times(count)
    if not count or sorted(set(generations)) != generations:
        raise body.damaged("its versions are not in order")
    return tuple(map(Root, generations, heights, nodes))


def node(data: bytes, height: int, base: str, where: str) -> Leaf | Interior:
    """Decode a node of the B+tree. Raises CorruptError or FormatError.

    Parameters
    ----------
    data
        The bytes of the node.
    height
        The height that the node above it says; 0 for a leaf.
    base
        What the paths of files in the node begin with.
    where
        The node, for messages.
    """
    body = _unframed(data, BTREE, where)
    if body.byte() != height:
        raise body.damaged(f"its height is not {height}, as the node above it says")
    files = body.files(base)
    count = body.number()
    if not 0 < count <= _ARITY:
        raise body.damaged(f"it has {count:,} entries")
    prefixes = [0, *body.numbers(count - 1).tolist()]
    suffixes = body.numbers(count).tolist()
    shared = body.numbers(count).tolist() if height else []
    keys = body.strings(prefixes, suffixes)
    if any(a >= b for a, b in pairwise(keys)):
        raise body.damaged("its keys are not in order")
    if height:
        refs = body.refs(count, files)
        for _ in range(3):  # statistics
            body.numbers(count)
        body.end()
        children = [ref for ref in refs if ref is not None]
        if len(children) < count or any(n > len(key) for n, key in zip(shared, keys, strict=True)):
            raise body.damaged("a child has no place, or a longer prefix than its key")
        return Interior(keys, shared, children)
    lengths = body.numbers(count)
    kinds = np.frombuffer(body.take(count), np.uint8)
    if (kinds > 1).any():
        raise body.damaged("a value is of an unknown kind")
    away = np.flatnonzero(kinds)
    numbers, offsets = np.full(count, -1, np.int64), np.zeros(count, np.int64)
    numbers[away] = body.numbers(len(away))
    offsets[away] = body.numbers(len(away))
    if (numbers >= len(files)).any() or (offsets > _NONE - lengths).any():
        raise body.damaged("a value is in no file")
    here = np.flatnonzero(kinds == 0)
    sizes = lengths[here].tolist()
    if any(size > _INLINE for size in sizes):
        raise body.damaged("a value in it is too long")
    ends = list(accumulate(sizes, initial=0))
    values = body.take(ends[-1])
    inline = {int(n): values[a:b] for n, a, b in zip(here.tolist(), ends, ends[1:], strict=False)}
    body.end()
    return Leaf(keys, lengths, [path for path, _ in files], numbers, offsets, inline)
