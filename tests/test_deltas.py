"""Delta checkpoints: every bit of every dtype comes back, only the bytes that are needed are read, and a wrong base
gives no bytes at all."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import shutil
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import lazyckpt
from lazyckpt.cli.program import app
from lazyckpt.core.dtypes import bits_of, dtype_of
from lazyckpt.core.expr import computed, make, operand
from lazyckpt.derive.deltas import KEY
from lazyckpt.errors import CorruptError, DataError, DestinationError, FormatError, MissingFileError
from lazyckpt.inspect.changes import _rows
from lazyckpt.lazy import LazyArray

from .algebra import index, keys
from .lanes import rounds
from .recordings import unpack

Tensors = dict[str, torch.Tensor]
DTYPES = [
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.int16, torch.int64, torch.uint8,
    torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


def bits(tensor: torch.Tensor) -> torch.Tensor:
    parts = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return parts.clone(memory_format=torch.contiguous_format).view(bits_of(parts.itemsize))


def wild(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random bits: NaN with payloads, infinities, denormal numbers."""
    generator = torch.Generator().manual_seed(seed)
    out = torch.empty(shape, dtype=dtype)
    high = 2 if dtype == torch.bool else 256
    data = torch.randint(0, high, (out.numel() * out.itemsize,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).view(shape) if out.numel() else out


def save(path: Path, tensors: Tensors) -> Path:
    torch.save(tensors, path)
    return path


def same(view: Any, wanted: Tensors) -> None:
    assert set(view) == set(wanted)
    for name, tensor in wanted.items():
        found = view[name]
        assert (found.shape, found.dtype) == (tensor.shape, tensor.dtype), name
        assert torch.equal(bits(found[...]), bits(tensor)), name
        if tensor.ndim:
            assert torch.equal(bits(found[1::2]), bits(tensor[1::2])), name
            rows = [n for n in (5, 0, 3) if n < len(tensor)]
            assert torch.equal(bits(found[rows]), bits(tensor[rows])), name


def changed(old: torch.Tensor, kind: int) -> torch.Tensor:
    """The tensor with: nothing, some rows, some elements, or everything changed."""
    new = old.clone()
    other = wild(tuple(old.shape), old.dtype, 99)
    if kind == 1 and old.ndim:
        new[2:4] = other[2:4]
        new[-1:] = other[-1:]
    elif kind == 2:
        view, source = bits(new).reshape(-1), bits(other).reshape(-1)
        view[::3] = source[::3]
        new = view.view(old.dtype).view(old.shape)
    elif kind == 3:
        new = other
    return new


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    shapes = [(), (1,), (0, 3), (40, 7), (9, 4, 5)]
    old = {f"{n}.{kind}": wild(shape, dtype, n) for n, shape in enumerate(shapes) for kind in range(4)}
    new = {name: changed(tensor, int(name[-1])) for name, tensor in old.items()}
    base, checkpoint = save(tmp_path / "base.pt", old), save(tmp_path / "new.pt", new)
    delta = lazyckpt.delta(checkpoint, base)
    assert all(one.how == "same" for one in delta.tensors if one.name.endswith(".0"))
    delta.write(tmp_path / "delta", verify=True)
    view = lazyckpt.open(tmp_path / "delta")
    same(view, new)
    same(pickle.loads(pickle.dumps(view)), new)
    assert view.digest() == lazyckpt.open(checkpoint).digest() == delta.digest
    assert lazyckpt.diff(view, checkpoint).equal
    if dtype != torch.float64:  # values near its largest number have no sum of squares
        report = lazyckpt.verify(view)
        assert not [one for one in report.findings if one.code in ("digest-mismatch", "unreadable-file")]


@settings(max_examples=rounds(40), deadline=None)
@given(st.integers(0, 40), st.integers(0, 60), st.integers(1, 9), st.randoms(use_true_random=False))
def test_changed_rows(lo: int, length: int, row: int, random: Any) -> None:
    old = np.array([random.randrange(2) for _ in range(lo + length)], np.uint8)
    new = np.where(np.array([random.random() < 0.1 for _ in old], bool), 7, old).astype(np.uint8)
    found = {r for a, b in _rows(new[lo:], old[lo:], lo, row) for r in range(a, b)} if length else set()
    assert found == {n // row for n in range(lo, lo + length) if new[n] != old[n]}


@pytest.mark.parametrize("op", ["delta.xor", "delta.overwrite", "delta.scatter", "delta.checked"])
@settings(max_examples=rounds(25), deadline=None)
@given(st.data())
def test_slices_equal_the_whole(tmp_path_factory: pytest.TempPathFactory, op: str, data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float32, torch.float8_e5m2, torch.complex64]))
    base = wild(shape, dtype, data.draw(st.integers(0, 9)))
    runs = [(1, 2), (3, 5)] if shape[0] > 4 else [(0, 1)]
    other = wild(shape, dtype, 50)
    tensors = {"base": base, "other": other}
    tensors["rows"] = wild((sum(b - a for a, b in runs), *shape[1:]), dtype, 51)
    count = base.numel() * base.itemsize
    at = torch.arange(0, count, 3, dtype=torch.int32)
    number = torch.tensor([len(at)], dtype=torch.int32)
    tensors["changes"] = torch.cat([number.view(torch.uint8), at.view(torch.uint8), at.to(torch.uint8)])
    view = lazyckpt.open(save(tmp_path_factory.mktemp("ops") / "x.pt", tensors), cache=False)
    of = {name: operand(view[name].spec) for name in view}
    wanted = bits(base)
    if op == "delta.xor":
        made = make(op, of["base"], make("delta.bits", of["other"]), dtype=dtype_of(dtype))
        wanted = bits(base) ^ bits(other)
    elif op == "delta.overwrite":
        made = make(op, of["base"], of["rows"], runs=runs)
        start = 0
        for a, b in runs:
            wanted[a:b] = bits(tensors["rows"])[start : start + b - a]
            start += b - a
    elif op == "delta.scatter":
        made = make(op, of["base"], of["changes"])
        wanted.view(-1).view(torch.uint8)[::3] = at.to(torch.uint8)
    else:
        made = make(op, of["base"], digest=view.digest()["base"].digest, where="here")
    tensor = LazyArray(view._store, computed("t", made))
    assert torch.equal(bits(tensor[...]), wanted)
    key, words = data.draw(keys(shape)), bits_of(base.itemsize)
    whole, found = (one.clone(memory_format=torch.contiguous_format).view(words) for one in (tensor[...], tensor[key]))
    assert torch.equal(found, torch.from_numpy(np.array(index(whole.numpy(), key))))


def test_how_tensors_are_stored(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(400, 300, generator=generator)
    embedding = torch.randn(3000, 32, generator=generator)
    old = {"frozen": weight, "trained": weight.bfloat16(), "embedding": embedding, "shape": weight, "gone": weight[0]}
    new = {
        "frozen": weight, "trained": (weight * 1.002).bfloat16(), "embedding": embedding.clone(), "shape": weight[:9],
        "added": weight[1],
    }  # fmt: skip
    new["embedding"][100:140] = torch.randn(40, 32, generator=generator)
    delta = lazyckpt.delta(save(tmp_path / "new.pt", new), save(tmp_path / "base.pt", old))
    how = {one.name: one.how for one in delta.tensors}
    wanted = {"frozen": "same", "trained": "xor", "embedding": "overwrite", "shape": "whole", "added": "whole"}
    assert how == wanted
    assert delta.removed == ("gone",)
    result = delta.write(tmp_path / "delta")
    assert result.paths == (tmp_path / "delta",)
    assert 0.5 * delta.nbytes < result.nbytes < 2 * delta.nbytes + 20_000
    view = lazyckpt.open(tmp_path / "delta")
    same(view, new)
    # rows outside of the changed ones come from the base, the others from the delta
    kept, given = (view["embedding"].explain(slice(*rows)) for rows in ((0, 50), (110, 120)))
    assert ("base.pt: bytes" in kept, "overwrite.weights" in kept) == (True, False)
    assert ("base.pt: bytes" in given, "overwrite.weights" in given) == (False, True)


def test_a_slice_reads_its_chunks(tmp_path: Path) -> None:
    weight = torch.randn(4096, 1024, generator=torch.Generator().manual_seed(0))  # 16 MiB, in chunks of 512 KiB
    base = save(tmp_path / "base.pt", {"w": weight})
    lazyckpt.delta(save(tmp_path / "new.pt", {"w": weight * 1.01}), base).write(tmp_path / "delta")
    view = lazyckpt.open(tmp_path / "delta")
    explained = view["w"].explain(slice(1000, 1001))
    assert explained.count("within a chunk") == 1
    assert "(8,192 bytes read)" in explained  # 4,096 bytes of each
    out = view.to_safetensors(tmp_path / "out")
    assert out.nbytes > weight.nbytes
    same(lazyckpt.open(tmp_path / "out"), {"w": weight * 1.01})


def test_a_chain_and_another_format(tmp_path: Path) -> None:
    steps = [{"a.w": wild((30, 20), torch.float32, 0), "b": torch.ones(3)}]
    for n in range(1, 4):
        steps.append({"a.w": changed(steps[-1]["a.w"], n), "b": steps[-1]["b"] * n})
    place: Any = save(tmp_path / "0.pt", steps[0])
    for n in range(1, 4):
        lazyckpt.delta(save(tmp_path / f"{n}.pt", steps[n]), place).write(tmp_path / f"d{n}")
        place = tmp_path / f"d{n}"
    same(lazyckpt.open(place), steps[3])
    lazyckpt.open(tmp_path / "2.pt").to_safetensors(tmp_path / "two")
    os.rename(tmp_path / "d2", tmp_path / "moved")
    with pytest.raises(MissingFileError, match="base="):
        lazyckpt.open(place)
    same(lazyckpt.open(place, base=tmp_path / "moved"), steps[3])
    same(lazyckpt.open(place, base=tmp_path / "two"), steps[3])  # the same tensors, in another format
    same(lazyckpt.open(place, base=lazyckpt.open(tmp_path / "2.pt")), steps[3])
    command = ["convert", str(place), str(tmp_path / "whole"), "--to", "torch"]
    assert CliRunner().invoke(app, command).exit_code == 2
    assert CliRunner().invoke(app, [*command, "--base", str(tmp_path / "moved")]).exit_code == 0
    same(lazyckpt.open(tmp_path / "whole"), steps[3])
    base, plain = str(tmp_path / "moved"), str(tmp_path / "3.pt")
    for words, code, said in (
        (["ls", str(place)], 0, "f32 [30, 20]"),
        (["show", str(place), "b[0]"], 0, "6."),
        (["info", str(place)], 0, "delta"),
        (["stats", str(place)], 0, "a.w"),
        (["digest", str(place), "--root"], 0, ""),
        (["verify", str(place), "--quick"], 0, f"{place}: no problems found"),
        (["diff", str(place), plain], 0, "2 of 2 tensors are equal"),
        (["diff", plain, str(place)], 0, "2 of 2 tensors are equal"),
        (["diff", plain, plain], 2, "neither"),
        (["ls", plain], 2, "open it without --base"),
        (["updates", str(place)], 2, "has no optimizer states"),
    ):
        found = CliRunner().invoke(app, [*words, "--base", base])
        assert found.exit_code == code and said in found.output, (words, found.output)
        if code == 0:
            without = CliRunner().invoke(app, words)
            assert without.exit_code == 2 and "Open it with --base" in without.output, (words, without.output)


def test_a_wrong_base_is_refused(tmp_path: Path) -> None:
    old = {"w": wild((50, 20), torch.bfloat16, 1), "u": torch.ones(9)}
    new = {"w": changed(old["w"], 1), "u": old["u"]}
    base = save(tmp_path / "base.pt", old)
    lazyckpt.delta(save(tmp_path / "new.pt", new), base).write(tmp_path / "delta")
    other = save(tmp_path / "other.pt", {"w": old["w"] + 1, "u": old["u"] * 2})
    view = lazyckpt.open(tmp_path / "delta", base=other)
    for name, key in (("w", 0), ("w", slice(2, 4)), ("u", 3)):
        with pytest.raises(DataError, match="not the tensor that was recorded"):
            view[name][key]
    with pytest.raises(DataError, match="not the base"):
        lazyckpt.open(tmp_path / "delta", base=save(tmp_path / "fewer.pt", {"w": old["w"]}))
    with pytest.raises(DataError, match="not the base"):
        lazyckpt.open(tmp_path / "delta", base=save(tmp_path / "float.pt", {"w": old["w"].float(), "u": old["u"]}))
    # a manifest beside the base tells at opening
    lazyckpt.open(other).to_safetensors(tmp_path / "manifested", manifest=True)
    with pytest.raises(DataError, match="not the base"):
        lazyckpt.open(tmp_path / "delta", base=tmp_path / "manifested")
    # so does a delta
    lazyckpt.delta(other, base).write(tmp_path / "third")
    with pytest.raises(DataError, match="not the base"):
        lazyckpt.open(tmp_path / "delta", base=tmp_path / "third")
    # the base at its place, replaced by another one
    shutil.copy(other, base)
    with pytest.raises(DataError, match="not the tensor that was recorded"):
        lazyckpt.open(tmp_path / "delta")["w"][0]
    with pytest.raises(DataError, match="no delta"):
        lazyckpt.open(other, base=base)


def test_a_copied_base_is_compared_once(tmp_path: Path) -> None:
    old = {"w": wild((50, 20), torch.float32, 1)}
    base = save(tmp_path / "base.pt", old)
    new = {"w": changed(old["w"], 2)}
    lazyckpt.delta(save(tmp_path / "new.pt", new), base).write(tmp_path / "delta")
    (tmp_path / "elsewhere").mkdir()
    shutil.copyfile(base, tmp_path / "elsewhere" / "base.pt")
    same(lazyckpt.open(tmp_path / "delta", base=tmp_path / "elsewhere" / "base.pt"), new)


@pytest.mark.parametrize("group", ["deepspeed_zero", "dcp"])
def test_all_states_of_recorded_checkpoints(tmp_path: Path, group: str) -> None:
    unpack(group, tmp_path / "recorded")
    view = next(filter(None, map(opened_with_moments, sorted((tmp_path / "recorded").rglob("*")))))
    view.to_zarr(tmp_path / "other")
    delta = lazyckpt.delta(view, tmp_path / "other")
    assert {one.how for one in delta.tensors} == {"same"}
    delta.write(tmp_path / "delta")
    restored = lazyckpt.open(tmp_path / "delta")
    assert list(restored.states) == list(view.states)
    assert restored.digest() == view.digest()
    lazyckpt.delta(view, tmp_path / "other", states=[view.state]).write(tmp_path / "weights")
    assert list(lazyckpt.open(tmp_path / "weights").states) == [view.state]


def opened_with_moments(path: Path) -> lazyckpt.CheckpointView | None:
    if not path.is_dir():
        return None
    try:
        view = lazyckpt.open(path)
    except lazyckpt.LazyckptError:
        return None
    return view if len(view.states) > 1 and not view.unreadable else None


def test_tied_names_and_meta(tmp_path: Path) -> None:
    weight = torch.randn(9, 4)
    base = save(tmp_path / "base.pt", {"embed": weight, "head": weight, "step": 3})
    moved = weight * 2
    new = save(tmp_path / "new.pt", {"embed": moved, "head": moved, "step": 4})
    lazyckpt.delta(new, base).write(tmp_path / "delta")
    view = lazyckpt.open(tmp_path / "delta")
    assert dict(view.aliases) == dict(lazyckpt.open(new).aliases)
    assert view.meta == lazyckpt.open(new).meta
    same(view, {"embed": moved, "head": moved})


def test_damaged_descriptions(tmp_path: Path) -> None:
    old = {"w": wild((50, 20), torch.float32, 1)}
    base = save(tmp_path / "base.pt", old)
    lazyckpt.delta(save(tmp_path / "new.pt", {"w": changed(old["w"], 3)}), base).write(tmp_path / "delta")
    path = tmp_path / "delta" / "zarr.json"
    whole = json.loads(path.read_text())

    def written(change: Any) -> None:
        document = json.loads(json.dumps(whole))
        change(document["attributes"]["lazyckpt"]["meta"][KEY])
        path.write_text(json.dumps(document))

    def entry(n: int, value: Any) -> Any:
        return lambda about: about["states"]["weights"]["w"].__setitem__(n, value)

    written(lambda about: about.update(version=2))
    with pytest.raises(FormatError, match="version 2"):
        lazyckpt.open(tmp_path / "delta")
    for change in (
        entry(0, "else"), entry(1, "float33"), entry(2, [50, -1]), entry(2, [51, 20]), entry(3, 5),
        lambda about: about.pop("base"), lambda about: about.update(states={}), lambda about: about.update(states=[1]),
        lambda about: about.update(aliases={"a": "nowhere"}),
    ):  # fmt: skip
        written(change)
        with pytest.raises((CorruptError, DataError)):
            lazyckpt.open(tmp_path / "delta")


def test_refusals(tmp_path: Path) -> None:
    view = lazyckpt.open(save(tmp_path / "a.pt", {"a.w": torch.ones(3)}))
    with pytest.raises(DataError, match="prefix"):
        lazyckpt.delta(view["a"], view)
    with pytest.raises(DestinationError, match="manifest"):
        lazyckpt.delta(view, view).write(tmp_path / "d", manifest=True)
    lazyckpt.delta(view, view).write(tmp_path / "d")
    other = lazyckpt.open(save(tmp_path / "b.safetensors", {"a.w": torch.zeros(3)}))
    with pytest.raises(DestinationError, match="exists"):
        lazyckpt.delta(other, view).write(tmp_path / "d")
    assert other.io.bytes == 0  # it is noticed before the checkpoints are compared
    lazyckpt.delta(view, view).write(tmp_path / "d", overwrite=True)
    same(lazyckpt.open(tmp_path / "d"), {"a.w": torch.ones(3)})


def test_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [str(save(tmp_path / f"{name}.pt", {"w": torch.randn(9)})) for name in "ab"]

    def stopped(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(lazyckpt.Delta, "write", stopped)
    result = CliRunner().invoke(app, ["delta", *paths, str(tmp_path / "d"), "--quiet"])
    assert (result.exit_code, result.stderr) == (130, "error: interrupted\n")


def test_a_delta_in_a_bucket(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    old = {"w": wild((50, 20), torch.float32, 1), "u": torch.ones(9)}
    new = {"w": changed(old["w"], 2), "u": old["u"]}
    base = save(tmp_path / "base.pt", old)
    try:
        lazyckpt.delta(save(tmp_path / "new.pt", new), base).write("memory://deltas/one")
        same(lazyckpt.open("memory://deltas/one"), new)
    finally:
        fsspec.filesystem("memory").rm("/deltas", recursive=True)


@pytest.mark.slow
def test_workers_write_a_delta(tmp_path: Path) -> None:
    old = {f"w{n}": torch.randn(300, 200, generator=torch.Generator().manual_seed(n)) for n in range(3)}
    new = {name: tensor * 1.01 for name, tensor in old.items()}
    base, later = save(tmp_path / "base.pt", old), save(tmp_path / "new.pt", new)
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as executor:
        lazyckpt.delta(later, base).write(tmp_path / "delta", executor=executor)
    same(lazyckpt.open(tmp_path / "delta"), new)
