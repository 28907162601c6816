"""Conversions that a trainer's own tool does too: consolidation, universal checkpoints, DCP to safetensors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from .. import data
from ..case import Area, Case, Goal, Settings, remove
from ..contest import Contest
from ..host import DEEPSPEED, LAZYCKPT, Fresh
from ..limits import copy
from ..sample import Timed

MIB = 1 << 20
_DCP = """
from safetensors.torch import save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
def convert(source, out):
    os.makedirs(out)
    dcp_to_torch_save(source, out + "/whole.pt")
    whole = torch.load(out + "/whole.pt", mmap=True)
    save_file(whole["model"], out + "/model.safetensors")
"""
_UNIVERSAL = """
def convert(source, out):
    ds_to_universal.main(argparse.Namespace(input_folder=source, output_folder=out, num_extract_workers=4,
        num_merge_workers=2, keep_temp_folder=False, strict=True, inject_missing_state=True))
"""
_WRITE = """
def convert(source, out):
    lazyckpt.open(source, cache=False).{call}
"""


def _contest(settings: Settings, source: Path, ours: str, name: str, peer: str, options: str = "") -> Contest:
    """``convert(source, out)``, which ``ours`` and ``peer`` define, each in a fresh process and into a new folder."""
    out, other, copied = settings.out(), settings.out("peer"), settings.out("copy")

    def program(where: Path) -> str:
        return f"convert({str(source)!r}, {str(where)!r}{options})"

    clear = "shutil.rmtree({!r}, ignore_errors=True); os.sync()\n"

    def before() -> None:
        remove(copied)
        remove(other)  # several GiB, which nothing copies
        os.sync()

    def done() -> None:
        for path in (out, other, copied):
            remove(path)

    return Contest(
        Fresh(LAZYCKPT, program(out), clear.format(str(out)) + ours),
        (name, Fresh(DEEPSPEED, program(other), clear.format(str(other)) + peer)),
        ("cp of the result", Timed(partial(copy, [out], copied))),
        before=before, calls=1, rehearse=False, most=7, done=done,
    )  # fmt: skip


def _consolidate(settings: Settings, stage: int, safe: bool) -> Contest:
    function = "convert_zero_checkpoint_to_fp32_state_dict"
    ours = f"from lazyckpt.deepspeed import {function} as convert"
    peer = f"convert = zero_to_fp32.{function}"
    source = data.zero(settings, stage)
    return _contest(settings, source, ours, "zero_to_fp32", peer, f", safe_serialization={safe}")


def _universal(settings: Settings) -> Contest:
    folder = data.zero(settings, 2)
    tag = folder / (folder / "latest").read_text()
    ours = _WRITE.format(call="to_universal(out, progress=False)")
    return _contest(settings, tag, ours, "ds_to_universal", _UNIVERSAL)


def _dcp(settings: Settings) -> Contest:
    ours = _WRITE.format(call="to_safetensors(out, max_shard_size=None, progress=False)")
    return _contest(settings, data.dcp(settings), ours, "dcp_to_torch_save and save_file", _DCP)


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
