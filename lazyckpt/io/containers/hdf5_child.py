"""A program of its own that parses the structure of an HDF5 file with h5py, within limits of time and memory.

`hdf5` starts it, once for each file: HDF5's library can hang, crash or take any memory on a damaged file, and nothing
in the same process could stop it. It opens no file itself: it asks for ranges of bytes. It imports h5py and numpy only,
and nothing of lazyckpt.

Input: a line of JSON (the path of imports, the size of the file, the bytes of a block, the limits), then for each
range its bytes, or fewer and the end of the input. Output: frames, each the lengths of its JSON and of the bytes behind
it, and both. `hdf5.py` lists what they say.
"""

from __future__ import annotations

import json
import os
import struct
import sys
from contextlib import suppress
from math import prod
from typing import Any

LENGTHS = struct.Struct("<IQ")  # of the JSON, and of the bytes behind it
MOST_CHUNKS = 1 << 20  # of one dataset
INLINE = 64 << 10  # bytes; HDF5 keeps less than that in an object's header
ROWS = 4096  # chunks of a frame
BYTES = "bytes"  # the key of an object that stands for bytes, in hexadecimal
_KEPT = 16 << 20  # bytes of blocks in memory
_MOST = 4096  # elements of an attribute
_LARGEST = 1 << 20  # bytes of an attribute
_DEPTH = 100  # groups, one within the other
_UNREADABLE = (OSError, TypeError, ValueError, RuntimeError, KeyError)  # what h5py raises for damaged files


class NotReadError(Exception):
    """A dataset that is valid and not read; the message says why in a few words."""


def send(said: dict[str, Any], data: bytes = b"") -> None:
    """Write a frame."""
    text = json.dumps(said, default=lambda value: {BYTES: value.hex()}).encode()
    sys.stdout.buffer.write(LENGTHS.pack(len(text), len(data)) + text + data)


class Ranges:
    """The file, for h5py: it reads small pieces of the metadata, which are asked for in blocks."""

    def __init__(self, size: int, step: int) -> None:
        self.size, self._step, self._at = size, step, 0
        self._blocks: dict[int, bytes] = {}

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = {0: 0, 1: self._at, 2: self.size}[whence] + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        stop = self.size if size < 0 else min(self.size, self._at + size)
        data = self._between(self._at, stop) if stop > self._at else b""
        self._at += len(data)
        return data

    def readinto(self, target: Any) -> int:
        """Read into a buffer of HDF5, which fills what is behind the end with zeros. Raises OSError for a buffer that
        is larger than the file: a damaged length, for which HDF5 would touch so much memory."""
        if len(target) > max(self.size, self._step):
            raise OSError(f"{len(target):,} bytes of a file of {self.size:,}")
        data = self.read(len(target))
        target[: len(data)] = data
        return len(data)

    def _between(self, start: int, stop: int) -> bytes:
        if stop - start > self._step:
            return self._asked(start, stop - start)
        parts = [self._block(n) for n in range(start // self._step, (stop - 1) // self._step + 1)]
        first = start - start // self._step * self._step
        return b"".join(parts)[first : first + stop - start]

    def _block(self, n: int) -> bytes:
        found = self._blocks.pop(n, None)
        if found is None:
            start = n * self._step
            found = self._asked(start, min(self._step, self.size - start))
            if len(self._blocks) >= _KEPT // self._step:
                del self._blocks[next(iter(self._blocks))]
        self._blocks[n] = found  # the last, that was used last
        return found

    def _asked(self, start: int, size: int) -> bytes:
        send({"says": "read", "start": start, "size": size})
        sys.stdout.buffer.flush()
        data = sys.stdin.buffer.read(size)
        if len(data) < size:
            os._exit(0)  # the process that started this one has ended
        return data


class Walk:
    """Tells the groups, datasets and attributes of a file."""

    def __init__(self, h5py: Any, numpy: Any, size: int) -> None:
        self.h5py, self.numpy, self.size = h5py, numpy, size
        self.seen: dict[Any, str] = {}

    def walk(self, root: Any) -> None:
        groups = [("", root, 0)]
        self.seen[self.h5py.h5o.get_info(root.id).addr] = ""
        while groups:
            path, group, depth = groups.pop()
            self._note(path, group)
            inner = []
            for name in group:
                one = f"{path}/{name}" if path else name
                link = group.get(name, getlink=True)
                if isinstance(link, self.h5py.ExternalLink):
                    self._refuse(one, "a link into another file, which is not followed")
                    continue
                if not isinstance(link, self.h5py.HardLink):
                    self._refuse(one, "a soft link, which is not followed")
                    continue
                item = group[name]
                if isinstance(item, self.h5py.Group):
                    key = self.h5py.h5o.get_info(item.id).addr
                    if key in self.seen or depth >= _DEPTH:
                        self._refuse(one, "a second link to a group that is read elsewhere")
                        continue
                    self.seen[key] = one
                    inner.append((one, item, depth + 1))
                elif isinstance(item, self.h5py.Dataset):
                    self._dataset(one, item)
            groups += reversed(inner)

    def _refuse(self, path: str, why: str) -> None:
        send({"says": "refused", "path": path, "why": why})

    def _note(self, path: str, item: Any) -> None:
        np = self.numpy
        for name in item.attrs:
            try:
                about = item.attrs.get_id(name)
                count = prod(about.shape or ())
                if about.get_storage_size() > self.size or count * about.dtype.itemsize > _LARGEST or count > _MOST:
                    continue  # damaged, or no text and no few numbers
                value = item.attrs[name]
            except _UNREADABLE:
                continue  # of a type that h5py does not know, or damaged
            if isinstance(value, np.generic | np.ndarray) and value.dtype.kind in "biufSU" and value.size <= _MOST:
                value = value.tolist()
            if isinstance(value, str | int | float | bool | list):
                send({"says": "attribute", "path": path, "name": str(name), "value": value})

    def _dataset(self, path: str, item: Any) -> None:
        key = self.h5py.h5o.get_info(item.id).addr
        first = self.seen.setdefault(key, path)
        if first != path:
            send({"says": "alias", "path": path, "of": first})
            return
        self._note(path, item)
        try:
            self._spec(path, item)
        except NotReadError as e:
            self._refuse(path, str(e))

    def _spec(self, path: str, item: Any) -> None:
        h5d = self.h5py.h5d
        if item.is_virtual:
            raise NotReadError("a virtual dataset, whose elements are in other files")
        if item.external:
            raise NotReadError("a dataset whose elements are in another file, which is not opened")
        if item.shape is None:
            raise NotReadError("an empty dataset without a shape")
        shape = [int(n) for n in item.shape]
        code, swapped = dtype_of(item, self.h5py)
        said = {"says": "dataset", "path": path, "dtype": code, "swapped": swapped, "shape": shape, "layout": "none"}
        create = item.id.get_create_plist()
        layout = None if 0 in shape else create.get_layout()
        if layout == h5d.CONTIGUOUS:
            offset = item.id.get_offset()
            fill = self._fill(item, code) if offset is None else b""
            send(said | {"layout": "contiguous", "offset": offset, "fill": fill})
        elif layout == h5d.COMPACT:
            data = b""
            if prod(shape) * item.dtype.itemsize <= INLINE:
                raw = self.numpy.empty(shape, item.dtype)
                item.id.read(self.h5py.h5s.ALL, self.h5py.h5s.ALL, raw, item.id.get_type())
                data = raw.tobytes()
            send(said | {"layout": "compact"}, data)
        elif layout == h5d.CHUNKED:
            cell = [int(n) for n in item.chunks]
            filters = [self._filter(create, n) for n in range(create.get_nfilters())]
            count = item.id.get_num_chunks()
            about = {"layout": "chunked", "cell": cell, "filters": filters, "count": count}
            send(said | about | {"fill": self._fill(item, code)})
            cells = prod(
                -(-n // max(1, size)) for n, size in zip(shape, cell, strict=False)
            )  # (the reader checks them)
            self._chunks(item, count if max(count, cells) <= MOST_CHUNKS else 0)
        elif layout is None:
            send(said)
        else:
            raise NotReadError("a dataset of a layout that lazyckpt does not know")

    def _filter(self, create: Any, n: int) -> list[Any]:
        code, _, values, name = create.get_filter(n)
        return [code, int(values[0]) if values else None, repr(name)[:40]]

    def _chunks(self, item: Any, count: int) -> None:
        """Tell the chunks: for each its first element, offset, size and mask of filters, as 64-bit numbers."""
        rows: list[tuple[int, ...]] = []

        def note(info: Any) -> None:
            if info.byte_offset is not None:
                rows.append((*info.chunk_offset, info.byte_offset, info.size, info.filter_mask))
            if len(rows) == ROWS:
                tell()

        def tell() -> None:
            send({"says": "chunks", "count": len(rows)}, self.numpy.array(rows, "<u8").tobytes())
            rows.clear()

        if count and hasattr(item.id, "chunk_iter"):  # which takes no time that grows with the square of the count
            item.id.chunk_iter(note)
        else:
            for n in range(count):
                note(item.id.get_chunk_info(n))
        if rows:
            tell()
        send({"says": "chunks", "count": 0})

    def _fill(self, item: Any, code: str) -> bytes:
        """Return the bytes of one element, little-endian; none for zeros."""
        value = None if code == "bfloat16" else item.fillvalue
        return b"" if value is None else self.numpy.asarray(value).astype(item.dtype.newbyteorder("<")).tobytes()


def dtype_of(item: Any, h5py: Any) -> tuple[str, bool]:
    """Return numpy's code of a dataset's dtype (``f4``) or "bfloat16", and whether it is big-endian. Raises
    NotReadError for what is no number."""
    try:
        dtype = item.dtype
    except TypeError as e:
        raise NotReadError(f"of a type that numpy lacks ({e!s:.60})") from None
    kind = item.id.get_type()
    told = item.attrs.get("dtype")
    if dtype.kind == "V" and dtype.names is None and dtype.itemsize == 2 and told in ("bfloat16", b"bfloat16"):
        return "bfloat16", False  # as Keras marks it (saving_lib.H5IOStore)
    if str(dtype) == "bfloat16":
        return "bfloat16", bool(kind.get_order() == h5py.h5t.ORDER_BE)
    if h5py.check_enum_dtype(dtype) is not None and dtype.kind != "b":
        raise NotReadError("an enumeration")
    if dtype.kind not in "biufc" or dtype.subdtype is not None:
        raise NotReadError(f"not of numbers that torch has ({dtype!s:.40})")
    if isinstance(kind, h5py.h5t.TypeIntegerID) and kind.get_precision() != 8 * dtype.itemsize:
        raise NotReadError(f"of integers of {kind.get_precision()} bits")
    if isinstance(kind, h5py.h5t.TypeFloatID):
        fields = {2: (15, 10, 5, 0, 10), 4: (31, 23, 8, 0, 23), 8: (63, 52, 11, 0, 52)}
        if dtype.itemsize in fields and tuple(kind.get_fields()) != fields[dtype.itemsize]:
            raise NotReadError("of floats that are not IEEE's")
    return dtype.str[1:], dtype.str.startswith(">")


def limit(memory: int, seconds: int) -> None:
    """Limit the memory and the time of a processor that this process takes from now on, where the system can."""
    try:
        import resource
    except ImportError:  # Windows
        return
    used = 0
    with suppress(OSError), open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    spent = resource.getrusage(resource.RUSAGE_SELF)
    time = int(spent.ru_utime + spent.ru_stime) + 1 + seconds
    for what, wanted in ((resource.RLIMIT_AS, used + memory), (resource.RLIMIT_CPU, time), (resource.RLIMIT_CORE, 0)):
        with suppress(OSError, ValueError):  # macOS refuses some
            _, hard = resource.getrlimit(what)
            resource.setrlimit(what, (wanted if hard < 0 else min(wanted, hard), hard))


def main() -> None:
    """Read the input, tell the structure."""
    about = json.loads(sys.stdin.buffer.readline())
    sys.path[:] = about["path"]
    try:
        import h5py
        import numpy
    except ImportError as e:
        send({"says": "missing", "why": str(e)[:200]})
        return
    send({"says": "ready"})
    sys.stdout.buffer.flush()
    limit(about["memory"], about["seconds"])
    try:
        with h5py.File(Ranges(about["size"], about["step"]), "r") as h5:
            if h5.userblock_size:
                send({"says": "behind", "size": h5.userblock_size})
                return
            Walk(h5py, numpy, about["size"]).walk(h5)
            send({"says": "done"})
            sys.stdout.buffer.flush()
            os._exit(0)  # closing it could crash, too
    except MemoryError:
        send({"says": "failed", "why": "it takes too much memory"})
    except _UNREADABLE as e:
        send({"says": "failed", "why": f"{e!s:.120}"})


if __name__ == "__main__":
    main()
