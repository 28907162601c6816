"""Files of DataStates-LLM, an engine that DeepSpeed can write its rank files with in place of torch.save.

Writer: DataStates/datastates-llm, datastates/llm/checkpointing.py `Checkpointing.save_background` (August 2024), and
llm/datastates/engines/engine_simple.py `SimpleCheckpointEngine.save_` (2025). A file has

* the length of the header, 8 bytes, little-endian;
* the header, a JSON object: the path of a tensor, joined by ``|``, to its dtype, shape and place;
  ``datastates_metadata`` has the place of the pickle. Places count from the end of the header;
* the elements of the tensors, and a pickle of the object. In it, tensors in dicts and lists are texts: ``TENSOR|`` and
  the path. Those in tuples and other objects are pickled as they are, with their elements.

In files of 2025, header, tensors and pickle begin at multiples of 4096 bytes. Files of the "state engine" have the
header at their end, at a place that differs between versions, and are not read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

from ...core.box import c_strides, fits
from ...core.dtypes import FROM_NAME
from ...errors import CorruptError
from ..limits import Budget, check_levels
from ..storage.streams import StoreFile
from .pickle.machine import Pickle
from .pickle.rebuild import StoredStorage, StoredTensor, persistent_storage
from .pickle.records import short
from .pickle.trace import Bytes
from .zip_directory import Record

_MOST = 100_000_000  # bytes of a header
_ALIGNED = 4096
_KEY, _TENSOR = "datastates_metadata", "TENSOR|"
_FIRST = re.compile(rb'\{"(datastates_metadata"|(?:[^"\\]|\\.)*": \{"dtype": "torch\.)')
_PICKLED = 256 << 20  # bytes of a pickle
_LEVELS = 100


class DataStates(NamedTuple):
    """What a file holds: the object, the places of its tensors by key, the names in its pickle, the pickle's size in
    bytes."""

    root: Any
    records: dict[str, Record]
    globals: dict[tuple[str, str], bool]
    pickle_size: int


def begins(head: bytes) -> bool:
    """Return whether these are the first bytes of a file whose parts are packed, as far as they tell."""
    return _FIRST.match(head, 8) is not None


def is_datastates(file: Bytes, head: bytes) -> bool:
    """Return whether a file has the header of DataStates. ``head`` are its first 512 bytes."""
    return _start(file, head) is not None


def pickle_in(file: Bytes, head: bytes, where: str) -> int:
    """Return where the pickle of a file of DataStates begins. Raises CorruptError for a damaged file."""
    return _header(file, head, where)[2]


def _start(file: Bytes, head: bytes) -> int | None:
    """Return where the header begins."""
    length = int.from_bytes(head[:8], "little")
    if not 2 <= length <= min(_MOST, file.size - 8):
        return None
    if begins(head):
        return 8
    if len(head) == 512 and not any(head[8:]) and _ALIGNED + length <= file.size:
        return _ALIGNED if file.at(_ALIGNED, 2) == b'{"' else None
    return None


def _header(file: Bytes, head: bytes, where: str) -> tuple[dict[str, Any], int, int]:
    """Return the header without the entry of the pickle, where the data begin, and where the pickle does."""
    start = _start(file, head)
    assert start is not None, "the caller has looked at the head"
    length = int.from_bytes(head[:8], "little")
    try:
        header = json.loads(file.at(start, length))
    except (ValueError, RecursionError) as e:
        raise CorruptError(f"{where}: its header is not JSON ({str(e)[:120]}): the file is damaged") from None
    if not isinstance(header, dict):
        raise CorruptError(f"{where}: its header is no JSON object: the file is damaged")
    check_levels(where, header)
    data = start + length if start == 8 else _ALIGNED + -(-length // _ALIGNED) * _ALIGNED
    begin = data + _place(where, _KEY, header.pop(_KEY, None))[0]
    if not 0 < file.size - begin <= _PICKLED:
        raise CorruptError(
            f"{where}: the pickle of its object begins at byte {begin:,}, the file has {file.size:,}: it is damaged, "
            "or was not written to its end"
        )
    return header, data, begin


def read_datastates(file: StoreFile, head: bytes, rebuild: Mapping[tuple[str, str], Any]) -> DataStates:
    """Read a file of DataStates without the elements of the tensors that its header lists. ``rebuild`` has what the
    globals of its pickle make. Raises CorruptError for a damaged file."""
    header, data, begin = _header(file, head, file.where)
    tensors: dict[str, StoredTensor] = {}
    records: dict[str, Record] = {}
    for key, about in header.items():
        tensors[key] = _tensor(file, key, about)
        first, last = _place(file.where, key, about)
        if last - first != tensors[key].storage.nbytes or data + last > file.size:  # type: ignore[union-attr]
            raise CorruptError(
                f"{file.where}: {short(key)} is said to be at bytes {first:,} to {last:,} of the data, which its shape "
                f"or the file's {file.size:,} bytes contradict: the file is damaged, or was not written to its end"
            )
        records[key] = Record(file.start + data + first, last - first, None)
    pickle = Pickle(file.at(begin, file.size - begin), f"{file.where} (pickle)", rebuild, persistent_storage)
    used: set[str] = set()
    root = _filled(file, pickle.value, tensors, used, Budget(file.where, pickle.end), 0)
    if used != tensors.keys():
        lost = next(iter(tensors.keys() - used))
        raise CorruptError(f"{file.where}: the header has {short(lost)}, the pickle has no such tensor: damaged")
    return DataStates(root, records, pickle.globals, pickle.end)


def _place(where: str, key: str, about: Any) -> tuple[int, int]:
    place = None
    if isinstance(about, dict):
        place = about.get("data_offsets", about.get("offsets"))
    if not (isinstance(place, list) and len(place) == 2 and all(type(n) is int and 0 <= n < 1 << 62 for n in place)):
        raise CorruptError(f"{where}: the header does not say where {short(key)} is: the file is damaged")
    return place[0], place[1]


def _tensor(file: StoreFile, key: str, about: Any) -> StoredTensor:
    kind, sizes = (about.get("dtype"), about.get("shape")) if isinstance(about, dict) else (None, None)
    dtype = FROM_NAME.get(kind.removeprefix("torch.")) if isinstance(kind, str) else None
    shape = tuple(sizes) if isinstance(sizes, list) else (-1,)
    whole = len(shape) <= 64 and all(type(n) is int and 0 <= n < 1 << 62 for n in shape)
    if dtype is None or not whole or not fits(shape, dtype.itemsize):
        raise CorruptError(f"{file.where}: {short(key)} is described as {short(about)}: the file is damaged")
    return StoredTensor(StoredStorage(key, dtype, prod(shape), "cpu"), dtype, 0, shape, c_strides(shape))


def _filled(
    file: StoreFile, value: Any, tensors: Mapping[str, StoredTensor], used: set[str], budget: Budget, depth: int
) -> Any:
    """Return an object with its tensors in place of their texts."""
    budget.objects()
    if depth > _LEVELS:
        raise CorruptError(f"{file.where}: its object is nested deeper than {_LEVELS} levels: hostile or damaged")
    if isinstance(value, str) and value.startswith(_TENSOR):
        key = value.removeprefix(_TENSOR)
        if key not in tensors:
            raise CorruptError(f"{file.where}: the pickle has the tensor {short(key)}, the header has not: damaged")
        used.add(key)
        return tensors[key]
    if type(value) is dict:
        budget.steps(len(value))
        return {k: _filled(file, v, tensors, used, budget, depth + 1) for k, v in value.items()}
    if type(value) is list:
        budget.steps(len(value))
        return [_filled(file, v, tensors, used, budget, depth + 1) for v in value]
    return value
