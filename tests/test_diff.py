"""lazyckpt.diff: what differs between two checkpoints, against numpy's and torch's own comparison."""

from __future__ import annotations

import json
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


DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool, torch.complex64)


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


# -- from the shell


def shell(*args: object) -> Result:
    return CliRunner().invoke(cli.app, ["diff", *map(str, args)])


def test_shell(pair: tuple[Path, Path]) -> None:
    result = shell(*pair)
    assert result.exit_code == 1
    assert "values: 2 elements differ, the first at [5, 7], by 2 at most\n" in result.stdout
    assert result.stdout.endswith("2 of 8 tensors are equal\n")
    assert "same: equal" not in result.stdout and "same: equal\n" in shell(*pair, "--all").stdout
    told = json.loads(shell(*pair, "--json").stdout)
    assert told["equal"] is False and {row["name"] for row in told["tensors"]} >= {"same", "values"}
    some = shell(*pair, "--select", "same")
    assert (some.exit_code, some.stdout) == (0, "1 of 1 tensors are equal\n")
    missing = shell(pair[0], "nowhere")
    assert missing.exit_code == 2 and missing.stderr.startswith("error: ")
    assert shell(*pair, "--all-states", "--state", "weights").exit_code == 2


def test_names_are_literal_in_the_shell(tmp_path: Path) -> None:
    for name, value in (("a", 0), ("b", 1)):
        torch.save({"[bold]x\x1b[31m": torch.full((2,), value)}, tmp_path / f"{name}.pt")
    assert shell(tmp_path / "a.pt", tmp_path / "b.pt").stdout.startswith("[bold]x\\x1b[31m: 2 elements differ")
