"""One tensor out of a checkpoint of several files, opening included: time, bytes of cold files, peak memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

import lazyckpt

from .. import data
from ..case import Area, Case, Goal, Settings
from ..contest import Contest
from ..host import DEEPSPEED, LAZYCKPT, Fresh
from ..limits import Preadv
from ..sample import Cold, Timed, files_of, warm

NAME = "layers.7.weight"
MIB = 1 << 20


def _dcp(settings: Settings, key: object, cold: bool) -> Contest:
    import torch.distributed.checkpoint as dcp

    folder, side = data.dcp(settings), data.side(settings)

    def ours() -> torch.Tensor:
        return lazyckpt.open(folder, cache=False)[NAME][key]

    def theirs() -> torch.Tensor:
        state = {f"model.{NAME}": torch.empty(side, side)}
        dcp.load(state, checkpoint_id=folder, no_dist=True)
        return state[f"model.{NAME}"][key]  # type: ignore[index]

    warm(folder)
    assert torch.equal(ours(), theirs())
    if not cold:
        return Contest(Timed(ours), ("dcp.load of its key", Timed(theirs)), most=25)
    files = files_of(folder)
    plain = Preadv(max(files, key=lambda path: path.stat().st_size))
    plain.size = side * side * 4
    return Contest(
        Cold(files, lambda: None, lambda _: ours()),
        ("dcp.load of its key", Cold(files, lambda: None, lambda _: theirs())),
        ("preadv of as many bytes", Cold(files, lambda: None, lambda _: plain.whole())),
        calls=1, most=11, done=plain.close,
    )  # fmt: skip


def _memory(settings: Settings, stage: int) -> Contest:
    folder = data.zero(settings, stage)
    name = "embed.weight"
    prepare = f"view = lazyckpt.open({str(folder)!r}, cache=False)"
    ours = Fresh(LAZYCKPT, f"t = view.states['fp32'][{name!r}][...]", prepare)
    theirs = Fresh(
        DEEPSPEED,
        f"t = get({str(folder)!r}, lazy_mode=True)[{name!r}].contiguous()",
        "get = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint",
    )
    return Contest(ours, ("deepspeed's lazy_mode=True", theirs), calls=1, rehearse=False, most=3)


def _cases(settings: Settings) -> list[Case]:
    return list(_all(settings))


def _all(settings: Settings) -> Iterator[Case]:
    size = data.side(settings) ** 2 * 4
    text = f"one {size // MIB} MiB tensor of a DCP checkpoint of {16 * size // MIB} MiB"
    yield Case(text, partial(_dcp, settings, ..., False), [Goal(0.5)])
    near = Goal(1.25, against="limit", label="beside plain reads")
    yield Case(f"{text}, cold", partial(_dcp, settings, ..., True), [Goal(0.8), near])
    yield Case("16 rows of it", partial(_dcp, settings, slice(100, 116), False), [Goal(0.25)])
    size = settings.pick(16384 * 2048, 8192 * 512) * 4
    for stage in (2, 3):
        budget = float(size + 64 * MIB)
        goals = [
            Goal(1.0, "peak", budget, "peak memory", "the tensor and 64 MiB"),
            Goal(0.5, "peak", label="peak memory against the peer's"),
        ]
        what = f"one {size // MIB} MiB tensor of a ZeRO-{stage} checkpoint"
        yield Case(what, partial(_memory, settings, stage), goals, quick=stage == 2)


AREA = Area(
    "one_tensor",
    "One tensor of a large checkpoint",
    "From opening to the tensor, with a new view each time.",
    _cases,
)
