"""Opening checkpoints of a thousand ranks: time and memory, against torch.load(mmap=True) of each file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import lazyckpt

from .. import data
from ..case import Area, Case, Goal, Settings
from ..contest import Contest
from ..host import DEEPSPEED, LAZYCKPT, Fresh
from ..sample import Timed

NAME = "model.layers.3.mlp.up_proj.weight"
MIB, GIB = 1 << 20, 1 << 30
# The model states of ZeRO-2 are left out: their 0.8 TB are more than a machine of usual size maps.
_LOAD = """
for path in sorted(Path({folder!r}).rglob("*.pt")):
    if path.stat().st_size < 100 << 30:
        torch.load(path, mmap=True, map_location="cpu", weights_only=False)
"""


def _opening(make: Callable[[], Path]) -> Contest:
    folder = make()
    ours = Fresh(LAZYCKPT, f"view = lazyckpt.open({str(folder)!r}, cache=False)")
    theirs = Fresh(DEEPSPEED, _LOAD.format(folder=str(folder)))
    return Contest(ours, ("torch.load(mmap=True) of each file", theirs), calls=1, rehearse=False, most=3, least=2)


def _using(make: Callable[[], Path], do: Callable[[lazyckpt.CheckpointView], object]) -> Contest:
    view = lazyckpt.open(make(), cache=False)
    return Contest(Timed(lambda: do(view)), most=21)


def _cases(settings: Settings) -> list[Case]:
    return list(_all(settings))


def _all(settings: Settings) -> Iterator[Case]:
    world, layers = settings.pick(1024, 64), settings.pick(126, 8)
    model = "405B" if layers == 126 else f"{layers} layers of 405B"
    # ZeRO-2's pickles all differ: every one of them has to be read
    for layout, text, ratio, seconds in (
        ("zero3", "ZeRO-3", 0.1, 3.0),
        ("zero3_frozen", "ZeRO-3 whose files differ", 0.3, 3.0),
        ("zero2", "ZeRO-2", 0.7, 8.0),
    ):
        make = partial(data.ranks, settings, layout, world, layers)
        budget = Goal(1.0, against=seconds, label="the budget")
        memory = Goal(1.0, "peak", float(GIB), "peak memory", "1 GiB")
        what = f"open {model} on {world:,} ranks, {text}"
        goals = [Goal(ratio), budget, memory]
        yield Case(what, partial(_opening, make), goals, quick=layout != "zero2")
    make = partial(data.ranks, settings, "zero3", settings.pick(4096, 256), settings.pick(16, 8))
    what = f"open {settings.pick(16, 8)} layers of 405B on {settings.pick(4096, 256):,} ranks, ZeRO-3"
    yield Case(what, partial(_opening, make), [Goal(0.1)], quick=False)
    yield Case(
        "open a legacy Megatron checkpoint on 1,024 ranks",
        partial(_opening, partial(data.megatron, settings)), [Goal(0.5)], quick=False,
    )  # fmt: skip
    make = partial(data.ranks, settings, "zero3", world, layers)
    uses: dict[str, tuple[float, Callable[[lazyckpt.CheckpointView], object]]] = {
        "exp_avg[name][:8]": (0.01, lambda view: view.states["exp_avg"][NAME][:8]),
        "repr(view)": (0.1, repr),
        "view.tree(2)": (1.0, lambda view: view.tree(2)),
    }
    for text, (limit, do) in uses.items():
        goal = Goal(1.0, against=limit)
        yield Case(f"{text} of {model} on {world:,} ranks", partial(_using, make, do), [goal])


AREA = Area(
    "ranks",
    "A thousand ranks",
    "Checkpoints as DeepSpeed and Megatron write them, with real pickles and holes in place of the tensors' bytes. "
    "Each opening is in a fresh process; importing is not measured.",
    _cases,
)
