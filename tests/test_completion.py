"""What Tab offers on views, by IPython's own completer with the settings that people have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import lazyckpt
from lazyckpt.core.names import Names
from lazyckpt.testing.counting import opened

Complete = Callable[[str], list[str]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    p = torch.nn.Parameter(torch.zeros(4, 4))
    optimizer = torch.optim.Adam([p])
    p.sum().backward()
    optimizer.step()
    weights = {f"model.layers.{n}.mlp.{w}": torch.zeros(2) for n in (0, 1, 10) for w in ("up", "down")}
    weights |= {"model.embed": p.detach(), "head": p.detach(), 'it\'s."odd"': torch.zeros(1)}
    path = tmp_path_factory.mktemp("completion") / "ckpt.pt"
    torch.save({"model": weights, "optimizer": optimizer.state_dict(), "epoch": 3}, path)
    return path


@pytest.fixture(scope="module")
def complete(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Complete:
    interactive = pytest.importorskip("IPython.core.interactiveshell", reason="IPython is not installed")
    from traitlets.config import Config

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPYTHONDIR", str(tmp_path_factory.mktemp("ipython")))
        shell = interactive.InteractiveShell(config=Config({"HistoryManager": {"enabled": False}}))
    shell.run_line_magic("load_ext", "lazyckpt")
    shell.user_ns["view"] = lazyckpt.open(path)

    def found(line: str) -> list[str]:
        _, matches = shell.complete(line, line, len(line))
        start = line[: line.rindex("[") + 2]
        return [match.removeprefix(start) for match in matches if match.startswith(start)]

    return found


@pytest.mark.parametrize(
    ("line", "want"),
    [
        ('view["mod', ["model", "model.embed", "model.layers", "model.layers.0"]),
        ('view["model.layers.1', ["model.layers.1", "model.layers.1.mlp", "model.layers.1.mlp.up", "model.layers.10"]),
        ('view["lay', ["layers", "layers.0", "layers.0.mlp.up"]),
        ("view['hea", ["head"]),
        ('view["model.layers"]["1', ["1", "1.mlp", "10.mlp.down"]),
        ('view.states["', ["weights", "exp_avg", "exp_avg_sq", "step"]),
        ('view.states["weights"]["model.emb', ["model.embed"]),
        ('view.stored["optimizer.', ["optimizer.state", "optimizer.state.0.exp_avg"]),
        ('view.files["', ["ckpt.pt"]),
        ('view.aliases["', ["head"]),
        ('view.meta["', ["epoch"]),
    ],
)
def test_what_tab_offers(complete: Complete, line: str, want: list[str]) -> None:
    found = complete(line)
    assert set(want) <= set(found), found
    typed = line[line.rindex("[") + 2 :]
    assert all(name.startswith(typed) for name in found)


def test_a_tensor_is_not_read(complete: Complete, path: Path) -> None:
    assert complete('view["head"]["') == [] == complete('view["head"][0]["')
    view, counts = opened(path)
    counts.clear()
    assert view._ipython_key_completions_() and list(view.states)
    assert counts.requests == 0


def test_everything_offered_leads_somewhere(path: Path) -> None:
    view = lazyckpt.open(path)
    offered = view._ipython_key_completions_()
    assert len(set(offered)) == len(offered) and set(view) <= set(offered)
    for name in offered:
        _ = view[name]


def test_numbers_are_offered_where_they_stand_first() -> None:
    """What is offered is sorted: of "blocks.0.up" there would be "0" and "0.up" on top."""
    assert Names(["blocks.0.up", "head"]).paths() == ["blocks", "head", "blocks.0", "blocks.0.up"]
    assert Names(["0.up"]).paths() == ["0", "0.up", "up"]


def test_what_is_offered_is_bounded() -> None:
    names = [f"model.layers.{n}.mlp.experts.{e}.{w}.weight" for n in range(126) for e in range(264) for w in "gud"]
    offered = Names(names).paths()
    assert len(offered) <= 20_000
    assert {"model", "model.layers", "model.layers.125.mlp.experts"} <= set(offered)
    assert max(name.count(".") for name in offered) == 4
    flat = [f"t{n}" for n in range(30_000)]
    assert Names(flat).paths() == flat, "one level is all that there is"
    assert Names([]).paths() == [] and Names([""]).paths() == [""]
