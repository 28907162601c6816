"""Renaming tensors from one model family's names to another's."""
