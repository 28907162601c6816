"""`lazyckpt updates`: the norms of an optimizer's last steps in units of the weights'."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import DataError, DestinationError, printable
from ..inspect.updates import UpdateSize, UpdateTable
from ..runs.view import RunView
from ..show.updates import RunUpdates, Updates
from . import completing
from .console import write_line, write_text
from .options import BaseOption, FormatOption, JsonOption, PathArg, TagOption, open_view, part_of


def updates(
    path: PathArg,
    names: Annotated[
        str,
        typer.Argument(
            metavar="NAMES",
            help="A prefix or a glob: layers.3.mlp, '*.norm.weight'",
            show_default=False,
            autocompletion=completing.tensors,
        ),
    ] = "",
    run: Annotated[bool, typer.Option("--run", help="All checkpoints of the run in the folder, by step.")] = False,
    layers: Annotated[bool, typer.Option("--layers", help="A row for each layer, not for each parameter.")] = False,
    optimizer: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="adamw, adam, lion, sgd, adafactor, muon",
            autocompletion=completing.words("adamw", "adam", "lion", "sgd", "adafactor", "muon"),
            show_default=False,
        ),
    ] = None,
    lr: Annotated[
        float | None, typer.Option(metavar="RATE", help="The learning rate of the last step.", show_default=False)
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="An option in place of the recorded one, the value as JSON; repeatable: betas=[0.9,0.95]",
            show_default=False,
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw a heat map into a .png, .svg or .pdf.", show_default=False)
    ] = None,
    lines: Annotated[bool, typer.Option("--lines", help="With --run, draw lines in place of the heat map.")] = False,
    tag: TagOption = None,
    format: FormatOption = None,
    base: BaseOption = None,
    as_json: JsonOption = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print the table as CSV.")] = False,
) -> None:
    """Compute how large the optimizer's last step was.

    The step is computed from the optimizer's states that the checkpoint has: for AdamW, SGD, Lion, Adafactor and Muon.
    When a training becomes unstable, its norm rises before the loss does. States and weights are read once.

    Lines on the standard error output say what is assumed, and what cannot be computed without further options.
    """
    if lines and not run:
        raise typer.BadParameter("--lines draws a run over its steps: add --run")
    if run and (tag is not None or format is not None or base is not None):
        raise typer.BadParameter("a run has all checkpoints of the folder: leave out --tag, --format and --base")
    options = _options(option or [])
    if lr is not None:
        options["lr"] = lr
    found: Updates | RunUpdates
    if run:
        found = RunView(path).updates(names or None, optimizer=optimizer, **options)
    else:
        found = part_of(open_view(path, None, False, tag, format, None, base), names).updates(
            optimizer=optimizer, **options
        )
    for problem in found.problems:
        write_line(("! ", "yellow"), (printable(str(problem)), ""), err=True)
    table = found.table()
    if plot is not None:
        _draw(found, plot, lines)
    table = table.layers if layers else table
    if as_json or as_csv:
        write_text(_json(table) if as_json else _csv(table))
    elif len(table):
        head, *rest = table.lines()
        write_line(*((f"{cell}  ", "bold") for cell in head), strip=True)
        for line in rest:
            odd = len(line) < len(head)
            write_line(*((f"{cell}  ", "red" if odd and c else "") for c, cell in enumerate(line)), strip=True)
    else:
        write_line(("(no updates)", "dim"))


def _options(given: list[str]) -> dict[str, Any]:
    """Return NAME=VALUE as a mapping. Raises DataError."""
    found: dict[str, Any] = {}
    for one in given:
        name, equals, text = one.partition("=")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        if not equals or not text:
            raise DataError(f"--option {one!r}: write NAME=VALUE, as in weight_decay=0.1")
        found[name] = value
    return found


def _draw(found: Updates | RunUpdates, path: Path, lines: bool) -> None:
    ax = found.plot(lines=lines) if isinstance(found, RunUpdates) else found.plot()
    figure: Any = ax.figure
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as e:
        raise DestinationError(f"--plot {path}: {e}") from None


def _json(table: UpdateTable) -> str:
    """Return the rows as JSON; NaN and infinities become null."""

    def plain(value: Any) -> Any:
        return None if isinstance(value, float) and not math.isfinite(value) else value

    rows = [{key: plain(value) for key, value in row.items()} for row in table.as_dicts()]
    return json.dumps({"updates": rows}, indent=2, allow_nan=False)


def _csv(table: UpdateTable) -> str:
    out = io.StringIO()
    columns = list(UpdateSize.__dataclass_fields__)
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    for row in table:
        values = [getattr(row, name) for name in columns]
        writer.writerow([printable(x) if isinstance(x, str) else x for x in values])
    return out.getvalue().removesuffix("\n")
