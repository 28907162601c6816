"""The algebra of expressions: every operation, on random operands, shapes and selections.

The rule that all operations are held to: ``expr[key]`` equals ``whole[key]`` bit for bit, however the key and the
reader cut it. The whole is compared with torch.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lazyckpt
from lazyckpt.core.box import Box
from lazyckpt.core.dtypes import bits_of, dtype_of
from lazyckpt.core.expr import (
    computed,
    cut,
    formula,
    leaves,
    make,
    of_one_store,
    op_of,
    operand,
    relocated_sources,
    wanted,
)
from lazyckpt.core.placement import Part, Placement
from lazyckpt.core.select import Selection
from lazyckpt.core.specs import Expr, Input, TensorSpec
from lazyckpt.errors import DataError, SelectionError
from lazyckpt.io.pool import run
from lazyckpt.io.reading.compute import tasks
from lazyckpt.io.storage.joined import Joined, joined
from lazyckpt.lazy import LazyArray
from lazyckpt.testing import opened

from .algebra import index, keys
from .lanes import rounds

some = settings(max_examples=rounds(60), deadline=None)
FLOATS = torch.float32, torch.bfloat16, torch.float16, torch.float64
Whole = tuple[Expr | Input, torch.Tensor]  # an expression, and what it is


class Files:
    """Tensors with random bits (NaN of all kinds, infinities, denormal numbers) or with ordinary values, in two
    checkpoints."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0

    def write(self, tensors: dict[str, torch.Tensor]) -> lazyckpt.CheckpointView:
        self.count += 1
        path = self.folder / f"{self.count}.pt"
        torch.save(tensors, path)
        return lazyckpt.open(path, cache=False)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("expressions"))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    parts = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return parts.view(bits_of(parts.itemsize))


def same_bits(a: torch.Tensor, b: torch.Tensor, about: Any = "") -> None:
    assert (a.shape, a.dtype) == (b.shape, b.dtype), about
    assert torch.equal(bits(a), bits(b)), about


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int, wild: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if not wild and dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    count = prod(shape) * dtype.itemsize
    data = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


@st.composite
def expressions(
    draw: st.DrawFn, shape: tuple[int, ...], dtype: torch.dtype, depth: int, leaf: Any, wild: bool
) -> Whole:
    """An expression of this shape and dtype, and its value by torch."""
    if depth == 0:
        return leaf(shape, dtype, draw(st.integers(0, 99)), wild)
    one = lambda s=shape, d=dtype: draw(expressions(s, d, depth - 1, leaf, wild))  # noqa: E731
    ops = ["same", "cast", "linear", "mean", "neg", "reshape", "flat", "transpose", "place"]
    if len(shape) >= 2 and dtype in (torch.float32, torch.float64) and not wild:
        ops.append("product")
    op = draw(st.sampled_from(ops))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if op == "cast":
        source = draw(st.sampled_from(FLOATS))
        e, value = one(d=source)
        return make("cast", e, dtype=dtype_of(dtype)), value.to(dtype)
    if op == "linear":
        parts = [one() for _ in range(draw(st.integers(1, 3)))]
        weights = tuple(draw(st.sampled_from([1, 0.5, -2.0, 0.3, 1e-3])) for _ in parts)
        total = parts[0][1].to(wide) * weights[0]
        for weight, (_, value) in zip(weights[1:], parts[1:], strict=True):
            total = total + value.to(wide) * weight
        return make("linear", *(e for e, _ in parts), weights=weights, dtype=None), total.to(dtype)
    if op == "mean":
        parts = [one() for _ in range(draw(st.integers(1, 3)))]
        total = parts[0][1].to(wide)
        for _, value in parts[1:]:
            total = total + value.to(wide)
        return make("mean", *(e for e, _ in parts)), (total / len(parts)).to(dtype)
    if op == "reshape":
        other = draw(st.sampled_from(others(shape)))
        e, value = one(other)
        return make("reshape", e, shape=shape), value.reshape(shape)
    if op == "flat":
        if len(shape) != 1:
            e, value = one()
            return make("same", e), value
        before, after = draw(st.integers(0, 3)), draw(st.integers(0, 3))
        n = shape[0] + before + after
        e, value = one(draw(st.sampled_from(others((n,)))))
        return make("flat", e, start=before, stop=before + shape[0]), value.reshape(-1)[before : n - after]
    if op == "transpose":
        axes = tuple(draw(st.permutations(range(len(shape)))))
        back = [axes.index(d) for d in range(len(axes))]
        e, value = one(tuple(shape[b] for b in back))
        return make("transpose", e, axes=axes), value.permute(axes)
    if op == "place":
        return draw(placed(shape, one))
    if op == "product":
        rank = draw(st.integers(0, 3))
        (a, x), (b, y) = one((*shape[:-1], rank)), one((*shape[:-2], rank, shape[-1]))
        total = torch.zeros(shape, dtype=wide)
        for k in range(rank):
            total = total + x[..., :, k, None] * y[..., None, k, :]
        return make("product", a, b, dtype=dtype_of(dtype)), total.to(dtype)
    e, value = one()
    flipped = (bits(value) ^ torch.iinfo(bits(value).dtype).min).view(dtype) if op == "neg" else value
    return make(op, e), flipped


@st.composite
def placed(draw: st.DrawFn, shape: tuple[int, ...], one: Callable[..., Whole]) -> Whole:
    """A tensor in two overlapping blocks, cut along a dimension; the second may lie on new axes."""
    if not shape:
        e, value = one((1,))
        return make("place", e, shape=(), placements=(Placement((1,), (Part(Box((0,), (1,)), ()),), ()),)), value[0]
    d = draw(st.integers(0, len(shape) - 1))
    at, overlap = draw(st.integers(0, shape[d])), draw(st.integers(0, 2))
    until = min(shape[d], at + overlap)
    first, second = (*shape[:d], until, *shape[d + 1 :]), (*shape[:d], shape[d] - at, *shape[d + 1 :])
    (a, x), (b, y) = one(first), one(second)
    origin = tuple(at if n == d else 0 for n in range(len(shape)))
    value = torch.cat([x, y.narrow(d, until - at, shape[d] - until)], d)
    placements = (Placement.at(first, (0,) * len(shape)), Placement.at(second, origin))
    return make("place", a, b, shape=shape, placements=placements), value


def others(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Other shapes with as many elements."""
    n = prod(shape)
    found = [shape, (n,), (1, n), (n, 1, 1), (*shape[::-1],), (1, *shape)]
    found += [(n // k, k) for k in (2, 3, 5) if n % k == 0]
    found += [(2, n // 6, 3) for _ in range(1) if n % 6 == 0]
    return found


def world(draw: st.DrawFn, files: Files, depth: int, wild: bool) -> tuple[LazyArray, torch.Tensor]:
    """A computed tensor over two checkpoints, and its value."""
    stored: list[dict[str, torch.Tensor]] = [{}, {}]
    wants: list[tuple[int, str]] = []

    def leaf(shape: tuple[int, ...], dtype: torch.dtype, seed: int, wild: bool) -> Whole:
        source = seed % 2
        name = f"{len(stored[source])}"
        stored[source][name] = random_tensor(shape, dtype, seed, wild)
        wants.append((source, name))
        return Input(TensorSpec(name, shape, dtype_of(dtype), ()), source), stored[source][name]

    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    e, value = draw(expressions(shape, draw(st.sampled_from(FLOATS)), depth, leaf, wild))
    views = [files.write({"nothing": torch.zeros(1), **tensors}) for tensors in stored]
    store, numbers = joined([view._store for view in views])

    def filled(node: Expr | Input) -> Expr | Input:
        if isinstance(node, Input):
            spec = views[node.source].specs[node.spec.name]
            return relocated_sources(Input(spec), numbers[node.source])
        return make(node.op, *map(filled, node.inputs), **node.params)

    return LazyArray(store, computed("t", filled(e))), value


def read_in(t: LazyArray, block: int) -> torch.Tensor:
    """The whole tensor, computed in blocks of some elements."""
    reads = Selection.all(t.spec.shape).reads()
    out = torch.empty(t.shape, dtype=t.dtype)
    run(tasks(t.store, t.spec, reads, out, block))
    return out


@some
@given(data=st.data())
def test_values_are_those_of_torch(files: Files, data: st.DataObject) -> None:
    t, value = world(data.draw, files, data.draw(st.integers(1, 3)), wild=False)
    assert (t.shape, t.dtype) == (value.shape, value.dtype)
    whole = t[...]
    assert torch.equal(whole.nan_to_num(), value.nan_to_num()) and torch.equal(whole.isnan(), value.isnan())


@some
@given(data=st.data())
def test_a_part_is_a_part_of_the_whole(files: Files, data: st.DataObject) -> None:
    t, _ = world(data.draw, files, data.draw(st.integers(1, 3)), wild=True)
    whole = t[...]
    for block in (1, 3, 64):
        same_bits(read_in(t, block), whole, block)
    key = data.draw(keys(tuple(t.shape)))
    expected = torch.from_numpy(np.array(index(bits(whole).numpy(), key)))
    part = t[key]
    assert torch.equal(bits(part), expected.view(bits(part).shape)), key
    same_bits(t.lazy[key][...], part)
    same_bits(pickle.loads(pickle.dumps(t.lazy[key]))[...], part)
    out = torch.empty(t.shape, dtype=t.dtype)
    same_bits(t.read_into(out), whole)
    for ahead, piece in t.pieces(16):
        same_bits(piece[...].reshape(-1), whole.reshape(-1)[ahead : ahead + piece.numel()])


@some
@given(data=st.data())
def test_what_is_needed_is_what_is_read(files: Files, data: st.DataObject) -> None:
    t, _ = world(data.draw, files, data.draw(st.integers(1, 3)), wild=False)
    key = data.draw(keys(tuple(t.shape)))
    selection = t._sel[key]
    needed = 0
    for one, want in wanted(t.spec, selection.reads().want):
        assert all(len(axis) <= n for axis, n in zip(want, one.shape, strict=True))
        needed += prod(map(len, want)) * one.dtype.itemsize
    assert t._cost(selection).nbytes == needed
    assert t.explain(key)


def test_threads_do_not_change_bits(files: Files) -> None:
    rows, columns, rank = 100, 1001, 5
    shapes = {"w": (rows, columns), "a": (rank, columns), "b": (rows, rank)}
    for seed, dtype in enumerate(FLOATS):
        view = files.write({name: random_tensor(shape, dtype, seed, True) for name, shape in shapes.items()})
        w, a, b = (operand(view.specs[name]) for name in "wab")
        e = make("linear", w, make("product", b, a, dtype=None), weights=(1, 0.3), dtype=None)
        t = LazyArray(view._store, computed("t", make("cast", make("mean", e, e), dtype=dtype_of(torch.bfloat16))))
        before, found = torch.get_num_threads(), []
        try:
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                found += [t[...], read_in(t, 999), read_in(t, 70_000)]
        finally:
            torch.set_num_threads(before)
        readers = [threading.Thread(target=lambda t=t, found=found: found.append(t[...])) for _ in range(4)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        assert len(found) == 13
        for one in found[1:]:
            same_bits(one, found[0])


def test_a_row_reads_its_row(tmp_path: Path) -> None:
    rows, columns, rank = 40, 64, 4
    tensors = {
        "w": torch.randn(rows, columns).bfloat16(),
        "a": torch.randn(rank, columns),
        "b": torch.randn(rows, rank),
    }
    torch.save(tensors, tmp_path / "m.pt")
    view, counts = opened(tmp_path / "m.pt")
    w, a, b = (operand(view.specs[name]) for name in "wab")
    e = make("linear", w, make("product", b, a, dtype=None), weights=(1, 0.5), dtype=None)
    t = LazyArray(view._store, computed("t", e))
    assert t.dtype == torch.float32
    expected = columns * 2 + rank * 4 + rank * columns * 4
    assert f"({expected:,} bytes read" in t.explain(7)
    t[7]
    counts.clear()
    row = t[7]
    assert counts.bytes == expected
    total = torch.zeros(columns)
    for k in range(rank):
        total = total + tensors["b"][7, k] * tensors["a"][k]
    same_bits(row, tensors["w"][7].float() + total * 0.5)
    assert formula(t.spec) == "computed: linear(weights=(1, 0.5)) of (w, product of (b, a))"


def test_groups_of_dimensions_are_reshaped_apart(files: Files) -> None:
    view = files.write({"w": torch.arange(4.0 * 6 * 10).view(4, 6, 10)})
    e = make("reshape", operand(view.specs["w"]), shape=(24, 2, 5))
    t = LazyArray(view._store, computed("t", e))
    same_bits(t[3:20:7, 1, ::2], t[...][3:20:7, 1, ::2])
    ((_, want),) = wanted(t.spec, t._sel[:, 1, 2].reads().want)
    assert want == (range(4), range(6), range(7, 8))
    ((_, want),) = wanted(t.spec, t._sel[7].reads().want)
    assert want == (range(1, 2), range(1, 2), range(10))
    huge = make("reshape", Input(TensorSpec("h", (1 << 40,), dtype_of(torch.float32), ())), shape=(1 << 20, 1 << 20))
    ((_, want),) = wanted(computed("h", huge), (range(3, 4), range(0, 1 << 20, 2)))
    assert want == (range(3 << 20, (4 << 20) - 1, 2),)
    ((_, want),) = wanted(computed("h", huge), (range(1 << 20), range(1)))  # about it only: nothing that large is made
    assert len(want[0]) == 1 << 20 or want[0] == range((1 << 40) - (1 << 20) + 1)


@pytest.mark.parametrize("op", ["linear", "mean"])
def test_midpoints_of_bfloat16(files: Files, op: str) -> None:
    """The mean of two tensors of bfloat16 is one kernel of torch: its bits are those of the kernels it replaces."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    ends = [0.0, 1.0, 1.5, 2.0**-126, 1.25 * 2.0**-128, 2.0**-133, 2.0**126, 2.0**127, 3.3e38, torch.inf, torch.nan]
    some = torch.cat((torch.tensor([*ends, *(-x for x in ends)], dtype=torch.bfloat16), every[77::8191]))
    first, second = every.repeat(len(some)), some.repeat_interleave(len(every))
    if op == "linear":
        wanted = (first.float() * 0.5 + second.float() * 0.5).bfloat16()
    else:
        wanted = ((first.float() + second.float()) / 2).bfloat16()
    wanted[wanted.isnan()] = torch.nan
    view = files.write({"a": first, "b": second})
    params = {"weights": (0.5, 0.5), "dtype": None} if op == "linear" else {}
    t = LazyArray(view._store, computed("t", make(op, *(operand(view.specs[name]) for name in "ab"), **params)))
    same_bits(t[...], wanted)
    for key in (slice(5, 12), slice(65_000, 300_001), slice(3, None, 1001)):  # parts are no whole vectors
        same_bits(t[key], wanted[key], key)


def test_several_stores(files: Files) -> None:
    one, two = files.write({"w": torch.ones(3)}), files.write({"w": torch.full((3,), 5.0)})
    store, numbers = joined([one._store, two._store, one._store])
    assert isinstance(store, Joined) and len(store.stores) == 2 and numbers == [0, 1, 0]
    parts = [relocated_sources(operand(v.specs["w"]), n) for v, n in zip((one, two), numbers, strict=False)]
    e = make("linear", *parts, weights=(1.0, 2.0), dtype=None)
    t = LazyArray(store, computed("t", e))
    assert t[...].tolist() == [11.0] * 3
    assert [o.store for o in t.operands] == [one._store, two._store]
    again = pickle.loads(pickle.dumps(t))
    assert again[...].tolist() == [11.0] * 3
    for part, value in zip(parts, (1.0, 5.0), strict=True):
        assert LazyArray(store, computed("u", part))[...].tolist() == [value] * 3
    assert LazyArray(one._store, of_one_store("u", parts[0]))[...].tolist() == [1.0] * 3
    with pytest.raises(ValueError, match="store 1 of several"):
        of_one_store("u", parts[1])
    with pytest.raises(ValueError, match="needs an expression"):
        LazyArray(store, of_one_store("u", parts[0]))
    more, (first, second) = joined([store, two._store])
    assert isinstance(more, Joined) and (first, second) == (0, 1)


def test_memory_does_not_grow_with_the_tensor(files: Files) -> None:
    n = 1 << 23
    view = files.write({"a": torch.zeros(n, dtype=torch.bfloat16), "b": torch.zeros(n, dtype=torch.bfloat16)})
    parts = [operand(view.specs[name]) for name in "ab"]
    spec = computed("t", make("linear", *parts, weights=(0.5, 0.5), dtype=None))
    most = [0]

    class Watching(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            if isinstance(found, torch.Tensor) and found.untyped_storage().data_ptr() != out.data_ptr():
                most[0] = max(most[0], found.untyped_storage().nbytes())
            return found

    out = torch.empty(n, dtype=torch.bfloat16)
    work = list(tasks(view._store, spec, Selection.all((n,)).reads(), out))

    def go() -> None:
        with Watching():
            for _, do in work:
                do()

    thread = threading.Thread(target=go)  # a new one: it has no memory yet that it uses again
    thread.start()
    thread.join()
    assert 0 < most[0] < 16 << 20  # an operand has 16 MiB


def test_blocks_follow_the_grain() -> None:
    spec = TensorSpec("w", (1000, 1000), dtype_of(torch.float32), ())
    turned = make("transpose", Input(spec), axes=(1, 0))
    assert op_of("transpose").grain(turned) == (256, 1)
    assert cut(turned, (1000, 1000), 1 << 16) == (256, 256)
    assert op_of("linear").grain(make("linear", turned, weights=(2.0,), dtype=None)) == (256, 1)
    assert cut(make("same", Input(spec)), (1000, 1000), 1000) == (1, 1000)
    assert cut(make("same", Input(spec)), (), 1000) == ()


def test_prepared_once(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    from lazyckpt.core import expr as module
    from lazyckpt.core.ops.elementwise import OPS, Same

    calls = []

    class Centred(Same):
        prepares, moves = True, False

        def prepare(self, e: Expr, scan: Any) -> float:
            calls.append(threading.get_ident())
            total, count = 0.0, 0
            for box, (block,) in scan(0):
                total += float(block.double().sum())
                count += box.numel
            return total / count

        def compute(self, e: Expr, want: Any, blocks: Any) -> torch.Tensor:
            found: torch.Tensor = blocks[0] - e.kept["prepared"]
            return found

    monkeypatch.setitem(OPS, "test.centred", Centred())
    monkeypatch.setitem(module._MODULES, "test.centred", "elementwise")
    n = 3 << 20
    view = files.write({"w": torch.arange(n, dtype=torch.float32)})
    inner = make("test.centred", operand(view.specs["w"]))
    t = LazyArray(view._store, computed("t", make("test.centred", inner)))
    assert t[0].item() == -(n - 1) / 2 and len(calls) == 2
    assert t[...][-1].item() == (n - 1) / 2 and len(calls) == 2
    assert pickle.loads(pickle.dumps(t))[0].item() == -(n - 1) / 2


REFUSED: list[tuple[str, list[tuple[tuple[int, ...], torch.dtype]], dict[str, Any]]] = [
    ("linear", [((2,), torch.float32), ((3,), torch.float32)], {"weights": (1, 1), "dtype": None}),
    ("linear", [((2,), torch.float32)], {"weights": (1, 1), "dtype": None}),
    ("linear", [((2,), torch.int64)], {"weights": (1,), "dtype": None}),
    ("mean", [((2,), torch.float32), ((), torch.float32)], {}),
    ("cast", [((2,), torch.float4_e2m1fn_x2)], {"dtype": dtype_of(torch.float32)}),
    ("neg", [((2,), torch.uint8)], {}),
    ("product", [((2, 3), torch.float32), ((2, 3), torch.float32)], {"dtype": None}),
    ("product", [((3,), torch.float32), ((3,), torch.float32)], {"dtype": None}),
    ("reshape", [((2, 3), torch.float32)], {"shape": (5,)}),
    ("flat", [((2, 3), torch.float32)], {"start": 2, "stop": 7}),
    ("transpose", [((2, 3), torch.float32)], {"axes": (0, 0)}),
    ("place", [((2,), torch.float32)], {"shape": (2,), "placements": (Placement.at((2,), (1,)),)}),
    ("place", [((2,), torch.float32), ((2,), torch.bfloat16)], {"shape": (2,), "placements": (Placement((2,)),) * 2}),
    ("unheard.of", [((2,), torch.float32)], {}),
]


@pytest.mark.parametrize(("op", "kinds", "params"), REFUSED, ids=[f"{n}-{op}" for n, (op, _, _) in enumerate(REFUSED)])
def test_operands_that_do_not_fit(op: str, kinds: Any, params: dict[str, Any]) -> None:
    inputs = [Input(TensorSpec(str(n), shape, dtype_of(dtype), ())) for n, (shape, dtype) in enumerate(kinds)]
    with pytest.raises(DataError):
        make(op, *inputs, **params)


def test_a_gap_between_blocks_is_an_error(files: Files) -> None:
    view = files.write({"w": torch.ones(4)})
    placement = Placement((4,), (Part(Box((0,), (2,)), (0,)), Part(Box((0,), (2,)), (1,))))
    t = LazyArray(
        view._store, computed("t", make("place", operand(view.specs["w"]), shape=(4,), placements=(placement,)))
    )
    assert t[:3].tolist() == [1, 1, 1]
    with pytest.raises(DataError, match="1 of the wanted elements"):
        t[...]
    with pytest.raises(SelectionError):
        t[9]


def test_complex_elements(files: Files) -> None:
    value = random_tensor((5, 3), torch.complex64, 1, True)
    view = files.write({"w": value})
    for op, expected in (("conj", value.conj()), ("neg", -value)):
        t = LazyArray(view._store, computed("t", make(op, operand(view.specs["w"]))))
        same_bits(t[1:4, ::2], expected.resolve_conj()[1:4, ::2])


def test_every_operation_is_tested() -> None:
    from lazyckpt.core.expr import _MODULES

    own = {name for name, module in _MODULES.items() if module in ("elementwise", "placing", "product")}
    tested = {"same", "cast", "linear", "mean", "neg", "conj", "reshape", "flat", "transpose", "place", "product"}
    assert own == tested, "add the new operations to `expressions`"


def test_every_operation_is_documented() -> None:
    from lazyckpt.core.expr import _MODULES

    page = (Path(__file__).parent.parent / "docs" / "reference" / "operations.md").read_text()
    assert [name for name in _MODULES if f"`{name}`" not in page] == []


def test_leaves_in_order(files: Files) -> None:
    def names() -> Iterator[str]:
        yield from (one.spec.name for one in leaves(computed("t", make("mean", make("mean", a, b), c))))

    a, b, c = (Input(TensorSpec(n, (2,), dtype_of(torch.float32), ())) for n in "abc")
    assert list(names()) == ["a", "b", "c"]
    assert np.array_equal(wanted_names(), ["a", "b"])


def wanted_names() -> list[str]:
    a, b = (Input(TensorSpec(n, (2,), dtype_of(torch.float32), ())) for n in "ab")
    return sorted(one.spec.name for one, _ in wanted(computed("t", make("mean", a, b)), (range(1),)))
