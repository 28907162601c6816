"""From planned byte runs to tensors."""
