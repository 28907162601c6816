"""Weights as codes of 1 to 8 bits in words, with a scale and a zero point for each group: GPTQ, AWQ, MLX and torchao.

For GPTQ and AWQ, values are computed in float32 and rounded once, to the parameter ``dtype``. A code has at most 8 bits
and a scale of 16 bits at most 11, so that float32 has their product without rounding. So in the dtype of the scales the
result has the bits that the writers' kernels compute in that dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import DataError
from ..axes import as_axis, grouped, indices
from ..box import Axis, Selection, Shape
from ..dtypes import dtype_of
from ..expr import Kind, Op, Scan
from ..rounding import convert
from ..specs import Expr
from .bits import Numbers, Piece, ordered, planar, stream, unpack, words_of

if TYPE_CHECKING:
    import torch
else:
    from ...deferred import torch

_RUN = 1024  # bytes of a row of words that a block should have, where a row of the result is a column of words


class Gptq(Op):
    """GPTQ's matrices ``[out, in]``, from codes ``qweight [in / pack, out]``, zero points ``qzeros [groups, out /
    pack]`` and ``scales [groups, out]``, and the group of each input, ``g_idx [in]``, if there is a fourth operand.
    All but ``g_idx`` may have the same leading dimensions.

    Parameters: ``dtype``; ``bits``; ``inputs``, the size of the last dimension; ``group_size``, of neighbours, without
    ``g_idx``; ``zeros``, what is stored as a zero point z: ``"z"`` (version 2), ``"z-1"`` (version 1: z - 1 in each
    field), or ``"words-1"`` (version 1 as GPTQModel writes it: 1 is subtracted from the fields of a whole word, with
    borrows); ``planar``, for the layout ``gptq_p``.
    """

    prepares = True  # g_idx

    def kind(self, inputs: Sequence[Kind], params: Mapping[str, Any]) -> Kind:
        _check("GPTQ", inputs)
        qweight, qzeros, scales = inputs[:3]
        *lead, words, outputs = qweight.shape
        bits, size = params["bits"], params["inputs"]
        word = qweight.dtype.itemsize * 8
        groups = scales.shape[-2]
        fits = (
            words == -(-size * bits // word)
            and scales.shape == (*lead, groups, outputs)
            and qzeros.shape == (*lead, groups, -(-outputs * bits // (qzeros.dtype.itemsize * 8)))
            and (inputs[3].shape == (size,) if len(inputs) > 3 else groups == -(-size // params["group_size"]))
            and not qzeros.dtype.is_floating_point
        )
        if not fits:
            shapes = ", ".join(str(one.shape) for one in inputs)
            raise DataError(f"GPTQ of {bits} bits and {size:,} inputs does not fit operands of shapes {shapes}")
        return Kind((*lead, outputs, size), dtype_of(params["dtype"]))

    def prepare(self, e: Expr, scan: Scan) -> Any:
        if len(e.inputs) < 4:
            return None
        groups = torch.cat([block for _, (block,) in scan(3)])
        count = e.inputs[2].shape[-2]
        groups = torch.where(groups < 0, groups + count, groups).to(torch.int64)  # as an index of torch
        if len(groups) and not 0 <= int(groups.min()) <= int(groups.max()) < count:
            raise DataError(f"g_idx names the groups {groups.min()} to {groups.max()}; there are {count} groups")
        return groups

    def _codes(self, e: Expr, axis: Axis, operand: int) -> list[Piece]:
        bits = e.params["bits"]
        word = e.inputs[operand].dtype.itemsize * 8
        return (planar if e.params.get("planar") else stream)(indices(axis), bits, word)

    def pull(self, e: Expr, want: Selection) -> Sequence[Selection]:
        *lead, rows, columns = want
        if len(e.inputs) < 4:
            groups = grouped(columns, e.params["group_size"])[0]
        elif e.kept.get("prepared") is not None:
            groups = as_axis(np.unique(e.kept["prepared"].numpy()[indices(columns)]))
        else:
            groups = range(e.inputs[2].shape[-2])
        pulled = [
            (*lead, words_of(self._codes(e, columns, 0)), rows),
            (*lead, groups, words_of(self._codes(e, rows, 1))),
            (*lead, groups, rows),
        ]
        return pulled if len(e.inputs) < 4 else [*pulled, (range(0),)]

    def compute(self, e: Expr, want: Selection, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        rows, columns = want[-2:]
        pulled = self.pull(e, want)
        codes = unpack(_turned(blocks[0]), -1, pulled[0][-2], self._codes(e, columns, 0))
        mask = (1 << e.params["bits"]) - 1
        words = blocks[1]
        if e.params["zeros"] == "words-1":
            words = words + _ones(e.params["bits"], words.itemsize)
        zeros = unpack(words, -1, pulled[1][-1], self._codes(e, rows, 1))
        if e.params["zeros"] == "z-1":
            zeros = zeros.add_(1).bitwise_and_(mask)
        if len(e.inputs) < 4:
            number = indices(columns) // e.params["group_size"]
        else:
            number = e.kept["prepared"].numpy()[indices(columns)]
        at = np.searchsorted(indices(pulled[2][-2]), number)
        return convert(_scaled(codes, _turned(zeros), _turned(blocks[2]), at), e.dtype.torch)

    def grain(self, e: Expr) -> Shape:
        return (*(1,) * (len(e.shape) - 2), _RUN // e.inputs[0].dtype.itemsize, 32)


def _ones(bits: int, nbytes: int) -> int:
    """Return a word whose fields are all 1, as a signed number."""
    value = sum(1 << at for at in range(0, nbytes * 8, bits))
    return value - (1 << nbytes * 8) if value >> (nbytes * 8 - 1) else value


class Awq(Op):
    """AWQ's matrices of 4 bits, ``[out, in]``, from ``qweight``, ``qzeros`` and ``scales``.

    Parameters: ``dtype``; ``inputs`` and ``outputs``, the sizes of the last two dimensions; ``group_size``; ``layout``:

    - ``"gemm"``: ``qweight [in, out / 8]``, ``qzeros [groups, out / 8]``, ``scales [groups, out]``, the codes of a word
      in the order 0, 2, 4, 6, 1, 3, 5, 7;
    - ``"gemv"``: ``qweight [out, in / 8]``, ``qzeros [out, groups / 8]``, ``scales [out, groups]``, in order, the
      groups padded;
    - ``"gemv_fast"``: ``qweight [out / 4, in]`` of 16-bit words, four rows of the result interleaved, ``scales`` and
      ``qzeros [groups, out]`` (the negative product of scale and zero point, added), the groups padded.
    """

    def kind(self, inputs: Sequence[Kind], params: Mapping[str, Any]) -> Kind:
        _check("AWQ", inputs)
        qweight, qzeros, scales = (one.shape for one in inputs)
        lead = qweight[:-2]
        rows, columns = params["outputs"], params["inputs"]
        groups = -(-columns // params["group_size"])
        width = inputs[0].dtype.itemsize
        if params["layout"] == "gemm":
            need = [(columns, rows // 8), (groups, rows // 8), (groups, rows)]
            fits = width == 4 and rows % 8 == 0
        elif params["layout"] == "gemv":
            need = [(rows, columns // 8), (rows, qzeros[-1]), (rows, qzeros[-1] * 8)]
            fits = width == 4 and columns % 8 == 0 and qzeros[-1] * 8 >= groups
        elif params["layout"] == "gemv_fast":
            need = [(rows // 4, columns), (qzeros[-2], rows), (qzeros[-2], rows)]
            fits = (
                width == 2
                and inputs[1].dtype.is_floating_point
                and rows % 4 == 0
                and columns % 64 == 0
                and qzeros[-2] >= groups
            )
        else:
            raise DataError(f"there is no AWQ layout {params['layout']!r} in this version of lazyckpt")
        if not fits or [qweight, qzeros, scales] != [(*lead, *one) for one in need]:
            raise DataError(
                f"AWQ ({params['layout']}) of {rows:,} x {columns:,} does not fit operands of shapes "
                f"{qweight}, {qzeros} and {scales}"
            )
        return Kind((*lead, rows, columns), dtype_of(params["dtype"]))

    def pull(self, e: Expr, want: Selection) -> Sequence[Selection]:
        *lead, rows, columns = want
        groups = grouped(columns, e.params["group_size"])[0]
        if e.params["layout"] == "gemm":
            words = words_of(_gemm(rows))
            return (*lead, columns, words), (*lead, groups, words), (*lead, groups, rows)
        if e.params["layout"] == "gemv":
            codes, zeros = (words_of(stream(indices(axis), 4, 32)) for axis in (columns, groups))
            return (*lead, rows, codes), (*lead, rows, zeros), (*lead, rows, groups)
        words = words_of([piece for kind in _residues(rows) for piece in _fast(columns, kind)])
        return (*lead, grouped(rows, 4)[0], words), (*lead, groups, rows), (*lead, groups, rows)

    def compute(self, e: Expr, want: Selection, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        rows, columns = want[-2:]
        pulled = self.pull(e, want)
        at = grouped(columns, e.params["group_size"])[1]
        if e.params["layout"] == "gemm":
            words, pieces = pulled[0][-1], _gemm(rows)
            codes, zeros = (unpack(_turned(block), -2, words, pieces) for block in blocks[:2])
            return convert(_scaled(codes, zeros, _turned(blocks[2]), at), e.dtype.torch)
        if e.params["layout"] == "gemv":
            codes = unpack(blocks[0], -1, pulled[0][-1], stream(indices(columns), 4, 32))
            groups = indices(grouped(columns, e.params["group_size"])[0])
            zeros = unpack(blocks[1], -1, pulled[1][-1], stream(groups, 4, 32))
            return convert(_scaled(codes, zeros, blocks[2], at), e.dtype.torch)
        codes = torch.empty([*map(len, want)], dtype=torch.int32)
        number, four = indices(rows), indices(pulled[0][-2])
        for kind in _residues(rows):
            mine = torch.from_numpy(np.flatnonzero(number % 4 == kind))
            from_ = torch.from_numpy(np.searchsorted(four, number[number % 4 == kind] // 4))
            found = unpack(blocks[0].index_select(-2, from_), -1, pulled[0][-1], _fast(columns, kind))
            codes.index_copy_(-2, mine, found)
        groups_at = torch.from_numpy(at)
        scales, zeros = (_turned(block).to(torch.float32).index_select(-1, groups_at) for block in blocks[:0:-1])
        return convert(scales.mul_(codes).add_(zeros), e.dtype.torch)

    def grain(self, e: Expr) -> Shape:
        lead = (1,) * (len(e.shape) - 2)
        if e.params["layout"] == "gemm":
            return (*lead, 8 * _RUN // 4, 1)
        return (*lead, 4, 64) if e.params["layout"] == "gemv_fast" else (*lead, 1, 8)


def _check(what: str, inputs: Sequence[Kind]) -> None:
    """Raise DataError unless the operands are matrices of codes, of zero points and of scales."""
    codes, zeros, scales = inputs[:3]
    if min(len(one.shape) for one in (codes, zeros, scales)) < 2:
        raise DataError(f"{what} has matrices of codes, zero points and scales, not shapes {[o.shape for o in inputs]}")
    if codes.dtype.is_floating_point or not scales.dtype.is_floating_point:
        raise DataError(f"{what} has codes of integers and scales of floats, not {codes.dtype} and {scales.dtype}")


def _gemm(rows: Axis) -> list[Piece]:
    return stream(ordered(indices(rows), (0, 4, 1, 5, 2, 6, 3, 7)), 4, 32)


def _residues(rows: Axis) -> list[int]:
    return sorted({int(one) for one in np.unique(indices(rows) % 4)})


def _fast(columns: Axis, kind: int) -> list[Piece]:
    """Return the pieces of codes in a row whose number is ``kind`` modulo 4, in the layout of autoawq 0.2.9's
    ``pack_intweight`` with ``interleave=4`` and ``kstride=64``."""
    tile, inside = np.divmod(indices(columns), 32)
    a, b, c = inside // 8, inside // 2 % 4, inside % 2
    first = b * 8 + a * 2 + c
    place = tile * 32 + first // 8 * 8 + first % 2 * 4 + first % 8 // 2
    piece = stream(place, 4, 16)[0]
    stride, rest = np.divmod(place, 64)
    return [piece._replace(word=stride * 64 + kind * 16 + rest // 4)]


class Affine(Op):
    """``code * scale + bias`` for ``[..., out, in]``: MLX's matrices and torchao's Int4Tensor.

    Operands: words ``[..., out, in * bits / bits of a word]``, a stream of bits in each row, the lowest first;
    ``scales`` and ``biases [..., out, in / group_size]``. Parameters: ``dtype``, of the result; ``bits``;
    ``group_size``; ``signed``, whether codes are two's complements; ``within``, the dtype that each of the two steps is
    rounded to, by default that of the scales, as mlx 0.32.4 on CPUs computes ``mlx.core.dequantize``.
    """

    def kind(self, inputs: Sequence[Kind], params: Mapping[str, Any]) -> Kind:
        words, scales, biases = inputs
        bits, size = params["bits"], params["group_size"]
        count = scales.shape[-1] * size if scales.shape else 0
        fits = (
            not words.dtype.is_floating_point
            and 1 <= bits <= 8
            and words.shape[:-1] == scales.shape[:-1]
            and len(words.shape) > 1
            and words.shape[-1] * words.dtype.itemsize * 8 == count * bits
            and scales.shape == biases.shape
            and scales.dtype.is_floating_point
        )
        if not fits:
            raise DataError(
                f"codes of {bits} bits in groups of {size} do not fit words {words.dtype} {words.shape}, scales "
                f"{scales.dtype} {scales.shape} and biases {biases.dtype} {biases.shape}"
            )
        return Kind((*words.shape[:-1], count), dtype_of(params["dtype"]))

    def pull(self, e: Expr, want: Selection) -> Sequence[Selection]:
        groups = (*want[:-1], grouped(want[-1], e.params["group_size"])[0])
        return (*want[:-1], words_of(self._pieces(e, want[-1]))), groups, groups

    def _pieces(self, e: Expr, axis: Axis) -> list[Piece]:
        return stream(indices(axis), e.params["bits"], e.inputs[0].dtype.itemsize * 8)

    def compute(self, e: Expr, want: Selection, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        pieces = self._pieces(e, want[-1])
        codes = unpack(blocks[0], -1, words_of(pieces), pieces)
        if e.params.get("signed"):
            half = 1 << (e.params["bits"] - 1)
            codes = codes.view(torch.int8) if codes.dtype == torch.uint8 else codes
            codes = codes.bitwise_xor_(half).sub_(half)
        within = dtype_of(e.params["within"]).torch if e.params.get("within") else blocks[1].dtype
        at = torch.from_numpy(grouped(want[-1], e.params["group_size"])[1])
        scales, biases = (block.to(within).index_select(-1, at) for block in blocks[1:])
        return codes.to(within).mul_(scales).add_(biases).to(e.dtype.torch)

    def grain(self, e: Expr) -> Shape:
        return (*(1,) * (len(e.shape) - 1), e.params["group_size"])


def _turned(block: torch.Tensor) -> torch.Tensor:
    return block.transpose(-1, -2).contiguous()


def _scaled(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, at: Numbers) -> torch.Tensor:
    """Return ``(code - zero) * scale`` in float32.

    Parameters
    ----------
    codes
        Shape ``[..., rows, columns]``.
    zeros, scales
        Shape ``[..., rows, groups]``.
    at
        For each column the position of its group.
    """
    out = codes.to(torch.float32)
    zeros, scales = zeros.to(torch.float32), scales.to(torch.float32)
    size = len(at) // zeros.shape[-1]
    if size * zeros.shape[-1] == len(at) and (at.reshape(-1, size) == np.arange(zeros.shape[-1])[:, None]).all():
        groups = out.view(*out.shape[:-1], -1, size)  # whole groups: faster than looking each scale up
        groups.sub_(zeros.unsqueeze(-1)).mul_(scales.unsqueeze(-1))
        return out
    number = torch.from_numpy(at)
    return out.sub_(zeros.index_select(-1, number)).mul_(scales.index_select(-1, number))


OPS: dict[str, Op] = {"dequantize.gptq": Gptq(), "dequantize.awq": Awq(), "dequantize.affine": Affine()}
