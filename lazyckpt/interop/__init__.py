"""Adapters to other libraries: zarr, xarray, Dask. Each module is imported at its first use."""

from importlib import import_module as _import_module
from types import ModuleType as _ModuleType
from typing import TYPE_CHECKING as _TYPE_CHECKING

if _TYPE_CHECKING:
    from . import dask as dask
    from . import xarray as xarray
    from . import zarr_dtypes as zarr_dtypes
    from . import zarr_store as zarr_store

_DOORS = ("dask", "xarray", "zarr_dtypes", "zarr_store")


def __getattr__(name: str) -> _ModuleType:
    if name in _DOORS:
        return _import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
