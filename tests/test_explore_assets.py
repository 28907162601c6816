"""The explorer's built application: it is that of its sources, small, and asks for nothing from elsewhere."""

from __future__ import annotations

import gzip
import re
import subprocess
from pathlib import Path

import pytest

from lazyckpt.explore.server import ASSETS, asset

FRONTEND = Path(__file__).parents[1] / "lazyckpt" / "explore" / "frontend"
needs_tools = pytest.mark.skipif(
    not (FRONTEND / "node_modules" / "esbuild").exists(),
    reason="the front end's tools are not installed: npm ci in lazyckpt/explore/frontend",
)


def node(*command: str) -> None:
    done = subprocess.run(command, cwd=FRONTEND, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_it_is_small() -> None:
    assert sum(len(gzip.compress(asset(name), 9)) for name in ASSETS) <= 300 << 10


def test_it_asks_for_nothing_from_elsewhere() -> None:
    text = asset("explorer.css").decode() + asset("explorer.js").decode()
    found = set(re.findall(r"(?:https?:)?//[a-z0-9.-]+\\.[a-z]{2,}[^\\s\"'`)]*", text))
    names = {one for one in found if "www.w3.org" not in one}  # the namespaces of SVG and MathML
    assert not names
    assert "@import" not in text


@pytest.mark.slow
@needs_tools
def test_it_is_that_of_its_sources(tmp_path: Path) -> None:
    node("node", "build.mjs", "--out", str(tmp_path))
    for name in ASSETS:
        assert (tmp_path / name).read_bytes() == asset(name), "build it: npm run build in lazyckpt/explore/frontend"


@pytest.mark.slow
@needs_tools
def test_its_types_are_right() -> None:
    node("npx", "tsc", "--noEmit")


@pytest.mark.slow
@needs_tools
def test_its_own_tests_pass() -> None:
    node("npm", "test")
