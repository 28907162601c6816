"""Checkpoints of TensorFlow, recorded in tests/golden/tensorflow: run it with a folder, where tensorflow-cpu is.

``ckpt-1`` is an object-based checkpoint (tf.train.Checkpoint), ``model.ckpt-2`` one of tf.compat.v1.train.Saver with
``sharded=True``, with a partitioned variable and the slots of Adam. ``truth.npz`` has what `tf.train.load_variable`
returns, bfloat16 as float32.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np


def write_all(folder: Path) -> None:
    """Write the checkpoints, and ``truth.npz``."""
    import tensorflow as tf

    tf.random.set_seed(0)
    truth: dict[str, Any] = {}
    module = tf.Module()
    module.w, module.b = tf.Variable(tf.random.normal((3, 5))), tf.Variable(tf.zeros(5))
    module.h = tf.Variable(tf.cast(tf.random.normal((4, 4)), tf.bfloat16))
    module.f = tf.Variable(tf.cast(tf.random.normal((2, 3)), tf.float16))
    module.i, module.flag = tf.Variable(tf.range(7, dtype=tf.int64)), tf.Variable([True, False])
    module.s, module.text = tf.Variable(3.5), tf.Variable("hello")
    module.c, module.e = tf.Variable(tf.complex(1.0, 2.0)), tf.Variable(tf.zeros((0, 4)))
    module.layers = [tf.Variable(tf.random.normal((2, 2))) for _ in range(3)]
    path = tf.train.Checkpoint(model=module, step=tf.Variable(9, dtype=tf.int64)).save(str(folder / "ckpt"))
    _hold(tf, path, "obj", truth)
    v1 = tf.compat.v1
    with tf.Graph().as_default():
        split = v1.fixed_size_partitioner(3)
        random = v1.random_normal_initializer()
        part = v1.get_variable("part", shape=(10, 4), initializer=random, partitioner=split)
        kernel = v1.get_variable("scope/kernel", shape=(3, 2), initializer=random)
        step = v1.train.get_or_create_global_step()
        loss = tf.reduce_sum(tf.convert_to_tensor(part)) + tf.reduce_sum(kernel**2)
        train = v1.train.AdamOptimizer(0.1).minimize(loss, global_step=step)
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            session.run(train)
            session.run(train)
            path = v1.train.Saver(sharded=True).save(session, str(folder / "model.ckpt"), step, write_meta_graph=False)
    _hold(tf, path, "v1", truth)
    (folder / "checkpoint").unlink()
    np.savez_compressed(folder / "truth.npz", **truth)


def _hold(tf: Any, path: str, which: str, truth: dict[str, Any]) -> None:
    for name, _ in tf.train.list_variables(path):
        value = tf.train.load_variable(path, name)
        if isinstance(value, np.ndarray | np.generic) and value.dtype != object:
            wide = value.astype(np.float32) if value.dtype.name == "bfloat16" else value
            truth[f"{which}|{name.replace('/', '|')}"] = wide


if __name__ == "__main__":
    write_all(Path(sys.argv[1]))
