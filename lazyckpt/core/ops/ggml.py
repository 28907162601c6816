"""GGUF's block types: each row of a matrix is a series of blocks of bytes, with the codes and scales of 32 to 256
neighbours.

The layouts and the order of the computations are those of llama.cpp's ggml-quants.c `dequantize_row_*`, as in gguf
0.19.0, quants.py. Computed in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ...errors import DataError
from ..axes import grouped
from ..box import Selection, Shape
from ..dtypes import F32, I8, U8, dtype_of
from ..expr import Kind, Op
from ..specs import Expr
from .ggml_grids import grid, signs
from .packed import chosen, members
from .small_floats import float32_of

if TYPE_CHECKING:
    import torch
else:
    from ...deferred import torch

_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # E2M1, doubled; both zeros are positive


class Ggml(Op):
    """The values of blocks of bytes, ``[..., bytes in a row]``. ``type``: the GGUF type, one of `TYPES`. ``dtype``:
    that of the result, by default float32. ``big_endian``: whether the numbers of 16 bits in the blocks are, for types
    in `SWAPPED`."""

    def kind(self, inputs: Sequence[Kind], params: Mapping[str, Any]) -> Kind:
        ((shape, dtype),) = inputs
        known = TYPES.get(params["type"])
        if known is None:
            raise DataError(f"there is no GGUF type {params['type']!r} in this version of lazyckpt")
        if params.get("big_endian") and params["type"] not in SWAPPED:
            raise DataError(f"where the numbers in big-endian blocks of {params['type']} are is not known")
        if not shape or dtype not in (U8, I8) or shape[-1] % known.nbytes:
            raise DataError(
                f"rows of {params['type']} are blocks of {known.nbytes} bytes, which {dtype} of shape {shape} is not"
            )
        length = shape[-1] // known.nbytes * known.size
        return Kind((*shape[:-1], length), dtype_of(params["dtype"]) if params.get("dtype") else F32)

    def pull(self, e: Expr, want: Selection) -> Sequence[Selection]:
        known = TYPES[e.params["type"]]
        return ((*want[:-1], members(grouped(want[-1], known.size)[0], known.nbytes)),)

    def compute(self, e: Expr, want: Selection, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        known = TYPES[e.params["type"]]
        rows = blocks[0].view(torch.uint8)
        blocks_ = rows.reshape(-1, known.nbytes)
        if e.params.get("big_endian") and SWAPPED[e.params["type"]]:
            blocks_ = blocks_.clone()
            for at in SWAPPED[e.params["type"]]:
                blocks_[:, at : at + 2] = blocks_[:, at : at + 2].flip(1)
        found = known.values(blocks_)
        return chosen(found.reshape(*rows.shape[:-1], -1), want[-1], known.size)

    def grain(self, e: Expr) -> Shape:
        return (*(1,) * (len(e.shape) - 1), TYPES[e.params["type"]].size)


# -- Parts of blocks. Each block is a row.


def _bytes(part: torch.Tensor) -> torch.Tensor:
    """Return the bytes where they can be viewed as elements of up to 8 bytes."""
    return part.contiguous() if part.storage_offset() % 8 == 0 else part.clone(memory_format=torch.contiguous_format)


def _f16(part: torch.Tensor) -> torch.Tensor:
    return _bytes(part).view(torch.float16).to(torch.float32)


def _words(part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return little-endian unsigned words as int32 (16 bits) or int64 (32 bits)."""
    if dtype is torch.int16:
        return _bytes(part).view(dtype).to(torch.int32) & 0xFFFF
    return _bytes(part).view(dtype).to(torch.int64) & 0xFFFFFFFF


def _fields(part: torch.Tensor, bits: int, run: int, count: int | None = None) -> torch.Tensor:
    """Return the fields of bytes, ``count`` in each, as [blocks, codes]: of each ``run`` of bytes first the lowest
    fields, then the next ones."""
    shifts = torch.arange(count or 8 // bits, dtype=torch.uint8) * bits
    found = part.reshape(len(part), -1, 1, run).bitwise_right_shift(shifts.view(-1, 1))
    return found.bitwise_and_((1 << bits) - 1).view(len(part), -1)


def _float(codes: torch.Tensor, less: int = 0) -> torch.Tensor:
    found = codes.to(torch.float32)
    return found.sub_(less) if less else found


def _grouped(codes: torch.Tensor, size: int) -> torch.Tensor:
    """Return codes with groups of ``size`` neighbours as a dimension."""
    return codes.view(len(codes), -1, size)


def _signs_of(part: torch.Tensor) -> torch.Tensor:
    """Return the sign of each bit, as [blocks, bytes, 8]."""
    return 1 - 2 * _float(_fields(part, 1, 1)).view(len(part), -1, 8)


def _by_number(numbers: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return rows of a table, as [blocks, numbers, columns]."""
    found = rows.index_select(0, numbers.reshape(-1).to(torch.int64))
    return found.view(len(numbers), -1, rows.shape[1])


def _looked_up(codes: torch.Tensor, table: Sequence[int]) -> torch.Tensor:
    values = torch.tensor(table, dtype=torch.float32)
    return values.index_select(0, codes.reshape(-1).to(torch.int32)).view(codes.shape)


# -- The types.


def _q4_0(b: torch.Tensor) -> torch.Tensor:
    return _f16(b[:, :2]) * _float(_fields(b[:, 2:], 4, 16), 8)


def _q4_1(b: torch.Tensor) -> torch.Tensor:
    return (_f16(b[:, :2]) * _float(_fields(b[:, 4:], 4, 16))).add_(_f16(b[:, 2:4]))


def _q5_0(b: torch.Tensor) -> torch.Tensor:
    codes = _fields(b[:, 6:], 4, 16) | _fields(b[:, 2:6], 1, 1) << 4
    return _f16(b[:, :2]) * _float(codes, 16)


def _q5_1(b: torch.Tensor) -> torch.Tensor:
    codes = _fields(b[:, 8:], 4, 16) | _fields(b[:, 4:8], 1, 1) << 4
    return (_f16(b[:, :2]) * _float(codes)).add_(_f16(b[:, 2:4]))


def _q8_0(b: torch.Tensor) -> torch.Tensor:
    return _float(b[:, 2:].view(torch.int8)) * _f16(b[:, :2])


def _q8_k(b: torch.Tensor) -> torch.Tensor:
    return _bytes(b[:, :4]).view(torch.float32) * _float(b[:, 4:260].view(torch.int8))


def _q2_k(b: torch.Tensor) -> torch.Tensor:
    scales = b[:, :16]
    factors = (_f16(b[:, 80:82]) * _float(scales & 15)).unsqueeze(-1)
    least = (_f16(b[:, 82:84]) * _float(scales >> 4)).unsqueeze(-1)
    return (factors * _float(_grouped(_fields(b[:, 16:80], 2, 32), 16))).sub_(least).view(len(b), -1)


def _q3_k(b: torch.Tensor) -> torch.Tensor:
    packed = b[:, 96:108]
    scales = _fields(packed[:, :8], 4, 8) | _fields(packed[:, 8:], 2, 4) << 4
    factors = (_f16(b[:, 108:110]) * _float(scales, 32)).unsqueeze(-1)
    codes = _fields(b[:, 32:96], 2, 32) | _fields(b[:, :32], 1, 32) << 2
    return (factors * _float(_grouped(codes, 16), 4)).view(len(b), -1)


def _scales_k(part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the eight scales and the eight smallest values of Q4_K and Q5_K, of six bits each."""
    a, b, c = part[:, :4], part[:, 4:8], part[:, 8:]
    scales = torch.cat([a & 0x3F, (c & 15) | (a >> 2 & 0x30)], 1)
    return _float(scales), _float(torch.cat([b & 0x3F, (c >> 4) | (b >> 2 & 0x30)], 1))


def _k(b: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    scales, least = _scales_k(b[:, 4:16])
    factors = (_f16(b[:, :2]) * scales).unsqueeze(-1)
    found = factors * _float(_grouped(codes, 32))
    return found.sub_((_f16(b[:, 2:4]) * least).unsqueeze(-1)).view(len(b), -1)


def _q4_k(b: torch.Tensor) -> torch.Tensor:
    return _k(b, _fields(b[:, 16:], 4, 32))


def _q5_k(b: torch.Tensor) -> torch.Tensor:
    return _k(b, _fields(b[:, 48:], 4, 32) | _fields(b[:, 16:48], 1, 32) << 4)


def _q6_k(b: torch.Tensor) -> torch.Tensor:
    codes = _fields(b[:, :128], 4, 64) | _fields(b[:, 128:192], 2, 32) << 4
    factors = (_f16(b[:, 208:]) * _float(b[:, 192:208].view(torch.int8))).unsqueeze(-1)
    return (factors * _float(_grouped(codes, 16), 32)).view(len(b), -1)


def _tq1_0(b: torch.Tensor) -> torch.Tensor:
    parts = []
    for part, run, count in ((b[:, :32], 32, 5), (b[:, 32:48], 16, 5), (b[:, 48:52], 4, 4)):
        powers = torch.tensor([1, 3, 9, 27, 81][:count], dtype=torch.uint8).view(-1, 1)
        parts.append((part.reshape(len(b), -1, 1, run) * powers).view(len(b), -1))  # the product is modulo 256
    codes = torch.cat(parts, 1).to(torch.int16).mul_(3) >> 8
    return _f16(b[:, 52:]) * _float(codes, 1)


def _tq2_0(b: torch.Tensor) -> torch.Tensor:
    return _f16(b[:, 64:]) * _float(_fields(b[:, :64], 2, 32), 1)


def _mxfp4(b: torch.Tensor) -> torch.Tensor:
    codes = b[:, :1].to(torch.int32)
    halves = torch.where(codes < 2, 0x00200000 << codes, (codes - 1) << 23).view(torch.float32)
    return halves * _looked_up(_fields(b[:, 1:], 4, 16), _FP4)


def _nvfp4(b: torch.Tensor) -> torch.Tensor:
    codes = b[:, :4] & 0x7F
    scales = float32_of(codes.contiguous().view(torch.float8_e4m3fn)).mul_(0.5)
    scales = torch.where((b[:, :4] == 0x7F) | (b[:, :4] == 0), 0.0, scales)
    # the code 0xFF is no number in E4M3, but 480 here
    scales = torch.where(b[:, :4] == 0xFF, 240.0, scales).unsqueeze(-1)
    return (scales * _grouped(_looked_up(_fields(b[:, 4:], 4, 8), _FP4), 16)).view(len(b), -1)


def _iq4_nl(b: torch.Tensor) -> torch.Tensor:
    return _f16(b[:, :2]) * _looked_up(_fields(b[:, 2:], 4, 16), _IQ4)


def _iq4_xs(b: torch.Tensor) -> torch.Tensor:
    high = _fields(b[:, 2:4], 2, 1)
    scales = _fields(b[:, 4:8], 4, 1) | high << 4
    factors = (_f16(b[:, :2]) * _float(scales, 32)).unsqueeze(-1)
    return (factors * _grouped(_looked_up(_fields(b[:, 8:], 4, 16), _IQ4), 32)).view(len(b), -1)


def _seven(words: torch.Tensor) -> torch.Tensor:
    """Return the signs by the four numbers of seven bits in each word, as [blocks, words * 4, 8]."""
    return _by_number(words.unsqueeze(-1) >> torch.tensor([0, 7, 14, 21]) & 0x7F, signs())


def _iq2_xxs(b: torch.Tensor) -> torch.Tensor:
    pairs = b[:, 2:].reshape(len(b), -1, 8)
    words = _words(pairs[..., 4:].reshape(len(b), -1), torch.int32)
    factors = (_f16(b[:, :2]) * _float(words >> 28).add_(0.5)).mul_(0.25)
    values = _by_number(pairs[..., :4].reshape(len(b), -1), grid("IQ2_XXS"))
    return _times(factors, values, _seven(words))


def _iq2_xs(b: torch.Tensor) -> torch.Tensor:
    words = _words(b[:, 2:66], torch.int16)
    factors = (_f16(b[:, :2]) * _float(_fields(b[:, 66:], 4, 1)).add_(0.5)).mul_(0.25)
    return _times(factors, _by_number(words & 511, grid("IQ2_XS")), _by_number(words >> 9, signs()))


def _iq2_s(b: torch.Tensor) -> torch.Tensor:
    numbers = b[:, 2:34].to(torch.int32) | _fields(b[:, 66:74], 2, 1).to(torch.int32) << 8
    factors = (_f16(b[:, :2]) * _float(_fields(b[:, 74:], 4, 1)).add_(0.5)).mul_(0.25)
    return _times(factors, _by_number(numbers, grid("IQ2_S")), _signs_of(b[:, 34:66]))


def _iq3_xxs(b: torch.Tensor) -> torch.Tensor:
    words = _words(b[:, 66:], torch.int32)
    factors = (_f16(b[:, :2]) * _float(words >> 28).add_(0.5)).mul_(0.5)
    return _times(factors, _by_number(b[:, 2:66], grid("IQ3_XXS")), _seven(words))


def _iq3_s(b: torch.Tensor) -> torch.Tensor:
    numbers = b[:, 2:66].to(torch.int32) | _fields(b[:, 66:74], 1, 1).to(torch.int32) << 8
    factors = _f16(b[:, :2]) * _float(_fields(b[:, 106:], 4, 1)).mul_(2).add_(1)
    return _times(factors, _by_number(numbers, grid("IQ3_S")), _signs_of(b[:, 74:106]))


def _iq1_s(b: torch.Tensor) -> torch.Tensor:
    words = _words(b[:, 34:], torch.int16)
    factors = _f16(b[:, :2]) * _float(words >> 12 & 7).mul_(2).add_(1)
    moved = torch.where(words & 0x8000 == 0, 0.125, -0.125).unsqueeze(-1)
    high = (words.unsqueeze(-1) >> torch.tensor([0, 3, 6, 9], dtype=torch.int32) & 7).view(len(b), -1)
    values = _by_number(b[:, 2:34].to(torch.int32) | high << 8, grid("IQ1_S"))
    return (factors.unsqueeze(-1) * (values.view(len(b), 8, 32) + moved)).view(len(b), -1)


def _iq1_m(b: torch.Tensor) -> torch.Tensor:
    words = _words(b[:, 48:], torch.int16)
    tops = words >> 12  # the float16 factor of the block, four bits in each word
    bits = tops[:, 0] | tops[:, 1] << 4 | tops[:, 2] << 8 | tops[:, 3] << 12
    factor = bits.to(torch.int16).view(torch.float16).to(torch.float32).unsqueeze(-1)
    scales = (words.unsqueeze(-1) >> torch.tensor([0, 3, 6, 9], dtype=torch.int32) & 7).view(len(b), -1)
    factors = (factor * _float(scales).mul_(2).add_(1)).view(len(b), -1, 1, 1)
    high = _fields(b[:, 32:48], 4, 1)
    moved = torch.where(high & 8 == 0, 0.125, -0.125).view(len(b), -1, 2, 1)
    values = _by_number(b[:, :32].to(torch.int32) | (high & 7).to(torch.int32) << 8, grid("IQ1_S"))
    return (factors * (values.view(len(b), -1, 2, 8) + moved)).view(len(b), -1)


def _times(factors: torch.Tensor, values: torch.Tensor, signs_: torch.Tensor) -> torch.Tensor:
    """Return (factor * value) * sign, for one factor for each group of values."""
    found = factors.unsqueeze(-1) * values.reshape(len(factors), factors.shape[1], -1)
    return found.mul_(signs_.reshape(found.shape)).view(len(factors), -1)


class Type(NamedTuple):
    """A block type of GGUF.

    Attributes
    ----------
    size
        Elements of a block.
    nbytes
        Bytes of a block.
    values
        The values of blocks: uint8 ``[blocks, nbytes]`` to float32 ``[blocks, size]``.
    """

    size: int
    nbytes: int
    values: Callable[[torch.Tensor], torch.Tensor]


TYPES: dict[str, Type] = {
    "Q4_0": Type(32, 18, _q4_0),
    "Q4_1": Type(32, 20, _q4_1),
    "Q5_0": Type(32, 22, _q5_0),
    "Q5_1": Type(32, 24, _q5_1),
    "Q8_0": Type(32, 34, _q8_0),
    "Q2_K": Type(256, 84, _q2_k),
    "Q3_K": Type(256, 110, _q3_k),
    "Q4_K": Type(256, 144, _q4_k),
    "Q5_K": Type(256, 176, _q5_k),
    "Q6_K": Type(256, 210, _q6_k),
    "Q8_K": Type(256, 292, _q8_k),
    "IQ2_XXS": Type(256, 66, _iq2_xxs),
    "IQ2_XS": Type(256, 74, _iq2_xs),
    "IQ2_S": Type(256, 82, _iq2_s),
    "IQ3_XXS": Type(256, 98, _iq3_xxs),
    "IQ3_S": Type(256, 110, _iq3_s),
    "IQ1_S": Type(256, 50, _iq1_s),
    "IQ1_M": Type(256, 56, _iq1_m),
    "IQ4_NL": Type(32, 18, _iq4_nl),
    "IQ4_XS": Type(256, 136, _iq4_xs),
    "TQ1_0": Type(256, 54, _tq1_0),
    "TQ2_0": Type(256, 66, _tq2_0),
    "MXFP4": Type(32, 17, _mxfp4),
    "NVFP4": Type(64, 36, _nvfp4),
}

# Type -> where the numbers of 16 bits in a block are (gguf 0.19, scripts/gguf_convert_endian.py, which has these only).
SWAPPED: dict[str, tuple[int, ...]] = {
    "Q4_0": (0,), "Q8_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,), "MXFP4": (), "NVFP4": (),
}  # fmt: skip

OPS: dict[str, Op] = {"dequantize.gguf": Ggml()}
