"""Checkpoints of Megatron-LM and megatron-core: a file for each model-parallel rank, or distributed ones."""
