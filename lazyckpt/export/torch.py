"""Files of torch.save, written by torch itself except for the tensors' bytes, which are streamed in afterwards.

Source: torch/serialization.py `skip_data`: storages get their place in the zip, but no data is written. This module
adds the data and the checksum of each record, which torch writes after the data and in the zip's directory.
"""

from __future__ import annotations

import io
import mmap
import os
import struct
import zipfile
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.serialization import skip_data
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..core.box import Shape, c_strides, tiles
from ..core.dtypes import bits_of
from ..core.merkle import Form
from ..errors import DataError
from ..jobs.plan import Layout, Placed, Writable
from ..lazy import LazyArray
from .files import Aliases, FileFormat, Tensors, file_writer

_DESCRIPTOR = b"PK\x07\x08"  # follows a record's data and precedes the checksum
_PER_TENSOR = 512  # maximum bytes of a tensor besides its data and its name


def _size(tensors: Tensors, aliases: Aliases) -> int:
    names = sum(2 * len(name.encode()) + _PER_TENSOR for name in (*tensors, *aliases))
    return sum(t.nbytes for t in tensors.values()) + names + 4096


def _layout(tensors: Tensors, aliases: Aliases) -> Layout:
    return layout_of({**tensors, **{alias: tensors[name] for alias, name in aliases.items()}})


def layout_of(value: Any) -> Layout:
    """Return the torch.save file of an object whose nested dicts, lists and tuples contain `Writable`s in place of
    tensors (the same one twice for a tied tensor).

    Raises DataError if the object contains a torch tensor elsewhere, because its data would not be written.
    """
    tensors = list({id(t): t for t in leaves(value)}.values())
    shown = dict(zip(map(id, tensors), placeholders(tensors), strict=True))
    file = _Sparse()
    with skip_data():
        torch.save(replaced(value, lambda t: shown[id(t)]), file)  # type: ignore[arg-type]
    with zipfile.ZipFile(file) as archive:
        directory = archive.start_dir
        infos = archive.infolist()
    records = {info.filename.split("/", 1)[1]: info for info in infos}
    if f"data/{len(tensors)}" in records:
        raise DataError("an object that is to be saved has tensors in its attributes, which cannot be written")
    # torch numbers storages in the order of pickling
    held = [records[f"data/{n}"] for n in range(len(tensors))]
    placed: list[Placed] = []
    checksums: list[tuple[int, int]] = []
    for n, (info, tensor) in enumerate(zip(held, tensors, strict=True)):
        begin = _data_offset(file, info.header_offset)
        placed.append(Placed(begin, tensor))
        if file.at(begin + info.file_size, 4) == _DESCRIPTOR:
            checksums.append((begin + info.file_size + 4, n))
    numbers = {info.filename: n for n, info in enumerate(held)}
    for at, filename in _entries(file, directory, infos):
        if filename in numbers:
            checksums.append((at + 16, numbers[filename]))
    return Layout(file.size, file.texts, placed, checksums)


def leaves(value: Any) -> Iterator[Any]:
    """Yield the `Writable`s in an object, in the order in which torch.save pickles them."""
    if isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from leaves(inner)
    elif isinstance(value, LazyArray | Held | Viewed):
        yield value


def replaced(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Copy the object with each `Writable` replaced by ``leaf(writable)``; dicts keep their class and attributes."""
    if isinstance(value, LazyArray | Held | Viewed):
        return leaf(value)
    if isinstance(value, dict):
        made = copy(value)
        for key, inner in value.items():
            made[key] = replaced(inner, leaf)
        return made
    if isinstance(value, list):
        made_list = copy(value)
        made_list[:] = [replaced(inner, leaf) for inner in value]
        return made_list
    if type(value) is tuple:
        return tuple(replaced(inner, leaf) for inner in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(replaced(inner, leaf) for inner in value))
    return value


def placeholders(tensors: Sequence[Writable]) -> list[torch.Tensor]:
    """Return tensors of the same shapes and dtypes over memory that is never touched, so that they use only address
    space.

    They overlap, but no two begin at the same address, because torch.save rejects different dtypes at one address.
    """
    span = max((64 * n + t.nbytes for n, t in enumerate(tensors)), default=0)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    memory = mmap.mmap(-1, max(span, mmap.PAGESIZE), flags=flags)
    found = []
    for n, t in enumerate(tensors):
        if t.numel():
            bits = torch.frombuffer(memory, dtype=bits_of(t.itemsize), count=t.numel(), offset=64 * n)
            found.append(bits.view(t.dtype).view(t.shape))
        else:
            found.append(torch.empty(t.shape, dtype=t.dtype, device="cpu"))
    return found


class _Sparse(io.RawIOBase):
    """A file in memory that is written once, from its begin to its end. What is skipped takes no memory."""

    def __init__(self) -> None:
        self._offsets: list[int] = []
        self._parts: list[bytearray] = []
        self._at = self.size = 0

    @property
    def texts(self) -> list[tuple[int, bytes]]:
        """What was written, with offsets."""
        return [(offset, bytes(part)) for offset, part in zip(self._offsets, self._parts, strict=True)]

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self.size)[whence]
        return self._at

    def write(self, data: object) -> int:
        more = memoryview(data).cast("B")  # type: ignore[arg-type]
        if self._at < self.size:
            raise DataError(f"this torch ({torch.__version__}) writes its files in another way than is known")
        if not self._parts or self._at > self.size:
            self._offsets.append(self._at)
            self._parts.append(bytearray())
        self._parts[-1] += more
        self._at += len(more)
        self.size = self._at
        return len(more)

    def readinto(self, out: Any) -> int:
        data = self.at(self._at, min(len(out), max(0, self.size - self._at)))
        out[: len(data)] = data
        self._at += len(data)
        return len(data)

    def at(self, offset: int, nbytes: int) -> bytes:
        """Return bytes; what was skipped is zero."""
        found = bytearray(nbytes)
        n = max(0, bisect_right(self._offsets, offset) - 1)
        while n < len(self._parts) and self._offsets[n] < offset + nbytes:
            begin, part = self._offsets[n], self._parts[n]
            lo, hi = max(begin, offset), min(begin + len(part), offset + nbytes)
            if lo < hi:
                found[lo - offset : hi - offset] = part[lo - begin : hi - begin]
            n += 1
        return bytes(found)


def _data_offset(file: _Sparse, header: int) -> int:
    """Return the offset of a record's data, after its header, name and padding (zip: local file header)."""
    name, extra = struct.unpack("<HH", file.at(header + 26, 4))
    return header + 30 + int(name) + int(extra)


def _entries(file: _Sparse, at: int, infos: list[zipfile.ZipInfo]) -> Iterator[tuple[int, str]]:
    """Yield the offset and the record of each entry of the zip's directory, which begins at byte ``at``."""
    for info in infos:
        yield at, info.filename
        name, extra, comment = struct.unpack("<HHH", file.at(at + 28, 6))
        at += 46 + int(name) + int(extra) + int(comment)


TORCH = FileFormat("pytorch_model", ".bin", (".bin", ".pt", ".pth", ".ckpt"), True, _size, _layout)
WRITER = file_writer("torch", "files of torch.save", TORCH)


# -- torch.save files of a single tensor, alone or concatenated.

_SAVED_DESCRIPTOR = b"PK\x07\x08"  # follows a record's data and precedes the checksum
_ENTRY = b"PK\x01\x02"  # begins an entry of the zip's directory
_RECORD = b"/data/0"


About = tuple[tuple[str, Any], ...]  # the other entries of a dict whose entry "param" is the tensor


class Saved(NamedTuple):
    """A torch.save file without the tensor's bytes, which belong between ``head`` and ``tail``. ``checksums`` are the
    offsets in ``tail`` for the CRC-32 of these bytes."""

    head: bytes
    tail: bytes
    checksums: tuple[int, ...]


class Item(NamedTuple):
    """A torch.save file at an ``offset`` of a larger file: of a tensor, or of a dict with the tensor as "param". If it
    is a part of a tensor, ``whole`` is that tensor, and ``at`` the byte in its C order at which the part begins."""

    offset: int
    tensor: Writable
    about: About | None = None
    whole: Form | None = None
    at: int = 0

    @property
    def around(self) -> Saved:
        """The file's content without the tensor's bytes."""
        return _saved(self.tensor.dtype, tuple(self.tensor.shape), self.about)

    @property
    def length(self) -> int:
        around = self.around
        return len(around.head) + self.tensor.nbytes + len(around.tail)


def row(items: Sequence[Item]) -> Layout:
    """Return the file of concatenated items."""
    texts: list[tuple[int, bytes]] = []
    placed: list[Placed] = []
    checksums: list[tuple[int, int]] = []
    for n, item in enumerate(items):
        around = item.around
        at = item.offset + len(around.head)
        behind = at + item.tensor.nbytes
        texts += [(item.offset, around.head), (behind, around.tail)]
        placed.append(Placed(at, item.tensor, item.whole, item.at))
        checksums += [(behind + place, n) for place in around.checksums]
    size = items[-1].offset + items[-1].length if items else 0
    return Layout(size, texts, placed, checksums)


@lru_cache(maxsize=1 << 12)
def _saved(dtype: torch.dtype, shape: Shape, about: About | None) -> Saved:
    # an expanded scalar, which has this shape but needs no memory
    (shown,) = placeholders([Held(torch.empty((), dtype=dtype, device="cpu").expand(shape))])
    around = _Sparse()
    with skip_data():
        torch.save(shown if about is None else {"param": shown, **dict(about)}, around)  # type: ignore[arg-type]
    (_, head), *behind_gap = around.texts
    if not behind_gap:  # no elements
        return Saved(head, b"", ())
    ((_, tail),) = behind_gap
    name = tail.rfind(_RECORD)
    entry = tail.rfind(_ENTRY, 0, name)
    if entry < 0:
        raise DataError(f"this torch ({torch.__version__}) writes its files in another way than is known")
    behind = (4,) if tail.startswith(_SAVED_DESCRIPTOR) else ()
    return Saved(head, tail, (*behind, entry + 16))


# -- Adapters that make tensors `Writable`.


class Held:
    """A `Writable` over a dense torch tensor on any device, with any strides."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def nbytes(self) -> int:
        return self.numel() * self.itemsize

    @property
    def itemsize(self) -> int:
        return self.tensor.dtype.itemsize

    def numel(self) -> int:
        return self.tensor.numel()

    def pieces(self, nbytes: int) -> Iterator[tuple[int, Held]]:
        """Yield pieces like `LazyArray.pieces`."""
        strides = c_strides(self.shape)
        for box in tiles(self.shape, nbytes // self.itemsize):
            ahead = sum(a * s for a, s in zip(box.start, strides, strict=True))
            yield ahead, Held(self.tensor[box.slices])

    def _runs(self) -> None:
        """Return None, because the tensor is not in a file."""

    def read_into(self, out: torch.Tensor) -> torch.Tensor:
        """Copy the elements to a contiguous CPU tensor of the same shape and dtype."""
        source = self.tensor.resolve_conj().resolve_neg()
        bits = bits_of(self.itemsize)  # not every dtype can be copied with strides
        out.view(bits).copy_(source.view(bits))
        return out


class Viewed:
    """A `Writable` over a lazy tensor's elements in C order, with another shape of the same size."""

    def __init__(self, tensor: LazyArray, shape: Shape) -> None:
        self.tensor = tensor
        self.shape = torch.Size(shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    @property
    def itemsize(self) -> int:
        return self.tensor.itemsize

    def numel(self) -> int:
        return self.tensor.numel()

    def pieces(self, nbytes: int) -> Iterator[tuple[int, Any]]:
        """Yield pieces like `LazyArray.pieces`."""
        return self.tensor.pieces(nbytes)

    def _runs(self) -> Any:
        """Return the same as `LazyArray._runs`."""
        return self.tensor._runs()


def held(tensor: torch.Tensor, name: str) -> Held:
    """Wrap a tensor as `Held`. Raises DataError unless it is a dense tensor whose data is on this rank.

    A DTensor is accepted if this rank holds all of it (its mesh is a single device, or it is replicated). It is not
    gathered: gathering is a collective operation, and a single rank may call this function.
    """
    plain: Any = tensor.detach()
    if hasattr(plain, "full_tensor"):
        spread = [p for n, p in zip(plain.device_mesh.shape, plain.placements, strict=True) if n > 1]
        if not all(p.is_replicate() for p in spread):
            raise DataError(
                f"{name!r} is a DTensor spread over {tuple(plain.device_mesh.shape)} ranks as {tuple(plain.placements)}"
                ": gather it on all of them first (.full_tensor()), or save with torch.distributed.checkpoint and "
                "convert that (dcp_to_safetensors)"
            )
        plain = plain.to_local()
    why = (
        f"a {plain.layout} tensor" if plain.layout != torch.strided
        else "a quantized tensor" if plain.is_quantized
        else "a nested tensor" if plain.is_nested
        else "on the meta device, without data" if plain.is_meta
        else f"a {type(tensor).__name__}, a tensor made of others" if is_traceable_wrapper_subclass(plain)
        else ""
    )  # fmt: skip
    if why:
        raise DataError(f"{name!r} is {why}: only dense tensors that hold their data can be written")
    return Held(plain)
