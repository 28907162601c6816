"""Pickles of numpy arrays (pickle.dump, protocols 2 to 5), as inert data.

Writers: numpy/_core/src/multiarray/methods.c (`array_reduce`, `array_reduce_ex_picklebuffer`, `array_setstate`), the
pickler of CPython. Names are paths in the object, joined by dots. Byte strings from 4 KiB on are read where they lie,
and only when asked for. Protocol 2 of Python 3 has no byte strings: it writes texts, which are decoded on opening.
"""

from __future__ import annotations

from ..core.extents import Extent, Inline
from ..core.index import Index
from ..core.specs import TensorSpec, whole
from ..errors import CorruptError, FormatError, Problem, only_one, some
from ..io.containers.pickle.arrays import NumpyArray
from ..io.containers.pickle.audit import dangers
from ..io.containers.pickle.machine import Pickle
from ..io.containers.pickle.plain import Plain
from ..io.containers.pickle.rebuild import REBUILD, StoredStorage, StoredTensor
from ..io.containers.pickle.records import Distant
from ..io.containers.pickle.skim import skim
from ..io.containers.torch_file import is_torch_file
from ..io.storage.streams import StoreFile
from .reader import Reader, Source
from .torch_save import ties

_PROTOCOLS = range(2, 6)
_JOBLIB, _TORCH = b"joblib.numpy_pickle", b"_load_from_bytes"
_HEAD = 64 << 10  # bytes that name joblib, if it wrote the file


def _recognises(source: Source) -> bool:
    head = source.head
    return bool(source.path) and head[:1] == b"\x80" and head[1:2] in map(_byte, _PROTOCOLS) and not is_torch_file(head)


def _byte(number: int) -> bytes:
    return bytes([number])


def _read(source: Source) -> Index:
    file = StoreFile(source.store, source.path)
    try:
        skimmed = skim(file)
    except CorruptError:
        _refuse_joblib(file, file.at(0, min(file.size, _HEAD)))
        raise
    _refuse_joblib(file, skimmed.data)
    if _TORCH in skimmed.data:  # torch/storage.py `__reduce__`
        raise FormatError(
            f"{file.where} is a plain pickle, not a file of torch.save, and its tensors are files within it: load it "
            "where you trust it and save it again with torch.save"
        )
    pickle = Pickle(skimmed.data, file.where, REBUILD, skimmed.persistent)
    arrays = _Arrays(file)
    plain = Plain(pickle.value, file.where, len(skimmed.data), array=arrays.tensor)
    if not plain.tensors:
        raise FormatError(
            f"{file.where} is a plain pickle, not a file of torch.save, and has no arrays of numpy: load it where you "
            "trust it and save it again"
        )
    specs = {name: arrays.spec(name, tensor) for name, tensor in plain.tensors.items()}
    aliases = ties(plain.tensors)
    problems = [*(note.prefixed(file.path, file.path) for note in (*dangers(pickle.globals), *plain.notes))]
    problems += arrays.problems()
    if behind := file.size - skimmed.end:
        line = f"{file.path}: {behind:,} bytes behind its pickle are not read (several calls of pickle.dump?)"
        problems.append(Problem("oversized-file", line, file.path))
    return Index(
        format="pickle",
        states={"weights": {name: spec for name, spec in specs.items() if name not in aliases}},
        files={file.path: file.info},
        stored=specs,
        aliases=aliases,
        meta=plain.meta if plain.attributes or isinstance(plain.rest, dict) else {"": plain.rest},
        problems=tuple(problems),
    )


def _refuse_joblib(file: StoreFile, data: bytes) -> None:
    if _JOBLIB in data:
        raise FormatError(
            f"{file.where} is a file of joblib.dump, which puts raw bytes between the opcodes of its pickle. Load it "
            "where you trust it, and save its arrays with numpy.savez"
        )


class _Arrays:
    """The arrays of a pickle as tensors, and where their elements are."""

    def __init__(self, file: StoreFile) -> None:
        self._file = file
        self._made: dict[int, StoredTensor | None] = {}  # by the id of the array
        self._extents: dict[int, Extent] = {}  # by the id of the tensor
        self._others: dict[str, list[str]] = {}  # kind of elements -> names of arrays

    def tensor(self, array: NumpyArray, name: str) -> StoredTensor | None:
        """Return an array as a tensor; None if its elements are no numbers."""
        if id(array) not in self._made:
            self._made[id(array)] = self._tensor(array, name)
        return self._made[id(array)]

    def _tensor(self, array: NumpyArray, name: str) -> StoredTensor | None:
        if _has_objects(array):
            self._others.setdefault("Python objects", []).append(name)
            return None
        try:
            found = array.place()
        except ValueError as e:
            raise CorruptError(f"{self._file.where}: {name[:200]!r} is {e}: the file is damaged") from None
        if found.dtype is None:
            self._others.setdefault(found.kind[:40], []).append(name)
            return None
        path, raw = self._file.path, found.raw
        if isinstance(raw, Distant):
            offset, nbytes, data, within = raw.state["offset"], raw.state["nbytes"], None, None
        else:
            offset, nbytes, data = 0, len(raw), bytes(raw)
            within = Inline(path, data)
        storage = StoredStorage(f"{offset}/{id(raw)}", found.dtype, nbytes // found.dtype.itemsize, "cpu", data=data)
        tensor = StoredTensor(storage, found.dtype, 0, found.shape, found.strides)
        at = self._file.start + offset if within is None else 0
        self._extents[id(tensor)] = Extent(
            path, at, found.dtype, found.shape, found.strides, swapped=found.swapped, within=within
        )
        return tensor

    def spec(self, name: str, tensor: StoredTensor) -> TensorSpec:
        """Return the spec of a tensor."""
        if id(tensor) not in self._extents:  # a tensor of torch, whose storage is in no file of torch.save
            raise FormatError(f"{self._file.where}: {name[:200]!r} is a tensor of torch: save it with torch.save")
        return whole(name, self._extents[id(tensor)])

    def problems(self) -> list[Problem]:
        """Return a problem for each kind of elements that torch lacks."""
        return [
            Problem(
                "unsupported-tensor",
                f"not in the view, because their elements are {kind}: {some(names)}",
                only_one(names),
            )
            for kind, names in self._others.items()
        ]


def _has_objects(array: NumpyArray) -> bool:
    """Return whether the elements of an array are Python objects, which the pickle has as a list."""
    return isinstance(array.state, tuple) and len(array.state) == 5 and isinstance(array.state[4], list | tuple)


READER = Reader("pickle", "pickles of numpy arrays, as inert data", _recognises, _read)
