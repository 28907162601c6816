"""`lazyckpt verify`: whether a checkpoint is whole and its values are sane."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from ..errors import DataError
from ..runs.verify import verify as verify_path
from ..runs.view import RunView
from ..view import CheckpointView
from .console import write_line, write_text
from .options import BaseOption, FailOnOption, JsonOption, PathArg, checked_severity
from .workers import target_of_work


def verify(
    path: PathArg,
    quick: Annotated[bool, typer.Option("--quick", help="Read no tensor data: files, names, shapes.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Also compare replicas, and fp32 with 16-bit weights.")] = False,
    run: Annotated[bool, typer.Option("--run", help="Check every checkpoint of the folder of a run.")] = False,
    against: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Compare with a manifest of `lazyckpt digest`.")
    ] = None,
    fail_on: FailOnOption = "error",
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print every finding.")] = False,
    as_json: JsonOption = False,
    sarif: Annotated[bool, typer.Option("--sarif", help="Print SARIF 2.1.0 for code scanning.")] = False,
    memory: Annotated[str | None, typer.Option(metavar="SIZE", help="Memory for the work in flight: 2GB")] = None,
    base: BaseOption = None,
    workers: Annotated[int | None, typer.Option(min=1, metavar="N", help="Use N processes.")] = None,
    cluster: Annotated[str | None, typer.Option(metavar="WHERE", help="Use a cluster: dask://HOST:PORT, slurm")] = None,
) -> None:
    """Check whether a checkpoint is whole and its values are sane.

    By default every byte is read once. Finds missing and damaged files, wrong checksums, NaN, infinities, outliers,
    dead rows, and impossible moments.

    Exit codes: 0 good, 1 findings at or above --fail-on, 2 PATH cannot be opened.
    """
    if (quick and full) or (as_json and sarif):
        raise DataError("--quick and --full, and --json and --sarif, exclude each other: leave one out")
    if run and base is not None:
        raise DataError("--run checks the checkpoints of a run, whose bases are in it: leave out --base")
    checked_severity(fail_on)  # before everything is read
    level: Literal["quick", "default", "full"] = "quick" if quick else "full" if full else "default"
    with target_of_work(workers, cluster) as executor:
        report = verify_path(_opened(path, run, base), level=level, against=against, executor=executor, memory=memory)
    if base is not None:  # as the user wrote it: a view of a delta has several roots
        report = replace(report, path=path)
    if as_json or sarif:
        write_text((report.to_sarif() if sarif else report.to_json()).removesuffix("\n"))
    else:
        for line in report.lines(verbose):
            write_line(*line)
    code = report.exit_code(checked_severity(fail_on))
    if code:
        raise typer.Exit(code)


def _opened(path: str, run: bool, base: str | None) -> CheckpointView | str:
    """Return what is checked: a run, a delta with its base, or the path."""
    if run:
        return RunView(path)
    return path if base is None else CheckpointView(path, base=base)
