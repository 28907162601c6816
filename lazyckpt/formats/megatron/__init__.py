"""Checkpoints of Megatron-LM and megatron-core."""
