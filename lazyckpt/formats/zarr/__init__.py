"""Zarr hierarchies, as lazyckpt writes and reads them."""
