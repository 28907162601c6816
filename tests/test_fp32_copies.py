"""Weights that fp32 copies are compared with may be of any dtype, and have to be those that were opened."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import lazyckpt
from lazyckpt.errors import ChangedFileError
from lazyckpt.formats.shared.evidence import Copies, Undecided

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool)


def _undecided(path: Path, weights: dict[str, torch.Tensor]) -> Undecided:
    copies = {name.replace("weight", "copy"): t.float().clone() for name, t in weights.items()}
    torch.save({**weights, **copies}, path)
    view = lazyckpt.open(path)
    specs = {name: view[name].spec for name in view}
    about = Copies(
        "the optimizer",
        len(copies),
        {name: specs[name] for name in copies},
        {name: specs[name] for name in weights},
    )
    return Undecided(view._store, [about])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 7), (900,), (2, 1, 300)], ids=str)
def test_copies_tell_weights_of_every_floating_dtype_and_no_others(
    tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    weights = {f"weight.{n}": (torch.randn(shape) * 40).to(dtype) for n in range(3)}
    if dtype.is_floating_point:
        weights["weight.nan"] = torch.full(shape, torch.nan).to(dtype)
    found = _undecided(tmp_path / "x.pt", weights).names
    named = {number: name for number, (name, _) in found.items()}
    assert named == ({n.replace("weight", "copy"): n for n in weights} if dtype.is_floating_point else {})


def test_a_file_that_was_rewritten_decides_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    undecided = _undecided(path, {f"weight.{n}": torch.randn(4, 4).bfloat16() for n in range(3)})
    before = undecided.problems()
    torch.save({"other": torch.zeros(400)}, tmp_path / "new.pt")
    os.replace(tmp_path / "new.pt", path)
    with pytest.raises(ChangedFileError):
        _ = undecided.names
    assert undecided.problems() == before
