"""Sparse tensors of torch as dense ones, and nested tensors as their tensors: against to_dense() and unbind()."""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lazyckpt
from lazyckpt.errors import CorruptError, FormatError, LazyckptError
from lazyckpt.testing import opened
from lazyckpt.testing.oracle import same

from .algebra import index, keys
from .hostility import deadline
from .lanes import rounds
from .test_expr import bits, read_in, same_bits

COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls CSR and nested tensors a beta
        yield


def _values(shape: tuple[int, ...], dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    found = torch.randn(shape, generator=g) * 3
    return found.to(dtype) if dtype != torch.bool else found > 0


def _coo(shape: tuple[int, ...], rank: int, count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A COO tensor, not coalesced: with repeated places, if there are few."""
    g = torch.Generator().manual_seed(seed)
    where = torch.stack([torch.randint(0, n, (count,), generator=g) for n in shape[:rank]])
    return torch.sparse_coo_tensor(where, _values((count, *shape[rank:]), dtype, g), shape)


def _compressed(
    layout: torch.layout,
    batches: tuple[int, ...],
    matrix: tuple[int, int],
    dense: tuple[int, ...],
    dtype: torch.dtype,
    seed: int,
) -> torch.Tensor:
    """A tensor of a compressed layout. All matrices of a batch have as many values."""
    g = torch.Generator().manual_seed(seed)
    size = (2, 3) if layout in (torch.sparse_bsr, torch.sparse_bsc) else (1, 1)
    rows, columns = (n // b for n, b in zip(matrix, size, strict=True))
    mask = torch.rand(rows * columns, generator=g) < 0.4
    each = [mask[torch.randperm(len(mask), generator=g)].view(rows, columns) for _ in range(int(np.prod(batches)))]
    by_rows = layout in (torch.sparse_csr, torch.sparse_bsr)
    turned = [one if by_rows else one.T for one in each]
    starts = torch.stack([torch.cat([torch.zeros(1, dtype=torch.int64), one.sum(1).cumsum(0)]) for one in turned])
    numbers = torch.stack([one.nonzero()[:, 1] for one in turned])
    kind = torch.int32 if seed % 2 else torch.int64
    block = size if size != (1, 1) else ()
    values = _values((*batches, int(mask.sum()), *block, *dense), dtype, g)
    starts, numbers = (one.to(kind).view(*batches, -1) for one in (starts, numbers))
    return torch.sparse_compressed_tensor(starts, numbers, values, (*batches, *matrix, *dense), layout=layout)


def _every() -> dict[str, torch.Tensor]:
    found = {}
    for n, dtype in enumerate(DTYPES):
        found[f"coo.{n}"] = _coo((5, 4), 2, 30, dtype, n)
        found[f"coalesced.{n}"] = _coo((5, 4), 2, 9, dtype, n).coalesce()
        found[f"hybrid.{n}"] = _coo((6, 3, 2), 1 + n % 2, 20, dtype, n)
        for layout in COMPRESSED:
            name = str(layout).rpartition("_")[2]
            found[f"{name}.{n}"] = _compressed(layout, (), (8, 9), (), dtype, n)
            found[f"{name}.batch.{n}"] = _compressed(layout, (2, 3), (4, 6), (), dtype, n)
    for n, layout in enumerate(COMPRESSED):
        found[f"dense.{n}"] = _compressed(layout, (), (4, 6), (2,), torch.float32, n)
    found["no values"] = _coo((3, 4), 2, 0, torch.float32, 0)
    found["no rows"] = torch.zeros(0, 4).to_sparse_csr()
    found["zeros"] = torch.zeros(3, 4).to_sparse_csc()
    found["negative zero"] = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.tensor([-0.0, -1.0]), (3,))
    found["csr negative zero"] = torch.sparse_csr_tensor(
        torch.tensor([0, 1, 2]), torch.tensor([1, 0]), torch.tensor([-0.0, float("nan")]), (2, 3)
    )
    return found


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_dense()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    path = tmp_path_factory.mktemp("sparse") / "model.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensors = _every()
        torch.save(tensors, path)
        return path, {name: _dense(tensor) for name, tensor in tensors.items()}


def test_values_are_those_of_to_dense(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, truth = saved
    view = lazyckpt.open(path)
    assert list(view) == list(truth) and list(view.states) == ["weights"]
    for name, tensor in truth.items():
        same_bits(view[name][...], tensor, name)
        for block in (1, 7):
            same_bits(read_in(view[name], block), tensor, (name, block))
    assert {problem.code for problem in view.problems} == {"nested-tensor"}
    assert "coo.0.indices" in view.stored and "csr.1.values" in view.stored
    again = pickle.loads(pickle.dumps(view))
    same_bits(again["bsr.0"][...], truth["bsr.0"])


@settings(max_examples=rounds(60), deadline=None)
@given(data=st.data())
def test_parts_are_parts_of_the_whole(saved: tuple[Path, dict[str, torch.Tensor]], data: st.DataObject) -> None:
    path, truth = saved
    name = data.draw(st.sampled_from(list(truth)))
    key = data.draw(keys(tuple(truth[name].shape)))
    part = lazyckpt.open(path)[name][key]
    expected = (
        torch.from_numpy(np.array(index(bits(truth[name]).numpy(), key))) if not truth[name].is_complex() else None
    )
    if expected is None:
        assert torch.equal(
            torch.view_as_real(part), torch.view_as_real(torch.from_numpy(np.array(index(truth[name].numpy(), key))))
        )
    else:
        assert torch.equal(bits(part), expected.view(bits(part).shape)), (name, key)


def test_a_row_reads_its_values(tmp_path: Path) -> None:
    g = torch.Generator().manual_seed(0)
    dense = torch.where(torch.rand(64, 32, generator=g) < 0.3, torch.randn(64, 32, generator=g), 0.0)
    torch.save({"csr": dense.to_sparse_csr(), "coo": dense.to_sparse()}, tmp_path / "model.pt")
    view, counts = opened(tmp_path / "model.pt")
    same_bits(view["csr"][3], dense[3])  # reads the starts of the rows, once
    same_bits(view["coo"][3], dense[3])  # reads the indices, once
    row = int((dense[10] != 0).sum())
    counts.clear()
    same_bits(view["csr"][10], dense[10])
    assert counts.bytes == row * (8 + 4)
    counts.clear()
    same_bits(view["coo"][10], dense[10])
    assert counts.bytes == row * 4


def _hostile() -> dict[str, torch.Tensor]:
    ones, i = torch.ones, torch.tensor

    def compressed(
        starts: Any, numbers: Any, shape: tuple[int, int], layout: torch.layout = torch.sparse_csr
    ) -> torch.Tensor:
        values = ones(len(numbers))
        return torch.sparse_compressed_tensor(
            i(starts), i(numbers), values, shape, layout=layout, check_invariants=False
        )

    def coo(where: Any, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.sparse_coo_tensor(i(where), ones(len(where[0])), shape, check_invariants=False)

    return {
        "coo outside": coo([[0, 3], [1, 1]], (3, 2)),
        "coo negative": coo([[0, -1], [1, 1]], (3, 2)),
        "number outside": compressed([0, 1, 2], [0, 7], (2, 3)),
        "negative number": compressed([0, 1, 2], [0, -1], (2, 3)),
        "two at one place": compressed([0, 2, 2], [1, 1], (2, 3)),
        "starts go back": compressed([0, 2, 1], [1], (2, 3)),
        "starts are too large": compressed([0, 1, 1 << 50], [1], (2, 3)),
        "starts begin late": compressed([1, 1, 1], [1], (2, 3)),
        "csc outside": compressed([0, 1, 2, 2], [0, 2], (2, 3), torch.sparse_csc),
    }


def test_indices_that_cannot_be_right_are_errors(tmp_path: Path) -> None:
    tensors = _hostile()
    torch.save(tensors, tmp_path / "model.pt")
    view = lazyckpt.open(tmp_path / "model.pt")
    assert set(view) == set(tensors)
    for name in tensors:
        with pytest.raises(CorruptError, match="sparse tensor"):
            view[name][...]
        assert any(part.startswith(f"{name}.") for part in view.stored)


def test_indices_without_bytes_stay_parts(tmp_path: Path) -> None:
    many = 1 << 40
    where, values = torch.zeros(1, 1, dtype=torch.int64).expand(1, many), torch.ones(1).expand(many)
    tensor = torch.sparse_coo_tensor(where, values, (5,), check_invariants=False)
    torch.save({"w": tensor, "plain": torch.ones(2)}, tmp_path / "model.pt")
    with deadline():
        view = lazyckpt.open(tmp_path / "model.pt")
        assert {"plain", "w.indices", "w.values"} == set(view)


def test_a_matrix_larger_than_memory_is_read_in_parts(tmp_path: Path) -> None:
    side = 1 << 28
    where = torch.tensor([[5, 1 << 27, side - 1], [7, 8, 9]])
    coo = torch.sparse_coo_tensor(where, torch.tensor([1.0, 2.0, 3.0]), (side, side))
    torch.save({"w": coo}, tmp_path / "model.pt")
    w = lazyckpt.open(tmp_path / "model.pt")["w"]
    assert w.shape == (side, side)
    with deadline():
        same(w[1 << 27, 6:10], torch.tensor([0.0, 0.0, 2.0, 0.0]), "a row")
        same(w[-1:, 9], torch.tensor([3.0]), "the last row")
        with pytest.raises(LazyckptError):
            w.stats()


def test_nested_tensors_are_the_list_of_their_tensors(tmp_path: Path) -> None:
    g = torch.Generator().manual_seed(1)
    pieces = [torch.randn(n, 3, generator=g) for n in (2, 4, 0, 1)]
    jagged = torch.nested.nested_tensor(pieces, layout=torch.jagged)
    tensors = {
        "strided": torch.nested.nested_tensor(pieces),
        "turned": torch.nested.nested_tensor(pieces).transpose(1, 2),
        "jagged": jagged,
        "jagged turned": jagged.transpose(1, 2),
        "with gaps": torch.nested.narrow(
            torch.randn(3, 5, 2, generator=g), 1, torch.tensor([0, 1, 2]), torch.tensor([2, 3, 1]), layout=torch.jagged
        ),
    }
    torch.save({"model": tensors, "epoch": 3}, tmp_path / "model.pt")
    view = lazyckpt.open(tmp_path / "model.pt")
    expected = {f"{name}.{n}": one for name, tensor in tensors.items() for n, one in enumerate(tensor.unbind())}
    assert list(view) == list(expected)
    for name, tensor in expected.items():
        same(view[name][...], tensor.contiguous(), name)
    assert any(name.endswith("strided.buffer") for name in view.stored)
    assert view.meta["epoch"] == 3


def test_what_torch_caches_in_jagged_tensors_is_nothing_to_tell(tmp_path: Path) -> None:
    offsets = torch.tensor([0, 2, 6])
    held = torch.nested.nested_tensor_from_jagged(torch.randn(6, 3), offsets, min_seqlen=2, max_seqlen=4)
    held.note = "mine"  # type: ignore[attr-defined]
    torch.save({"jagged": held, "w": torch.ones(2)}, tmp_path / "x.pt")
    view = lazyckpt.open(tmp_path / "x.pt")
    assert [problem.code for problem in view.problems] == ["nested-tensor"]
    assert view.meta == {"tensor_attributes": {"jagged": {"note": "mine"}}}
    assert list(view) == ["jagged.0", "jagged.1", "w"]
    for n, piece in enumerate(held.unbind()):
        same(view[f"jagged.{n}"][...], piece, n)


def _coo_of_float8() -> torch.Tensor:
    """A tensor that stays its parts: torch does not add such values."""
    return torch.sparse_coo_tensor(torch.tensor([[0], [1]]), torch.ones(1).to(torch.float8_e4m3fn), (2, 2))


def test_a_sparse_tensor_and_another_of_its_name(tmp_path: Path) -> None:
    for n, one in enumerate((torch.eye(2).to_sparse(), torch.ones(2, 2))):
        torch.save({"w": one}, tmp_path / f"pytorch_model-0000{n + 1}-of-00002.bin")
    with pytest.raises(FormatError, match=r"'w' is in .*another file"):
        lazyckpt.open(tmp_path)


@pytest.mark.parametrize("sharded", [False, True])
def test_folders_of_hugging_face(tmp_path: Path, sharded: bool) -> None:
    dense = torch.tensor([[0.0, 2.0, 0.0], [1.0, 0.0, 3.0]])
    held = {
        "a.weight": torch.ones(2),
        "coo.weight": dense.to_sparse(),
        "csr.weight": dense.to_sparse_csr(),
        "csc.weight": dense.to_sparse_csc(),
        "bsr.weight": dense.to_sparse_bsr((1, 3)),
        "bsc.weight": dense.to_sparse_bsc((2, 1)),
        "z.weight": torch.zeros(3),
    }
    held["coo.tied"] = held["coo.weight"]
    several = {"nested": torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)]), "f8": _coo_of_float8()}
    held |= several
    if sharded:
        files = {name: f"pytorch_model-0000{1 + (name > 'bz')}-of-00002.bin" for name in held}
        for file in set(files.values()):
            torch.save({name: one for name, one in held.items() if files[name] == file}, tmp_path / file)
        index = {"metadata": {}, "weight_map": files}
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    else:
        torch.save(held, tmp_path / "pytorch_model.bin")
    view = lazyckpt.open(tmp_path)
    pieces = {name for name in view if name.startswith(tuple(several))}
    assert view.format == "huggingface" and set(view) - pieces == held.keys() - several.keys()
    assert {"nested.0", "nested.1"} < pieces and len(pieces) == 4
    assert dict(view.aliases) == {"coo.tied": "coo.weight"}
    assert {problem.code for problem in view.problems} == {"nested-tensor"}
    for name, one in held.items():
        if name not in several:
            same(view[name][...], one.to_dense(), name)
            same(view[name][1:], one.to_dense()[1:], name)
    assert "csr.weight.values" in view.stored and "csr.weight.values" not in list(view)


def test_tied_sparse_tensors(tmp_path: Path) -> None:
    one = torch.eye(3).to_sparse_csr()
    torch.save({"a": one, "b": one, "c": torch.eye(3).to_sparse_csr()}, tmp_path / "model.pt")
    view = lazyckpt.open(tmp_path / "model.pt")
    assert view.aliases == {"b": "a"} and set(view) == {"a", "b", "c"}
    same(view["b"][...], torch.eye(3), "b")


def test_a_sparse_attribute_is_no_weight(tmp_path: Path) -> None:
    weight = torch.ones(3)
    weight.mask = torch.eye(3).to_sparse()  # type: ignore[attr-defined]
    sparse = torch.eye(2).to_sparse()
    sparse.mask = torch.ones(2)  # type: ignore[attr-defined]
    torch.save({"w": weight, "s": sparse}, tmp_path / "model.pt")
    view = lazyckpt.open(tmp_path / "model.pt")
    assert list(view) == ["w", "s"]
    assert {"w.mask.indices", "s.mask"} < set(view.stored)


def test_states_of_an_optimizer_may_be_sparse(tmp_path: Path) -> None:
    tree = {
        "model": {"emb.weight": torch.ones(4, 2), "b": torch.zeros(3)},
        "optimizer": {
            "state": {0: {"sum": _coo((4, 2), 1, 3, torch.float32, 0)}, 1: {"sum": torch.ones(3)}},
            "param_groups": [{"lr": 0.1, "params": [0, 1]}],
        },
    }
    torch.save(tree, tmp_path / "model.pt")
    view = lazyckpt.open(tmp_path / "model.pt")
    assert list(view.states["sum"]) == ["emb.weight", "b"]
    same(view.states["sum"]["emb.weight"][...], tree["optimizer"]["state"][0]["sum"].to_dense(), "sum")  # type: ignore[index]


def test_exports_hold_the_dense_tensors(tmp_path: Path) -> None:
    dense = torch.eye(4) * torch.arange(4.0)
    torch.save({"w": dense.to_sparse_csr(), "plain": torch.ones(2)}, tmp_path / "model.pt")
    view = lazyckpt.open(tmp_path / "model.pt")
    view.to_safetensors(tmp_path / "out.safetensors")
    view.to_dcp(tmp_path / "dcp")
    for path in ("out.safetensors", "dcp"):
        same(lazyckpt.open(tmp_path / path)["w"][...], dense, path)
    assert lazyckpt.verify(tmp_path / "model.pt").ok
