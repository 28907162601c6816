"""Lazy tensors as xarray's variables, datasets and trees.

A tensor is a variable over a backend array that reads what is indexed; groups follow the dotted names (as
formats/zarr/nodes.py writes them), and dimensions are named by their size, so that those of different tensors line up.
Floats of 8 and 16 bits are float32, which numpy computes with correctly; with ``widen=False`` they have their own
dtypes (those of ml_dtypes, and float16), which numpy cannot sum: `to_f32` first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from typing import Any, Protocol, TypeVar

import ml_dtypes
import numpy as np
import xarray as xr
from xarray.backends import BackendArray
from xarray.core import indexing

from ..core.index import Mesh
from ..errors import DataError, Problem
from ..formats.zarr.documents import dimension_names, groups_of, paths
from ..lazy import LazyArray
from .dask import Readable, chunks_of, import_dask, to_dask

T = TypeVar("T", xr.Variable, xr.DataArray, xr.Dataset, xr.DataTree)
Chunks = Mapping[str, Any] | None


class View(Protocol):
    """What is asked of a view."""

    def __iter__(self) -> Iterator[str]: ...
    def __getitem__(self, name: str) -> Any: ...
    @property
    def format(self) -> str: ...
    @property
    def mesh(self) -> Mesh: ...
    @property
    def state(self) -> str: ...
    @property
    def states(self) -> Mapping[str, Any]: ...
    @property
    def problems(self) -> tuple[Problem, ...]: ...


# -- a tensor


class TensorArray(BackendArray):
    """A lazy tensor as xarray's backend array. Indexing reads; two lists in one index read the rows of one of them,
    from the first to the last that the other names."""

    __slots__ = ("array", "dtype", "shape")

    def __init__(self, array: Readable) -> None:
        self.array = array
        self.shape, self.dtype = array.shape, array.dtype

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        return indexing.explicit_indexing_adapter(
            key, self.shape, indexing.IndexingSupport.OUTER_1VECTOR, self.array.__getitem__
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return TensorArray, (self.array,)

    def __dask_tokenize__(self) -> object:
        return self.array.__dask_tokenize__()


class _Preferred(Mapping[str, int | tuple[int, ...]]):
    """A tensor's chunks by dimension, found out when xarray asks: that takes a look at every fragment."""

    def __init__(self, array: Readable, dims: list[str]) -> None:
        self._array, self._dims = array, dims

    @cached_property
    def _chunks(self) -> dict[str, tuple[int, ...]]:
        return dict(zip(self._dims, chunks_of(self._array.tensor, self._array.kind), strict=True))

    def __getitem__(self, dim: str) -> tuple[int, ...]:
        return self._chunks[dim]

    def __iter__(self) -> Iterator[str]:
        return iter(self._dims)

    def __len__(self) -> int:
        return len(self._dims)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Preferred, (self._array, self._dims)


def variable(
    tensor: LazyArray,
    chunks: Chunks = None,
    dims: list[str] | None = None,
    *,
    widen: bool = True,
    **attributes: Any,
) -> xr.Variable:
    """A tensor as a variable, its dimensions named by ``dims``, else by their size (``d4096``,
    ``d4096_2``). Reads nothing.

    ``chunks``: None for xarray's own lazy arrays; a mapping for Dask arrays on the tensor's chunks ({}), or on those
    that it gives for a dimension ({"d4096": 512}, in elements). ``widen``: floats of 8 and 16 bits become float32 when
    they are read, and ``stored_dtype`` names their own. ``attributes``: of the variable, besides ``name`` and where it
    tells them ``stored_as`` and ``rule``. Raises DataError where numpy has no such dtype, TypeError for other
    ``chunks``.
    """
    dims = dimension_names(tuple(tensor.shape)) if dims is None else dims
    spec = tensor.spec
    attributes = {"name": spec.name, **attributes}
    attributes |= {key: value for key, value in (("stored_as", spec.stored_as), ("rule", spec.rule)) if value}
    array = Readable(tensor, widen)
    if array.kind is not tensor.spec.dtype:
        attributes["stored_dtype"] = tensor.spec.dtype.name
    if chunks is not None:
        if not isinstance(chunks, Mapping):
            raise TypeError(f"chunks={chunks!r}: give None, {{}} or a table such as {{'d4096': 512}}")
        own = dict(zip(dims, chunks_of(tensor, array.kind), strict=True))
        return xr.Variable(dims, to_dask(tensor, tuple(chunks.get(d, own[d]) for d in dims), widen), attributes)
    encoding = {"preferred_chunks": _Preferred(array, dims)}
    return xr.Variable(dims, _lazy(TensorArray(array)), attributes, encoding, fastpath=True)


def _lazy(array: BackendArray) -> Any:
    """What a variable holds; assigning to it copies it into memory, as with what xarray itself opens."""
    data: Any = indexing.LazilyIndexedArray(array)
    return indexing.CopyOnWriteArray(data)


# -- many of them


def tree(view: View, chunks: Chunks = None, *, widen: bool = True) -> xr.DataTree:
    """A view as a tree; see `CheckpointView.to_xarray`."""
    return xr.DataTree.from_dict(datasets(nodes(view), view, chunks, widen=widen))


def nodes(view: View) -> dict[str, str]:
    """The path of a variable ("layers/3/up/weight") -> the name that the view has for its tensor."""
    return {path: name for name, path in paths(view).items()}


def datasets(
    found: Mapping[str, str], view: View, chunks: Chunks = None, drop: Collection[str] = (), *, widen: bool = True
) -> dict[str, xr.Dataset]:
    """The path of a group -> its own variables; the root ("/") comes first, and says what the checkpoint is. ``found``:
    as `nodes` gives it; ``drop``: variables to leave out, by their last or their full name. Reads nothing.

    What numpy has no dtype for is left out, with the reason in the root's attribute "left_out".
    """
    held, attributes = _variables(found, view, chunks, drop, widen)
    groups: dict[str, dict[str, xr.Variable]] = {f"/{group}": {} for group in ("", *sorted(groups_of(found)))}
    for path, made in held.items():
        group, _, last = path.rpartition("/")
        groups[f"/{group}"][last] = made
    return {path: xr.Dataset(made, attrs=attributes if path == "/" else None) for path, made in groups.items()}


def dataset(found: Mapping[str, str], view: View, drop: Collection[str] = (), *, widen: bool = True) -> xr.Dataset:
    """All variables of all groups as one dataset, under dotted names; otherwise as `datasets`."""
    held, attributes = _variables(found, view, None, drop, widen)
    variables = {path.replace("/", ".").removesuffix(".%"): made for path, made in held.items()}
    return xr.Dataset(variables, attrs=attributes)


def _variables(
    found: Mapping[str, str], view: View, chunks: Chunks, drop: Collection[str], widen: bool
) -> tuple[dict[str, xr.Variable], dict[str, str]]:
    """-> (path -> variable, the root's attributes)."""
    held: dict[str, xr.Variable] = {}
    left_out: dict[str, str] = {}
    if chunks is not None:
        import_dask()
    for path, name in found.items():
        tensor = view[name]
        if tensor.name in drop or tensor.name.rpartition(".")[2] in drop:
            continue
        try:
            held[path] = variable(tensor, chunks, widen=widen, state=view.state)
        except DataError as e:
            left_out[tensor.name] = str(e)
    degrees = " ".join(f"{axis}={getattr(view.mesh, axis)}" for axis in ("tp", "pp", "dp", "ep"))
    return held, about(view, left_out) | {"mesh": degrees}


def about(view: View, left_out: Mapping[str, str]) -> dict[str, str]:
    """The attributes of the root. All are texts, which every format takes that xarray writes (netCDF has no mappings,
    and no lists of texts in its old form); of several things a line each."""
    found = {
        "format": view.format,
        "state": view.state,
        "states": "\n".join(view.states),
        "problems": "\n".join(view.problems),
        "left_out": "\n".join(f"{name}: {why}" for name, why in left_out.items()),
    }
    return {name: text for name, text in found.items() if text}


# -- conversion


def to_f32(data: T) -> T:
    """The same variable, array, dataset or tree, its floating-point numbers of 8 and 16 bits (fp8, bf16, f16) converted
    to float32 when they are read: what numpy needs to sum them, and to sum them well. Nothing is read, Dask arrays stay
    Dask arrays, all other dtypes stay as they are.

    >>> to_f32(xr.DataArray(np.ones(300, ml_dtypes.bfloat16))).sum().item()
    300.0
    """
    if isinstance(data, xr.DataTree):
        return data.map_over_datasets(to_f32)
    if isinstance(data, xr.Dataset):
        return data.assign({name: to_f32(array.variable) for name, array in data.data_vars.items()})
    if isinstance(data, xr.DataArray):  # by way of a dataset: `data.copy(data=...)` would read
        return to_f32(data.to_dataset(name="_"))["_"].rename(data.name)
    if not _narrow(data.dtype):
        return data
    if data.chunks is not None:
        return data.astype(np.float32)
    return xr.Variable(data.dims, _lazy(_Converted(data)), data.attrs, data.encoding, fastpath=True)


class _Converted(BackendArray):
    """A variable, converted to float32 when it is indexed; no more of it is read then than was asked for."""

    __slots__ = ("dtype", "shape", "variable")

    def __init__(self, variable: xr.Variable) -> None:
        self.variable = variable
        self.shape = variable.shape
        self.dtype = np.dtype(np.float32)

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        return indexing.explicit_indexing_adapter(
            key, self.shape, indexing.IndexingSupport.OUTER, lambda k: self.variable[k].values.astype(np.float32)
        )


def _narrow(dtype: np.dtype[Any]) -> bool:
    if dtype.itemsize > 2 or dtype.kind in "biuSUOMm":
        return False
    try:
        ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    except ValueError:  # no floating-point number
        return False
    return True


# -- A run as an xarray steps_tree: dimension "step" with the steps as its coordinate, then those of the
# tensors.


class Run(View, Protocol):
    """What is asked of a run: its tensors have ``steps``, too."""

    @property
    def steps(self) -> tuple[int, ...]: ...


def steps_tree(run: Run, chunks: Chunks = None, *, widen: bool = True) -> xr.DataTree:
    """See `RunView.to_xarray`."""
    found = nodes(run)
    if chunks is not None:
        import_dask()
    held: dict[str, dict[str, xr.Variable]] = {f"/{group}": {} for group in ("", *sorted(groups_of(found)))}
    dims: dict[tuple[int, ...], str] = {run.steps: "step"}
    left_out: dict[str, str] = {}
    for path, name in found.items():
        group, _, last = path.rpartition("/")
        tensor: Any = run[name]
        dim = dims.setdefault(tensor.steps, f"step_{len(dims) + 1}")
        try:
            names = [dim, *dimension_names(tuple(tensor.shape[1:]))]
            made = variable(tensor, chunks, names, widen=widen, state=run.state)
        except DataError as e:  # numpy has no such dtype
            left_out[tensor.name] = str(e)
            continue
        held[f"/{group}"] |= {last: made, dim: xr.Variable((dim,), np.array(tensor.steps, np.int64))}
    attributes = about(run, left_out)
    coordinates = set(dims.values())
    groups = {}
    for path, table in held.items():
        data = {name: v for name, v in table.items() if name not in coordinates}
        coords = {name: v for name, v in table.items() if name in coordinates}
        groups[path] = xr.Dataset(data, coords, attributes if path == "/" else None)
    return xr.DataTree.from_dict(groups)
