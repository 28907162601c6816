"""A file that is read among others equals the same file read alone: checkpoints of many files, in every family."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

import lazyckpt
from lazyckpt.io.containers import torch_file as torchfile
from lazyckpt.io.containers.zip_directory import Directories
from lazyckpt.io.plain_json import encode

from .conftest import MEGATRON_KINDS, ZERO_KINDS
from .writers import Case

# (fixture, cases); every third or so of those that are alike
SAMPLES: dict[str, Iterable[str]] = {
    "zero_cases": (*ZERO_KINDS, "zero2_dp11"),
    "megatron_cases": MEGATRON_KINDS,
    "rank_cases": (),
    "dcp_cases": (),
    "trainer_cases": (),
}


def everything(path: Path) -> dict[str, Any]:
    """What a view says of a checkpoint: names, where each tensor lies, meta, problems."""
    with lazyckpt.open(path, cache=False) as view:
        said: dict[str, Any] = {
            state: {name: (t.shape, t.dtype, tuple(t.fragments)) for name, t in part.items()}
            for state, part in view.states.items()
        }
        stored = {name: (t.shape, t.dtype, tuple(t.fragments)) for name, t in view.stored.items()}
        return said | {
            "": (encode(dict(view.meta)), view.problems, view.aliases, view.mesh, view.format, sorted(view.files)),
            "stored tensors": stored,
        }


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], dict[str, Any]]:
    """The same where each file's pickle and directory are read as if there were no other file."""

    def read(path: Path) -> dict[str, Any]:
        pickle, directory = torchfile.Pickles.read, Directories.read
        with monkeypatch.context() as patch:
            patch.setattr(torchfile.Pickles, "read", lambda self, *args: pickle(torchfile.Pickles(), *args))
            patch.setattr(Directories, "read", lambda self, *args: directory(Directories(), *args))
            return everything(path)

    return read


@pytest.mark.slow
@pytest.mark.parametrize("fixture", SAMPLES)
def test_a_checkpoint_reads_as_if_each_file_were_read_alone(
    fixture: str, request: pytest.FixtureRequest, alone: Callable[[Path], dict[str, Any]]
) -> None:
    cases: dict[str, Case] = request.getfixturevalue(fixture)
    names = list(SAMPLES[fixture] or list(cases)[:: max(1, len(cases) // 10)])
    compared = 0
    for name in names:
        path = cases[name].path
        if sum(1 for file in path.rglob("*") if file.is_file()) < 2:
            continue
        try:
            together = everything(path)
        except lazyckpt.LazyckptError as e:  # of a case that cannot be read
            with pytest.raises(type(e)):
                alone(path)
            continue
        separate = alone(path)
        assert together.keys() == separate.keys(), name
        for part in together:
            assert together[part] == separate[part], (name, part)
        compared += 1
    assert compared > len(names) // 2
