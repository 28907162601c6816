"""The lines of Python that the explorer's pages show: each runs by itself, and gives the numbers of the page."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lazyckpt
from lazyckpt import demo
from lazyckpt.explore.api import Explorer
from lazyckpt.explore.subject import Subject
from lazyckpt.exploring import subject_of

plt = pytest.importorskip("matplotlib.pyplot")
NAME = 'a "quoted"; name\'.\u202e\n'


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    plt.switch_backend("agg")
    yield
    plt.close("all")


def asked(explorer: Explorer, path: str, /, **values: Any) -> Any:
    answer = explorer.answer(path, {name: str(value) for name, value in values.items()})
    assert answer.status == 200, answer.body
    if answer.type == "application/json":
        return json.loads(answer.body)
    length = int.from_bytes(answer.body[:4], "little")
    return {
        one["name"]: np.frombuffer(answer.body, one["dtype"], prod(one["shape"]), 4 + length + one["offset"]).reshape(
            one["shape"]
        )
        for one in json.loads(answer.body[4 : 4 + length])["arrays"]
    }


def lines(explorer: Explorer, page: str, **values: Any) -> dict[str, Any]:
    """Run all lines of a page, each in a namespace of its own."""
    found = {}
    for what, line in asked(explorer, "python", page=page, **values)["lines"].items():
        tree = ast.parse(line)
        last = tree.body.pop()
        assert isinstance(last, ast.Expr)
        names: dict[str, Any] = {}
        exec(compile(tree, "line", "exec"), names)
        try:
            found[what] = eval(compile(ast.Expression(last.value), "line", "eval"), names)
        except lazyckpt.LazyckptError as e:  # the page has the error, too
            found[what] = e
    return found


def drawn(axes: Any) -> Any:
    return np.ma.filled(np.ma.asarray(axes.images[0].get_array(), dtype=float), np.nan)


@pytest.fixture(scope="module")
def tensors(tmp_path_factory: pytest.TempPathFactory) -> Explorer:
    torch.manual_seed(0)
    weights = {NAME: torch.randn(600, 40), "cube": torch.randn(4, 5, 6).bfloat16(), "long": torch.randn(3000)}
    weights[NAME][3, 5] = torch.nan
    path = tmp_path_factory.mktemp("python") / "it's.pt"
    torch.save(weights, path)
    return Explorer(subject_of(path, options={"format": "torch"}))


PARTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"name": NAME}, {"rows": 300, "cols": 40}),  # as `rootTile` of the page
    (
        {"name": NAME, "how": "absmax", "view": "2.5,9,3,30.2", "scale": "symlog", "range": "full"},
        {"r0": 2, "r1": 9, "c0": 3, "c1": 31, "rows": 7, "cols": 28},
    ),
    ({"name": "cube", "dims": "2,0", "at": "1:3", "scale": "quantile"}, {"dims": "2,0", "at": "1:3"}),
    ({"name": "cube", "dims": "2,0", "at": "1:3", "limits": "-0.5,0.25"}, {"dims": "2,0", "at": "1:3"}),
    ({"name": "long", "view": "2,9,3,20"}, {"wrap": 64, "r0": 2, "r1": 9, "c0": 3, "c1": 20}),
]


@pytest.mark.parametrize("page, tile", PARTS)
def test_the_heat_map_and_the_values(tensors: Explorer, page: dict[str, Any], tile: dict[str, Any]) -> None:
    found = lines(tensors, "tensor", **page)
    cells = asked(tensors, "tensor/tile", name=page["name"], how=page.get("how", "mean"), **tile)
    (values,) = (cells[name] for name in ("mean", "absmax") if name in cells)
    wanted = np.abs(values) if page.get("how") == "absmax" else values
    np.testing.assert_allclose(drawn(found["heatmap"]), wanted, rtol=1e-6)
    if "limits" in page:
        assert found["heatmap"].images[0].get_clim() == (-0.5, 0.25)
    plane = {key: tile[key] for key in ("dims", "at", "wrap") if key in tile}
    norms = asked(tensors, "tensor/norms", name=page["name"], **plane)
    np.testing.assert_array_equal(found["norms"].rows, norms["rows"])
    np.testing.assert_array_equal(found["norms"].cols, norms["cols"])
    r0, c0 = tile.get("r0", 0), tile.get("c0", 0)
    height, width = len(found["values"]), len(found["values"][0])
    window = {"r0": r0, "r1": r0 + height, "c0": c0, "c1": c0 + width}
    table = asked(tensors, "tensor/values", name=page["name"], **plane, **window)["values"]
    rows = [[float(one) for one in row] for row in table]
    assert [pytest.approx([float(x) for x in row], rel=1e-6, nan_ok=True) for row in found["values"]] == rows
    if "spectrum" in found and page["name"] == "cube":
        singular = asked(tensors, "tensor/spectrum", name="cube", **plane)["values"]
        assert found["spectrum"].lines[0].get_ydata() == pytest.approx(singular)


def test_the_other_cards(tensors: Explorer) -> None:
    for params, scale in (({}, "linear"), ({"bins": "log", "counts": "log"}, "log")):
        found = lines(tensors, "tensor", name=NAME, row=7, **params)
        counted = asked(tensors, "tensor/histogram", name=NAME, bins=100, scale=scale)
        np.testing.assert_array_equal(found["histogram"].patches[0].get_data().values, counted["counts"])
        assert found["histogram"].get_yscale() == scale
    outliers = asked(tensors, "tensor/outliers", name=NAME, count=50)
    assert [list(index) for index in found["outliers"].indices] == [index for index, _ in outliers["largest"]]
    assert [list(index) for index in found["outliers"].odd_indices] == [[3, 5]]
    near = asked(tensors, "tensor/neighbours", name=NAME, row=7, count=50)["nearest"]
    assert [[one.row, one.cosine] for one in found["neighbours"]] == [one[:2] for one in near]
    assert found["tensor"].name == NAME
    error = json.loads(tensors.answer("tensor/spectrum", {"name": NAME}).body)["error"]  # of NaN
    assert str(found["spectrum"]) == error["message"]
    bits = asked(tensors, "tensor/bits", name="cube")
    shares = lines(tensors, "tensor", name="cube")["bits"].axes[0].patches
    assert [bar.get_height() for bar in shares] == pytest.approx(bits["ones"])


def test_a_group_and_the_architecture(tensors: Explorer, tmp_path: Path) -> None:
    torch.save({f"layers.{n}.{w}": torch.zeros(3, 4) for n in range(3) for w in "ab"}, tmp_path / "m.pt")
    explorer = Explorer(subject_of(tmp_path / "m.pt"))
    assert list(lines(explorer, "tree", path="layers.1")["group"]) == ["a", "b"]
    found = lines(explorer, "architecture", by="layers", unit="elements", zero=1, dp=2)
    answer = asked(explorer, "architecture")
    assert list(found["kinds"]) == [one["kind"] for one in answer["kinds"]]
    assert [list(block.layers) for block in found["layers"]] == [block["layers"] for block in answer["blocks"]]
    assert len(found["architecture"].patches) == 3  # layers
    memory = asked(explorer, "architecture/memory", zero=1, dp=2)
    assert [stage.nbytes for stage in found["memory"].stages] == [stage["nbytes"] for stage in memory["stages"]]
    files = lines(explorer, "ranks", states="own", of="tensors", file="m.pt")
    (bar,) = files["ranks"].patches
    assert bar.get_width() == files["files"].files["m.pt"].tensors == len(files["file"]) == 6


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Explorer:
    folder = tmp_path_factory.mktemp("trained")
    demo.write(folder)
    return Explorer(subject_of(folder / "zero3"))


def test_ranks_and_the_optimizer(trained: Explorer) -> None:
    held = asked(trained, "ranks", state="exp_avg")
    found = lines(trained, "ranks", state="exp_avg", states="own", of="files")
    counts = sorted(len(one["files"]) for one in held["ranks"] if one["rank"])
    assert sorted(drawn(found["ranks"]).ravel()) == counts
    assert [one.nbytes for one in found["files"].ranks] == [one["nbytes"] for one in held["ranks"]]
    assert sorted(drawn(lines(trained, "ranks")["ranks"]).ravel()) == sorted(
        one["nbytes"] for one in asked(trained, "ranks")["ranks"] if one["rank"]
    )
    answer = asked(trained, "layers", state="exp_avg")
    found = lines(trained, "optimizer", state="exp_avg", of="absmax")
    np.testing.assert_allclose(found["table"].values, np.array(answer["values"]["absmax"], float))
    assert found["layers"].images
    assert [list(row) for row in found["zeros"]] == answer["zeros"]
    steps = {row[0]: row[3] for row in asked(trained, "updates")["rows"]}
    assert {row.name: pytest.approx(row.ratio) for row in found["steps"]} == steps


def test_experts(tmp_path: Path) -> None:
    torch.manual_seed(0)
    weights = {f"model.layers.{n}.mlp.experts.{e}.up_proj.weight": torch.randn(6, 4) for n in (1, 2) for e in range(4)}
    torch.save(weights, tmp_path / "moe.pt")
    explorer = Explorer(subject_of(tmp_path / "moe.pt"))
    found = lines(explorer, "experts", layer=2)
    assert found["norms"].values.tolist() == asked(explorer, "experts")["norms"]
    assert found["likeness"].cosines.tolist() == asked(explorer, "experts/likeness", layer=2)["cosines"]
    assert found["experts"].images
    nearest = asked(explorer, "experts/nearest", layer=2)["cosines"]
    assert found["nearest"].values[1].tolist() == nearest
    assert drawn(found["alike"])[1] == pytest.approx(nearest)


def test_a_comparison(tmp_path: Path) -> None:
    torch.manual_seed(0)
    a = {"w": torch.randn(6, 8), "n": torch.arange(4), "layers.0.x": torch.randn(3), "layers.1.x": torch.randn(3)}
    torch.save({**a, "only": torch.ones(1)}, tmp_path / "a.pt")
    torch.save({name: t + 1 for name, t in a.items()}, tmp_path / "b.pt")
    explorer = Explorer(subject_of(tmp_path / "a.pt", tmp_path / "b.pt"))
    found = lines(explorer, "compare", name="w", view="1,4,0,8", range="full")
    rows = {row["name"]: row for row in asked(explorer, "compare/differences")["rows"]}
    assert {row.name: row.relative for row in found["differences"]} == {n: row["relative"] for n, row in rows.items()}
    tile = asked(explorer, "compare/tile", name="w", r0=1, r1=4, c0=0, c1=8)
    np.testing.assert_array_equal(drawn(found["picture"]), tile["mean"])
    assert len(found["grid"].axes) >= 2
    assert len(found["curves"].axes) >= 2
    assert lines(explorer, "tensor", name="w", side="b")["tensor"][0, 0] == a["w"][0, 0] + 1
    assert "other" not in asked(explorer, "python", page="tensor", name="w", side="b")["lines"]["tensor"]


def test_a_comparison_draws_what_the_page_draws_of_large_tensors_and_of_states_of_one_side(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(1, dtype=torch.bfloat16).expand(3000, 3000)}, tmp_path / "a.pt")
    explorer = Explorer(subject_of(tmp_path / "a.pt", tmp_path / "a.pt"))
    line = asked(explorer, "python", page="compare", name="w")["lines"]["picture"]
    body = explorer.answer("compare/tile", {"name": "w"}).body
    assert not json.loads(body[4 : 4 + int.from_bytes(body[:4], "little")])["exact"]  # 72 MB in float64
    assert "exact=False" in line
    demo.write(tmp_path)
    explorer = Explorer(subject_of(tmp_path / "zero3", tmp_path / "model"))
    assert asked(explorer, "compare", state="exp_avg")["counts"].keys() == {"only in a"}
    assert lines(explorer, "compare", state="exp_avg") == {}


def test_a_part_of_a_view(tmp_path: Path) -> None:
    demo.write(tmp_path)
    view = lazyckpt.open(tmp_path / "zero3")
    part = view["model.layers"]
    name = "0.self_attn.q_proj.weight"
    explorer = Explorer(subject_of(part))
    for of, wanted in (("", view[f"model.layers.{name}"]), ("update", view.updates()[f"model.layers.{name}"])):
        line = asked(explorer, "python", page="tensor", name=name, of=of)["lines"]["tensor"]
        assert torch.equal(eval(line, {"view": part})[...], wanted[...])


def test_a_run(tmp_path: Path) -> None:
    torch.manual_seed(0)
    for step in (10, 20):
        (tmp_path / f"step_{step}").mkdir()
        weights = {f"layers.{n}.{w}": torch.randn(3, 4) for n in range(2) for w in "ab"}
        weights |= {"grown": torch.randn(step), f"of {step}": torch.ones(1)}
        torch.save(weights, tmp_path / f"step_{step}" / "model.pt")
    explorer = Explorer(subject_of(tmp_path))
    kind = "layers.*.a"
    found = lines(explorer, "run", quantity="rms", kind=kind)
    course = asked(explorer, "run/course", kind=kind, quantity="rms")
    (panel,) = [ax for ax in found["dynamics"].axes if ax.lines]
    assert [line.get_ydata().tolist() for line in panel.lines] == course["values"]
    assert found["table"].kinds[:2] == (kind, "layers.*.b")
    assert lines(explorer, "run", state="stored") == {}
    first = lines(explorer, "tensor", name="layers.0.a", step=10)["tensor"]
    assert torch.equal(first[...], lazyckpt.open(tmp_path / "step_10" / "model.pt")["layers.0.a"][...])
    pair = {"step": 10, "with": 20}
    apart = lines(explorer, "compare", name="layers.0.a", **pair)
    rows = asked(explorer, "compare/differences", **pair)["rows"]
    assert {row.name: row.relative for row in apart["differences"]} == {row["name"]: row["relative"] for row in rows}
    np.testing.assert_array_equal(
        drawn(apart["picture"]), asked(explorer, "compare/tile", name="layers.0.a", **pair)["mean"]
    )
    for step, number in ((10, 0), (20, 0), (10, 1)):  # a view of a step is kept for the next request
        answer = asked(explorer, "tensor/histogram", name=f"layers.{number}.a", step=step)
        path = tmp_path / f"step_{step}" / "model.pt"
        assert answer["l2"] == pytest.approx(float(lazyckpt.open(path)[f"layers.{number}.a"][...].norm()))
    assert explorer.subject.at(10) is explorer.subject.at(10) is not explorer.subject.at(20)
    changed = lines(explorer, "tensor", name="layers.0.a", of="change")["heatmap"]
    np.testing.assert_array_equal(
        drawn(changed), asked(explorer, "tensor/tile", name="layers.0.a", of="change")["mean"]
    )


def test_options_that_are_plain_data_are_told(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "m.pt")
    view = lazyckpt.open(tmp_path / "m.pt", format="torch", rules={"w": "replicated"})
    line = asked(Explorer(Subject(view)), "python", page="tree")["lines"]["view"]
    assert (
        line
        == f"import lazyckpt; lazyckpt.open({str(tmp_path / 'm.pt')!r}, format='torch', rules={{'w': 'replicated'}})"
    )
    half = asked(Explorer(Subject(view.astype(torch.float16))), "python", page="tree")["lines"]["view"]
    assert half == "view"
