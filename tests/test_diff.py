"""lazyckpt.diff: what differs between two checkpoints, against numpy's and torch's own comparison."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from typer.testing import CliRunner, Result

import lazyckpt
from lazyckpt import cli
from lazyckpt.errors import DataError, TensorNotFoundError
from lazyckpt.inspect import diff as module
from lazyckpt.inspect.packs import Pack
from lazyckpt.show import differences


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    torch.manual_seed(0)
    w = torch.randn(64, 33)
    v = w.clone()
    v[5, 7] += 0.5
    v[40, 0] -= 2
    nan = torch.tensor([1.0, float("nan"), float("inf"), -0.0])
    a = {"same": w, "values": w, "dtype": w.bfloat16(), "rounded": w, "shape": w, "a": w[:1], "nan": nan}
    b = {"same": w, "values": v, "dtype": w.bfloat16().float(), "rounded": w.bfloat16(), "shape": w.T, "b": w[0]}
    b |= {"nan": nan}
    torch.save(a, tmp_path / "a.pt")
    apart = {name: t.clone(memory_format=torch.contiguous_format) for name, t in b.items()}
    save_file(apart, tmp_path / "b.safetensors")
    return tmp_path / "a.pt", tmp_path / "b.safetensors"


def test_every_kind_of_difference(pair: tuple[Path, Path]) -> None:
    found = lazyckpt.diff(*pair)
    rows = {row.name: row for row in found}
    assert {name: row.status for name, row in rows.items()} == {
        "same": "equal", "values": "values", "dtype": "dtype", "rounded": "dtype", "shape": "shape",
        "a": "only in a", "nan": "equal", "b": "only in b",
    }  # fmt: skip
    values = rows["values"]
    assert (values.count, values.at) == (2, (5, 7))
    assert values.max_abs == pytest.approx(2, rel=1e-6)
    assert (rows["dtype"].count, rows["dtype"].max_abs, rows["dtype"].at) == (0, None, None)
    w = lazyckpt.open(pair[0])["same"][...]
    assert rows["rounded"].count == int((w != w.bfloat16()).sum())
    assert rows["rounded"].max_abs == float((w.double() - w.bfloat16().double()).abs().max())
    assert rows["shape"].a == "f32[64, 33]" and rows["shape"].b == "f32[33, 64]"
    assert not found.equal and bool(found)
    assert "2 of 8 tensors are equal" in repr(found)
    assert "values: 2 elements differ, the first at [5, 7], by 2 at most" in repr(found)
    assert "b: only in b (f32[33])" in repr(found)


def test_tables(pair: tuple[Path, Path]) -> None:
    found = lazyckpt.diff(*pair)
    table = pd.DataFrame(found)
    assert list(table.name) == [row.name for row in found] and table.shape[0] == len(found) == 8
    told = {row["name"]: row for row in json.loads(json.dumps(found.as_dicts()))}
    assert told["values"]["at"] == [5, 7]
    assert len(found.differing) == 6 and found[-1].name == "b" and len(found[:2]) == 2


def test_equal_is_silent(pair: tuple[Path, Path]) -> None:
    found = lazyckpt.diff(pair[0], lazyckpt.open(pair[0]))
    assert found.equal and not found and repr(found) == "7 of 7 tensors are equal"


def test_signs_of_zeros_and_bits_of_nans_count(tmp_path: Path) -> None:
    torch.save({"zero": torch.zeros(3), "c": torch.zeros(2, dtype=torch.complex128)}, tmp_path / "a.pt")
    torch.save({"zero": -torch.zeros(3), "c": torch.tensor([0, 1j], dtype=torch.complex128)}, tmp_path / "b.pt")
    zero, c = lazyckpt.diff(tmp_path / "a.pt", tmp_path / "b.pt")
    assert (zero.status, zero.count, zero.max_abs) == ("values", 3, 0)
    assert (c.status, c.count, c.at, c.max_abs) == ("values", 1, (1,), 1)


def test_tied_names_are_compared_with_what_has_its_own_tensor(tmp_path: Path) -> None:
    w = torch.randn(4, 4)
    torch.save({"x": w, "y": w}, tmp_path / "a.pt")
    torch.save({"x": w, "y": w + 1}, tmp_path / "b.pt")
    for one, other in (("a.pt", "b.pt"), ("b.pt", "a.pt")):
        rows = {row.name: row.status for row in lazyckpt.diff(tmp_path / one, tmp_path / other)}
        assert rows == {"x": "equal", "y": "values"}


def test_what_cannot_be_read_is_a_row(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    save_file({"x": torch.ones(4)}, folder / "model-00001-of-00002.safetensors")
    weight_map = {"x": "model-00001-of-00002.safetensors", "y": "model-00002-of-00002.safetensors"}
    save_file({"y": torch.ones(4)}, folder / "model-00002-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    view = lazyckpt.open(folder)
    copy = tmp_path / "copy.pt"
    view.to_torch(copy)
    with (folder / "model-00002-of-00002.safetensors").open("r+b") as file:
        file.truncate(80)
    x, y = lazyckpt.diff(view, copy)
    assert (x.status, y.status) == ("equal", "unreadable")
    assert "model-00002-of-00002" in str(y)


def test_an_error_of_the_system_is_a_row(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fails at one place, or a server."""
    read = lazyckpt.LazyTensor.__getitem__

    def failing(t: lazyckpt.LazyTensor, key: object) -> torch.Tensor:
        if t.name == "values":
            raise OSError(5, "Input/output error")
        return read(t, key)

    def failed(pack: Pack) -> torch.Tensor:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(lazyckpt.LazyTensor, "__getitem__", failing)
    monkeypatch.setattr(Pack, "read", failed)  # of tensors that are read together, all are read again, one by one
    rows = {row.name: row for row in lazyckpt.diff(*pair)}
    assert (rows["values"].status, rows["same"].status) == ("unreadable", "equal")
    assert "Input/output error" in str(rows["values"])


def test_names_of_a_lost_file_are_told(tmp_path: Path) -> None:
    """They are no names of the view: without a row of their own, two halves of a checkpoint would be proven equal."""
    folder = tmp_path / "hf"
    folder.mkdir()
    for n, name in ((1, "x"), (2, "y")):
        save_file({name: torch.ones(4)}, folder / f"model-0000{n}-of-00002.safetensors")
    weight_map = {"x": "model-00001-of-00002.safetensors", "y": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    lazyckpt.open(folder).to_torch(tmp_path / "full.pt")
    torch.save({"x": torch.ones(4)}, tmp_path / "half.pt")
    (folder / "model-00002-of-00002.safetensors").unlink()
    view = lazyckpt.open(folder)
    for other in (view, tmp_path / "full.pt", tmp_path / "half.pt"):
        for found in (lazyckpt.diff(view, other), lazyckpt.diff(other, view), lazyckpt.diff(view, other, states="all")):
            assert [(row.name, row.status) for row in found] == [("x", "equal"), ("y", "unreadable")]
            assert not found.equal and "model-00002-of-00002" in str(found[1])
    assert lazyckpt.diff(view.select("x"), tmp_path / "half.pt").equal


def test_states(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    for name in ("a", "b"):
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / f"{name}.pt")
        optimizer.state[model.bias]["exp_avg"] += 1
    a, b = tmp_path / "a.pt", tmp_path / "b.pt"
    assert lazyckpt.diff(a, b).equal
    everything = lazyckpt.diff(a, b, states="all")
    assert [(row.state, row.name) for row in everything.differing] == [("exp_avg", "bias")]
    assert "exp_avg: bias: 2 elements differ" in repr(everything)
    assert lazyckpt.diff(a, b, states=["exp_avg_sq"]).equal
    with pytest.raises(TensorNotFoundError, match="exp_avg"):
        lazyckpt.diff(a, b, states=["moments"])


def test_memory_that_is_no_size(pair: tuple[Path, Path]) -> None:
    with pytest.raises(DataError, match="not understood"):
        lazyckpt.diff(*pair, memory="much")


def told(tmp_path: Path, x: torch.Tensor, y: torch.Tensor) -> lazyckpt.Difference:
    torch.save({"w": x}, tmp_path / "a.pt")
    torch.save({"w": y}, tmp_path / "b.pt")
    (row,) = lazyckpt.diff(tmp_path / "a.pt", tmp_path / "b.pt")
    return row


NUMBERS = [0, 1, -1, 255, 2**24 + 1, 2**53, 2**53 + 1, -(2**53) - 1, 2**62 + 1, -(2**63), 2**63 - 1, 2**63, 2**64 - 1]
FRACTIONS = [*map(float, NUMBERS), 0.5, -1e-300, 1e300, float("inf"), float("-inf"), float("nan")]


def exact(x: int | float, y: int | float) -> bool:
    """Python compares numbers of any kind as they are."""
    return x == y or (x != x and y != y)


def test_numbers_of_two_dtypes_are_compared_exactly(tmp_path: Path) -> None:
    """float64 holds no integer of 64 bits, and none of 64 bits holds both a sign and 2**64 - 1."""
    signed = torch.tensor([n for n in NUMBERS if n < 2**63])
    unsigned = torch.tensor([n for n in NUMBERS if n >= 0], dtype=torch.uint64)
    fractions = torch.tensor(FRACTIONS, dtype=torch.float64)
    for one, other in ((signed, unsigned), (unsigned, fractions), (signed, fractions), (signed, fractions.float())):
        x, y = one[:, None].expand(-1, len(other)).contiguous(), other.expand(len(one), -1).contiguous()
        wrong = [[i, j] for i, a in enumerate(one.tolist()) for j, b in enumerate(other.tolist()) if not exact(a, b)]
        for row in (told(tmp_path, x, y), told(tmp_path, y, x)):
            assert (row.status, row.count, row.at) == ("dtype", len(wrong), tuple(wrong[0]))
    for n in NUMBERS:
        same = told(tmp_path, torch.tensor([n], dtype=torch.uint64 if n >= 2**63 else torch.int64), fractions[:1] + n)
        assert same.count == (0 if exact(n, float(n)) else 1)


def test_parts_of_complex_numbers_are_compared_each(tmp_path: Path) -> None:
    nan = float("nan")
    x = torch.tensor([complex(1, nan), complex(nan, 0), 2 + 0j], dtype=torch.complex64)
    y = torch.tensor([complex(2, nan), complex(nan, 0), 2 + 0j], dtype=torch.complex128)
    row = told(tmp_path, x, y)
    assert (row.count, row.at) == (1, (0,))
    assert told(tmp_path, x[2:], torch.tensor([2])).count == 0
    assert told(tmp_path, x[2:] + 1j, torch.tensor([2])).count == 1


def test_the_largest_difference_is_not_rounded_away(tmp_path: Path) -> None:
    assert told(tmp_path, torch.tensor([2**60, 5]), torch.tensor([2**60 + 1, 5])).max_abs == 1
    unsigned = torch.tensor([2**64 - 1], dtype=torch.uint64)
    assert told(tmp_path, unsigned, torch.tensor([2**64 - 2], dtype=torch.uint64)).max_abs == 1
    huge = torch.tensor([1e308, 1], dtype=torch.float64)
    assert told(tmp_path, huge, -huge).max_abs == torch.finfo(torch.float64).max
    inf = torch.tensor([float("inf"), 1.0])
    assert told(tmp_path, inf, torch.tensor([1.0, 3.0])).max_abs == 2


def test_packed_bits(tmp_path: Path) -> None:
    """Two 4-bit floats in a byte: torch knows no element of them, and indexes none."""
    packed = torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8)
    other = torch.tensor([[1, 2], [3, 5]], dtype=torch.uint8)
    row = told(tmp_path, packed.view(torch.float4_e2m1fn_x2), other.view(torch.float4_e2m1fn_x2))
    assert (row.status, row.count, row.at, row.max_abs) == ("values", 1, (1, 1), None)
    row = told(tmp_path, packed.view(torch.float4_e2m1fn_x2), packed)
    assert (row.status, row.count, row.at, row.max_abs) == ("dtype", None, None, None)
    assert str(row) == "w: f4x2[2, 2] and u8[2, 2], not compared, as packed bits are no numbers"


DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool, torch.complex64)


@pytest.mark.slow
@settings(deadline=None)
@given(data=st.data(), shape=st.lists(st.integers(0, 7), max_size=3), dtype=st.sampled_from(DTYPES))
def test_any_tensor_cut_anywhere(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, shape: list[int], dtype: torch.dtype
) -> None:
    whole = torch.randint(0, 2, shape).to(torch.float32)
    other = torch.where(torch.rand(shape) < data.draw(st.sampled_from([0.0, 0.2, 1.0])), 1 - whole, whole)
    x, y = whole.to(dtype), other.to(dtype)
    folder = tmp_path_factory.mktemp("pair")
    torch.save({"w": x}, folder / "a.pt")
    torch.save({"w": y}, folder / "b.pt")
    piece, of_run = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 20))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_PIECE", piece)
        patch.setattr(module, "_RUN", of_run)
        (row,) = lazyckpt.diff(folder / "a.pt", folder / "b.pt")
    wrong = (whole != other).nonzero()
    assert row.count == len(wrong)
    assert row.at == (tuple(wrong[0].tolist()) if len(wrong) else None)
    assert row.max_abs == (1 if len(wrong) else None)
    assert (row.status == "equal") == (not len(wrong))


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_how_close_tensors_are(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """However a tensor is cut, and whichever pieces are equal."""
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.complex64, torch.bool]))
    size = data.draw(st.integers(1, 60))
    x = (8 * torch.randn(size, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 9))))).to(dtype)
    y = x.clone()
    changed = data.draw(st.lists(st.integers(0, size - 1), max_size=3))
    for n in changed:
        y[n] = y[n] * 3 + 1 if dtype != torch.bool else ~y[n]
    odd = data.draw(st.booleans()) and dtype.is_floating_point
    if odd:
        y[0] = float("nan")
    folder = tmp_path_factory.mktemp("close")
    torch.save({"w": x}, folder / "a.pt")
    torch.save({"w": y}, folder / "b.pt")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_PIECE", data.draw(st.integers(1, 9)))
        patch.setattr(module, "_RUN", data.draw(st.integers(1, 20)))
        (row,) = lazyckpt.diff(folder / "a.pt", folder / "b.pt")
    wide = torch.complex128 if dtype.is_complex else torch.float64
    p, q = (t[int(odd) :].to(wide) for t in (x, y))
    if torch.equal(x, y):
        assert (row.relative, row.cosine, row.norm_a) == (0, 1, None)
        return
    norms = [float(t.norm()) for t in (p, q)]
    assert (row.norm_a, row.norm_b) == pytest.approx(norms)
    assert row.relative == (pytest.approx(float((p - q).norm()) / norms[0]) if norms[0] else None)
    dot = float(torch.view_as_real(p).flatten().dot(torch.view_as_real(q).flatten()) if dtype.is_complex else p.dot(q))
    assert row.cosine == (pytest.approx(dot / norms[0] / norms[1]) if all(norms) else None)


def test_how_close_dtypes_are(tmp_path: Path) -> None:
    w = torch.randn(3000)
    row = told(tmp_path, w, w.bfloat16())
    apart = (w.double() - w.bfloat16().double()).norm() / w.double().norm()
    assert row.relative == pytest.approx(float(apart)) and row.cosine == pytest.approx(1, abs=1e-4)
    row = told(tmp_path, torch.zeros(3), torch.ones(3))
    assert (row.relative, row.cosine, row.norm_a, row.norm_b) == (None, None, 0, pytest.approx(3**0.5))
    big = torch.full((2,), 1.5e308, dtype=torch.float64)
    row = told(tmp_path, big, -big)
    assert (row.relative, row.cosine, row.norm_a) == (2, pytest.approx(-1), None)  # float64 does not hold the norm


# -- the table


@pytest.mark.parametrize("exponent", [-1000, -600, 600, 1000])
def test_how_close_tensors_beyond_the_squares_of_float64_are(tmp_path: Path, exponent: int) -> None:
    g = torch.Generator().manual_seed(0)
    x, y = ((torch.randn(50, 30, generator=g, dtype=torch.float64) * 1024).round() / 1024 for _ in "xy")
    unit = 2.0 ** (exponent / 2)
    torch.save({"near": x, "far": x * unit * unit, "apart": x}, tmp_path / "a.pt")
    torch.save({"near": y, "far": y * unit * unit, "apart": y * unit * unit}, tmp_path / "b.pt")
    rows = {row.name: row for row in lazyckpt.diff(tmp_path / "a.pt", tmp_path / "b.pt")}
    near, far, apart = rows["near"], rows["far"], rows["apart"]
    assert (far.relative, far.cosine) == (near.relative, near.cosine)
    assert far.norm_a == math.ldexp(near.norm_a or 0, exponent) == pytest.approx(math.ldexp(float(x.norm()), exponent))
    assert apart.norm_b == far.norm_b and apart.norm_a == near.norm_a
    assert apart.cosine == pytest.approx(near.cosine)
    assert apart.relative == pytest.approx(1 if exponent < 0 else math.ldexp(float(y.norm() / x.norm()), exponent))


def test_repeated_layers_are_one_line(tmp_path: Path) -> None:
    a = {f"model.layers.{n}.{w}.weight": torch.ones(4, 4) for n in range(12) for w in ("up", "down")}
    b = {name: t * 1.01 if ".up." in name else t.clone() for name, t in a.items()}
    b["model.layers.7.up.weight"] = b["model.layers.7.up.weight"] * 2
    b |= {f"extra.{n}.bias": torch.ones(2) for n in range(5)}
    for name, tensors in (("a", a), ("b", b)):
        save_file(tensors, tmp_path / f"{name}.safetensors")
    found = lazyckpt.diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    up, extra = differences.lines_of(found)
    assert (up.name, up.worst.name, len(up.rows), up.of) == (
        "model.layers.{0-11}.up.weight", "model.layers.7.up.weight", 12, 12,
    )  # fmt: skip
    assert (extra.name, extra.kind) == ("extra.{0-4}.bias", "only in b")
    assert up.worst.relative == pytest.approx(1.02)
    every = differences.lines_of(found, every=True)
    assert len(every) == len(found) and every[0].name == "model.layers.7.up.weight"
    said = shell(tmp_path / "a.safetensors", tmp_path / "b.safetensors").stdout
    assert "most at layers 7" in said and len(said.splitlines()) == 6
    assert len(shell(tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--all").stdout.splitlines()) == 34


def test_names_with_another_prefix_are_told_and_compared(tmp_path: Path) -> None:
    a = {f"layers.{n}.w": torch.ones(2) * n for n in range(6)} | {"norm": torch.ones(3)}
    save_file(a, tmp_path / "a.safetensors")
    save_file({f"model.{name}": t for name, t in a.items()}, tmp_path / "b.safetensors")
    paths = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    said = shell(*paths)
    assert said.exit_code == 1 and "--prefix model" in said.stdout and len(said.stdout.splitlines()) == 8
    assert shell(*paths, "--prefix", "model").exit_code == 0
    assert shell(*paths, "--prefix", "mode").exit_code == 2
    a["norm"] = torch.ones(4)  # of another shape: the prefix does not explain it
    save_file(a, tmp_path / "a.safetensors")
    assert "--prefix" not in shell(*paths).stdout


# -- from the shell


def shell(*args: object) -> Result:
    return CliRunner().invoke(cli.app, ["diff", *map(str, args)])


def test_shell(pair: tuple[Path, Path]) -> None:
    result = shell(*pair)
    assert result.exit_code == 1
    w, v = (lazyckpt.open(path)["values"][...].double() for path in pair)
    relative = float((w - v).norm() / w.norm())
    assert f"{relative:.4f}" in result.stdout and " 2  values " in result.stdout
    assert result.stdout.endswith("2 of 8 tensors are equal, 3 differ, 1 of other shape, 1 only in A, 1 only in B\n")
    assert "same" not in result.stdout and " same " in shell(*pair, "--all").stdout
    told = json.loads(shell(*pair, "--json").stdout)
    assert told["equal"] is False and {row["name"] for row in told["tensors"]} >= {"same", "values"}
    some = shell(*pair, "--select", "same")
    assert (some.exit_code, some.stdout) == (0, "1 of 1 tensors are equal\n")
    none = shell(*pair, "--select", "sam")
    assert (none.exit_code, none.stdout) == (2, "")
    assert "'sam' matches no name of either" in none.stderr
    missing = shell(pair[0], "nowhere")
    assert missing.exit_code == 2 and missing.stderr.startswith("error: ")
    assert shell(*pair, "--all-states", "--state", "weights").exit_code == 2


def test_names_are_literal_in_the_shell(tmp_path: Path) -> None:
    for name, value in (("a", 0), ("b", 1)):
        torch.save({"[bold]x\x1b[31m": torch.full((2,), value)}, tmp_path / f"{name}.pt")
    said = shell(tmp_path / "a.pt", tmp_path / "b.pt").stdout
    assert "[bold]x\\x1b[31m  " in said and "\x1b" not in said


def test_runs_are_compared_step_by_step(tmp_path: Path) -> None:
    for name, steps in (("a", (1, 2)), ("b", (1, 2)), ("c", (1, 3)), ("d", range(20))):
        (tmp_path / name).mkdir()
        for step in steps:
            torch.save({"w": torch.full((4,), float(step))}, tmp_path / name / f"step_{step}.pt")
    a, b, c, d = (lazyckpt.open_run(tmp_path / name) for name in "abcd")
    assert lazyckpt.diff(a, b).equal
    with pytest.raises(lazyckpt.SelectionError, match=r"other steps: 1, 2; and 1, 3\. Compare a step that both have"):
        lazyckpt.diff(a, c)
    with pytest.raises(lazyckpt.SelectionError, match=r"0, 1, 2, 3, 4, 5 and 14 more"):
        lazyckpt.diff(a, d)
    assert lazyckpt.diff(a.at(1), c.at(1)).equal
