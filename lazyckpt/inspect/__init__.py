"""Statistics of lazy tensors, and comparison of checkpoints, in bounded memory."""
