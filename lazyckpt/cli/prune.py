"""`lazyckpt prune`: remove or thin the older checkpoints of a run."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ..core.units import human_bytes, plural
from ..errors import DataError
from ..runs.prune import prune as prune_folder
from . import completing
from .console import write_line, write_text
from .options import JsonOption


def prune(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="The folder of a run, or its URL.", show_default=False)],
    keep: Annotated[int, typer.Option(metavar="N", help="Number of the newest complete checkpoints to keep.")],
    delete: Annotated[
        bool, typer.Option("--delete", help="Remove checkpoints; by default they are only listed.")
    ] = False,
    incomplete: Annotated[
        bool, typer.Option("--incomplete", help="Also remove incomplete ones; unsafe while a trainer is writing.")
    ] = False,
    thin: Annotated[
        bool, typer.Option("--thin", help="Keep the weights of the older ones, as deltas, instead of removing them.")
    ] = False,
    state: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="With --thin: keep this state; may be given several times.",
            autocompletion=completing.states,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Remove the older checkpoints of a run, or thin them.

    Keeps the newest N complete checkpoints, and those that `latest` or a similar file names. Without --delete nothing
    is removed.

    With --thin the others become deltas over the next newer checkpoint: their weights stay, bit for bit, and the
    moments of the optimizer are dropped. Each is read back before anything is removed. The run opens as before.

    Exit codes: 0 done or nothing to do, 1 something could not be removed, 2 an error and nothing was removed.
    """
    if state and not thin:
        raise DataError("--state is for --thin: leave it out")
    done = prune_folder(folder, keep, delete=delete, incomplete=incomplete, thin=tuple(state) if state else thin)
    if as_json:
        write_text(json.dumps(done.as_dict(), indent=2))
    else:
        for item in done.keep:
            about = f"  {human_bytes(item.nbytes)}  {item.reason}"
            write_line(("keep    ", "green"), (item.name, "bold"), (about, "dim"))
        for item in (*done.leftovers, *done.remove):
            label = "removed " if delete else "remove  "
            write_line((label, "red"), (item.name, "bold"), (f"  {human_bytes(item.nbytes)}  {item.reason}", "dim"))
        for one in done.thinned:
            label = "thinned " if delete else "thin    "
            sizes = f"  {human_bytes(one.before)} to {'' if delete else 'about '}{human_bytes(one.nbytes)}"
            about = f"  over {one.base}" if one.base else "  without a base"
            about += f", without {', '.join(one.dropped)}" if one.dropped else ""
            write_line((label, "yellow"), (one.name, "bold"), (sizes + about, "dim"))
        for line in done.failed:
            write_line(("failed: ", "bold red"), (line, ""), err=True)
        count = plural(len(done.remove) + len(done.leftovers), "checkpoint")
        freed = human_bytes(done.nbytes)
        if done.thinned:
            count = f"{plural(len(done.thinned), 'checkpoint')} thinned, " + (
                f"{count} removed, " if done.remove else ""
            )
            tail = "freed" if delete else "would be freed; --delete does it"
            write_line((f"{count}{freed} {tail}", ""))
        else:
            tail = "removed" if delete else "would be removed; --delete removes them"
            write_line((f"{count}, {freed} {tail}" if done.remove or done.leftovers else "nothing to remove", ""))
    if done.failed:
        raise typer.Exit(1)
