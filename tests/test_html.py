"""Views and tensors as HTML: whole documents that say what there is, of any names, and stay small."""

from __future__ import annotations

import re
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

import lazyckpt
from lazyckpt.core.box import c_strides
from lazyckpt.core.extents import Extent
from lazyckpt.core.index import Index
from lazyckpt.core.placement import Rank
from lazyckpt.core.specs import Fragment, TensorSpec, whole
from lazyckpt.io.storage.local import LocalStore
from lazyckpt.show.html.tree import ROWS, Row, plan
from lazyckpt.show.outline import outline
from lazyckpt.show.values import corners, sample, text_histogram
from lazyckpt.testing.contract import open_case
from lazyckpt.testing.counting import opened
from lazyckpt.view import CheckpointView

from .writers import Case

VOID = {"input", "br", "hr", "img", "meta"}
ALLOWED = {
    "div", "span", "ul", "li", "details", "summary", "code", "b", "p", "style", "script", "table", "thead", "tbody",
    "tr", "th", "td", "br",
}  # fmt: skip
NASTY = [
    "<img src=x onerror=alert(1)>.weight",
    "</script><script>alert(1)</script>.weight",
    "\"' onmouseover=alert(1) x='.weight",
    "&lt;b&gt;.weight",
    "\u202egnp.exe.weight",
    "\x1b[31mred\x00.weight",
    "$x^2$.weight",
    "a" * 5000 + ".weight",
    ".".join("deep" for _ in range(150)),
    "..",
    "",
]


class Document(HTMLParser):
    """An output, parsed: its elements balance, its text is what a reader sees without style and script."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: dict[str, int] = {}
        self.attributes: list[tuple[str, str]] = []
        self.words: list[str] = []
        self.feed(html)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self.open):
            self.words += data.split()

    @property
    def text(self) -> str:
        return " ".join(self.words)


def checked(html: str) -> Document:
    document = Document(html)
    assert set(document.tags) <= ALLOWED
    for name, value in document.attributes:
        assert name in {"class", "style", "title", "open", "aria-hidden", "colspan"} or name.startswith("data-"), name
        if name == "style":
            assert re.fullmatch(r"[a-z:;.%0-9e-]*(px)?", value), value
    assert not re.search(r"https?:|url\(|@import", html), "nothing is fetched"
    return document


def saved(folder: Path, tensors: Mapping[str, torch.Tensor]) -> CheckpointView:
    torch.save(dict(tensors), folder / "model.pt")
    return lazyckpt.open(folder / "model.pt")


def made(specs: Mapping[str, TensorSpec], problems: tuple[str, ...] = ()) -> CheckpointView:
    """A view of tensors that no file holds."""
    index = Index(format="torch", states={"weights": specs}, files={}, problems=problems)
    return lazyckpt.view.view_of(LocalStore("/"), index, "weights", ())


def one(name: str, shape: tuple[int, ...] = (4, 4), path: str = "a.pt") -> TensorSpec:
    return whole(name, Extent(path, 0, torch.bfloat16, shape, c_strides(shape)))


def test_a_view_says_what_there_is(case: Case) -> None:
    view = open_case(case)
    for part in (view, view.stored, *view.states.values()):
        document = checked(part._repr_html_())
        assert part.format in document.text
        assert "<script>" in part._repr_html_() and part._repr_html_() == part._repr_html_()
        for problem in part.problems:
            assert " ".join(problem.split())[:100] in document.text
        told = {value for name, value in document.attributes if name == "data-name"}
        for name in part:
            assert any(name.endswith(end) for end in told), name
        for alias, owner in part.aliases.items():
            if alias in list(part):
                assert f"= {owner}" in document.text


def test_counts_and_bytes_at_every_node(tmp_path: Path) -> None:
    tied = torch.zeros(10, 10)
    view = saved(
        tmp_path,
        {"a.x.w": tied, "a.x.b": torch.zeros(3), "a.y": torch.zeros(2, dtype=torch.int64), "head.w": tied},
    )
    text = checked(view._repr_html_()).text
    assert "a 3 tensors 428 B 105" in text
    assert "x 2 tensors 412 B 103" in text
    assert "y i64 [2] 16 B 2" in text
    assert "head.w = a.x.w f32 [10, 10]" in text


def test_a_tensor_says_who_holds_it(case: Case) -> None:
    view = open_case(case)
    for name, t in view.items():
        document = checked(t._repr_html_())
        assert " ".join(name.split()) in document.text
        paths = {f.extent.path for f in t.fragments}
        for path in paths if len(paths) <= 16 else ():
            assert path in document.text or path.rsplit("/", 1)[-1] in document.text
        if t.ndim and t.shape[0] > 2:
            part = checked(t.lazy[1:2]._repr_html_())
            assert f"of a tensor of shape {list(t.shape)}" in part.text


def test_lost_files_are_told(dcp_hole: tuple[CheckpointView, Case]) -> None:
    view, case = dcp_hole
    document = checked(view._repr_html_())
    assert any("problem" in word for word in document.words)
    assert any("lost" in value.split() for name, value in document.attributes if name == "class")
    t = max((view[name] for name in case.truth["weights"]), key=lambda t: len(t.fragments))
    assert "cannot be read : __1_0.distcp is missing" in checked(t._repr_html_()).text
    alone = next(n for n, t in view.items() if {f.extent.path for f in t.fragments} == {"__1_0.distcp"})
    part = checked(view.select(alone)._repr_html_())  # nothing of it can be read, and no other file is there
    assert ("class", "lost") in part.attributes and "__1_0.distcp (missing)" in part.text
    with pytest.raises(lazyckpt.MissingFileError):
        t.show(histogram=True)


def test_names_stay_text() -> None:
    view = made({name: one(name, path=f"{name}.pt") for name in NASTY}, problems=tuple(NASTY))
    document = checked(view._repr_html_())
    assert document.tags["script"] == 1
    assert "\x1b" not in view._repr_html_() and "\u202e" not in view._repr_html_()
    assert r"\u202egnp" in document.text and "<img src=x onerror=alert(1)>" in document.text
    assert "&lt;b&gt;" in document.text
    assert len(view._repr_html_()) < 100_000
    for t in view.values():
        assert "script" not in checked(t._repr_html_()).tags


def test_states(tmp_path: Path) -> None:
    p = torch.nn.Parameter(torch.zeros(4, 4))
    optimizer = torch.optim.Adam([p])
    p.sum().backward()
    optimizer.step()
    torch.save({"model": {"w": p.detach()}, "optimizer": optimizer.state_dict()}, tmp_path / "ckpt.pt")
    states = lazyckpt.open(tmp_path / "ckpt.pt").states
    assert repr(states).splitlines()[1].split() == ["exp_avg", "1", "tensor,", "64", "B"]
    assert "exp_avg 1 tensor, 64 B" in checked(states._repr_html_()).text  # type: ignore[attr-defined]
    assert states._ipython_key_completions_() == list(states)  # type: ignore[attr-defined]
    with pytest.raises(TypeError):
        states["new"] = states["weights"]  # type: ignore[index]


def test_a_run_says_its_steps(tmp_path: Path) -> None:
    for step in (100, 200):
        torch.save({"model": {"w": torch.ones(4)}}, tmp_path / f"step_{step}.pt")
    run = lazyckpt.open_run(tmp_path)
    assert "run of 2 steps: 100, 200" in checked(run._repr_html_()).text
    assert "w f32 [2, 4]" in checked(run._repr_html_()).text
    assert "2 blocks in 2 files" in checked(run["w"]._repr_html_()).text


# -- views that are huge


def rows_of(view: CheckpointView) -> list[Row]:
    def flat(rows: list[Row]) -> list[Row]:
        return [each for row in rows for each in (row, *flat(row.below))]

    return flat(plan(outline(view).root))


def huge() -> dict[str, dict[str, TensorSpec]]:
    layers = {
        f"model.layers.{n}.mlp.{part}": one(f"model.layers.{n}.mlp.{part}", (n % 2 + 1, 4))
        for n in range(126)
        for part in (*(f"experts.{e}.{w}.weight" for e in range(40) for w in ("up", "down")), "norm.weight")
    }
    return {
        "layers": layers,
        "flat": {f"t{n}": one(f"t{n}") for n in range(10_000)},
        "odd": {f"a{n % 7}.b{n % 1001}.c{n}": one(f"a{n % 7}.b{n % 1001}.c{n}", (n % 5,)) for n in range(10_000)},
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["layers", "flat", "odd"])
def test_huge_views_are_few_rows(kind: str) -> None:
    specs = huge()[kind]
    view = made(specs)
    rows = rows_of(view)
    assert 0 < len(rows) <= ROWS
    top = plan(outline(view).root)
    assert sum(row.tensors for row in top) == len(specs)
    assert sum(row.nbytes for row in top) == view.nbytes and sum(row.numel for row in top) == view.numel
    html = view._repr_html_()
    assert len(html) < 1 << 20
    checked(html)


@pytest.mark.slow
def test_layers_that_are_alike_are_one_row() -> None:
    view = made(huge()["layers"])
    told = [(row.alike, row.times) for row in rows_of(view) if row.alike]
    assert told == [("0-124/2", 63), ("0-39", 40), ("1-125/2", 63), ("0-39", 40)]
    text = checked(view._repr_html_()).text
    assert "0, 2, … 124 (63 alike; 0 is shown)" in text and "0 … 39 (40 alike; 0 is shown)" in text
    few = view.select(lambda name: name.split(".")[2] in {"3", "4"})
    assert not any(row.alike for row in rows_of(few)), "what fits is shown as it is"


def test_a_thousand_ranks() -> None:
    shape, ranks = (4096, 512), 1024
    each = 4096 * 512 // ranks - 7
    fragments = [
        Fragment(Extent(f"rank_{n}.pt", 0, torch.float32, (each,), (1,)), shape, span=(n * each, (n + 1) * each),
                 rank=Rank(dp=n))
        for n in range(ranks)
    ]  # fmt: skip
    view = made({f"layers.{n}.w": TensorSpec(f"layers.{n}.w", shape, torch.float32, fragments) for n in range(60)})
    assert len(view._repr_html_()) < 200_000
    html = view["layers.0.w"]._repr_html_()
    assert len(html) < 100_000
    text = checked(html).text
    assert "in 1,024 files" in text and "neighbours are drawn together" in text and "and 1,008 more" in text


# -- histograms


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64, torch.uint8,
              torch.float8_e4m3fn]
)  # fmt: skip
def test_histogram_of_every_kind(tmp_path: Path, dtype: torch.dtype) -> None:
    whole = (torch.randn(50, 20) * 10).to(dtype)
    t = saved(tmp_path, {"w": whole})["w"]
    found = sample(t)
    values = (whole.abs() if dtype.is_complex else whole).double()
    assert (found.read, found.total, found.nbytes) == (1000, 1000, whole.nbytes)
    assert found.low == pytest.approx(values.min().item()) and found.high == pytest.approx(values.max().item())
    assert found.mean == pytest.approx(values.mean().item()) and sum(found.counts) == 1000
    assert len(text_histogram(found)) == len(found.counts)
    labels = {value for name, value in checked(t.show(histogram=True).html).attributes if name == "data-l"}
    assert {f"{found.low:.4g}", f"{found.high:.4g}"} <= labels


def test_a_sample_is_bounded(tmp_path: Path) -> None:
    torch.save({f"w{n}": torch.randn(shape) for n, shape in enumerate(SHAPES)}, tmp_path / "w.pt")
    view, counts = opened(tmp_path / "w.pt")
    for name, t in view.items():
        counts.clear()
        found = sample(t, 100_000)
        assert counts.bytes == found.nbytes == found.read * 4
        assert 50_000 <= found.nbytes <= 150_000, (name, t.shape)
        assert found.mean == pytest.approx(0, abs=0.05) and found.std == pytest.approx(1, abs=0.05)
        assert f"{found.read:,} of {t.numel():,} elements" in t.show(histogram=True).text or t.nbytes < 4 << 20


SHAPES = [(300_000,), (1000, 300), (7, 41, 1000), (3, 100_000), (300_000, 1), (64, 8, 8, 64)]


def test_odd_values(tmp_path: Path) -> None:
    inf, nan = float("inf"), float("nan")
    view = saved(
        tmp_path,
        {
            "odd": torch.tensor([nan, inf, -inf, 1.0, 3.0]),
            "none": torch.zeros(0, 4),
            "nan": torch.full((3,), nan),
            "wide": torch.tensor([1.7e308, -1.7e308, 0.0], dtype=torch.float64),
            "scalar": torch.tensor(5),
            "far": torch.full((5,), 1e20),
            "farther": torch.tensor([2**63, 2**63 + 2048], dtype=torch.uint64),
        },
    )
    odd = sample(view["odd"])
    assert (odd.nan, odd.inf, odd.low, odd.high, sum(odd.counts)) == (1, 2, 1.0, 3.0, 2)
    assert "1 NaN; 2 infinite" in view["odd"].show(histogram=True).text
    assert sample(view["none"]).read == 0 and sample(view["nan"]).counts == ()
    assert sum(sample(view["wide"]).counts) == 3
    assert (sum(sample(view["far"]).counts), sum(sample(view["farther"]).counts)) == (5, 2)
    for t in view.values():
        checked(t.show(histogram=True).html)
        assert t.show().text == repr(t)


def test_a_part_of_a_tensor(tmp_path: Path) -> None:
    t = saved(tmp_path, {"w": torch.arange(100.0).view(10, 10)})["w"]
    found = sample(t.lazy[2:4])
    assert (found.low, found.high, found.total) == (20, 39, 20)


# -- tables, metadata and problems


def test_values_are_the_corners_of_a_tensor(tmp_path: Path) -> None:
    whole = torch.arange(20.0 * 10).view(20, 10)
    tensors = {
        "w": whole,
        "v": torch.arange(3.0),
        "n": torch.tensor(7),
        "c": whole.view(2, 10, 10),
        "e": torch.empty(0),
    }
    torch.save(tensors, tmp_path / "model.pt")
    view, counts = opened(tmp_path / "model.pt")
    counts.clear()
    found = corners(view["w"])
    assert counts.bytes <= 6 * 10 * 4
    assert found.rows == (0, 1, 2, None, 17, 18, 19) and found.columns == (0, 1, 2, None, 7, 8, 9)
    for n, row in zip(found.rows, found.texts, strict=True):
        for k, text in zip(found.columns, row, strict=True):
            assert n is None or k is None or float(text) == whole[n, k]
    assert corners(view["v"]).texts == (("0", "1", "2"),) and corners(view["n"]).texts == (("7",),)
    assert corners(view["c"]).note == "at [0, :, :]" and corners(view["e"]).texts == ()
    shown = view["w"].show(values=True)
    assert "189" in checked(shown.html).text and "189" in shown.text
    assert "189" not in view["w"].show().html


def test_a_map_is_to_scale(tmp_path: Path) -> None:
    view = saved(tmp_path, {"a": torch.empty(400, 100), "b": torch.empty(100, 400), "c": torch.empty(4, 90_000)})
    for name, ratio in (("a", 0.25), ("b", 4.0), ("c", 20.0)):  # a side that is too thin to see is drawn thicker
        (style,) = (
            v
            for k, v in checked(view[name]._repr_html_()).attributes
            if k == "style" and v.startswith("width:") and "px" in v
        )
        wide, high = map(float, re.findall(r"[0-9]+", style))
        assert wide / high == pytest.approx(ratio, rel=0.02)


def test_metadata_and_problems(dcp_hole: tuple[CheckpointView, Case], tmp_path: Path) -> None:
    view, _ = dcp_hole
    assert isinstance(view.problems, tuple) and view.problems == tuple(view.problems)
    document = checked(view.problems._repr_html_())  # type: ignore[attr-defined]
    for problem in view.problems:
        assert problem.code in document.text and " ".join(problem.split())[:100] in document.text
    torch.save({"model": {"w": torch.ones(2)}, "epoch": 7, "args": {"<b>": [1, {"x": "\x1b[31m"}]}}, tmp_path / "m.pt")
    meta = lazyckpt.open(tmp_path / "m.pt").meta
    assert meta["epoch"] == 7 and isinstance(meta, dict)
    text = checked(meta._repr_html_()).text  # type: ignore[attr-defined]
    assert "epoch 7" in text and "<b>" in text and "\x1b" not in text
    assert "no metadata" in checked(made({"w": one("w")}).meta._repr_html_()).text  # type: ignore[attr-defined]
    assert "no problems" in checked(made({"w": one("w")}).problems._repr_html_()).text  # type: ignore[attr-defined]


def test_states_open_in_a_view(case: Case) -> None:
    view = open_case(case)
    document = checked(view._repr_html_())
    for state, part in view.states.items():
        if state != view.state and len(part):
            assert f"view.states['{state}']" in document.text
    for dtype in {t.spec.dtype.short for t in view.values()}:
        assert re.search(rf"\b{dtype} [0-9.]+ [KM]?i?B \(", document.text), "totals by dtype"
