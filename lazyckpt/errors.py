"""The exceptions that lazyckpt raises deliberately, and the problems that views report.

    LazyckptError
    ├── FormatError (ValueError)             no reader supports this layout, or lazyckpt rejects it by name
    ├── CorruptError (ValueError)            a file contradicts itself: truncated, flipped bytes, offsets out of range
    ├── MissingFileError (FileNotFoundError) a file that holds elements of a tensor is missing or could not be indexed
    ├── ChangedFileError (OSError)           a file changed after it was indexed
    ├── TensorNotFoundError (KeyError)       no tensor and no prefix has this name; the message lists similar names
    ├── SelectionError (IndexError)          an index does not fit the tensor's shape
    ├── DataError (RuntimeError)             the tensor exists but its elements cannot be read (no data, no dtype)
    ├── MeshError (ValueError)               a device mesh, placement or expert plan does not fit the tensors or ranks
    ├── WorkerError (RuntimeError)           workers of a job died; finished output is kept where possible
    └── DestinationError (OSError)           nothing was written: target exists, disk is full, or permission is denied

Each message says what is wrong, in which file, and what to do. ``str(error)`` is a single paragraph without control
characters, even where it contains names read from files.

Defects that do not prevent reading a checkpoint are not exceptions: each is a `Problem` in ``view.problems``, a
sentence with a code to filter by.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

# -- Printable text and shortened lists for messages.

_LONG = 80  # maximum characters of one list item in a message
_NAME = 255  # characters of a file name that file systems allow; a longer one, in an index, names no file
_MESSAGE = 1500  # maximum characters of a message; texts from files may be of any length


def printable(text: str) -> str:
    """Escape every non-printable character, so that text read from files is one safe line on a terminal.

    >>> print(printable("red\\x1b[31m"), printable("two\\nlines"))
    red\\x1b[31m two\\nlines
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _line(message: str) -> str:
    """Return a message as one printable line, without the middle of a very long one."""
    message = printable(message)
    return message if len(message) <= _MESSAGE else f"{message[: _MESSAGE - 500]} ... {message[-400:]}"


def some(items: Iterable[object], most: int = 3) -> str:
    """Join the first items of a list for a message; shorten long items and count the omitted ones.

    >>> some("abc"), some("abcdef"), some(range(12), 8)
    ('a, b, c', 'a, b, c and 3 more', '0, 1, 2, 3, 4, 5, 6, 7 and 4 more')
    """
    texts = [str(item) for item in items]
    shown = [text if len(text) <= _LONG else f"{text[:_LONG]}..." for text in texts[:most]]
    return ", ".join(shown) + and_more(len(texts) - most, start=" and ")


def sentences(items: Iterable[str], most: int = 3) -> str:
    """Join the first sentences for a message, without shortening them, and count the omitted ones.

    >>> sentences(["a is missing", "b is missing", "c is missing"], 2)
    'a is missing; b is missing; and 1 more'
    """
    texts = list(items)
    return "; ".join(texts[:most]) + and_more(len(texts) - most, start="; and ")


def and_more(count: int, what: str = "", start: str = "... and ") -> str:
    """Return the note "... and N more" for a shortened list, or "" if nothing was omitted.

    >>> and_more(1200, "files"), and_more(0)
    ('... and 1,200 more files', '')
    """
    return f"{start}{count:,} more{f' {what}' if what else ''}" if count > 0 else ""


# -- Exceptions and problems.

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

# Code of a `Problem` -> its meaning. docs/reference/problems.md says what to do about each.
PROBLEM_CODES = {
    # -- files
    "missing-file": "A file that the checkpoint should have is not there.",
    "unreadable-file": "A file is there and cannot be read: it is damaged, of an unknown kind, or its disk fails.",
    "left-over-file": "A file belongs to another save; it is not read.",
    "unread-program": "The file also holds a program, which lazyckpt neither reads nor runs.",
    "ignored-file": "A file beside the checkpoint is of a kind that lazyckpt does not read.",
    "misnamed-file": "A file is of another kind than its name suggests; it is read by its contents.",
    "oversized-file": "Most of a file's bytes belong to no tensor in it.",
    "unsafe-pickle": "A pickle names functions that no checkpoint needs. lazyckpt runs nothing; other loaders might.",
    "unpinned-file": "The server sends nothing that would reveal that a file was replaced.",
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
    "unreadable-object": "An object that is not a tensor cannot be read; it is not in view.meta.",
    # -- tensors
    "missing-elements": "No file holds some elements of a tensor. Its other slices can be read.",
    "missing-tensor": "A tensor that should be there is in no file.",
    "missing-weights": "There are no weights.",
    "missing-optimizer": "There are no optimizer states, or not all of them.",
    "mismatched-shards": "The ranks' shards of a tensor have different dtypes or shapes, or not all ranks have one.",
    "differing-replicas": "Ranks hold different values of a tensor that should be the same on all; the first is read.",
    "unmerged-tensor": "How the shards form one tensor is not known; they are in view.stored.",
    "assumed-layout": "How the shards form one tensor is taken from names and shapes, and may be wrong.",
    "assumed-tie": "A name that is not stored is taken to be tied to another tensor.",
    "assumed-stage": "A tensor is on all pipeline stages, because no file says which stage has it.",
    "undecided-name": "An optimizer numbers its parameters, and the name for a number is not known (or not yet).",
    "undecided-layout": "Where parameters lie in a buffer is not known; the buffer is in view.stored.",
    "unnumbered-layer": "The number of a layer in the whole model is not known.",
    "flat-parameter": "A parameter is a flat 1-d tensor, because no file gives the shapes that it consists of.",
    "duplicate-tensor": "Several tensors have the same name; one of them is read.",
    "changed-tensor": "A tensor is absent at some steps of a run, or changes its shape or dtype.",
    "replaced-tensor": "A tensor is read from another file, because the usual one does not hold its values.",
    "unsupported-tensor": "A tensor cannot be represented as it is; the message says what is read instead.",
    "nested-tensor": "A tensor consists of others, which are read under its name.",
    "unsorted-tensor": "Tensors are neither the model's nor of a known layout of optimizers; they are in view.stored.",
    # -- dequantized views
    "undecided-quantization": "What a quantized tensor means is not known, or not certain: it stays as it is stored.",
    "contradicting-quantization": "Configuration, names, shapes or dtypes of quantized tensors contradict each other.",
    "assumed-quantization": "What a quantized tensor means is taken from shapes, and may be wrong.",
    "left-out-scale": "Scales of activations or of the KV cache have no place in the unquantized model.",
    "not-quantized": "A matrix cannot be quantized in the form that was asked for: it stays as it is.",
    # -- updates of optimizers
    "undecided-update": "An optimizer's last step cannot be computed from what the checkpoint records.",
    "assumed-update": "An optimizer's last step is computed for a learning rate or gradient that may be another.",
    # -- options that the user passed
    "unused-rule": "A rule of rules=, or an entry of steps=, has no effect.",
    "not-renamed": "A tensor keeps its name: the table has no entry for it, or it cannot be cut or joined.",
    "unlike-values": "Values mean something else under the new names: a model with them computes different results.",
    # -- others
    "noted-at-export": "The checkpoint had this problem when it was exported.",
    "reader-note": "A reader from another package reports this.",
}


class Problem(str):
    """A defect of a checkpoint that does not prevent reading the rest of it.

    A problem is a `str`, a human-readable sentence, with a ``code`` to filter by. Sentences may change between
    versions; codes do not:

    >>> lost = Problem("missing-file", "mp_rank_01/model.pt is missing", "mp_rank_01/model.pt")
    >>> lost.code, lost.path
    ('missing-file', 'mp_rank_01/model.pt')
    >>> print(lost)
    mp_rank_01/model.pt is missing

    Parameters
    ----------
    code
        The kind of problem, one of the codes in docs/reference/problems.md (readers of other packages may add codes).
    message
        What is wrong, where, and what to do, as one sentence. Control characters in it are escaped.
    path
        The affected file, folder or tensor, as named in `CheckpointView.files` or in the view; None if the problem
        concerns several of them or the whole checkpoint.
    """

    __slots__ = ("code", "path")

    code: str
    path: str | None

    def __new__(cls, code: str, message: str, path: str | None = None) -> Problem:
        problem = super().__new__(cls, _line(message))
        problem.code = code
        problem.path = path
        return problem

    @property
    def message(self) -> str:
        """The sentence, as a plain `str`."""
        return str(self)

    def prefixed(self, prefix: str, path: str | None = None) -> Problem:
        """Return a copy with ``prefix`` in front of the message, and with ``path`` if this problem has no path."""
        return Problem(self.code, f"{prefix}: {self}", self.path or path)

    def __repr__(self) -> str:
        place = f", path={self.path!r}" if self.path is not None else ""
        return f"Problem({self.code!r}, {str(self)!r}{place})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Problem, (self.code, str(self), self.path)


class LazyckptError(Exception):
    """Base class of all exceptions that lazyckpt raises deliberately."""

    def __str__(self) -> str:
        return _line(super().__str__())


class FormatError(LazyckptError, ValueError):
    """No reader supports this layout, or lazyckpt rejects it by name."""


class CorruptError(LazyckptError, ValueError):
    """A file contradicts itself: truncated, flipped bytes, offsets out of range."""


class MissingFileError(LazyckptError, FileNotFoundError):
    """A file that holds elements of a tensor is missing, or could not be indexed."""


class ChangedFileError(LazyckptError, OSError):
    """A file changed after it was indexed: its size, version or modification time differs."""


class TensorNotFoundError(LazyckptError, KeyError):
    """No tensor and no prefix has this name; the message lists similar names.

    Parameters
    ----------
    message
        What was not found.
    hint
        A function that searches for similar names. It is called when the message is first formatted, and its result
        is appended, so that ``name in view`` and ``view.get(name)`` do not pay for an unused message.
    """

    def __init__(self, message: str = "", hint: Callable[[], str] | None = None) -> None:
        super().__init__(message)
        self._hint = hint

    def __str__(self) -> str:  # KeyError.__str__ returns the repr of the message
        hint = self._hint
        if hint is not None:
            self.args = (f"{self.args[0]} {hint()}".rstrip(),)
            self._hint = None
        return _line(str(self.args[0])) if self.args else ""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self),)


class SelectionError(LazyckptError, IndexError):
    """An index does not fit the tensor's shape."""


class DataError(LazyckptError, RuntimeError):
    """The tensor exists but its elements cannot be read: it has no data, or no dtype can represent them."""


class MeshError(LazyckptError, ValueError):
    """A device mesh, a placement or an expert plan does not fit the tensors or the ranks."""


class WorkerError(LazyckptError, RuntimeError):
    """Workers of a job (processes or machines of a cluster) died or no longer accept work."""


class DestinationError(LazyckptError, OSError):
    """Nothing was written: the target exists, the disk is full, or permission is denied."""


class CredentialsWarning(UserWarning):
    """A pickle leaves out storage options that are secrets (keys, tokens, passwords, headers) for all processes but the
    one that made it and its workers."""


class CacheWarning(UserWarning):
    """The block cache of remote reads cannot be used or written. Reads go on without it."""


def restored(code: str, message: str, path: str | None) -> Problem:
    """Return a problem that was kept as its code, message and path."""
    return Problem(code, message, path)


def only_one(items: Sequence[str]) -> str | None:
    """Return the item if there is exactly one, else None: the ``path`` of a problem about one or several items."""
    return items[0] if len(items) == 1 else None


def cannot_read(path: str, error: LazyckptError, so: str = "") -> Problem:
    """Return the problem of an unreadable file. ``so`` states the consequence, as in ", its tensors are lost"."""
    absent = isinstance(error, MissingFileError) and error.errno in (None, errno.ENOENT, errno.ENOTDIR)
    code = "missing-file" if absent else "unreadable-file"
    named = path if len(path) <= _NAME else f"{path[:_LONG]}..."  # the consequence is not cut off the message
    return Problem(code, f"{named} cannot be read{so}: {error}", path)


@contextmanager
def decoding(where: str, what: str) -> Iterator[None]:
    """Convert a parser's exceptions to CorruptError, with the original as cause (`foreign` decides which).

    Parameters
    ----------
    where
        The file or folder that is parsed.
    what
        The parser: a part of lazyckpt or of another package.
    """
    try:
        yield
    except Exception as e:
        if not foreign(e):
            raise
        raise undecodable(where, what, e) from e


def foreign(error: Exception) -> bool:
    """Return whether an error concerns the parsed bytes: it is not lazyckpt's own, and neither the file system nor a
    missing package caused it."""
    if isinstance(error, OSError):
        return type(error) is OSError and error.errno is None  # bz2 raises this for damaged data
    return not isinstance(error, LazyckptError | ImportError)


def undecodable(where: str, what: str, error: Exception) -> CorruptError:
    """Return the CorruptError for bytes on which a parser raised ``error``."""
    cause = " ".join(f"{type(error).__name__}: {error}"[:160].split())
    return CorruptError(f"{where}: {what} failed ({cause}): it is damaged, or of a kind that lazyckpt does not know")
