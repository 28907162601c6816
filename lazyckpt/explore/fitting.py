"""What of the explorer's answers fits into a report: a budget of bytes, which the most useful answers take first."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from urllib.parse import quote

from ..core.units import human_bytes
from ..errors import DataError
from .api import Answer, Explorer, endpoint_modules
from .packing import to_json
from .subject import TENSORS, Subject, Wanted

_NEEDED = ("about", "tree")  # without these there is nothing to look at
_TRIES = 24  # answers of a path that do not fit, one after another, until no more of it are computed
_QUIET = 400  # requests without room, one after another, until the report is full
_CALLED = {
    "tree": "lists of names",
    "tree/norms": "blocks of norms in the tree",
    "layers": "states by layer",
    "experts/likeness": "layers of experts compared",
    "experts/nearest": "layers of most alike experts",
    "compare/differences": "blocks of compared values",
    "compare/tile": "pictures of differences",
    "run/course": "curves over the steps",
    "tensor": "cards of tensors",
    "tensor/tile": "pictures of tensors",
    "tensor/histogram": "histograms",
    "tensor/layout": "maps of ranks",
    "tensor/values": "tables of values",
    "tensor/outliers": "lists of the largest elements",
    "tensor/bits": "counts of bits",
    "tensor/spectrum": "singular values",
}
"""What the answers of a path are called, in the plural; answers of other paths have no line of their own."""

Plan = Callable[[Subject], Iterable[Wanted]]
"""Yields the requests of a group of paths for a report, level by level, the most useful first. Modules call it
``REPORT``."""


@dataclass(slots=True)
class Group:
    """The answers of one path."""

    held: int = 0
    """How many the report holds."""
    size: int = 0
    """How many did not fit."""
    read: int = 0
    """How many would have read too much."""
    misses: int = 0
    """How many of the last ones did not fit, one after another."""
    level: int = 0
    """The level of the last one."""


@dataclass(slots=True)
class Filled:
    """The answers that a report holds."""

    answers: dict[str, str] = field(default_factory=dict)
    """Request -> gzipped answer, as base64."""
    failures: dict[str, list[object]] = field(default_factory=dict)
    """Request -> status, kind and message of an answer that is an error."""
    same: dict[str, str] = field(default_factory=dict)
    """Request -> the request whose answer it has, too."""
    groups: dict[str, Group] = field(default_factory=dict)
    """Path -> how many of its answers are there."""
    full: int | None = None
    """The level whose further answers were not even counted, because nothing fitted any more."""

    @property
    def left_out(self) -> int:
        """How many answers are not there; at least, if some were not counted."""
        return sum(group.size + group.read for group in self.groups.values())

    def lines(self, tensors: int) -> list[list[object]]:
        """Return, for each group of which something was left out, what it is called, how many are there, how many there
        would be (0 if that is not known), and why: "size" or "read".

        Parameters
        ----------
        tensors
            How many tensors there are.
        """
        found: list[list[object]] = []
        for path, called in _CALLED.items():
            group = self.groups.get(path, Group())
            lost = group.size + group.read
            if not lost:
                continue
            everything = group.held + lost
            if group.level == self.full:  # not counted to the end
                everything = tensors if group.held < tensors and group.level == TENSORS else 0
            found.append([called, group.held, everything, "read" if group.read > group.size else "size"])
        return found


def key_of(wanted: Wanted) -> str:
    """Return the request as the application asks for it: parameters in the order of their names."""
    given = sorted((name, value) for name, value in wanted.values.items() if value or name == "name")
    query = "&".join(f"{_quoted(name)}={_quoted(value)}" for name, value in given)
    return f"{wanted.path}?{query}" if query else wanted.path


def _quoted(text: str) -> str:
    return quote(text.encode("utf-8", "surrogatepass"), safe="!'()*-._~")  # as the application's percentEncoded


def plans(subject: Subject) -> Iterator[Wanted]:
    """Yield what a report should hold, level by level; in each, round robin over the groups of paths."""
    waiting = [iter(module.REPORT(subject)) for module in endpoint_modules() if hasattr(module, "REPORT")]
    heads = {n: one for n, plan in enumerate(waiting) for one in islice(plan, 1)}
    while heads:
        level = min(one.level for one in heads.values())
        for n in [n for n, one in heads.items() if one.level == level]:
            yield heads.pop(n)
            heads.update((n, one) for one in islice(waiting[n], 1))
        heads = dict(sorted(heads.items()))


def filled(
    explorer: Explorer, room: int, max_read: int, max_size: int, told: Callable[[int, int], None] = lambda *_: None
) -> Filled:
    """Compute the most useful answers that fit.

    Parameters
    ----------
    explorer
        Answers the requests.
    room
        How many bytes requests and answers may take in the file.
    max_read
        How many bytes of tensors may be read.
    max_size
        The size of the file, for the message of the error.
    told
        Called after each answer, with the number of the answers that are held and of the bytes that they take.

    Raises
    ------
    DataError
        The list of the tensors alone does not fit.
    """
    found = Filled()
    seen: set[str] = set()
    quiet, held, whole = 0, 0, room
    for wanted in plans(explorer.subject):
        key = key_of(wanted)
        if key in seen:
            continue
        seen.add(key)
        if wanted.same is not None:
            room -= _share(found, key, key_of(Wanted(wanted.path, wanted.same)), room)
            continue
        group = found.groups.setdefault(wanted.path, Group())
        group.level = wanted.level
        if wanted.reads > max_read:
            group.read += 1
            quiet += 1
        elif group.misses >= _TRIES or room < 2 * len(key):
            group.size += 1
            quiet += 1
        else:
            answer = explorer.answer(wanted.path, wanted.values)
            max_read -= wanted.reads
            if answer.status == 200 and wanted.heard is not None:
                wanted.heard(answer.body)
            took = _put(found, key, answer, room)
            if took is None and wanted.path in _NEEDED and wanted.level == 0:
                raise DataError(
                    f"a report of {human_bytes(max_size)} has no room for the names of the tensors, which take "
                    f"{human_bytes(len(_packed(answer)))}: give a larger max_size (--max-size)"
                )
            if took is None:
                group.size += 1
                group.misses += 1
                quiet += 1
            else:
                room -= took
                group.held += 1
                group.misses = quiet = 0
                held += 1
            told(held, whole - room)
        if quiet >= _QUIET and wanted.level >= TENSORS:
            found.full = wanted.level
            break
    return found


def length_of(json: bytes) -> int:
    """Return how many bytes JSON takes in the page, where "<" is escaped."""
    return len(json) + 5 * json.count(b"<")


def _put(found: Filled, key: str, answer: Answer, room: int) -> int | None:
    """Keep an answer and return the bytes that it takes; None if there is not so much room."""
    if answer.status == 200:
        body = _packed(answer)
        took = len(to_json(key)) + len(body) + 4
        if took <= room:
            found.answers[key] = body
    else:
        failure = [answer.status, *_told(answer)]
        took = len(to_json(key)) + length_of(to_json(failure)) + 4
        if took <= room:
            found.failures[key] = failure
    return took if took <= room else None


def _share(found: Filled, key: str, held: str, room: int) -> int:
    """Give a request the answer of another one, if that is held and there is room; return the bytes that it takes."""
    took = len(to_json(key)) + len(to_json(held)) + 4
    if took > room or not (held in found.answers or held in found.failures):
        return 0
    found.same[key] = held
    return took


def _packed(answer: Answer) -> str:
    return base64.b64encode(gzip.compress(answer.body, 9, mtime=0)).decode("ascii")


def _told(answer: Answer) -> tuple[str, str]:
    error = json.loads(answer.body)["error"]
    return error["kind"], error["message"]
