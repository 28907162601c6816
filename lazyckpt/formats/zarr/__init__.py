"""Zarr hierarchies: the layout that lazyckpt writes, and readers of any hierarchy."""
