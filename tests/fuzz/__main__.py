"""``python -m tests.fuzz``: run the fuzz targets for a time, and keep the inputs on which one fails."""

from __future__ import annotations

import argparse
import fnmatch
import random
import sys
import time
from pathlib import Path

from .contract import Crash, Target, attempt
from .drive import Crashers, run
from .registry import TARGETS


def main() -> int:
    parser = argparse.ArgumentParser(prog="run fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="names or globs; default: all")
    parser.add_argument("--minutes", type=float, default=1.0, help="for all targets together")
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
    return _all([TARGETS[name] for name in names], given.minutes, given.seed or int(time.time()), given.out)


def _all(targets: list[Target], minutes: float, seed: int, out: Path) -> int:
    """Run targets in turn, each in rounds, so that a run that is interrupted has tried all."""
    print(f"{len(targets)} targets, {minutes:g} minutes, --seed {seed}")
    crashers = Crashers(out)
    failures: list[str] = []
    targets = random.Random(seed).sample(targets, len(targets))  # on a busy machine the last ones have little time
    end = time.monotonic() + minutes * 60
    total = dict.fromkeys((t.name for t in targets), 0)
    rounds = max(1, int(minutes // 5))
    for n in range(rounds):
        for k, target in enumerate(targets):
            left = len(targets) * (rounds - n) - k
            seconds = max(0.0, (end - time.monotonic()) / left)

            def found(data: bytes, crash: Crash, target: Target = target) -> None:
                path = crashers.add(target, data, crash)
                if path is not None:
                    failures.append(f"{target.name}: {crash.kind} in {crash.place}: {path}")
                    print(failures[-1], flush=True)

            total[target.name] += run(target, seed + n, seconds, found, least=5)
    for name, count in total.items():
        print(f"{name:28} {count:>9,} inputs")
    print(f"{sum(total.values()):,} inputs, {len(failures)} kinds of crashes{f' (in {out})' if failures else ''}")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
