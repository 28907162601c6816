"""The contract suite of `lazyckpt.testing` runs on a reader of another package: the one of CONTRIBUTING.md."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from lazyckpt import testing

TEXT = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text("utf-8")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The reader as an entry point."""
    found = re.search(r'```python\n("""mypackage/npy\.py""".*?)```', TEXT, re.DOTALL)
    assert found is not None
    (tmp_path / "npy_reader.py").write_text(found[1])
    info = tmp_path / "npy_reader-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: npy_reader\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[lazyckpt.readers]\nnpy = npy_reader:READER\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("npy_reader", None)


@pytest.mark.parametrize("check", testing.CHECKS, ids=lambda check: check.__name__)
def test_a_reader_of_another_package(check: testing.Check, installed: None, tmp_path: Path) -> None:
    array = np.random.default_rng(0).random((8, 4), "float32")
    np.save(tmp_path / "weights.npy", array)
    truth = {"weights": {"array": torch.from_numpy(array)}}
    check(testing.Case(tmp_path / "weights.npy", truth, {}))


def test_a_wrong_truth_is_found(installed: None, tmp_path: Path) -> None:
    np.save(tmp_path / "weights.npy", np.zeros((8, 4), "float32"))
    case = testing.Case(tmp_path / "weights.npy", {"weights": {"array": torch.ones(8, 4)}}, {})
    with pytest.raises(AssertionError, match="other bits"):
        testing.CHECKS[6](case)
