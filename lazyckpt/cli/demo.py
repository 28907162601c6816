"""`lazyckpt demo`: a guided tour of lazyckpt on small checkpoints that it writes."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from ..demo import Step, walk
from ..demo.walk import BARS
from ..errors import LazyckptError
from .console import write_line, write_text
from .options import JsonOption

_COLOURS = (
    "#46327e",
    "#3b528b",
    "#2c728e",
    "#21918c",
    "#28ae80",
    "#5ec962",
    "#addc30",
    "#fde725",
)  # matplotlib's viridis


def demo(
    keep: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write the files to DIR and keep them (default: a temporary folder)."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write small real checkpoints and walk through them."""
    if keep is not None and keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise LazyckptError(f"{keep} is not an empty folder: give --keep a new or an empty one")
    folder = keep or Path(tempfile.mkdtemp(prefix="lazyckpt-demo-"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if as_json:
            write_text(json.dumps([step._asdict() for step in walk(folder)], indent=2))
            return
        for step in walk(folder):
            _show(step)
    except OSError as e:
        raise LazyckptError(f"the demo cannot write {e.filename or folder}: {e.strerror or e}") from e
    finally:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    if keep is not None:
        command = "lazyckpt" if shutil.which("lazyckpt") else f"{sys.executable} -m lazyckpt"
        write_line((f"The files are in {keep}. Try, with these or with a checkpoint of your own:", "cyan"))
        write_line((f"  {command} ls {keep / 'zero3'}", "cyan"))
    else:
        write_line(("The demo has removed its files; `lazyckpt demo --keep DIR` keeps them.", "cyan"))


def _show(step: Step) -> None:
    if step.code.startswith("$ "):
        write_line(("$ ", "green"), (step.code[2:], "bold"))
    elif step.code:
        write_line((">>> ", "green"), (step.code, "bold"))
    for line in step.text.splitlines():
        write_line(*(_pieces(line) if step.code else [(line, "cyan")]))
    if not step.code or step.text:
        write_line()


def _pieces(line: str) -> list[tuple[str, str]]:
    """Split a line of output into (text, style) pieces in which bars are coloured by their height."""
    return [(c, _COLOURS[BARS.index(c)] if c in BARS else "") for c in line]
