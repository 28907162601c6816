"""What NeMo 2 and Megatron-Bridge write beside the weights: the configuration of the model and how it was cut.

Writers: Megatron-Bridge src/megatron/bridge/training/checkpointing.py `save_checkpoint` (``run_config.yaml``, of the
classes in training/config.py, and ``train_state.pt`` in every iteration); NeMo 2 nemo/lightning/io/mixin.py `io_dump`
(``context/model.yaml`` and ``context/io.json`` beside ``weights/``: a graph of the objects that the run was built
from). The classes that they name are shown, never imported.
"""

from __future__ import annotations

import json
import posixpath
import re
from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...core.index import FileInfo
from ...core.specs import TensorSpec
from ...errors import CorruptError, LazyckptError, Problem, cannot_read
from ...io.limits import check_levels
from ...io.storage.base import Entry, Store
from ...layouts.megatron import number, place
from .config import args_of, read_config

RUN = "run_config.yaml"
STATE = "train_state.pt"
WEIGHTS, CONTEXT = "weights", "context"
_MODEL, _OBJECTS = f"{CONTEXT}/model.yaml", f"{CONTEXT}/io.json"
_MOST = 64 << 20  # bytes of io.json
_DEGREES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
_MORE = ("virtual_pipeline_model_parallel_size", "expert_tensor_parallel_size", "context_parallel_size")
_ATTRIBUTE = re.compile(r"Attr\(name='(\w+)'\)")
_RNG = re.compile(r"rng_state/shard_\d+\.\d+(?:\.\d+)*_(\d{1,9})\.(\d{1,9})(?:\.\d+)*")


@dataclass(slots=True)
class Described:
    """What is known from the descriptions. ``by``: the file that ``args`` are from."""

    args: Namespace | None = None
    by: str = ""
    meta: dict[str, Any] = field(default_factory=dict)
    files: dict[str, FileInfo] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def described(store: Store, folder: str, names: Mapping[str, Entry]) -> Described:
    """Return what the ``run_config.yaml`` of Megatron-Bridge describes, if the folder, whose listing is ``names``, has
    one."""
    found = Described()
    if RUN not in names:
        return found
    path = posixpath.join(folder, RUN)
    found.files[path] = names[RUN].info
    config = read_config(store, path, found.problems)
    if config is None:
        return found
    found.meta["run_config"] = config
    model = config.get("model")
    if not isinstance(model, dict):
        line = f"{path} describes no model: how it was cut is not known from it"
        found.problems.append(Problem("missing-metadata", line, path))
        return found
    inner = model.get("transformer")  # (in configurations of builders)
    found.args, found.by = args_of({**model, **inner} if isinstance(inner, dict) else model), path
    if type(config.get("data_parallel_size")) is int:
        found.args.data_parallel_size = config["data_parallel_size"]
    return found


def described_by_context(store: Store, names: Mapping[str, Entry]) -> Described:
    """Return what the ``context`` of NeMo 2 describes. ``names``: the listing of that folder.

    The model's own configuration is the one that the run began with: the strategy's degrees replace its degrees."""
    found = Described()
    context: dict[str, Any] = {}
    model: Any = None
    if "model.yaml" in names:
        found.files[_MODEL] = names["model.yaml"].info
        config = read_config(store, _MODEL, found.problems)
        if config is not None:
            context["model"] = config
            model = config.get("config")
    if "io.json" in names:
        found.files[_OBJECTS] = names["io.json"].info
        try:
            context["io"] = _objects(store, names["io.json"].info.size)
        except LazyckptError as e:
            found.problems.append(cannot_read(_OBJECTS, e, ", nor the degrees of the run in it"))
    if context:
        found.meta["context"] = context
    degrees = _strategy(context.get("io"))
    if isinstance(model, dict):
        found.args, found.by = args_of(model), _MODEL
    elif degrees:
        found.args, found.by = Namespace(), _OBJECTS
    if found.args is not None:
        for name, value in degrees.items():
            own = number(found.args, name)
            if own is not None and own != value and own > 1:
                line = f"{_MODEL} says {name} = {own}, the strategy in {_OBJECTS} {value}: the latter is used"
                found.problems.append(Problem("inconsistent-metadata", line, _MODEL))
            setattr(found.args, name, value)
    return found


def _objects(store: Store, size: int) -> Any:
    """Return the content of io.json. Raises CorruptError if it is no JSON, or more than such a file can be."""
    where = f"{store.root}/{_OBJECTS}"
    if size > _MOST:
        raise CorruptError(f"{where}: {size:,} bytes are too many for a description: it is damaged or hostile")
    try:
        value = json.loads(bytes(store.read(_OBJECTS, 0, size)))
    except (ValueError, RecursionError) as e:
        raise CorruptError(f"{where} is no JSON ({e!r:.80}): the file is damaged") from None
    check_levels(where, value)
    return value


def _strategy(graph: Any) -> dict[str, int]:
    """Return the degrees of the strategy in the graph of objects (nemo/lightning/pytorch/strategies/
    megatron_strategy.py `MegatronStrategy`); {} if there is none, or if there are several that differ. Arguments that
    were not given are not written: the degrees are then 1."""
    table = graph.get("objects") if isinstance(graph, dict) else None
    table = table if isinstance(table, dict) else {}
    found = [_numbers(one) for one in table.values() if _class_of(one, table) == "MegatronStrategy"]
    if not found or any(one != found[0] for one in found):
        return {}
    given = {name: found[0][name] for name in (*_DEGREES, *_MORE) if name in found[0]}
    return {**dict.fromkeys(_DEGREES, 1), **given}


def _class_of(one: Any, table: Mapping[str, Any]) -> Any:
    """Return the name of the class that an object of the graph describes; None if it describes none."""
    about = one.get("metadata") if isinstance(one, dict) else None
    key = about.get("key") if isinstance(about, dict) else None
    built = _attributes(table.get(key)).get("fn_or_cls") if isinstance(key, str) else None
    return built.get("name") if isinstance(built, dict) else None


def _numbers(one: Any) -> dict[str, int]:
    """Return the attributes of an object that are positive numbers."""
    found = {}
    for name, leaf in _attributes(one).items():
        value = leaf.get("value") if isinstance(leaf, dict) else None
        if type(value) is int and value > 0:
            found[name] = value
    return found


def _attributes(one: Any) -> dict[str, Any]:
    """Return the attributes of an object of the graph (fiddle/experimental/serialization.py)."""
    items = one.get("items") if isinstance(one, dict) else None
    found = {}
    for pair in items if isinstance(items, list) else ():
        match = _ATTRIBUTE.fullmatch(str(pair[0])) if isinstance(pair, list) and len(pair) == 2 else None
        if match is not None:
            found[match[1]] = pair[1]
    return found


def contradictions(about: Described, weights: Mapping[str, TensorSpec], objects: Iterable[object]) -> list[Problem]:
    """Return where the description and the checkpoint differ. ``objects``: the names of its objects; the generators'
    states are numbered by pipeline and tensor-parallel ranks."""
    args = about.args
    if args is None:
        return []
    grids = {(int(match[1]), int(match[2])) for name in objects if (match := _RNG.fullmatch(str(name)))}
    places = [place(name) for name in weights]
    layers = {at.layer for at in places if at.layer is not None and at.head == "decoder.layers."}
    experts = {at.number for at in places if at.number is not None}
    widths = {spec.shape[1] for name, spec in weights.items() if name.endswith("word_embeddings.weight")}
    has: list[tuple[str, int | None, int | None]] = [
        ("num_layers", number(args, "num_layers"), max(layers) + 1 if layers else None),
        ("num_moe_experts", number(args, "num_moe_experts"), max(experts) + 1 if experts else None),
        ("hidden_size", number(args, "hidden_size"), widths.pop() if len(widths) == 1 else None),
    ]
    if len(grids) == 1:
        (pp, tp) = grids.pop()
        has += [(_DEGREES[0], number(args, _DEGREES[0]) or 1, tp), (_DEGREES[1], number(args, _DEGREES[1]) or 1, pp)]
    return [
        Problem(
            "inconsistent-metadata",
            f"{about.by} says {name} = {said}, the checkpoint has {there}: it may be the description of another one",
            about.by,
        )
        for name, said, there in has
        if said is not None and there is not None and said != there
    ]
