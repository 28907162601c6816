"""Inputs on which a parser once failed, and some new ones for each target."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from lazyckpt import LazyckptError

from ..lanes import rounds
from .contract import Target, attempt
from .drive import Crashers, inputs, regressions, run
from .mutate import GRAMMARS
from .registry import TARGETS

REGRESSIONS = [(name, path) for name, target in TARGETS.items() for path in regressions(target)]


@pytest.mark.parametrize(("name", "path"), REGRESSIONS, ids=[f"{name}-{path.name}" for name, path in REGRESSIONS])
def test_past_failures(name: str, path: Path) -> None:
    assert attempt(TARGETS[name], path.read_bytes()) is None


def test_every_regression_has_a_target() -> None:
    folder = Path(__file__).parent / "regressions"
    assert {path.name for path in folder.iterdir()} <= set(TARGETS)


@pytest.mark.parametrize("name", TARGETS)
def test_genuine_inputs_are_accepted(name: str) -> None:
    target = TARGETS[name]
    seeds = target.seeds()
    assert seeds
    assert target.seeds() == seeds, "each run is to have the same inputs"
    accepted = 0
    for data in seeds[:: max(1, len(seeds) // 8)]:
        try:
            target.run(data)
            accepted += 1
        except LazyckptError:
            pass
    assert accepted, "no seed gets past the parser: the target tests nothing"


@pytest.mark.parametrize("name", TARGETS)
def test_some_new_inputs(name: str) -> None:
    target = TARGETS[name]
    found = []
    run(target, seed=1, seconds=0, found=lambda data, crash: found.append(crash), least=rounds(8), most=rounds(8))
    assert not found


# -- the machinery itself


def test_inputs_depend_only_on_the_seed_and_their_number() -> None:
    target = TARGETS["documents.manifest"]
    some = list(inputs(target, 7, 0, 30))
    assert some == list(inputs(target, 7, 0, 30))
    assert some[20:] == list(inputs(target, 7, 20, 10))
    assert some[5:] != list(inputs(target, 8, 0, 30))[5:]


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_mutators_change_anything(grammar: str) -> None:
    rng = random.Random(3)
    for data in (b"", b"{}", b"\x80\x02}.", b"PK\5\6" + bytes(18), bytes(range(256))):
        for _ in range(50):
            assert isinstance(GRAMMARS[grammar](rng, [data, b"x"]), bytes)


def _fails(data: bytes) -> None:
    if data.startswith(b"key"):
        raise KeyError(data)
    if data.startswith(b"exit"):
        os._exit(3)
    if data.startswith(b"abort"):
        os.kill(os.getpid(), signal.SIGKILL)
    if data.startswith(b"fine"):
        raise LazyckptError("refused")
    if data.startswith(b"long"):
        raise _LongError


class _LongError(LazyckptError):
    def __str__(self) -> str:
        return "x" * 10_000


def test_crashes_are_found_and_kept(tmp_path: Path) -> None:
    """Exceptions, and the death of the process; each kind is kept once."""
    seeds = [b"key", b"fine", b"key2", b"exit", b"ok", b"abort", b"long"]
    target = Target("tests.fails", _fails, lambda: seeds)
    crashers = Crashers(tmp_path)
    kept = []
    count = run(
        target, 1, 0, lambda data, crash: kept.append(crashers.add(target, data, crash)), len(seeds), len(seeds)
    )
    assert count == len(seeds)
    paths = [path for path in kept if path is not None]
    assert sorted(path.read_bytes() for path in paths) == [b"abort", b"exit", b"key", b"long"]
    assert all(path.with_name(path.name + ".txt").exists() for path in paths)
    assert len(kept) == 5
