"""Pickles, read as inert data: nothing in them is called."""
