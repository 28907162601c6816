"""Conversions that a trainer's own tool does too: consolidation, universal checkpoints, DCP to safetensors."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from .. import data
from ..case import Area, Case, Goal, Settings, remove
from ..contest import Contest
from ..host import Fresh
from ..limits import copy
from ..sample import Timed

MIB = 1 << 20
_DCP = """
import os, torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
def convert(source, out):
    os.makedirs(out)
    dcp_to_torch_save(source, out + "/whole.pt")
    whole = torch.load(out + "/whole.pt", mmap=True)
    save_file(whole["model"], out + "/model.safetensors")
"""
_UNIVERSAL = """
import argparse
from deepspeed.checkpoint import ds_to_universal
def convert(source, out):
    ds_to_universal.main(argparse.Namespace(input_folder=source, output_folder=out, num_extract_workers=4,
        num_merge_workers=2, keep_temp_folder=False, strict=True, inject_missing_state=True))
"""


def _contest(settings: Settings, source: Path, ours: tuple[str, str], name: str, peer: str, options: str) -> Contest:
    """``convert(source, out)`` of each, in a fresh process and into a new folder."""
    import os

    # `cp` copies what lazyckpt wrote last: each has its own folder
    out, other, copied = settings.out(), settings.out("peer"), settings.out("copy")

    class Into(Fresh):
        """Into a folder that is not there."""

        def __call__(self, calls: int = 1) -> object:  # type: ignore[override]
            remove(out if self.setup == ours[0] else other)
            os.sync()
            return super().__call__(calls)

    def work(where: Path) -> str:
        return f"convert({str(source)!r}, {str(where)!r}{options})"

    def done() -> None:
        for path in (out, other, copied):
            remove(path)

    return Contest(
        Into(ours[0], ours[1].format(source=str(source), out=str(out)) or work(out)),
        (name, Into(peer, work(other))),
        ("cp of the result", Timed(lambda: copy([out], copied))),
        before=lambda: remove(copied), calls=1, rehearse=False, most=7, done=done,
    )  # fmt: skip


def _consolidate(settings: Settings, stage: int, safe: bool) -> Contest:
    function = "convert_zero_checkpoint_to_fp32_state_dict as convert"
    ours = f"import torch; from lazyckpt.deepspeed import {function}"
    peer = f"from deepspeed.utils.zero_to_fp32 import {function}"
    source = data.zero(settings, stage)
    return _contest(settings, source, (ours, ""), "zero_to_fp32", peer, f", safe_serialization={safe}")


def _universal(settings: Settings) -> Contest:
    folder = data.zero(settings, 2)
    tag = folder / (folder / "latest").read_text()
    ours = ("import lazyckpt, torch", "lazyckpt.open({source!r}, cache=False).to_universal({out!r}, progress=False)")
    return _contest(settings, tag, ours, "ds_to_universal", _UNIVERSAL, "")


def _dcp(settings: Settings) -> Contest:
    call = "lazyckpt.open({source!r}, cache=False).to_safetensors({out!r}, max_shard_size=None, progress=False)"
    ours = ("import lazyckpt, torch", call)
    return _contest(settings, data.dcp(settings), ours, "dcp_to_torch_save and save_file", _DCP, "")


def _cases(settings: Settings) -> list[Case]:
    return list(_all(settings))


def _all(settings: Settings) -> Iterator[Case]:
    beside = Goal(None, against="limit", label="beside cp of the result")
    for stage in (2, 3):
        for safe in (True, False):
            memory = Goal(0.25, "peak", label="peak memory")
            what = f"fp32 weights of ZeRO-{stage} to {'safetensors' if safe else 'torch'}"
            make = partial(_consolidate, settings, stage, safe)
            yield Case(what, make, [Goal(0.15), beside, memory], quick=stage == 2 and safe)
    memory = Goal(1.0, "peak", 1280.0 * MIB, "peak memory", "1.25 GiB")
    yield Case("ZeRO-2 to a universal checkpoint", partial(_universal, settings), [Goal(0.08), beside, memory])
    memory = Goal(0.25, "peak", label="peak memory")
    yield Case("DCP to safetensors", partial(_dcp, settings), [Goal(0.2), beside, memory])


AREA = Area(
    "converting",
    "Conversions of the trainers' own tools",
    "Each run in a fresh process and into a new folder; importing is not measured. Files are in the system's cache.",
    _cases,
)
