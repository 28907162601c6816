"""`lazyckpt scan`: whether files are safe to load with programs that unpickle them."""

from __future__ import annotations

from typing import Annotated

import typer

from ..errors import DataError, some
from ..inspect.scan.folder import scan as scan_path
from .console import write_line, write_text
from .options import FailOnOption, JsonOption, checked_severity


def scan(
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="A file, a folder or a URL: any files.", show_default=False)
    ],
    fail_on: FailOnOption = "error",
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print every finding, and all names.")] = False,
    as_json: JsonOption = False,
    sarif: Annotated[bool, typer.Option("--sarif", help="Print SARIF 2.1.0 for code scanning.")] = False,
) -> None:
    """Tell whether files are safe to load with programs that unpickle them.

    Every pickle in every file is interpreted, and nothing is run.

    Errors: functions that can run code. Warnings: names that are not known to be harmless, and code beside the weights.
    Notes: classes of known packages.

    Exit codes: 0 good, 1 findings at or above --fail-on, 2 PATH cannot be opened.
    """
    if as_json and sarif:
        raise DataError("--json and --sarif exclude each other: leave one out")
    checked_severity(fail_on)  # before everything is read
    report = scan_path(path)
    if as_json or sarif:
        write_text((report.to_sarif() if sarif else report.to_json()).removesuffix("\n"))
    else:
        for line in report.lines(verbose):
            write_line(*line)
        if verbose:
            for grade, names in report.facts["names"].items():
                if names:
                    write_line((f"{grade}: ", "bold"), (some(names, 200), ""))
    code = report.exit_code(checked_severity(fail_on))
    if code:
        raise typer.Exit(code)
