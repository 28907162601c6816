"""Flax msgpack files (`.msgpack`): a tree of parameters, or a training state with optax's states.

Writer: flax/serialization.py (`to_bytes`, `msgpack_serialize`) of flax 0.12, and the `flax_model.msgpack` of
transformers. Keys are joined with dots. A tree with "params" and "opt_state" is a `TrainState`: the arrays below
"params" are the weights; those of "opt_state" whose path ends with a parameter's belong to it, under the key in front
of that (`mu`, `nu`, `trace`). Arrays of more than 1 GiB are in flat pieces (`__msgpack_chunked_array__`).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from ..core.box import c_strides
from ..core.extents import Extent
from ..core.index import Index
from ..core.specs import Fragment, TensorSpec, renamed, whole
from ..errors import CorruptError, Problem, only_one, some
from ..io.containers.msgpack import Stored, Unknown, read_msgpack
from ..io.storage.streams import StoreFile
from .reader import Reader, Source
from .shared.paths import put

_CHUNKED = "__msgpack_chunked_array__"
Path = tuple[str, ...]


def _recognises(source: Source) -> bool:
    head = source.head[:1]
    is_map = bool(head) and (0x80 <= head[0] <= 0x8F or head[0] in (0xDE, 0xDF))
    return bool(source.path) and source.path.endswith(".msgpack") and (is_map or not head)


def _read(source: Source) -> Index:
    file = StoreFile(source.store, source.path)
    if not file.size:
        raise CorruptError(f"{file.where} is empty (0 bytes): copy it again from its source")
    root = read_msgpack(file)
    leaves = list(_leaves(root, (), file))
    specs: dict[Path, TensorSpec] = {}
    named: dict[str, Path] = {}
    problems: list[Problem] = []
    meta: dict[str, Any] = {}
    unknown: dict[str, list[str]] = {}
    for path, value in leaves:
        name = ".".join(path) or "array"
        if isinstance(value, str):
            unknown.setdefault(value, []).append(name)
        elif not isinstance(value, TensorSpec):
            put(meta, path or ("",), value[0])
        elif named.setdefault(name, path) != path:
            name = "/".join(path)
            problems.append(Problem("duplicate-tensor", f"two arrays would be called {'.'.join(path)!r}", name))
            specs[path] = renamed(value, name)
        else:
            specs[path] = value
    problems += [
        Problem("unsupported-tensor", f"not in the view: {some(names)}: {kind}", only_one(names))
        for kind, names in unknown.items()
    ]
    stored = {spec.name: spec for spec in specs.values()}
    states: dict[str, dict[str, TensorSpec]] = {"weights": stored}
    if isinstance(root, dict) and "params" in root and "opt_state" in root:
        states = _states(specs, problems)
        step = specs.get(("step",))
        if step is not None and not step.shape and step.dtype.name.startswith("int"):
            at = step.fragments[0].extent
            assert isinstance(at, Extent)
            meta["step"] = int.from_bytes(file.at(at.offset, step.dtype.itemsize), "little", signed=True)
    return Index(
        format="flax",
        states=states,
        files={file.path: file.info},
        stored=stored,
        meta=meta,
        problems=tuple(problems),
    )


def _leaves(value: Any, path: Path, file: StoreFile) -> Iterator[tuple[Path, TensorSpec | str | tuple[Any]]]:
    """Yield the path of every leaf with its spec, the reason why it is no tensor, or (the object,)."""
    if isinstance(value, dict) and _CHUNKED in value:
        yield path, _joined(value, path, file)
    elif isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, (*path, _text(key)), file)
    elif isinstance(value, list) and any(isinstance(inner, dict | list | Stored) for inner in value):
        for n, inner in enumerate(value):
            yield from _leaves(inner, (*path, str(n)), file)
    elif isinstance(value, Stored):
        if value.dtype is None:
            yield path, f"elements of the dtype {value.kind[:40]!r}, which torch lacks"
        else:
            extent = Extent(file.path, value.offset, value.dtype, value.shape, c_strides(value.shape))
            yield path, whole(".".join(path) or "array", extent)
    elif isinstance(value, Unknown):
        yield path, f"an object of msgpack's ext type {value.code}, which flax does not write"
    else:
        yield path, (value,)


def _text(key: Any) -> str:
    return key.decode("utf-8", "replace") if isinstance(key, bytes) else str(key)


def _joined(value: dict[Any, Any], path: Path, file: StoreFile) -> TensorSpec | str:
    """Return the spec of an array in flat pieces. Raises CorruptError."""
    name = ".".join(path) or "array"
    where = f"{file.where}: the array {name!r:.80}, which is in pieces,"
    shape, pieces = _in_order(value.get("shape"), where), _in_order(value.get("chunks"), where)
    if any(type(n) is not int or n < 0 for n in shape) or not pieces:
        raise CorruptError(f"{where} has the shape {shape!s:.60} and {len(pieces)} pieces: damaged")
    if any(not isinstance(piece, Stored) or len(piece.shape) != 1 for piece in pieces):
        raise CorruptError(f"{where} has pieces that are not flat: damaged")
    dtype = pieces[0].dtype
    if dtype is None:
        return f"elements of the dtype {pieces[0].kind[:40]!r}, which torch lacks"
    if any(piece.dtype is not dtype for piece in pieces) or sum(piece.shape[0] for piece in pieces) != prod(shape):
        raise CorruptError(f"{where} has pieces of other dtypes, or of another size in all: damaged")
    fragments, at = [], 0
    for piece in pieces:
        count = piece.shape[0]
        sizes = (*(1 for _ in shape[1:]), count)
        extent = Extent(file.path, piece.offset, dtype, sizes, c_strides(sizes))
        fragments.append(Fragment(extent, tuple(shape), span=(at, at + count)))
        at += count
    return TensorSpec(name, tuple(shape), dtype, tuple(fragments), rule=f"{len(pieces)} flat pieces, joined in order")


def _in_order(table: Any, where: str) -> list[Any]:
    if not isinstance(table, dict) or set(table) != {str(n) for n in range(len(table))}:
        raise CorruptError(f"{where} has no numbered list of sizes or pieces: damaged")
    return [table[str(n)] for n in range(len(table))]


def _states(specs: dict[Path, TensorSpec], problems: list[Problem]) -> dict[str, dict[str, TensorSpec]]:
    """Return the states of a training state. What belongs to no parameter for certain stays in the raw namespace."""
    weights: dict[str, TensorSpec] = {}
    params: dict[Path, str] = {}
    for path, spec in specs.items():
        if path[0] == "params" and len(path) > 1:
            params[path[1:]] = ".".join(path[1:])
            weights[params[path[1:]]] = renamed(spec, params[path[1:]])
    for path, spec in specs.items():  # batch statistics and other collections
        if path[0] not in ("params", "opt_state") and len(path) > 1:
            weights.setdefault(spec.name, spec)
    found: dict[str, dict[Path, dict[str, TensorSpec]]] = {}
    undecided = []
    for path, spec in specs.items():
        if path[0] != "opt_state":
            continue
        at = [k for k in range(2, len(path)) if path[k:] in params]
        if len(at) > 1:  # a parameter's path ends with another's
            at = [k for k in at if specs[("params", *path[k:])].shape == spec.shape]
        if len(at) == 1:
            name = params[path[at[0] :]]
            one = found.setdefault(path[at[0] - 1], {}).setdefault(path[: at[0]], {})
            one[name] = renamed(spec, name)
        elif spec.shape:
            undecided.append(spec.name)
    states: dict[str, dict[str, TensorSpec]] = {"weights": weights}
    for state, groups in found.items():
        if len(groups) > 1 or state == "weights":
            for path, table in groups.items():
                states[".".join(path[1:])] = table
        else:
            (states[state],) = groups.values()
    if undecided:
        line = f"to which parameters these states of the optimizer belong is not certain: {some(undecided)}"
        problems.append(Problem("undecided-name", f"{line}. They are in view.stored", only_one(undecided)))
    return states


READER = Reader("flax", "msgpack files of Flax", _recognises, _read)
