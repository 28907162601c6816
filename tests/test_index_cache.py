"""The index cache: the same views, in less time; and files in its folder that must not be used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import lazyckpt
from lazyckpt.errors import LazyckptError
from lazyckpt.formats import opening
from lazyckpt.formats.cache import folder, state
from lazyckpt.formats.cache.opening import Cached, kept

from . import recordings
from .conftest import Checkpoints
from .same_views import check_same


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


def checkpoints_below(root: Path) -> Iterator[Path]:
    for case in sorted(root.iterdir()):
        yield from (path for path in (case, *sorted(case.iterdir())) if path.is_dir()) if case.is_dir() else ()


# what is not kept, and why; all other recorded checkpoints are
UNKEPT = ("decided on use", "looked at on use", "a class", "several folders")


@pytest.mark.parametrize("group", recordings.GROUPS)
def test_views_from_the_cache_are_the_same(
    group: str, checkpoints: Checkpoints, cache: Path, loads: list[bool]
) -> None:
    found = 0
    reasons = []
    for path in checkpoints_below(checkpoints(group)):
        forget()
        try:
            first = lazyckpt.open(path)
        except LazyckptError:
            continue
        found += 1
        forget()
        loads.clear()
        second = lazyckpt.open(path)
        if not loads[-1]:
            why = [row["state"] for row in kept() if row.get("where") == first.root]
            assert why, path
            reasons += why
            continue
        check_same(first, second)
    assert found
    print(group, found, reasons)
    assert all(any(reason in line for reason in UNKEPT) for line in reasons), reasons
    assert len(reasons) <= found // 10 + 1


assert Callable and folder
