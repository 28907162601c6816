"""Draw docs/pictures/overview.png: rank files of a real checkpoint, one namespace, and which bytes a slice reads.

    python tools/make_picture.py              # trains a tiny Llama with DeepSpeed on 4 processes, then draws
    python tools/make_picture.py CHECKPOINT   # draws from one that is there

It needs matplotlib, and for the first lazyckpt's test extra. Everything in the picture is what lazyckpt says of the
checkpoint: fragments, names, ranges of bytes. The checkpoint is tensor-parallel over two ranks, and each of these has
its states cut over two data-parallel ranks by ZeRO-2; so a cut may be within a row.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.patches import ConnectionPatch, Rectangle

import lazyckpt
from lazyckpt.core.fragments import fragment_boxes
from lazyckpt.core.plan import plan
from lazyckpt.core.select import Selection

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "docs" / "pictures" / "overview.png"
NAME = "model.layers.0.mlp.down_proj.weight"
KEY = (slice(8, 12), slice(20, 30))
SHOWN = (
    "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.o_proj.weight",
    "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight", NAME,
    "model.layers.1.self_attn.q_proj.weight", "lm_head.weight",
)  # fmt: skip
COLOURS = (
    "#0072B2",
    "#8CC8EE",
    "#D55E00",
    "#F5C16C",
)  # Okabe and Ito's: blues, one tensor-parallel rank; reds, the other
INK, PALE, GREY = "#1a1a1a", "#e9ebee", "#5f6670"
MONO = "DejaVu Sans Mono"


class File(NamedTuple):
    """A rank file: what it has of the tensor, as bytes (start, stop), and which of these the slice reads."""

    path: str
    nbytes: int
    held: tuple[int, int]
    read: list[tuple[int, int]]


def checkpoint(folder: Path) -> Path:
    """A checkpoint that DeepSpeed writes: AutoTP on two ranks, ZeRO-2 on two."""
    sys.path.insert(0, str(ROOT))
    from tests.writers.deepspeed_launch import launch
    from tests.writers.deepspeed_specs import AutoTPSpec

    launch(folder, {"autotp": AutoTPSpec(stage=2, dp=2, heads=4, kv_heads=2, head_size=8, mlp=48, vocab=64)})
    return folder / "autotp"


def files_of(view: lazyckpt.CheckpointView, t: lazyckpt.LazyTensor) -> list[File]:
    """In the order of the fragments."""
    wanted: dict[str, list[int]] = {}
    for copy in plan(t.spec, Selection.all(t.spec.shape)[KEY].reads().want):
        places = copy.start + sum(np.ix_(*(np.arange(n) * s for n, s in zip(copy.shape, copy.strides, strict=True))))
        wanted.setdefault(copy.extent.path, []).extend(copy.extent.offset + places.ravel() * t.itemsize)
    found = []
    for fragment in t.fragments:
        extent: Any = fragment.extent
        held = (extent.offset, extent.offset + extent.shape[0] * extent.dtype.itemsize)
        found.append(
            File(extent.path, view.files[extent.path].size, held, _runs(wanted.get(extent.path, []), t.itemsize))
        )
    return found


def _runs(starts: list[int], size: int) -> list[tuple[int, int]]:
    """Elements of this size that begin at these bytes, as (start, stop) of what is adjacent."""
    runs: list[tuple[int, int]] = []
    for start in sorted(starts):
        if runs and runs[-1][1] == start:
            runs[-1] = runs[-1][0], start + size
        else:
            runs.append((start, start + size))
    return runs


def draw(view: lazyckpt.CheckpointView, target: Path) -> None:
    state = view.states["fp32"]
    t = state[NAME]
    files = files_of(view, t)
    plt.switch_backend("Agg")
    plt.rcParams.update({"font.family": "DejaVu Sans", "text.color": INK})
    figure = plt.figure(figsize=(16, 7.6), dpi=100, facecolor="white")
    left = figure.add_axes((0.015, 0.1, 0.345, 0.68))
    middle = figure.add_axes((0.4, 0.07, 0.24, 0.71))
    right = figure.add_axes((0.68, 0.155, 0.285, 0.625))
    for x, title, *below in (
        (0.015, "Rank files", "of 4 ranks: tensor-parallel, and ZeRO-2", "as DeepSpeed wrote them"),
        (0.4, "One namespace", 'view = lazyckpt.open("ckpt")', 'fp32 = view.states["fp32"]'),
        (0.68, "A slice reads only its bytes", f't = fp32["{NAME.partition(".")[2]}"]', "t[8:12, 20:30]"),
    ):
        figure.text(x, 0.945, title, fontsize=24, fontweight="bold", va="center")
        for y, text in zip((0.882, 0.838), below, strict=True):
            family = MONO if x > 0.1 else "DejaVu Sans"
            figure.text(x, y, text, fontsize=14.5 if x > 0.1 else 16, color=GREY, va="center", family=family)
    _draw_files(left, files)
    height = _draw_names(middle, state)
    _draw_tensor(right, t)
    _arrow(figure, left, middle, 1.015, -0.03, 0.5)
    _arrow(figure, middle, right, 1.03, -0.015, height)
    figure.text(0.015, 0.055, "black: what the slice reads", fontsize=15, va="center")
    read = sum(stop - start for file in files for start, stop in file.read)
    total = sum(info.size for info in view.files.values())
    count = sum(len(file.read) for file in files)
    told = f"{read:,} of {total:,} bytes: {count} ranges in {len(files)} files"
    figure.text(0.68, 0.055, told, fontsize=15, va="center", fontweight="bold")
    figure.savefig(target, metadata={"Software": None})
    plt.close(figure)


def _draw_files(axes: Any, files: list[File]) -> None:
    """Each file as a bar of its bytes, and below it what it has of the tensor, enlarged."""
    axes.set_xlim(0, 1)
    axes.set_ylim(len(files), 0)
    axes.axis("off")
    most = max(file.nbytes for file in files)
    longest = max(file.held[1] - file.held[0] for file in files)
    for n, (file, colour) in enumerate(zip(files, COLOURS, strict=True)):
        name = file.path.rpartition("/")[2].replace("_optim_states.pt", "...")
        axes.text(0, n + 0.13, name, fontsize=14, family=MONO, va="center")
        axes.text(1, n + 0.13, f"{file.nbytes:,} bytes", fontsize=13.5, color=GREY, va="center", ha="right")
        axes.add_patch(Rectangle((0, n + 0.25), file.nbytes / most, 0.17, color=PALE))
        start, stop = (at / most for at in file.held)
        axes.add_patch(Rectangle((start, n + 0.25), stop - start, 0.17, color=colour))
        width = 0.86 * (file.held[1] - file.held[0]) / longest
        at = min(max(0.0, (start + stop) / 2 - width / 2), 1 - width)
        for here, there in ((start, at), (stop, at + width)):
            axes.plot([here, there], [n + 0.42, n + 0.56], color=colour, linewidth=1)
        axes.add_patch(Rectangle((at, n + 0.56), width, 0.22, color=colour))
        scale = width / (file.held[1] - file.held[0])
        for low, high in file.read:
            x = at + (low - file.held[0]) * scale
            axes.add_patch(Rectangle((x, n + 0.56), (high - low) * scale, 0.22, color=INK))


def _draw_names(axes: Any, state: lazyckpt.CheckpointView) -> float:
    """-> the height of the tensor's line."""
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.axis("off")
    y = height = 1.05
    for n, name in enumerate(SHOWN):
        t: lazyckpt.LazyTensor = state[name]
        near = name == NAME or SHOWN[n - 1] == NAME
        y -= 0.133 if near else 0.1
        short = name.removeprefix("model.").removesuffix(".weight")
        weight, ink = ("bold", INK) if name == NAME else ("normal", GREY)
        if name == NAME:
            height = y
            frame = {"facecolor": "#fff4d6", "edgecolor": INK, "linewidth": 1.4, "clip_on": False}
            axes.add_patch(Rectangle((-0.02, y - 0.06), 1.04, 0.12, **frame))
        axes.text(0, y, short, fontsize=14, family=MONO, va="center", fontweight=weight)
        axes.text(1, y, "x".join(map(str, t.shape)), fontsize=14, family=MONO, va="center", ha="right", color=ink)
    axes.text(0, 0.07, f"... {len(state)} tensors, and the same in", fontsize=14.5, color=GREY, va="center")
    axes.text(0, 0.0, "weights, exp_avg, exp_avg_sq", fontsize=14, family=MONO, color=GREY, va="center")
    return height


def _draw_tensor(axes: Any, t: lazyckpt.LazyTensor) -> None:
    """Every element in the colour of the file that has it."""
    rows, columns = t.shape
    owner = np.full((rows, columns), -1)
    for n, fragment in enumerate(t.fragments):
        for _, box in fragment_boxes(fragment):
            owner[box.slices] = n
    assert (owner >= 0).all()
    axes.imshow(owner, cmap=mpl.colors.ListedColormap(COLOURS), vmin=-0.5, vmax=3.5, aspect="auto")
    axes.set_xticks(np.arange(-0.5, columns), minor=True)
    axes.set_yticks(np.arange(-0.5, rows), minor=True)
    axes.grid(which="minor", color="white", linewidth=0.7)
    axes.tick_params(which="both", length=0, labelsize=13.5, colors=GREY)
    axes.yaxis.tick_right()
    axes.set_xticks([0, 12, 24, 36, 47])
    axes.set_yticks([0, 8, 16, 24, 31])
    for side in axes.spines.values():
        side.set_visible(False)
    low, high = KEY
    corner = (high.start - 0.5, low.start - 0.5)
    axes.add_patch(Rectangle(corner, high.stop - high.start, low.stop - low.start, facecolor=INK, alpha=0.6))
    axes.add_patch(
        Rectangle(corner, high.stop - high.start, low.stop - low.start, fill=False, edgecolor=INK, linewidth=3)
    )


def _arrow(figure: Any, here: Any, there: Any, start: float, stop: float, height: float) -> None:
    """From one panel to the next, level; positions are in the units of their axes."""
    y = here.transAxes.transform((0, height))[1]
    level = there.transAxes.inverted().transform((0, y))[1]
    figure.add_artist(
        ConnectionPatch(
            (start, height), (stop, level), here.transAxes, there.transAxes, arrowstyle="-|>", color=INK, linewidth=2,
            mutation_scale=24, shrinkA=0, shrinkB=0,
        )
    )  # fmt: skip


def main() -> int:
    if len(sys.argv) > 1:
        draw(lazyckpt.open(sys.argv[1]), TARGET)
    else:
        with tempfile.TemporaryDirectory() as folder:
            draw(lazyckpt.open(checkpoint(Path(folder))), TARGET)
    print(f"{TARGET}: {TARGET.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
