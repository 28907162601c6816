"""Readers of the checkpoints of trainers: weights, and separate files of optimizers, schedulers and random states."""
