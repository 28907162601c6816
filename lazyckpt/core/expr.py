"""Expressions: tensors that are computed from others, as pure data. No I/O.

A `TensorSpec` says where the elements of a tensor are; an `Expr` says what is computed from such tensors. An `Expr` is
a tree: it has the name of an operation, its operands, which may be expressions, and its parameters. It holds no code,
so it can be pickled, written to a file and sent to other machines.

Each operation (`Op`) knows three things:

- `kind`: the shape and the dtype of the result;
- `pull`: which elements of the operands a selection of the result needs. So a slice of an expression reads only the
  bytes that it needs;
- `compute`: the selected elements of the result, from the selected elements of the operands.

A slice of an expression equals the same slice of the whole result, bit for bit. The value of an element must therefore
not depend on which other elements are computed with it. Kernels of torch that round once for each element (``+``,
``*``, ``/``, ``sqrt``, conversions) satisfy this rule. Fused kernels (``addcmul``, ``lerp``, ``add(..., alpha=)``) and
sums over a dimension (``@``, ``sum``) violate it, because their rounding depends on the position of an element or on
the shape of the array. tests/test_expr.py checks the rule for every operation.

Operations compute in float32, or in float64 if an operand is float64, unless their own docstring says otherwise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import DataError
from .box import Box, Selection, Shape
from .dtypes import F32, F64, DType, check_converts
from .extents import from_folder
from .specs import Expr, Fragment, Input, TensorSpec

if TYPE_CHECKING:
    import torch
else:
    from ..deferred import torch


class Kind(NamedTuple):
    """The shape, in elements, and the dtype of a tensor."""

    shape: Shape
    dtype: DType


# Iterate over the elements of operands, by their numbers: yields (block, the operands' elements in the block). The
# operands have the same shape; the blocks are in C order, have the same boundaries each time, and at most `SCANNED`
# elements.
Scan = Callable[..., Iterator[tuple[Box, list["torch.Tensor"]]]]
SCANNED = 1 << 20


class Op(ABC):
    """An operation. One object for each name, without state.

    All methods but `kind` get the expression ``e``. It has the shape and the dtype of the result, the parameters, and
    the operands (``e.inputs``), of which an operation uses only ``shape`` and ``dtype``.
    """

    prepares = False  # whether `prepare` is called before the first block is computed
    in_turn = False  # whether `compute` gets an iterator; taking a block may overwrite earlier ones, except the first
    moves = False  # whether the result has the bits of operands, unchanged (then the bits of its NaN are kept)
    in_tiles = False  # whether `compute` needs little memory beside the blocks and the result: blocks may be larger
    lets_go = False  # whether the reader may use the memory of the blocks again when `compute` has returned
    elementwise = False  # whether an element needs the same element of every operand, all of which have its shape

    @property
    def parts(self) -> bool:
        """Whether the operation on parts of its operands is the part of its result: an element depends on the same
        element of each operand, and neither on whole operands nor on its place."""
        return self.elementwise and not self.prepares

    @abstractmethod
    def kind(self, inputs: Sequence[Kind], params: Mapping[str, Any]) -> Kind:
        """Return the shape and the dtype of the result. Raises DataError if the operands do not fit.

        Parameters
        ----------
        inputs
            The kinds of the operands.
        params
            The parameters.
        """

    @abstractmethod
    def pull(self, e: Expr, want: Selection) -> Sequence[Selection]:
        """Return the elements of each operand that a selection of the result needs.

        Parameters
        ----------
        e
            The expression.
        want
            The selected elements of the result: ascending indices for each dimension, none of them empty.
        """

    @abstractmethod
    def compute(self, e: Expr, want: Selection, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the selected elements of the result.

        Parameters
        ----------
        e
            The expression. ``e.kept["prepared"]`` is what `prepare` returned.
        want
            The selected elements of the result.
        blocks
            The elements of each operand that `pull` returned, as CPU tensors with one dimension for each dimension of
            the operand, in the dtype that `wide` returned. They belong to the operation, which may change them in
            place. An iterator if `in_turn`.

        Returns
        -------
        torch.Tensor
            Of the shape of the selection. If it has another dtype than the expression, the reader converts it
            (`core.rounding.convert`), which saves a pass over the block. It may share memory with ``blocks``.
        """

    def fill(self, e: Expr, want: Selection, blocks: Sequence[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
        """Return the same as `compute`, or ``out``.

        Parameters
        ----------
        e, want, blocks
            As for `compute`.
        out
            Memory for the result, of its shape and dtype, with any strides. An operation that returns it has settled
            its NaN (`core.rounding.settle`), and saved a pass over the block.
        """
        return self.compute(e, want, blocks)

    def wide(self, e: Expr) -> DType | None:
        """Return the dtype in which `compute` gets the blocks of all operands; None for each operand's own. The reader
        converts while it reads, without allocating memory."""
        return None

    def prepare(self, e: Expr, scan: Scan) -> Any:
        """Return what `compute` needs of whole operands (a norm, a threshold), in bounded memory: numbers, or a tensor
        of a few elements for each row. It must not depend on threads. Called once, if `prepares`.

        Parameters
        ----------
        e
            The expression.
        scan
            ``scan(0, 2)`` iterates over the elements of operands 0 and 2; each call is one pass.
        """
        raise AssertionError(f"{e.op} does not prepare anything")

    def grain(self, e: Expr) -> Shape:
        """Return the shape of the smallest blocks of the result that are efficient to compute: what shares packed codes
        or a scale. Blocks of other shapes are computed, too."""
        return (1,) * len(e.shape)

    def about(self, e: Expr) -> str:
        """Return a few words about the operation for `LazyTensor.explain`."""
        shown = [f"{key}={_short(value)}" for key, value in e.params.items() if value is not None]
        return f"{e.op}({', '.join(shown)})" if shown else e.op


# Operation -> the module of core/ops that defines it, in its table `OPS`.
_MODULES = {
    "cast": "elementwise", "conj": "elementwise", "neg": "elementwise", "linear": "elementwise", "mean": "elementwise",
    "same": "elementwise",
    "product": "product",
    "place": "placing",
    "flat": "placing",
    "reshape": "placing",
    "transpose": "placing",
    "merge.task_vectors": "merging",
    "merge.slerp": "merging",
    "merge.nuslerp": "merging",
    "merge.multislerp": "merging",
    "merge.karcher": "merging",
    "merge.model_stock": "merging",
    "merge.agreed": "merging",
    "map": "mapped",
    "dequantize.scaled": "scaled",
    "dequantize.by_index": "scaled",
    "dequantize.fp4": "packed",
    "dequantize.fp6": "packed",
    "dequantize.e8m0": "packed",
    "dequantize.bits": "packed",
    "dequantize.sparse24": "sparse",
    "dequantize.bitmask": "sparse",
    "dense.coo": "dense",
    "dense.compressed": "dense",
    "dequantize.marlin": "marlin",
    "dequantize.marlin24": "marlin",
    "dequantize.gptq": "words",
    "dequantize.awq": "words",
    "dequantize.bnb_4bit": "bitsandbytes",
    "dequantize.bnb_int8": "bitsandbytes",
    "dequantize.hqq": "hqq",
    "delta.bits": "deltas",
    "delta.xor": "deltas",
    "delta.overwrite": "deltas",
    "delta.checked": "deltas",
    "delta.scatter": "deltas",
    "dequantize.gguf": "ggml",
    "as_bits": "packed",
    "dequantize.affine": "words",
    "dequantize.nf4": "nf4",
    "quantize.scales": "quantizing",
    "quantize.codes": "quantizing",
    "quantize.pairs": "quantizing",
    "quantize.mean": "double_quantizing",
    "quantize.centered": "double_quantizing",
    "quantize.nested_state": "double_quantizing",
    "quantize.gguf": "ggml_quantizing",
    "constant": "quantizing",
    "multiply": "adapters",
    "kron": "adapters",
    "lora.dora": "adapters",
    "fill": "filling",
    "random.normal": "filling",
    "update.adam": "updating",
    "update.lion": "updating",
    "update.sgd": "updating",
    "update.adafactor": "updating",
    "update.muon": "updating",
}  # fmt: skip


def op_of(name: str) -> Op:
    """Return the operation of a name.

    Raises DataError for an unknown name: the expression was written by a later version.
    """
    module = _MODULES.get(name)
    if module is None:
        raise DataError(f"there is no operation {name!r} in this version of lazyckpt: update lazyckpt")
    found = _known.get(name)
    if found is None:
        found = _known[name] = import_module(f".ops.{module}", __package__).OPS[name]
    return found


_known: dict[str, Op] = {}


def make(op: str, *inputs: Expr | Input, **params: Any) -> Expr:
    """Return an expression.

    Parameters
    ----------
    op
        The name of the operation.
    *inputs
        The operands.
    **params
        The parameters.

    Raises
    ------
    DataError
        The operands do not fit the operation.
    """
    kind = op_of(op).kind([Kind(one.shape, one.dtype) for one in inputs], params)
    return Expr(op, inputs, params, *kind)


def operand(spec: TensorSpec, source: int = 0) -> Expr | Input:
    """Return a tensor as an operand: its own expression if it has one, which then must be of the same store."""
    return Input(spec, source) if spec.expr is None else spec.expr


def as_expr(node: Expr | Input) -> Expr:
    """Return an operand as an expression."""
    return make("same", node) if isinstance(node, Input) else node


def computed(name: str, node: Expr | Input, rule: str = "", stored_as: str = "") -> TensorSpec:
    """Return the spec of a tensor with the value of an expression or an operand, in a view of any number of stores."""
    expr = as_expr(node)
    return TensorSpec(name, expr.shape, expr.dtype, (), rule=rule, stored_as=stored_as, expr=expr)


def of_one_store(name: str, node: Expr | Input, rule: str = "") -> TensorSpec:
    """Return the same as `computed` in a view of one store: there an operand is the tensor itself, under the new name.
    In a view of several, its fragments would not say which store has their files: `LazyArray` refuses it.

    Raises ValueError for an operand of another store.
    """
    if isinstance(node, Expr):
        return computed(name, node, rule)
    if node.source:
        raise ValueError(f"{name!r} is in store {node.source} of several: it needs an expression")
    return replace(node.spec, name=name, stored_as=node.spec.stored_as or node.spec.name)


def leaves(spec: TensorSpec) -> Iterator[Input]:
    """Yield the tensors in files that a tensor is computed from, with repetitions; a tensor in files yields itself."""
    if spec.expr is None:
        yield Input(spec)
        return
    stack: list[Expr | Input] = [spec.expr]
    while stack:
        node = stack.pop()
        if isinstance(node, Input):
            yield node
        else:
            stack.extend(reversed(node.inputs))


def wanted(spec: TensorSpec, want: Selection) -> Iterator[tuple[Input, Selection]]:
    """Yield the tensors in files that a selection of a tensor needs, each with its selected elements."""
    if not all(map(len, want)):
        return
    stack: list[tuple[Expr | Input, Selection]] = [(Input(spec) if spec.expr is None else spec.expr, want)]
    while stack:
        node, part = stack.pop()
        if isinstance(node, Input):
            yield node, part
        elif all(map(len, part)):
            stack.extend(zip(node.inputs, op_of(node.op).pull(node, part), strict=True))


def cast(spec: TensorSpec, dtype: DType) -> TensorSpec:
    """Return a tensor that is converted to another dtype, as `torch.Tensor.to` does, under the same name. The caller
    has checked that torch converts it (`core.dtypes.check_converts`)."""
    if spec.dtype is dtype:
        return spec
    expr = Expr("cast", (operand(spec),), {"dtype": dtype}, spec.shape, dtype)
    return TensorSpec(spec.name, spec.shape, dtype, (), rule=spec.rule, stored_as=spec.stored_as, expr=expr)


def converted(specs: Mapping[str, TensorSpec], dtype: DType) -> dict[str, TensorSpec]:
    """Return the tensors with ``dtype`` in place of every floating-point dtype.

    Raises DataError if torch cannot convert one of them.
    """
    for kind, name in {s.dtype: name for name, s in specs.items() if s.dtype.is_floating_point}.items():
        check_converts(name, kind, dtype)
    return {name: cast(s, dtype) if s.dtype.is_floating_point else s for name, s in specs.items()}


def structure(spec: TensorSpec) -> tuple[Any, ...]:
    """Return all about an expression but the fragments of its operands, as plain values whose `repr` identifies it."""

    def of(node: Expr | Input) -> tuple[Any, ...]:
        if isinstance(node, Input):
            return node.source, node.shape, node.dtype
        return node.op, sorted(node.params.items()), tuple(map(of, node.inputs))

    return () if spec.expr is None else of(spec.expr)


def formula(spec: TensorSpec) -> str:
    """Return how a tensor is computed, as text: ``computed: linear(weights=(0.5, 0.5)) of (a, b)``."""

    def text(node: Expr | Input, depth: int) -> str:
        if isinstance(node, Input):
            return node.spec.stored_as or node.spec.name
        inner = ", ".join(text(one, depth + 1) for one in node.inputs[:_SHOWN]) if depth < _DEEP else "..."
        more = f", and {len(node.inputs) - _SHOWN} more" if len(node.inputs) > _SHOWN else ""
        return f"{op_of(node.op).about(node)} of ({inner}{more})"

    return "" if spec.expr is None else f"computed: {text(spec.expr, 0)}"


_SHOWN = 6  # operands that a formula lists
_DEEP = 6  # levels that a formula shows


def relocated_sources(expr: Expr | Input, by: int) -> Expr | Input:
    """Return an expression whose operands are in the store ``by`` numbers further on."""
    if isinstance(expr, Input):
        return replace(expr, source=expr.source + by)
    return replace(expr, inputs=tuple(relocated_sources(one, by) for one in expr.inputs), kept={})


def outline(spec: TensorSpec) -> Sequence[Fragment]:
    """Return the fragments whose boundaries a tensor follows: its own, or those of the first operand of the same
    shape."""
    node: Expr | Input = Input(spec) if spec.expr is None else spec.expr
    while isinstance(node, Expr):
        same = [one for one in node.inputs if one.shape == spec.shape]
        if not same:
            return ()
        node = same[0]
    return node.spec.fragments


def parallel(spec: TensorSpec) -> Sequence[TensorSpec]:
    """Return the tensors in files whose elements lie where the tensor's do: the tensor itself, or the operands of
    operations on elements. Empty for other operations, and for operands in several stores."""
    if spec.expr is None:
        return (spec,)
    found: list[TensorSpec] = []
    stack: list[Expr | Input] = [spec.expr]
    while stack:
        node = stack.pop()
        if isinstance(node, Input):
            if node.source:
                return ()
            found.append(node.spec)
        elif op_of(node.op).elementwise:
            stack.extend(reversed(node.inputs))
        else:
            return ()
    return found


def relocated(spec: TensorSpec, folder: str) -> TensorSpec:
    """Return the tensor with ``folder`` in front of the paths of its files."""

    def moved(node: Expr | Input) -> Expr | Input:
        if isinstance(node, Input):
            return replace(node, spec=relocated(node.spec, folder))
        return replace(node, inputs=tuple(map(moved, node.inputs)), kept={})

    if spec.expr is not None:
        expr = moved(spec.expr)
        assert isinstance(expr, Expr)
        return replace(spec, expr=expr)
    return replace(spec, fragments=tuple(replace(f, extent=from_folder(folder, f.extent)) for f in spec.fragments))


def wide(*dtypes: DType) -> DType:
    """Return the dtype to compute in: float64 if an operand has it (or complex128), else float32."""
    return F64 if any(dtype.is_floating_point and dtype.itemsize == 8 for dtype in dtypes) else F32


def same_shape(op: str, inputs: Sequence[Kind]) -> Shape:
    """Return the shape that all operands have. Raises DataError if they differ."""
    shapes = dict.fromkeys(kind.shape for kind in inputs)
    if len(shapes) != 1:
        raise DataError(f"{op}: the operands have different shapes: {', '.join(map(str, shapes)) or 'there are none'}")
    return next(iter(shapes))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def cut(e: Expr, shape: Shape, most: int) -> Shape:
    """Return the shape of the blocks, of about ``most`` elements, in which to compute a selection of this shape."""
    grain = op_of(e.op).grain(e)
    found = list(shape)
    for d in range(len(shape)):
        rest = max(1, prod(found[d + 1 :]))
        lead = prod(found[:d])
        if lead * found[d] * rest <= most:
            break
        length = max(1, most // (rest * max(1, lead)))
        step = min(grain[d], shape[d])
        found[d] = min(shape[d], max(step, length // step * step))
    return tuple(found)
