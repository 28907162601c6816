"""Compare `lazyckpt scan` with picklescan, modelscan and fickling: what each finds, and its false alarms.

    python -m venv /tmp/peers && /tmp/peers/bin/pip install picklescan modelscan fickling numpy typing_extensions
    python tools/compare_scanners.py --peers /tmp/peers/bin/python --genuine tests/golden --genuine FOLDER

The malicious files are those of tests/scan_corpus.py; nothing loads them here. Genuine checkpoints are the archives
``*.tar.xz`` below a folder, or, if it has none, the folders two levels below it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import lazyckpt  # noqa: E402
from tests.scan_corpus import FILES, OTHERS, live  # noqa: E402

PEERS = ("picklescan", "modelscan", "fickling")
# Runs under the interpreter of the peers: folders on stdin, a verdict of each peer on each folder on stdout.
RUN_PEERS = r"""
import contextlib, io, json, logging, os, signal, sys, zipfile
from importlib.metadata import version

logging.disable(logging.CRITICAL)

def picklescan(folder):
    from picklescan.scanner import scan_directory_path
    found = scan_directory_path(folder)
    return "found" if found.issues_count else "failed" if found.scan_err else "clean"

def modelscan(folder):
    from modelscan.modelscan import ModelScan
    scan = ModelScan()
    summary = scan.scan(folder)["summary"]
    return "found" if summary["total_issues"] else "clean" if not scan._errors else "failed"

def fickling(folder):
    from fickling.loader import scan_file, scan_zip_archive
    verdict = "clean"
    for top, _, files in os.walk(folder):
        for name in files:
            path = os.path.join(top, name)
            if zipfile.is_zipfile(path):
                results = list(scan_zip_archive(path, graceful=True).values())
            else:
                with open(path, "rb") as f:
                    head = f.read(2)
                # it calls every file suspicious that is no pickle: give it those that look like one
                pickle = head[:1] == b"\x80" or path.endswith((".pkl", ".pt", ".pth", ".bin", ".ckpt", ".joblib"))
                results = [scan_file(path, graceful=True)] if pickle else []
            for one in results:
                if not one.is_safe and one.results:
                    return "found"
                if one.errors:
                    verdict = "failed"
    return verdict

def late(*_):
    raise TimeoutError

signal.signal(signal.SIGALRM, late)
out = {"versions": {name: version(name) for name in ("picklescan", "modelscan", "fickling")}, "verdicts": {}}
for folder in json.load(sys.stdin):
    verdicts = out["verdicts"][folder] = {}
    for scanner in (picklescan, modelscan, fickling):
        signal.alarm(60)
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                verdicts[scanner.__name__] = scanner(folder)
        except BaseException as e:
            verdicts[scanner.__name__] = "failed"
        finally:
            signal.alarm(0)
json.dump(out, sys.stdout)
"""


def peers(python: str, folders: list[Path]) -> dict[str, dict[str, str]]:
    """Return the verdicts of the peers: "found", "clean" or "failed"; and their versions under "versions"."""
    names = json.dumps([str(folder) for folder in folders])
    done = subprocess.run([python, "-c", RUN_PEERS], input=names, capture_output=True, text=True, check=True)
    out = json.loads(done.stdout)
    return {"versions": out["versions"], **out["verdicts"]}


def malicious(folder: Path) -> dict[str, list[tuple[str, Path]]]:
    """Write the malicious files; return the name and the folder of each, by group."""
    groups: dict[str, list[tuple[str, Path]]] = {}

    def write(group: str, name: str, files: dict[str, bytes | str]) -> None:
        place = folder / f"{sum(map(len, groups.values())):03}"
        for file, data in files.items():
            path = place / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data.encode() if isinstance(data, str) else data)
        groups.setdefault(group, []).append((name, place))

    marker = folder / "marker"
    for name, make in live().items():
        write("pickles that execute, as data.pkl", name, {"data.pkl": make(marker)})
    for name, (file, made) in FILES.items():
        write("os.system in other places", name, {file: made(marker)})
    for name, (files, _) in OTHERS.items():
        write("other code, and bombs", name, files)
    return groups


def genuine(folders: list[Path], scratch: Path) -> list[Path]:
    """Return the folders of genuine checkpoints."""
    found = []
    for folder in folders:
        archives = sorted(folder.rglob("*.tar.xz"))
        for archive in archives:
            place = scratch / f"{len(found):04}"
            with tarfile.open(archive) as tar:
                tar.extractall(place, filter="data")
            found.append(place)
        if not archives:
            found += sorted(one for one in folder.glob("*/*") if one.is_dir())
    return found


def ours(folder: Path) -> str:
    report = lazyckpt.scan(folder)
    return {"error": "found", "warning": "warned"}.get(str(report.worst), "clean")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peers", metavar="PYTHON", help="the interpreter that has the other scanners")
    parser.add_argument("--genuine", action="append", default=[], type=Path, metavar="FOLDER")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        groups = malicious(scratch / "malicious")
        good = genuine(options.genuine, scratch / "genuine")
        every = [place for group in groups.values() for _, place in group] + good
        verdicts = {str(place): {"lazyckpt": ours(place)} for place in every}
        columns = ["lazyckpt"]
        if options.peers:
            theirs = peers(options.peers, every)
            versions = theirs.pop("versions")
            print(", ".join(f"{peer} {version}" for peer, version in versions.items()), "\n")
            for place in every:
                verdicts[str(place)] |= theirs[str(place)]
            columns += PEERS
        print(f"| | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
        for group, cases in groups.items():
            counts = [Counter(verdicts[str(place)][one] for _, place in cases) for one in columns]
            cells = [f"{c['found'] + c['warned']} of {len(cases)}" for c in counts]
            print(f"| {group} | {' | '.join(cells)} |")
        if good:
            counts = [Counter(verdicts[str(place)][one] for place in good) for one in columns]
            cells = [f"{c['found']} of {len(good)}" for c in counts]
            print(f"| genuine checkpoints that are called dangerous | {' | '.join(cells)} |")
            cells = [f"{c['warned']}" if one == "lazyckpt" else "" for one, c in zip(columns, counts, strict=True)]
            print(f"| genuine checkpoints with warnings | {' | '.join(cells)} |")
        print(f"\n| technique | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
        words = {"found": "found", "warned": "warned", "clean": "-", "failed": "failed"}
        for group, cases in groups.items():
            print(f"| **{group}** |{' |' * len(columns)}")
            for case, place in cases:
                print(f"| {case} | {' | '.join(words[verdicts[str(place)][one]] for one in columns)} |")


if __name__ == "__main__":
    main()
