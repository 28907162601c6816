"""The values of options that choose layers, experts and steps: `lazyckpt convert --layers`, `--average` and so on."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import DataError, some
from ..view import CheckpointView

Change = Callable[[CheckpointView], CheckpointView]

_UPCYCLE: dict[str, Callable[[str], Any]] = {"top_k": int, "router": str, "std": float, "seed": int}


def numbers(text: str, option: str) -> list[int]:
    """Return the numbers of a list such as ``0-11,8-19``; a range has both of its ends. Raises DataError.

    >>> numbers("0-2,2,5", "--layers")
    [0, 1, 2, 2, 5]
    """
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})(?:-(\d{1,6}))?\s*", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise DataError(f"{option} {text!r:.60}: write numbers and ranges from small to large, as in 0-11,8-19")
        found += range(int(match[1]), int(match[2] or match[1]) + 1)
    return found


def changes(layers: str | None, keep: str | None, drop: str | None, upcycle: str | None) -> list[Change]:
    """Return what the options do to a view, in order: layers, then experts. Raises DataError for a wrong value."""
    found: list[Change] = []
    if layers is not None:
        stack, equals, rest = layers.rpartition("=")
        chosen = numbers(rest, "--layers")
        found.append(lambda view: view.layers(*chosen, stack=stack if equals else None))
    if keep is not None:
        kept = _experts(keep, "--keep-experts")
        found.append(lambda view: view.keep_experts(kept))
    if drop is not None:
        dropped = _experts(drop, "--drop-experts")
        found.append(lambda view: view.drop_experts(dropped))
    if upcycle is not None:
        count, options = _upcycled(upcycle)
        found.append(lambda view: view.upcycle(count, **options))
    return found


def _experts(text: str, option: str) -> list[int] | dict[int, list[int]]:
    """Return the experts of all layers, ``0-3,6``, or those of each layer, ``1:0,2;2:1,3``."""
    if ":" not in text:
        return numbers(text, option)
    found: dict[int, list[int]] = {}
    for part in text.split(";"):
        layer, colon, experts = part.partition(":")
        if not colon or not layer.strip().isdecimal() or int(layer) in found:
            raise DataError(f"{option} {text!r:.60}: for single layers write LAYER:EXPERTS, as in '1:0,2;2:1,3'")
        found[int(layer)] = numbers(experts, option)
    return found


def _upcycled(text: str) -> tuple[int, dict[str, Any]]:
    """Return the number of experts and the options of ``8,top_k=2,router=zeros``."""
    count, *rest = text.split(",")
    options: dict[str, Any] = {}
    try:
        for one in rest:
            name, _, value = one.partition("=")
            options[name.strip()] = _UPCYCLE[name.strip()](value)
        return int(count), options
    except (KeyError, ValueError):
        raise DataError(
            f"--upcycle {text!r:.60}: write the number of experts, and options: 8,top_k=2,router=zeros,std=0.02,seed=1"
        ) from None


def steps_of(text: str, steps: Sequence[int]) -> list[int]:
    """Return the steps of a run that --average names: ``all``, ``last:5``, or numbers and ranges. A range has the
    steps in it that the run has. Raises DataError."""
    if text == "all":
        return list(steps)
    last = re.fullmatch(r"last:(\d+)", text)
    if last is not None:
        count = int(last[1])
        if not 1 <= count <= len(steps):
            raise DataError(f"--average {text}: the run has {len(steps)} steps")
        return list(steps)[-count:]
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(-)?(\d+)?\s*", part)
        if match is None or (match[3] is not None and match[2] is None):
            raise DataError(f"--average {text!r:.60}: write all, last:5, or steps and ranges, as in 100,200-400")
        low, high = int(match[1]), int(match[3]) if match[3] else None
        part_of = [n for n in steps if low <= n and (high is None or n <= high)] if match[2] else [low]
        if not part_of or (not match[2] and low not in steps):
            raise DataError(f"--average {text!r:.60}: the run has no step {part.strip()}; it has {some(steps, 8)}")
        found += part_of
    return sorted(set(found))
