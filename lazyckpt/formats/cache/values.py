"""Objects as JSON and columns of bytes, and back: the inert data of an index. No file names a class.

Fragments are encoded as documents, which are decoded when they are first used. What many of them share is a document of
its own, which others refer to by its number. Metadata is decoded in the order of encoding: a container that occurs
again, perhaps in itself, is referred to by the number of its first occurrence. Everything is kept exactly, or `NotKept`
says what cannot be kept.
"""

from __future__ import annotations

import argparse
import base64
import dataclasses
import json
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from importlib import import_module
from operator import attrgetter
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any, ClassVar

import numpy as np

from ...core.dtypes import FROM_NAME, DType
from ...core.extents import Extent
from ...core.specs import Fragment
from ...errors import CorruptError, Problem, restored
from ...io.containers.pickle.records import Attributed, Opaque

# Module -> records that are kept field by field: dataclasses, named tuples, and others whose fields `_FIELDS` lists.
_RECORDS = {
    "lazyckpt.core.box": ("Box",),
    "lazyckpt.core.extents": ("Archive", "Chunk", "Codec", "Extent", "Hole", "Inline", "Shard", "ZipEntry"),
    "lazyckpt.core.placement": ("Part", "Placement", "Rank"),
    "lazyckpt.core.specs": ("Expr", "Fragment", "Input", "TensorSpec"),
    "lazyckpt.core.index": ("FileInfo",),
    "lazyckpt.core.blocks": ("Boxes",),
    "lazyckpt.core.flat": ("Interval", "Joined"),
    "lazyckpt.core.compose": ("Composed",),
    "lazyckpt.formats.shared.flat": ("Alike", "FlatFragments", "Partition"),
    "lazyckpt.formats.dcp.chunks": ("ChunkFragments", "StoredItems"),
    "lazyckpt.formats.dcp.items": ("Item",),
    "lazyckpt.formats.ranks.fragments": ("MeshFragments", "Team"),
    "lazyckpt.formats.zarr.grid": ("Array", "Level", "Packing"),
    "lazyckpt.formats.megatron.stacks": ("Regridded",),
    "lazyckpt.formats.orbax.chunks": ("ValueFragments",),
    "lazyckpt.formats.orbax.ocdbt": ("Database", "Values"),
    "lazyckpt.layouts.placements": ("Cut", "Layout", "Same", "Summand"),
    "lazyckpt.io.containers.pickle.plain": ("TensorRef",),
    "lazyckpt.io.containers.pickle.values": ("Device",),
}  # fmt: skip
_FIELDS = {"Alike": ("ranks", "pieces"), "StoredItems": ("_names", "_paths", "_offsets", "_lengths")}
_NUMBERED = [(module, name) for module, names in _RECORDS.items() for name in names]
_NUMBERS = {record: n for n, record in enumerate(_NUMBERED)}
_SHARED = {"Alike", "Database", "Layout", "Team"}  # many tensors have the same
_FEW = 8  # elements of a tuple that is copied rather than shared
_DEEP = 100  # levels of nested objects
_INT = 1 << 8192  # Python refuses to parse the digits of much larger numbers
_ALIGNED = 16
_KINDS = "biufcSU"  # of numpy's dtypes


class NotKept(Exception):
    """An index cannot be represented exactly. The message says why."""


def fields_of(cls: type) -> tuple[str, ...]:
    """Return the attributes of a record in the order of its constructor's parameters."""
    if dataclasses.is_dataclass(cls):
        return tuple(f.name for f in dataclasses.fields(cls) if f.init and f.compare)
    return _FIELDS.get(cls.__name__) or cls._fields  # type: ignore[attr-defined]


def inside(path: object) -> bool:
    """Return whether a path stays in the folder of its store.

    >>> inside("a/b.pt"), inside("../b.pt"), inside("/etc/passwd"), inside("a/../../b")
    (True, False, False, False)
    """
    if type(path) is not str or path.startswith(("/", "\\")) or "\0" in path:
        return False
    return ".." not in path or ".." not in path.replace("\\", "/").split("/")


class _Paths:
    """A check of the fields that hold paths. What was found good is known, because many tensors share it."""

    # field -> the paths in its value
    FIELDS: ClassVar[dict[str, Callable[[Any], Iterable[Any]]]] = {
        "path": lambda path: (path,),
        "paths": lambda paths: paths,
        "_names": lambda paths: paths,
        "files": lambda paths: paths or (),
        "nodes": lambda paths: paths.values(),
        "ranks": lambda ranks: (path for path, *_ in ranks),
    }

    def __init__(self) -> None:
        self._good: set[Any] = set()
        self._held: dict[int, Any] = {}

    def check(self, field: str, value: Any) -> None:
        """Raise NotKept if a path leaves the folder of its store."""
        if type(value) is str:
            if value in self._good:
                return
            self._good.add(value)
        elif id(value) in self._held:
            return
        else:
            self._held[id(value)] = value
        for path in self.FIELDS[field](value):
            if path and not inside(path):  # a hole may have no path
                raise NotKept("a path outside the checkpoint's folder")


class Encoder:
    """Objects to documents. ``lazy``: documents may be decoded in any order."""

    def __init__(self) -> None:
        self.documents: list[bytes] = []
        self.lazy = False
        self.known: Container[str] = ()  # the files of the checkpoint
        self._places: dict[int, int] = {}
        self._numbers: dict[int, int] = {}
        self._held: list[Any] = []  # keeps the ids of `_numbers` valid
        self._texts: dict[bytes, int] = {}
        self._columns: dict[bytes, list[Any]] = {}
        self._open: set[int] = set()  # tuples and records that are being encoded
        self._bytes: list[bytes] = []
        self._end = 0
        self._depth = 0
        self._files: dict[str, int] = {}
        self._likes: dict[Any, int] = {}
        self._paths = _Paths()
        self._any_fragment: Callable[[Any], list[Any]] = self._record(Fragment)
        self._by_type: dict[type, Callable[[Any], Any]] = {
            tuple: self._tuple,
            Fragment: self._fragment,
            list: self._list,
            dict: lambda v: self._node(v, self._dict),
            set: lambda v: self._node(v, lambda v: ["S", *self._all(v)]),
            frozenset: lambda v: ["F", *self._all(v)],
            bytes: lambda v: ["b", base64.b64encode(v).decode()],
            bytearray: lambda v: self._node(v, lambda v: ["B", base64.b64encode(v).decode()]),
            complex: lambda v: ["c", v.real, v.imag],
            range: lambda v: ["R", v.start, v.stop, v.step],
            DType: lambda v: ["D", v.name],
            PurePosixPath: lambda v: ["/", str(v)],
            PureWindowsPath: lambda v: ["\\", str(v)],
            np.ndarray: lambda v: self._node(v, self._array) if not self.lazy else self._array(v),
            Problem: lambda v: ["p", v.code, str(v), v.path],
            Opaque: lambda v: self._node(v, lambda v: ["o", *map(self.value, v.__getstate__())]),
            Attributed: lambda v: self._node(v, self._attributed),
            argparse.Namespace: lambda v: self._node(v, lambda v: ["N", *self._pairs(vars(v))]),
            deque: lambda v: self._node(v, lambda v: ["q", v.maxlen, *self._all(v)]),
        }

    def value(self, value: Any) -> Any:
        """Return a value as JSON. Raises NotKept."""
        kind = type(value)
        if kind is str or kind is bool or value is None or kind is float:
            return value
        if kind is int:
            if not -_INT < value < _INT:
                raise NotKept("an integer of thousands of digits")
            return value
        encode = self._by_type.get(kind)
        if encode is None:
            encode = self._by_type[kind] = self._record(kind)
        self._depth += 1
        if self._depth > _DEEP:
            raise NotKept(f"objects are nested more than {_DEEP} levels deep")
        found = encode(value)
        self._depth -= 1
        return found

    def document(self, value: Any) -> int:
        """Encode a value as a document; return its number. Equal documents have the same number."""
        text = _text(self.value(value))
        number = self._texts.get(text)
        if number is None:
            number = self._texts[text] = len(self.documents)
            self.documents.append(text)
        return number

    def texts(self, texts: Sequence[str]) -> Any:
        """Return texts as one column, far smaller than a list. Raises NotKept."""
        joined = "\n".join(texts)
        if not texts or joined.count("\n") != len(texts) - 1:
            return ["t", *texts]
        try:
            data = joined.encode()
        except UnicodeEncodeError:
            raise NotKept("text with characters that are no text") from None
        known = self._columns.get(data)
        if known is None:
            known = self._columns[data] = ["T", *self._array(np.frombuffer(data, np.uint8))[2:]]
        return known

    @property
    def files(self) -> Any:
        """The paths that fragments refer to by number, after everything else has been encoded."""
        return self.texts(list(self._files))

    @property
    def columns(self) -> bytes:
        """The elements of all arrays."""
        return b"".join(self._bytes)

    def _all(self, values: Any) -> list[Any]:
        return list(map(self.value, values))

    def _pairs(self, table: dict[Any, Any]) -> list[Any]:
        return [self.value(one) for pair in table.items() for one in pair]

    def _dict(self, value: dict[Any, Any]) -> list[Any]:
        return ["d", *self._pairs(value)]

    def _attributed(self, value: Attributed) -> list[Any]:
        state = [self.value(value.state)] if hasattr(value, "state") else []
        return ["A", state, *self._pairs(value)]

    def _node(self, value: Any, encode: Callable[[Any], Any], whole: bool = False) -> list[Any]:
        """Encode an object that may occur more than once. ``whole``: it cannot be created before its content."""
        numbers = self._numbers if self.lazy else self._places
        number = numbers.get(id(value))
        if number is not None:
            if id(value) in self._open:
                raise NotKept("a tuple is in itself")
            return ["n" if self.lazy else "@", number]
        self._held.append(value)
        if whole:
            self._open.add(id(value))
        if self.lazy:
            number = numbers[id(value)] = len(self.documents)
            self.documents.append(b"")
            self.documents[number] = _text(encode(value))
            found = ["n", number]
        else:
            number = numbers[id(value)] = len(numbers)
            found = ["=", number, encode(value)]
        self._open.discard(id(value))
        return found

    def _tuple(self, value: tuple[Any, ...]) -> list[Any]:
        return self._flat(value) if len(value) < _FEW else self._node(value, self._flat, True)

    def _flat(self, value: tuple[Any, ...]) -> list[Any]:
        for one in value:
            if type(one) is not int or not -_INT < one < _INT:
                return ["t", *self._all(value)]
        return ["i", *value]

    def _fragment(self, value: Fragment) -> list[Any]:
        """Encode one of perhaps a million fragments: most differ from others only in file, offset, rank and span."""
        extent, span = value.extent, value.span
        if type(extent) is not Extent or extent.within is not None or value.parts is not None:
            return self._any_fragment(value)
        if extent.path not in self.known:
            return self._any_fragment(value)
        key = (
            extent.dtype, extent.shape, extent.strides, extent.conj, extent.neg, extent.swapped, value.local_shape,
            value.axes,
        )  # fmt: skip
        like, rank = self._likes.get(key), self._likes.get(value.rank)
        if like is None:
            like = self._likes[key] = self.document(key)
        if rank is None:
            rank = self._likes[value.rank] = self.document(value.rank)
        file = self._files.get(extent.path)
        if file is None:
            file = self._files[extent.path] = len(self._files)
        return ["f", file, extent.offset, like, rank, *(() if span is None else span)]

    def _list(self, value: list[Any]) -> list[Any]:
        if self.lazy and len(value) < _FEW:
            return ["l", *self._all(value)]
        return self._node(value, lambda v: ["l", *self._all(v)])

    def _array(self, value: np.ndarray[Any, Any]) -> list[Any]:
        if value.dtype.kind not in _KINDS or value.dtype.hasobject:
            raise NotKept(f"an array of {value.dtype}")
        at = self._end
        data = value.tobytes()
        padding = -len(data) % _ALIGNED
        self._bytes.append(data + b"\0" * padding)
        self._end += len(data) + padding
        return ["a", value.dtype.str, at, *value.shape]

    def _record(self, kind: type) -> Callable[[Any], Any]:
        """Return the function that encodes the objects of a class. Raises NotKept for other classes than records."""
        if kind.__name__ == "Size" and kind.__module__.startswith("lazyckpt."):
            return lambda value: ["z", *value]
        if isinstance(kind, type) and issubclass(kind, np.generic) and np.dtype(kind).kind in "biufc":
            return lambda value: ["g", *self._array(np.asarray(value))[1:]]
        number = _NUMBERS.get((kind.__module__, kind.__qualname__))
        if number is None:
            raise NotKept(f"an object of the class {kind.__qualname__}")
        names = fields_of(kind)
        get: Callable[[Any], tuple[Any, ...]] = lambda value: tuple([getattr(value, name) for name in names])  # noqa: E731
        if len(names) > 1:
            get = attrgetter(*names)
        paths = [(n, name) for n, name in enumerate(names) if name in _Paths.FIELDS]
        value_of, check = self.value, self._paths.check

        def encode(value: Any) -> list[Any]:
            parts = get(value)
            for n, name in paths:
                check(name, parts[n])
            return [number, *map(value_of, parts)]

        if kind.__name__ in _SHARED:
            return lambda value: self._node(value, encode, True)
        return encode


def _text(value: Any) -> bytes:
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), check_circular=False).encode()
    except UnicodeEncodeError:
        raise NotKept("text with characters that are no text") from None


class Decoder:
    """Documents to objects.

    Parameters
    ----------
    text
        The documents, one after the other.
    ends
        Where each document ends in the text; shape [documents].
    columns
        The elements of all arrays.
    """

    def __init__(self, text: memoryview, ends: Sequence[int], columns: memoryview) -> None:
        self._text, self._ends, self._columns = text, ends, columns
        self.copies = False  # whether arrays are copied, so that users may write to them
        self._made: dict[int, Any] = {}
        self._places: dict[int, Any] = {}
        self._checked = _Paths()
        self.files: Sequence[str] = ()
        self._likes: dict[int, Any] = {}
        self._classes: dict[int, tuple[type, list[tuple[int, str]]]] = {}

    def document(self, number: int) -> Any:
        """Return the value of a document. Raises CorruptError if the text does not describe one."""
        return self.checked(lambda: self.value(self.raw(number)))

    def checked(self, read: Callable[[], Any]) -> Any:
        """Return what a function reads. Raises CorruptError if the entry is damaged."""
        try:
            return read()
        except (ValueError, LookupError, TypeError, RecursionError, NotKept) as e:
            raise CorruptError(
                f"an entry of the index cache is damaged ({type(e).__name__}: {str(e)[:80]}): `lazyckpt cache clear` "
                "removes it"
            ) from e

    def value(self, value: Any) -> Any:
        """Return the object of its JSON."""
        if type(value) is not list:
            return value
        tag = value[0]
        if type(tag) is int:
            return self._record(tag, value)
        if tag == "i":
            return tuple(value[1:])
        if tag == "n":
            return self._node(value[1])
        if tag == "t":
            return tuple(map(self.value, value[1:]))
        if tag == "f":
            return self._fragment(*value[1:])
        if tag == "=":
            return self._define(value[2], value[1], self._places)
        if tag == "@":
            return self._places[value[1]]
        return self._other(tag, value, lambda made: made)

    def raw(self, number: int) -> Any:
        """Return the JSON of a document."""
        return json.loads(bytes(self._text[self._ends[number - 1] if number else 0 : self._ends[number]]))

    def _node(self, number: int) -> Any:
        if number not in self._made:
            self._define(self.raw(number), number, self._made)
        return self._made[number]

    def _define(self, value: list[Any], number: int, made: dict[int, Any]) -> Any:
        """Decode an object and store it in ``made``: containers before their content, which may refer to them."""

        def known(one: Any) -> Any:
            made[number] = one
            return one

        tag = value[0]
        return known(self.value(value) if type(tag) is int or tag in ("i", "t") else self._other(tag, value, known))

    def _fragment(self, file: int, offset: int, like: int, rank: int, *span: int) -> Fragment:
        dtype, shape, strides, conj, neg, swapped, local_shape, axes = self._like(like)
        extent = Extent(self.files[file], offset, dtype, shape, strides, conj, neg, swapped)
        lo_hi: Any = span or None
        return Fragment(extent, local_shape, None, lo_hi, self._like(rank), axes)

    def _like(self, number: int) -> Any:
        if number not in self._likes:
            self._likes[number] = self.value(self.raw(number))
        return self._likes[number]

    def _record(self, number: int, value: list[Any]) -> Any:
        known = self._classes.get(number)
        if known is None:
            module, name = _NUMBERED[number]
            cls = getattr(import_module(module), name)
            known = cls, [(n, one) for n, one in enumerate(fields_of(cls)) if one in _Paths.FIELDS]
            self._classes[number] = known
        cls, paths = known
        decode = self.value
        parts = [decode(one) if type(one) is list else one for one in value[1:]]
        for n, name in paths:
            self._checked.check(name, parts[n])
        return cls(*parts)

    def _other(self, tag: str, value: list[Any], known: Callable[[Any], Any]) -> Any:
        rest = value[1:]
        match tag:
            case "l":
                made: Any = known([])
                made.extend(map(self.value, rest))
            case "d":
                made = known({})
                made.update(self._pairs(rest))
            case "S":
                made = known(set())
                made.update(map(self.value, rest))
            case "F":
                made = frozenset(map(self.value, rest))
            case "b":
                made = base64.b64decode(rest[0])
            case "B":
                made = known(bytearray(base64.b64decode(rest[0])))
            case "c":
                made = complex(*rest)
            case "R":
                made = range(*rest)
            case "D":
                made = FROM_NAME[rest[0]]
            case "a":
                made = known(self._array(rest))
            case "/":
                made = PurePosixPath(rest[0])
            case "\\":
                made = PureWindowsPath(rest[0])
            case "T":
                at, count = rest
                made = tuple(str(self._columns[at : at + count], "utf-8").split("\n"))
            case "g":
                made = self._array(rest)[()]
            case "p":
                made = restored(*rest)
            case "o":
                made = known(Opaque("", ""))
                made.__setstate__(tuple(map(self.value, rest)))
            case "A":
                made = known(Attributed())
                made.update(self._pairs(rest[1:]))
                for state in rest[0]:
                    made.state = self.value(state)
            case "N":
                made = known(argparse.Namespace())
                vars(made).update(self._pairs(rest))
            case "q":
                made = known(deque(maxlen=rest[0]))
                made.extend(map(self.value, rest[1:]))
            case "z":
                from ...io.containers.pickle.values import Size

                made = Size(rest)
            case _:
                raise ValueError(f"an unknown tag {tag!r}")
        return made

    def _pairs(self, flat: list[Any]) -> Any:
        values = list(map(self.value, flat))
        return zip(values[::2], values[1::2], strict=True)

    def _array(self, about: list[Any]) -> np.ndarray[Any, Any]:
        dtype, at, *shape = about
        kind = np.dtype(dtype)
        count = int(np.prod(shape, dtype=np.int64))
        if kind.hasobject or at < 0 or count < 0:
            raise ValueError("an array of objects")
        found = np.frombuffer(self._columns[at : at + count * kind.itemsize], kind, count).reshape(shape)
        return found.copy() if self.copies else found
