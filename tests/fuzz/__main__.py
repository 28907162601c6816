"""``python -m tests.fuzz``: run the fuzz targets for a time or on some inputs each; keep inputs that make one fail."""

from __future__ import annotations

import argparse
import fnmatch
import random
import sys
import time
from pathlib import Path

from .contract import Crash, Target, attempt
from .drive import Crashers, Found, regressions, run
from .registry import TARGETS


def main() -> int:
    parser = argparse.ArgumentParser(prog="run fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="names or globs; default: all")
    limit = parser.add_mutually_exclusive_group()
    limit.add_argument("--minutes", type=float, default=1.0, help="for all targets together")
    limit.add_argument(
        "--inputs",
        type=int,
        metavar="N",
        help="for each target, after its regression files, whatever time they take; without --seed, the seed is 1: "
        "the same tree has the same inputs, everywhere",
    )
    parser.add_argument("--seed", type=int, default=0, help="a number that decides all inputs; 0: the time decides")
    parser.add_argument("--out", type=Path, default=Path("fuzz-crashers"), help="the folder for crashing inputs")
    parser.add_argument(
        "--engine",
        choices=("auto", "atheris", "own"),
        default="own",
        help="own: mutators that know the formats; atheris: guided by coverage, for one target",
    )
    parser.add_argument("--list", action="store_true", help="list the targets")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="run the one target given on a file")
    given = parser.parse_args()
    names = [name for name in TARGETS if not given.targets or any(fnmatch.fnmatch(name, g) for g in given.targets)]
    if given.list:
        print("\n".join(names))
        return 0
    if not names:
        parser.error(f"no target has such a name; there are {', '.join(TARGETS)}")
    if given.replay:
        crash = attempt(TARGETS[names[0]], given.replay.read_bytes())
        print("no crash" if crash is None else f"{crash.kind} in {crash.place}\n{crash.text}")
        return int(crash is not None)
    if given.engine != "own":
        from .coverage import guided

        return guided(TARGETS[names[0]], given.minutes, given.out, given.seed)
    targets = [TARGETS[name] for name in names]
    if given.inputs is not None:
        return _numbered(targets, given.inputs, given.seed or 1, given.out)
    return _timed(targets, given.minutes, given.seed or int(time.time()), given.out)


def _numbered(targets: list[Target], count: int, seed: int, out: Path) -> int:
    """Run each target on its regression files and on the inputs from the first to number ``count``."""
    print(f"{len(targets)} targets, {count} inputs each, --seed {seed}", flush=True)
    crashers, failures = Crashers(out), list[str]()
    total = {}
    for target in targets:
        found = _keeping(target, crashers, failures)
        past = regressions(target)
        for path in past:
            data = path.read_bytes()
            if (crash := attempt(target, data)) is not None:
                found(data, crash)
        total[target.name] = len(past) + run(target, seed, 0, found, count, count)
    return _told(total, failures, out)


def _timed(targets: list[Target], minutes: float, seed: int, out: Path) -> int:
    """Run targets in turn, each in rounds, so that a run that is interrupted has tried all."""
    print(f"{len(targets)} targets, {minutes:g} minutes, --seed {seed}", flush=True)
    crashers, failures = Crashers(out), list[str]()
    targets = random.Random(seed).sample(targets, len(targets))  # on a busy machine the last ones have little time
    end = time.monotonic() + minutes * 60
    total = dict.fromkeys((t.name for t in targets), 0)
    rounds = max(1, int(minutes // 5))
    for n in range(rounds):
        for k, target in enumerate(targets):
            left = len(targets) * (rounds - n) - k
            seconds = max(0.0, (end - time.monotonic()) / left)
            total[target.name] += run(target, seed + n, seconds, _keeping(target, crashers, failures), least=5)
    return _told(total, failures, out)


def _keeping(target: Target, crashers: Crashers, failures: list[str]) -> Found:
    """What is called for each crash of a target: it keeps the input and prints where, once for each kind."""

    def found(data: bytes, crash: Crash) -> None:
        path = crashers.add(target, data, crash)
        if path is not None:
            failures.append(f"{target.name}: {crash.kind} in {crash.place}: {path}")
            print(f"{failures[-1]}\n{crash.text}", flush=True)

    return found


def _told(total: dict[str, int], failures: list[str], out: Path) -> int:
    """Print how many inputs each target had; return the exit status."""
    for name, count in total.items():
        print(f"{name:28} {count:>9,} inputs")
    print(f"{sum(total.values()):,} inputs, {len(failures)} kinds of crashes{f' (in {out})' if failures else ''}")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
