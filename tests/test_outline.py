"""Trees of huge views: what they cost, layers that are alike, and parts as ranges of sorted names."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import lazyckpt
from lazyckpt.cli import program
from lazyckpt.show.outline import outline
from lazyckpt.show.text import rows


def calls(work: Any) -> int:
    """How many functions of Python a piece of work calls: what it costs, whatever the machine."""
    count = 0

    def called(frame: FrameType, event: str, arg: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(called)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("outline") / "model.safetensors"
    one = torch.ones(2, dtype=torch.bfloat16)
    names = [f"model.layers.{n}.experts.{e}.{w}.weight" for n in range(40) for e in range(60) for w in ("up", "down")]
    save_file({name: one.clone() for name in names} | {"norm": torch.ones(3)}, path)
    return path


def test_a_second_repr_costs_what_it_shows(layers: Path) -> None:
    view = lazyckpt.open(layers)
    assert len(view) == 4801
    repr(lazyckpt.open(layers))  # imports
    assert calls(lambda: repr(view)) < 4 * 4801
    assert calls(lambda: repr(view)) < 3000, "however many names there are"


def test_alike_layers_are_one_line(layers: Path) -> None:
    text = repr(lazyckpt.open(layers))
    assert "0-39 (40 alike, 0 is shown)" in text and "0-59 (60 alike, 0 is shown)" in text
    assert "| bf16, f32" in text.splitlines()[0]
    assert "4,800 tensors" in text and "120 tensors" in text


def test_ls_folds_and_lists_all(layers: Path) -> None:
    folded = CliRunner().invoke(program.app, ["ls", str(layers)])
    assert folded.exit_code == 0 and len(folded.output.splitlines()) < 20 and "40 alike" in folded.output
    whole = CliRunner().invoke(program.app, ["ls", "--all", str(layers)])
    assert whole.exit_code == 0 and len(whole.output.splitlines()) > 4801 and "alike" not in whole.output


def test_a_whole_tree_costs_little_for_a_name(layers: Path) -> None:
    view = lazyckpt.open(layers)
    repr(view)  # imports, and the outline
    assert calls(lambda: rows(view)) < 45 * 4801
    assert sum(row.leaf for row in rows(view)) == 4801


def test_few_lines_are_not_folded(tmp_path: Path) -> None:
    save_file({f"layers.{n}.w": torch.ones(2) for n in range(8)}, tmp_path / "x.safetensors")
    assert "alike" not in repr(lazyckpt.open(tmp_path / "x.safetensors"))


def test_the_header_names_step_loss_and_dtypes(tmp_path: Path) -> None:
    tree = {"model": {"a": torch.ones(2), "b": torch.ones(2, dtype=torch.bfloat16)}, "step": 1200, "loss": 2.25}
    torch.save(tree, tmp_path / "x.pt")
    assert "| step 1,200 |" in repr(lazyckpt.open(tmp_path / "x.pt")).splitlines()[0]
    assert "| loss 2.25" in repr(lazyckpt.open(tmp_path / "x.pt")).splitlines()[0]


def test_a_part_costs_its_own_names(layers: Path) -> None:
    view = lazyckpt.open(layers)
    first = view["model.layers.3"]
    start = "model.layers.3."
    assert list(first) == [name.removeprefix(start) for name in view if name.startswith(start)]
    assert first["experts.59.down.weight"].name == "model.layers.3.experts.59.down.weight"
    assert calls(lambda: len(view["model.layers.4.experts.7"])) < 60
    assert sorted(view["model.layers.4"]["experts.7"]) == ["down.weight", "up.weight"]


def test_sums_of_an_outline_are_those_of_the_view(layers: Path) -> None:
    view = lazyckpt.open(layers)
    root = outline(view).root
    assert (root.tensors, root.numel, root.nbytes) == (len(view), view.numel, view.nbytes)
    part = view["model.layers.0"]
    (model,) = (node for node in root.children if node.label == "model")
    (inner,) = model.children
    first = inner.children[0]
    assert (first.tensors, first.numel, first.nbytes) == (len(part), part.numel, part.nbytes)
