"""`lazyckpt report`: the explorer as one HTML file."""

from __future__ import annotations

from typing import Annotated

import typer

from ..core.units import human_bytes, size_in_bytes
from ..explore.api import Explorer
from ..explore.report import report as write_report
from ..exploring import subject_of
from .console import console, write_line
from .options import BaseOption, FormatOption, PathArg, RulesOption, TagOption, read_rules


def report(
    path: PathArg,
    other: Annotated[
        str | None, typer.Argument(metavar="OTHER", help="A second checkpoint, to compare with.", show_default=False)
    ] = None,
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="The HTML file to write.")
    ] = "report.html",
    max_size: Annotated[str, typer.Option("--max-size", metavar="SIZE", help="Largest size of the file.")] = "5MiB",
    max_read: Annotated[
        str, typer.Option("--max-read", metavar="SIZE", help="Bytes of tensors to read at most.")
    ] = "4GiB",
    tag: TagOption = None,
    format: FormatOption = None,
    rules: RulesOption = None,
    base: BaseOption = None,
) -> None:
    """Write a checkpoint as one HTML file to look at.

    A run, or two checkpoints side by side, can be written, too. The file holds the tree, and as many figures and values
    as fit. It needs no server and no network.
    """
    options = {
        "tag": tag,
        "format": format,
        "rules": None if rules is None else read_rules(rules),
        "base": base,
    }
    explorer = Explorer(subject_of(path, other, options))
    limits = size_in_bytes(max_size), size_in_bytes(max_read)
    with console(err=True).status("Reading the names") as status:  # shows nothing where there is no terminal

        def told(held: int, nbytes: int) -> None:
            status.update(f"{held:,} pictures and tables, {human_bytes(nbytes)} of {human_bytes(limits[0])}")

        written = write_report(explorer, output, *limits, told)
    write_line((str(written), ""))
