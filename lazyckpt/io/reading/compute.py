"""Reading of tensors that are computed (core/expr.py): their operands are read and combined block by block.

A selection of the result is cut into blocks of some hundred thousand elements. A task reads what a block needs of the
operands, computes it and writes it into the output. So the memory that a read takes beside its result does not depend
on the size of the tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from ...core.box import Box, Selection, c_strides, is_run
from ...core.expr import SCANNED, cut, op_of
from ...core.extents import Extent
from ...core.rounding import convert, settle
from ...core.select import Reads
from ...core.specs import Expr, Input, TensorSpec
from ..pool import run, run_here
from ..storage.base import Store
from ..storage.joined import stores_of
from ..storage.remote import Remote
from ..system import without_openmp
from ..tasks import Task, Wait
from ..tensors import as_bytes, empty
from . import gather

if TYPE_CHECKING:
    import torch
else:
    from ...deferred import torch

BLOCK = 1 << 19  # elements that are computed at a time: they stay in a core's cache
_FAR = 1 << 21  # the same, if operands are behind a network: larger requests
_SCRATCH = 16 << 20  # bytes of memory that a thread keeps
_PARTS = 64  # parts of it that are kept
_preparing = threading.RLock()
_own = threading.local()
Plain = dict[int, "Extent | None"]  # id of an operand -> where it is, if it is one run of a file


def read(store: Store, spec: TensorSpec, reads: Reads) -> torch.Tensor:
    """Read or compute the elements that ``reads`` selects, into a new CPU tensor. Raises what `core.plan.plan` and the
    store's reads raise."""
    out = empty(reads.shape, spec.dtype.torch)
    run(tasks(store, spec, reads, out))
    return gather.finish(reads, out)


def tasks(store: Store, spec: TensorSpec, reads: Reads, out: torch.Tensor, block: int | None = None) -> Iterator[Task]:
    """Yield the tasks that fill ``out``, a contiguous CPU tensor of shape ``reads.shape``.

    Parameters
    ----------
    store, spec
        The tensor, and the store of its files or of its operands.
    reads
        What to read.
    out
        The memory.
    block
        Elements that are computed at a time. The result does not depend on it.
    """
    if spec.expr is None:
        yield from gather.tasks(store, spec, reads, out)
        return
    if not out.numel():
        return
    stores = stores_of(store)
    prepare(stores, spec.expr)
    waits = any(one.is_remote for one in stores)
    near = 2 * BLOCK if op_of(spec.expr.op).in_tiles else BLOCK
    shape = cut(spec.expr, tuple(out.shape), block or (_FAR if waits else near))
    plain: Plain = {}
    for box in grid(tuple(out.shape), shape):
        want = tuple(axis[a:b] for axis, a, b in zip(reads.want, box.start, box.stop, strict=True))
        work = partial(_fill, stores, plain, spec.expr, want, out[box.slices])
        yield prod(box.shape) * out.itemsize, Wait(work) if waits else work


def _fill(stores: Sequence[Store], plain: Plain, expr: Expr, want: Selection, target: torch.Tensor) -> None:
    memory: Scratch | None = getattr(_own, "memory", None)
    if memory is None:
        memory = _own.memory = Scratch()
        torch.get_num_threads()  # torch sets the number of a thread when the thread first asks for it
    memory.clear()
    with without_openmp():  # tasks run on as many threads as are worth it
        found = _computed(stores, plain, expr, want, memory, target)
        if found is target:
            return
        convert(found, target.dtype, target)
        if found.dtype == target.dtype and not op_of(expr.op).moves:  # else `convert` has settled it
            settle(target)


class Scratch:
    """Memory of a thread for the blocks of one task, used again by the next task.

    Allocating it each time would take longer than computing: the C library returns blocks of this size to the system,
    which clears them anew.
    """

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None
        self._parts: dict[tuple[int, tuple[int, ...], torch.dtype], Part] = {}  # of `_memory`, already made
        self.used = self._most = 0

    def clear(self) -> None:
        """Begin a task."""
        if self._memory is None or self._most > self._memory.numel():
            self._memory = torch.empty(max(self._most, 1 << 16), dtype=torch.uint8, device="cpu")
            self._parts.clear()
        self.used = self._most = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Part:
        """Return memory that is valid until the next `clear`."""
        at = self.used
        nbytes = prod(shape) * dtype.itemsize
        self.used = at + -(-nbytes // 64) * 64
        if self.used <= _SCRATCH:
            self._most = max(self._most, self.used)
        part = self._parts.get((at, shape, dtype))  # blocks have the same shapes again and again
        if part is not None:
            return part
        if self._memory is None or self.used > self._memory.numel():
            return Part.of(empty(shape, dtype))
        if len(self._parts) >= _PARTS:
            self._parts.clear()
        part = self._parts[at, shape, dtype] = Part.of(self._memory[at : at + nbytes].view(dtype).view(shape))
        return part

    def give_back(self, part: Part) -> None:
        """Use the memory of the part that was taken last again."""
        self.used -= -(-len(part.memory) // 64) * 64


class Part(NamedTuple):
    """Memory for a block, as a tensor and as its bytes."""

    block: torch.Tensor
    memory: memoryview

    @classmethod
    def of(cls, block: torch.Tensor) -> Part:
        """Return the memory of a contiguous tensor."""
        return cls(block, as_bytes(block))


def evaluate(stores: Sequence[Store], node: Expr | Input, want: Selection) -> torch.Tensor:
    """Return selected elements of an expression, computed on this thread.

    Parameters
    ----------
    stores
        The stores of the operands.
    node
        The expression, or an operand.
    want
        Ascending indices for each dimension.
    """
    return _block(stores, {}, node, want, node.dtype.torch, None)


def _block(
    stores: Sequence[Store],
    plain: Plain,
    node: Expr | Input,
    want: Selection,
    dtype: torch.dtype,
    memory: Scratch | None,
) -> torch.Tensor:
    """Return selected elements of an expression, or of an operand, in a dtype that holds all its values. ``memory``:
    where to, if the block is not kept."""
    own = node.dtype.torch
    if isinstance(node, Expr):
        found = _computed(stores, plain, node, want, memory)
        if found.dtype == own and not op_of(node.op).moves:  # else `convert` settles it
            settle(found)
        return convert(convert(found, own), dtype)
    shape = tuple(map(len, want))
    if memory is None:
        return convert(_read(stores, plain, node, want, Part.of(empty(shape, own))), dtype)
    out = memory.take(shape, dtype)
    if own == dtype:
        return _read(stores, plain, node, want, out)
    raw = memory.take(shape, own)
    convert(_read(stores, plain, node, want, raw), dtype, out.block)
    memory.give_back(raw)
    return out.block


def _read(stores: Sequence[Store], plain: Plain, node: Input, want: Selection, out: Part) -> torch.Tensor:
    """Read selected elements of an operand."""
    block, memory = out
    if not memory:
        return block
    store = stores[node.source]
    if id(node) not in plain:
        plain[id(node)] = _plain(node)
    extent = plain[id(node)]
    first = None if extent is None else _first(want, node.shape)
    if extent is None or first is None:
        run_here(gather.tasks(store, node.spec, Reads(want, (), (), tuple(block.shape)), block))
    elif isinstance(store, Remote):
        run_here(gather.run_tasks(store, extent.path, extent.offset + first * block.itemsize, block))
    else:
        store.read_into(extent.path, extent.offset + first * block.itemsize, memory)
    return block


def _plain(node: Input) -> Extent | None:
    """Return the extent of an operand that is one run of raw elements of one file."""
    fragments = node.spec.fragments
    if type(fragments) is not tuple or len(fragments) != 1:
        return None
    (fragment,) = fragments
    extent = fragment.extent
    if fragment.parts is not None or fragment.axes is not None or fragment.span is not None:
        return None
    if type(extent) is not Extent or not extent.raw or extent.dtype is not node.dtype or extent.shape != node.shape:
        return None
    return extent if is_run(extent.shape, extent.strides) else None


def _first(want: Selection, shape: tuple[int, ...]) -> int | None:
    """Return the C-order number of the first selected element, if all selected ones follow each other."""
    first = 0
    partial = False  # whether a dimension further in is not whole
    for axis, n, stride in zip(reversed(want), reversed(shape), reversed(c_strides(shape)), strict=True):
        if not isinstance(axis, range) or (axis.step != 1 and len(axis) > 1) or (partial and len(axis) > 1):
            return None
        partial = partial or len(axis) < n
        first += axis.start * stride
    return first


def _computed(
    stores: Sequence[Store],
    plain: Plain,
    node: Expr,
    want: Selection,
    memory: Scratch | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return selected elements of an expression, perhaps in another dtype than its own (`Op.compute`). ``out``: memory
    of its own dtype that the operation may use for them."""
    if not all(map(len, want)):
        return empty(tuple(map(len, want)), node.dtype.torch)
    op = op_of(node.op)
    if op.prepares and "prepared" not in node.kept:
        prepare(stores, node)
    wide = op.wide(node)
    memory = memory if op.lets_go else None
    blocks: Iterator[torch.Tensor] = (
        _block(stores, plain, one, part, (wide or one.dtype).torch, memory)
        for one, part in zip(node.inputs, op.pull(node, want), strict=True)
    )
    if op.in_turn and memory is not None:
        blocks = _in_turn(blocks, memory)
    given: Any = blocks if op.in_turn else list(blocks)
    return op.compute(node, want, given) if out is None else op.fill(node, want, given, out)


def _in_turn(blocks: Iterator[torch.Tensor], memory: Scratch) -> Iterator[torch.Tensor]:
    """Yield blocks; all but the first use the same memory, one after the other."""
    yield next(blocks)
    mark = memory.used
    for block in blocks:
        yield block
        memory.used = mark


def prepare(stores: Sequence[Store], node: Expr | Input) -> None:
    """Compute what operations need of their whole operands, once, and keep it in ``kept`` of the expressions.

    `tasks` calls this before the first block, so that threads that compute blocks do not wait for each other.
    """
    if isinstance(node, Input):
        return
    for one in node.inputs:
        prepare(stores, one)
    op = op_of(node.op)
    if not op.prepares or "prepared" in node.kept:
        return
    with _preparing:  # threads of the pool never wait for the lock: `tasks` has prepared what they compute
        if "prepared" not in node.kept:
            node.kept["prepared"] = op.prepare(node, _scan(stores, node))


def _scan(stores: Sequence[Store], node: Expr) -> Callable[..., Iterator[tuple[Box, list[torch.Tensor]]]]:
    """Return a function that iterates over whole operands, as `core.expr.Scan` says."""

    def scan(*numbers: int) -> Iterator[tuple[Box, list[torch.Tensor]]]:
        shape = node.inputs[numbers[0]].shape
        for box in grid(shape, _scanned(shape)) if prod(shape) else ():
            want = tuple(map(range, box.start, box.stop))
            yield box, [evaluate(stores, node.inputs[n], want) for n in numbers]

    return scan


def _scanned(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the blocks in which whole operands are iterated over."""
    found = list(shape)
    for d in range(len(shape)):
        rest = prod(shape[d + 1 :])
        found[d] = 1 if rest >= SCANNED else min(shape[d], SCANNED // max(1, rest))
        if found[d] > 1:
            break
    return tuple(found)


def grid(shape: tuple[int, ...], block: tuple[int, ...]) -> Iterator[Box]:
    """Yield the blocks of a grid, in C order."""
    if not shape:
        yield Box((), ())
        return
    for start in product(*(range(0, n, max(1, size)) for n, size in zip(shape, block, strict=True))):
        yield Box(start, tuple(min(n, a + size) for n, a, size in zip(shape, start, block, strict=True)))
