"""Tar files, as torch.save wrote in the first versions of torch 0.1.

Writer: torch/serialization.py `save` of these versions; today's torch has only the reader (`_legacy_load`,
`legacy_load`). The tar (PAX) has four members:

* ``sys_info``: a pickled dict; nothing depends on it.
* ``pickle``: the object. Its persistent ids are the keys of tensors and storages as texts, or a class with its source.
* ``tensors``: their number; for each the pickle of (key, key of its storage or None, class), then int32 dimensions,
  four unused bytes, int64 sizes, strides and the offset within the storage.
* ``storages``: their number; for each the pickle of (key, location, class), an int64 count and the raw elements, always
  little-endian; then the pickled list of storages that are views: (key, key of the whole, offset, number of elements).
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

from ...core.dtypes import FROM_STORAGE, DType
from ...errors import CorruptError, FormatError
from ..limits import Budget
from ..storage.members import Member, Tree
from ..storage.streams import StoreFile
from .pickle.machine import Pickle
from .pickle.rebuild import REBUILD, StorageType, StoredStorage, StoredTensor
from .pickle.records import Opaque, short
from .tar import read_tar
from .zip_directory import Record

MEMBERS = frozenset(("sys_info", "pickle", "tensors", "storages"))
_WINDOW = 512  # bytes that hold the pickle in front of a tensor or storage
_DIMENSIONS = 64
_KEY = 20  # digits of the largest address


class TorchTar(NamedTuple):
    """What a tar of torch holds: the object, the places of its storages by key, the names in its pickle, the size of
    the pickle in bytes."""

    root: Any
    records: dict[str, Record]
    globals: dict[tuple[str, str], bool]
    pickle_size: int


def is_torch_tar(tree: Tree) -> bool:
    """Return whether a tar is a file of torch.save, and no packed folder."""
    return tree.files.keys() == MEMBERS


def read_torch_tar(file: StoreFile) -> TorchTar:
    """Read a tar of torch.save without the elements of its storages.

    Raises FormatError for another tar, CorruptError for a damaged one."""
    tree = read_tar(file)
    if not is_torch_tar(tree):
        raise FormatError(
            f"{file.where} is a tar, but not one of torch.save. If a folder was packed, give the file the ending .tar"
        )
    budget = Budget(file.where, file.size)
    records: dict[str, Record] = {}
    parts = [_Part(file, name, tree.files[name], budget) for name in ("storages", "tensors")]
    storages = _storages(parts[0], records)
    known: dict[int, StoredStorage | StoredTensor] = {**storages, **_tensors(parts[1], storages)}
    member = tree.files["pickle"]
    where = f"{file.where} (pickle)"

    def persistent(pid: Any) -> Any:
        if isinstance(pid, tuple) and pid and isinstance(pid[0], Opaque):
            return pid[0]  # (class, file, source)
        found = known.get(int(pid)) if type(pid) is str and len(pid) <= _KEY and pid.isdecimal() else None
        if found is None:
            raise CorruptError(f"it refers to {short(pid)}, which is neither a tensor nor a storage of the file")
        return found

    pickle = Pickle(file.at(member.offset, member.size), where, REBUILD, persistent)
    if pickle.end != member.size:
        raise CorruptError(f"{where} has bytes behind the end of its pickle: the file is damaged")
    return TorchTar(pickle.value, records, parts[0].globals | parts[1].globals | pickle.globals, member.size)


class _Part:
    """A member of the tar, read from its start on."""

    def __init__(self, file: StoreFile, name: str, member: Member, budget: Budget) -> None:
        self.where = f"{file.where} ({name})"
        self.start = file.start  # of the tar within its file
        self.globals: dict[tuple[str, str], bool] = {}
        self._file, self._budget = file, budget
        self.at, self._end = member.offset, member.offset + member.size

    def take(self, nbytes: int) -> bytes:
        return self._file.at(self.skip(nbytes), nbytes)

    def skip(self, nbytes: int) -> int:
        """Go over so many bytes; return where they begin."""
        at = self.at
        if nbytes < 0 or at + nbytes > self._end:
            raise CorruptError(
                f"{self.where}: {nbytes:,} bytes are needed at byte {at:,}, it ends at {self._end:,}: the file is "
                "damaged, copy it again from its source"
            )
        self.at += nbytes
        return at

    def pickle(self) -> Any:
        """Return the value of the next pickle."""
        self._budget.objects()
        self._budget.time()
        size, left = min(_WINDOW, self._end - self.at), self._end - self.at
        while True:
            try:
                found = Pickle(self._file.at(self.at, size), self.where, REBUILD, _refuse)
                break
            except CorruptError:
                if size == left:
                    raise
                size = min(left, 16 * size)
        self.at += found.end
        self.globals |= found.globals
        return found.value

    def count(self) -> int:
        """Return the number of the items that follow."""
        found = self.pickle()
        if type(found) is not int or found < 0:
            raise CorruptError(f"{self.where}: its number of items is {short(found)}: the file is damaged")
        return found

    def wrong(self, value: Any) -> CorruptError:
        return CorruptError(f"{self.where}: an item that is described as {short(value)}: the file is damaged")


def _refuse(pid: Any) -> Any:
    raise CorruptError(f"it refers to {short(pid)}")


def _storages(part: _Part, records: dict[str, Record]) -> dict[int, StoredStorage]:
    """Return the storages by key, and add their places to ``records``."""
    found: dict[int, StoredStorage] = {}
    for _ in range(part.count()):
        about = part.pickle()
        if not (isinstance(about, tuple) and len(about) == 3 and type(about[0]) is int and about[0] not in found):
            raise part.wrong(about)
        key, location, kind = about
        if not isinstance(kind, StorageType) or kind.dtype is None or type(location) is not str:
            raise part.wrong(about)
        (numel,) = struct.unpack("<q", part.take(8))
        nbytes = numel * kind.dtype.itemsize
        records[str(key)] = Record(part.start + part.skip(nbytes), nbytes, None)
        found[key] = StoredStorage(str(key), kind.dtype, numel, location)
    views = part.pickle()
    if not isinstance(views, list):
        raise part.wrong(views)
    for view in views:
        if not (isinstance(view, tuple) and len(view) == 4 and all(type(n) is int and n >= 0 for n in view)):
            raise part.wrong(view)
        key, root, start, numel = view
        whole = found.get(root)
        if key in found or whole is None or whole.start is not None or start + numel > whole.numel:
            raise part.wrong(view)
        found[key] = whole._replace(start=start, numel=numel)
    return found


def _tensors(part: _Part, storages: dict[int, StoredStorage]) -> dict[int, StoredTensor]:
    found: dict[int, StoredTensor] = {}
    for _ in range(part.count()):
        about = part.pickle()
        if not (isinstance(about, tuple) and len(about) == 3 and type(about[0]) is int):
            raise part.wrong(about)
        key, of, kind = about
        storage = None if of is None else storages.get(of) if type(of) is int else None
        if key in found or key in storages or (storage is None and of is not None):
            raise part.wrong(about)
        dimensions, _ = struct.unpack("<ii", part.take(8))
        if not 0 <= dimensions <= _DIMENSIONS:
            raise part.wrong(about)
        numbers = struct.unpack(f"<{2 * dimensions + 1}q", part.take(8 * (2 * dimensions + 1)))
        shape, strides, offset = numbers[:dimensions], numbers[dimensions:-1], numbers[-1]
        if not dimensions:  # that version had no scalars: a tensor without dimensions is empty
            shape, strides, offset = (0,), (1,), 0
        dtype = _dtype(kind) if storage is None else storage.dtype
        if dtype is None or (storage is None and 0 not in shape):
            raise part.wrong(about)
        try:
            found[key] = StoredTensor(storage or _EMPTY._replace(dtype=dtype), dtype, offset, shape, strides)
        except CorruptError as e:
            raise CorruptError(f"{part.where}: {e}: the file is damaged") from None
    return found


def _dtype(kind: Any) -> DType | None:
    """Return the dtype of a class of tensors, such as torch.FloatTensor."""
    name = kind.name if isinstance(kind, Opaque) else ""
    return FROM_STORAGE.get(name.removesuffix("Tensor") + "Storage")


_EMPTY = StoredStorage("", None, 0, "cpu", data=b"")  # of a tensor without elements
