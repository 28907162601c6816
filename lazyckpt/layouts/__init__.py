"""How tensors are cut over ranks and what they are called, without files."""
