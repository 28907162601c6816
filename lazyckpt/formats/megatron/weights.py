"""Shards of weights and optimizer states from the rank files, under the names of the model on one rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...core.box import Shape, c_strides
from ...core.dtypes import DType
from ...core.extents import Extent
from ...errors import LazyckptError, Problem, cannot_read, some
from ...io.containers.pickle.rebuild import StoredTensor
from ...io.containers.torch_file import Pickles, TorchFile, read_torch_file
from ...io.storage.base import Store
from ...layouts.megatron import Place, flag, is_buffer, is_expert, is_head, number, place, stack_of, tied_to
from ...layouts.tables import pattern
from ..torch_save import crc_of
from .gather import Gathered, stacked
from .layers import contiguous, offsets, planned
from .optimizer import Held, fits, for_experts, groups_of, held, layouts, parts_of, states_in
from .ranks import Grid, RankFile, Tensors

Attributes = dict[str, Mapping[str, Any]]


class Namer:
    """A mapping from names in a rank's file to names in the whole model."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._places: dict[str, Place] = {}
        self._names: dict[tuple[str, int, int], str] = {}
        self._experts = number(grid.args, "num_experts", "num_moe_experts")
        self.tied = is_tied(grid)

    def local_experts(self, tensors: Tensors) -> int:
        """Return the number of experts on a rank."""
        if self._experts is not None and self._experts % self._grid.degrees.ep == 0:
            return self._experts // self._grid.degrees.ep
        numbers = [p.number for name in tensors if (p := self.place(name)).number is not None]
        return 1 + max(numbers) if numbers else 0

    def place(self, name: str) -> Place:
        found = self._places.get(name)
        if found is None:
            found = self._places[name] = place(name)
        return found

    def names(self, rank: RankFile, chunk: int) -> Iterator[tuple[str, str]]:
        """Yield (name in the file, name in the model) of a chunk's tensors, except those whose layer is not known."""
        starts = rank.offsets[chunk]
        tensors = rank.chunks[chunk]
        expert = rank.rank.ep * self.local_experts(tensors)
        for name in tensors:
            if name in self._grid.unnumbered:
                continue
            at = self.place(name)
            first = 0 if at.layer is None else starts.get(at.head)
            if first is None:
                continue
            key = (name, first, expert if at.number is not None else 0)
            found = self._names.get(key)
            if found is None:
                found = self._names[key] = at.named(first, expert)
            if self.tied and rank.rank.pp > 0 and is_head(name):  # the last stage's copy
                found = tied_to(name)
            yield name, found


def is_tied(grid: Grid) -> bool:
    """Return whether the output layer's matrix is the embedding's: by the arguments, else by checksums. (Before there
    was an argument for it, it always was.)"""
    untied = flag(grid.args, "untie_embeddings_and_output_weights")
    if untied is not None:
        return not untied
    for rank in grid.ranks.values():
        for tensors in rank.chunks:
            for name in filter(is_head, tensors):
                owner = next((o for (tp, _, _), o in grid.ranks.items() if tp == rank.rank.tp), rank)
                embedding = owner.chunks[0].get(tied_to(name))
                crc = crc_of(rank.file.records, tensors[name])
                if embedding is None or crc is None or crc != crc_of(owner.file.records, embedding):
                    return name.startswith("word_embeddings_for_head")
    return True


def number_layers(grid: Grid) -> None:
    """Find the first layer of every chunk of every rank, by counting the layers of the chunks before it. A model may
    have several stacks of layers (an encoder and a decoder, one for images): each is numbered on its own."""
    d = grid.degrees
    stacks: dict[str, dict[tuple[int, int], int]] = {}
    for (_, pp, _), rank in grid.ranks.items():
        rank.offsets = [{} for _ in rank.chunks]
        for chunk, tensors in enumerate(rank.chunks):
            numbers: dict[str, set[int]] = {}
            for at in map(place, tensors):
                if at.layer is not None:
                    numbers.setdefault(at.head, set()).add(at.layer)
            for head, layers in numbers.items():
                if not contiguous(sorted(layers)):
                    line = f"{rank.file.path}: chunk {chunk} has the layers {sorted(layers)[:8]}, not 0, 1, 2, ..."
                    grid.report(Problem("inconsistent-metadata", line, rank.file.path))
                count = stacks.setdefault(head, {}).setdefault((pp, chunk), len(layers))
                if count != len(layers):
                    line = (
                        f"{rank.file.path}: {len(layers)} layers in chunk {chunk}, {count} on other ranks of stage {pp}"
                    )
                    grid.report(Problem("inconsistent-metadata", line, rank.file.path))
    _find_unnumbered(grid)
    there = {(pp, chunk) for (_, pp, _), rank in grid.ranks.items() for chunk in range(len(rank.chunks))}
    for head, seen in stacks.items():
        starts = _starts(grid, dict.fromkeys(there, 0) | seen, alone=len(stacks) == 1)
        for (_, pp, _), rank in grid.ranks.items():
            for chunk, known in enumerate(rank.offsets):
                if (pp, chunk) in starts:
                    known[head] = starts[pp, chunk]
                elif chunk < d.chunks and (pp, chunk) in seen:
                    line = (
                        f"the layers of stage {pp} cannot be numbered: a stage before it is missing and the arguments "
                        "do not say how many layers it has; they are in view.stored only"
                    )
                    grid.report(Problem("unnumbered-layer", line))


def _find_unnumbered(grid: Grid) -> None:
    """Find the names of numbered modules that several chunks have, and whose stack is not one that Megatron counts
    from 0 on every stage: they may be the same tensor or others."""
    seen: dict[str, set[tuple[int, int]]] = {}
    for (_, pp, _), rank in grid.ranks.items():
        for chunk, tensors in enumerate(rank.chunks):
            for name in tensors:
                if pattern("megatron.numbered").search(name) and place(name).layer is None:
                    seen.setdefault(name, set()).add((pp, chunk))
    grid.unnumbered.update(name for name, at in seen.items() if len(at) > 1)
    if grid.unnumbered:
        line = (
            f"{len(grid.unnumbered):,} names are on several pipeline stages, and whether their numbers are those of "
            f"the whole model is not known: {some(sorted(grid.unnumbered))}; they are in view.stored only"
        )
        grid.report(Problem("unnumbered-layer", line))


def _starts(grid: Grid, seen: Mapping[tuple[int, int], int], alone: bool) -> Mapping[tuple[int, int], int]:
    """Return the first layer of every chunk of a stack. ``alone``: the stack is the only one; only then the arguments
    describe it."""
    d = grid.degrees
    plan = planned(grid.args, d.pp, d.chunks) if alone else {}
    counts = {**plan, **seen}
    total = number(grid.args, "num_layers") if alone else None
    missing = [(pp, c) for c in range(d.chunks) for pp in range(d.pp) if (pp, c) not in counts]
    if len(missing) == 1 and total is not None and total >= sum(counts.values()):
        counts[missing[0]] = total - sum(counts.values())
    if plan and any(plan[at] != n for at, n in seen.items()):
        line = f"the files have {_shown(seen)} layers per stage and chunk, by the arguments there are {_shown(plan)}"
        grid.report(Problem("inconsistent-metadata", line))
    elif not missing and total is not None and sum(counts.values()) != total and any(seen.values()):
        line = f"the files have {sum(counts.values())} layers, args.num_layers says {total}"
        grid.report(Problem("inconsistent-metadata", line))
    return offsets(d.pp, d.chunks, counts)


def _shown(counts: Mapping[tuple[int, int], int]) -> str:
    return ", ".join(str(n) for _, n in sorted(counts.items(), key=lambda item: (item[0][1], item[0][0])))


def add_weights(g: Gathered, namer: Namer) -> None:
    """Add the weights of all ranks."""
    for _, rank in sorted(g.grid.ranks.items(), key=lambda item: (item[0][1], item[0][2], item[0][0])):
        for chunk, tensors in enumerate(rank.chunks):
            experts = namer.local_experts(tensors)
            for own, name in namer.names(rank, chunk):
                tensor = tensors[own]
                if tensor.storage is None:
                    continue
                try:
                    extent = rank.file.extent(tensor, own)
                except LazyckptError as e:
                    g.grid.report(Problem("unreadable-file", str(e), rank.file.path))
                    continue
                g.add("weights", name, _as_stack(g, extent, name, experts), rank.rank)


def _as_stack(g: Gathered, extent: Extent, name: str, experts: int) -> Extent:
    which = stack_of(name) if name[-1] in "12" else None
    if which is None:
        return extent
    hidden = number(g.grid.args, "hidden_size")
    if hidden is None:
        return extent
    found = stacked(extent, which, hidden, experts)
    if found is None and len(extent.shape) == 2:
        line = f"{extent.path}: {name!r} of shape {extent.shape} is not an array of {experts} experts' matrices"
        g.grid.report(Problem("unsupported-tensor", line, name))
    return found or extent


# -- optimizers


def _held(part: Mapping[Any, Any], shapes: Mapping[str, Shape], known: dict[Any, Any]) -> list[Held] | None:
    """Call `held` once for all ranks whose pickles share an optimizer (io/containers/pickle/memo.py) and parameters."""
    key = (id(part), tuple(shapes.items()))
    if key not in known:
        known[key] = held(part, shapes)
    found: list[Held] | None = known[key]
    return found


def add_states(g: Gathered, namer: Namer, attributes: Attributes) -> None:
    """Add the states of the optimizers in the ranks' files. ``attributes``: receives the attributes of the fp32 copies,
    by name."""
    known: dict[Any, Any] = {}
    for rank in g.grid.ranks.values():
        if rank.folder.layers:  # (the model's file repeats the first data-parallel rank's)
            continue
        experts = namer.local_experts(rank.chunks[0])
        for n, part in enumerate(parts_of(rank.root.get("optimizer"))):
            table = _parameters(g.grid, namer, rank, part, n)
            shapes = {local: t.shape for local, (t, _) in table.items()}
            found = _held(part, shapes, known)
            if found is None:
                line = (
                    f"{rank.file.path}: which parameter is which in its optimizer is not known (its groups do not "
                    "fit the model's parameters): its states are in view.stored only"
                )
                g.grid.report(Problem("undecided-name", line, rank.file.path))
                continue
            for one in found:
                name = table[one.name][1]
                if one.main is not None and isinstance(one.main.state, dict):
                    attributes.setdefault(name, one.main.state)
                for state, value in one.states.items():
                    add_state(g, rank, state, name, value, experts)


def add_state(g: Gathered, rank: RankFile, state: str, name: str, value: StoredTensor, experts: int) -> None:
    if value.storage is None:
        return
    try:
        extent = rank.file.extent(value, name)
    except LazyckptError as e:
        g.grid.report(Problem("unreadable-file", str(e), rank.file.path))
        return
    g.add(state, name, _as_stack(g, extent, name, experts) if extent.shape else extent, rank.rank)


def _parameters(
    grid: Grid, namer: Namer, rank: RankFile, part: Mapping[Any, Any], n: int
) -> dict[str, tuple[StoredTensor, str]]:
    """Return the parameters that one of a rank's optimizers may have, in the model's order: a name that is unique
    among chunks -> (tensor, name in the model)."""
    experts = for_experts(part)
    spread = grid.degrees.ep > 1
    found = {}
    for chunk, tensors in enumerate(rank.chunks):
        for own, name in namer.names(rank, chunk):
            if is_buffer(own) or (spread and experts is not None and is_expert(own) != experts):
                continue
            found[f"{chunk}.{own}" if chunk else own] = tensors[own], name
    return found


def add_buffers(g: Gathered, namer: Namer, store: Store) -> None:
    """Add the states in the distributed optimizers' own files."""
    pickles = Pickles()
    parts = parts_of(g.grid.first.root.get("optimizer"))
    for rank in g.grid.ranks.values():
        path = rank.folder.optim
        if not path:
            continue
        try:
            file = read_torch_file(store, path, pickles)
            g.grid.files[path] = file.info
            g.grid.indexed.keep(file)
            entries = file.root if isinstance(file.root, list) else [file.root]
            for n, entry in enumerate(entries):
                if isinstance(entry, dict):
                    _buffer(g, namer, rank, file, entry, n, len(entries))
        except LazyckptError as e:
            g.grid.report(cannot_read(path, e, ", the optimizer's states in it are lost"))
    wanted = flag(g.grid.args, "use_distributed_optimizer") and groups_of(parts[0] if parts else {})
    if not wanted and not any(rank.folder.optim for rank in g.grid.ranks.values()):
        return
    for rank in g.grid.ranks.values():
        # (a rank that has no experts and is not the first expert-parallel one has nothing to save)
        if (
            not rank.folder.optim
            and not rank.folder.shards
            and (rank.rank.ep == 0 or any(is_expert(n) for c in rank.chunks for n in c))
        ):
            line = f"{rank.folder.model.rpartition('/')[0]}/distrib_optim.pt is missing: the states in it are lost"
            g.grid.report(Problem("missing-file", line, f"{rank.folder.model.rpartition('/')[0]}/distrib_optim.pt"))


def _buffer(
    g: Gathered, namer: Namer, rank: RankFile, file: TorchFile, entry: dict[Any, Any], n: int, count: int
) -> None:
    """Add one optimizer's buffers: for each chunk, a buffer per dtype."""
    spread = g.grid.degrees.ep > 1
    parts = parts_of(rank.root.get("optimizer"))
    experts = for_experts(parts[n]) if n < len(parts) and len(parts) == count and groups_of(parts[n]) else None
    if experts is None:
        experts = count > 1 and n == count - 1
    wanted: list[tuple[int, DType, dict[str, tuple[Shape, str]]]] = []
    for chunk, tensors in enumerate(rank.chunks):
        by_dtype: dict[DType, dict[str, tuple[Shape, str]]] = {}
        for own, name in namer.names(rank, chunk):
            if not is_buffer(own) and not (spread and is_expert(own) != experts):
                by_dtype.setdefault(tensors[own].dtype, {})[own] = tensors[own].shape, name
        wanted += [(chunk, dtype, table) for dtype, table in by_dtype.items()]
    keys = [(i, key) for i in sorted(k for k in entry if type(k) is int) for key in _dtypes(entry[i])]
    if len(keys) != len(wanted):
        line = (
            f"{file.path}: {len(keys)} buffers, {len(wanted)} are expected for the model's chunks and dtypes: its "
            "states are in view.stored only"
        )
        g.grid.report(Problem("undecided-layout", line, file.path))
        return
    for (i, key), (chunk, dtype, table) in zip(keys, wanted, strict=True):
        states = states_in(entry[i][key])
        shapes = {own: shape for own, (shape, _) in table.items()}
        found = next(
            (plan for _, plan in layouts(shapes, g.grid, rank.rank.pp, chunk, namer.tied) if fits(plan, states)), None
        )
        if found is None:
            sizes = {s: v.shape[0] if isinstance(v, StoredTensor) else len(v) for s, v in states.items()}
            line = (
                f"{file.path}: the positions of the parameters in its buffer {i} ({dtype}, {sizes}) are not known: no "
                f"layout that Megatron makes of {len(shapes)} parameters has this length; its states are in "
                "view.stored only"
            )
            g.grid.report(Problem("undecided-layout", line, file.path))
            continue
        for slot in found.slots:
            shape, name = table[slot.name]
            for state, value in states.items():
                one, at = (value, slot.at) if isinstance(value, StoredTensor) else (value[slot.bucket], slot.start)
                _add_slice(g, namer, file, rank, state, name, one, at, shape)


def _dtypes(value: Any) -> list[Any]:
    return [key for key, inner in value.items() if isinstance(inner, dict)] if isinstance(value, dict) else []


def _add_slice(
    g: Gathered,
    namer: Namer,
    file: TorchFile,
    rank: RankFile,
    state: str,
    name: str,
    flat: StoredTensor,
    at: int,
    shape: Shape,
) -> None:
    whole = file.extent(flat, name)
    if whole.strides != (1,):
        line = f"{file.path}: the buffer of {name!r} is not contiguous: it is in view.stored only"
        g.grid.report(Problem("undecided-layout", line, name))
        return
    extent = Extent(
        whole.path,
        whole.offset + at * whole.dtype.itemsize,
        whole.dtype,
        shape,
        c_strides(shape),
        swapped=whole.swapped,
    )
    experts = namer.local_experts(rank.chunks[0])
    g.add(state, name, _as_stack(g, extent, name, experts), rank.rank)
