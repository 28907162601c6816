"""Which files a checkpoint should consist of, and which of them are missing, unreadable or of another save."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from ..errors import LazyckptError
from ..formats.deepspeed.names import Kind, RankFile, parse_ckpt_name
from ..formats.deepspeed.present import num_experts
from ..io.plain import Plain
from ..io.torchfile import read_torch_file
from .states import Opened


class FileProblem(NamedTuple):
    """``path``: as in ``file_list``. "left over": of a save with more ranks, nothing of this one is in it."""

    path: str
    what: Literal["missing", "unreadable", "left over"]
    why: str


def file_problems(opened: Opened, listed: list[str]) -> list[FileProblem]:
    """What is wrong with the files now. ``listed``: those that were there when the checkpoint was opened. Reads every
    rank file's list of contents, no tensor data."""
    store, folder = opened.b.store, opened.files.folder
    there = {f"{folder}/{n}" if folder else n for n, e in store.list(folder).items() if not e.is_dir}
    expected = dict(_expected(opened))
    problems = []
    for path in dict.fromkeys([*expected, *listed]):
        if path not in there:
            why = "a rank of the run that saved wrote it" if path in expected else "it was there when this was opened"
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
            why = f"it is none of the files of {pp} x {tp} x {dp} (pp x tp x dp) ranks: of another save?"
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
    flat = any(s.groups for s in opened.stages.values())  # param_shapes are written where the optimizer is partitioned
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
