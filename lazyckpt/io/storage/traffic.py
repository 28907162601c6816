"""Counters of what a store asks of its server, and what a busy server says."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any

from ...core.units import plural
from ..system import after_fork

_lock = threading.Lock()


def _reset_lock() -> None:
    global _lock
    _lock = threading.Lock()


after_fork(_reset_lock)


PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})  # statuses of a server that is busy for now


def retry_after(headers: Mapping[str, Any]) -> float:
    """Return the number of seconds after which a server asks to be asked again; 0 if it does not say.

    >>> retry_after({"Retry-After": "7"}), retry_after({"retry-after": "soon"}), retry_after({})
    (7.0, 0.0, 0.0)
    """
    text = str(headers.get("Retry-After") or headers.get("retry-after") or "").strip()
    if text.isdecimal():
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except ValueError:
        return 0.0


@dataclass
class Traffic:
    """What a store, and the stores made from it, have asked of their server.

    Attributes
    ----------
    requests
        Requests for bytes, states and listings, with the repeated ones.
    bytes
        Bytes of files that arrived.
    retries
        Requests that were repeated.
    cache_hits
        Reads that the disk cache answered, fully or in part.
    seconds
        Time spent waiting for answers, summed over threads.
    answered
        Whether there has been a connection to the server.
    """

    requests: int = 0
    bytes: int = 0
    retries: int = 0
    cache_hits: int = 0
    seconds: float = 0.0
    answered: bool = field(default=False, repr=False, compare=False)

    def add(self, requests: int = 0, nbytes: int = 0, retries: int = 0, hits: int = 0, seconds: float = 0.0) -> None:
        """Add to the counters."""
        with _lock:
            self.requests += requests
            self.bytes += nbytes
            self.retries += retries
            self.cache_hits += hits
            self.seconds += seconds

    def include(self, other: Traffic) -> None:
        """Add what another store has asked for."""
        if other is not self:
            self.add(other.requests, other.bytes, other.retries, other.cache_hits, other.seconds)

    @staticmethod
    def total(parts: Iterable[Traffic]) -> Traffic:
        """Return the counters of several stores together; those of one store as they are, so that they go on."""
        each = list({id(part): part for part in parts}.values())
        if len(each) == 1:
            return each[0]
        found = Traffic()
        for part in each:
            found.include(part)
        return found

    def __str__(self) -> str:
        return (
            f"{plural(self.requests, 'request')}, {self.bytes:,} bytes, {plural(self.retries, 'retry', 'retries')}, "
            f"{plural(self.cache_hits, 'cache hit')}, {self.seconds:.2f} s of waiting"
        )
