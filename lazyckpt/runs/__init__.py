"""The checkpoints of a training run: their tensors over the steps, and pruning."""
