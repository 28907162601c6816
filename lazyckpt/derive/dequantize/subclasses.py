"""Quantized tensors that consist of others: what a pickle, or the header of a safetensors file, says of each.

torch.save pickles a subclass of Tensor as its class and attributes, which lazyckpt keeps as records in the view's
metadata; nothing is executed. torchao's `flatten_tensor_state_dict` writes the same to the metadata of safetensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from ...core.dtypes import DType, dtype_of
from ...core.specs import Expr
from ...errors import DataError, Problem, only_one, some
from ...io.containers.pickle.plain import TensorRef
from ...io.containers.pickle.records import Opaque
from .model import Model, Weight

_DEEP = 12  # levels of metadata that are searched
_BUILDER = "_make_in_reduce_ex"  # what Transformer Engine's classes pickle: this method of theirs, and its arguments


class Composed(NamedTuple):
    """A tensor that consists of others.

    Attributes
    ----------
    name
        Its name.
    kind
        The name of its class.
    module
        The module of its class; empty in safetensors.
    said
        Its attributes that are not tensors. A tensor inside that consists of others is a `Composed` here.
    parts
        Attribute -> the name of the tensor in the checkpoint. Where a pickle has arguments instead of attributes, the
        numbers of the arguments, here and in ``said``.
    shape, dtype
        What the pickle says of the whole tensor, if it does.
    """

    name: str
    kind: str
    module: str
    said: Mapping[str, Any]
    parts: Mapping[str, str]
    shape: tuple[int, ...] | None = None
    dtype: DType | None = None

    @property
    def package(self) -> str:
        """The top-level package of its class."""
        return self.module.partition(".")[0]

    def names(self) -> tuple[str, ...]:
        """Return the names of all tensors that it consists of."""
        inner = [name for one in self.said.values() if isinstance(one, Composed) for name in one.names()]
        return (*self.parts.values(), *inner)


def weights_of(
    model: Model,
    package: str,
    value: Callable[[Composed], Expr | str],
    title: str,
    codes: tuple[str, ...] = (),
) -> Iterator[Weight | Problem]:
    """Yield the weights that the classes of a package hold, and the problems of those that are not computed.

    Parameters
    ----------
    model
        The checkpoint.
    package
        The top-level package of the classes.
    value
        Returns a tensor's value, or what it is, if that is not known. Raises DataError if it contradicts itself.
    title
        The package, for messages.
    codes
        Ends of the names of the codes, which come first among the stored tensors; by default they are in order.
    """
    unknown: dict[str, list[str]] = {}
    for one in composed(model):
        if one.package != package:
            continue
        try:
            found = value(one)
        except DataError as e:
            yield Problem("contradicting-quantization", f"{one.name!r}: {e}", one.name)
            continue
        if isinstance(found, str):
            unknown.setdefault(found, []).append(one.name)
            continue
        stored = [name for name in one.names() if name in model]
        stored.sort(key=lambda name: not name.rpartition(".")[2].endswith(codes) if codes else False)
        yield Weight(one.name, found, tuple(stored))
    for why, names in unknown.items():
        line = f"{len(names):,} tensors of {title} are {why}: {some(names)}"
        yield Problem("undecided-quantization", line, only_one(names))


def composed(model: Model) -> Iterator[Composed]:
    """Yield the tensors that consist of others, of which the view has a part."""
    for one in _searched(model.view._index.meta, model, "", 0):
        if not all(name in model for name in one.names()):
            one = _in_view(one, model)
        if any(name in model for name in one.names()):
            yield one


def _in_view(one: Composed, model: Model) -> Composed:
    """Return the same with the names of the view, which lack the outer levels of the pickle: ``a.weight`` for
    ``model.a.weight``."""
    stored = one.names()
    for at in [n + 1 for n, char in enumerate(stored[0]) if char == "."] if stored else ():
        start = stored[0][:at]
        if not all(name.startswith(start) and name[at:] in model for name in stored):
            continue
        if all(model.spec(name[at:]).stored_as == name for name in stored):
            return _without(one, at)
    return one


def _without(one: Composed, count: int) -> Composed:
    said = {key: _without(value, count) if isinstance(value, Composed) else value for key, value in one.said.items()}
    parts = {key: name[count:] for key, name in one.parts.items()}
    return one._replace(name=one.name[count:], said=said, parts=parts)


def _searched(value: Any, model: Model, name: str, depth: int) -> Iterator[Composed]:
    if depth > _DEEP:
        return
    if isinstance(value, Opaque):
        found = _of_record(value, name)
        if found is not None:
            yield found
    elif isinstance(value, Mapping):
        if isinstance(value.get("tensor_names"), str):
            yield from _flattened(value, model)
        for key, inner in value.items():
            if isinstance(inner, Opaque | Mapping):
                yield from _searched(inner, model, f"{name}.{key}" if name else str(key), depth + 1)


def _of_record(record: Opaque, name: str) -> Composed | None:
    """Return what a record says of a tensor; None if it is no tensor's."""
    args = record.args
    kind, _, last = record.name.rpartition(".")
    if args and last == _BUILDER:
        parts = {str(n): value.name for n, value in enumerate(args) if isinstance(value, TensorRef)}
        said = {str(n): value for n, value in enumerate(args) if not isinstance(value, TensorRef)}
        first = next(iter(parts.items()), None)
        above = first[1].removesuffix(f".{first[0]}") if first is not None else name
        return Composed(above, kind.rpartition(".")[2], record.module, said, parts) if parts else None
    if not args or len(args) < 3 or not isinstance(args[0], Opaque) or args[0].name != record.name:
        return None
    parts = {}
    said = {}
    for key, value in record.attributes.items():
        if isinstance(value, TensorRef):
            parts[key] = value.name
        elif isinstance(value, Opaque):
            said[key] = _of_record(value, f"{name}.{key}") or value
        else:
            said[key] = value
    inner = [one for one in said.values() if isinstance(one, Composed)]
    if not parts and not inner:
        return None
    whole = Composed(name, record.name, record.module, said, parts, _shape(args[2]), _dtype(args[1]))
    ends = {f".{key}": ref for key, ref in parts.items()}
    stems = {ref.removesuffix(end) for end, ref in ends.items() if ref.endswith(end)}
    if len(stems) == 1:  # the name in the view, which may lack outer levels of the pickle
        whole = whole._replace(name=stems.pop())
    elif inner:
        key = next(key for key, one in said.items() if isinstance(one, Composed))
        whole = whole._replace(name=inner[0].name.removesuffix(f".{key}"))
    return whole


def _flattened(table: Mapping[str, Any], model: Model) -> Iterator[Composed]:
    """Yield what torchao wrote to the metadata of a safetensors file: ``a.weight`` is ``a._weight_qdata``, ... (or
    ``a.weight:qdata`` in older versions)."""
    for name in _json(table["tensor_names"]) or ():
        text = table.get(name) if isinstance(name, str) else None
        known = _json(text) if isinstance(text, str) else None
        if not isinstance(known, dict) or known.get("_type") in (None, "Tensor", "torch.Tensor"):
            continue
        above, dot, last = name.rpartition(".")
        prefixes = (f"{above}{dot}_{last}_", f"{name}:")
        listed = known.get("_tensor_data_names")
        parts: dict[str, str] = {}
        for prefix in prefixes:
            if isinstance(listed, list):
                found = [key for key in listed if isinstance(key, str)]
            else:
                found = [one.removeprefix(prefix) for one in model.names if one.startswith(prefix)]
            parts |= {key: prefix + key for key in found if prefix + key in model and key not in parts}
        if isinstance(listed, list) and len(parts) != len(listed):
            parts = {}
        data = known.get("_data")
        said = {key: _plain(value) for key, value in data.items()} if isinstance(data, dict) else {}
        yield Composed(name, str(known["_type"]), "torchao", said, parts)


def _json(text: Any) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return None


def _plain(value: Any) -> Any:
    """Return a dtype for torchao's description of one."""
    if isinstance(value, dict) and value.get("_type") == "torch.dtype":
        return _dtype(value.get("_data")) or value.get("_data")
    return value


def _dtype(value: Any) -> DType | None:
    try:
        return dtype_of(value)
    except (DataError, TypeError):
        return None


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value) if isinstance(value, tuple | list) and all(type(n) is int for n in value) else None
