"""Reader of Orbax checkpoints (JAX, Flax, MaxText, Gemma, T5X)."""
