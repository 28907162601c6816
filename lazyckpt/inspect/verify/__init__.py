"""The checks of `lazyckpt verify`."""
