"""Lazy tensors as xarray's variables, datasets and trees.

A tensor is a variable over a backend array that reads the indexed elements. Groups follow the dotted names (as in
formats/zarr/documents.py), and dimensions are named by their size, so that those of different tensors align. Floats of
8 and 16 bits are float32, which numpy computes with correctly; with ``widen=False`` they keep their own dtypes (those
of ml_dtypes, and float16), which numpy sums wrongly: convert by `to_f32` first.
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

from ..core.placement import Mesh
from ..errors import DataError, Problem
from ..formats.zarr.documents import dimension_names, groups_of, paths
from ..lazy import LazyArray
from .dask import Readable, chunks_of, import_dask, to_dask

T = TypeVar("T", xr.Variable, xr.DataArray, xr.Dataset, xr.DataTree)
Chunks = Mapping[str, Any] | None


class View(Protocol):
    """The part of `CheckpointView` that this module uses."""

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
    """A lazy tensor as xarray's backend array. Indexing reads. For two lists in one index it reads the rows of one
    list, from the first to the last index of the other.

    Parameters
    ----------
    array
        The tensor, with the dtype that it is read as.
    """

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
    """A tensor's chunks by dimension, computed when xarray needs them, because that looks at every fragment."""

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
    """Return a tensor as a variable of xarray. Reads nothing.

    Parameters
    ----------
    tensor
        The tensor.
    chunks
        None for xarray's own lazy arrays, ``{}`` for Dask arrays on the tensor's chunks, ``{"d4096": 512}`` for other
        chunks along a dimension, in elements.
    dims
        Names of the dimensions. By default they are named by their size (``d4096``, ``d4096_2``).
    widen
        Convert floats of 8 and 16 bits to float32 when they are read. The attribute ``stored_dtype`` has their dtype.
    **attributes
        Attributes of the variable, besides ``name`` and, if the tensor has them, ``stored_as`` and ``rule``.

    Returns
    -------
    xarray.Variable
        The variable.

    Raises
    ------
    DataError
        numpy lacks the dtype, or ``chunks`` is given and dask is not installed.
    TypeError
        ``chunks`` is neither None nor a mapping.
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
    """Wrap an array as xarray does when it opens files: assignment copies it into memory."""
    data: Any = indexing.LazilyIndexedArray(array)
    return indexing.CopyOnWriteArray(data)


# -- datasets and trees


def tree(view: View, chunks: Chunks = None, *, widen: bool = True) -> xr.DataTree:
    """Return a view as a tree. See `CheckpointView.to_xarray`.

    Parameters
    ----------
    view
        The view.
    chunks, widen
        The same as for `variable`.

    Returns
    -------
    xarray.DataTree
        Groups are the dotted names, variables the tensors.

    Raises
    ------
    DataError, TypeError
        What `CheckpointView.to_xarray` raises.
    """
    return xr.DataTree.from_dict(datasets(nodes(view), view, chunks, widen=widen))


def nodes(view: View) -> dict[str, str]:
    """Return the paths of the variables of a view.

    Parameters
    ----------
    view
        The view.

    Returns
    -------
    dict of str to str
        Path of a variable ("layers/3/up/weight") -> name of its tensor in the view.
    """
    return {path: name for name, path in paths(view).items()}


def datasets(
    found: Mapping[str, str], view: View, chunks: Chunks = None, drop: Collection[str] = (), *, widen: bool = True
) -> dict[str, xr.Dataset]:
    """Return the variables of a view as a dataset for each group. Reads nothing.

    Parameters
    ----------
    found
        The variables: path -> name in the view, as from `nodes`.
    view
        The view.
    chunks, widen
        The same as for `variable`.
    drop
        Variables to leave out, by their last or their full name.

    Returns
    -------
    dict of str to xarray.Dataset
        Path of a group -> its own variables. The root ("/") comes first. Its attributes describe the checkpoint, and
        "left_out" lists the tensors whose dtype numpy lacks.

    Raises
    ------
    DataError, TypeError
        What `CheckpointView.to_xarray` raises.
    """
    held, attributes = _variables(found, view, chunks, drop, widen)
    groups: dict[str, dict[str, xr.Variable]] = {f"/{group}": {} for group in ("", *sorted(groups_of(found)))}
    for path, made in held.items():
        group, _, last = path.rpartition("/")
        groups[f"/{group}"][last] = made
    return {path: xr.Dataset(made, attrs=attributes if path == "/" else None) for path, made in groups.items()}


def dataset(found: Mapping[str, str], view: View, drop: Collection[str] = (), *, widen: bool = True) -> xr.Dataset:
    """Return the variables of all groups as one dataset, under dotted names. Reads nothing.

    Parameters
    ----------
    found, view, drop, widen
        The same as for `datasets`.

    Returns
    -------
    xarray.Dataset
        All variables, with the attributes of the root.
    """
    held, attributes = _variables(found, view, None, drop, widen)
    variables = {path.replace("/", ".").removesuffix(".%"): made for path, made in held.items()}
    return xr.Dataset(variables, attrs=attributes)


def _variables(
    found: Mapping[str, str], view: View, chunks: Chunks, drop: Collection[str], widen: bool
) -> tuple[dict[str, xr.Variable], dict[str, str]]:
    """Return the variables by path, and the root's attributes."""
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
    """Return the attributes of the root. All are text, which every format that xarray writes supports (netCDF has no
    mappings, and its classic form no lists of text). Lists have an item on each line.

    Parameters
    ----------
    view
        The view.
    left_out
        Name of a tensor that is left out -> reason.

    Returns
    -------
    dict of str to str
        Attributes that are not empty.
    """
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
    """Convert floats of 8 and 16 bits (fp8, bf16, f16) to float32 when they are read, so that numpy sums them right.

    Parameters
    ----------
    data
        A variable, array, dataset or tree.

    Returns
    -------
    same type as data
        Nothing is read, Dask arrays stay Dask arrays, and all other dtypes are unchanged.

    Examples
    --------

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
    """A variable that is converted to float32 when it is indexed. Only the indexed elements are read."""

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
    except ValueError:  # not a floating-point dtype
        return False
    return True


# -- A run as a tree: dimension "step" with the steps as its coordinates, then the dimensions of the tensors.


class Run(View, Protocol):
    """The part of `RunView` that this module uses. Its tensors also have ``steps``."""

    @property
    def steps(self) -> tuple[int, ...]: ...


def steps_tree(run: Run, chunks: Chunks = None, *, widen: bool = True) -> xr.DataTree:
    """Return a run as a tree. See `RunView.to_xarray`.

    Parameters
    ----------
    run
        The run.
    chunks, widen
        The same as for `variable`.

    Returns
    -------
    xarray.DataTree
        Groups are the dotted names, variables the tensors over the steps.

    Raises
    ------
    DataError, TypeError
        What `CheckpointView.to_xarray` raises.
    """
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
        except DataError as e:  # numpy lacks the dtype
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
