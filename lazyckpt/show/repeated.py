"""Names of repeated layers: what they have in common, and one name for all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..core.names import shortened

ALIKE = 3  # minimum number of tensors that are folded into one line
_RANGES = 4  # ranges of numbers that are written out in a name


def template(name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the components of a name with ``*`` in place of numbers, and the numbers.

    >>> template("layers.12.mlp.experts.3.up")
    (('layers', '*', 'mlp', 'experts', '*', 'up'), ('12', '3'))
    """
    parts = name.split(".")
    numbers = tuple(part for part in parts if _is_number(part))
    return tuple("*" if _is_number(part) else part for part in parts), numbers


def _is_number(part: str) -> bool:
    return part.isascii() and part.isdigit() and len(part) <= 9


def joined(names: Sequence[str]) -> str:
    """Return one name for names of the same template.

    >>> joined(["layers.0.up", "layers.1.up", "layers.2.up"])
    'layers.{0-2}.up'
    """
    if len(names) == 1:
        return names[0]
    parts, _ = template(names[0])
    columns = list(zip(*(template(name)[1] for name in names), strict=True))
    ranges = iter(one[0] if len(set(one)) == 1 else f"{{{_ranges(one)}}}" for one in columns)
    return ".".join(next(ranges) if part == "*" else part for part in parts)


def _ranges(texts: Iterable[str]) -> str:
    """Return numbers as ranges.

    >>> _ranges(["0", "1", "2", "5"]), _ranges(["0", "2", "4", "6"])
    ('0-2,5', '0,2,4,6')
    """
    numbers = sorted(set(map(int, texts)))
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in runs[:_RANGES]]
    return ",".join(shown) + (",…" if len(runs) > _RANGES else "")


def place_of(name: str) -> str:
    """Return the numbers of a name with the word before each.

    >>> place_of("model.layers.12.mlp.experts.3.up")
    'layers 12, experts 3'
    """
    parts = name.split(".")
    found = [f"{parts[n - 1]} {part}" if n else part for n, part in enumerate(parts) if _is_number(part)]
    return shortened(f"most at {', '.join(found)}", 60).removeprefix("most at ")
