"""A run as an xarray tree: dimension "step" with the steps as its coordinate, then those of the tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import xarray as xr

from ..errors import DataError
from ..formats.zarr.documents import groups_of
from ..formats.zarr.nodes import dimension_names
from .dask import import_dask
from .xarray import Chunks, View, nodes, variable


class Run(View, Protocol):
    """What is asked of a run: its tensors have ``steps``, too."""

    @property
    def steps(self) -> tuple[int, ...]: ...


def tree(run: Run, chunks: Chunks = None) -> xr.DataTree:
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
            made = variable(tensor, chunks, [dim, *dimension_names(tuple(tensor.shape[1:]))], state=run.state)
        except DataError as e:  # numpy has no such dtype
            left_out[tensor.name] = str(e)
            continue
        held[f"/{group}"] |= {last: made, dim: xr.Variable((dim,), np.array(tensor.steps, np.int64))}
    about: Mapping[str, Any] = {
        "format": run.format,
        "state": run.state,
        "states": list(run.states),
        "problems": list(run.problems),
        **({"left_out": left_out} if left_out else {}),
    }
    coordinates = set(dims.values())
    groups = {}
    for path, table in held.items():
        data = {name: v for name, v in table.items() if name not in coordinates}
        coords = {name: v for name, v in table.items() if name in coordinates}
        groups[path] = xr.Dataset(data, coords, about if path == "/" else None)
    return xr.DataTree.from_dict(groups)
