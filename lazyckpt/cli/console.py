"""Printing: lines for people, literally, and text for machines."""

from __future__ import annotations

import sys
from functools import cache
from typing import NoReturn

from rich.console import Console
from rich.text import Text

from ..printing import printable


def write_text(text: str) -> None:
    """Text for machines, in pieces: an unbuffered stdout would not notice that the reader left in the middle of one."""
    for at in range(0, len(text), 1 << 14):
        sys.stdout.write(text[at : at + (1 << 14)])
    sys.stdout.write("\n")


class _Console(Console):
    """Leaves a pipe that nobody reads to `program`, as all that is written is."""

    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError


@cache
def console(err: bool = False) -> Console:
    """Where lines go: stdout, or stderr."""
    return _Console(stderr=err, markup=False, highlight=False, emoji=False, soft_wrap=True)


def write_line(*pieces: tuple[str, str], err: bool = False, strip: bool = False) -> None:
    """One line of (text, style) pieces, literally."""
    line = Text()
    for text, style in pieces:
        line.append(printable(text), style)
    if strip:
        line.rstrip()
    console(err).print(line)


def write_error(text: str) -> None:
    """One line on stderr."""
    write_line(("error: ", "bold red"), (" ".join(text.split()), ""), err=True)
