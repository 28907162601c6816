"""Pipelines: the tensors in each layer's file, the modules that several layers share, and the layers of a stage.

Source: runtime/pipe/module.py. `save_state_dict`: ``layer_IDX`` holds names local to the layer; the model's names begin
with IDX, or with ``tied_modules.KEY`` where layers share a module (its file is that of the first layer that uses it).
`__init__` registers the shared modules before the layers, so that they come first in a stage's order. No file records
which layers share a module, or its KEY; the names that an optimizer lists show them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

from ...core.box import Shape
from ...core.placement import Rank
from ...errors import LazyckptError, cannot_read
from ...io.containers.pickle.rebuild import StoredTensor
from ...io.containers.torch_file import TorchFile
from ...layouts.tables import pattern
from ..shared.numbering import CONVENTIONS, Convention, Effort
from ..shared.rank_shards import Shard, Shards
from ..torch_save import crc_of
from .building import Building, Shapes, local, tensors_in
from .files import RankFiles
from .plainopt import Group, match

_TIED = "tied_modules."
# layer -> tensor-parallel rank -> its file, and the tensors in the file by local name
Layers = dict[int, dict[int, tuple[TorchFile, dict[str, StoredTensor]]]]


def read_layers(b: Building, files: RankFiles) -> Layers:
    """Read the layers' files. Those that cannot be read are reported."""
    layers: Layers = {}
    for (idx, tp), path in sorted(files.layers.items()):
        try:
            file = b.file(path)
            layers.setdefault(idx, {})[tp] = (file, tensors_in(file, file.root))
        except LazyckptError as e:
            b.report(cannot_read(path, e, ", its tensors are lost"))
    return layers


def layer_shards(b: Building, layers: Layers, tied: Mapping[int, str]) -> Shards:
    """Return the weights of all layers. ``tied``: layer -> the ``tied_modules.KEY`` of the module in its file."""
    names: dict[str, dict[int, Shard]] = {}
    for idx, by_rank in layers.items():
        prefix = tied.get(idx, str(idx))
        for tp, (file, tensors) in by_rank.items():
            for name, tensor in tensors.items():
                names.setdefault(f"{prefix}.{name}", {})[tp] = local(file, name, tensor, Rank(tp=tp))
    return {"weights": names}


# -- shared modules


def tied_layers(layers: Layers, listed: Mapping[str, Shape | int]) -> dict[int, str]:
    """Return the layers whose files hold a shared module: layer -> ``tied_modules.KEY``. ``listed``: the trained
    parameters that some rank lists by name, with their shape, or the number of elements that ranks list."""
    wanted: dict[str, dict[str, Shape | int]] = {}
    for name, size in listed.items():
        if name.startswith(_TIED) and name.count(".") >= 2:
            _, key, inner = name.split(".", 2)
            wanted.setdefault(f"{_TIED}{key}", {})[inner] = size
    own = {name.split(".", 1)[0] for name in listed}
    found: dict[int, str] = {}
    for idx, by_rank in layers.items():
        if str(idx) in own:  # its parameters are listed under its own number
            continue
        for key, sizes in wanted.items():
            if key not in found.values() and any(
                all(n in tensors and _fits(tensors[n].shape, size) for n, size in sizes.items())
                for _, tensors in by_rank.values()
            ):
                found[idx] = key
                break
    return found


def without_repeats(layers: Layers, tied: Mapping[int, str], own: set[str]) -> Layers:
    """Return the layers without those whose files repeat a shared module (a layer that reuses a module without a
    function of its own gets a file, too). Such a layer is not trained under its ``own`` number, has the same names and
    shapes as the module's first file, and the same bytes in at least one tensor. Tensors that DeepSpeed does not keep
    in sync (see module.py `_synchronize_tied_weights`) may differ; the model has one name for all copies, and the first
    is read."""

    def repeats(idx: int, first: int) -> bool:
        for tp, (file, tensors) in layers[idx].items():
            original, others = layers[first].get(tp, (None, {}))
            if original is None or {n: t.shape for n, t in tensors.items()} != {n: t.shape for n, t in others.items()}:
                return False
            sums = [(crc_of(file.records, t), crc_of(original.records, others[n])) for n, t in tensors.items()]
            if not any(mine == its and mine is not None for mine, its in sums):
                return False
        return True

    again = {i for i in layers if i not in tied and str(i) not in own and any(i > t and repeats(i, t) for t in tied)}
    return {i: by_rank for i, by_rank in layers.items() if i not in again}


def _fits(shape: Shape, size: Shape | int) -> bool:
    return shape == size if isinstance(size, tuple) else size <= prod(shape)


def evident_ties(
    layers: Layers, buffers: set[str], optimizers: Sequence[list[Group]], tp: int, info: Any
) -> dict[int, str | None]:
    """Where no rank lists names, find the layer whose parameters several stages' optimizers have. It must be the only
    layer whose sharing makes the optimizers fit the layers. Return layer -> its ``tied_modules.KEY``, or None unless
    the patterns of universal_checkpoint_info name one (they also name modules that are not shared, and prove nothing
    alone)."""
    own = {idx: local_shapes(layers, idx, tp, str(idx), buffers) for idx in layers}
    effort = Effort()
    if len(optimizers) < 2 or stage_names(optimizers, list(own.values()), {}, effort) is not None:
        return {}
    first = [{s for group in groups if group.shapes for s in group.shapes[0] or ()} for groups in optimizers]
    fitting = []
    for idx, shapes in own.items():
        if sum(bool(seen & set(shapes.values())) for seen in first) < 2:
            continue  # shared parameters come first in a stage
        rest = [s for i, s in own.items() if i != idx]
        if stage_names(optimizers, rest, shapes, effort) is not None:
            fitting.append(idx)
    if len(fitting) != 1 or effort.left < 0:
        return {}
    (idx,) = fitting
    keys = {
        m[1]
        for listed in _strings(info)
        if (m := pattern("deepspeed.tied_pattern").fullmatch(listed))
        and any(m[2].replace("\\", "") in tensors for _, tensors in layers[idx].values())
    }
    return {idx: f"{_TIED}{keys.pop()}" if len(keys) == 1 else None}


def _strings(value: Any) -> Iterable[str]:
    """Yield the patterns in the lists of universal_checkpoint_info."""
    for entry in value.values() if isinstance(value, dict) else ():
        yield from (s for s in entry if isinstance(s, str)) if isinstance(entry, list | tuple) else ()


# -- the stages of a plain optimizer


def local_shapes(layers: Layers, idx: int, tp: int, prefix: str, buffers: set[str]) -> Shapes:
    """Return the tensors that may be parameters of a layer, on one tensor-parallel rank: full name -> shape."""
    _, tensors = layers[idx].get(tp, (None, {}))
    return {f"{prefix}.{n}": t.shape for n, t in tensors.items() if f"{prefix}.{n}" not in buffers}


def stage_names(
    optimizers: Sequence[list[Group]], layers: Sequence[Shapes], shared: Shapes, effort: Effort
) -> list[Shapes] | None:
    """Assign consecutive runs of layers to the pipeline stages, such that every stage's optimizer fits its run, all in
    one order. Return the names of each stage; None unless all ways to cut the layers, in all orders that fit, name the
    parameters alike. ``shared``: parameters that any stage may have in addition, at the front."""
    cuts = [_cuts(optimizers, layers, shared, effort, convention) for convention in CONVENTIONS]
    fitting = [found for found in cuts if found]
    if effort.left < 0 or not fitting or any(len(found) > 1 or found != fitting[0] for found in fitting):
        return None
    return fitting[0][0]


def _cuts(
    optimizers: Sequence[list[Group]], layers: Sequence[Shapes], shared: Shapes, effort: Effort, order: Convention
) -> list[list[Shapes]]:
    """Return the ways to cut the layers that name the parameters differently; two at most."""
    found: dict[tuple[Any, ...], list[Shapes]] = {}

    def extend(at: int, chosen: list[Shapes], named: tuple[Any, ...]) -> None:
        stage = len(chosen)
        if len(found) > 1 or effort.left < 0:
            return
        if stage == len(optimizers):
            if at == len(layers):
                found.setdefault(named, chosen)
            return
        count = sum(len(group.numbers) for group in optimizers[stage])
        own: Shapes = {}
        for end in range(at, len(layers) + 1):
            if end > at:
                own = {**own, **layers[end - 1]}
            for names in ({**shared, **own}, own) if shared else (own,):
                # nearly all tensors of a run have to be parameters: a longer run than this fits no better
                if count <= len(names) <= 2 * count + 8:
                    effort.left -= 10 * len(names)
                    matched = match(names, optimizers[stage], effort=effort, conventions=(order,))
                    if matched is not None:
                        extend(end, [*chosen, names], (*named, tuple(map(tuple, matched.names))))
            if len(own) > 2 * count + 8:
                break

    extend(0, [], ())
    return list(found.values())
