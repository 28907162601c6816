"""The explorer as a single file: the application with the answers that fit, for a wiki, a pull request or an e-mail.

The file needs no server and no network. Modules of `endpoints` say in ``REPORT`` which answers it should hold, the most
useful first, and how many bytes of tensors each one reads; `fitting` chooses. The same input gives the same bytes.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..core.units import human_bytes
from ..derive.sources import address_of
from ..errors import DataError, DestinationError, printable
from ..jobs.guard import local_path
from ..jobs.places import Folder
from .api import Explorer
from .fitting import Filled, filled, key_of, length_of
from .packing import to_json
from .server import asset, page
from .subject import Subject, Wanted

MAX_SIZE = 5 << 20
"""Default size limit of a report in bytes."""
MAX_READ = 4 << 30
"""Default limit of how many bytes of tensors are read for a report."""
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
_ROOM = 4096  # bytes of the page besides application, answers and the texts that name the checkpoint


@dataclass(frozen=True, slots=True)
class Written:
    """What a report holds."""

    path: str
    """The file."""
    nbytes: int
    """Its size in bytes."""
    answers: int
    """How many answers it holds."""
    left_out: int
    """How many answers did not fit into the size limit, or would have read too much; at least, if nothing more fits."""

    def __str__(self) -> str:
        more = f", {self.left_out:,} or more left out to keep to the limits" if self.left_out else ""
        return f"{self.path}: {human_bytes(self.nbytes)}, {self.answers:,} pictures and tables{more}"


def report(
    explorer: Explorer,
    dest: str | os.PathLike[str],
    max_size: int = MAX_SIZE,
    max_read: int = MAX_READ,
    told: Callable[[int, int], None] = lambda *_: None,
) -> Written:
    """Write the explorer as one HTML file.

    Parameters
    ----------
    explorer
        Answers the requests.
    dest
        The file. An existing one is replaced when the new one is complete.
    max_size
        Largest size of the file in bytes.
    max_read
        How many bytes of tensors are read at most.
    told
        Called after each answer, with the number of the answers that are held and of the bytes that they take.

    Returns
    -------
    Written
        What the file holds.

    Raises
    ------
    DataError
        The application alone is larger than ``max_size``.
    DestinationError
        The file cannot be written.
    """
    path = local_path(dest)
    _check_apart(path, explorer.subject)
    style, script = (asset(name).decode("ascii") for name in ("explorer.css", "explorer.js"))
    title = explorer.subject.title or address_of(explorer.subject.view)
    commands = _commands(explorer.subject)
    fixed = len(style) + len(script) + _ROOM + 6 * len(title) + length_of(to_json(commands))
    if fixed > max_size:
        raise DataError(
            f"a report takes {human_bytes(fixed)} without a word about the checkpoint: {human_bytes(max_size)} are too "
            "few. Give a larger max_size (--max-size)"
        )
    found = filled(explorer, max_size - fixed, max_read, max_size, told)
    head = f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n<style>{style}</style>'
    tail = f'<script type="module">{script}</script>'
    whole = page(_host(found, explorer.subject, max_size, max_read, commands), f"{title} - lazyckpt", head, tail)
    try:
        Folder(str(path.parent)).put(path.name, [whole])
    except OSError as e:
        raise DestinationError(f"cannot write {path}: {e.strerror or e}") from None
    return Written(str(path), len(whole), len(found.answers), found.left_out)


def _host(found: Filled, subject: Subject, max_size: int, max_read: int, commands: dict[str, str]) -> bytes:
    """Return what the application reads: the answers, and what is left out."""
    views = [subject.view, *([] if subject.other is None else [subject.other])]
    left = found.lines(sum(len(view) for view in views))
    if subject.run is not None:
        steps = subject.run.steps
        held = 1 + sum(key_of(Wanted("tree", {"step": str(step)})) in found.answers for step in steps[:-1])
        if held < len(steps):
            left.insert(0, ["steps that the pages show", held, len(steps), "size"])
    about = {
        "left": left,
        "size": human_bytes(max_size),
        "read": human_bytes(max_read),
        **commands,
    }
    return to_json({"answers": found.answers, "failures": found.failures, "same": found.same, "report": about})


def _commands(subject: Subject) -> dict[str, str]:
    """Return the commands that show everything, and that write more into a report."""
    views = [subject.view, *([] if subject.other is None else [subject.other])]
    places = [subject.title] if subject.title and subject.other is None else [address_of(view) for view in views]
    paths = " ".join(shlex.quote(printable(place)) for place in places)
    return {"serve": f"lazyckpt serve {paths}", "larger": f"lazyckpt report {paths}"}


def _check_apart(path: Path, subject: Subject) -> None:
    """Raise DestinationError if the path is a file of the checkpoint."""
    for view in filter(None, (subject.view, subject.other)):
        root = Path(view.root)
        if any(
            one.exists() and path.exists() and one.samefile(path) for one in (root, *map(root.joinpath, view.files))
        ):
            raise DestinationError(f"{path} is a file of the checkpoint: choose another place for the report")
    if path.is_dir():
        raise DestinationError(f"{path} is a folder: give the name of a file, such as {path / 'report.html'}")
