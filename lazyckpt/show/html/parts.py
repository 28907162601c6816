"""Colours and tooltips of the files and ranks that hold a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..layout import Holder, ranges

_COLOURS = 8  # distinct colours of holders; further holders reuse them


def owner(holder: Holder) -> object:
    """Return the key of a holder's colour: its rank, which all files of the rank share, or else its path."""
    return holder.rank if holder.rank is not None else holder.path


@dataclass(slots=True)
class Colours:
    """The assignment of colours to owners within one output."""

    known: dict[object, int] = field(default_factory=dict)

    def of(self, holders: Sequence[Holder]) -> str:
        """Return the CSS class of the first holder that can be read, or "lost"."""
        there = next((h for h in holders if not h.missing), None)
        if there is None:
            return "lost"
        return f"k{self.known.setdefault(owner(there), len(self.known)) % _COLOURS}"


def title(holders: Sequence[Holder]) -> str:
    """Return the tooltip of a box."""
    text = ranges(holders)
    lost = sum(bool(h.missing) for h in holders)
    if len(holders) == 1:
        text += f": {holders[0].path}" if holders[0].path != text else ""
    return text + (" (missing)" if lost == len(holders) else f" ({lost} missing)" if lost else "")
