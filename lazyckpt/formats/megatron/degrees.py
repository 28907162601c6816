"""What the arguments in a rank's file say of how the model was cut, as checked numbers.

Source: Megatron-LM megatron/training/arguments.py; the names are those of its command line. Older versions lack some.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_MOST = 1 << 20


@dataclass(frozen=True, slots=True)
class Degrees:
    """The parallel degrees; ``chunks``: of the model on each pipeline rank; ``etp``: how experts are cut."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    chunks: int = 1

    def place(self, numbers: tuple[int, ...]) -> tuple[int, int, int] | None:
        """(tp, pp, ep) rank of a folder with these numbers in its name (``mp_rank_TT[_PPP][_EEE]``); None if its name
        does not fit.

        >>> Degrees(pp=2).place((0, 1)), Degrees(ep=2).place((0, 1)), Degrees().place((0, 1))
        ((0, 1, 0), (0, 0, 1), None)
        """
        if len(numbers) != 1 + (self.pp > 1) + (self.ep > 1):
            return None
        tp, pp, ep = numbers[0], numbers[1] if self.pp > 1 else 0, numbers[-1] if self.ep > 1 else 0
        return (tp, pp, ep) if tp < self.tp and pp < self.pp and ep < self.ep else None

    def expert_rank(self, tp: int) -> int | None:
        """The expert-tensor-parallel rank whose shards the file of this tensor-parallel rank has: of the ranks, counted
        tensor-parallel ones first, each file's writer is both (parallel_state.py `RankGenerator`). None if several
        ranks write the same file."""
        return tp % self.etp if self.tp % self.etp == 0 else None


def degrees(args: Any, counts: Sequence[int], chunks: int) -> Degrees:
    """The degrees by the arguments. What they do not say (or there are none: None) is what the folders show: ``counts``
    of the ranks, by their place in the names. ``chunks``: in the file."""
    tp = number(args, "tensor_model_parallel_size", "model_parallel_size") or counts[0]
    ep = number(args, "expert_model_parallel_size") or (counts[2] if len(counts) > 2 else 1)
    pp = number(args, "pipeline_model_parallel_size")
    if pp is None:
        pp = counts[1] if len(counts) > 1 + (len(counts) == 2 and ep > 1) else 1
    return Degrees(tp, pp, ep, number(args, "expert_tensor_parallel_size") or tp, max(chunks, 1))


def number(args: Any, *names: str) -> int | None:
    """The first of the arguments that is a positive number."""
    for name in names:
        value = getattr(args, name, None)
        if type(value) is int and 0 < value < _MOST:
            return value
    return None


def flag(args: Any, *names: str) -> bool | None:
    """Whether one of the switches is on; None if there is none of them."""
    values = [value for name in names if isinstance(value := getattr(args, name, None), bool)]
    return any(values) if values else None


def version(root: dict[Any, Any]) -> float:
    """The checkpoint's version (checkpointing.py `set_checkpoint_version`): files without it are of version 0."""
    value = root.get("checkpoint_version", 0)
    return float(value) if type(value) in (int, float) else 3.0


def data_parallel(args: Any, degrees: Degrees) -> int:
    """The data-parallel degree."""
    known = number(args, "data_parallel_size")
    if known is not None:
        return known
    world = number(args, "world_size") or 1
    return max(1, world // (degrees.tp * degrees.pp * (number(args, "context_parallel_size") or 1)))
