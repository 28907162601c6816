"""Files of flax.serialization, written by flax and optax (which the tests do not install): run it where they are.

``python -m tests.writers.flax_files FOLDER`` writes ``params.msgpack`` (every dtype, plain objects), ``state.msgpack``
(a TrainState with optax's adamw after two steps) and ``pieces.msgpack`` (arrays in flat pieces), and ``truth.npz`` with
what the process held; bfloat16 and 8-bit floats as their bits. They are recorded in ``tests/golden/flax``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np


def write_all(folder: Path) -> None:
    """Write the files."""
    import jax
    import jax.numpy as jnp
    import ml_dtypes
    import optax
    from flax import linen, serialization
    from flax.training.train_state import TrainState

    truth: dict[str, Any] = {}
    rng = np.random.default_rng(0)
    values = rng.standard_normal((5, 6)) * 40
    kinds = ["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "c8", "c16"]
    tree: dict[str, Any] = {np.dtype(kind).name: values.astype(kind) for kind in kinds}
    tree |= {"bool": values > 0, "bfloat16": values.astype(ml_dtypes.bfloat16)}
    tree |= {"float8_e4m3fn": values.astype(ml_dtypes.float8_e4m3fn), "scalar": np.float32(2.5)}
    tree |= {"empty": np.zeros((0, 3), "f4"), "large": rng.standard_normal((40, 50)).astype("f4")}
    document = {"inner": tree, "step": 7, "name": "x", "rate": 0.5, "none": None, "turn": 1 + 2j, "list": [1, 2]}
    truth |= {f"params/inner.{name}": np.asarray(array) for name, array in tree.items()}
    (folder / "params.msgpack").write_bytes(serialization.msgpack_serialize(document))

    class Model(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            return linen.Dense(3)(linen.relu(linen.Dense(16, name="up")(x)))

    model, x = Model(), jnp.ones((2, 8))
    params = model.init(jax.random.key(0), x)["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-2))
    for _ in range(2):
        grads = jax.grad(lambda p: (model.apply({"params": p}, x) ** 2).sum())(state.params)
        state = state.apply_gradients(grads=grads)
    (folder / "state.msgpack").write_bytes(serialization.to_bytes(state))
    adam = state.opt_state[0]
    for name, held in (("weights", state.params), ("mu", adam.mu), ("nu", adam.nu)):
        flat = {f"{layer}.{key}": value for layer, inner in held.items() for key, value in inner.items()}
        truth |= {f"state:{name}/{key}": np.asarray(value) for key, value in flat.items()}

    serialization.MAX_CHUNK_SIZE = 100
    pieces = {"a": rng.standard_normal((7, 11)).astype("f4"), "b": {"c": np.arange(60, dtype="i8").reshape(3, 4, 5)}}
    truth |= {"pieces/a": pieces["a"], "pieces/b.c": pieces["b"]["c"]}
    (folder / "pieces.msgpack").write_bytes(serialization.msgpack_serialize(pieces))
    bits = {1: "u1", 2: "u2"}
    odd = ("bfloat16", "float8_e4m3fn")
    truth = {k: v.view(bits[v.dtype.itemsize]) if v.dtype.name in odd else v for k, v in truth.items()}
    np.savez(folder / "truth.npz", **truth)


if __name__ == "__main__":
    write_all(Path(sys.argv[1]))
