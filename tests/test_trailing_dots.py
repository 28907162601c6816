"""A path that ends with a dot finds what it finds without the dot, not another tensor."""

from __future__ import annotations

from pathlib import Path

import torch

import lazyckpt


def test_a_dot_behind_a_name_finds_no_other_tensor(tmp_path: Path) -> None:
    torch.save({"up.weight": torch.zeros(2), "ema.up.weight": torch.ones(2)}, tmp_path / "x.pt")
    view = lazyckpt.open(tmp_path / "x.pt")
    assert view["up.weight."].name == "up.weight"
    assert list(view["up."]) == ["weight"]
    assert view["up."]["weight"].name == "up.weight"
    assert "up.weight." in view and view.get("up.weight.") is view["up.weight"]
