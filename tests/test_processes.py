"""Programs that are forked behave as those that a fresh interpreter runs."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from . import processes

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("pass", 0),
        ("import sys; sys.exit(3)", 3),
        ("import sys; sys.exit('no')", 1),
        ("raise SystemExit", 0),
        ("1 / 0", 1),
        ("import os; os._exit(9)", 9),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
    ],
)
def test_exit_statuses(code: str, status: int) -> None:
    assert processes.run("-c", code).returncode == status


def test_streams_arguments_and_environment() -> None:
    code = "import os, sys; print(sys.argv, sys.stdin.read(), os.environ['A']); print('e', file=sys.stderr)"
    done = processes.run("-c", code, "one", "two", env=os.environ | {"A": "b"})
    assert (done.stdout, done.stderr) == ("['-c', 'one', 'two']  b\n", "e\n")
    assert "ZeroDivisionError" in processes.run("-c", "1 / 0").stderr


def test_a_module_is_run_as_a_program() -> None:
    done = processes.run("-m", "lazyckpt", "--version")
    assert done.returncode == 0 and done.stdout.startswith("lazyckpt ")


def test_what_one_program_changes_the_next_does_not_see() -> None:
    assert processes.run("-c", "import lazyckpt; lazyckpt.open = None").returncode == 0
    assert processes.run("-c", "import lazyckpt; assert lazyckpt.open is not None").returncode == 0


def test_a_program_that_does_not_end() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        processes.run("-c", "import time; time.sleep(60)", timeout=0.5)
    assert processes.run("-c", "pass").returncode == 0
