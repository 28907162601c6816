"""What lazy tensors hold, read once and in bounded memory: their statistics, and what differs between two of them."""
