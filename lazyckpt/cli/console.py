"""Printing: lines for people, literally, and text for machines."""

from __future__ import annotations

import codecs
import os
import re
import sys
from functools import cache
from typing import TYPE_CHECKING

from ..errors import printable

if TYPE_CHECKING:
    from rich.console import Console

# Arguments of Python that commands have as options.
_ARGUMENT = re.compile(
    r"(?<![\w./=-])(overwrite|tag|rules|format|memory|resume|verify|max_shard_size|codec|state|dtype|bins|keep|delete"
    r"|incomplete)=(True\b|False\b|\.\.\.|'[^']*'|[\w-]+(?:,\d{3})*|(?!\{))"
)
_RENAME = re.compile(r"view\.rename\('([^']*)'\)")
# What lazyckpt itself prints beyond ASCII, for terminals that cannot.
_ASCII = str.maketrans({**dict(zip("▁▂▃▄▅▆▇█", "_.-=+*%#", strict=True)), "…": "...", "─": "-", "│": "|"})


def in_ascii(error: UnicodeError) -> tuple[str, int]:
    """An error handler of codecs: bars and lines as ASCII, all else that cannot be encoded escaped."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lost = error.object[error.start : error.end].translate(_ASCII)
    return lost.encode("ascii", "backslashreplace").decode("ascii"), error.end


codecs.register_error("lazyckpt", in_ascii)


def as_options(text: str) -> str:
    """An error message with the command's options where it names arguments of Python.

    >>> as_options("is there already: overwrite=True replaces it, tag='step-5' opens another")
    'is there already: --overwrite replaces it, --tag step-5 opens another'
    >>> as_options("unknown names: take view.rename('megatron') first")
    'unknown names: take --rename megatron first'
    """

    def option(match: re.Match[str]) -> str:
        name, value = match[1].replace("_", "-"), match[2].strip("'")
        if value == "False":
            return f"--no-{name}"
        return f"--{name}" if value in ("True", "...", "") else f"--{name} {value}"

    return _ARGUMENT.sub(option, _RENAME.sub(r"--rename \1", text))


def write_text(text: str) -> None:
    """Text for machines, in pieces: an unbuffered stdout would not notice that the reader left in the middle of one."""
    for at in range(0, len(text), 1 << 14):
        sys.stdout.write(text[at : at + (1 << 14)])
    sys.stdout.write("\n")


@cache
def console(err: bool = False) -> Console:
    """Where lines go: stdout, or stderr."""
    from rich.console import Console

    class _Console(Console):
        """Leaves a pipe that nobody reads to `program`, as all that is written is."""

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return _Console(stderr=err, markup=False, highlight=False, emoji=False, soft_wrap=True)


def _styled(err: bool) -> bool:
    """Whether lines may have colours: on a terminal, or where the user asks for them. Elsewhere rich, which is slow to
    import and to print with, is not needed."""
    forced = os.environ.get("FORCE_COLOR") or os.environ.get("TTY_COMPATIBLE") == "1"
    return bool(forced) or (sys.stderr if err else sys.stdout).isatty()


def write_line(*pieces: tuple[str, str], err: bool = False, strip: bool = False) -> None:
    """One line of (text, style) pieces, literally."""
    if not _styled(err):
        text = "".join(printable(text) for text, _ in pieces)
        (sys.stderr if err else sys.stdout).write((text.rstrip() if strip else text) + "\n")
        return
    from rich.text import Text

    line = Text()
    for text, style in pieces:
        line.append(printable(text), style)
    if strip:
        line.rstrip()
    console(err).print(line)


def write_error(text: str) -> None:
    """One line on stderr."""
    write_line(("error: ", "bold red"), (as_options(" ".join(text.split())), ""), err=True)
