"""lazyckpt is typed for its users: what typing_user.py says of the public API, mypy --strict finds to be so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy")

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("mypy")]  # two runs of mypy must not share a cache

ROOT = Path(__file__).parents[1]


def mypy(*arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(ROOT / ".mypy_cache"), *arguments]
    return subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def test_the_api_as_users_type_it() -> None:
    done = mypy("tests/typing_user.py")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_slip_is_found(tmp_path: Path) -> None:
    """The check above would pass, too, if all of lazyckpt were Any."""
    slip = tmp_path / "slip.py"
    slip.write_text('import lazyckpt\n\nwidth: str = lazyckpt.open("a").nbytes\nlazyckpt.open("a", tags="b")\n')
    done = mypy(str(slip))
    assert "slip.py:3: error: Incompatible types in assignment" in done.stdout
    assert "slip.py:4: error: Unexpected keyword argument" in done.stdout
