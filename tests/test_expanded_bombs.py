"""Small files with numbers that are too large to go through, or to print."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import lazyckpt
from lazyckpt import LazyckptError
from lazyckpt.core.box import tiles

from .hostility import deadline


def test_tiles_of_a_long_axis_are_made_one_by_one() -> None:
    assert next(iter(tiles((1 << 60, 2), 4))).stop == (2, 2)
    assert [b.start for b in tiles((2, 3), 2)] == [(0, 0), (0, 2), (1, 0), (1, 2)]
    assert [b.start for b in tiles((), 2)] == [()]


def test_one_number_expanded_to_an_exabyte_is_an_error_in_stats_and_diff(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"wide": torch.ones(1).expand(1 << 60), "plain": torch.ones(3)}, path)
    view = lazyckpt.open(path)
    with deadline():
        rows = {row.name: row for row in view.stats()}
        assert rows["wide"].error is not None
        assert rows["plain"].error is None
        found = {row.name: row.status for row in lazyckpt.diff(view, view).rows}
        assert found == {"wide": "unreadable", "plain": "equal"}
        with pytest.raises(LazyckptError):
            view["wide"].stats()
        with pytest.raises(LazyckptError):
            view.to_safetensors(tmp_path / "out.safetensors")
