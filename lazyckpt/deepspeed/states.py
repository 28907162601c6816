"""The contents of the rank files of a DeepSpeed checkpoint, rank by rank: plain objects with lazy tensors.

A file is indexed at its first use; indexing a tensor reads tensor data. Shards of several tensor-parallel ranks are
placed by the same rules that `lazyckpt.open` uses, so slices of merged tensors also read only what they need.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, NamedTuple

from ..core.box import Shape
from ..core.extents import Hole
from ..core.placement import Rank
from ..core.specs import Fragment, TensorSpec
from ..errors import FormatError, LazyckptError
from ..formats.archives import locate
from ..formats.deepspeed.building import Building, Shapes, Stage, local, tensors_in
from ..formats.deepspeed.files import Kind, RankFile, RankFiles, find_folder, parse_ckpt_name
from ..formats.deepspeed.pipeline import read_layers, tied_layers
from ..formats.deepspeed.present import num_experts
from ..formats.deepspeed.reader import data_parallel_degree, degrees, merge_rules, read_stages
from ..formats.reader import Source
from ..formats.shared.rank_shards import Shard, undecided
from ..formats.torch_save import spec_of
from ..io.containers.pickle.plain import Plain
from ..io.containers.pickle.rebuild import StoredTensor
from ..io.containers.torch_file import read_torch_file
from ..layouts.cut import reshard, stored_ranks
from ..layouts.merge import Merge, concatenated
from ..layouts.merge import Source as RuleSource
from ..tensor import LazyTensor
from .mapping import Degrees

# deepspeed/checkpoint/deepspeed_checkpoint.py concatenates these along dimension 0. Only Megatron's GPT has both these
# names and ``args``. (A gated dense_h_to_4h is recognised by args.swiglu before this rule.)
_GPT = ("self_attention.query_key_value.", "mlp.dense_h_to_4h.")


class Opened:
    """The folder of a tag, with the degrees of the run that wrote it. Paths are relative to ``dir``, but for `full`."""

    def __init__(self, dir: str | os.PathLike[str], tag: str | None, rules: Mapping[str, Any] | None) -> None:
        where = os.fspath(dir)
        store, name = locate(os.fsdecode(where))
        source = Source(store, name, tag, rules)
        files = None if name else find_folder(source)
        if not files:
            raise FormatError(f"{where} holds no rank files of DeepSpeed: it has to be the folder of a tag, or of tags")
        self.dir = where
        self.files: RankFiles = files
        self.b = Building(store)
        self.stages: dict[int, Stage] = read_stages(self.b, source, files)
        first = self.stages[min(self.stages)].model
        count, tp = degrees(first, files, self.stages)
        self.stored = Degrees(count // tp, tp, data_parallel_degree(first, files, count))
        self.b.world = self.stored.dp
        megatron = (RuleSource(_gpt_rule),) if first.get("args") is not None else ()
        self.b.sources = (*merge_rules(source, self.stages), *megatron)
        self._store = store.pinned(self.b.files)  # a mapping that grows: files are pinned when they are indexed

    # -- paths

    def full(self, path: str) -> str:
        return os.path.join(self.dir, path)

    def path(self, file: RankFile) -> str:
        """Return the path of a rank's file, whether or not it exists."""
        return f"{self.files.folder}/{file.name}" if self.files.folder else file.name

    @property
    def sharded(self) -> bool:
        """Whether every data-parallel rank has model states, as under ZeRO-3."""
        return bool(self.files.zero_model)

    def model_path(self, mp: int) -> str:
        """Return the path of the model states of an mp rank; under ZeRO-3 those of data-parallel rank 0."""
        if self.sharded:
            return self.files.zero_model.get((0, mp)) or self.path(RankFile("zero_model", dp=0, mp=mp))
        return self.files.model.get(mp) or self.path(RankFile("model", mp=mp))

    def optim_path(self, dp: int, mp: int) -> str:
        return self.files.optim.get((dp, mp)) or self.path(RankFile("optim", dp=dp, mp=mp, prefix=self._prefix))

    @cached_property
    def _prefix(self) -> Literal["", "bf16_", "fp16_"]:
        """The most frequent prefix of the names of optimizer files."""
        known = Counter(f.prefix for f in map(parse_ckpt_name, self.files.optim.values()) if f is not None)
        return known.most_common(1)[0][0] if known else ""

    def layer_path(self, layer: int, tp: int) -> str:
        known = parse_ckpt_name(next(iter(self.files.layers.values()), ""))
        bare = known is not None and known.tp is None
        return self.files.layers.get((layer, tp)) or self.path(RankFile("layer", layer=layer, tp=None if bare else tp))

    @cached_property
    def layers(self) -> list[int]:
        """The layers of a pipeline that have a file or, because a parameter of theirs is trained, should have one."""
        if not self.files.layers:
            return []
        trained = {name.split(".")[0] for s in self.stages.values() for group in s.groups for name in group}
        return sorted(
            {layer for layer, _ in self.files.layers} | {int(n) for n in trained if n.isdecimal() and len(n) < 7}
        )

    @cached_property
    def _tied(self) -> dict[int, str]:
        """Pipeline layer -> the shared module in its file."""
        listed = {n: shape for s in self.stages.values() for group in s.groups for n, shape in group.items()}
        return tied_layers(read_layers(self.b, self.files), listed)

    # -- contents

    def values(self, path: str, prefix: str = "", unmerged: str = "") -> Any:
        """Return the contents of a file. ``prefix`` is put before the names of its tensors. ``unmerged``: why the
        tensors of the optimizer cannot be read, if the result represents several ranks."""
        file = self.b.file(path)

        def lazy(name: str, tensor: StoredTensor) -> LazyTensor:
            spec = spec_of(file, tensor, prefix + name)
            if unmerged and name.startswith("optimizer."):
                spec = TensorSpec(spec.name, spec.shape, spec.dtype, (), rule=unmerged)
            return self.tensor(spec)

        return Plain(file.root, self.full(path), file.pickle_size, keep=lazy).rest

    def tensor(self, spec: TensorSpec) -> LazyTensor:
        return LazyTensor(self._store, spec)

    def layer_state(self, layer: int, degree: int, index: int) -> dict[str, Any]:
        """Return a layer's state dict for rank ``index`` of ``degree``. Raises the error of the first file if none of
        the needed files can be read."""
        ranks = stored_ranks(self.stored.tp, degree, index)
        errors: dict[int, LazyckptError] = {}
        found: dict[int, dict[str, Shard]] = {}
        prefix = self._tied.get(layer, str(layer))
        for tp in range(self.stored.tp) if degree != self.stored.tp else ranks:
            path = self.layer_path(layer, tp)
            try:
                file = self.b.file(path)
                tensors = tensors_in(file, file.root)
            except LazyckptError as e:
                errors[tp] = e
                continue
            found[tp] = {
                f"{prefix}.{name}": local(file, name, t, Rank(tp=tp)) for name, t in tensors.items() if t.storage
            }
        readable = [r for r in ranks if r in found]
        if not readable:
            raise errors[ranks[0]]
        state = self.values(self.layer_path(layer, readable[0]), prefix + ".")
        if degree != self.stored.tp:
            lost = {tp: Hole(self.layer_path(layer, tp), str(e)) for tp, e in errors.items()}
            merged = self._merged(found, lost, ranks, degree, index)
            state.update({name.removeprefix(prefix + "."): t for name, t in merged.items()})
        return _no_versions(state)

    def model_state(self, pp: int, degree: int, index: int, unmerged: str) -> dict[str, Any]:
        """Return the model states of one stored pipeline stage for tensor-parallel rank ``index`` of ``degree``: those
        of the lowest stored rank, with ``module`` and ``param_shapes`` merged from all."""
        ranks = stored_ranks(self.stored.tp, degree, index)
        mp = [pp * self.stored.tp + tp for tp in ranks]
        readable = [m for m in mp if m in self.stages]
        first = readable[0] if readable else mp[0]
        state = dict(self.values(self.model_path(first), unmerged=unmerged))
        if isinstance(state.get("module"), dict):
            state["module"] = _no_versions(state["module"])
        if degree == self.stored.tp:
            return state
        stages = {s.rank.tp: s for s in self.stages.values() if s.rank.pp == pp}
        lost = {
            tp: Hole(path, f"{path} is missing or cannot be read")
            for tp in range(self.stored.tp)
            if tp not in stages and (path := self.model_path(pp * self.stored.tp + tp))
        }
        if isinstance(state.get("module"), dict):
            found = {
                tp: {
                    name: local(s.file, name, t, s.rank)
                    for name, t in tensors_in(s.file, s.model.get("module")).items()
                    if t.storage
                }
                for tp, s in stages.items()
            }
            state["module"] |= self._merged(found, lost, ranks, degree, index)
        if isinstance(state.get("param_shapes"), list):
            count = len(state["param_shapes"])
            state["param_shapes"] = [self._merged_shapes(g, stages, degree, index) for g in range(count)]
        return state

    def _merged_shapes(self, g: int, stages: Mapping[int, Stage], degree: int, index: int) -> dict[str, Shape | None]:
        """Return the shapes of one group; None for a parameter whose shards no rule merges."""
        groups = {t: s.groups[g] if g < len(s.groups) else {} for t, s in stages.items()}
        listed: Shapes = {}
        for group in groups.values():
            listed |= {n: shape for n, shape in group.items() if n not in listed}
        merged: dict[str, Shape | None] = {}
        for name, known in listed.items():
            shapes = []
            for t in range(self.stored.tp):
                # a shard without elements is not listed: take its shape from the module
                module = stages[t].model.get("module") if t in stages else None
                tensor = module.get(name) if isinstance(module, dict) else None
                other = tensor.shape if isinstance(tensor, StoredTensor) and not self.sharded else known
                shapes.append(groups[t].get(name, other) if t in groups else known)
            try:
                merged[name] = reshard(name, shapes, self.b.sources, degree, index).shape
            except ValueError:
                merged[name] = None
        return merged

    def _merged(
        self, found: Mapping[int, Mapping[str, Shard]], lost: Mapping[int, Hole], ranks: range, degree: int, index: int
    ) -> dict[str, LazyTensor]:
        merged = {}
        for name in dict.fromkeys(n for r in ranks for n in found.get(r, ())):
            by_rank = [found[t].get(name) if t in found else None for t in range(self.stored.tp)]
            first = next(found[r][name] for r in ranks if name in found.get(r, ()))
            shapes = [first.shape if one is None else one.shape for one in by_rank]
            try:
                shard = reshard(name, shapes, self.b.sources, degree, index)
            except ValueError as e:
                spec = undecided(name, first.shape, first.dtype, f"it cannot be put together: {e}")
                merged[name] = self.tensor(spec)
                continue
            fragments: list[Sequence[Fragment]] = []
            for r in shard.ranks:
                one = by_rank[r]
                hole = lost.get(r) or Hole("", f"tensor-parallel rank {r} has no {name!r}")
                fragments.append((Fragment(hole, shapes[r]),) if one is None else one.fragments)
            whole = Merge(shard.shape, shard.placements, shard.is_mean)
            merged[name] = self.tensor(whole.tensor(name, first.dtype, fragments, shard.rule))
        return merged


def _gpt_rule(name: str) -> Any:
    if any(part in name for part in _GPT):
        return concatenated(0), "the names of Megatron's GPT (as deepspeed's DeepSpeedCheckpoint takes them)"
    return None


def _no_versions(state: dict[Any, Any]) -> dict[Any, Any]:
    """Return a state dict without ``_metadata``, in which `torch.nn.Module.state_dict` keeps versions."""
    return {k: v for k, v in state.items() if k != "_metadata"}


# -- The files that a checkpoint should have, and which of them are missing, unreadable or from another save.


class FileProblem(NamedTuple):
    """A problem with a file of a DeepSpeed checkpoint.

    Attributes
    ----------
    path
        The file, as in ``file_list``.
    what
        The kind of the problem. "left over": the file is from a save with more ranks and not part of this one.
    why
        The reason, as text.
    """

    path: str
    what: Literal["missing", "unreadable", "left over"]
    why: str


def file_problems(opened: Opened, listed: list[str]) -> list[FileProblem]:
    """Return the present problems of the files. ``listed``: the files that existed when the checkpoint was opened.
    Reads every rank file's index, but no tensor data."""
    store, folder = opened.b.store, opened.files.folder
    there = {f"{folder}/{n}" if folder else n for n, e in store.list(folder).items() if not e.is_dir}
    expected = dict(_expected(opened))
    problems = []
    for path in dict.fromkeys([*expected, *listed]):
        if path not in there:
            why = "a rank of the saving run wrote it" if path in expected else "it was there when this was opened"
            problems.append(FileProblem(opened.full(path), "missing", why))
        elif path in expected:
            try:
                file = read_torch_file(store, path)
                for name, tensor in Plain(file.root, path, file.pickle_size).tensors.items():
                    if tensor.storage is not None:
                        file.extent(tensor, name)
            except LazyckptError as e:
                problems.append(FileProblem(opened.full(path), "unreadable", str(e)))
    kinds = set(expected.values())
    for path in sorted(there - expected.keys()):
        known = parse_ckpt_name(path)
        if known is not None and (known.kind in kinds or known.kind in ("model", "zero_model")):
            pp, tp, dp = opened.stored
            why = f"it is not one of the files of {pp} x {tp} x {dp} (pp x tp x dp) ranks, perhaps of another save"
            problems.append(FileProblem(opened.full(path), "left over", why))
    return problems


def _expected(opened: Opened) -> Iterator[tuple[str, Kind]]:
    pp, tp, dp = opened.stored
    files = opened.files
    first = opened.stages[min(opened.stages)].model
    for mp in range(pp * tp):
        yield opened.model_path(mp), "zero_model" if opened.sharded else "model"
        if opened.sharded:
            for d in range(1, dp):
                yield files.zero_model.get((d, mp)) or opened.path(RankFile("zero_model", dp=d, mp=mp)), "zero_model"
    for layer in opened.layers:
        for t in range(tp):
            yield opened.layer_path(layer, t), "layer"
    flat = any(s.groups for s in opened.stages.values())  # param_shapes exist if the optimizer is partitioned
    if files.optim or (flat and not files.universal):
        for d in range(dp):
            for mp in range(pp * tp):
                yield opened.optim_path(d, mp), "optim"
    for layer, count in enumerate(num_experts(first, files) if first.get("ds_autoep_layers") is None else ()):
        for expert in range(count):
            for mp in range(tp):
                file = RankFile("expert", layer=layer, expert=expert, mp=mp)
                yield files.experts.get((layer, expert, mp)) or opened.path(file), "expert"
    for ep in range(1 + max((ep for ep, _ in files.expert_optim if ep < dp), default=-1)):
        for mp in range(tp):
            yield (
                files.expert_optim.get((ep, mp)) or opened.path(RankFile("expert_optim", ep=ep, mp=mp)),
                "expert_optim",
            )
