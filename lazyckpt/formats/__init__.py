"""Readers of checkpoint formats: one module or package per family, each a function from files to an Index."""
