"""What a request of the explorer asks: a path, parameters, and whether its answer is still wanted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from urllib.parse import parse_qsl

from ..errors import DataError, some


class Cancelled(Exception):
    """The answer is no longer wanted."""


def parameters(text: str) -> dict[str, str]:
    """Return the parameters in the query of an address. Lone surrogates of names are written there as UTF-8 would."""
    try:
        return dict(parse_qsl(text, keep_blank_values=True, errors="surrogatepass"))
    except UnicodeDecodeError:
        return dict(parse_qsl(text, keep_blank_values=True))


class Query:
    """The parameters of a request, as text, and a check that ends work whose answer is no longer wanted.

    Parameters
    ----------
    values
        Name -> text.
    wanted
        Returns whether the answer is still wanted.
    """

    __slots__ = ("_values", "_wanted")

    def __init__(self, values: Mapping[str, str], wanted: Callable[[], bool] = lambda: True) -> None:
        self._values = dict(values)
        self._wanted = wanted

    @property
    def key(self) -> tuple[tuple[str, str], ...]:
        """The parameters in the order of their names."""
        return tuple(sorted(self._values.items()))

    def check(self) -> None:
        """Raise `Cancelled` if the answer is no longer wanted. Computations call it between blocks."""
        if not self._wanted():
            raise Cancelled

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def text(self, name: str, default: str | None = None) -> str:
        """Return a parameter as text. Raises DataError if it is missing and there is no default."""
        found = self._values.get(name, default)
        if found is None:
            raise DataError(f"the request has no parameter {name!r}")
        return found

    def one_of(self, name: str, choices: Sequence[str]) -> str:
        """Return a parameter that is one of ``choices``; the first is the default. Raises DataError."""
        found = self._values.get(name, choices[0])
        if found not in choices:
            raise DataError(f"the parameter {name!r} is {found!r:.60}: it is one of {some(choices)}")
        return found

    def number(self, name: str, default: int, least: int, most: int) -> int:
        """Return a parameter as an integer from ``least`` to ``most``. Raises DataError."""
        text = self._values.get(name)
        if text is None:
            return default
        digits = text.removeprefix("-")
        if not (digits.isascii() and digits.isdigit() and len(digits) < 20 and least <= int(text) <= most):
            raise DataError(f"the parameter {name!r} is {text!r:.60}: it is a number from {least:,} to {most:,}")
        return int(text)
