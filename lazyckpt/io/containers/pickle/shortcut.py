"""One step for the opcodes with which torch's pickler writes a tensor, some forty of them for each tensor.

The bytes are compared with the exact pattern that torch.save writes (torch/_tensor.py `_reduce_ex_internal`, protocol
2): a call of `_rebuild_tensor_v2` with a storage that the pickle names for the first time. Everything else is left to
the machine, which gives the same result for this pattern, too.
"""

from __future__ import annotations

import re
import struct
from typing import Any

from ....core.box import Shape, fits
from ....core.dtypes import U8
from .rebuild import REBUILD, StorageType, StoredStorage, StoredTensor

TENSOR = REBUILD["torch._utils", "_rebuild_tensor_v2"]
_ORDERED_DICT = REBUILD["collections", "OrderedDict"]
MADE = 4  # marks and calls in the pattern, which count as objects of the budget

_GET = rb"(h.|j....)"
_NUMBER = rb"(?:K.|M..|J...[\x00-\x7f])"
_SIZES = rb"(?:(N\x85|NN\x86|NNN\x87|\(N{4,64}t)r(....)|\))".replace(b"N", _NUMBER)
# (storage: "storage", class, key, location, numel), offset, sizes, strides, requires_grad, hooks
_CALL = re.compile(
    rb"\(\(" + _GET + _GET + rb"X([\x01-\x13])\x00\x00\x00([0-9]+)r(....)" + _GET + b"(" + _NUMBER + rb")tr(....)Q"
    b"(" + _NUMBER + b")" + _SIZES + _SIZES + rb"([\x88\x89])" + _GET + rb"\)Rr(....)tr(....)Rr(....)",
    re.DOTALL,
)  # fmt: skip
_PUTS = {n: struct.Struct(f"<{n}I") for n in (5, 6, 7)}
_WIDTHS = {0x4B: 1, 0x4D: 2, 0x4A: 4}  # opcode of a number -> bytes of its operand
_WIDEST = 16  # bytes of the largest element
_MOST = 4096  # cached operands


class _Numbers(dict[bytes, int]):
    """The operands of opcodes, by the bytes of the opcode and its operand."""

    def __missing__(self, code: bytes) -> int:
        if len(self) > _MOST:
            self.clear()
        value = self[code] = int.from_bytes(code[1:], "little")
        return value


class _Sizes(dict[bytes, Shape]):
    """Tuples of numbers, by the bytes of their opcodes. Raises KeyError for a shape that may be too large."""

    def __missing__(self, code: bytes) -> Shape:
        if len(self) > _MOST:
            self.clear()
        at, end = int(code[:1] == b"("), len(code) - 1
        found = []
        while at < end:
            start = at + 1
            at = start + _WIDTHS[code[at]]
            found.append(int.from_bytes(code[start:at], "little"))
        if not fits(found, _WIDEST):
            raise KeyError
        value = self[code] = tuple(found)
        return value


class Tensors:
    """The shortcut for the tensors of one pickle whose persistent ids are those of a zip file of torch.save."""

    __slots__ = ("_data", "_numbers", "_sizes")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._numbers, self._sizes = _Numbers(), _Sizes({b"": ()})

    def read(self, at: int, memo: dict[int, Any]) -> tuple[StoredTensor, int] | None:
        """Return the tensor whose arguments begin at byte ``at`` and the offset behind its call, and add its objects to
        the memo. Return None, and change nothing, if the bytes do not have the pattern or the tensor is invalid."""
        found = _CALL.match(self._data, at)
        if found is None:
            return None
        (
            word, kind, length, key, key_put, place, numel, pid_put, offset,
            sizes, sizes_put, strides, strides_put, grad, hooks, hooks_put, args_put, put,
        ) = found.groups(b"")  # fmt: skip
        numbers = self._numbers
        codes = key_put + pid_put + sizes_put + strides_put + hooks_put + args_put + put
        puts = _PUTS[len(codes) >> 2].unpack(codes)
        first = puts[0]
        a, b, c, d = numbers[word], numbers[kind], numbers[place], numbers[hooks]
        if puts != (*range(first, first + len(puts)),) or not (a < first > b and c < first > d):
            return None
        try:
            storage_type, location, shape, steps = memo[b], memo[c], self._sizes[sizes], self._sizes[strides]
            if (
                memo[a] != "storage"
                or type(storage_type) is not StorageType
                or type(location) is not str
                or memo[d] is not _ORDERED_DICT
                or length[0] != len(key)
                or len(shape) != len(steps)
            ):
                return None
        except KeyError:
            return None
        name, count, empty = key.decode("ascii"), numbers[numel], _ORDERED_DICT()
        pid = (memo[a], storage_type, name, location, count)
        dtype = storage_type.dtype
        storage = StoredStorage(name, dtype, count, location)
        tensor = StoredTensor.plain(storage, dtype or U8, numbers[offset], shape, steps, grad == b"\x88")
        args = (storage, numbers[offset], shape, steps, tensor.requires_grad, empty)
        if len(puts) == 7:
            made: tuple[Any, ...] = (name, pid, shape, steps, empty, args, tensor)
        else:  # EMPTY_TUPLE is not entered into the memo
            made = (name, pid, *filter(None, (shape, steps)), empty, args, tensor)
        memo.update(zip(puts, made, strict=True))
        return tensor, found.end()
