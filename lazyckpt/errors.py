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

What is missing or odd in a checkpoint that can be read all the same is a `Problem` in ``view.problems``: a sentence
with a code to filter by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

# -- Text that comes from files (names, paths, messages), made safe to print, and long lists made short.

_LONG = 80  # characters of an item of a list in a message


def printable(text: str) -> str:
    """The text as one line: every character that a terminal would not print as itself is escaped.

    >>> print(printable("red\\x1b[31m"), printable("two\\nlines"))
    red\\x1b[31m two\\nlines
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def some(items: Iterable[object], most: int = 3) -> str:
    """The first items of a list for a message, each cut if it is long, and how many are left out.

    >>> some("abc"), some("abcdef"), some(range(12), 8)
    ('a, b, c', 'a, b, c and 3 more', '0, 1, 2, 3, 4, 5, 6, 7 and 4 more')
    """
    texts = [str(item) for item in items]
    shown = [text if len(text) <= _LONG else f"{text[:_LONG]}..." for text in texts[:most]]
    return ", ".join(shown) + and_more(len(texts) - most, start=" and ")


def sentences(items: Iterable[str], most: int = 3) -> str:
    """The first sentences for a message, in full, and how many are left out.

    >>> sentences(["a is missing", "b is missing", "c is missing"], 2)
    'a is missing; b is missing; and 1 more'
    """
    texts = list(items)
    return "; ".join(texts[:most]) + and_more(len(texts) - most, start="; and ")


def and_more(count: int, what: str = "", start: str = "... and ") -> str:
    """What to write below the first lines of a list about the ``count`` that are left out; "" if there are none.

    >>> and_more(1200, "files"), and_more(0)
    ('... and 1,200 more files', '')
    """
    return f"{start}{count:,} more{f' {what}' if what else ''}" if count > 0 else ""


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

# Code of a `Problem` -> what it means. docs/reference/problems.md says what to do about each.
PROBLEM_CODES = {
    # -- files
    "missing-file": "A file that the checkpoint should have is not there.",
    "unreadable-file": "A file is there and cannot be read: it is damaged, or of an unknown kind.",
    "left-over-file": "A file belongs to another save; it is not read.",
    "ignored-file": "A file beside the checkpoint is of a kind that lazyckpt does not read.",
    "misnamed-file": "A file is not of the kind that its name says; it is read as what it is.",
    "oversized-file": "Most of a file's bytes belong to no tensor in it.",
    "unsafe-pickle": "A pickle names functions that no checkpoint needs. lazyckpt runs nothing; other loaders might.",
    "unpinned-file": "The server gives nothing by which a replaced file could be noticed.",
    "part-of-checkpoint": "The path that was opened is one file of a larger checkpoint.",
    # -- the save as a whole
    "unfinished-save": "The save was not finished, or the checkpoint was not copied whole.",
    "other-checkpoint": "There are several checkpoints, or several files of one part; one is read.",
    "skipped-checkpoint": "A checkpoint of a run cannot be read, or has no step: it is left out.",
    "step-mismatch": "Parts of the checkpoint say that they are of different steps.",
    "missing-index": "Files of weights have no index; their names decide which belong together.",
    "index-mismatch": "The index and the files do not list the same tensors.",
    "inconsistent-metadata": "The metadata contradicts the tensors, or itself.",
    "missing-metadata": "Metadata that says how the tensors belong together is not there.",
    "unreadable-object": "An object that is no tensor cannot be read; it is not in view.meta.",
    # -- tensors
    "missing-elements": "No file holds some elements of a tensor. Other slices of it read.",
    "missing-tensor": "A tensor that should be there is in no file.",
    "missing-weights": "There are no weights.",
    "missing-optimizer": "There are no optimizer states, or not all of them.",
    "mismatched-shards": "The ranks' shards of a tensor have different dtypes or shapes, or not all ranks have one.",
    "differing-replicas": "Ranks hold different values of a tensor that should be the same on all; the first is read.",
    "unmerged-tensor": "How the shards form one tensor is not known; they are in view.stored.",
    "assumed-layout": "How the shards form one tensor is taken from names and shapes, and may be wrong.",
    "assumed-tie": "A name that is not stored is taken to be tied to another tensor.",
    "assumed-stage": "A tensor is on all pipeline stages, because nothing says which of them has it.",
    "undecided-name": "An optimizer numbers its parameters, and which number is which name is not known, or not yet.",
    "undecided-layout": "Where parameters lie in a buffer is not known; the buffer is in view.stored.",
    "unnumbered-layer": "The number of a layer in the whole model is not known.",
    "flat-parameter": "A parameter is a flat 1-d tensor, because nothing says which shapes it consists of.",
    "duplicate-tensor": "Several tensors have the same name; one of them is read.",
    "changed-tensor": "A tensor is absent at some steps of a run, or changes its shape or dtype.",
    "replaced-tensor": "A tensor is read from another file, because the usual one does not hold its values.",
    "unsupported-tensor": "A tensor cannot be represented as it is; the message says what is read instead.",
    "nested-tensor": "A tensor consists of others, which are read under its name.",
    # -- what the user asks for
    "unused-rule": "A rule of rules=, or an entry of steps=, has no effect.",
    "not-renamed": "A tensor keeps its name: the table has no entry for it, or it cannot be cut or joined.",
    "unlike-values": "Values mean something else under the new names: a model with those names computes otherwise.",
    # -- others
    "noted-at-export": "The checkpoint had this problem when it was exported.",
    "reader-note": "A reader of another package says so.",
}


class Problem(str):
    """Something missing or odd in a checkpoint that can be read all the same.

    A problem is a `str`, the sentence for people, with a ``code`` to filter by. Sentences may change; codes do not:

    >>> lost = Problem("missing-file", "mp_rank_01/model.pt is missing", "mp_rank_01/model.pt")
    >>> lost.code, lost.path
    ('missing-file', 'mp_rank_01/model.pt')
    >>> print(lost)
    mp_rank_01/model.pt is missing

    Parameters
    ----------
    code
        What kind of problem it is, one of those that docs/reference/problems.md lists (other readers may have more).
    message
        What is wrong, where, and what to do, as one sentence. Control characters in it are escaped.
    path
        The file, folder or tensor that it is about, as `CheckpointView.files` or the view names it; None if it is about
        the checkpoint as a whole, or about several.
    """

    __slots__ = ("code", "path")

    code: str
    path: str | None

    def __new__(cls, code: str, message: str, path: str | None = None) -> Problem:
        problem = super().__new__(cls, printable(message))
        problem.code = code
        problem.path = path
        return problem

    @property
    def message(self) -> str:
        """The sentence, as a plain `str`."""
        return str(self)

    def prefixed(self, prefix: str, path: str | None = None) -> Problem:
        """The same problem, with a text in front of the message, and the path if it has none yet."""
        return Problem(self.code, f"{prefix}: {self}", self.path or path)

    def __repr__(self) -> str:
        place = f", path={self.path!r}" if self.path is not None else ""
        return f"Problem({self.code!r}, {str(self)!r}{place})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Problem, (self.code, str(self), self.path)


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


def only_one(items: Sequence[str]) -> str | None:
    """The one item; None if there are several: the ``path`` of a problem that may be about many."""
    return items[0] if len(items) == 1 else None


def cannot_read(path: str, error: LazyckptError, so: str = "") -> Problem:
    """The problem of a file that cannot be read. ``so``: what follows from it, as in ", its tensors are lost"."""
    code = "missing-file" if isinstance(error, MissingFileError) else "unreadable-file"
    return Problem(code, f"{path} cannot be read{so}: {error}", path)


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
