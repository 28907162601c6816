"""The command line of the benchmarks; `python -m benchmarks --help`."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from . import machine, report, suite
from .case import Settings

ROOT = Path(__file__).parents[1]


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["plots"]:
        from . import plots

        return plots.main(arguments[1:])
    if arguments[:1] == ["page"]:
        from . import page

        return page.main(arguments[1:])
    return measure(arguments)


def measure(arguments: list[str]) -> int:
    """Run areas and print their table. Returns 1 if a goal is missed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure lazyckpt against named peers, in alternating pairs. Exit code 1 if a goal is missed.",
        epilog="Also: `python -m benchmarks plots FILE --to FOLDER`, `python -m benchmarks page FILE`.",
    )
    parser.add_argument("areas", nargs="*", default=list(suite.NAMES), help=f"which: {', '.join(suite.NAMES)}")
    parser.add_argument("--only", default="", metavar="TEXT", help="only rows whose text contains this")
    parser.add_argument(
        "--quick", action="store_true", help="smaller data, fewer pairs: 3 minutes (goals are for the full data)"
    )
    parser.add_argument("--list", action="store_true", help="list the rows without measuring")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "lazyckpt-benchmarks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to this file")
    parser.add_argument("--history", type=Path, metavar="FILE", help="add the result to this file, as a line of JSON")
    options = parser.parse_args(arguments)
    settings = Settings(options.folder, options.quick)
    try:
        suite.areas(options.areas)
    except ValueError as error:
        parser.error(str(error))
    if options.list:
        return _list(options.areas, settings, options.only)
    start, rows = time.perf_counter(), []
    about, revision = machine.describe(settings.data), machine.revision()
    print(report.describe(about))
    for area, found, taken in suite.run(options.areas, settings, options.only):
        rows += found
        if found:
            print(f"\n## {area.title}\n\n{report.table(found)}\n\n{area.name}: {taken:.0f} s", flush=True)
    print(f"\n{report.summary(rows)}; {time.perf_counter() - start:.0f} s in all")
    result = report.result(rows, about, revision, options.quick)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    if options.history:
        report.append(options.history, result)
    return int(any(row.met is False for row in rows))


def _list(names: list[str], settings: Settings, only: str) -> int:
    for area in suite.areas(names):
        found = suite.cases(area, settings, only)
        print(f"{area.name}: {area.title} ({sum(len(case.goals) for case in found)} rows)")
        for case in found:
            for text, goal in zip(case.texts(), case.goals, strict=True):
                print(f"    {text}" + ("" if goal.at_most is None else f"  [<= {goal.at_most:.3g}]"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
