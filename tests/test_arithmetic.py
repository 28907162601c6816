"""Arithmetic of views by names: sums, differences, means, and averages over a run's steps."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import lazyckpt
from lazyckpt.core.expr import computed, make, operand
from lazyckpt.core.select import Selection
from lazyckpt.io.pool import run
from lazyckpt.io.reading.compute import tasks
from lazyckpt.lazy import LazyArray
from lazyckpt.testing import opened

from .writers import Case, bit_equal

Views = tuple[lazyckpt.CheckpointView, lazyckpt.CheckpointView]


def written(path: Path, tensors: dict[str, torch.Tensor]) -> lazyckpt.CheckpointView:
    """A checkpoint of torch.save, whose shared storages are tied names, or of safetensors."""
    if path.suffix == ".pt":
        torch.save(tensors, path)
    else:
        save_file(tensors, path)
    return lazyckpt.open(path)


def model(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    shapes = {"embed.weight": (9, 4), "layers.0.w": (5, 3), "layers.1.w": (5, 3), "norm": (4,), "scalar": ()}
    return {name: torch.randn(shape, generator=rng).to(dtype) for name, shape in shapes.items()}


@pytest.fixture
def views(tmp_path: Path) -> Views:
    return written(tmp_path / "a.safetensors", model(1)), written(tmp_path / "b.pt", model(2))


def test_sums_differences_and_multiples(views: Views) -> None:
    a, b = views
    x, y = model(1), model(2)
    for name in x:
        assert torch.equal((0.5 * a + b * 0.25)[name][...], x[name] * 0.5 + y[name] * 0.25)
        assert torch.equal((a - b)[name][...], x[name] - y[name])
        assert torch.equal((-a)[name][...], -x[name])
        assert torch.equal((a / 4)[name][...], x[name] / 4)
        assert torch.equal((np.float32(2) * a)[name][...], x[name] * 2)
        assert torch.equal(sum([a, b])[name][...], x[name] + y[name])
    both = a + b
    assert list(both) == list(a) and both.format == "combined" and both.state == "weights"
    assert torch.equal(both["layers"]["0.w"][1:3, [0, 2]], (x["layers.0.w"] + y["layers.0.w"])[1:3, [0, 2]])
    assert torch.equal((a["layers"] - b["layers"])["1.w"][...], x["layers.1.w"] - y["layers.1.w"])
    assert torch.equal(pickle.loads(pickle.dumps(both))["norm"][...], x["norm"] + y["norm"])
    for wrong in (1, "a", None):
        with pytest.raises(TypeError):
            a + wrong  # type: ignore[operator]


def test_a_combination_is_rounded_once(tmp_path: Path) -> None:
    parts = [model(n, torch.bfloat16) for n in range(3)]
    a, b, c = (written(tmp_path / f"{n}.safetensors", part) for n, part in enumerate(parts))
    found = (0.3 * a + 0.3 * (b - a) + c / 3)["embed.weight"]
    x, y, z = (part["embed.weight"].float() for part in parts)
    assert "linear(weights=(0.0, 0.3, 0.333" in found.explain()  # a tensor that occurs twice is read once
    assert torch.equal(found[...], (x * 0.0 + y * 0.3 + z * (1 / 3)).bfloat16())
    wide = 0.5 * a.astype(torch.float32) + 0.5 * b
    assert wide["norm"].dtype == torch.float32
    assert torch.equal(wide["norm"][...], parts[0]["norm"].float() * 0.5 + parts[1]["norm"].float() * 0.5)


def test_dtypes_are_promoted(tmp_path: Path) -> None:
    a = written(tmp_path / "a.safetensors", model(1, torch.bfloat16))
    b = written(tmp_path / "b.safetensors", model(2, torch.float16))
    d = written(tmp_path / "d.safetensors", model(2, torch.float64))
    assert (a + a)["norm"].dtype == torch.bfloat16
    assert (a + b)["norm"].dtype == torch.float32
    found = (a + d)["norm"]
    assert found.dtype == torch.float64
    assert torch.equal(found[...], model(1, torch.bfloat16)["norm"].double() + model(2, torch.float64)["norm"])
    codes = written(tmp_path / "codes.safetensors", {"w": torch.zeros(3).to(torch.float8_e4m3fn)})
    with pytest.raises(lazyckpt.DataError, match="dequantize"):
        codes + codes


def test_integers_are_kept_if_they_agree(tmp_path: Path) -> None:
    def of(name: str, ids: torch.Tensor) -> lazyckpt.CheckpointView:
        return written(tmp_path / f"{name}.safetensors", {"w": torch.ones(2), "ids": ids})

    a, b, c = of("a", torch.arange(5)), of("b", torch.arange(5)), of("c", torch.arange(1, 6))
    assert (0.5 * a)["ids"][...].tolist() == (a + b)["ids"][...].tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(lazyckpt.DataError, match="'ids' is i64 and differs"):
        (a - c)["ids"][...]
    with pytest.raises(lazyckpt.DataError, match="'ids' is i64 and i32"):
        a + of("d", torch.arange(5, dtype=torch.int32))


def test_complex_buffers_are_compared_by_their_bits(tmp_path: Path) -> None:
    freqs = torch.tensor([complex(float("nan"), 1), complex(0, -0.0), 2])
    a, b, c = (
        written(tmp_path / f"{n}.pt", {"w": torch.ones(2), "freqs": x, "one": x[0].clone()})
        for n, x in enumerate((freqs, freqs, torch.tensor([complex(float("nan"), 1), 0, 2])))
    )
    both = lazyckpt.mean([a, b])
    assert bit_equal(both["freqs"][...], freqs) and bit_equal(both["one"][...], freqs[0])
    with pytest.raises(lazyckpt.DataError, match="'freqs' is c64 and differs"):
        lazyckpt.mean([a, c])["freqs"][...]


def test_names_that_all_views_tie_stay_tied(tmp_path: Path) -> None:
    def of(name: str, tied: bool) -> lazyckpt.CheckpointView:
        t = torch.ones(3)
        return written(tmp_path / f"{name}.pt", {"a": t, "b": t if tied else t.clone(), "c": t.clone()})

    x, y, z = of("x", True), of("y", True), of("z", False)
    assert dict((x + y).aliases) == dict(x.aliases) and len(x.aliases) == 1
    assert not (x + z).aliases and (x + z)["b"][...].tolist() == [2, 2, 2]
    (x + y).to_safetensors(tmp_path / "out.safetensors")
    assert len(load_file(tmp_path / "out.safetensors")) == 2


def test_missing_names_and_other_shapes(tmp_path: Path, views: Views) -> None:
    a, _ = views
    other = model(3)
    del other["norm"]
    other["layers.0.w"] = torch.zeros(3, 5)
    other["more"] = torch.zeros(1)
    c = written(tmp_path / "c.safetensors", other)
    with pytest.raises(lazyckpt.DataError) as e:
        a + c
    text = str(e.value)
    assert "lacks 'norm'" in text and "lacks 'more'" in text and "'layers.0.w' is 5x3 and 3x5" in text
    assert len(text.splitlines()) == 1 and "\\n" not in text  # messages are printed as one line
    skipped = lazyckpt.mean([a, c], missing="skip")
    assert set(skipped) == {"embed.weight", "layers.1.w", "scalar"}
    kept = lazyckpt.mean([c, a], missing="keep")
    assert set(kept) == set(other) | {"norm"}
    assert torch.equal(kept["norm"][...], model(1)["norm"]) and kept["layers.0.w"].shape == (3, 5)
    with pytest.raises(lazyckpt.DataError, match="no tensor has the same name and shape"):
        lazyckpt.mean([a, c.select("more")], missing="skip")
    with pytest.raises(lazyckpt.DataError, match="missing="):
        lazyckpt.mean([a, c], missing="ignore")  # type: ignore[arg-type]


def test_means(tmp_path: Path, views: Views) -> None:
    a, b = views
    x, y = model(1)["embed.weight"], model(2)["embed.weight"]
    assert torch.equal(lazyckpt.mean([a, b])["embed.weight"][...], (x + y) / 2)
    assert torch.equal(lazyckpt.mean([a, b], [3, 1])["embed.weight"][...], x * 0.75 + y * 0.25)
    for odd in (["a", "b"], "ab", 1, [None, 1]):
        with pytest.raises(lazyckpt.DataError, match="a mean takes a list of numbers, one for each view"):
            lazyckpt.mean([a, b], odd)  # type: ignore[arg-type]
    for weights in ([float("nan"), 1], [float("inf"), 1]):
        with pytest.raises(lazyckpt.DataError, match="finite"):
            lazyckpt.mean([a, b], weights)
    assert torch.equal(lazyckpt.mean([a, a])["embed.weight"][...], x)
    for wrong in ([1], [1, -1], [1, float("nan")]):
        with pytest.raises(lazyckpt.DataError):
            lazyckpt.mean([a, b], wrong)
    with pytest.raises(lazyckpt.DataError):
        lazyckpt.mean([])


def test_a_slice_reads_its_bytes_of_each_view(tmp_path: Path) -> None:
    for name in "ab":
        save_file({"w": torch.randn(64, 256), "v": torch.zeros(9)}, tmp_path / f"{name}.safetensors")
    (a, asked_a), (b, asked_b) = (opened(tmp_path / f"{name}.safetensors") for name in "ab")
    t = (0.5 * a + 0.5 * b)["w"]
    asked_a.clear(), asked_b.clear()
    t[5:7]
    assert (asked_a.bytes, asked_b.bytes) == (2048, 2048)
    assert (asked_a.requests, asked_b.requests) == (1, 1)
    asked_a.clear()
    (a + 0.1 * (b - a))["w"][0]
    assert asked_a.bytes == 1024


def test_an_average_is_of_one_state(tmp_path: Path, zero_cases: Mapping[str, Case]) -> None:
    view = lazyckpt.open(zero_cases["zero2_bf16_dp2"].path)
    view.to_zarr(tmp_path / "step-2", progress=False)
    view.to_zarr(tmp_path / "step-1", states=["fp32"], progress=False)
    run = lazyckpt.open_run(tmp_path)
    assert run.at(1).state == "fp32"
    with pytest.raises(lazyckpt.TensorNotFoundError, match=r"step 1 has no state 'weights'.*fp32"):
        run.mean([1, 2])
    mean = run.states["fp32"].mean([1, 2])
    name = next(iter(mean))
    assert torch.equal(mean[name][...], view.states["fp32"][name][...])


@pytest.fixture
def line(tmp_path: Path) -> lazyckpt.RunView:
    for step in (10, 20, 30, 40):
        torch.save({"model": model(step)}, tmp_path / f"step_{step}.pt")
    return lazyckpt.open_run(tmp_path)


def test_averages_over_the_steps_of_a_run(line: lazyckpt.RunView) -> None:
    name = next(name for name in line if name.endswith("embed.weight"))
    x = [model(step)["embed.weight"] for step in line.steps]
    mean = line.mean()
    assert torch.equal(mean[name][...], (x[0] + x[1] + x[2] + x[3]) / 4)
    assert torch.equal(line.mean(line.steps[-2:])[name][2:4], ((x[2] + x[3]) / 2)[2:4])
    moving = x[0].double()
    for step in x[1:]:
        moving = 0.9 * moving + 0.1 * step.double()
    assert torch.allclose(line.ema(0.9)[name][...].double(), moving, rtol=1e-6, atol=1e-7)
    assert torch.equal(line.ema(0)[name][...], x[3])
    with pytest.raises(lazyckpt.MissingFileError):
        line.mean([10, 25])
    with pytest.raises(lazyckpt.DataError):
        line.ema(1.5)
    with pytest.raises(lazyckpt.DataError, match="stacked over its steps"):
        0.5 * line
    first = name.partition(".")[0]
    assert torch.equal(line[first].mean()[name.removeprefix(f"{first}.")][...], mean[name][...])


def test_one_operand_is_held_at_a_time(views: Views) -> None:
    """A mean of many operands asks for the next one only when it has added the one before."""
    spec = views[0].specs["embed.weight"]
    e = make("mean", *(operand(spec) for _ in range(50)))
    alive: list[int] = []

    def blocks():  # type: ignore[no-untyped-def]
        import weakref

        held = []
        for n in range(50):
            block = torch.full((9, 4), float(n))
            held.append(weakref.ref(block))
            alive.append(sum(one() is not None for one in held))
            yield block
            del block

    from lazyckpt.core.expr import op_of

    found = op_of("mean").compute(e, (range(9), range(4)), blocks())
    assert torch.equal(found, torch.full((9, 4), 24.5)) and max(alive) <= 3


OPERATIONS = {
    "merge.task_vectors": {
        "weights": (0.5, -0.3), "sparsify": "magnitude", "densities": (0.6, 0.3), "consensus": "sum",
        "normalize": True, "rescale": True, "scale": 0.7,
    },
    "merge.slerp": {"t": 0.3, "eps": 1e-8},
    "merge.nuslerp": {"weights": (0.5, 0.3)},
    "merge.multislerp": {"weights": (0.5, 0.3, 0.2), "normalize_weights": True, "eps": 1e-8},
    "merge.karcher": {"max_iter": 10, "tol": 1e-5},
    "merge.model_stock": {},
    "linear": {"weights": (0.5, 0.3, 1)},
    "mean": {},
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("wild", [False, True])
def test_bits_do_not_depend_on_blocks(op: str, dtype: torch.dtype, wild: bool, tmp_path: Path) -> None:
    """Also for NaN, infinities and denormal numbers, which random bits are full of."""
    rng = torch.Generator().manual_seed(3)
    count = 2 if op in ("merge.slerp", "merge.nuslerp") else 3
    tensors = {}
    for n in range(count):
        data = torch.randint(0, 256, (7 * 13 * dtype.itemsize,), dtype=torch.uint8, generator=rng)
        tensors[str(n)] = data.view(dtype).view(7, 13) if wild else torch.randn(7, 13, generator=rng).to(dtype)
    torch.save(tensors, tmp_path / "t.pt")
    view = lazyckpt.open(tmp_path / "t.pt")
    t = LazyArray(view._store, computed("t", make(op, *(operand(view.specs[n]) for n in tensors), **OPERATIONS[op])))
    whole = t[...]
    same = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    for block in (1, 5, 30):
        out = torch.empty(7, 13, dtype=dtype)
        run(tasks(t.store, t.spec, Selection.all(t.spec.shape).reads(), out, block))
        assert torch.equal(out.view(same), whole.view(same))
    assert torch.equal(t[2:6, [1, 3, 12]].view(same), whole[2:6, [1, 3, 12]].view(same))


def test_errors_name_the_files_of_one_folder(tmp_path: Path) -> None:
    for name, key in (("one", "x"), ("two", "y")):
        save_file({key: torch.ones(2)}, tmp_path / f"{name}.safetensors")
    one, two = (lazyckpt.open(tmp_path / f"{name}.safetensors") for name in ("one", "two"))
    with pytest.raises(lazyckpt.DataError, match=r"\(.*one\.safetensors\) lacks 'y'.*\(.*two\.safetensors\) lacks 'x'"):
        lazyckpt.mean([one, two])
