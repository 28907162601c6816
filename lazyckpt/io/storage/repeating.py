"""Requests that are repeated while they fail for a reason that may pass. Reading and writing do it the same way."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from ...core.requests import Policy
from ..cancelling import pause
from .traffic import Traffic

_FIRST, _LONGEST = 0.1, 8.0  # seconds between two attempts
_UNREACHED = 10.0  # seconds after which a server that has never answered is taken for one that does not exist
_CONNECTING = 10.0  # seconds that a connection may take
T = TypeVar("T")


class Transient(OSError):
    """A request failed for a reason that may pass: a dropped connection, a busy server, an answer that is too short.

    Attributes
    ----------
    after
        The number of seconds after which the server asks to be asked again (Retry-After); 0 if it does not say.
    """

    after = 0.0


class UnreachableError(Transient):
    """There is no server: its name is unknown, or it refuses connections."""


def connect_timeout(policy: Policy) -> float:
    """Return the number of seconds after which a connection that does not come about is given up.

    >>> connect_timeout(Policy()), connect_timeout(Policy(timeout=4)), connect_timeout(Policy(deadline=0))
    (10.0, 4, 0.1)
    """
    return min(_CONNECTING, policy.timeout, max(policy.deadline, 0.1))


def repeated(ask: Callable[[], T], policy: Policy, io: Traffic, known: bool = False) -> T:
    """Make a request; repeat it if it fails for a passing reason, until the deadline of the policy.

    Parameters
    ----------
    ask
        Makes the request once. Raises Transient if it can be repeated.
    policy
        The deadline, in seconds.
    io
        Counts the requests, and knows whether the server has answered before.
    known
        Whether the server is known to exist, so that it may be away for as long as the deadline.
    """
    begin = time.monotonic()
    longer = _FIRST
    while True:
        before = time.monotonic()
        try:
            found = ask()
            io.answered = True
            return found
        except Transient as e:
            wait = max(e.after, longer * random.uniform(0.5, 1.5))
            spent = time.monotonic() - begin
            deadline = policy.deadline
            if not isinstance(e, UnreachableError):
                io.answered = True
            elif not io.answered and not known:
                deadline = min(deadline, _UNREACHED)
            if spent + wait > deadline:
                advice = "storage_options={'requests': {'deadline': seconds}} sets for how long"
                if deadline < policy.deadline:
                    advice = "is its address right, and is there a network?"
                raise OSError(f"{str(e).rstrip('.')} (tried for {spent:.0f} s; {advice})") from e
            io.add(retries=1)
            pause(wait)
            longer = min(2 * longer, _LONGEST)
        finally:
            io.add(requests=1, seconds=time.monotonic() - before)
