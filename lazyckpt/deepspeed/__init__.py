"""DeepSpeed's functions."""
