"""Readers of torch.distributed.checkpoint: folders with `.metadata`, and those of its HuggingFaceStorageWriter."""
