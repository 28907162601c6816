"""Run the test suites of other libraries, and compare all that their tests save with what lazyckpt reads.

    python tests/robustness/suites/run.py --suite torch=~/pytorch/test --suite accelerate=~/accelerate/tests

The suites are checkouts of the libraries' own repositories, of the versions that are installed. Nothing in them is
changed. README.md, beside this file, says what is compared and how a report is read.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from xml.etree import ElementTree

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]

# what to run of each suite by default: globs relative to the folder of its tests
SUITES = {
    "torch": ("test_serialization.py", "test_optim.py", "distributed/checkpoint/**/test_*.py"),
    "safetensors": ("tests/test_*.py",),
    "accelerate": ("test_state_checkpointing.py", "test_accelerator.py", "test_modeling_utils.py", "test_offload.py"),
    "lightning": (
        "tests_pytorch/checkpointing/test_*.py",
        "tests_pytorch/callbacks/test_model_checkpoint*.py",
        "tests_pytorch/models/test_restore.py",
        "tests_pytorch/plugins/test_*checkpoint*.py",
        "tests_fabric/plugins/io/test_*.py",
        "tests_fabric/test_fabric.py",
    ),
}


def files_of(suite: str, folder: Path, chosen: list[str]) -> list[Path]:
    """The files of tests to run, each once; `chosen` are globs that replace the suite's own."""
    globs = chosen or SUITES.get(suite, ("**/test_*.py",))
    return list(dict.fromkeys(file for glob in globs for file in sorted(folder.glob(glob))))


def run_file(file: Path, folder: Path, report: Path | None, options: list[str], seconds: float) -> dict[str, str]:
    """Run one file of tests in a process of its own.

    Parameters
    ----------
    report : where the savers' records go; without it nothing is watched.
    options : further options of pytest.
    seconds : the time that the file may take.

    Returns
    -------
    Name of a test -> its outcome.
    """
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if report is not None:
        paths = [str(HERE / "hook"), os.environ.get("PYTHONPATH", ""), str(ROOT)]
        env |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "SAVEWATCH_REPORT": str(report)}
    results = Path(os.environ.get("TMPDIR", "/tmp")) / f"savewatch-{os.getpid()}.xml"
    results.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={results}"]
    command += [*options, str(file)]
    pipe = subprocess.PIPE
    child = subprocess.Popen(
        command, cwd=folder, env=env, stdout=pipe, stderr=subprocess.STDOUT, start_new_session=True
    )
    note = ""
    try:
        output, _ = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        note = f"\nstopped after {seconds:.0f} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # with the ranks that it spawned
    if note:
        output, _ = child.communicate()
    said = output.decode(errors="replace").rstrip() + note
    if not results.exists():
        print(said[-2000:])
        return {str(file): "did not finish"}
    print(said.rpartition("\n")[2])
    outcomes = outcomes_of(results)
    results.unlink()
    return outcomes


def outcomes_of(results: Path) -> dict[str, str]:
    """The outcomes in a file of JUnit's format."""
    outcomes = {}
    for case in ElementTree.parse(results).iter("testcase"):
        kinds = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        outcomes[f"{case.get('classname')}::{case.get('name')}"] = kinds[0] if kinds else "passed"
    return outcomes


def _report_module() -> object:
    """`savewatch.report`, without putting the hook's folder on the path of this process."""
    spec = importlib.util.spec_from_file_location("savewatch_report", HERE / "hook" / "savewatch" / "report.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(arguments: list[str] | None = None) -> int:
    """The command. Returns 1 if something was read wrongly, or if watching changed the outcome of a test."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--suite", action="append", required=True, metavar="NAME=FOLDER", help="a folder of tests")
    parser.add_argument("--files", action="append", default=[], metavar="GLOB", help="run these files of the suites")
    parser.add_argument("--report", type=Path, default=Path("savewatch.jsonl"), help="where records are appended")
    parser.add_argument("--seconds", type=float, default=900, help="the time that one file may take")
    parser.add_argument("--neutral", action="store_true", help="run each file unwatched, too, and compare the outcomes")
    parser.add_argument("options", nargs="*", help="options of pytest, behind --")
    chosen = parser.parse_args(arguments)
    report = chosen.report.resolve()
    changed = []
    for suite in chosen.suite:
        name, _, where = suite.partition("=")
        folder = Path(where).expanduser().resolve()
        files = files_of(name, folder, chosen.files)
        if not files:
            parser.error(f"{folder} has no tests of {name}: name the folder that has {SUITES.get(name, ('tests',))[0]}")
        for file in files:
            began = time.monotonic()
            print(f"{name}: {file.relative_to(folder)}: ", end="", flush=True)
            outcomes = run_file(file, folder, report, chosen.options, chosen.seconds)
            if chosen.neutral:
                alone = run_file(file, folder, None, chosen.options, chosen.seconds)
                both = outcomes.keys() | alone.keys()
                changed += [
                    f"{test}: {alone.get(test)}, watched {outcomes.get(test)}"
                    for test in sorted(both)
                    if outcomes.get(test) != alone.get(test)
                ]
            print(f"    {time.monotonic() - began:.0f} s", flush=True)
    module = _report_module()
    records = module.read(report)  # type: ignore[attr-defined]
    print("\n" + module.summary(records))  # type: ignore[attr-defined]
    for line in changed:
        print(f"changed by watching: {line}")
    failed = any(record["outcome"] in module.FAILURES for record in records)  # type: ignore[attr-defined]
    return int(failed or bool(changed))


if __name__ == "__main__":
    sys.exit(main())
