"""Codes of a few bits that are packed into words: where each code is, and taking them out. No operations.

A code is described by its pieces (`Piece`): the words that have its bits, from the lowest bits up. The layouts differ
only in their pieces, so that one function unpacks them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..axes import as_axis, indices
from ..box import Axis

if TYPE_CHECKING:
    import torch
else:
    from ...deferred import torch

Numbers = NDArray[np.int64]


class Piece(NamedTuple):
    """Some bits of each of several codes.

    Attributes
    ----------
    word
        The number of the word, along the packed dimension.
    shift
        The position of the lowest bit in the word.
    mask
        The bits to keep after the shift; 0 for a code that has no such piece.
    left
        The position of the lowest bit in the code.
    """

    word: Numbers
    shift: Numbers
    mask: Numbers
    left: Numbers


# GPTQModel's planar layout: code bits -> (bits of a plane, their position in the code), as gptqmodel 7.7.0,
# utils/planar_packing.py.
_PLANES = {
    2: ((2, 0),),
    3: ((2, 0), (1, 2)),
    4: ((4, 0),),
    5: ((4, 0), (1, 4)),
    6: ((4, 0), (2, 4)),
    7: ((4, 0), (2, 4), (1, 6)),
    8: ((8, 0),),
}


def stream(codes: Numbers, bits: int, word: int) -> list[Piece]:
    """Return the pieces of codes in a stream of bits, the lowest bit first. A code may cross two words.

    Parameters
    ----------
    codes
        The numbers of the codes.
    bits
        The bits of a code.
    word
        The bits of a word.
    """
    at, shift = np.divmod(codes * bits, word)
    low = np.minimum(bits, word - shift)
    pieces = [Piece(at, shift, (1 << low) - 1, np.zeros_like(at))]
    if (low < bits).any():
        high = bits - low
        pieces.append(Piece(at + (high > 0), np.zeros_like(at), (1 << high) - 1, low))
    return pieces


def planar(codes: Numbers, bits: int, word: int = 32) -> list[Piece]:
    """Return the pieces of codes in GPTQModel's planar layout: 32 codes have ``bits`` words, the low bits of all first.

    The parameters are those of `stream`.
    """
    block, inside = np.divmod(codes, word)
    pieces = []
    first = 0
    for width, left in _PLANES[bits]:
        at, shift = np.divmod(inside * width, word)
        mask = np.full_like(at, (1 << width) - 1)
        pieces.append(Piece(block * bits + first + at, shift, mask, np.full_like(at, left)))
        first += width
    return pieces


def ordered(codes: Numbers, places: Sequence[int]) -> Numbers:
    """Return the places of codes that are permuted within each word.

    Parameters
    ----------
    codes
        The numbers of the codes.
    places
        For each code of a word the place that it is at.
    """
    word, inside = np.divmod(codes, len(places))
    return word * len(places) + np.asarray(places, np.int64)[inside]


def words_of(pieces: Sequence[Piece]) -> Axis:
    """Return the words that pieces need, ascending."""
    return as_axis(np.unique(np.concatenate([piece.word for piece in pieces])))


def unpack(words: torch.Tensor, dim: int, have: Axis, pieces: Sequence[Piece]) -> torch.Tensor:
    """Return codes as integers, of int32, of int64 if the words have 64 bits, or of uint8.

    Parameters
    ----------
    words
        Words, of any dtype.
    dim
        The packed dimension; negative.
    have
        The numbers of the words in that dimension.
    pieces
        Where the codes are; `words_of` these are in ``have``.
    """
    long = words.itemsize == 8
    signed = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[words.itemsize]
    whole = words.view(signed).to(torch.int64 if long else torch.int32)
    numbers = indices(have)
    found: torch.Tensor | None = None

    def along(values: Numbers) -> torch.Tensor:
        shape = [1] * whole.ndim
        shape[dim] = -1
        return torch.from_numpy(values).to(whole.dtype).view(shape)

    if dim == -1 and len(pieces) == 1 and (halves := _halves(words, have, pieces[0])) is not None:
        return halves
    for piece in pieces:
        codes = _taken(whole, dim, np.searchsorted(numbers, piece.word))
        codes = codes.bitwise_right_shift_(along(piece.shift)).bitwise_and_(along(piece.mask))
        if piece.left.any():
            codes = codes.bitwise_left_shift_(along(piece.left))
        found = codes if found is None else found.bitwise_or_(codes)
    assert found is not None
    return found


def _halves(words: torch.Tensor, have: Axis, piece: Piece) -> torch.Tensor | None:
    """Return codes as bytes if they are all the codes of 4 bits, in order, of words; else None."""
    each = words.itemsize * 2
    first = int(piece.word[0])
    count = len(piece.word)
    if (
        count != len(have) * each
        or (piece.mask != 15).any()
        or piece.left.any()
        or int(piece.word[-1]) - first != len(have) - 1
    ):
        return None
    numbers = piece.word * each + piece.shift // 4
    if (numbers != np.arange(first * each, first * each + count)).any():
        return None
    flat = words.contiguous().view(-1)  # a last dimension of length 1 may have any stride, which `view` refuses
    bytes_ = flat.view(torch.uint8).view(*words.shape[:-1], -1)
    return torch.stack((bytes_ & 15, bytes_ >> 4), -1).flatten(-2)


def _taken(words: torch.Tensor, dim: int, at: Numbers) -> torch.Tensor:
    """Return a new tensor with the words at some positions, each as often as it is in ``at``."""
    each = len(at) // words.shape[dim]
    if each * words.shape[dim] == len(at) and (at.reshape(-1, each) == np.arange(words.shape[dim])[:, None]).all():
        return words.repeat_interleave(each, dim)  # faster than picking each
    return words.index_select(dim, torch.from_numpy(at))
