"""Doors to other libraries: zarr, xarray, Dask. Each is imported when its door is used."""
