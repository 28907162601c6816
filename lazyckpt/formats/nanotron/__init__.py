"""Checkpoints of nanotron."""
