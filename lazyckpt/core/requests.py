"""Joining of wanted runs of bytes to requests for ranges of a file. No I/O.

A request to a server takes a round trip, so neighbouring runs are read with one request, with the bytes between them if
those are few. A run that is longer than a request is read by several requests at the same time.

The defaults of `Policy` were measured with a server that answers after 20 ms and, on 64 connections, sends 100 MB/s to
1 GB/s (``python -m benchmarks remote``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import FormatError

Ints = NDArray[np.int64]
_LONGEST = 10**9  # seconds


@dataclass(frozen=True, slots=True)
class Policy:
    """How reads behind a network become requests.

    Attributes
    ----------
    over_read
        The largest number of bytes that are read for each wanted byte of a file, where joining runs saves requests.
    gap
        Runs of a file that are at most so many bytes apart are read with one request, whatever ``over_read`` allows,
        if there would be more than ``most`` requests. None: 32 KiB, about what 100 MB/s transfer in the time that a
        request takes of one of 64 connections.
    most
        The number of requests for a file from which on ``gap`` counts. A ``gap`` that is passed always counts.
    largest
        The largest request in bytes.
    smallest
        Long runs are cut into requests of at least so many bytes, to use several connections.
    concurrency
        The number of requests at the same time.
    deadline
        The number of seconds after which a request that fails again and again is given up.
    timeout
        The number of seconds after which an answer that does not come is asked for again.
    """

    over_read: float = 1.2
    gap: int | None = None
    most: int = 8192
    largest: int = 8 << 20
    smallest: int = 1 << 20
    concurrency: int = 64
    deadline: float = 60.0
    timeout: float = 30.0

    @classmethod
    def of(cls, options: Mapping[str, Any] | None) -> Policy:
        """Return the policy of a user's options. Raises FormatError for unknown options and impossible values."""
        known = {field.name for field in fields(cls)}
        if options is not None and not isinstance(options, Mapping):
            raise FormatError(f"storage_options['requests'] is of type {type(options).__name__}: give a dictionary")
        given = dict(options or {})
        for name, value in given.items():
            if name not in known:
                raise FormatError(
                    f"storage_options['requests']: there is no option {name!r}. There are: {', '.join(sorted(known))}"
                )
            least = 1 if name in ("over_read", "concurrency", "largest", "smallest", "most") else 0
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= least:
                raise FormatError(f"storage_options['requests']: {name}={value!r}: a number of at least {least} is due")
            if name in ("deadline", "timeout") and value > _LONGEST:
                raise FormatError(
                    f"storage_options['requests']: {name}={value!r}: at most {_LONGEST:,} seconds are possible"
                )
            if name not in ("over_read", "deadline", "timeout"):
                if value != value // 1 or value == float("inf"):
                    raise FormatError(f"storage_options['requests']: {name}={value!r}: give a whole number")
                given[name] = int(value)
        return cls(**given)


NEAR = 512  # bytes; the headers of a request are as long, so runs that are less apart are one run
GAP = 32 << 10


class Request(NamedTuple):
    """A range of bytes of a file, and the pieces (sorted by their starts) that lie in it: ``first`` to ``last``."""

    start: int
    stop: int
    first: int
    last: int


def cut(starts: Ints, lengths: Ints, at: Ints, owner: Ints, size: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Cut pieces that are longer than ``size`` bytes into parts of at most that size.

    Parameters
    ----------
    starts, lengths
        Where the pieces are in the file, in bytes.
    at
        Where they go to in memory, in bytes.
    owner
        A number for each piece, which its parts get, too.
    size
        The largest part in bytes.

    Returns
    -------
    tuple of four arrays
        The same four arrays for the parts.
    """
    if not len(lengths) or lengths.max() <= size:
        return starts, lengths, at, owner
    times = np.maximum(-(-lengths // size), 1)
    index = np.repeat(np.arange(len(lengths)), times)
    number = np.arange(len(index)) - np.repeat(np.cumsum(times) - times, times)
    part = np.minimum(size, lengths[index] - number * size)
    return starts[index] + number * size, part, at[index] + number * size, owner[index]


def join(starts: Ints, lengths: Ints, policy: Policy, size: int) -> Iterator[Request]:
    """Yield the requests for pieces of one file, which are sorted by their starts and at most ``size`` bytes long.

    Every piece lies in one request. A request is for at most ``size`` wanted bytes."""
    count = len(starts)
    if not count:
        return
    stops = starts + lengths
    reach = np.maximum.accumulate(stops)
    gaps = starts[1:] - reach[:-1]
    joined = gaps <= NEAR
    apart = np.sort(gaps[~joined])
    if len(apart):
        wanted = int(reach[-1] - starts[0]) - int(apart.sum())
        most = int(np.searchsorted(np.cumsum(apart), (policy.over_read - 1) * wanted, side="right"))
        limit = int(apart[most - 1]) if most else 0
        if most and most < len(apart) and apart[most] == limit:  # equal gaps: those that come first
            equal = np.flatnonzero(gaps == limit)[: most - int(np.searchsorted(apart, limit))]
            joined[equal] = True
            joined |= gaps < limit
        else:
            joined |= gaps <= limit
        if policy.gap is not None or int((~joined).sum()) >= policy.most:
            joined |= gaps <= (GAP if policy.gap is None else policy.gap)
    new = lengths.copy()  # bytes that no piece before wants
    new[1:] = np.maximum(stops[1:] - np.maximum(starts[1:], reach[:-1]), 0)
    until = np.cumsum(new)
    ends = [*(np.flatnonzero(~joined) + 1).tolist(), count]
    first = 0
    for end in ends:
        while first < end:
            start = int(starts[first])
            before = int(until[first] - new[first])
            last = end
            if reach[end - 1] - start > policy.largest:  # pieces are no longer than that, so there is one
                last = first + int(np.searchsorted(reach[first:end], start + policy.largest, side="right"))
            if until[last - 1] - before > size:
                last = first + int(np.searchsorted(until[first:last], before + size, side="right"))
            yield Request(start, int(stops[first:last].max()), first, last)
            first = last
