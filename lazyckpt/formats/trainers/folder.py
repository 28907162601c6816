"""Folders of transformers' Trainer (`checkpoint-N`) and of accelerate's `save_state`.

Weights are those of a Hugging Face folder or, with FSDP, a folder of torch.distributed.checkpoint or one torch file.
Optimizers, schedulers, random states and the rest are files of torch.save beside them. accelerate writes the Trainer's
FSDP and DeepSpeed files; DeepSpeed's reader reads the latter.
"""

from __future__ import annotations

import functools
import json
import pkgutil
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ...core.index import Index
from ...core.names import natural
from ...core.specs import TensorSpec, renamed
from ...errors import LazyckptError, Problem, cannot_read, only_one, some
from ...io.containers.pickle.plain import Path
from ...io.storage.base import Store
from .. import huggingface
from ..dcp.reader import in_folder
from ..reader import Reader, Source
from ..shared.announce import announce
from ..shared.members import Member, together
from ..shared.naming import By
from ..torch_save import member
from .steps import of_another_step, training_arguments

# -- The kinds of the files and folders that a trainer writes beside the weights. Pure.

_PLAIN = {  # pattern of a file's name -> kind; the group is the number among files of the same kind
    r"optimizer(?:_(\d+))?\.bin": "optimizer",
    r"scheduler(?:_(\d+))?\.bin": "scheduler",
    r"optimizer\.pt()": "optimizer",
    r"scheduler\.pt()": "scheduler",
    r"sampler(?:_(\d+))?\.bin": "sampler",
    r"dl_state_dict(?:_(\d+))?\.bin": "dl_state_dict",
    r"custom_checkpoint_(\d+)\.pkl": "custom_checkpoint",
    r"random_states_(\d+)\.pkl": "random_states",
    r"rng_state(?:_(\d+))?\.pth": "rng_state",
    r"scaler\.pt()": "scaler",
    r"training_args\.bin()": "training_args",
}
_MODELS = {
    r"pytorch_model_fsdp(?:_(\d+))?\.bin": "model",
    r"(?:pytorch_)?model_(\d+)\.(?:bin|safetensors)": "model",
    r"model\.(?:pt|pth)()": "model",  # a common name that belongs to no particular writer
}
_FOLDERS = {r"pytorch_model_fsdp_(\d+)": "model", r"optimizer_(\d+)": "optimizer"}
_FILES = [(re.compile(pattern), kind) for pattern, kind in (_PLAIN | _MODELS).items()]
_DIRS = [(re.compile(pattern), kind) for pattern, kind in _FOLDERS.items()]
# kinds that keep the number 0, because they are numbered by rank or from 0 on; the others drop it
_ALWAYS = ("random_states", "rng_state", "custom_checkpoint")
# accelerate never numbers the first of these: a folder with such files has one for each rank (torch_checkpointing)
_RANK = re.compile(r"(?:model|optimizer|scheduler)_0\.(?:pt|bin|safetensors)")
_XLA = re.compile(r"rank\d+-of-\d+-optimizer\.pt")  # transformers/trainer.py `_save_optimizer_and_scheduler`, on a TPU
_FIRST = re.compile(r"(?:pytorch_)?model\.(?:bin|safetensors)(?:\.index\.json)?")  # the first model, of Hugging Face


class Part(NamedTuple):
    """A file or folder of a checkpoint. ``place`` is the key of its content: "optimizer", "model_1", ..."""

    name: str
    kind: str
    place: str
    folder: bool


def parts(files: Iterable[str], folders: Iterable[str]) -> list[Part]:
    """Return the parts of a checkpoint, except for the weights of an ordinary Hugging Face folder.

    >>> [p.place for p in parts(["optimizer_1.bin", "rng_state_0.pth", "notes.txt"], ["pytorch_model_fsdp_0"])]
    ['optimizer_1', 'rng_state_0', 'model']
    >>> parts(["model_0.safetensors", "model_1.safetensors"], []), parts(["model_1.bin", "model_2.bin"], [])
    ([], [])
    """
    files = list(files)
    if any(_RANK.fullmatch(name) for name in files):
        return []
    found = [p for name in files if (p := _part(name, _FILES, False))]
    later = sorted(int(p.place.rpartition("_")[2]) for p in found if p.kind == "model" and p.place != "model")
    if later != list(range(1, len(later) + 1)):  # saves of several steps, not several models of one state
        found = [p for p in found if p.kind != "model"]
    found += [p for name in folders if (p := _part(name, _DIRS, True))]
    if all(p.place.startswith("model_") for p in found) and not any(map(_FIRST.fullmatch, files)):
        return []  # a saved state would include the first model or an optimizer: these are separate models
    return found


def _part(name: str, table: list[tuple[re.Pattern[str], str]], folder: bool) -> Part | None:
    for pattern, kind in table:
        match = pattern.fullmatch(name)
        if match:
            number = match[1]
            numbered = number and (kind in _ALWAYS or int(number) > 0)
            return Part(name, kind, f"{kind}_{int(number)}" if numbered else kind, folder)
    return None


# -- The order of the parameters of a transformers model, which is that of its modules, not that of a file.

Orders = tuple[tuple[str, ...], ...]


def in_module_order(names: Iterable[str], orders: Orders) -> list[str] | None:
    """Sort names in the order of the modules; return None if the order of a module's parts is unknown or ambiguous.

    >>> in_module_order(["a.bias", "a.weight", "b.10.w", "b.9.w"], (("weight", "bias"), ("a", "b")))
    ['a.weight', 'a.bias', 'b.9.w', 'b.10.w']
    >>> in_module_order(["a.k", "a.q"], (("q", "k"), ("k", "q")))
    """
    tree: dict[str, Any] = {}
    for name in names:
        node = tree
        *modules, last = name.split(".")
        for part in modules:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):  # the name of a tensor is also that of a module
                return None
        if last in node:
            return None
        node[last] = name
    try:
        return list(_walk(tree, orders))
    except LookupError:
        return None


def _walk(tree: Mapping[str, Any], orders: Orders) -> Iterator[str]:
    for part in _ordered(frozenset(tree), orders):
        below = tree[part]
        if isinstance(below, str):
            yield below
        else:
            yield from _walk(below, orders)


@functools.lru_cache(maxsize=1024)
def _ordered(parts: frozenset[str], orders: Orders) -> list[str]:
    if all(part.isdecimal() for part in parts):
        return sorted(parts, key=int)
    if len(parts) == 1:
        return list(parts)
    fitting = {tuple(part for part in order if part in parts) for order in orders if parts.issubset(order)}
    if len(fitting) != 1:
        raise LookupError(parts)
    return list(fitting.pop())


def orders_of(config: Any) -> Orders:
    """Return the known orders of modules for the model types that a config.json names, nested ones included."""
    table = _table()
    types = dict.fromkeys(_types(config, 4))
    found = dict.fromkeys(n for name in types for n in table["types"].get(name, ()))
    return tuple(tuple(table["orders"][n]) for n in found)


def _types(config: Any, depth: int) -> Iterator[str]:
    if isinstance(config, dict) and depth:
        kind = config.get("model_type")
        if isinstance(kind, str):
            yield kind
        for value in config.values():
            yield from _types(value, depth - 1)


@functools.cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(pkgutil.get_data(__package__, "hf_orders.json") or b"")
    return table


# -- Folders of transformers' Trainer (`checkpoint-N`) and of accelerate's `save_state`.

_TRAINER = ("trainer_state.json", "training_args.bin", "optimizer.pt", "scheduler.pt")


def _read(source: Source) -> Index:
    store = source.store
    found = _parts(source)
    problems: list[Problem] = []
    found = _one_of_each(found, problems)
    members: list[tuple[Path, Member]] = []
    broken: list[LazyckptError] = []
    by: By = "order"
    whole: Index | None = None
    meta: dict[str, Any] = {}

    announce(store, [part.name for part in found if not part.folder])
    announce(store, [f"{part.name}/.metadata" for part in found if part.folder])
    if not any(part.place == "model" for part in found):
        if huggingface.READER.recognises(source):
            try:
                whole = huggingface.read(source)
            except LazyckptError as e:
                broken.append(e)
                problems.append(Problem("unreadable-file", f"the weights cannot be read: {e}"))
        else:
            problems.append(Problem("missing-weights", "there is no file of weights"))
    elif huggingface.READER.recognises(source):
        chosen = next(part.name for part in found if part.place == "model")
        line = (
            f"there are weights of two kinds: {chosen} is read, as the trainer does when it resumes; open the others "
            "by their file"
        )
        problems.append(Problem("other-checkpoint", line, chosen))
    if whole is not None:
        ordered, model = as_member(whole)
        by = "order" if ordered else "shape"
        members += [(("model",), model), ((), _only_meta(whole.meta))]
        meta = dict(whole.meta)
    else:
        meta = huggingface.configs(store, problems)
        members.append(((), _only_meta(meta)))
    for part in found:
        try:
            members.append(_member(store, part))
        except LazyckptError as e:
            broken.append(e)
            problems.append(cannot_read(part.name, e))
            continue
        if part.name.endswith(".safetensors"):
            by = "shape"
    if not any(m.tensors or m.objects for _, m in members):
        raise broken[0]
    kinds = {part.kind for part in found}
    if "scheduler" in kinds and "optimizer" not in kinds:
        line = "there is no file of optimizer states, although there is one of a learning rate scheduler"
        problems.append(Problem("missing-optimizer", line))
    state = meta.get("trainer_state")
    if isinstance(state, dict) and "global_step" in state:
        members.append(((), _only_meta({"step": state["global_step"]})))

    if by == "order" and _made_by_the_trainer(members):
        by = "modules"
    models = sorted({"model", *(part.place for part in found if part.kind == "model")}, key=natural)
    name = "hf-trainer" if any(n in source.entries for n in _TRAINER) else "accelerate"
    if "optimizer.pt" in source.entries:
        problems += of_another_step(store, members, state)
    pieces = sorted((n for n in source.entries if _XLA.fullmatch(n)), key=natural)
    if pieces:
        line = f"{len(pieces):,} files of torch_xla's optimizer are not read beside gathered weights: {some(pieces)}"
        problems.append(Problem("ignored-file", line, only_one(pieces)))
    index = together(name, members, models, by)
    index = replace(index, problems=(*problems, *index.problems))
    return index if whole is None else _with_ties(index, whole, "model." if len(models) > 1 else "")


def _parts(source: Source) -> list[Part]:
    files = sorted((n for n, e in source.entries.items() if not e.is_dir), key=natural)
    folders = sorted((n for n, e in source.entries.items() if e.is_dir), key=natural)
    return [
        p for p in parts(files, folders) if not p.folder or ".metadata" in source.inside(p.name) or _lost(source, p)
    ]


def _lost(source: Source, part: Part) -> bool:
    """Return whether a folder is an unfinished save, which is kept so that its error is reported."""
    return any(name.endswith(".distcp") for name in source.inside(part.name))


def _one_of_each(found: Sequence[Part], problems: list[Problem]) -> list[Part]:
    """Choose the folder if a folder and a file have the same place: the file is left from another save."""
    places: dict[str, Part] = {}
    for part in sorted(found, key=lambda part: not part.folder):
        kept = places.setdefault(part.place, part)
        if kept is not part:
            line = f"{kept.name} and {part.name} are both there: {kept.name} is read, open the other by itself"
            problems.append(Problem("other-checkpoint", line, part.name))
    return [part for part in found if places[part.place] is part]


def _member(store: Store, part: Part) -> tuple[Path, Member]:
    if part.folder:
        held = in_folder(store, part.name)  # its own paths begin with "model" or "optimizer"
        return (), held if part.place == part.kind else _moved(held, f"{part.name}/", part.place)
    if part.name.endswith(".safetensors"):
        shard = huggingface.read_shard(store, part.name)
        tensors: dict[str, tuple[Path, TensorSpec]]
        tensors = {f"{part.name}/{n}": ((n,), renamed(s, f"{part.name}/{n}")) for n, s in shard.specs.items()}
        return (part.place,), Member(
            "", tensors, [], {}, lambda _: {}, {part.name: shard.info}, problems=shard.problems
        )
    held = member(store, part.name, f"{part.name}/")
    if set(held.meta) == {""}:  # the file has a single object instead of a dict
        return (), replace(held, tensors=_below(held.tensors, part.place), **_object(part.place, held.meta[""]))
    return (part.place,), held


def _made_by_the_trainer(members: Sequence[tuple[Path, Member]]) -> bool:
    """Return whether the Trainer itself created the optimizer.

    Such an optimizer has two groups with the learning rate of the training arguments: the first with their weight
    decay, the second without. transformers/trainer.py `create_optimizer` lists the parameters of both in the order of
    the modules. An optimizer that was passed to the Trainer can have any groups.
    """
    groups: Any = next((m.meta.get("param_groups") for base, m in members if base == ("optimizer",)), None)
    arguments = training_arguments(members)
    if not (arguments is not None and isinstance(groups, list) and len(groups) == 2):
        return False
    rate = arguments.get("learning_rate")
    options = [(g.get("weight_decay"), g.get("initial_lr", rate)) for g in groups if isinstance(g, dict)]
    return options == [(arguments.get("weight_decay"), rate), (0.0, rate)]


def _object(place: str, value: Any) -> dict[str, Any]:
    meta = {place: value}
    return {"objects": [(place,)], "meta": meta, "named": lambda _: meta}


def _below(tensors: Mapping[str, tuple[Path, TensorSpec]], place: str) -> dict[str, tuple[Path, TensorSpec]]:
    return {key: ((place, *path), spec) for key, (path, spec) in tensors.items()}


def _moved(held: Member, prefix: str, top: str) -> Member:
    """Return a member under another top key, with a prefix of its raw names: all models have the same top key."""
    tensors = {
        prefix + key: ((top, *path[1:]), replace(spec, name=prefix + key)) for key, (path, spec) in held.tensors.items()
    }
    (meta,) = [{top: value} for value in held.meta.values()] or [{}]
    return Member(
        held.format,
        tensors,
        [(top, *path[1:]) for path in held.objects],
        meta,
        lambda _: meta,
        held.files,
        problems=held.problems,
    )


def _only_meta(meta: Mapping[str, Any]) -> Member:
    return Member("", {}, [], meta, lambda _: meta, {})


def as_member(whole: Index) -> tuple[bool, Member]:
    """Return whether the weights of a Hugging Face folder are in the order of the modules, and the weights as a
    member."""
    weights = whole.states["weights"]
    names: list[str] | None = list(weights)
    if any(path.endswith(".safetensors") for path in whole.files):
        names = in_module_order(weights, orders_of(whole.meta.get("config")))
    tensors: dict[str, tuple[Path, TensorSpec]] = {n: ((n,), weights[n]) for n in (names or weights)}
    held = Member("huggingface", tensors, [], {}, lambda _: {}, whole.files, whole.stored, problems=whole.problems)
    return names is not None, held


def _with_ties(index: Index, whole: Index, prefix: str) -> Index:
    """Add the tied names and the unreadable names of the weights' index."""
    return replace(
        index,
        aliases={prefix + a: prefix + o for a, o in whole.aliases.items()} | dict(index.aliases),
        unreadable={prefix + name: reason for name, reason in whole.unreadable.items()},
    )


def _recognises(source: Source) -> bool:
    if source.path or ".metadata" in source.entries:
        return False
    found = _parts(source)
    if [part.name for part in found] == ["model.pt"]:  # too common a name
        return False
    return bool(found) or ("trainer_state.json" in source.entries and huggingface.READER.recognises(source))


READER = Reader(
    "trainer",
    f"folders of transformers' Trainer and of accelerate's save_state ({some(_TRAINER)})",
    _recognises,
    _read,
)
