"""`lazyckpt prune`: the older checkpoints of a run."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ..core.units import human_bytes, plural
from ..runs.prune import prune as prune_folder
from .console import write_line, write_text
from .options import JsonOption


def prune(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="The folder of a run.", show_default=False)],
    keep: Annotated[int, typer.Option(metavar="N", help="How many of the newest complete checkpoints stay.")],
    delete: Annotated[bool, typer.Option("--delete", help="Remove them; without it, only say what would go.")] = False,
    incomplete: Annotated[
        bool, typer.Option("--incomplete", help="Also those that are not complete: not while a trainer is writing.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove the older checkpoints of a run.

    Not the newest N complete ones, nor what `latest` and the like name.

    Exit codes: 0 done (or nothing to do), 1 something could not be removed, 2 an error, and nothing was.
    """
    done = prune_folder(folder, keep, delete=delete, incomplete=incomplete)
    if as_json:
        write_text(json.dumps(done.as_dict(), indent=2))
    else:
        for item in done.keep:
            about = f"  {human_bytes(item.nbytes)}  {item.reason}"
            write_line(("keep    ", "green"), (item.name, "bold"), (about, "dim"))
        for item in (*done.leftovers, *done.remove):
            label = "removed " if delete else "remove  "
            write_line((label, "red"), (item.name, "bold"), (f"  {human_bytes(item.nbytes)}  {item.reason}", "dim"))
        for line in done.failed:
            write_line(("failed: ", "bold red"), (line, ""), err=True)
        count = plural(len(done.remove) + len(done.leftovers), "checkpoint")
        freed = human_bytes(done.nbytes)
        tail = "removed" if delete else "would go; --delete removes them"
        write_line((f"{count}, {freed} {tail}" if done.remove or done.leftovers else "nothing to remove", ""))
    if done.failed:
        raise typer.Exit(1)
