"""The header of a `.npy` array: dtype, shape and order of the elements that follow it.

Format: numpy/lib/format.py (NEP 1), versions 1.0 to 3.0. The header is the text of a Python dict of plain literals,
which is parsed and never run. Arrays of objects, whose elements are a pickle, are not read.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from ...core.box import Shape, fits
from ...core.dtypes import DTYPES, DType
from ...errors import CorruptError, FormatError

MAGIC = b"\x93NUMPY"
LEAST = 12  # bytes that tell the length of a header of any version
USUAL = 128  # bytes of nearly all headers
_LONGEST = 10_000  # characters; numpy refuses longer ones, too
_DIMENSIONS = 64
_KEYS = {"descr", "fortran_order", "shape"}
_LONG = re.compile(r"(?<=[0-9])L(?=[,)\s])")  # numbers as Python 2 wrote them
_RAW = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}  # the integers that raw bytes (V2) are read as
_NAMED = {
    dtype.numpy.str[1:]: dtype for dtype in DTYPES if dtype.is_number and dtype._numpy and "." not in dtype._numpy
}


class NoNumbersError(FormatError):
    """An array whose elements are no numbers. ``kind`` says in a few words what they are."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Npy:
    """A parsed header. ``length`` is its size in bytes, ``raw`` the dtype as the header names it if the elements are
    bytes without a meaning (V2)."""

    length: int
    dtype: DType
    shape: Shape
    fortran: bool
    swapped: bool
    raw: str = ""

    @property
    def nbytes(self) -> int:
        """The size of the elements in bytes."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def strides(self) -> Shape:
        """The strides in elements."""
        strides, step = [0] * len(self.shape), 1
        axes = range(len(self.shape)) if self.fortran else range(len(self.shape) - 1, -1, -1)
        for axis in axes:
            strides[axis] = step
            step *= max(1, self.shape[axis])
        return tuple(strides)


def header_length(start: bytes, where: str) -> int:
    """Return the number of bytes in front of the elements, from the first `LEAST` bytes.

    Raises CorruptError if these are not the start of an array, FormatError for a later version of the format."""
    if len(start) < LEAST or not start.startswith(MAGIC):
        raise CorruptError(f"{where}: it does not begin as arrays of numpy do ({start[:8]!r}): damaged, or truncated")
    major, minor = start[6], start[7]
    if (major, minor) not in ((1, 0), (2, 0), (3, 0)):
        raise FormatError(f"{where}: version {major}.{minor} of the npy format, lazyckpt reads 1.0 to 3.0")
    width = 2 if major == 1 else 4
    length = int.from_bytes(start[8 : 8 + width], "little")
    if length > _LONGEST:
        raise CorruptError(f"{where}: a header of {length:,} bytes; arrays of numbers have at most {_LONGEST:,}")
    return 8 + width + length


def read_header(data: bytes, where: str) -> Npy:
    """Parse a header.

    Parameters
    ----------
    data
        The first bytes of the array, at least `header_length` of them.
    where
        The array, for messages.

    Raises
    ------
    CorruptError
        It is damaged.
    NoNumbersError
        The elements are objects, records, text or times.
    """
    length = header_length(data, where)
    if len(data) < length:
        raise CorruptError(f"{where}: it ends within its header: truncated")
    version = data[6]
    try:
        text = data[10 if version == 1 else 12 : length].decode("utf-8" if version == 3 else "latin-1")
    except UnicodeDecodeError:
        raise CorruptError(f"{where}: its header is no text: damaged") from None
    about = _literal(text, where)
    if not isinstance(about, dict) or set(about) != _KEYS:
        raise CorruptError(f"{where}: its header is no description of an array ({text[:60]!r}): damaged")
    descr, fortran, shape = about["descr"], about["fortran_order"], about["shape"]
    if type(fortran) is not bool or type(shape) is not tuple or len(shape) > _DIMENSIONS:
        raise CorruptError(f"{where}: its header is no description of an array ({text[:60]!r}): damaged")
    if any(type(n) is not int or n < 0 for n in shape):
        raise CorruptError(f"{where}: an array of shape {shape!s:.60}: damaged")
    dtype, swapped, raw = _dtype(descr, where)
    if not fits(shape, dtype.itemsize):
        raise CorruptError(f"{where}: an array of shape {shape!s:.60}, which is larger than any file: damaged")
    return Npy(length, dtype, shape, fortran, swapped, raw)


def number_of(dtype: np.dtype[Any]) -> DType | None:
    """Return the dtype of torch for a dtype of numpy, whatever its byte order; None if the elements are no numbers, or
    of a kind that torch lacks."""
    return _NAMED.get(dtype.str[1:]) if dtype.kind in "biufc" else None


def _literal(text: str, where: str) -> Any:
    for attempt in (text, _LONG.sub("", text)):
        try:
            return ast.literal_eval(attempt.strip())
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
    raise CorruptError(f"{where}: its header is no description of an array ({text[:60]!r}): damaged")


def _dtype(descr: Any, where: str) -> tuple[DType, bool, str]:
    """Return the dtype, whether its bytes are big-endian, and its name if it is bytes without a meaning."""
    if isinstance(descr, list | tuple):
        raise NoNumbersError("records (a structured dtype)")
    if not isinstance(descr, str) or len(descr) > 40:
        raise CorruptError(f"{where}: the dtype {descr!r:.60}: damaged")
    try:
        dtype = np.dtype(descr)
    except Exception:
        raise CorruptError(f"{where}: the dtype {descr!r}, which numpy does not know: damaged") from None
    if dtype.kind == "O":
        raise NoNumbersError("Python objects, which are a pickle (nothing of it was read)")
    if dtype.names is not None or dtype.subdtype is not None:
        raise NoNumbersError("records (a structured dtype)")
    if dtype.kind == "V":
        name = _RAW.get(dtype.itemsize)
        if name is None:
            raise NoNumbersError(f"raw bytes, {dtype.itemsize} each ({descr})")
        return _NAMED[np.dtype(name).str[1:]], False, descr
    if dtype.kind in "SU":
        raise NoNumbersError("text")
    if dtype.kind in "mM":
        raise NoNumbersError("times")
    found = number_of(dtype)
    if found is None:
        raise NoNumbersError(f"of the dtype {dtype.name}, which torch lacks")
    return found, dtype.str.startswith(">"), ""
