"""`lazyckpt delta`: write what a checkpoint changes of another one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from ..core.units import human_bytes, plural
from ..runs.delta import Stored
from ..runs.delta import delta as delta_of
from . import completing
from .console import write_line, write_text
from .jobs import interruptible
from .options import JsonOption

_HOW = {"same": "unchanged", "xor": "difference", "overwrite": "rows that differ", "whole": "whole"}


def delta(
    new: Annotated[str, typer.Argument(metavar="NEW", help="The checkpoint to store.", show_default=False)],
    base: Annotated[
        str, typer.Argument(metavar="BASE", help="The checkpoint that readers have, too.", show_default=False)
    ],
    dest: Annotated[str, typer.Argument(metavar="DEST", help="A folder or a URL.", show_default=False)],
    state: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="State to store; may be given several times. By default all.",
            autocompletion=completing.states,
        ),
    ] = None,
    location: Annotated[
        str | None,
        typer.Option(
            metavar="PATH", help="Where readers find BASE: relative to DEST, or a URL (default: where it is)."
        ),
    ] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory for the work in flight (default: 1GiB).")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing delta.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read the output back and compare before publishing.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Compare, print the sizes, and write nothing.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print neither plan nor progress.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write what a checkpoint changes of another one.

    DEST is a delta checkpoint: `lazyckpt ls DEST` and all other commands open it like NEW, bit for bit, as long as BASE
    is at its place. Each tensor is stored in the smallest way: not at all, as the difference of the bits, as the rows
    that differ, or whole.

    Exit codes: 0 done; 2 an error.
    """
    found = delta_of(new, base, states=state)
    if not dry_run:
        found._check_place(dest, {"overwrite": overwrite})
    found.compare(memory=memory, progress=None if not quiet and not as_json else False)
    if not quiet and not as_json:
        _print(found.tensors, found.removed)
    written = None
    if not dry_run:
        with interruptible(dest):
            done = found.write(
                dest,
                location=location,
                memory=memory,
                overwrite=overwrite,
                verify=verify,
                progress=None if not quiet and not as_json else False,
            )
        written = done.nbytes
    if as_json:
        tensors = [asdict(one) for one in found.tensors]
        about = {"tensors": tensors, "removed": found.removed, "estimate": found.nbytes, "written": written}
        write_text(json.dumps(about, indent=2))
    elif not quiet:
        total = human_bytes(sum(one.nbytes for one in found.tensors))
        if written is None:
            write_line((f"about {human_bytes(found.nbytes)} of {total}; nothing is written (--dry-run)", ""))
        else:
            write_line((f"{dest}: {human_bytes(written)} of {total}", "green"))


def _print(tensors: Sequence[Stored], removed: Sequence[str]) -> None:
    kinds: dict[str, list[tuple[int, int]]] = {}
    for one in tensors:
        kinds.setdefault(one.how, []).append((one.nbytes, one.packed))
    for how, sizes in kinds.items():
        before, packed = (sum(size[n] for size in sizes) for n in range(2))
        text = f"{plural(len(sizes), 'tensor')}, {human_bytes(before)} as about {human_bytes(packed)}"
        write_line((f"{_HOW[how]:<17}", "bold"), (text, ""))
    if removed:
        write_line((f"{'not in NEW':<17}", "bold"), (plural(len(removed), "tensor"), ""))
