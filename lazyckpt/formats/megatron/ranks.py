"""The rank files of one iteration: the rank of each, whether they belong to one save, and the tensors in them.

Writer: Megatron-LM megatron/training/checkpointing.py `generate_state_dict`: a dict with ``args``, ``iteration``,
``model`` (or ``model0``, ``model1``, ... for the chunks of a virtual pipeline) and ``optimizer``. The names of the
folders are ambiguous (``mp_rank_00_001`` is the second pipeline stage, or the second expert-parallel rank).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ...core.extents import Hole
from ...core.index import FileInfo
from ...core.placement import Rank
from ...errors import CorruptError, LazyckptError, Problem, cannot_read, sentences, some
from ...io.containers.pickle.rebuild import StoredTensor
from ...io.containers.pickle.records import short
from ...io.containers.torch_file import Pickles, TorchFile, read_torch_file
from ...io.storage.base import Store
from ...layouts.megatron import Degrees, degrees, is_expert
from ..shared.announce import announce
from ..torch_save import Indexed
from .files import Iteration, RankFolder

_DEPTH = 8
Tensors = dict[str, StoredTensor]  # name in the file -> tensor, in the file's order


@dataclass(slots=True)
class RankFile:
    """One model-parallel rank's file. ``chunks``: the tensors of each chunk of the model; ``offsets``: for each chunk,
    the first layer by stack of layers (`Place.head`), without the stacks whose first layer is not known."""

    rank: Rank
    folder: RankFolder
    file: TorchFile
    root: dict[Any, Any]
    chunks: list[Tensors]
    offsets: list[dict[str, int]] = field(default_factory=list)


@dataclass(slots=True)
class Grid:
    """The ranks of one save. ``lost``: (tp, pp) -> its missing file; ``lost_experts``: (pp, ep) -> the same, where the
    file of an expert-tensor-parallel rank is missing; ``first``: the file whose arguments are used for all;
    ``unnumbered``: names that several stages have for layers whose numbers in the model are not known."""

    degrees: Degrees
    ranks: dict[tuple[int, int, int], RankFile]
    lost: dict[tuple[int, int], Hole]
    first: RankFile
    files: dict[str, FileInfo]
    indexed: Indexed
    problems: dict[Problem, None]  # in order, each once
    lost_experts: dict[tuple[int, int], Hole] = field(default_factory=dict)
    unnumbered: set[str] = field(default_factory=set)

    def report(self, problem: Problem) -> None:
        self.problems[problem] = None

    @property
    def args(self) -> Any:
        return self.first.root.get("args")


def read_grid(store: Store, found: Iteration) -> Grid:
    """Read all rank files. Those of other saves (see `_save`) are reported and left out. Raises the first file's error
    if none can be read."""
    problems: dict[Problem, None] = dict.fromkeys(found.notes)
    pickles = Pickles()
    read: list[tuple[RankFolder, TorchFile, dict[Any, Any], list[Tensors]]] = []
    error: LazyckptError | None = None
    flat: dict[tuple[int, ...], list[Tensors]] = {}
    counts = [1 + max(n) for n in zip(*_padded([folder.numbers for folder in found.ranks]), strict=True)]
    announce(store, [folder.model for folder in found.ranks])
    announce(store, [folder.optim for folder in found.ranks if folder.optim])
    for folder in found.ranks:
        try:
            file = read_torch_file(store, folder.model, pickles)
            root = _dict(file, file.root)
            root = root if found.unwrap is None else found.unwrap(root)
            key = tuple(id(value) for name, value in root.items() if str(name).startswith("model"))
            if key not in flat:  # (equal parts of the ranks' pickles are the same objects)
                flat[key] = _chunks(file, root)
            chunks = flat[key]
        except LazyckptError as e:
            error = error or e
            problems[cannot_read(folder.model, e)] = None
            continue
        read.append((folder, file, root, chunks))
    if not read:
        if error is not None:
            raise error
        raise CorruptError(f"{store.root}/{found.folder}: no rank folder has a model's file; {sentences(found.notes)}")
    if len(counts) == 2 and all(any("embedding.word_embeddings." in n for n in chunks[0]) for *_, chunks in read):
        counts = [counts[0], 1, counts[1]]  # (no pipeline has the embedding on all of its stages)
    owns = [degrees(root.get("args"), counts, len(chunks)) for _, _, root, chunks in read]
    save = _save(found, [(_iteration(root), own) for (_, _, root, _), own in zip(read, owns, strict=True)])
    degree = save[1]
    _check_degrees(degree, len(read), found.folder)
    ranks: dict[tuple[int, int, int], RankFile] = {}
    files = {}
    indexed = Indexed()
    for (folder, file, root, chunks), own in zip(read, owns, strict=True):
        files[file.path] = file.info
        indexed.keep(file)
        at = degree.place(folder.numbers)
        if (_iteration(root), own) != save:
            problems[_left_over(folder, _iteration(root), own, save)] = None
        elif at is None:
            line = f"{folder.model}: its folder's name does not fit {_words(degree)}: left over, not used"
            problems[Problem("left-over-file", line, folder.model)] = None
        else:
            ranks[at] = RankFile(Rank(at[0], at[1], 0, at[2]), folder, file, root, chunks)
    if not ranks:
        raise CorruptError(f"{store.root}/{found.folder}: {sentences(problems)}")
    grid = Grid(degree, ranks, {}, ranks[min(ranks)], files, indexed, problems)
    _find_lost(grid, found)
    _find_mixed(grid)
    return grid


def _padded(names: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    most = max(map(len, names), default=1)
    return [n + (0,) * (most - len(n)) for n in names]


def _dict(file: TorchFile, value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise CorruptError(f"{file.path}: found a {type(value).__name__} where Megatron writes a dict")
    return value


def _chunks(file: TorchFile, root: dict[Any, Any]) -> list[Tensors]:
    if "model" in root:
        return [dict(_flat(_dict(file, root["model"]), ""))]
    found: list[Tensors] = []
    while f"model{len(found)}" in root:
        found.append(dict(_flat(_dict(file, root[f"model{len(found)}"]), "")))
    if not found:
        raise CorruptError(f"{file.path} holds no model (it has {some(map(short, root), 6)})")
    return found


def _flat(value: dict[Any, Any], prefix: str, depth: int = 0) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the tensors in nested dicts (as old models save them), with keys joined by dots."""
    for key, item in value.items():
        if isinstance(item, StoredTensor):
            if isinstance(key, str) and not key.endswith("_extra_state"):
                yield prefix + key, item
        elif isinstance(item, dict) and depth < _DEPTH and isinstance(key, str):
            yield from _flat(item, f"{prefix}{key}.", depth + 1)


def _iteration(root: dict[Any, Any]) -> Any:
    value = root.get("iteration")
    return value if type(value) in (int, str) else None


def _save(found: Iteration, keys: list[tuple[Any, Degrees]]) -> tuple[Any, Degrees]:
    """Return the save to read: prefer the iteration in the folder's name, then the save with the most files."""
    counts = Counter(keys)
    number = found.number
    return max(counts, key=lambda key: (key[0] == number, counts[key], -keys.index(key)))


def _left_over(folder: RankFolder, iteration: Any, own: Degrees, save: tuple[Any, Degrees]) -> Problem:
    if iteration != save[0]:
        what = f"is of iteration {short(iteration)}, the others of {short(save[0])}"
    else:
        what = f"is of a save with {_words(own)}, the others with {_words(save[1])}"
    return Problem("left-over-file", f"{folder.model} {what}: it is not used", folder.model)


def _words(d: Degrees) -> str:
    parts = [f"tp={d.tp}", f"pp={d.pp}"]
    parts += [f"vpp={d.chunks}"] if d.chunks > 1 else []
    parts += [f"ep={d.ep}", f"etp={d.etp}"] if d.ep > 1 or d.etp != d.tp else []
    return ", ".join(parts)


def _check_degrees(d: Degrees, files: int, folder: str) -> None:
    claimed = d.tp * d.pp * d.ep
    if claimed > max(4096, 64 * files) or d.etp > max(4096, 64 * files):
        raise CorruptError(
            f"{folder}: {_words(d)} is claimed, {files:,} rank files are here: most of the checkpoint is missing, or "
            "the numbers are wrong"
        )


def _find_mixed(grid: Grid) -> None:
    """Report files whose arguments say that a process of another rank wrote them (arguments.py `rank`).

    Tensor-parallel ranks vary fastest and pipeline stages slowest (parallel_state.py, order "tp-cp-ep-dp-pp"). Tools
    that convert checkpoints write the arguments of one process into all files: these say nothing.
    """
    d = grid.degrees
    wrote: dict[tuple[int, int, int], int] = {}
    for at, file in grid.ranks.items():
        rank = getattr(file.root.get("args"), "rank", None)
        if type(rank) is not int or rank < 0:
            return
        wrote[at] = rank
    if len(set(wrote.values())) < len(wrote):
        return
    for at, rank in wrote.items():
        if rank % d.tp == at[0]:
            continue
        path = grid.ranks[at].file.path
        line = f"{path}: by its arguments, the process of rank {rank} wrote it, whose tensor-parallel rank is "
        grid.report(Problem("inconsistent-metadata", f"{line}{rank % d.tp}: the files of ranks are mixed up", path))


def _find_lost(grid: Grid, found: Iteration) -> None:
    """Find the tensor- and pipeline-parallel ranks without a file, and the experts that are in no file. (Not every
    expert-parallel rank of a tensor-parallel rank needs a file.)"""
    d = grid.degrees
    there = {(tp, pp) for tp, pp, _ in grid.ranks}
    named = {part for problem in grid.problems for part in (problem.path or "").split("/")}  # loss already reported
    for pp in range(d.pp):
        for tp in range(d.tp):
            if (tp, pp) not in there:
                path = found.path_of(d, tp, pp)
                name = path.split("/")[-2] if "/" in path else path
                hole = grid.lost[tp, pp] = Hole(path, f"{path} is missing, or cannot be used")
                what = f"what tensor-parallel rank {tp} of stage {pp} holds is lost"
                if name not in named:
                    grid.report(Problem("missing-file", f"{hole.reason}: {what}", path))
    if d.ep == 1 or d.tp % d.etp:
        return
    cuts = {(d.expert_rank(tp), pp, ep) for tp, pp, ep in grid.ranks}
    for pp in range(d.pp):
        for ep in range(d.ep):
            gone = [etp for etp in range(d.etp) if (etp, pp, ep) not in cuts]
            if gone and any(is_expert(n) for at, r in grid.ranks.items() if at[1] == pp for c in r.chunks for n in c):
                name = "mp_rank_*" + (f"_{pp:03d}" if d.pp > 1 else "") + f"_{ep:03d}"
                path = f"{found.folder}/{name}/model_optim_rng.pt".lstrip("/")
                hole = grid.lost_experts[pp, ep] = Hole(path, f"{path} is missing, or cannot be used")
                what = f"the experts of expert-parallel rank {ep} are lost"
                grid.report(Problem("missing-file", f"{hole.reason}: {what}", path))
