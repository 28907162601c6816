"""Files of Keras 3, written by Keras itself (which the tests do not install): run it where Keras and h5py are.

``python -m tests.writers.keras_files FOLDER`` writes ``model.keras``, ``model.weights.h5``, ``old.h5`` (the layout of
Keras 2) and ``half.weights.h5`` (bfloat16), and ``truth.npz`` with what the process held, by the names of the files.
They are recorded in ``tests/golden/keras``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np


def write_all(folder: Path) -> None:
    """Write the files. Keras has to be installed, with any backend."""
    import keras

    keras.utils.set_random_seed(0)
    layers = [keras.Input((8,)), keras.layers.Dense(16, name="up"), keras.layers.BatchNormalization()]
    model = keras.Sequential([*layers, keras.layers.Dense(4)])
    model.compile("adam", "mse")
    rng = np.random.default_rng(0)
    model.fit(rng.standard_normal((4, 8)), rng.standard_normal((4, 4)), verbose=0)
    model.save(folder / "model.keras")
    model.save_weights(folder / "model.weights.h5")
    model.save(folder / "old.h5")  # the layout of Keras 2
    truth = dict(_truth("model", model))
    truth |= {f"old/weights/{v.path.replace('/', '.')}": v.numpy() for v in model.weights}
    for slot in ("momentum", "velocity"):
        for v in model.trainable_variables:
            held = getattr(model.optimizer, {"momentum": "_momentums", "velocity": "_velocities"}[slot])
            truth[f"old/{slot}/{v.path.replace('/', '.')}"] = held[model.optimizer._get_variable_index(v)].numpy()
    truth |= {f"model/optimizer.vars.{n}": v.numpy() for n, v in enumerate(model.optimizer.variables)}
    keras.mixed_precision.set_dtype_policy("bfloat16")
    half = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16), keras.layers.Dense(4)])
    half.save_weights(folder / "half.weights.h5")
    truth |= {key: np.asarray(value).view("u2") for key, value in _truth("half", half)}
    np.savez(folder / "truth.npz", **truth)


def _truth(name: str, model: Any) -> Any:
    count: dict[str, int] = {}
    for layer in model.layers:
        kind = {"Dense": "dense", "BatchNormalization": "batch_normalization"}[type(layer).__name__]
        n = count[kind] = count.get(kind, -1) + 1
        held = layer.trainable_variables + layer.non_trainable_variables
        for number, variable in enumerate(held):
            yield f"{name}/layers.{kind}{f'_{n}' if n else ''}.vars.{number}", variable.numpy()


if __name__ == "__main__":
    write_all(Path(sys.argv[1]))
