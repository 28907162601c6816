"""Lazy arrays: name, shape and dtype are known at once, indexing reads elements.

The contract, which one suite of tests checks on every format (lazyckpt/testing/contract.py):

- name, shape, dtype, nbytes, repr, `explain` and `lazy[...]` read no tensor data;
- ``t[key]`` equals ``whole[key]`` bit for bit, as torch (and for negative steps numpy) indexes the whole tensor. The
  result belongs to the caller: writing to it never changes a file;
- indexing reads the bytes that it returns, plus at most the store's stated gap between two runs;
- a tensor pickles to its description, and any number of threads may read it at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from math import prod
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar

import numpy as np

from .core.box import Box, Shape, c_strides, tiles
from .core.compose import held, inside
from .core.copies import Copy
from .core.dtypes import check_converts, dtype_of
from .core.expr import cast, formula, leaves, wanted
from .core.extents import Extent, Packed
from .core.fragments import fragments_of
from .core.select import Selection
from .core.specs import Fragment, TensorSpec
from .errors import DataError, LazyckptError, SelectionError, printable
from .io.pool import run, run_here
from .io.reading.compute import read, tasks
from .io.reading.cost import Cost
from .io.reading.device import Ring, ring
from .io.reading.forecast import Forecast, forecast, planned_unread
from .io.reading.gather import Run, agree, finish, plan, run_tasks, runs
from .io.reading.mosaic import Mosaic
from .io.reading.slices import plain_run, planned_apart, weight_of, window_of
from .io.reading.window import Window
from .io.storage.access import check, narrow
from .io.storage.base import Buffer, Store
from .io.storage.joined import Joined, stores_of
from .io.storage.remote import Remote
from .io.tasks import Task
from .io.tensors import empty
from .likeness import Likeness

if TYPE_CHECKING:
    import torch
else:
    from .deferred import torch

A = TypeVar("A", bound="LazyArray")
_MOST = 1 << 48  # bytes up to which a tensor is cut into pieces
_REPLICAS = 4 << 20  # bytes of a tensor whose copies are compared at a time


def cost_of(t: LazyArray) -> Cost:
    """Return the cost of reading a whole array. Reads nothing, but raises the errors that reading would raise."""
    return t._cost(t._sel)


def requests_of(tensors: Iterable[LazyArray]) -> Forecast | None:
    """Return how many requests and bytes reading whole arrays together takes; None if they are not behind a network.
    Reads nothing. Arrays that cannot be read are left out."""
    plans: dict[int, tuple[Remote, list[Copy]]] = {}
    for t in (operand for tensor in tensors for operand in tensor.operands):
        if isinstance(t.store, Remote) and not t.store.maps_files:
            _, copies = plans.setdefault(id(t.store), (t.store, []))
            with suppress(LazyckptError):
                copies.extend(planned_unread(t.store, t.spec, t._sel.reads().want))
    found = [forecast(store, copies) for store, copies in plans.values()]
    return Forecast(*map(sum, zip(*found, strict=True))) if found else None


class LazyArray(Likeness):
    """A tensor of a checkpoint, or a part of one. Indexing reads elements; `name`, `shape` and `dtype` read nothing.

    A `LazyTensor` without the methods that plot, summarize and convert. Exporters, statistics and displays work with
    this class.

    Parameters
    ----------
    store
        The store that the bytes are read from.
    spec
        The files and byte ranges of the tensor.
    selection
        The part of the tensor to read; None for the whole.
    """

    __slots__ = ("__weakref__", "_selection", "_slices", "_store", "_window", "spec")

    def __init__(self, store: Store, spec: TensorSpec, selection: Selection | None = None) -> None:
        if spec.expr is None and isinstance(store, Joined):  # its fragments do not say which store has their files
            raise ValueError(f"{spec.name!r} in several stores needs an expression: core.expr.computed makes one")
        self.spec = spec
        self._store = store
        self._selection = selection  # None: the whole
        self._window: Window | Mosaic | Literal[False] | None = False  # False: not yet looked for
        self._slices = 0  # slices read before

    # -- what it is

    @property
    def name(self) -> str:
        """The tensor's full name in the checkpoint."""
        return self.spec.name

    @property
    def shape(self) -> torch.Size:
        return torch.Size(shape_of(self))

    @property
    def dtype(self) -> torch.dtype:
        return self.spec.dtype.torch

    def numel(self) -> int:
        return prod(shape_of(self))

    @property
    def nbytes(self) -> int:
        """Bytes of the elements in memory (of a dense copy), not in the file."""
        return self.numel() * self.spec.dtype.itemsize

    @property
    def fragments(self) -> Sequence[Fragment]:
        """The part of the tensor that each file holds, as data.

        A tensor that is computed element by element has the fragments of its `operands`, in the order of the operands.
        Other computed tensors have none.
        """
        return held(self.spec)

    @property
    def operands(self) -> Sequence[LazyArray]:
        """The tensors in files that this tensor is computed from, each once; by default the tensor itself."""
        if self.spec.expr is None:
            return (self,)
        stores = stores_of(self._store)
        found = {(one.source, id(one.spec)): one for one in leaves(self.spec)}
        return [LazyArray(stores[one.source], one.spec) for one in found.values()]

    def _needed(self, selection: Selection) -> Iterator[tuple[LazyArray, Selection]]:
        """Yield the tensors in files that a selection needs, each with its own selection."""
        if self.spec.expr is None:
            yield self, selection
            return
        stores = stores_of(self._store)
        for one, want in wanted(self.spec, selection.reads().want):
            yield LazyArray(stores[one.source], one.spec), Selection(want, tuple(range(len(want))), len(want))

    def __repr__(self) -> str:
        sizes = "x".join(map(str, shape_of(self))) or "scalar"
        return f"{type(self).__name__}({self.name!r}, {sizes}, {self.spec.dtype.short})"

    @property
    def store(self) -> Store:
        """The store that the bytes are read from."""
        return self._store

    def _check(self) -> None:
        """Raise the error that reading would raise because a file is missing. Reads nothing."""
        if self.spec.expr is not None:
            for one, selection in self._needed(self._sel):
                plan(one._store, one.spec, selection.axes)
            return
        if self._plain is not None or fragments_of(self.spec.fragments).intact:  # nothing to plan
            return
        plan(self._store, self.spec, self._sel.reads().want)

    @property
    def _archives(self) -> list[Packed]:
        """The archives and chunks that reading the whole tensor looks into, so that many can be located at once
        (`locate_all`). Empty for a part of a tensor."""
        return [] if self._selection is not None else fragments_of(self.spec.fragments).packed()

    def explain(self, key: Any = ...) -> str:
        """Describe which files and byte ranges ``t[key]`` reads, and how many bytes. Reads no tensor data.

        Parameters
        ----------
        key
            An index, as for ``t[key]``. By default the whole tensor.

        Returns
        -------
        str
            Several lines of text.

        Raises
        ------
        SelectionError
            The index does not fit the shape.
        MissingFileError
            A file that the read needs does not exist.
        """
        selection = self._sel[key]
        cost = self._cost(selection)
        sizes = "x".join(map(str, selection.shape)) or "scalar"
        nbytes = prod(selection.shape) * self.spec.dtype.itemsize
        head = [f"{self.name}: {sizes} {self.spec.dtype.short}, {nbytes:,} bytes from {cost.summary}"]
        if self.spec.expr is not None:
            head.append(f"  {formula(self.spec)}")
        if self.spec.stored_as:
            head.append(f"  stored as {self.spec.stored_as!r}")
        if self.spec.rule:
            head.append(f"  {self.spec.rule}")
        return "\n".join(map(printable, [*head, *(f"  {place}" for place in cost.places)]))

    def _cost(self, selection: Selection) -> Cost:
        """Return the cost of reading a selection. Reads nothing, but raises the errors that reading would raise."""
        cost = Cost()
        for one, part in self._needed(selection):
            cost.add(one._store, one.spec, part.reads().want)
        return cost

    def replicas_agree(self) -> bool:
        """Compare all copies of the same elements in the checkpoint, byte for byte.

        Some tensors are replicated: norms on every tensor-parallel rank, dense parameters in the file of every
        expert-parallel rank. Indexing reads the first copy; this method reads all of them, 4 MiB at a time. Elements
        with a single copy are not read. Copies in missing files are skipped.

        Returns
        -------
        bool
            Whether the copies are equal. For a tensor that is the mean of its replicas, False means that the replicas
            differ.

        Raises
        ------
        LazyckptError
            What reading raises.
        """
        for one in self.operands:
            for box in tiles(one.spec.shape, _REPLICAS // one.spec.dtype.itemsize):
                if not agree(one._store, one.spec, tuple(map(range, box.start, box.stop))):
                    return False
        return True

    # -- reading

    def __getitem__(self, key: Any) -> torch.Tensor:
        """Read the indexed elements.

        Parameters
        ----------
        key
            Ints, slices (also with negative steps), Ellipsis, None, at most one 1-d list of ints or 1-d mask; or a
            single mask of several dimensions, which reads the rows in which it is true somewhere.

        Returns
        -------
        torch.Tensor
            A tensor of the same `dtype` on the CPU that shares no memory with a file. torch cannot resize the storage
            of a small one, as that of `torch.from_numpy`.

        Raises
        ------
        SelectionError
            The key does not fit the shape.
        MissingFileError
            A file that holds indexed elements does not exist. Slices that do not need the file work.
        ChangedFileError
            A file is not the one that was opened.
        CorruptError
            Packed elements cannot be unpacked.
        DataError
            The tensor has no data, or no rule merges its shards.
        """
        window = self._window
        if window is False:
            window = self._found_window(key)
        if window is not None:
            found = window.read(key) if isinstance(window, Window) else window.rows(key)
            if found is not None:
                return found
        if key is Ellipsis:
            return self._whole()
        if isinstance(key, torch.Tensor | np.ndarray) and key.ndim > 1 and key.dtype in (torch.bool, np.bool_):
            return self._masked(torch.tensor(key, device="cpu") if isinstance(key, np.ndarray) else key.cpu())
        reads = self._sel[key].reads()
        found = window.read(reads) if isinstance(window, Mosaic) else None
        return read(self._store, self.spec, reads) if found is None else found

    def _masked(self, mask: torch.Tensor) -> torch.Tensor:
        """Read the elements where a mask of the first dimensions is true, in C order."""
        if mask.shape != self.shape[: mask.ndim]:
            raise SelectionError(f"the mask has shape {tuple(mask.shape)}, the tensor {tuple(self.shape)}")
        rows = mask.flatten(1).any(1)
        return self[rows][mask[rows]]

    def float(self) -> torch.Tensor:
        """Read the whole tensor as float32."""
        return self.to(torch.float32)

    def double(self) -> torch.Tensor:
        """Read the whole tensor as float64."""
        return self.to(torch.float64)

    def cpu(self) -> torch.Tensor:
        """Read the whole tensor to the CPU."""
        return self[...]

    @property
    def T(self) -> torch.Tensor:  # noqa: N802 - as torch calls it
        """The whole tensor with its dimensions reversed. Reads it."""
        whole = self[...]
        return whole.permute(*range(whole.ndim - 1, -1, -1))

    def read_into(self, out: torch.Tensor) -> torch.Tensor:
        """Read the whole tensor into existing memory, on the calling thread only.

        Parameters
        ----------
        out
            A contiguous CPU tensor of the same shape and dtype.

        Returns
        -------
        torch.Tensor
            ``out``.

        Raises
        ------
        DataError
            ``out`` is not such a tensor.
        LazyckptError
            What ``t[...]`` raises.
        """
        if out.shape != self.shape or out.dtype != self.dtype or not out.is_contiguous() or out.device.type != "cpu":
            raise DataError(
                f"{self.name!r} is read into a contiguous CPU tensor of shape {tuple(self.shape)} and {self.dtype}, "
                f"not {tuple(out.shape)} and {out.dtype} on {out.device}"
            )
        if out.is_conj() or out.is_neg():
            raise DataError(f"{self.name!r} cannot be read into a conjugated or negated view: copy the view first")
        work, ready = self._start(out)
        run_here(work)
        return ready()

    def pieces(self, nbytes: int) -> Iterator[tuple[int, Self]]:
        """Cut the tensor into contiguous pieces of its C order, without reading them.

        Parameters
        ----------
        nbytes
            Largest size of a piece in bytes. A piece has at least one element.

        Yields
        ------
        tuple of int and LazyTensor
            The number of elements before the piece, and the piece.

        Raises
        ------
        DataError
            The tensor has more than 2**48 bytes.
        """
        if self.nbytes > _MOST:  # an expanded number or a fill value may have any shape
            raise DataError(f"{self.name!r} of shape {tuple(self.shape)} is too large to read all of it: read slices")
        if 0 < self.nbytes <= nbytes:
            yield 0, self
            return
        strides = c_strides(self.shape)
        for box in tiles(self.shape, nbytes // self.spec.dtype.itemsize):
            ahead = sum(a * s for a, s in zip(box.start, strides, strict=True))
            yield ahead, (self if box.shape == self.shape else self.lazy[box.slices])

    def _runs(self) -> list[Run] | None:
        """Return the byte runs of all elements in C order; None if elements have to be gathered, converted or unpacked.
        Reads no elements, but raises the errors that reading would raise."""
        extent = self._plain
        if extent is not None:
            return [Run(extent.path, extent.offset, self.nbytes)]
        reads = self._sel.reads()
        if reads.flips or reads.orders or self.spec.expr is not None:
            return None
        return runs(self._store, self.spec, reads.want)

    def astype(self, dtype: torch.dtype) -> Self:
        """Return a lazy tensor that is converted to another dtype when it is read. Reads nothing.

        Parameters
        ----------
        dtype
            Any dtype that torch can convert the elements to.

        Returns
        -------
        LazyTensor
            The converted tensor.

        Raises
        ------
        DataError
            torch cannot convert the elements to ``dtype``.
        """
        wanted = dtype_of(dtype)
        if wanted is self.spec.dtype:
            return self
        check_converts(self.name, self.spec.dtype, wanted)
        return type(self)(self._store, cast(self.spec, wanted), self._selection)

    @property
    def lazy(self) -> _Deferred[Self]:
        """Indexing that reads nothing: ``t.lazy[key]`` is a lazy tensor of the elements of ``t[key]``. Raises
        SelectionError."""
        return _Deferred(self)

    def to(
        self,
        device: str | torch.device | torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        copy: bool = True,
    ) -> torch.Tensor:
        """Read the whole tensor to a device.

        Elements go to an accelerator through page-locked memory, at most three buffers of 32 MiB.

        Parameters
        ----------
        device
            Where to put the tensor, by default the CPU. A dtype here (``t.to(torch.float32)``) is taken as ``dtype``.
        dtype
            Convert the elements to this dtype.
        copy
            False maps a tensor that is one contiguous run of one local file instead of reading it, if ``device`` is the
            CPU. Files of network file systems are read all the same (see ``io`` of `lazyckpt.open`). The mapping is
            private: writing to the tensor changes memory only. Use it only for files that nobody writes to: rewriting
            the file changes the tensor. After the file was truncated, the missing elements read as zeros, and the
            thread that accesses them gets ChangedFileError when it is back in Python.

        Returns
        -------
        torch.Tensor
            The whole tensor.

        Raises
        ------
        DataError
            torch cannot convert the elements to ``dtype``. Raised before anything is read.
        LazyckptError
            What ``t[...]`` raises.
        """
        if isinstance(device, torch.dtype):
            device, dtype = None, device
        place = torch.device("cpu" if device is None else device)
        if place.type == "meta":
            return torch.empty(self.shape, dtype=dtype or self.dtype, device="meta")
        if dtype is not None and dtype != self.dtype:
            check_converts(self.name, self.spec.dtype, dtype_of(dtype))
        if place.type != "cpu":
            with ring(place) as way:
                return self._send(way, dtype)
        if not copy and dtype in (None, self.dtype):
            mapped = self._mapped({})
            if mapped is not None:
                return mapped
        out = self._whole()
        return out if dtype is None else out.to(dtype)

    def _send(self, to: Ring, dtype: torch.dtype | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
        """Read the whole tensor to the ring's device, into ``out`` (of the same shape, any dtype and strides) if it is
        given. The elements have arrived when the ring has finished."""
        extent = self._plain
        if extent is not None:  # nothing to plan
            array = to.device.empty(self.spec.shape, dtype or self.dtype) if out is None else out
            to.send_run(self._store, extent.path, extent.offset, self.dtype, array)
            return array
        reads = self._sel.reads()
        if out is not None and reads.in_place:
            to.send(self._store, self.spec, reads, out)
            return out
        array = to.device.empty(reads.shape, dtype or self.dtype)
        to.send(self._store, self.spec, reads, array)
        if out is None and not reads.moves:
            return finish(reads, array)  # a view
        to.finish()
        result = finish(reads, array)
        return result if out is None else out.copy_(result)

    def _start(self, out: torch.Tensor | None = None) -> tuple[Iterable[Task], Callable[[], torch.Tensor]]:
        """Return the tasks that read the whole tensor, to run together with those of other tensors, and a function to
        call when they are done. ``out``: a contiguous CPU tensor of the same shape and dtype to read into."""
        extent = self._plain
        if extent is not None:  # nothing to plan
            whole = empty(self.spec.shape, self.dtype) if out is None else out
            return run_tasks(self._store, extent.path, extent.offset, whole), lambda: whole
        reads = self._sel.reads()
        if out is None:
            array = empty(reads.shape, self.dtype)
            return tasks(self._store, self.spec, reads, array), lambda: finish(reads, array)
        array = out.view(-1)[: prod(reads.shape)].view(reads.shape)  # no larger: an index lists an element once
        return tasks(self._store, self.spec, reads, array), lambda: _moved(finish(reads, array), out)

    @property
    def _held(self) -> TensorSpec:
        """``spec`` with only those fragments that hold elements of this part."""
        return self.spec if self._selection is None else inside(self.spec, self._selection.hull)

    @property
    def _block(self) -> Box | None:
        """The block of ``spec``'s tensor that this part is; None if it is not a block (steps, indices, new
        dimensions)."""
        if self._selection is None:
            return Box.of(self.spec.shape)
        return self._selection.block

    def _mapped(self, maps: dict[str, Buffer | None]) -> torch.Tensor | None:
        """Return the tensor over a private mapping of its file (kept in ``maps``, path -> mapping), or None if it is
        not one contiguous run of one file."""
        extent = self._plain
        if extent is None or extent.offset % extent.dtype.itemsize:  # torch's kernels rely on alignment
            return None
        check(self._store, extent.path, extent.offset, self.nbytes)
        if extent.path not in maps:
            maps[extent.path] = self._store.private(extent.path)
        buffer = maps[extent.path]
        if buffer is None or not self.numel() or extent.offset + self.nbytes > len(buffer):
            return None
        flat = torch.frombuffer(buffer, dtype=self.dtype, count=self.numel(), offset=extent.offset)
        return flat.view(self.spec.shape)

    def __reduce__(self) -> tuple[Any, ...]:
        spec = self._held
        if isinstance(self._store, Joined):
            own: list[set[str]] = [set() for _ in self._store.stores]
            for one in leaves(spec):
                own[one.source] |= fragments_of(one.spec.fragments).file_paths()
            return type(self), (self._store.only(own), spec, self._selection)
        paths = {path for one in leaves(spec) for path in fragments_of(one.spec.fragments).file_paths()}
        # sorted, so that equal descriptions pickle equally
        return type(self), (narrow(self._store, sorted(paths)), spec, self._selection)

    # -- how

    def _whole(self) -> torch.Tensor:
        """Read the whole tensor without a mapping, so that reading a checkpoint does not fill this process with file
        pages."""
        work, ready = self._start()
        run(work)
        return ready()

    @property
    def _sel(self) -> Selection:
        """The elements of ``spec``'s tensor that this part has, in order."""
        return Selection.all(self.spec.shape) if self._selection is None else self._selection

    @property
    def _plain(self) -> Extent | None:
        """The extent, if the tensor is one contiguous run of raw bytes of one file."""
        return None if self._selection is not None else plain_run(self._store, self.spec)

    def _found_window(self, key: Any) -> Window | Mosaic | None:
        """Return what small slices are read through, None if there is nothing yet or never. Keep it."""
        if (
            not self._slices and key is Ellipsis
        ):  # most tensors are read once and whole: do not map their files for that
            self._slices = 1
            return None
        self._slices += weight_of(key, self.spec)
        if self._slices <= planned_apart(self.spec):
            return None
        self._window = None if self._selection is not None else window_of(self._store, self.spec)
        return self._window


def shape_of(tensor: LazyArray) -> Shape:
    """Return `LazyArray.shape` as a plain tuple, without torch."""
    return tensor.spec.shape if tensor._selection is None else tensor._selection.shape


class _Deferred(Generic[A]):
    __slots__ = ("_tensor",)

    def __init__(self, tensor: A) -> None:
        self._tensor = tensor

    def __getitem__(self, key: Any) -> A:
        t = self._tensor
        return type(t)(t._store, t.spec, t._sel[key])


def named(tensors: Mapping[str, A], name: str) -> A | None:
    """Return the tensor of exactly this name, or None. (`CheckpointView.get` also finds prefixes and paths inside
    names.)"""
    exact = getattr(tensors, "exact", tensors.get)
    found: A | None = exact(name)
    return found


def _moved(result: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return out if result.data_ptr() == out.data_ptr() else out.copy_(result)
