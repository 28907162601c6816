"""Adapters to other libraries: zarr, xarray, Dask. Each module is imported at its first use."""

from importlib import import_module as _import_module
from types import ModuleType as _ModuleType

_DOORS = ("dask", "xarray", "zarr_dtypes", "zarr_store")


def __getattr__(name: str) -> _ModuleType:
    if name in _DOORS:
        return _import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
