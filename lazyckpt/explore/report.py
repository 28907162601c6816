"""The explorer as a single file: the application with the answers that fit, for a wiki, a pull request or an e-mail.

The file needs no server and no network. Modules of `endpoints` say in ``REPORT`` which answers it should hold, the most
important first, and how many bytes of tensors each one reads.
"""

from __future__ import annotations

import base64
import gzip
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from ..core.units import human_bytes
from ..errors import DataError, DestinationError
from ..jobs.guard import local_path
from .api import Explorer, endpoint_modules
from .packing import to_json
from .server import asset, page
from .subject import Subject, Wanted

MAX_SIZE = 5 << 20
"""Default size limit of a report in bytes."""
MAX_READ = 4 << 30
"""Default limit of how many bytes of tensors are read for a report."""
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
_ROOM = 4096  # bytes of the page besides application and answers


Plan = Callable[[Subject], Iterable[Wanted]]
"""Yields the requests of a group of paths for a report, the most important first. Modules call it ``REPORT``."""


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
    """How many answers did not fit into the size limit, or would have read too much."""

    def __str__(self) -> str:
        more = f", {self.left_out:,} left out to keep to the limits" if self.left_out else ""
        return f"{self.path}: {human_bytes(self.nbytes)}, {self.answers:,} answers{more}"


def key_of(wanted: Wanted) -> str:
    """Return the request as the application asks for it: parameters in the order of their names."""
    given = sorted((name, value) for name, value in wanted.values.items() if value or name == "name")
    query = "&".join(f"{_quoted(name)}={_quoted(value)}" for name, value in given)
    return f"{wanted.path}?{query}" if query else wanted.path


def _quoted(text: str) -> str:
    return quote(text.encode("utf-8", "surrogatepass"), safe="!'()*-._~")  # as the application's percentEncoded


def plans(subject: Subject) -> Iterator[Wanted]:
    """Yield what a report of a subject should hold, the most important first: round robin over the groups of paths."""
    waiting = [iter(module.REPORT(subject)) for module in endpoint_modules() if hasattr(module, "REPORT")]
    while waiting:
        for one in list(waiting):
            found = next(one, None)
            if found is None:
                waiting.remove(one)
            else:
                yield found


def report(
    explorer: Explorer, dest: str | os.PathLike[str], max_size: int = MAX_SIZE, max_read: int = MAX_READ
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
    room = max_size - len(style) - len(script) - _ROOM
    answers: dict[str, str] = {}
    left_out = 0
    for n, wanted in enumerate(plans(explorer.subject)):
        if wanted.reads > max_read:
            left_out += 1
            continue
        max_read -= wanted.reads
        key = key_of(wanted)
        answer = explorer.answer(wanted.path, wanted.values)
        if answer.status != 200:
            left_out += 1
            continue
        body = base64.b64encode(gzip.compress(answer.body, 9, mtime=0)).decode("ascii")
        room_left = room - len(to_json(key)) - len(body) - 4
        if room_left < 0:
            if n == 0:
                raise DataError(
                    f"a report needs more than {human_bytes(max_size)}: give a larger max_size (--max-size)"
                )
            left_out += 1
            continue
        room = room_left
        answers[key] = body
    title = explorer.subject.title or explorer.subject.view.root
    head = f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n<style>{style}</style>'
    tail = f'<script type="module">{script}</script>'
    whole = page(to_json({"answers": answers}), f"{title} - lazyckpt", head, tail)
    _publish(path, whole)
    return Written(str(path), len(whole), len(answers), left_out)


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


def _publish(path: Path, body: bytes) -> None:
    staged = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        staged.write_bytes(body)
        staged.replace(path)
    except OSError as e:
        staged.unlink(missing_ok=True)
        raise DestinationError(f"cannot write {path}: {e.strerror or e}") from None
