"""A run as an xarray tree: dimension "step" with the steps as its coordinate, then those of the tensors."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import xarray as xr

from ..errors import DataError
from ..formats.zarr.documents import groups_of
from ..formats.zarr.nodes import dimension_names
from .dask import import_dask
from .xarray import Chunks, View, about, nodes, variable


class Run(View, Protocol):
    """What is asked of a run: its tensors have ``steps``, too."""

    @property
    def steps(self) -> tuple[int, ...]: ...


def tree(run: Run, chunks: Chunks = None, *, widen: bool = True) -> xr.DataTree:
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
