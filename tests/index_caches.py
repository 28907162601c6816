"""What tests of the index cache share."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import lazyckpt
from lazyckpt.formats import opening
from lazyckpt.formats.cache import state
from lazyckpt.formats.cache.opening import Cached

from .writers import Case


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache in which every folder is kept, also one that was just written."""
    monkeypatch.setenv("LAZYCKPT_CACHE", "1")
    monkeypatch.setenv("LAZYCKPT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(state, "MANY", 0)
    monkeypatch.setattr(state, "TICK", 0)
    monkeypatch.setattr(opening, "_indexes", {})
    return tmp_path / "cache" / "index"


def forget() -> None:
    """What another process does not know."""
    opening._indexes.clear()


def entries(cache: Path) -> list[Path]:
    return sorted(cache.glob("*.index"))


def opened_twice(path: Path, **options: object) -> tuple[lazyckpt.CheckpointView, lazyckpt.CheckpointView]:
    forget()
    first = lazyckpt.open(path, **options)
    forget()
    return first, lazyckpt.open(path, **options)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each look-up in the files whether it found an index that is used."""
    found: list[bool] = []
    load = Cached.load

    def counted(self: Cached) -> object:
        answer = load(self)
        found.append(answer is not None)
        return answer

    monkeypatch.setattr(Cached, "load", counted)
    return found


@pytest.fixture
def zero(zero_cases: Mapping[str, Case], tmp_path: Path) -> Path:
    """A checkpoint that tests may change."""
    shutil.copytree(zero_cases["zero3_sub_groups"].path, tmp_path / "ckpt")
    return tmp_path / "ckpt"


def rank_file(ckpt: Path) -> Path:
    """Return the first rank's file of optimizer states."""
    return sorted(ckpt.glob("*/*optim_states.pt"))[0]


def run(code: str) -> str:
    """Return what a program in a new process prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout
