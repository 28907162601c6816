"""xarray's backend ``engine="lazyckpt"`` (the entry point is in pyproject.toml).

xr.open_datatree(path, engine="lazyckpt")
xr.open_dataset(path, engine="lazyckpt", group="layers/3/mlp", chunks={})
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import xarray as xr
from xarray.backends import BackendEntrypoint

from .errors import LazyckptError, TensorNotFoundError
from .formats.archives import locate
from .formats.reader import Source
from .formats.registry import recognising
from .interop.xarray import dataset, datasets, nodes
from .io.storage.urls import is_url
from .tensor import LazyTensor
from .view import CheckpointView

# Only files with these endings are recognised without ``engine=``, and no folders with these zarr documents.
_FILES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".index.json")
_ZARR = ("zarr.json", ".zgroup", ".zarray", ".zmetadata")


class LazyckptBackend(BackendEntrypoint):
    """Open a checkpoint as a tree whose groups follow the dotted names, or a part of it as one dataset. Opening reads
    no tensor data.

    The methods raise what `lazyckpt.open` raises, and TensorNotFoundError (a KeyError) for an unknown group or state.
    Their options are:

    - ``group``: the part to open, as a path ("layers/3/mlp") or as for `CheckpointView.prefix`;
    - ``state``: "exp_avg", ...; by default the weights or, if there are none, fp32;
    - ``widen``: read floats of 8 and 16 bits as float32; False keeps their dtypes (see `CheckpointView.to_xarray`);
    - ``drop_variables``: variables to leave out, by last name ("bias") or full name ("layers.3.mlp.up.bias");
    - ``format``, ``tag``, ``rules``, ``storage_options``, ``io``: those of `lazyckpt.open`.
    """

    description: ClassVar[str] = "Open checkpoints of deep-learning models with lazyckpt"
    open_dataset_parameters: ClassVar[tuple[str, ...] | None] = (
        "filename_or_obj", "drop_variables", "group", "state", "widen", "format", "tag", "rules", "storage_options",
        "io",
    )  # fmt: skip
    supports_groups: ClassVar[bool] = True

    def guess_can_open(self, filename_or_obj: Any) -> bool:
        """Return whether a local path is a checkpoint, also one in a tar or zip, by its name and first bytes. Zarr
        hierarchies and files with other endings than those of checkpoints are left to other engines."""
        if not isinstance(filename_or_obj, str | os.PathLike) or is_url(os.fspath(filename_or_obj)):
            return False
        try:
            source = Source(*locate(os.fspath(filename_or_obj)))
            if (source.path and not source.path.endswith(_FILES)) or any(name in source.entries for name in _ZARR):
                return False
            return recognising(source) is not None
        except (LazyckptError, OSError):
            return False

    def open_dataset(
        self,
        filename_or_obj: Any,
        *,
        drop_variables: str | Iterable[str] | None = None,
        group: str | None = None,
        state: str | None = None,
        widen: bool = True,
        **options: Any,
    ) -> xr.Dataset:
        """Open all tensors below a group as one dataset, under their names relative to the group ("up.weight")."""
        view, found = _opened(filename_or_obj, group, state, options)
        return dataset(found, view, _dropped(drop_variables), widen=widen)

    def open_groups_as_dict(
        self,
        filename_or_obj: Any,
        *,
        drop_variables: str | Iterable[str] | None = None,
        group: str | None = None,
        state: str | None = None,
        widen: bool = True,
        **options: Any,
    ) -> dict[str, xr.Dataset]:
        """Open all groups below ``group``: path relative to it -> dataset of its tensors."""
        view, found = _opened(filename_or_obj, group, state, options)
        return datasets(found, view, drop=_dropped(drop_variables), widen=widen)

    def open_datatree(
        self, filename_or_obj: Any, *, drop_variables: str | Iterable[str] | None = None, **options: Any
    ) -> xr.DataTree:
        """Open all groups below ``group`` as a tree."""
        groups = self.open_groups_as_dict(filename_or_obj, drop_variables=drop_variables, **options)
        return xr.DataTree.from_dict(groups)


def _opened(
    path: Any, group: str | None, state: str | None, options: Mapping[str, Any]
) -> tuple[CheckpointView, dict[str, str]]:
    """Return a view, and path relative to the group -> name in the view, for the tensors in the group."""
    view = CheckpointView(path, **options)
    if state is not None:
        if state not in view.states:
            raise TensorNotFoundError(f"{view.root} has no state {state!r}; there are: {', '.join(view.states)}")
        view = view.states[state]
    found = nodes(view)
    start = (group or "").strip("/")
    if not start:
        return view, found
    below = {p.removeprefix(f"{start}/"): name for p, name in found.items() if p.startswith(f"{start}/")}
    if below:
        return view, below
    part = view[start.replace("/", ".")]
    if isinstance(part, LazyTensor):
        raise TensorNotFoundError(f"{group!r} is a tensor, not a group: open the group that it is in")
    return part, nodes(part)


def _dropped(names: str | Iterable[str] | None) -> set[str]:
    return {names} if isinstance(names, str) else set(names or ())
