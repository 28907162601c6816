"""Folders with a file for each tensor-parallel rank: Meta's Llama, and others for which the user gives merge rules.

Llama: ``consolidated.00.pth``, ... and params.json. Meta's llama/model.py cuts with fairscale (ColumnParallelLinear:
wq, wk, wv, w1, w3 and output along dimension 0; RowParallelLinear: wo and w2 along 1; norms are replicated). The
embedding is cut along 1 (ParallelEmbedding, Llama 1 and 2) or 0 (VocabParallelEmbedding, Llama 3); params.json's
``dim`` determines which. If there are more ranks than key-value heads, several ranks hold the same head.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

from ..core.extents import Hole
from ..core.index import FileInfo, Index
from ..core.names import natural
from ..core.placement import Mesh, Rank
from ..core.specs import TensorSpec
from ..errors import LazyckptError, Problem, cannot_read, only_one, some
from ..io.limits import check_ranks
from ..io.storage.base import Store
from ..layouts.flat_rules import is_flat_rule
from ..layouts.llama import PARAMS, llama_rules
from ..layouts.merge import Source as RuleSource
from ..layouts.merge import decide, user_rules
from .huggingface import load_json, read_shard
from .reader import Reader, Source
from .shared.announce import announce
from .shared.members import together
from .shared.paths import grouped
from .shared.rank_shards import Merging, Shard, missing
from .torch_save import member

_LLAMA = re.compile(r"consolidated\.(\d{1,18})\.pth")
_KINDS = (".pt", ".pth", ".bin", ".safetensors")


def _read_llama(source: Source) -> Index:
    store, listed = source.store, source.entries or source.listed("")
    ranks = {int(m[1]): n for n in listed if (m := _LLAMA.fullmatch(n))}
    check_ranks(source.where, max(ranks) + 1, len(ranks))
    params: dict[str, Any] = {}
    problems = []
    if PARAMS in listed:
        try:
            params = load_json(store, PARAMS)
        except LazyckptError as e:
            problems.append(cannot_read(PARAMS, e))
    paths = [ranks.get(n, f"consolidated.{n:02}.pth") for n in range(max(ranks) + 1)]
    rules = (user_rules(source.rules), llama_rules(params))
    index = _merged("llama", store, paths, rules)
    files = dict(index.files)
    if params:
        files[PARAMS] = listed[PARAMS].info
    return replace(index, files=files, meta={**index.meta, "params": params}, problems=(*problems, *index.problems))


def _read_files(source: Source) -> Index:
    groups = _numbered(source)
    paths = max(groups, key=len)
    index = _merged("tensor-parallel", source.store, paths, (user_rules(source.rules),))
    others = [name for group in groups if group is not paths for name in group]
    if others:
        line = f"{len(others):,} files are of another kind and are not read: {some(others)}"
        index = replace(index, problems=(*index.problems, Problem("ignored-file", line, only_one(others))))
    return index


def _numbered(source: Source) -> list[list[str]]:
    """Group the files whose names differ in their last number only, sorted by that number."""
    names = sorted((n for n, e in source.entries.items() if n.endswith(_KINDS) and not e.is_dir), key=natural)
    found = []
    for _, group in groupby(sorted(names, key=_stem), key=_stem):
        listed = sorted(group, key=natural)
        if len(listed) > 1 and len({tuple(re.findall(r"\d+", n))[:-1] for n in listed}) == 1:
            found.append(listed)
    return found


def _stem(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def _merged(format: str, store: Store, paths: Sequence[str], sources: Sequence[RuleSource]) -> Index:
    """Merge the ranks' files, given in rank order, by the rules. Raises the first error if no file can be read."""
    ranks: list[Index | None] = []
    problems: list[Problem] = []
    errors: list[LazyckptError] = []
    announce(store, paths)
    for path in paths:
        try:
            ranks.append(_of_rank(store, path))
        except LazyckptError as e:
            errors.append(e)
            ranks.append(None)
            problems.append(cannot_read(path, e, ", nor the shards of its rank"))
    there = [index for index in ranks if index is not None]
    if not there:
        raise errors[0]
    files: dict[str, FileInfo] = {}
    stored: dict[str, TensorSpec] = {}
    for path, index in zip(paths, ranks, strict=True):
        if index is not None:
            files |= index.files
            stored |= {f"{path}/{name}": spec for name, spec in (index.stored or {}).items()}
            problems += index.problems
    merging = Merging(lambda name, shapes: decide(name, shapes, sources), partial(_absent, paths))
    states: dict[str, dict[str, TensorSpec]] = {}
    for state in dict.fromkeys(s for index in there for s in index.states):
        for name in dict.fromkeys(n for index in there for n in index.states.get(state, {})):
            held = {r: i.states.get(state, {}).get(name) for r, i in enumerate(ranks) if i is not None}
            states.setdefault(state, {})[name] = _tensor(name, held, len(paths), merging, problems)
    problems += grouped("unmerged-tensor", merging.unmerged, "cannot be put together")
    return Index(
        format=format,
        states=states,
        files=files,
        stored=stored,
        aliases=there[0].aliases,
        meta=there[0].meta,
        mesh=Mesh(tp=len(paths)),
        problems=tuple(
            dict.fromkeys([*problems, *grouped("unmerged-tensor", merging.unmerged, "cannot be put together")])
        ),
    )


def _of_rank(store: Store, path: str) -> Index:
    if not path.endswith(".safetensors"):
        return together("torch", [((), member(store, path))])
    shard = read_shard(store, path)
    return Index(
        format="safetensors",
        states={"weights": {n: s for n, s in shard.specs.items() if n not in shard.aliases}},
        files={path: shard.info},
        stored=shard.specs,
        aliases=shard.aliases,
        meta=shard.meta,
        problems=tuple(shard.problems),
    )


def _tensor(
    name: str, held: Mapping[int, TensorSpec | None], ranks: int, merging: Merging, problems: list[Problem]
) -> TensorSpec:
    """Merge the shards of one tensor. ``held`` has an entry for each rank whose file can be read: its part, or None if
    the file lacks the tensor."""
    specs = {rank: spec for rank, spec in held.items() if spec is not None}
    first = specs[min(specs)]
    if len(specs) < len(held):
        line = f"{name!r} is on {len(specs)} of {ranks} ranks only: the first of them is read"
        problems.append(Problem("mismatched-shards", line, name))
        return first
    if first.shape == () or len({s.dtype for s in specs.values()}) > 1:
        if first.shape:
            line = f"{name!r} has different dtypes on the ranks: the first is read"
            problems.append(Problem("mismatched-shards", line, name))
        return first
    shards = {
        rank: Shard(s.shape, s.dtype, tuple(replace(f, rank=Rank(tp=rank)) for f in s.fragments), s.rule)
        for rank, s in specs.items()
    }
    spec = merging.whole(name, shards, ranks)
    return first if ranks == 1 and spec.shape == first.shape else spec


def _absent(paths: Sequence[str], name: str, rank: int, like: Shard) -> Shard:
    """Return the shard of a rank whose file cannot be read."""
    hole = Hole(paths[rank], f"{paths[rank]} cannot be read: the shard of tensor-parallel rank {rank} is lost")
    return missing(hole, like.shape, like.dtype, Rank(tp=rank))


def _is_llama(source: Source) -> bool:
    if source.path:
        return False
    return any(_LLAMA.fullmatch(n) for n in source.entries)


def _is_numbered(source: Source) -> bool:
    """Recognise a folder only if the user gives merge rules and no index describes the files; other readers merge flat
    parameters."""
    merging = any(not is_flat_rule(rule) for rule in source.rules.values())
    if source.path or not merging or any(".index." in n for n in source.entries):
        return False
    return bool(_numbered(source))


LLAMA = Reader("llama", "Meta's Llama folders (consolidated.*.pth and params.json)", _is_llama, _read_llama)
FILES = Reader(
    "tensor-parallel", "folders with one file for each tensor-parallel rank, with rules=", _is_numbered, _read_files
)
