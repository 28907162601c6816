"""Plots: what is drawn is what the tensors hold. Nothing is shown, no setting changes."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lazyckpt
from lazyckpt.errors import DataError
from lazyckpt.inspect import stats as spectrum
from lazyckpt.inspect.ranks import ranks_of
from lazyckpt.inspect.stats import singular_values
from lazyckpt.show import style
from lazyckpt.show.layout import drawing
from lazyckpt.testing.counting import opened

from . import processes
from .writers import Case

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")


@pytest.fixture(autouse=True)
def nothing_else_changes() -> Iterator[None]:
    import matplotlib.pyplot as plt

    before = dict(matplotlib.rcParams)
    yield
    assert dict(matplotlib.rcParams) == before
    for number in plt.get_fignums():
        plt.figure(number).canvas.draw()  # all of it can be drawn
    plt.close("all")


def saved(folder: Path, tensors: dict[str, torch.Tensor]) -> lazyckpt.CheckpointView:
    torch.save(tensors, folder / "model.pt")
    return lazyckpt.open(folder / "model.pt", cache=False)


def notes_of(ax: Any) -> str:
    """The notes below the title."""
    return " ".join(text.get_text().replace("\n", " ") for text in ax.texts if text.get_gid() == "note")


def overlapping(ax: Any) -> int:
    """Labels of the vertical axis that are drawn over the one before."""
    ax.figure.canvas.draw()
    boxes = [label.get_window_extent() for label in ax.get_yticklabels() if label.get_text()]
    return sum(bool(one.overlaps(two)) for one, two in pairwise(boxes))


# -- histogram


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_hist(tmp_path: Path, dtype: torch.dtype) -> None:
    w = torch.randn(300, 50).to(dtype)
    w[0, :3] = torch.tensor([math.nan, math.inf, -math.inf])
    view = saved(tmp_path, {"a.w": w})
    ax = view["a.w"].plot.hist(bins=20)
    x = w.double().numpy()
    counts, edges = np.histogram(x[np.isfinite(x)], 20)
    drawn = ax.patches[0].get_data()
    assert drawn.values.tolist() == counts.tolist() and drawn.edges.tolist() == edges.tolist()
    assert ax.get_title() == "a.w"
    assert f"{'f32' if dtype == torch.float32 else 'bf16'} [300, 50]" in notes_of(ax)
    assert "not drawn: 1 NaN, 1 +Inf, 1 -Inf" in notes_of(ax)
    assert ax.get_xlabel() and ax.get_ylabel()
    again = view.plot.hist("a.w", [-1, 0, 1], ax=ax)
    assert again is ax and ax.patches[1].get_data().edges.tolist() == [-1, 0, 1]
    with pytest.raises(DataError, match="is no tensor"):
        view.plot.hist("a")


# -- norms


def marks(ax: Any) -> list[tuple[str, tuple[float, float]]]:
    return [(text.get_text(), text.get_position()) for text in ax.texts if text.get_gid() == "mark"]


def scales(ax: Any) -> list[str]:
    """The scale of each row, as it is written beside it."""
    return [text.get_text() for text in ax.texts if text.get_gid() == "scale"]


@pytest.mark.slow
def test_norms(tmp_path: Path) -> None:
    g = torch.Generator().manual_seed(0)
    layers, experts = 60, 3
    tensors = {"embed.weight": torch.randn(9, 4, generator=g)}
    for n in range(layers):
        tensors[f"layers.{n}.w1.weight"] = torch.randn(4, 4, generator=g) * (n + 1)
        for e in range(experts):
            tensors[f"layers.{n}.experts.{e}.up"] = torch.randn(4, generator=g)
    tensors["layers.7.extra"] = torch.ones(4)
    tensors["layers.3.w1.weight"][0, 0] = math.nan
    tensors["layers.4.w1.weight"] = torch.zeros(8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    view = saved(tmp_path, tensors)
    table = view.by_layer()
    assert table.kinds == ("embed.weight", "layers.*.w1.weight", "layers.*.experts.*.up", "layers.*.extra")
    norms = table.values
    assert norms.shape == (4, layers) and np.isnan(norms[0]).all()
    found = {(row["kind"], row["layer"]): row["norm"] for row in table}
    assert found["embed.weight", None] == pytest.approx(float(tensors["embed.weight"].norm()))
    assert norms[3, 7] == 2 and np.isnan(norms[3, 8]) and np.isnan(norms[1, 4])
    for n in range(layers):
        if n not in (3, 4):
            assert norms[1, n] == pytest.approx(float(tensors[f"layers.{n}.w1.weight"].norm()))
        together = torch.cat([tensors[f"layers.{n}.experts.{e}.up"] for e in range(experts)])
        assert norms[2, n] == pytest.approx(float(together.norm()))
    ax = view.plot.norms()
    (image,) = ax.images
    medians = np.nanmedian(norms[1:], axis=1)
    drawn = np.ma.filled(image.get_array(), np.nan)
    assert drawn[1:] == pytest.approx(np.log2(norms[1:] / medians[:, None]), nan_ok=True)  # each kind has its own scale
    assert np.isnan(drawn[0]).all() and scales(ax)[0] == f"{found['embed.weight', None]:.3g}"
    assert scales(ax)[1:4] == [f"{median:.3g}" for median in medians]
    assert marks(ax) == [("!", (3, 1)), ("?", (4, 1))]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["embed", "w1", "experts.*.up", "extra"]
    assert len(ax.get_xticklabels()) <= 16 and overlapping(ax) == 0
    lines = view.plot.layers("std", lines=True).lines
    assert len(lines) == 3 and len(lines[0].get_xdata()) == layers
    part = view["layers.5"].plot.norms()
    assert [t.get_text() for t in part.get_xticklabels()] == ["5"]
    with pytest.raises(DataError, match="no tensors"):
        view.select("nothing").plot.norms()
    with pytest.raises(DataError, match="no quantity 'size'"):
        view.plot.layers("size")


def test_quantities_by_layer(tmp_path: Path) -> None:
    g = torch.Generator().manual_seed(0)
    tensors = {f"h.{n}.w": torch.randn(6, 5, generator=g) - n for n in range(3)}
    tensors["h.1.w"][0] = 0
    view = saved(tmp_path, tensors)
    for quantity, want in {
        "rms": lambda w: w.square().mean().sqrt(),
        "mean": torch.mean,
        "absmax": lambda w: w.abs().max(),
        "zeros": lambda w: (w == 0).double().mean(),
    }.items():
        table = view.by_layer(quantity)
        assert table.values[0].tolist() == pytest.approx([float(want(w)) for w in tensors.values()], rel=1e-5)
        assert table.plot().images and table.plot(lines=True).lines
        assert f"{table.values[0, 2]:.3g}" in table._repr_html_()


def test_norms_of_zeros(tmp_path: Path) -> None:
    ax = saved(tmp_path, {"a.0": torch.zeros(3), "a.1": torch.empty(0)}).plot.norms()
    assert ax.images[0].get_array().tolist() == [[0, 0]]


def test_norms_beyond_float64(tmp_path: Path) -> None:
    tensors = {"a.0": torch.full((2,), 1.5e308, dtype=torch.float64), "a.1": torch.ones(4), "a.2": torch.ones(16)}
    ax = saved(tmp_path, tensors).plot.norms()
    assert ax.images[0].get_array().mask.tolist() == [[True, False, False]]
    assert marks(ax) == [("!", (0, 0))] and scales(ax)[0] == "3"


@pytest.mark.slow
def test_names_are_no_mathematics(tmp_path: Path) -> None:
    name = r"a.0.$\bad{$"
    view = saved(tmp_path, {name: torch.eye(4), "a.0.b$": torch.ones(2)})
    one = [getattr(view.plot, kind)(name) for kind in ("hist", "layout", "singular_values", "heatmap", "row_norms")]
    for ax in (*one, view.plot.norms(), view.plot.architecture(), view.plot.ranks(), *view.plot().axes):
        ax.figure.canvas.draw()  # raises ValueError for what is no formula
    torch.save({name: torch.ones(2)}, tmp_path / "step_1.pt")
    ax = lazyckpt.open_run(tmp_path).plot.steps(name)
    ax.legend()


# -- singular values


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(300, 40), (40, 300), (64, 64), (1, 7), (7, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_singular_values(
    tmp_path: Path, shape: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spectrum, "_PIECE", 40 * 16 * 7)  # many blocks, the last one smaller
    w = torch.randn(shape, dtype=torch.complex64 if dtype.is_complex else torch.float64).to(dtype)
    saved(tmp_path, {"w": w})
    view, counts = opened(tmp_path / "model.pt")
    counts.clear()
    found = singular_values(view["w"])
    assert counts.bytes == w.nbytes
    wide = w.to(torch.complex128 if dtype.is_complex else torch.float64)
    torch.testing.assert_close(found, torch.linalg.svdvals(wide), rtol=1e-9, atol=1e-9)
    ax = view["w"].plot.singular_values()
    assert ax.lines[0].get_ydata().tolist() == found.tolist()
    assert list(ax.lines[0].get_xdata()) == list(range(1, min(shape) + 1))
    assert ax.get_yscale() == "log"


def test_singular_values_are_as_accurate_as_is_said(tmp_path: Path) -> None:
    g = torch.Generator().manual_seed(0)
    u = torch.linalg.qr(torch.randn(200, 50, generator=g, dtype=torch.float64))[0]
    v = torch.linalg.qr(torch.randn(50, 50, generator=g, dtype=torch.float64))[0]
    true = torch.logspace(0, -12, 50, dtype=torch.float64)
    view = saved(tmp_path, {"w": u @ torch.diag(true) @ v.T})
    found = singular_values(view["w"])
    assert float((found - true).abs().max()) <= spectrum.noise(found)
    assert float(((found - true) / true)[true > 1e-5].abs().max()) < 1e-5
    ax = view["w"].plot.singular_values()
    assert ax.lines[1].get_ydata()[0] == pytest.approx(spectrum.noise(found))
    flat = singular_values(saved(tmp_path, {"w": torch.full((300, 400), 39.0)})["w"])
    assert float(flat[1]) < spectrum.noise(flat)  # its rank is 1


def test_what_has_no_singular_values(tmp_path: Path) -> None:
    tensors = {"cube": torch.ones(2, 3, 4), "large": torch.ones(1, 1).expand(9000, 9000), "odd": torch.ones(3, 3)}
    tensors["odd"][1, 1] = math.nan
    tensors["packed"] = torch.zeros(4, 4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    tensors["zero"] = torch.zeros(3, 2)
    view = saved(tmp_path, tensors)
    for name, message in {
        "cube": "3 dimensions",
        "large": "at most 8,192",
        "odd": "NaN",
        "packed": "no numbers",
    }.items():
        with pytest.raises(DataError, match=message):
            view.plot.singular_values(name)
    assert view.plot.singular_values("zero").lines[0].get_ydata().tolist() == [0, 0]


# -- steps


@pytest.mark.slow
def test_steps(tmp_path: Path) -> None:
    tensors = {step: torch.randn(6, 5) * step for step in (10, 20, 40)}
    for step, w in tensors.items():
        torch.save({"a.w": w, "b": torch.ones(2)}, tmp_path / f"step_{step}.pt")
    run = lazyckpt.open_run(tmp_path)
    for quantity, want, label in (
        ("norm", lambda w: w.norm(), "L2 norm"),
        ("std", lambda w: w.std(correction=0), "standard deviation"),
        ("max", torch.max, "max"),
        (torch.trace, torch.trace, "trace"),
    ):
        ax = run.plot.steps("a.w", quantity)
        (line,) = ax.lines
        assert list(line.get_xdata()) == [10, 20, 40]
        assert list(line.get_ydata()) == pytest.approx([float(want(w)) for w in tensors.values()], rel=1e-5)
        assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_title()) == ("step", label, "a.w")
    assert list(run["a.w"].lazy[1:].plot.steps().lines[0].get_xdata()) == [20, 40]
    assert run["a.w"].plot.hist().patches
    with pytest.raises(DataError, match="no quantity 'size'"):
        run.plot.steps("a.w", "size")
    for function in (torch.square, str):
        with pytest.raises(DataError, match="a number at every step"):
            run.plot.steps("a.w", function)
    with pytest.raises(DataError, match="no dimension of steps"):
        run["a.w"].lazy[0].plot.steps()
    assert not hasattr(run.at(10).plot, "steps")


# -- layout


def test_layout_reads_nothing(case: Case) -> None:
    view, counts = opened(case.path, **case.info.get("open", {}))
    some = sorted(view.values(), key=lambda t: len(t.fragments))[-2:]
    for t in some:
        drawn = drawing(t)
        counts.clear()
        ax = t.plot.layout()
        ax.figure.canvas.draw()
        assert counts.bytes == 0
        boxes = {(p.get_y(), p.get_y() + p.get_height(), p.get_x(), p.get_x() + p.get_width()) for p in ax.patches}
        assert boxes == {(*c.rows, *c.cols) for c in drawn.cells}
        holders = {h.label for h in drawn.holders}
        assert len({p.get_facecolor() for p in ax.patches}) <= len(holders)
        legend = ax.get_legend()
        if legend is not None:
            assert {text.get_text() for text in legend.get_texts()} == {style.short(label) for label in holders}


def test_layout_of_a_lost_file(dcp_hole: tuple[lazyckpt.CheckpointView, Case]) -> None:
    view, _ = dcp_hole
    t = max((t for t in view.values() if any(c.missing for c in drawing(t).cells)), key=lambda t: t.numel())
    ax = view.plot.layout(t.name)
    assert [bool(p.get_hatch()) for p in ax.patches] == [c.missing for c in drawing(t).cells]
    assert "its file is missing" in notes_of(ax)


def test_colours_tell_ranks_apart() -> None:
    for n in (1, 2, 16, 17, 300):
        colours = style.colours([f"dp {k}" for k in range(n)])
        assert len(set(colours.values())) == (n if n <= 256 else 256)


# -- values


def written(ax: Any, gid: str) -> list[str]:
    return [text.get_text() for text in ax.texts if text.get_gid() == gid]


def test_heat_maps(tmp_path: Path) -> None:
    g = torch.Generator().manual_seed(0)
    w = torch.randn(8, 12, generator=g)
    w[1, 2] = math.nan
    tensors = {"w": w, "positive": torch.rand(4, 6, generator=g), "cube": torch.randn(3, 4, 5, generator=g)}
    view = saved(tmp_path, tensors | {"long": torch.randn(3000, generator=g)})
    ax = view["w"].plot.heatmap()
    (image,) = ax.images
    assert np.ma.filled(image.get_array(), np.nan) == pytest.approx(w.double().numpy(), nan_ok=True)
    assert image.norm.vmin == -image.norm.vmax and "1 NaN" in notes_of(ax)
    assert [(line.get_xdata().tolist(), line.get_ydata().tolist()) for line in ax.lines] == [([2.0], [1.0])]
    ax = view.plot.heatmap("w", "absmax", cells=4)
    want = w.nan_to_num(0).abs().view(4, 2, 4, 3).amax((1, 3))
    assert np.asarray(ax.images[0].get_array()) == pytest.approx(want.double().numpy())
    assert "2 x 3 elements in a cell" in notes_of(ax) and ax.images[0].norm.vmin == 0
    assert view["positive"].plot.heatmap().images[0].norm.vmin >= 0
    part = view["cube"].plot.heatmap(dims=(0, 2), at={1: 3})
    assert np.asarray(part.images[0].get_array()) == pytest.approx(view["cube"][:, 3].double().numpy())
    assert view["long"].plot.heatmap().images[0].get_array().shape[1] == 64
    with pytest.raises(DataError, match="no pooling"):
        view["w"].plot.heatmap("median")
    held = view["w"].plot.heatmap(window=((0, 1), (0, 3)), limits=(-2, 0.5))
    assert held.images[0].get_clim() == (-2, 0.5)
    for wrong in ({"limits": (1, 1)}, {"limits": (0, 1), "scale": "quantile"}, {"limits": (0, 1), "full": True}):
        with pytest.raises(DataError, match="limits="):
            view["w"].plot.heatmap(**wrong)


def test_norms_of_rows_and_columns(tmp_path: Path) -> None:
    w = torch.ones(50, 20)
    w[7] *= 9
    w[30] = 0
    view = saved(tmp_path, {"w": w, "v": torch.ones(3)})
    ax = view["w"].plot.row_norms()
    assert ax.lines[0].get_ydata() == pytest.approx(w.norm(dim=1).numpy())
    assert written(ax, "outlier") == ["7"] and "1 row of norm 0" in notes_of(ax)
    assert view.plot.column_norms("w").lines[0].get_ydata() == pytest.approx(w.norm(dim=0).numpy())
    with pytest.raises(DataError, match="matrices"):
        view["v"].plot.row_norms()


def test_axes_that_count_have_whole_numbers(tmp_path: Path) -> None:
    view = saved(tmp_path, {"row": torch.randn(1, 40), "few": torch.tensor([0.5, 2.0, 3.0]), "none": torch.empty(0, 3)})
    for axis in (
        view["row"].plot.row_norms().xaxis,
        view["row"].plot.singular_values().xaxis,
        view["row"].plot.heatmap().xaxis,
        view["few"].plot.hist(bins=3).yaxis,
    ):
        assert axis.get_majorticklocs().tolist() == [round(place) for place in axis.get_majorticklocs()]
    for draw in (view["none"].plot.hist, view["none"].plot.row_norms, view["none"].plot.singular_values):
        with pytest.raises(DataError, match="no elements"):
            draw()


def test_bits(tmp_path: Path) -> None:
    w = torch.tensor([1.0, -1.0, 2.0, 0.5]).bfloat16()
    view = saved(tmp_path, {"w": w, "i": torch.tensor([1, -1], dtype=torch.int8), "f": torch.ones(2)})
    left, right = view["w"].plot.bits().axes
    patterns = w.view(torch.int16).int() & 0xFFFF
    assert [bar.get_height() for bar in left.patches] == [
        float((patterns >> bit & 1).double().mean()) for bit in reversed(range(16))
    ]
    assert {round(bar.get_x() + bar.get_width() / 2): bar.get_height() for bar in right.patches} == {0: 2, 1: 1, -1: 1}
    assert len(view.plot.bits("i").axes[0].patches) == 8
    with pytest.raises(DataError, match="8 and 16 bits"):
        view["f"].plot.bits()


# -- models


def areas(ax: Any) -> list[float]:
    return sorted(patch.get_width() * patch.get_height() for patch in ax.patches)


def test_architecture(tmp_path: Path) -> None:
    tensors = {f"layers.{n}.mlp.up.weight": torch.zeros(8, 4) for n in range(3)}
    tensors |= {"embed.weight": torch.zeros(10, 4, dtype=torch.bfloat16), "layers.0.norm.weight": torch.zeros(4)}
    view = saved(tmp_path, tensors)
    for quantity, sizes in (("bytes", [16, 80, 384]), ("parameters", [4, 40, 96])):
        ax = view.plot.architecture(quantity)
        found = areas(ax)
        assert found == pytest.approx([size / sum(sizes) * sum(found) for size in sizes])
        boxes = [(p.get_x(), p.get_y(), p.get_x() + p.get_width(), p.get_y() + p.get_height()) for p in ax.patches]
        for n, a in enumerate(boxes):  # none covers another
            assert all(min(a[2], b[2]) - max(a[0], b[0]) < 1e-9 or min(a[3], b[3]) - max(a[1], b[1]) < 1e-9
                       for b in boxes[:n])  # fmt: skip
    with pytest.raises(DataError, match="no quantity"):
        view.plot.architecture("flops")


def test_experts(tmp_path: Path) -> None:
    g = torch.Generator().manual_seed(0)
    alone = {f"layers.{n}.mlp.experts.{e}.{k}.weight": torch.randn(3, 4, generator=g) for n in (1, 2) for e in range(5)
             for k in ("up", "down")}  # fmt: skip
    alone["layers.2.mlp.experts.3.up.weight"] *= 0
    alone["layers.2.mlp.experts.3.down.weight"][0, 0] = math.inf
    view = saved(tmp_path, alone | {"layers.0.mlp.up.weight": torch.ones(2, 2)})
    ax = view.plot.experts()
    wide = {name: t.nan_to_num(0, 0, 0).double().norm() ** 2 for name, t in alone.items()}
    squares = [[sum(wide[f"layers.{n}.mlp.experts.{e}.{k}.weight"] for k in ("up", "down")) for e in range(5)]
               for n in (1, 2)]  # fmt: skip
    norms = np.sqrt(np.array(squares))
    want = np.log2(norms / np.median(norms, axis=1)[:, None])
    assert np.asarray(ax.images[0].get_array()) == pytest.approx(want, rel=1e-6)
    assert [t.get_text() for t in ax.get_yticklabels()] == ["1", "2"] and marks(ax) == [("!", (3, 1))]
    stacked = {f"layers.{n}.mlp.experts.up": torch.randn(5, 3, 4, generator=g) for n in range(2)}
    drawn = np.asarray(saved(tmp_path, stacked).plot.experts().images[0].get_array())
    norms = torch.stack(list(stacked.values())).double().flatten(2).norm(dim=2).numpy()
    assert drawn == pytest.approx(np.log2(norms / np.median(norms, axis=1)[:, None]), rel=1e-6)
    flat = [t.double().flatten(1) / t.double().flatten(1).norm(dim=1, keepdim=True) for t in stacked.values()]
    alike = torch.stack([(t @ t.T).fill_diagonal_(-1).max(dim=1).values for t in flat]).numpy()
    ax = saved(tmp_path, stacked).plot.experts("likeness")
    assert np.asarray(ax.images[0].get_array()) == pytest.approx(alike)
    opposite = saved(tmp_path, {"layers.0.mlp.experts.up": torch.tensor([[[1.0, 1]], [[-1, -1]]])})
    image = opposite.plot.experts("likeness").images[0]
    assert np.asarray(image.get_array()) == pytest.approx(np.full((1, 2), -1))
    assert image.norm(-1) == pytest.approx(0)  # the colour of the lowest value
    for name, quantity in (("w", "norm"), ("w", "likeness"), ("layers.0.mlp.experts.up", "cosine")):
        with pytest.raises(DataError, match="expert"):
            saved(tmp_path, {name: torch.ones(2, 2, 2)}).plot.experts(quantity)


def test_ranks(zero_cases: dict[str, Case], tmp_path: Path) -> None:
    view = lazyckpt.open(zero_cases["zero3_bf16_dp3"].path)
    held = np.asarray(view.plot.ranks().images[0].get_array())
    assert held.shape == (1, 3)
    assert held[0].tolist() == [rank.nbytes for rank in ranks_of(view.states.values()).ranks if rank.rank is not None]
    assert held.sum() >= view.nbytes
    shutil.copytree(view.root, tmp_path / "lost")
    next((tmp_path / "lost").glob("*/*pp_rank_1_*optim_states.pt")).unlink()
    ax = lazyckpt.open(tmp_path / "lost").plot.ranks()
    assert [bool(patch.get_hatch()) for patch in ax.patches] == [True] and "missing" in notes_of(ax)
    flat = saved(tmp_path, {"w": torch.ones(4)}).plot.ranks()
    assert [bar.get_width() for bar in flat.patches] == [16]


@pytest.mark.slow
def test_overviews(zero_cases: dict[str, Case], tmp_path: Path) -> None:
    view = lazyckpt.open(zero_cases["zero3_bf16_dp3"].path)
    titles = [ax.get_title() for ax in view.plot().axes]
    assert {"Parameters by kind", "What each rank holds", "L2 norm by layer and kind"} <= set(titles)
    t = max(view.values(), key=lambda t: t.numel())
    titles = [ax.get_title() for ax in t.plot().axes]
    assert {"Values", "Norms of rows", "Which rank holds what"} <= set(titles)
    assert len(view.plot.overview(t.name).axes) == len(t.plot.overview().axes)
    empty = saved(tmp_path, {"none": torch.empty(0, 3), "one": torch.tensor(2.0)})
    empty["one"].plot()
    with pytest.raises(DataError, match="no elements"):
        empty["none"].plot()
    import matplotlib.pyplot as plt

    before = plt.get_fignums()
    odd = saved(tmp_path, {"w": torch.zeros(4, 4, dtype=torch.uint8).view(torch.complex32)})
    with pytest.raises(DataError, match="no tensors"):
        odd.select("nothing").plot()
    assert plt.get_fignums() == before, "nothing is left of what failed"


# -- comparisons


def test_differences(tmp_path: Path) -> None:
    g = torch.Generator().manual_seed(0)
    a = {f"h.{n}.{kind}": torch.randn(5, 4, generator=g) for n in range(3) for kind in ("up", "down")}
    b = {name: t * (1 + 0.1 * (name == "h.1.up")) for name, t in a.items()}
    del b["h.2.down"]
    for name, tensors in (("a", a), ("b", b)):
        torch.save(tensors, tmp_path / f"{name}.pt")
    one, two = (lazyckpt.open(tmp_path / f"{name}.pt") for name in "ab")
    found = lazyckpt.diff(one, two)
    relative, cosine = found.plot().axes[:2]
    drawn = np.ma.filled(relative.images[0].get_array(), np.nan)
    assert drawn[0, 1] == pytest.approx(0.1, rel=1e-5) and np.isnan(drawn[1, 2])
    assert marks(relative) == [("?", (2, 1))] and cosine.get_title().startswith("Angle")
    assert len(found.plot(lines=True).axes[0].lines) == 2
    assert type(found.differing) is type(found) and len(found.differing) == 2
    same = lazyckpt.diff(one, one).plot().axes
    assert len(same) == 2, "there are no colours to explain"
    assert all("all values are 0" in written(ax, "all") for ax in same)
    html = found._repr_html_()
    assert "h.1.up" in html and "only in a" in html and "4 of 6 tensors are equal" in html
    ax = one.plot.difference(two, "h.1.up")
    want = a["h.1.up"] - b["h.1.up"]
    assert np.asarray(ax.images[0].get_array()) == pytest.approx(want.double().numpy(), abs=1e-7)
    with pytest.raises(DataError, match="shapes"):
        one.plot.difference(saved(tmp_path, {"h.1.up": torch.ones(2)}), "h.1.up")


@pytest.mark.slow
def test_dynamics(tmp_path: Path) -> None:
    g = torch.Generator().manual_seed(0)
    w = {n: torch.randn(3, 4, 5, generator=g) for n in (1, 2)}
    for at, step in enumerate((10, 20, 30)):
        state = {f"layers.{n}.w": t[at] for n, t in w.items()} | {"head": torch.ones(2) * (at + 1)}
        torch.save(state, tmp_path / f"step_{step}.pt")
    run = lazyckpt.open_run(tmp_path)
    norms = {n: t.flatten(1).norm(dim=1) for n, t in w.items()}
    table = run.by_layer()
    assert (table.steps, table.layers, table.kinds) == ((10, 20, 30), (1, 2), ("layers.*.w", "head"))
    assert table.values[0].tolist() == [pytest.approx(norms[n].tolist(), rel=1e-5) for n in (1, 2)]
    assert [row["norm"] for row in table if row["kind"] == "head"] == pytest.approx([n * 2**0.5 for n in (1, 2, 3)])
    growth = run.by_layer("growth").values[0, 1]
    assert growth.tolist() == pytest.approx((norms[2] / norms[2][0]).tolist(), rel=1e-5)
    for quantity, earlier in (("drift", [0, 0]), ("change", [0, 1])):
        found = run.by_layer(quantity)
        assert found.steps == (20, 30)
        want = [float((w[1][k] - w[1][e]).norm() / w[1][e].norm()) for k, e in zip((1, 2), earlier, strict=True)]
        assert found.values[0, 0].tolist() == pytest.approx(want, rel=1e-5)
    cosine = torch.nn.functional.cosine_similarity(w[1][2].flatten(), w[1][1].flatten(), 0)
    assert run.by_layer("cosine").values[0, 0, 1] == pytest.approx(float(cosine), rel=1e-5)
    figure = run.plot.dynamics("growth")
    panels = {ax.get_title(): ax for ax in figure.axes if ax.get_title()}
    assert list(panels) == ["w", "head"] and len(panels["w"].lines) == 2
    assert [ax.get_title() for ax in run.plot().axes if ax.get_title()] == ["w", "head"]
    with pytest.raises(DataError, match="no quantity 'speed'"):
        run.plot.dynamics("speed")


def contrast(one: Any, two: Any) -> float:
    """The contrast of two colours, as WCAG defines it."""
    low, high = sorted(style._luminance(matplotlib.colors.to_rgb(colour)) for colour in (one, two))
    return (high + 0.05) / (low + 0.05)


def test_dark(tmp_path: Path) -> None:
    """A figure is dark where matplotlib's are, or where it is drawn into a dark one; its text has contrast."""
    import matplotlib.pyplot as plt

    view = saved(tmp_path, {"w": torch.randn(6, 5)})
    with plt.style.context("dark_background"):
        dark = view["w"].plot.hist()
    light = view["w"].plot.hist()
    theirs = plt.figure(facecolor="#101010").subplots()
    assert view["w"].plot.hist(ax=theirs) is theirs
    for ax, face in ((dark, style.DARK), (light, style.LIGHT), (theirs, style.DARK)):
        assert all(contrast(tone, face.paper) > 1.8 for tone in style.shades(5, face))
        assert ax.title.get_color() == face.ink and ax.get_facecolor() == matplotlib.colors.to_rgba(face.paper)


@pytest.mark.parametrize("backend", ["module://matplotlib_inline.backend_inline", "agg"])
def test_a_notebook_shows_a_figure_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """The inline backend shows what is open when the cell ends, so the value of a cell is no longer open."""
    formatters = pytest.importorskip("IPython.core.formatters")
    plt = matplotlib.pyplot
    figure = saved(tmp_path, {"a.w": torch.ones(4, 4)})["a.w"].plot()
    monkeypatch.setattr(plt, "get_backend", lambda: backend)
    assert plt.fignum_exists(figure.number)
    assert not formatters.IPythonDisplayFormatter()(figure)  # IPython goes on to the other formatters
    assert plt.fignum_exists(figure.number) == (backend == "agg")


# -- without matplotlib


@pytest.mark.slow
def test_without_matplotlib(tmp_path: Path) -> None:
    saved(tmp_path, {"w": torch.ones(3, 3)})
    program = f"""
import sys
sys.modules["matplotlib"] = None
import lazyckpt
view = lazyckpt.open({str(tmp_path / "model.pt")!r})
for draw in (view["w"].plot.hist, view["w"].plot.singular_values, view["w"].plot.layout, view.plot.norms):
    try:
        draw()
    except lazyckpt.DataError as e:
        assert "pip install 'lazyckpt[plot]'" in str(e), e
    else:
        raise AssertionError("no error")
"""
    done = processes.run("-c", program)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_looking_at_plots_loads_nothing(tmp_path: Path) -> None:
    saved(tmp_path, {"w": torch.ones(3)})
    program = f"import sys, lazyckpt; v = lazyckpt.open({str(tmp_path / 'model.pt')!r}); v.plot, v['w'].plot.hist; "
    program += "assert 'matplotlib' not in sys.modules"
    assert processes.run("-c", program).returncode == 0


def test_plot_says_what_there_is_to_call(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "x.pt")
    view = lazyckpt.open(tmp_path / "x.pt")
    assert repr(view.plot).startswith("<plots of 1 tensor: .architecture(), .bits(),")
    assert repr(view["w"].plot).startswith("<plots of 'w': .bits(), .column_norms(), .heatmap(), .hist(), .layout(),")
