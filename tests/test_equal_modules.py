"""Optimizers of models whose modules are all equal: whole modules in another order have the same shapes, so no order of
one group is proven. Where the first or last module has shapes of its own, the names stay."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import lazyckpt

from .groupings import Named, optimizer_of, wrong_names


def _layers(ends: bool, count: int = 12) -> nn.Module:
    first, last = (nn.Linear(3, 4), nn.Linear(4, 2)) if ends else (nn.Linear(4, 4), nn.Linear(4, 4))
    return nn.Sequential(first, *(nn.Linear(4, 4) for _ in range(count)), last)


def _two_parts() -> nn.Module:
    return nn.ModuleDict({k: nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))) for k in ("generator", "critic")})


def _module(name: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", name)]


ORDERS: dict[str, Callable[[Named], Named]] = {
    "the modules, last first": lambda named: sorted(named, key=lambda item: _module(item[0]), reverse=True),
    "sorted names, reversed": lambda named: sorted(named, reverse=True),
    "the modules sorted by name": lambda named: sorted(named, key=lambda item: item[0].rpartition(".")[0]),
    "as the modules": list,
    "the parts, last first": lambda named: sorted(named, key=lambda item: item[0].startswith("generator")),
    "from the largest to the smallest": lambda named: sorted(named, key=lambda item: item[1].numel())[::-1],
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("model", [lambda: _layers(ends=False), _two_parts], ids=["layers", "two parts"])
def test_equal_modules_in_one_group_stay_under_numbers(
    tmp_path: Path, model: Callable[[], nn.Module], order: str
) -> None:
    built = model()
    optimizer, truth = optimizer_of([ORDERS[order](list(built.named_parameters()))])
    torch.save({"model": built.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    view = lazyckpt.open(tmp_path / "x.pt")
    assert wrong_names(view.states["exp_avg"], truth) == ([], 0)
    assert view.problems and len(view.states["exp_avg"]) == len(truth)


def test_equal_layers_between_others_have_their_names(tmp_path: Path) -> None:
    built = _layers(ends=True)
    optimizer, truth = optimizer_of([list(built.named_parameters())])
    torch.save({"model": built.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    view = lazyckpt.open(tmp_path / "x.pt")
    assert wrong_names(view.states["exp_avg"], truth) == ([], len(truth))
    assert view.problems == ()
