"""Universal checkpoints: a folder per parameter, a file per state.

Writer: deepspeed/checkpoint/ds_to_universal.py. Up to ZeRO stage 2 (and with tensor parallelism), a file holds a dict
with ``param`` in its shape; at stage 3, the bare flat tensor, whose shape is in the model states next to it. ``step``
is a bare number.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

from ...core.box import Shape, c_strides
from ...core.dtypes import F32
from ...core.extents import Extent, Hole
from ...core.index import Index
from ...core.names import natural
from ...core.specs import Fragment, TensorSpec
from ...errors import CorruptError, LazyckptError, Problem, cannot_read, sentences
from ...io.containers.pickle.plain import Plain
from ...io.containers.pickle.rebuild import StoredTensor
from ..reader import Source
from ..shared.announce import announce
from ..torch_save import ties
from .autoep import router_aliases
from .building import Building, shapes_of, table, tensors_in
from .files import RankFiles

_MUON, _ADAM = frozenset({"momentum_buffer"}), frozenset({"exp_avg", "exp_avg_sq", "step"})


def read(source: Source, files: RankFiles) -> Index:
    """Index a universal checkpoint. Raises CorruptError if no parameter can be read."""
    b = Building(source.store)
    root = f"{files.folder}/zero" if files.folder else "zero"
    shapes, aliases, meta, listed = _model_states(b, files)
    problems = []
    folders = sorted((n for n, entry in source.inside(root).items() if entry.is_dir), key=natural)
    source.list_all(f"{root}/{name}" for name in folders)
    states = {
        name: sorted((n for n in source.inside(f"{root}/{name}") if n.endswith(".pt")), key=natural) for name in folders
    }
    announce(b.store, [f"{root}/{name}/{file_name}" for name in folders for file_name in states[name]])
    for name in folders:
        for file_name in states[name]:
            path = f"{root}/{name}/{file_name}"
            state = file_name.removesuffix(".pt")
            try:
                spec = _spec(b, path, name, shapes.get(name))
            except LazyckptError as e:
                problems.append(cannot_read(path, e))
                continue
            if spec is not None:
                b.states.setdefault(state, {})[name] = spec
            else:
                line = f"{path} holds no tensor: its value is not among the states, only in the file (view.stored)"
                problems.append(Problem("unsupported-tensor", line, path))
    lost, unreadable = _holes(b, source, root, listed, shapes)
    problems += lost
    problems += _slices(b, meta)
    if not b.states:
        raise CorruptError(f"{source.where}/{root}: none of its parameters can be read; {sentences(problems)}")
    order = ("fp32", "exp_avg", "exp_avg_sq")
    names = sorted(b.states, key=lambda s: (order.index(s) if s in order else 3 + (s == "step"), s))
    known = b.states.get("fp32", {})
    return Index(
        format="deepspeed-universal",
        states={s: b.states[s] for s in names},
        files=b.files,
        indexed=b.indexed,
        # a tied name with a folder of its own is no alias: its values were written in the training dtype
        aliases={a: o for a, o in aliases.items() if o in known and a not in known},
        meta={**meta, "tag": files.folder},
        problems=(*b.problems, *problems),
        unreadable=unreadable,
    )


def _holes(
    b: Building, source: Source, root: str, listed: Listed, shapes: dict[str, Shape]
) -> tuple[list[Problem], dict[str, str]]:
    """Add holes for state files that a parameter lacks and others have. Return the problems of missing and left-over
    files, and name -> why it cannot even be described."""
    problems = []
    unreadable: dict[str, str] = {}
    folders = source.inside(root)
    muon, adam = (_with_any(b, states) for states in (_MUON, _ADAM))
    apart = muon.isdisjoint(adam)  # Muon leaves some parameters to Adam: these have other states
    for name in sorted(listed.trained, key=natural):
        known = next((names[name].shape for s, names in b.states.items() if s != "step" and name in names), None)
        shape = known or shapes.get(name)
        if name not in folders:
            path = f"{root}/{name}"
            problems.append(Problem("missing-file", f"{path} is missing, the folder of a parameter", path))
            unreadable[name] = f"{path} is missing"
        for state, names in b.states.items():
            if name in names or (apart and ((name in muon and state in _ADAM) or (name in adam and state in _MUON))):
                continue
            path = f"{root}/{name}/{state}.pt"
            size = () if state == "step" else shape
            if name in folders and f"{state}.pt" not in source.inside(f"{root}/{name}"):
                problems.append(Problem("missing-file", f"{path} is missing", path))
            if size is None:
                unreadable.setdefault(name, f"{path} is missing, or cannot be read")
                continue
            hole = Hole(path, f"{path} is missing, or cannot be read")
            dtype = next((s.dtype for s in names.values()), F32)
            names[name] = TensorSpec(name, size, dtype, (Fragment(hole, size),))
    if listed.trained and listed.complete:
        problems += [
            Problem(
                "left-over-file",
                f"{root}/{name}: the model states do not have this parameter: left over?",
                f"{root}/{name}",
            )
            for name, entry in folders.items()
            if entry.is_dir and name not in listed.trained | listed.others
        ]
    return problems, unreadable


def _with_any(b: Building, states: frozenset[str]) -> set[str]:
    return {name for state in states - {"step"} for name in b.states.get(state, ())}


def _slices(b: Building, meta: dict[str, Any]) -> list[Problem]:
    """Report tensors that may be slices. ds_to_universal takes tensors that no optimizer has (frozen parameters, tied
    names) from the first model states alone, which hold slices of a tensor-parallel model; the folder does not show
    it."""
    degrees = meta.get("checkpoint_parallel_dimensions")
    if not isinstance(degrees, dict) or degrees.get("tp_degree") in (None, 1) or len(b.states) < 2:
        return []
    with_states = {name for state, names in b.states.items() if state != "fp32" for name in names}
    return [
        Problem(
            "assumed-layout",
            f"{name!r} has no optimizer states: ds_to_universal took it from the first tensor-parallel rank alone, and "
            "if it is cut over them this is only that rank's slice",
            name,
        )
        for name in b.states.get("fp32", {})
        if name not in with_states
    ]


def _spec(b: Building, path: str, name: str, shape: Shape | None) -> TensorSpec | None:
    file = b.file(path)
    value: Any = file.root.get("param") if isinstance(file.root, dict) else file.root
    if not isinstance(value, StoredTensor):
        return None
    extent = file.extent(value, name)
    if shape is not None and extent.shape != shape and len(extent.shape) == 1 and prod(shape) == extent.shape[0]:
        if extent.strides not in ((1,), ()):
            raise CorruptError(f"{path}: a flat tensor with stride {extent.strides}")
        extent = Extent(extent.path, extent.offset, extent.dtype, shape, c_strides(shape), swapped=extent.swapped)
    return TensorSpec(name, extent.shape, extent.dtype, (Fragment(extent, extent.shape),))


def _model_states(b: Building, files: RankFiles) -> tuple[dict[str, Shape], dict[str, str], dict[str, Any], Listed]:
    """Read the copied model states: full shapes (if nothing was cut over tensor-parallel ranks), ties, meta, names."""
    paths = files.model or {mp: p for (dp, mp), p in files.zero_model.items() if dp == 0}
    announce(b.store, paths.values())
    listed = _listed(b, paths)
    path = paths.get(0)
    if path is None:
        return {}, {}, {}, listed
    try:
        file = b.file(path)
        model = table(file, file.root)
        groups = model.get("param_shapes")
        shapes = {n: s for g in (groups if isinstance(groups, list) else ()) for n, s in shapes_of(file, g).items()}
        shared = model.get("shared_params")
        aliases = {a: o for a, o in shared.items() if isinstance(o, str)} if isinstance(shared, dict) else {}
        module = tensors_in(file, model.get("module"))
        aliases.update({a: o for a, o in ties(module).items() if o not in aliases})
        aliases |= router_aliases(model, list(module))
        rest = Plain(file.root, path, file.pickle_size).rest
        meta = dict(rest) if isinstance(rest, dict) else {}
        if "global_steps" in meta:
            meta.setdefault("step", meta["global_steps"])
        degrees = meta.get("checkpoint_parallel_dimensions")
        cut = not isinstance(degrees, dict) or degrees.get("tp_degree") != 1  # then these are the shapes of shards
        return {} if cut and len(paths) > 1 else shapes, aliases, meta, listed
    except LazyckptError:  # reported by `_listed`
        return {}, {}, {}, listed


class Listed(NamedTuple):
    """The names in the copied model states. ``trained``: parameters that the optimizer has; ``others``: names in the
    module; ``complete``: whether all model states could be read."""

    trained: set[str]
    others: set[str]
    complete: bool


def _listed(b: Building, paths: Mapping[int, str]) -> Listed:
    trained: set[str] = set()
    others: set[str] = set()
    complete = True
    for path in paths.values():
        try:
            file = b.file(path)
            model = table(file, file.root)
            groups = model.get("param_shapes")
            trained |= {n for g in (groups if isinstance(groups, list) else ()) for n in shapes_of(file, g)}
            others |= set(tensors_in(file, model.get("module")))
        except LazyckptError as e:
            b.report(cannot_read(path, e))
            complete = False
    return Listed(trained, others, complete)
