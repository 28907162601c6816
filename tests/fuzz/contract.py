"""The contract of a fuzz target: what a parser may do with any bytes, and how a violation is recognised."""

from __future__ import annotations

import resource
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lazyckpt import LazyckptError

from ..hostility import deadline

SECONDS = 20.0  # an input takes milliseconds; this is for machines that are busy
MEMORY = 512 << 20  # bytes of resident memory that one input may add: the limits of io/limits.py stay below
MESSAGE = 2000  # characters of an error message
SIZE = 1 << 20  # bytes of an input


class DifferenceError(AssertionError):
    """Two readers accept the same bytes and disagree about them, or an invariant of the result is broken."""


class Crash(NamedTuple):
    """A violation of the contract: ``kind`` is the type of the exception, "hang" or "memory"; ``place`` is the
    innermost line of lazyckpt in the traceback, by which crashes are told apart; ``text`` is for people."""

    kind: str
    place: str
    text: str


@dataclass(frozen=True)
class Target:
    """A parser under test.

    Parameters
    ----------
    name
        ``family.parser``, which is also the name of its folder of regression files.
    run
        Gives bytes to the parser. It may return, or raise a `LazyckptError`; anything else is a crash. If other readers
        read the same bytes, it compares the results and raises `DifferenceError`.
    seeds
        Returns genuine inputs, from which the mutators start. Called once per process.
    grammar
        The name of a mutator in `mutate.GRAMMARS`.
    """

    name: str
    run: Callable[[bytes], None]
    seeds: Callable[[], Sequence[bytes]]
    grammar: str = "bytes"


def attempt(target: Target, data: bytes, seconds: float = SECONDS) -> Crash | None:
    """Run a target on an input; return its crash, or None if it keeps the contract."""
    before = _peak()
    try:
        with deadline(seconds):
            target.run(data)
    except LazyckptError as e:
        if len(str(e)) > MESSAGE:
            return Crash("message", _place(e), f"an error message of {len(str(e)):,} characters: {str(e)[:200]}")
    except TimeoutError as e:
        return Crash("hang", _place(e), _trace(e))
    except Exception as e:
        return Crash(type(e).__name__, _place(e), _trace(e))
    grown = _peak() - before
    if grown > MEMORY:
        return Crash("memory", "", f"it takes {grown >> 20:,} MiB of memory")
    return None


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _place(error: BaseException) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/lazyckpt/" in f.filename]
    if not frames:
        frames = traceback.extract_tb(error.__traceback__)[-1:]
    return f"{frames[-1].filename.rpartition('/lazyckpt/')[2]}:{frames[-1].name}" if frames else ""


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))[-6000:]
