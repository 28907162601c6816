"""The distributed optimizer's buckets as ranks hold them ("dp_reshardable"): the position of each parameter in them.

Writer: megatron/core/optimizer/distrib_optimizer.py `sharded_param_state_dp_reshardable`: for every model-parallel
rank, buffer and bucket one flat tensor, which the data-parallel ranks save in chunks: one for each parameter that a
rank has part of, one for each gap between parameters. distributed/param_and_grad_buffer.py `_ParamAndGradBuffer` lays
parameters out in the reverse of the model's order, each from a multiple of 64 elements on. No name is saved: the
parameters of a rank follow from the weights, and the layout that they imply has to match where every chunk begins and
ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

from ...core.specs import Fragment, TensorSpec

_ALIGNMENT = 64
# a bucket is padded to a multiple of the number of ranks and one of these; the second: pad_buckets_for_high_nccl_busbw
_DIVISORS = (128, 1 << 16)

Place = tuple[int, int]  # bucket, first element in it


def walk(sizes: Sequence[int], totals: Sequence[int]) -> list[Place] | None:
    """Lay out parameters of these sizes, in the model's order, in buckets of these lengths; None if they do not fit.

    >>> walk([4, 3, 100], [100, 68])
    [(1, 64), (1, 0), (0, 0)]
    """
    places: list[Place] = []
    bucket = end = 0
    for size in reversed(sizes):
        start = _up(end, _ALIGNMENT)
        # (a bucket that ends because the next parameter needs one of its own includes the gap before that parameter)
        if bucket < len(totals) and totals[bucket] in (end, start):
            bucket, end, start = bucket + 1, 0, 0
        if bucket == len(totals) or start + size > totals[bucket]:
            return None
        places.append((bucket, start))
        end = start + size
    if bucket != len(totals) - 1 or end != totals[bucket]:
        return None
    return places[::-1]


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def ends_of(places: Sequence[Place], sizes: Sequence[int], totals: Sequence[int]) -> list[set[int]]:
    """Return the positions in each bucket where a parameter begins or ends, on any rank."""
    found = [{0, total} for total in totals]
    for (bucket, start), size in zip(places, sizes, strict=True):
        found[bucket] |= {start, start + size}
    return found


def chunk_ends(spec: TensorSpec) -> set[int]:
    """Return the positions where the chunks of a flat tensor begin and end."""
    return {end for fragment in spec.fragments for end in _interval(fragment)}


def _interval(fragment: Fragment) -> tuple[int, int]:
    start = fragment.parts[0].start[0] if fragment.parts else 0
    return start, start + fragment.local_shape[0]


def ranks_of(found: Sequence[set[int]], expected: Sequence[set[int]]) -> int | None:
    """Return the number of data-parallel ranks over which buckets are cut, such that chunks end exactly where
    parameters and cuts do; None if there is no such number."""
    pairs = sorted(zip(found, expected, strict=True), key=lambda pair: len(pair[0] - pair[1]), reverse=True)
    got, ends = pairs[0]  # the bucket with the most cuts that are not the end of a parameter
    least = 1 + len(got - ends)
    for ranks in range(least, least + len(ends)):
        if all(_is_cut(got, ends, ranks) for got, ends in pairs):
            return ranks
    return None


def _is_cut(found: set[int], ends: set[int], ranks: int) -> bool:
    """Return whether chunks end exactly where parameters do and where that many ranks cut the padded bucket."""
    total = max(ends)
    for divisor in dict.fromkeys(lcm(ranks, d) for d in _DIVISORS):
        width = _up(total, divisor) // ranks
        if width in found or width >= total:
            cuts = range(width, min(total, ranks * width), width)
            if found == ends.union(cuts):
                return True
    return False
