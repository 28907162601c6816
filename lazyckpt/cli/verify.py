"""`lazyckpt verify`: whether a checkpoint is whole and its values are sane."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import typer

from ..errors import DataError
from ..runs.verify import verify as verify_path
from .console import write_line, write_text
from .options import JsonOption, PathArg
from .workers import target_of_work


class FailOn(StrEnum):
    """The least severity of a finding that makes the exit code 1."""

    error = "error"
    warning = "warning"
    note = "note"
    never = "never"


def verify(
    path: PathArg,
    quick: Annotated[bool, typer.Option("--quick", help="Read no tensor data: files, names, shapes.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Also compare replicas, and fp32 with 16-bit weights.")] = False,
    against: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Compare with a manifest of `lazyckpt digest`.")
    ] = None,
    fail_on: Annotated[FailOn, typer.Option("--fail-on", help="Least severity for exit code 1.")] = FailOn.error,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print every finding.")] = False,
    as_json: JsonOption = False,
    sarif: Annotated[bool, typer.Option("--sarif", help="Print SARIF 2.1.0 for code scanning.")] = False,
    memory: Annotated[str | None, typer.Option(metavar="SIZE", help="Memory for the work in flight: 2GB")] = None,
    workers: Annotated[int | None, typer.Option(min=1, metavar="N", help="Use N processes.")] = None,
    cluster: Annotated[str | None, typer.Option(metavar="WHERE", help="Use a cluster: dask://HOST:PORT, slurm")] = None,
) -> None:
    """Check whether a checkpoint is whole and its values are sane.

    By default every byte is read once: missing and damaged files, checksums, NaN, infinities, outliers, dead rows,
    moments that cannot be. PATH may be a run: every checkpoint of it is checked.

    Exit codes: 0 good, 1 findings at or above --fail-on, 2 it cannot be opened.
    """
    if (quick and full) or (as_json and sarif):
        raise DataError("--quick and --full, and --json and --sarif, exclude each other: leave one out")
    level: Literal["quick", "default", "full"] = "quick" if quick else "full" if full else "default"
    with target_of_work(workers, cluster) as executor:
        report = verify_path(path, level=level, against=against, executor=executor, memory=memory)
    if as_json or sarif:
        write_text((report.to_sarif() if sarif else report.to_json()).removesuffix("\n"))
    else:
        for line in report.lines(verbose):
            write_line(*line)
    code = report.exit_code(fail_on.value)
    if code:
        raise typer.Exit(code)
