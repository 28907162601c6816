"""Views of computed tensors: every exporter, statistic and display works on them as on tensors in files."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import lazyckpt
from lazyckpt import CheckpointView, DataError
from lazyckpt.core.box import Box
from lazyckpt.core.compose import Layer, compose, held, inside, stack, steps_of
from lazyckpt.core.dtypes import BF16, F32, dtype_of
from lazyckpt.core.expr import cast, computed, make, operand, outline
from lazyckpt.core.placement import Placement
from lazyckpt.derive.sources import Sources
from lazyckpt.lazy import LazyArray
from lazyckpt.view import view_of

from .devices import near, simulated
from .writers import Case

Truth = dict[str, torch.Tensor]


class Made:
    """A view of computed tensors, and their values."""

    def __init__(self, view: CheckpointView, truth: Truth) -> None:
        self.view, self.truth = view, truth


def computed_view(sources: Sources, tensors: Mapping[str, Any]) -> CheckpointView:
    return view_of(sources.store, sources.index(tensors, "computed"), "weights", (), True)


def of_cast(folder: Path, zero: Case) -> Made:
    state = {"a.w": torch.randn(40, 6), "a.b": torch.randn(5).half(), "c": torch.arange(3), "d.none": torch.empty(0, 2)}
    save_file(state, folder / "cast.safetensors")
    view = lazyckpt.open(folder / "cast.safetensors", cache=False).astype(torch.bfloat16)
    return Made(view, {n: t.bfloat16() if t.is_floating_point() else t for n, t in state.items()})


def of_linear(folder: Path, zero: Case) -> Made:
    """Over a safetensors file and the partitions of ZeRO-3."""
    trained = lazyckpt.open(zero.path, cache=False)
    names = [n for n in trained if trained.owner(n) == n and trained[n].dtype.is_floating_point]
    other = {name: torch.randn(trained[name].shape) for name in names}
    save_file(other, folder / "other.safetensors")
    sources = Sources([lazyckpt.open(folder / "other.safetensors", cache=False), trained])
    tensors, truth = {}, {}
    for name in names:
        e = make("linear", sources.operand(0, name), sources.operand(1, name), weights=(0.25, 0.75), dtype=F32)
        tensors[name] = computed(name, e)
        truth[name] = other[name].float() * 0.25 + trained[name][...].float() * 0.75
    return Made(computed_view(sources, tensors), truth)


def of_product(folder: Path, zero: Case) -> Made:
    state = {"l.w": torch.randn(30, 20).bfloat16(), "l.a": torch.randn(4, 20), "l.b": torch.randn(30, 4)}
    save_file(state, folder / "lora.safetensors")
    sources = Sources([lazyckpt.open(folder / "lora.safetensors", cache=False)])
    w, a, b = (sources.operand(0, f"l.{n}") for n in "wab")
    e = make("linear", w, make("product", b, a, dtype=None), weights=(1, 2.0), dtype=BF16)
    total = torch.zeros(30, 20)
    for k in range(4):
        total = total + state["l.b"][:, k, None] * state["l.a"][k]
    truth = {"l.w": (state["l.w"].float() + total * 2.0).bfloat16(), "l.b": state["l.b"]}
    return Made(computed_view(sources, {"l.w": computed("l.w", e), "l.b": computed("l.b", b)}), truth)


def of_mean(folder: Path, zero: Case) -> Made:
    states = [{"x": torch.randn(7, 9), "y.z": torch.randn(2, 3, 4)} for _ in range(3)]
    views = []
    for n, state in enumerate(states):
        torch.save(state, folder / f"{n}.pt")
        views.append(lazyckpt.open(folder / f"{n}.pt", cache=False))
    sources = Sources(views)
    tensors = {name: computed(name, make("mean", *(sources.operand(n, name) for n in range(3)))) for name in states[0]}
    truth = {name: (states[0][name] + states[1][name] + states[2][name]) / 3 for name in states[0]}
    return Made(computed_view(sources, tensors), truth)


KINDS: list[Callable[[Path, Case], Made]] = [of_cast, of_linear, of_product, of_mean]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def made(request: pytest.FixtureRequest, tmp_path: Path, zero_cases: Mapping[str, Case]) -> Made:
    found: Made = request.param(tmp_path, zero_cases["zero3_sub_groups"])
    assert any(found.view[name].spec.expr is not None for name in found.view)
    return found


def same(view: Mapping[str, Any], truth: Truth) -> None:
    assert set(view) == set(truth)
    for name, value in truth.items():
        found = view[name]
        whole = found if isinstance(found, torch.Tensor) else found[...]
        assert (whole.dtype, whole.shape) == (value.dtype, value.shape), name
        assert torch.equal(whole, value), name


def test_reads(made: Made) -> None:
    same(made.view, made.truth)
    same(pickle.loads(pickle.dumps(made.view)), made.truth)
    same(made.view.state_dict(), made.truth)
    same(made.view.to("cpu"), made.truth)
    for name, value in made.truth.items():
        t = made.view[name]
        assert torch.equal(t.to("cpu", torch.float64), value.double())
        assert torch.equal(t.read_into(torch.empty_like(value)), value)
        assert torch.equal(pickle.loads(pickle.dumps(t))[...], value)
        assert name in t.explain() and name in repr(t) and t._repr_html_()
        assert torch.equal(torch.cat([p[...].reshape(-1) for _, p in t.pieces(64)] or [value.ravel()]), value.ravel())
        if t.spec.expr is not None:
            assert t.spec.expr.op in t.explain()
            if value.ndim and value.shape[0]:
                assert torch.equal(t[-1], value[-1]) and torch.equal(t[::-2], value.flip(0)[::2])


def test_parts_of_a_view(made: Made) -> None:
    name = next(n for n in made.truth if "." in n) if any("." in n for n in made.truth) else next(iter(made.truth))
    prefix = name.split(".")[0]
    part = made.view.select(name)
    same(part, {name: made.truth[name]})
    assert set(part.files) <= set(made.view.files) and part.files
    same(pickle.loads(pickle.dumps(part)), {name: made.truth[name]})
    if prefix != name:
        below = made.view.prefix(prefix)
        same(below, {n[len(prefix) + 1 :]: v for n, v in made.truth.items() if n.startswith(f"{prefix}.")})
    assert list(made.view.states) == ["weights"] or "weights" in made.view.states
    same(made.view.rename({name: "renamed"}), {("renamed" if n == name else n): v for n, v in made.truth.items()})
    half = made.view.astype(torch.float16)
    same(half, {n: v.half() if v.is_floating_point() else v for n, v in made.truth.items()})


def test_displays(made: Made, tmp_path: Path) -> None:
    assert made.view.tree() and made.view.explain() and repr(made.view) and made.view._repr_html_()
    table = {row.name: row for row in made.view.stats()}
    for name, value in made.truth.items():
        if value.is_floating_point() and value.numel():
            assert table[name].mean == pytest.approx(value.double().mean().item())
            assert made.view[name].plot.hist() is not None


def test_every_writer(made: Made, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    made.view.to_safetensors(out / "m.safetensors", progress=False)
    same(load_file(out / "m.safetensors"), made.truth)
    made.view.to_safetensors(out / "sharded", max_shard_size="1KB", progress=False)
    same(lazyckpt.open(out / "sharded", cache=False), made.truth)
    made.view.to_torch(out / "m.pt", progress=False)
    same(torch.load(out / "m.pt"), made.truth)
    made.view.to_zarr(out / "m.zarr", progress=False)
    same(lazyckpt.open(out / "m.zarr", cache=False), made.truth)
    made.view.to_dcp(out / "dcp", progress=False)
    same(lazyckpt.open(out / "dcp", cache=False), made.truth)
    left_out = made.view.to_virtual(out / "refs.json").left_out
    assert left_out and all(made.view[p.split("/", 1)[1].replace("/", ".")].spec.expr is not None for p in left_out)
    assert all("computed" in reason for reason in left_out.values())


def test_a_second_call_resumes_only_the_same_work(tmp_path: Path, zero_cases: Mapping[str, Case]) -> None:
    from lazyckpt.interop.dask import token
    from lazyckpt.jobs.publish import fingerprint

    save_file({"w": torch.ones(4), "v": torch.zeros(4)}, tmp_path / "m.safetensors")
    view = lazyckpt.open(tmp_path / "m.safetensors", cache=False)
    parts = [operand(view.specs[name]) for name in "wv"]
    several = [make("linear", *parts, weights=w, dtype=None) for w in ((1.0, 2.0), (1.0, 3.0))]
    several += [make("mean", *parts), make("mean", parts[0]), make("mean", parts[1])]
    tensors = [LazyArray(view._store, computed("t", e)) for e in several]
    assert len({token(t) for t in tensors}) == len({fingerprint([(t, "")], []) for t in tensors}) == 5
    assert token(tensors[0]) == token(pickle.loads(pickle.dumps(tensors[0])))


@pytest.fixture(scope="module")
def spawned() -> Iterator[ProcessPoolExecutor]:
    """A process that shares nothing with this one."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        yield executor


def test_values_are_compared(made: Made, tmp_path: Path, spawned: ProcessPoolExecutor) -> None:
    made.view.to_safetensors(tmp_path / "same.safetensors", progress=False)
    written = lazyckpt.open(tmp_path / "same.safetensors", cache=False)
    for mine in (made.view.digest(progress=False), made.view.digest(progress=False, executor=spawned)):
        assert dict(mine.states["weights"]) == dict(written.digest(progress=False).states["weights"])
    assert lazyckpt.diff(made.view, written, progress=False).equal
    save_file({n: t + 1 for n, t in made.truth.items()}, tmp_path / "other.safetensors")
    other = lazyckpt.open(tmp_path / "other.safetensors", cache=False)
    rows = lazyckpt.diff(made.view, other, progress=False).rows
    assert {row.name for row in rows if row.status != "equal"} == {n for n, t in made.truth.items() if t.numel()}


def test_interop(made: Made) -> None:
    pytest.importorskip("dask")
    import zarr

    from lazyckpt.interop.zarr_store import ViewStore

    tree = made.view.to_xarray(chunks={})
    group = zarr.open_group(ViewStore(made.view), mode="r")
    for name, value in made.truth.items():
        plain = value.float().numpy() if value.is_floating_point() else value.numpy()
        path = name.replace(".", "/")
        assert np.array_equal(tree[path].values, plain)
        assert np.array_equal(made.view[name].to_dask().compute(), plain)
        assert np.array_equal(group[f"weights/{path}"][...].astype(plain.dtype), plain)  # type: ignore[index, union-attr]


def test_modules_are_filled(made: Made) -> None:
    name = next(n for n, v in made.truth.items() if v.ndim == 2 and v.numel())
    module = torch.nn.Module()
    module.register_parameter("w", torch.nn.Parameter(torch.empty_like(made.truth[name]), requires_grad=False))
    made.view.select(name).rename({name: "w"}).load_into(module)
    assert torch.equal(module.w, made.truth[name])  # type: ignore[arg-type]


def test_transfers_to_a_device(made: Made) -> None:
    with simulated() as gpu:
        for arrived in (made.view.to("cuda"), {name: t.to("cuda") for name, t in made.view.items()}):
            same({name: near(t) for name, t in arrived.items()}, made.truth)
        assert not gpu.pending


def test_the_index_cache_keeps_expressions(tmp_path: Path) -> None:
    from lazyckpt.core.index import FileInfo
    from lazyckpt.formats.cache.tables import KeptSpecs, Rows, TableEncoder
    from lazyckpt.formats.cache.values import Decoder, Encoder

    save_file({"a": torch.randn(4, 2), "b": torch.randn(4, 2)}, tmp_path / "m.safetensors")
    view = lazyckpt.open(tmp_path / "m.safetensors", cache=False)
    a, b = (operand(view.specs[name]) for name in "ab")
    placements = (Placement.at((4, 2), (0, 0)), Placement.at((4, 2), (4, 0)))
    tensors = {
        "mean": computed("mean", make("mean", a, b), "a rule"),
        "cast": cast(view.specs["a"], BF16),
        "place": computed("place", make("place", make("cast", a, dtype=F32), b, shape=(8, 2), placements=placements)),
        "plain": view.specs["b"],
    }
    files: dict[str, FileInfo] = dict(view.files)
    encoder = Encoder()
    encoder.lazy, encoder.known = True, files
    table = TableEncoder(encoder, files)
    names, numbers = table.table(tensors)
    columns, known = table.columns, encoder.files
    ends = np.cumsum([len(text) for text in encoder.documents]).tolist()
    decoder = Decoder(memoryview(b"".join(encoder.documents)), ends, memoryview(encoder.columns))
    decoder.files = decoder.value(known)
    rows = Rows(decoder, columns, files)
    kept = KeptSpecs(rows, decoder.value(numbers), lambda: decoder.value(names))
    for name, spec in tensors.items():
        again = kept[name]
        assert (again.shape, again.dtype, again.rule, again.expr) == (spec.shape, spec.dtype, spec.rule, spec.expr)
        assert torch.equal(LazyArray(view._store, again)[...], LazyArray(view._store, spec)[...])


# -- composition


@pytest.fixture
def files(tmp_path: Path) -> CheckpointView:
    g = torch.Generator().manual_seed(3)
    state = {
        "a": torch.randn(4, 6, generator=g),
        "b": torch.randn(2, 6, generator=g),
        "c": torch.randn(3, 6, generator=g).half(),
    }
    torch.save(state, tmp_path / "m.pt")
    return lazyckpt.open(tmp_path / "m.pt", cache=False)


def test_tensors_that_are_computed_alike_are_composed_by_their_operands(files: CheckpointView) -> None:
    a, b, c = (files.specs[name] for name in "abc")
    both = [(cast(a, BF16), Placement.at((4, 6), (0, 0))), (cast(b, BF16), Placement.at((2, 6), (4, 0)))]
    spec = compose("ab", (6, 6), both)
    assert spec.expr is not None and spec.expr.op == "cast" and len(held(spec)) == 2
    t = LazyArray(files._store, spec)
    whole = torch.cat([files["a"][...], files["b"][...]]).bfloat16()
    assert torch.equal(t[...], whole) and torch.equal(t[3:5, ::2], whole[3:5, ::2])
    assert len(held(t.lazy[5:]._held)) == 1 and len(pickle.dumps(t.lazy[5:])) < len(pickle.dumps(t))
    assert torch.equal(pickle.loads(pickle.dumps(t.lazy[5:]))[...], whole[5:])

    mixed = [(cast(a, BF16), both[0][1]), (cast(c, BF16), Placement.at((3, 6), (4, 0)))]
    spec = compose("ac", (7, 6), mixed)
    assert spec.expr is not None and spec.expr.op == "place"
    t = LazyArray(files._store, spec)
    whole = torch.cat([files["a"][...].bfloat16(), files["c"][...].bfloat16()])
    assert torch.equal(t[...], whole) and torch.equal(t[[6, 1], 1:], whole[[6, 1], 1:])
    assert f"({2 * 6 * 2:,} bytes read" in t.explain(slice(4, 6))

    q = compose("q", (2, 6), [(spec, Placement.of((7, 6), Box((3, 0), (5, 6)), (0, 0)))])
    assert torch.equal(LazyArray(files._store, q)[...], whole[3:5])
    with pytest.raises(ValueError, match="dtypes"):
        compose("x", (6, 6), [(cast(a, BF16), both[0][1]), (b, both[1][1])])


def test_experts_are_stacked(files: CheckpointView) -> None:
    a, b = files.specs["a"], files.specs["b"]
    top = computed("top", make("place", operand(a), shape=(2, 6), placements=(
        Placement.of((4, 6), Box((1, 0), (3, 6)), (0, 0)),)))  # fmt: skip
    axes = (None, 0, 1)
    experts = [
        (top, Placement.at((2, 6), (0, 0, 0), axes)),
        (cast(cast(b, BF16), F32), Placement.at((2, 6), (1, 0, 0), axes)),
    ]
    t = LazyArray(files._store, compose("experts", (2, 2, 6), experts))
    whole = torch.stack([files["a"][1:3], files["b"][...].bfloat16().float()])
    assert torch.equal(t[...], whole)
    assert torch.equal(t[1, 0], whole[1, 0]) and torch.equal(t[:, 1, ::3], whole[:, 1, ::3])


def test_steps_of_computed_tensors_are_stacked(tmp_path: Path) -> None:
    layers, truth = [], []
    for n, dtype in enumerate((torch.float32, torch.float32, torch.float16)):
        (tmp_path / f"{n}").mkdir()
        value = torch.randn(3, 2).to(dtype)
        torch.save({"w": value}, tmp_path / f"{n}" / "m.pt")
        spec = lazyckpt.open(tmp_path / f"{n}" / "m.pt", cache=False).specs["w"]
        truth.append(value)
        layers.append(Layer(10 * n, f"{n}", spec))
    from lazyckpt.io.storage.local import LocalStore

    store = LocalStore(tmp_path)
    alike = stack("w", layers[:2], F32)
    assert alike.expr is None and steps_of(alike) == (0, 10)
    narrow = stack("w", layers[:2], BF16)
    assert narrow.expr is not None and narrow.expr.op == "cast" and steps_of(narrow) == (0, 10)
    assert steps_of(inside(narrow, Box((1, 0, 0), (2, 3, 2)))) == (0, 10)
    mixed = stack("w", layers, F32)
    assert steps_of(mixed) == (0, 10, 20)
    for spec, count, dtype in ((alike, 2, torch.float32), (narrow, 2, torch.bfloat16), (mixed, 3, torch.float32)):
        whole = torch.stack([v.to(dtype) for v in truth[:count]])
        t = LazyArray(store, spec)
        assert torch.equal(t[...], whole) and torch.equal(t[-1, 1:], whole[-1, 1:])
        assert torch.equal(pickle.loads(pickle.dumps(t.lazy[1]))[...], whole[1])
    deep = [
        Layer(x.step, x.folder, computed("w", make("linear", operand(x.spec), weights=(2.0,), dtype=F32)))
        for x in layers
    ]
    t = LazyArray(store, stack("w", deep, F32))
    assert torch.equal(t[...], torch.stack([v.float() * 2 for v in truth])) and steps_of(t.spec) == (0, 10, 20)


def test_shards_of_converted_tensors(tmp_path: Path) -> None:
    state = {f"layers.{n}.w": torch.randn(8, 4) for n in range(2)}
    save_file(state, tmp_path / "m.safetensors")
    view = lazyckpt.open(tmp_path / "m.safetensors", cache=False).astype(torch.bfloat16)
    shards = [view.shard(tp=2, rank=r, rules={"*": {"cat": 0}}) for r in range(2)]
    for name, value in state.items():
        for r, shard in enumerate(shards):
            assert torch.equal(shard[name][...], value.bfloat16()[4 * r : 4 * r + 4])
    whole = lazyckpt.unshard(shards)
    same(whole, {name: value.bfloat16() for name, value in state.items()})


def test_a_shard_that_is_only_padding(tmp_path: Path) -> None:
    value = torch.randn(2, 4)
    for n in range(2):
        save_file({"model.embed_tokens.weight": value}, tmp_path / f"{n}.safetensors")
    view = lazyckpt.mean([lazyckpt.open(tmp_path / f"{n}.safetensors") for n in range(2)])
    shards = [view.shard(tp=4, rank=r) for r in range(4)]
    whole = torch.cat([shard["model.embed_tokens.weight"][...] for shard in shards])
    assert torch.equal(whole, torch.cat([value, torch.zeros(len(whole) - 2, 4)]))
    same(lazyckpt.unshard(shards), {"model.embed_tokens.weight": value})


@pytest.mark.parametrize("kind", ["cast", "mean", "slerp"])
def test_flat_partitions_of_computed_tensors(tmp_path: Path, kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    truth = {
        n: torch.randn(s, generator=generator) for n, s in {"w": (7, 6), "v": (5,), "one": (1, 3), "no": (0, 4)}.items()
    }
    for n in range(2):
        save_file({name: t + n * t.flip(0) for name, t in truth.items()}, tmp_path / f"{n}.safetensors")
    views = [lazyckpt.open(tmp_path / f"{n}.safetensors") for n in range(2)]
    view = {
        "cast": lambda: views[1].astype(torch.bfloat16),
        "mean": lambda: lazyckpt.mean(views),
        "slerp": lambda: lazyckpt.merge(views, method="slerp", t=0.4),
    }[kind]()
    whole = {name: view[name][...] for name in truth}
    for dp in (2, 5):
        shards = [view.shard(dp=dp, rank=rank) for rank in range(dp)]
        for name, wanted in whole.items():
            each = -(-wanted.numel() // dp)
            padded = torch.cat([wanted.flatten(), wanted.new_zeros(dp * each - wanted.numel())])
            for rank, shard in enumerate(shards):
                assert torch.equal(shard[name][...], padded[rank * each : (rank + 1) * each])
        same(lazyckpt.unshard(shards), whole)
        back = lazyckpt.unshard([pickle.loads(pickle.dumps(shard)) for shard in shards])
        assert torch.equal(back["w"][1:6, [0, 4]], whole["w"][1:6, [0, 4]])


def test_a_padded_vocabulary_of_converted_tensors(tmp_path: Path) -> None:
    value = torch.randn(7, 4)
    save_file({"model.embed_tokens.weight": value}, tmp_path / "m.safetensors")
    view = lazyckpt.open(tmp_path / "m.safetensors", cache=False).astype(torch.bfloat16)
    shards = [view.shard(tp=2, rank=r) for r in range(2)]
    whole = torch.cat([shard["model.embed_tokens.weight"][...] for shard in shards])
    assert torch.equal(whole, torch.cat([value.bfloat16(), torch.zeros(len(whole) - 7, 4).bfloat16()]))
    same(lazyckpt.unshard(shards), {"model.embed_tokens.weight": value.bfloat16()})


def test_computed_tensors_are_not_taken_for_tied_ones(tmp_path: Path) -> None:
    from lazyckpt.distributed.statedict import _identity

    state = {"a": torch.ones(3), "b": torch.zeros(3)}
    save_file(state, tmp_path / "m.safetensors")
    view = lazyckpt.open(tmp_path / "m.safetensors", cache=False)
    narrow = view.astype(torch.bfloat16)
    assert _identity(narrow["a"]) != _identity(narrow["b"])
    assert _identity(narrow["a"]) == _identity(view.astype(torch.bfloat16)["a"]) != _identity(view["a"])


def test_chunks_follow_the_operands(made: Made) -> None:
    for name in made.view:
        spec = made.view[name].spec
        if spec.expr is not None and spec.expr.op != "product" and spec.numel:
            assert outline(spec)
    assert dtype_of(torch.float32) is F32


def test_an_operand_that_is_lost(tmp_path: Path) -> None:
    save_file({"w": torch.ones(4)}, tmp_path / "m.safetensors")
    view = lazyckpt.open(tmp_path / "m.safetensors", cache=False).astype(torch.bfloat16)
    t = view["w"]
    (tmp_path / "m.safetensors").unlink()
    with pytest.raises(lazyckpt.MissingFileError):
        t[...]
    with pytest.raises(DataError):
        view["w"].read_into(torch.empty(3))


# -- functions of one's own


def test_functions_of_tensors(tmp_path: Path) -> None:
    state = {"w": torch.randn(700, 500), "b": torch.randn(3).half(), "n": torch.tensor(4), "none": torch.empty(0, 3)}
    torch.save(state, tmp_path / "m.pt")
    view = lazyckpt.open(tmp_path / "m.pt", cache=False)
    same(view.map(lambda x: x.clamp(0, 1)), {n: t.clamp(0, 1) for n, t in state.items()})
    narrow = view.select("w").map(torch.Tensor.abs_, dtype=torch.bfloat16)
    same(narrow, {"w": state["w"].abs().bfloat16()})
    assert torch.equal(narrow["w"][::-7, [3, 1]], state["w"].abs().bfloat16().flip(0)[::7][:, [3, 1]])
    scaled = view.select("w").map(lambda x: x / x.abs().max(), whole=True)
    assert torch.equal(scaled["w"][5:9, 3], (state["w"] / state["w"].abs().max())[5:9, 3])
    assert "map(function=" in scaled["w"].explain(0) and f"{700 * 500 * 4:,} bytes read" in scaled["w"].explain(0)
    scaled.to_safetensors(tmp_path / "out.safetensors", progress=False)
    same(load_file(tmp_path / "out.safetensors"), {"w": state["w"] / state["w"].abs().max()})
    for wrong in (lambda x: x.sum(), lambda x: None):
        with pytest.raises(DataError, match="same shape"):
            view.map(wrong)["w"][...]
    with pytest.raises(DataError, match=r"view\.map"):
        pickle.dumps(narrow)
    with pytest.raises(DataError, match=r"view\.map"):
        pickle.dumps(narrow["w"])
    with (
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor,
        pytest.raises(DataError, match=r"view\.map"),
    ):
        narrow.to_safetensors(tmp_path / "no.safetensors", executor=executor, progress=False)
