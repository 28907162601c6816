"""Orbax checkpoints, written by orbax-checkpoint on eight CPU devices; the truth is what the process held at saving.

``python tests/writers/orbax_files.py FOLDER`` runs where JAX, Flax, Optax and orbax-checkpoint are installed; torch and
lazyckpt are not needed. It writes every case to ``FOLDER/NAME/ckpt``, what the process held to
``FOLDER/NAME/truth.safetensors`` (as ``STATE|TENSOR``), and the versions of the packages to ``FOLDER/versions.json``.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

PACKAGES = ("flax", "jax", "optax", "orbax-checkpoint", "tensorstore")
CASES = (
    "ocdbt", "ocdbt_zarr3", "plain", "plain_zarr3", "manager", "manager_zarr3", "multi_transform", "multi_steps", "nnx",
    "dtypes", "dtypes_zarr3", "gemma", "subchunks", "momentum", "aggregate", "adafactor", "masked", "array", "handlers",
    "processes", "processes_plain",
)  # fmt: skip


def write_all(folder: Path) -> None:
    """Write all cases in a process of its own: the number of devices is fixed when JAX starts."""
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    subprocess.run([sys.executable, __file__, str(folder)], env=env, check=True)
    _launch(folder)


def _launch(folder: Path) -> None:
    """Write the cases of two processes, each with half of the devices."""
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, str(folder), str(port)]
    ranks = [subprocess.Popen([*command, str(rank)], env=env) for rank in range(2)]
    codes = [rank.wait() for rank in ranks]
    if any(codes):
        raise RuntimeError("a process of JAX failed")


def load_case(folder: Path, name: str) -> Any:
    """Load a case, in an environment with torch."""
    from safetensors.torch import load_file

    from . import Case

    truth: dict[str, dict[str, Any]] = {}
    for key, tensor in load_file(folder / name / "truth.safetensors").items():
        state, _, tensor_name = key.partition("|")
        truth.setdefault(state, {})[tensor_name] = tensor
    info = {"archives": True, **json.loads((folder / name / "info.json").read_text())}  # chunks are compressed
    order = [state for state in info.pop("states") if state in truth]
    return Case(folder / name / "ckpt", {state: truth[state] for state in order}, info)


_NAMES = {
    "float32": "F32", "float64": "F64", "float16": "F16", "bfloat16": "BF16", "int8": "I8", "int16": "I16",
    "int32": "I32", "int64": "I64", "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64", "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "complex64": "C64",
}  # fmt: skip


def _keep(path: Path, truth: dict[str, dict[str, Any]]) -> None:
    """Write the file of safetensors by hand: the process has no torch, and numpy no bfloat16."""
    import numpy as np

    header: dict[str, Any] = {}
    parts, at = [], 0
    for state, table in truth.items():
        for name, value in table.items():
            array = np.asarray(value)
            data = array.tobytes()
            header[f"{state}|{name}"] = {
                "dtype": _NAMES[array.dtype.name], "shape": list(array.shape), "data_offsets": [at, at + len(data)],
            }  # fmt: skip
            parts.append(data)
            at += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(parts))


def _loss(metrics: dict[str, float]) -> float:
    return metrics["loss"]


def _main(folder: Path) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    import orbax.checkpoint as ocp
    from flax import nnx
    from google.protobuf import struct_pb2
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    from orbax.checkpoint import msgpack_utils

    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "tensor"))
    random = np.random.default_rng(7)

    def on(value: Any, *spec: Any) -> Any:
        return jax.device_put(value, NamedSharding(mesh, PartitionSpec(*spec)))

    def weights(coarse: bool = True) -> dict[str, Any]:
        """``coarse``: numbers that compress well, as the recordings are to be small."""

        def normal(*shape: int) -> Any:
            found = random.standard_normal(shape).astype("float32")
            return np.round(found) / 4 if coarse else found

        return {
            "embed": {"table": on(jnp.asarray(normal(32, 64), jnp.bfloat16), "fsdp", "tensor")},
            "layers": [
                {"kernel": on(normal(64, 48), "fsdp", "tensor"), "bias": on(normal(48), "tensor")},
                {"kernel": on(normal(48, 64), None, ("fsdp", "tensor")), "bias": on(np.zeros(64, "float32"))},
            ],
            "scale": on(normal(1)),
        }

    def flat(tree: Any) -> dict[str, Any]:
        """Names of leaves as Orbax joins them, without leaves that hold nothing."""
        found = {}
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            keys = [str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", None)))) for k in path]
            found[".".join(keys)] = leaf
        return found

    def trained(tx: Any, params: Any, steps: int = 2) -> tuple[Any, Any]:
        state = tx.init(params)
        for n in range(steps):
            grads = jax.tree.map(lambda x, n=n: (x * 0.1 + n).astype(x.dtype), params)
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        return params, state

    def done(name: str, truth: dict[str, dict[str, Any]], **info: Any) -> None:
        _keep(folder / name / "truth.safetensors", truth)
        about = {"format": "orbax", "states": list(truth), **info}
        (folder / name / "info.json").write_text(json.dumps(about))

    def at(name: str) -> Path:
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir(parents=True)
        return folder / name / "ckpt"

    def save(path: Path, tree: Any, ocdbt: bool = True, zarr3: bool = False, args: Any = None) -> None:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_zarr3=zarr3)) as checkpointer:
            checkpointer.save(path, tree, save_args=args)

    adamw = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))

    def states(params: Any, opt: Any, **others: Any) -> dict[str, dict[str, Any]]:
        adam = opt[1][0]
        names = flat(params)
        return {
            "weights": names, "mu": flat(adam.mu), "nu": flat(adam.nu), "count": dict.fromkeys(names, adam.count),
            **({"others": others} if others else {}),
        }  # fmt: skip

    for name, ocdbt, zarr3 in (
        ("ocdbt", True, False), ("ocdbt_zarr3", True, True), ("plain", False, False), ("plain_zarr3", False, True),
    ):  # fmt: skip
        params, opt = trained(adamw, weights(coarse=not ocdbt))
        key = jax.random.key(5)
        tree = {
            "params": params, "opt_state": opt, "step": 2, "lr": 0.5, "name": "tiny", "nothing": None, "empty": {},
            "none": [], "key": key, "seen": np.arange(5),
        }  # fmt: skip
        save(at(name), tree, ocdbt, zarr3)
        others = {
            "key": jax.random.key_data(key), "lr": np.float64(0.5), "seen": tree["seen"], "step": np.int64(2),
        }  # fmt: skip
        done(name, states(params, opt, **others), mesh=[2, 1, 4, 1], strings={"name": "tiny"})

    for name, zarr3 in (("manager", False), ("manager_zarr3", True)):
        options = ocp.CheckpointManagerOptions(max_to_keep=5, step_prefix="run" if zarr3 else None, best_fn=_loss)
        handlers = {"state": ocp.PyTreeCheckpointHandler(use_zarr3=zarr3), "config": ocp.JsonCheckpointHandler()}
        path = at(name)
        with ocp.CheckpointManager(path, options=options, item_handlers=handlers) as manager:
            for step in (0, 500, 1000):
                params, opt = trained(adamw, weights(), step // 500)
                if step == 500:
                    _keep(folder / name / "older.safetensors", states(params, opt))
                tree = {"params": params, "opt_state": opt, "step": step}
                parts = ocp.args.Composite(
                    state=ocp.args.PyTreeSave(tree), config=ocp.args.JsonSave({"layers": 2, "act": "gelu"})
                )
                manager.save(step, args=parts, metrics={"loss": 0.25})
        done(name, states(params, opt, step=np.int64(1000)), mesh=[2, 1, 4, 1], config={"layers": 2, "act": "gelu"})

    params = weights()
    labels = jax.tree.map_with_path(lambda path, _: "sgd" if path[-1].key == "bias" else "adam", params)
    tx = optax.multi_transform({"adam": optax.adam(1e-3), "sgd": optax.sgd(1e-2, momentum=0.9)}, labels)
    params, opt = trained(tx, params)
    inner = {label: state.inner_state[0] for label, state in opt.inner_states.items()}
    save(at("multi_transform"), {"params": params, "opt_state": opt})
    mu = flat(inner["adam"].mu)
    done(
        "multi_transform",
        {
            "weights": flat(params), "mu": mu, "nu": flat(inner["adam"].nu), "trace": flat(inner["sgd"].trace),
            "count": dict.fromkeys(mu, inner["adam"].count),
        },
        mesh=[2, 1, 4, 1],
    )  # fmt: skip

    tx = optax.MultiSteps(optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3), 2).gradient_transformation()
    params, opt = trained(tx, weights(), 3)
    save(at("multi_steps"), {"params": params, "opt_state": opt, "ema_params": params}, zarr3=True)
    adam = opt.inner_opt_state.inner_state[0]
    left = {
        name: leaf
        for name, leaf in flat({"opt_state": opt}).items()
        if not any(f".{part}." in name for part in ("mu", "nu", "acc_grads")) and not name.endswith("0.count")
    }
    done(
        "multi_steps",
        {
            "weights": flat(params), "mu": flat(adam.mu), "nu": flat(adam.nu), "acc_grads": flat(opt.acc_grads),
            "ema_params": flat(params), "count": dict.fromkeys(flat(params), adam.count), "others": left,
        },
        mesh=[2, 1, 4, 1],
    )  # fmt: skip

    model = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    grads = jax.tree.map(lambda x: x * 0.5, nnx.state(model, nnx.Param))
    optimizer.update(model, grads)
    own, opt_state = nnx.state(model), nnx.state(optimizer)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(at("nnx"), {"model": own, "optimizer": opt_state})
    adam = optimizer.opt_state[0]
    plain = lambda state: {name: state[name][...] for name in ("bias", "kernel")}  # noqa: E731
    done(
        "nnx",
        {
            "weights": plain(own), "mu": plain(adam.mu), "nu": plain(adam.nu),
            "count": dict.fromkeys(("bias", "kernel"), adam.count[...]),
            "others": {"optimizer.step.value": optimizer.step[...]},
        },
        mesh=[1, 1, 1, 1],
    )  # fmt: skip

    kinds = (
        "float32", "float16", "bfloat16", "int8", "int16", "int32", "uint8", "uint16", "uint32", "bool",
        "float8_e4m3fn", "float8_e5m2", "complex64",
    )  # fmt: skip
    for name, zarr3 in (("dtypes", False), ("dtypes_zarr3", True)):
        tree = {kind: jnp.asarray(random.integers(0, 2 if kind == "bool" else 9, (6, 5)), kind) for kind in kinds}
        tree |= {"scalar": jnp.float32(2.5), "long": np.arange(700, dtype="int64"), "zeros": jnp.zeros((40, 40))}
        tree |= {"odd": on(random.standard_normal((12, 10)).astype("float32"), "fsdp", "tensor")}
        save(at(name), tree, zarr3=zarr3)
        done(name, {"weights": tree}, mesh=[2, 1, 4, 1])

    tree = {
        f"transformer/layer_{n}/mlp": {"w": on(random.standard_normal((32, 24)).astype("float32"), "fsdp")}
        for n in range(3)
    }
    save(at("gemma"), tree)
    done("gemma", {"weights": flat(tree)}, mesh=[2, 1, 4, 1])

    tree = {"w": on(random.standard_normal((64, 96)).astype("float32"), "fsdp", "tensor")}
    args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=1536), tree)
    save(at("subchunks"), tree, zarr3=True, args=args)
    done("subchunks", {"weights": tree}, mesh=[2, 1, 4, 1])

    params, opt = trained(optax.sgd(1e-2, momentum=0.9), weights())
    with ocp.StandardCheckpointer() as checkpointer:  # asynchronous
        checkpointer.save(at("momentum"), {"params": params, "opt_state": opt, "batch_stats": {"mean": jnp.ones(3)}})
    truth = {"weights": flat(params), "trace": flat(opt[0].trace), "others": {"batch_stats.mean": jnp.ones(3)}}
    done("momentum", truth, mesh=[2, 1, 4, 1])

    small = {"dense": {"kernel": on(np.ones((16, 8), "float32"), "fsdp"), "bias": on(np.zeros(8, "float32"))}}
    params, opt = trained(optax.adafactor(1e-3, min_dim_size_to_factor=4), small)
    save(at("adafactor"), {"params": params, "opt_state": opt, "step": 2})
    factored = opt[0]
    moments = {name: flat(getattr(factored, name)) for name in ("v_row", "v_col", "v")}
    count = dict.fromkeys(flat(params), factored.count)
    done(
        "adafactor",
        {"weights": flat(params), **moments, "count": count, "others": {"step": np.int64(2)}},
        mesh=[2, 1, 4, 1],
    )

    matrices = jax.tree.map(lambda x: x.ndim > 1, small)
    params, opt = trained(optax.chain(optax.masked(optax.adam(1e-3), matrices), optax.trace(0.9)), small)
    save(at("masked"), {"params": params, "opt_state": opt})
    adam = opt[0].inner_state[0]
    mu = flat(adam.mu)
    moments = {"mu": mu, "nu": flat(adam.nu), "trace": flat(opt[1].trace)}
    done("masked", {"weights": flat(params), **moments, "count": dict.fromkeys(mu, adam.count)}, mesh=[2, 1, 4, 1])

    one = on(np.arange(128, dtype="float32").reshape(16, 8), "fsdp", "tensor")
    with ocp.Checkpointer(ocp.ArrayCheckpointHandler()) as checkpointer:
        checkpointer.save(at("array"), args=ocp.args.ArraySave(one))
    done("array", {"weights": {"checkpoint": one}}, mesh=[2, 1, 4, 1])

    message = struct_pb2.Struct()
    message.update({"depth": 2})
    handlers = {
        "state": ocp.PyTreeCheckpointHandler(), "model": ocp.ProtoCheckpointHandler("model.pbtxt"),
        "config": ocp.JsonCheckpointHandler("settings.json"), "rng": ocp.JaxRandomKeyCheckpointHandler(),
    }  # fmt: skip
    with ocp.CheckpointManager(at("handlers"), item_handlers=handlers) as manager:
        parts = ocp.args.Composite(
            state=ocp.args.PyTreeSave(small), model=ocp.args.ProtoSave(message),
            config=ocp.args.JsonSave({"act": "gelu"}), rng=ocp.args.JaxRandomKeySave(jax.random.key(3)),
        )  # fmt: skip
        manager.save(3, args=parts)
    done("handlers", {"weights": flat(small)}, mesh=[2, 1, 4, 1], config={"act": "gelu"}, problems=["ignored-file"])

    # older versions wrote the tree as msgpack beside the arrays; the functions for it are still there
    params, opt = trained(optax.adam(1e-3), {"dense": {"kernel": jnp.ones((9, 5)), "bias": jnp.zeros(5, jnp.bfloat16)}})
    arrays = {"params": params, "opt_state": opt}
    save(at("aggregate"), arrays, ocdbt=False)
    path = folder / "aggregate" / "ckpt"
    for extra in (*path.glob("_*"), path / "array_metadatas"):
        shutil.rmtree(extra) if extra.is_dir() else extra.unlink()
    names = ocp.tree.serialize_tree(arrays, keep_empty_nodes=True)
    kept = {"rng": np.arange(2, dtype="uint32"), "table": np.asarray(jnp.ones((3, 2), jnp.bfloat16))}
    placed = jax.tree_util.tree_map_with_path(
        lambda keys, _: ocp.utils.leaf_placeholder(".".join(str(k.key if hasattr(k, "key") else k.idx) for k in keys)),
        names,
    )
    data = msgpack_utils.msgpack_serialize(placed | kept | {"step": 4, "name": "old"})
    (path / "checkpoint").write_bytes(data)
    adam = opt[0]
    done(
        "aggregate",
        {
            "weights": flat(params), "mu": flat(adam.mu), "nu": flat(adam.nu),
            "count": dict.fromkeys(flat(params), adam.count), "others": kept,
        },
        mesh=[1, 1, 1, 1],
        strings={"name": "old"},
    )  # fmt: skip
    versions = {package: importlib.metadata.version(package) for package in PACKAGES}
    (folder / "versions.json").write_text(json.dumps(versions, indent=2) + "\n")


def _processes(folder: Path, port: str, rank: int) -> None:
    """Save as one of two processes. All arrays are over the devices of both."""
    import jax
    import numpy as np
    import optax
    import orbax.checkpoint as ocp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", 2, rank)
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "tensor"))
    random = np.random.default_rng(7)
    truth: dict[str, dict[str, Any]] = {"weights": {}, "mu": {}, "nu": {}, "count": {}}

    def on(state: str, name: str, value: Any, *spec: Any) -> Any:
        truth[state][name] = value
        return jax.make_array_from_callback(
            value.shape, NamedSharding(mesh, PartitionSpec(*spec)), lambda index: value[index]
        )

    shapes: dict[str, tuple[tuple[int, ...], tuple[Any, ...]]] = {
        "table": ((32, 24), ("fsdp", "tensor")), "kernel": ((24, 48), (None, ("fsdp", "tensor"))),
        "odd": ((40, 6), ("fsdp",)), "bias": ((48,), ()),
    }  # fmt: skip

    def tree(state: str) -> dict[str, Any]:
        numbers = {name: random.integers(0, 9, shape).astype("float32") for name, (shape, _) in shapes.items()}
        return {name: on(state, name, numbers[name], *spec) for name, (_, spec) in shapes.items()}

    params, mu, nu = tree("weights"), tree("mu"), tree("nu")
    count = on("count", "bias", np.int32(3))
    truth["count"] = dict.fromkeys(params, np.int32(3))
    state = {"params": params, "opt_state": (optax.ScaleByAdamState(count, mu, nu), optax.EmptyState()), "step": 7}
    for name, ocdbt in (("processes", True), ("processes_plain", False)):
        if rank == 0:
            shutil.rmtree(folder / name, ignore_errors=True)
            (folder / name).mkdir(parents=True)
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt)) as checkpointer:
            checkpointer.save(folder / name / "ckpt", state)
        if rank == 0:
            whole = truth | {"others": {"step": np.int64(7)}}
            _keep(folder / name / "truth.safetensors", whole)
            about = {"format": "orbax", "states": list(whole), "mesh": [2, 1, 4, 1]}
            (folder / name / "info.json").write_text(json.dumps(about))


if __name__ == "__main__":
    if len(sys.argv) > 2:
        _processes(Path(sys.argv[1]).absolute(), sys.argv[2], int(sys.argv[3]))
    else:
        _main(Path(sys.argv[1]).absolute())
