"""Every error that lazyckpt raises on purpose, as one tree.

    LazyckptError
    ├── FormatError (ValueError)             no reader knows this layout, or it is one that is refused by name
    ├── CorruptError (ValueError)            a file contradicts itself: truncated, flipped bytes, offsets out of range
    ├── MissingFileError (FileNotFoundError) a file that a tensor stands on is not there (or could not be indexed)
    ├── ChangedFileError (OSError)           a file is not the one that was indexed any more
    ├── TensorNotFoundError (KeyError)       no tensor and no prefix of that name; the message names near misses
    ├── SelectionError (IndexError)          an index that does not fit the tensor's shape
    ├── DataError (RuntimeError)             the tensor is known, its elements cannot be given (no data, no such dtype)
    ├── MeshError (ValueError)               a device mesh, placement or plan of experts that does not fit
    ├── WorkerError (RuntimeError)           the workers of a job died; what they finished is kept where that can be
    └── DestinationError (OSError)           nothing was written: something is there already, no room, no right to

A message says what is wrong, in which file, and what to do. Names in it come from files: as text (``str(error)``) it
is one paragraph without control characters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

# -- Text that comes from files (names, paths, messages), made safe to print.


def printable(text: str) -> str:
    """The text as one line: every character that a terminal would not print as itself is escaped.

    >>> print(printable("red\\x1b[31m"), printable("two\\nlines"))
    red\\x1b[31m two\\nlines
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


# -- Every error that lazyckpt raises on purpose, as one tree.

__all__ = [
    "ChangedFileError",
    "CorruptError",
    "DataError",
    "DestinationError",
    "FormatError",
    "LazyckptError",
    "MeshError",
    "MissingFileError",
    "SelectionError",
    "TensorNotFoundError",
    "WorkerError",
]


class LazyckptError(Exception):
    """Base of all errors that lazyckpt raises on purpose."""

    def __str__(self) -> str:
        return printable(super().__str__())


class FormatError(LazyckptError, ValueError):
    """No reader knows this layout, or it is one that is refused by name."""


class CorruptError(LazyckptError, ValueError):
    """A file contradicts itself: truncated, flipped bytes, offsets out of range."""


class MissingFileError(LazyckptError, FileNotFoundError):
    """A file that a tensor stands on is not there, or could not be indexed."""


class ChangedFileError(LazyckptError, OSError):
    """A file is not the one that was indexed any more (size or modification time differ)."""


class TensorNotFoundError(LazyckptError, KeyError):
    """No tensor and no prefix of that name; the message names near misses.

    Parameters
    ----------
    message
        What was not found.
    hint
        Called when the message is first shown; its result is appended. Near names are searched for there, so that
        ``name in view`` and ``view.get(name)`` do not pay for a message that nobody sees.
    """

    def __init__(self, message: str = "", hint: Callable[[], str] | None = None) -> None:
        super().__init__(message)
        self._hint = hint

    def __str__(self) -> str:  # KeyError would show the repr of the message
        hint = self._hint
        if hint is not None:
            self.args = (f"{self.args[0]} {hint()}".rstrip(),)
            self._hint = None
        return printable(str(self.args[0])) if self.args else ""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self),)


class SelectionError(LazyckptError, IndexError):
    """An index that does not fit the tensor's shape."""


class DataError(LazyckptError, RuntimeError):
    """The tensor is known, but its elements cannot be given (it has no data, or no dtype can hold it)."""


class MeshError(LazyckptError, ValueError):
    """A device mesh, a placement or a plan of experts that does not fit the tensors, or the ranks."""


class WorkerError(LazyckptError, RuntimeError):
    """The workers of a job died (processes, machines of a cluster), or take no work any more."""


class DestinationError(LazyckptError, OSError):
    """Nothing was written: something is there already, there is no room, or no right to write."""


class CredentialsWarning(UserWarning):
    """A pickle holds storage options that are secrets (keys, tokens, passwords, headers) in the open."""


@contextmanager
def decoding(where: str, what: str) -> Iterator[None]:
    """Turn whatever a parser raises into CorruptError, with its cause (see `foreign`).

    Parameters
    ----------
    where
        The file or folder that is read.
    what
        The part of lazyckpt, or of another package, that reads it.
    """
    try:
        yield
    except Exception as e:
        if not foreign(e):
            raise
        raise undecodable(where, what, e) from e


def foreign(error: Exception) -> bool:
    """Whether an error says something about the bytes that were parsed: it is neither lazyckpt's own nor about the file
    system, nor about a package that is not installed."""
    if isinstance(error, OSError):
        return type(error) is OSError and error.errno is None  # as bz2 raises for damage
    return not isinstance(error, LazyckptError | ImportError)


def undecodable(where: str, what: str, error: Exception) -> CorruptError:
    """The error for bytes that made a parser raise another one, which is its cause."""
    cause = " ".join(f"{type(error).__name__}: {error}"[:160].split())
    return CorruptError(f"{where}: {what} failed ({cause}): it is damaged, or of a kind that lazyckpt does not know")


_LONG = 80  # characters of a name in a message


def some(names: Iterable[str], count: int = 3) -> str:
    """The first of them, for a message.

    >>> some("abcd"), some("abc")
    ('a, b, c, ...', 'a, b, c')
    """
    first = list(islice(names, count + 1))
    shown = [name if len(name) <= _LONG else f"{name[:_LONG]}..." for name in first]
    return ", ".join(shown[:count]) + (", ..." if len(first) > count else "")
