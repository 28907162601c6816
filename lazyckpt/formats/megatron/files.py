"""The files of a Megatron checkpoint: iterations, and the rank folders of an iteration.

Writer: Megatron-LM megatron/training/checkpointing.py `get_checkpoint_name` and `..._tracker_filename`: a folder
``iter_0000003`` (or ``release``) with a folder ``mp_rank_TT[_PPP][_EEE]`` for every model-parallel rank. The tracker,
``latest_checkpointed_iteration.txt``, is written last: an iteration newer than the one it names is unfinished.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ...core.names import natural
from ...errors import CorruptError, FormatError, MissingFileError, Problem, only_one, some
from ...layouts.megatron import Degrees
from ..reader import Source

TRACKER = "latest_checkpointed_iteration.txt"
MODEL = ("model_optim_rng.pt", "model_rng.pt")  # the second: with a distributed optimizer, until 2023
OPTIM = "distrib_optim.pt"
_SHARD = "optim.pt"
_LAYERS = re.compile(r"layer_wise_optimizer_(\d{1,6})\.pt")
_DISTRIBUTED = ("metadata.json", "common.pt", ".metadata")
_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
_ITERATION = re.compile(r"iter_(\d{7,})")
_VERL = re.compile(r"global_step_\d+")  # steps of verl, which has the same tracker


@dataclass(slots=True)
class RankFolder:
    """The files of one model-parallel rank. ``numbers``: the numbers in the folder's name; only the arguments in the
    file show what they count. ``optim``: path of the distributed optimizer's file, "" if there is none; ``layers``:
    the files of a layer-wise optimizer by data-parallel rank; ``shards``: those of the distributed optimizer until
    2023, which are in folders of their own."""

    name: str
    numbers: tuple[int, ...]
    model: str
    optim: str = ""
    layers: dict[int, str] = field(default_factory=dict)
    shards: dict[int, str] = field(default_factory=dict)


@dataclass(slots=True)
class Iteration:
    """The rank folders of one iteration. ``folder``: the iteration's path; ``notes``: problems with its other files;
    ``unwrap``: makes Megatron's dict of the content of a file that another writer wrote; ``named``: the path of the
    file of a tensor- and pipeline-parallel rank, from the degrees and the two ranks."""

    folder: str
    ranks: list[RankFolder] = field(default_factory=list)
    notes: list[Problem] = field(default_factory=list)
    unwrap: Callable[[dict[Any, Any]], dict[Any, Any]] | None = None
    named: Callable[[Degrees, int, int], str] | None = None

    @property
    def number(self) -> int | None:
        """The iteration in the folder's name; None for ``release``, and if the iteration folder itself was opened."""
        found = _ITERATION.fullmatch(self.folder)
        return int(found[1]) if found else None

    def path_of(self, d: Degrees, tp: int, pp: int) -> str:
        """Return the path of the file that a rank should have."""
        if self.named is not None:
            return self.named(d, tp, pp)
        name = f"mp_rank_{tp:02d}" + (f"_{pp:03d}" if d.pp > 1 else "") + ("_*" if d.ep > 1 else "")
        return f"{self.folder}/{name}/{MODEL[0]}".lstrip("/")


def rank_folders(source: Source, folder: str) -> Iteration:
    """Find the rank folders in a folder. Those without a model file are reported."""
    found = Iteration(folder)
    shards: dict[str, dict[int, str]] = {}  # name of the model's folder -> data-parallel rank -> its file
    lost: dict[str, Problem] = {}
    names = source.inside(folder)
    for name in sorted(names, key=natural):
        match = _RANK.fullmatch(name)
        if match is None or not names[name].is_dir:
            continue
        path = f"{folder}/{name}" if folder else name
        inside = source.inside(path)
        model = next((n for n in MODEL if n in inside), None)
        if model is None and _SHARD in inside:
            base, _, dp = name.rpartition("_")
            shards.setdefault(base, {})[int(dp)] = f"{path}/{_SHARD}"
            continue
        if model is None:
            lost[name] = Problem("missing-file", f"{path} has no {MODEL[0]}: what this rank holds is lost", path)
            continue
        optim = f"{path}/{OPTIM}" if OPTIM in inside else ""
        numbers = tuple(int(n) for n in match.groups() if n is not None)
        layers = {int(m[1]): f"{path}/{n}" for n in sorted(inside, key=natural) if (m := _LAYERS.fullmatch(n))}
        found.ranks.append(RankFolder(name, numbers, f"{path}/{model}", optim, layers))
    found.notes += [problem for name, problem in lost.items() if name.rpartition("_")[0] not in shards]
    for rank in found.ranks:
        rank.shards.update(shards.pop(rank.name, {}))
    others = [path for files in shards.values() for path in files.values()]
    if others:
        line = f"{len(others):,} files of optimizer states belong to no model's file here: {some(others)}"
        found.notes.append(Problem("ignored-file", line, only_one(others)))
    return found


def find_iteration(source: Source, strict: bool = True) -> str | None:
    """Return the folder of the iteration to read ("" for the opened folder itself), whatever its format: the requested
    one (``iter_0000003``, ``3`` or ``release``), else the one that the tracker names, else the only one.

    Return None if this is not a Megatron folder. With ``strict``, raise MissingFileError if there is no such iteration,
    FormatError if there are several and nothing selects one; without, return None in these cases, too.
    """
    folders = _iterations(source)
    here = any(_RANK.fullmatch(n) and e.is_dir for n, e in source.entries.items())
    if here and source.tag is None:
        return ""
    if TRACKER not in source.entries and not folders:
        return None
    tag = source.tag if source.tag is not None else _tracker(source, strict)
    if tag is None and len(folders) == 1:
        return folders[0]
    name = tag if tag is None or not tag.isdecimal() or not tag.isascii() else f"iter_{int(tag[:18]):07d}"
    if name in folders:
        return name
    if not strict:
        return None
    listed = ", ".join(sorted(folders, key=natural)) or "none"
    if name is None:
        raise FormatError(
            f"{source.where} holds several iterations and no {TRACKER}: say which with tag=..., of {listed}"
        )
    raise MissingFileError(
        f"{source.where}: the iteration {name!r} ({'as asked' if source.tag else f'from {TRACKER}'}) is not here; "
        f"there are: {listed}. Say which with tag=..."
    )


def _iterations(source: Source) -> list[str]:
    return [n for n, e in source.entries.items() if e.is_dir and (_ITERATION.fullmatch(n) or n == "release")]


def find_ranks(source: Source) -> Iteration:
    """Return the rank folders of the iteration to read. Raises what `find_iteration` does, and MissingFileError if the
    iteration has none."""
    folder = find_iteration(source)
    if folder is None:
        raise FormatError(f"{source.where} is not a Megatron folder: it has neither iter_* nor mp_rank_* in it")
    found = rank_folders(source, folder)
    if not found.ranks:
        others = ", ".join(n for n in sorted(_iterations(source), key=natural) if n != folder) or "none"
        why = f" ({found.notes[0]})" if found.notes else ""
        raise MissingFileError(
            f"{source.where}/{folder} has no rank folders (mp_rank_*/{MODEL[0]}){why}: its save was not finished, or "
            f"it was not copied whole. There are also: {others}. Say which with tag=..."
        )
    found.notes += unfinished(source, folder)
    return found


def is_legacy(source: Source) -> bool:
    """Return whether the folder is Megatron's, and the iteration to read is not a distributed checkpoint (which has
    files shared by all ranks in place of rank folders)."""
    if source.path:
        return False
    folder = find_iteration(source, strict=False)
    if TRACKER not in source.entries and folder != "":  # other writers may use the name, too
        return any(_RANK.fullmatch(name) for folder in _iterations(source) for name in source.inside(folder))
    if folder is None:
        return not any(map(_VERL.fullmatch, source.entries))
    names = source.inside(folder)
    return not any(name in names for name in _DISTRIBUTED) and (bool(folder) or any(map(_RANK.fullmatch, names)))


def unfinished(source: Source, folder: str) -> list[Problem]:
    """Return the problems of iterations newer than the one that the tracker names."""
    last = None if source.tag is not None else _tracker(source, strict=False)
    if last is None or not last.isdecimal():
        return []
    newer = [n for n in source.entries if (m := _ITERATION.fullmatch(n)) and int(m[1]) > int(last) and n != folder]
    return [
        Problem(
            "unfinished-save",
            f"{name} is newer than {TRACKER} says ({last}): its save was not finished, it is not read",
            name,
        )
        for name in sorted(newer, key=natural)
    ]


def marker_of(name: str) -> str:
    """Return the name, or path, of the empty file that NeMo keeps beside a checkpoint until its save is finished
    (nemo/lightning/pytorch/callbacks/model_checkpoint.py and nemo/utils/callbacks/nemo_model_checkpoint.py
    `format_checkpoint_unfinished_marker_path`).

    >>> marker_of("step=99.ckpt")
    'step=99-unfinished'
    """
    return f"{name.removesuffix('.nemo').removesuffix('.ckpt').removesuffix('-EMA')}-unfinished"


def tracked(source: Source) -> int | None:
    """Return the iteration that a folder's tracker names; None if there is no tracker, or if it names the release."""
    text = _tracker(source, strict=False)
    return int(text) if text is not None and text.isdecimal() else None


def _tracker(source: Source, strict: bool) -> str | None:
    """Return the tracker's text (checkpointing.py `read_metadata`): a number or ``release``; None if there is none."""
    if TRACKER not in source.entries:
        return None
    if _tracker not in source.known:
        size = source.entries[TRACKER].info.size
        data = bytes(source.store.read(TRACKER, 0, size)) if 0 < size < 64 else b""
        source.known[_tracker] = data.decode("utf-8", "replace").strip()
    text: str = source.known[_tracker]
    if text == "release" or (text.isdecimal() and text.isascii() and len(text) < 19):
        return text
    if strict:
        raise CorruptError(
            f"{source.where}/{TRACKER} says {text[:40]!r}, neither a number nor release: say which with tag=..."
        )
    return None
