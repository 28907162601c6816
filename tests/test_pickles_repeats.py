"""What pickles have in common is read once, and means the same as if each were read alone."""

from __future__ import annotations

import argparse
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from lazyckpt.io.containers.pickle import memo as repeats
from lazyckpt.io.containers.pickle.plain import Plain
from lazyckpt.io.containers.torch_file import Pickles, read_torch_file
from lazyckpt.io.storage.local import LocalStore

from .handmade import call, dict_of, get, list_of, number, program, put, text
from .writers import bit_equal


def rank(n: int, model: dict[str, torch.Tensor]) -> dict[str, Any]:
    args = argparse.Namespace(rank=n, names=[f"option {k}" for k in range(300)], world=1 << 10)
    states = {i: {"exp_avg": torch.zeros(t.shape) + i, "step": torch.tensor(3.0)} for i, t in enumerate(model.values())}
    return {
        "args": args,
        "version": 3.0,
        "model": model,
        "optimizer": {"state": states},
        "rng": bytes([n % 251]) * 5000,
    }


def read(paths: list[Path]) -> list[dict[str, torch.Tensor]]:
    pickles, found = Pickles(), []
    for path in paths:
        file = read_torch_file(LocalStore(path.parent), path.name, pickles)
        plain = Plain(file.root, path.name, file.pickle_size)
        found.append({"": plain.rest} | {n: file.extent(t, n) for n, t in plain.tensors.items()})
    return found


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The items that were taken over."""
    seen: list[Any] = []
    find = repeats.Items.find

    def spy(self: repeats.Items, *args: Any) -> Any:
        item = find(self, *args)
        if item is not None:
            seen.append(item.values[0])
        return item

    monkeypatch.setattr(repeats.Items, "find", spy)
    return seen


def test_ranks_share_identical_items(tmp_path: Path, taken: list[Any]) -> None:
    paths = []
    for n in (0, 1, 255, 256, 70_000):  # a number takes one, two or four bytes
        model = OrderedDict((f"layers.{k}.weight", torch.randn(3, k + 1)) for k in range(60))
        paths.append(tmp_path / f"{n}.pt")
        torch.save(rank(n, model), paths[-1])
    together = read(paths)
    assert taken == ["model", "optimizer"] * 4
    taken.clear()
    assert together == [read([path])[0] for path in paths]
    assert taken == []
    for path, found in zip(paths, together, strict=True):
        saved = torch.load(path, weights_only=False)
        for name, tensor in saved["model"].items():
            extent = found[f"model.{name}"]
            data = path.read_bytes()[extent.offset : extent.offset + tensor.nbytes]
            assert bit_equal(torch.frombuffer(bytearray(data), dtype=tensor.dtype).view(tensor.shape), tensor)


def test_shared_items_depend_on_the_memo_before_them(tmp_path: Path, taken: list[Any]) -> None:
    """The same bytes refer to what the memo has: another shape, dtype or text there, and they mean something else."""
    paths = []
    for n, dtype in enumerate((torch.float32, torch.bfloat16, torch.float32)):
        first = {"w": torch.zeros(2, 3, dtype=dtype)}
        tensors = {f"layers.{k}.weight": torch.zeros(4, 5, dtype=dtype) for k in range(60)}
        paths.append(tmp_path / f"{n}.pt")
        torch.save({"first": first, "model": tensors}, paths[-1])
    assert read(paths) == [read([path])[0] for path in paths]
    assert {e.dtype.torch for e in read(paths[1:2])[0].values() if not isinstance(e, dict)} == {torch.bfloat16}


def test_values_of_different_items_are_not_shared(tmp_path: Path) -> None:
    """An item that changes a list that stands before it."""
    from lazyckpt.io.containers.pickle.machine import Pickle

    filler = text("x" * 5000)

    def made(first: int) -> bytes:
        change = get(5) + b"(" + number(7) + b"e" + filler + b"0"  # (long enough to be kept)
        return program(dict_of(text("a"), list_of(number(first)) + put(5), text("b"), filler, text("c"), change))

    items = repeats.Items()
    values = [Pickle(made(n), "here", {}, lambda pid: pid, known=items).value for n in (1, 2, 1)]
    assert [v["a"] for v in values] == [[1, 7], [2, 7], [1, 7]]
    assert [v["c"] for v in values] == [[1, 7], [2, 7], [1, 7]]


def test_dicts_of_many_items_are_not_shared(tmp_path: Path) -> None:
    """Notes of a flat state dict, or of a hostile pickle, would take memory by the square of its length."""
    path = tmp_path / "flat.pt"
    torch.save({f"w{n}": torch.zeros(1) for n in range(3000)}, path)
    (found,) = read([path])
    assert len(found) == 3001


def test_unfinished_dict_is_not_an_item(tmp_path: Path) -> None:
    """A dict with one key is pushed, then filled: where its key begins, it is as if an item had ended."""
    tensors = {f"layers.{k}.weight": torch.zeros(4, 5) for k in range(60)}
    paths = []
    for n in range(3):
        paths.append(tmp_path / f"{n}.pt")
        torch.save({"rank": n, "optimizer": {"model": tensors}, "model": dict(tensors), "rng": n}, paths[-1])
    together = read(paths)
    assert together == [read([path])[0] for path in paths]
    assert {"optimizer.model.layers.3.weight", "model.layers.3.weight"} <= set(together[2])


def test_unfinished_object_is_not_an_item(tmp_path: Path) -> None:
    """An object is pushed, then its state: where that begins, it is as if an item had ended."""
    from lazyckpt.io.containers.pickle.machine import Pickle
    from lazyckpt.io.containers.pickle.rebuild import REBUILD

    def made(n: int) -> bytes:
        state = dict_of(text("k" * 5000), number(1))
        named = call(b"cargparse\nNamespace\n")
        return program(dict_of(text("n"), number(n), text("a"), named + text("x" * 5000) + b"0" + state + b"b"))

    items = repeats.Items()
    for n in (1, 2, 3):
        value = Pickle(made(n), "here", REBUILD, lambda pid: pid, known=items).value
        assert (value["n"], vars(value["a"])) == (n, {"k" * 5000: 1})
