"""Printing of styled lines for people and of text for machines."""

from __future__ import annotations

import codecs
import io
import os
import re
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING

from ..errors import printable

if TYPE_CHECKING:
    from rich.console import Console

# Python arguments that are options of commands.
_ARGUMENT = re.compile(
    r"(?<![\w./=-])(overwrite|base|tag|algorithm|optimizer|rules|format|memory|resume|verify|max_shard_size|codec|state|dtype|bins|keep|delete|missing"
    r"|incomplete)=(True\b|False\b|\.\.\.|'[^']*'|[\w-]+(?:,\d{3})*|(?!\{))"
)
_DEQUANTIZE = re.compile(
    r"call dequantize\(\) first, then quantize\('[^']*'\)|lazyckpt\.apply_lora\(view\.dequantize\(\), adapter\)"
)
_RENAME = re.compile(r"view\.rename\('([^']*)'\)")
# Replacements for the characters beyond ASCII that lazyckpt itself prints, for terminals that cannot show them.
_BARS = dict(zip("▁▂▃▄▅▆▇█", "_.-=+*%#", strict=True))
_ASCII = str.maketrans({**_BARS, "…": "...", "─": "-", "│": "|"})
# Those of `lazyckpt browse`, one for one.
_DRAWN = _BARS | dict(zip("…─━╸╺│▸▾◂●▀▌▐╭╮╰╯↑↓←→⏎•·", "~-===|>v<o=||++++^v<><*.", strict=True))


def in_ascii(error: UnicodeError) -> tuple[str, int]:
    """Replace bars and lines by ASCII and escape all other characters: an error handler of codecs."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lost = error.object[error.start : error.end].translate(_ASCII)
    return lost.encode("ascii", "backslashreplace").decode("ascii"), error.end


def in_cells(error: UnicodeError) -> tuple[str, int]:
    """Replace characters by ASCII of the same width on a terminal: an error handler of codecs for drawn screens."""
    from rich.cells import cell_len

    if not isinstance(error, UnicodeEncodeError):
        raise error
    lost = error.object[error.start : error.end]
    return "".join(_DRAWN.get(one, "?" * cell_len(one)) for one in lost), error.end


def replace_unknown(handler: str) -> None:
    """Set the error handler of stdout and stderr for characters that the terminal's encoding lacks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=handler)


codecs.register_error("lazyckpt", in_ascii)
codecs.register_error("lazyckpt-cells", in_cells)


def as_options(text: str) -> str:
    """Replace Python arguments in an error message by the options of the command line.

    >>> as_options("is there already: overwrite=True replaces it, tag='step-5' opens another")
    'is there already: --overwrite replaces it, --tag step-5 opens another'
    >>> as_options("unknown names: take view.rename('megatron') first")
    'unknown names: take --rename megatron first'
    >>> as_options("it is quantized already: call dequantize() first, then quantize('nf4')")
    'it is quantized already: add --dequantize'
    """

    def option(match: re.Match[str]) -> str:
        name, value = match[1].replace("_", "-"), match[2].strip("'")
        if value == "False":
            return f"--no-{name}"
        return f"--{name}" if value in ("True", "...", "") else f"--{name} {value}"

    text = _DEQUANTIZE.sub("add --dequantize", text)
    return _ARGUMENT.sub(option, _RENAME.sub(r"--rename \1", text))


def write_text(text: str) -> None:
    """Write text for machines in pieces: an unbuffered stdout does not notice that the reader closes the pipe in the
    middle of a write."""
    for at in range(0, len(text), 1 << 14):
        sys.stdout.write(text[at : at + (1 << 14)])
    sys.stdout.write("\n")


@cache
def console(err: bool = False) -> Console:
    """Return the rich console of stdout or stderr."""
    from rich.console import Console

    class _Console(Console):
        """A console that leaves closed pipes to `program`, which handles them for all output."""

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return _Console(stderr=err, markup=False, highlight=False, emoji=False, soft_wrap=True)


def _styled(err: bool) -> bool:
    """Return whether lines are coloured: on a terminal, or if the environment forces colours. Otherwise rich, which is
    slow to import and to print with, is not used."""
    forced = os.environ.get("FORCE_COLOR") or os.environ.get("TTY_COMPATIBLE") == "1"
    return bool(forced) or (sys.stderr if err else sys.stdout).isatty()


Piece = tuple[str, str]  # text, and its style
_TOGETHER = 256  # lines that are printed at once


def write_line(*pieces: Piece, err: bool = False, strip: bool = False) -> None:
    """Print (text, style) pieces literally as one line."""
    write_lines([pieces], err, strip)


def write_lines(lines: Iterable[Sequence[Piece]], err: bool = False, strip: bool = False) -> None:
    """Print lines of (text, style) pieces literally. ``strip`` leaves out the spaces at their ends."""
    styled, left = _styled(err), iter(lines)
    while some := list(islice(left, _TOGETHER)):
        if not styled:
            texts = [printable("".join([text for text, _ in pieces])) for pieces in some]
            joined = "".join([f"{text.rstrip() if strip else text}\n" for text in texts])
            (sys.stderr if err else sys.stdout).write(joined)
            continue
        from rich.text import Text

        found = [Text() for _ in some]
        for line, pieces in zip(found, some, strict=True):
            for text, style in pieces:
                line.append(printable(text), style)
            if strip:
                line.rstrip()
        console(err).print(Text("\n").join(found))


def write_error(text: str) -> None:
    """Print an error as one line on stderr."""
    write_line(("error: ", "bold red"), (as_options(" ".join(text.split())), ""), err=True)
