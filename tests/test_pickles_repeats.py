"""What pickles have in common is read once, and means the same as if each were read alone."""

from __future__ import annotations

import argparse
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from lazyckpt.errors import CorruptError
from lazyckpt.io.containers.pickle import memo as repeats
from lazyckpt.io.containers.pickle.machine import Pickle
from lazyckpt.io.containers.pickle.plain import Plain
from lazyckpt.io.containers.pickle.rebuild import REBUILD, persistent_storage
from lazyckpt.io.containers.torch_file import Pickles, read_torch_file
from lazyckpt.io.storage.local import LocalStore

from .handmade import call, dict_of, get, list_of, number, program, put, text
from .test_opening_costs import parsed, pickled
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

    def made(n: int) -> bytes:
        state = dict_of(text("k" * 5000), number(1))
        named = call(b"cargparse\nNamespace\n")
        return program(dict_of(text("n"), number(n), text("a"), named + text("x" * 5000) + b"0" + state + b"b"))

    items = repeats.Items()
    for n in (1, 2, 3):
        value = Pickle(made(n), "here", REBUILD, lambda pid: pid, known=items).value
        assert (value["n"], vars(value["a"])) == (n, {"k" * 5000: 1})


# -- dicts within the outermost one


def zero2(n: int, changed: str = "") -> dict[str, Any]:
    """The optimizer states of a rank of ZeRO-2: ranks differ in some items of an inner dict, and all numbers behind."""
    groups = [{"lr": 1e-3, "betas": (0.9, 0.95), "params": [k]} for k in range(2)]
    states = {k: {"step": torch.tensor(3.0), "exp_avg": torch.zeros(64)} for k in range(2)}
    inner = {
        "loss_scaler": argparse.Namespace(cur_scale=1.0),
        "overflow": False,
        "base_optimizer_state": {"state": states, "param_groups": groups},
        "single_partition_of_fp32_groups": [torch.zeros(64)[: 72 - n], torch.zeros(8)],
        "param_alignment_paddings": [[0] * 200, [0]],
        f"mapping{changed}": {f"layer.{k}": argparse.Namespace(start=k * n, numel=n) for k in range(1 + n % 5)},
        "partition_count": [4, 4],
    }
    return {"optimizer_state_dict": inner, "ds_config": {"stage": 2, "rank": n}, "ds_version": "0.19.8"}


def test_ranks_share_the_first_items_of_an_inner_dict(tmp_path: Path, taken: list[Any]) -> None:
    paths = []
    for n in (0, 1, 2, 3, 8, 9, 10, 11):
        paths.append(tmp_path / f"{n}.pt")
        torch.save(zero2(n), paths[-1])
    together = read(paths)
    # the second one shows what all have in common; the first of the last three, what these have
    assert taken == ["loss_scaler"] * 5
    assert together == [read([path])[0] for path in paths]


def _result(data: bytes, known: repeats.Items | None) -> Any:
    try:
        return parsed(data, known)
    except RecursionError:  # damage can make an object contain itself
        return "a cycle"


@pytest.mark.parametrize("seed", range(12))
def test_damaged_pickles_are_read_as_if_alone(seed: int) -> None:
    rng = random.Random(seed)
    items = repeats.Items()
    for n in range(12):
        data = bytearray(pickled(zero2(rng.randrange(12), rng.choice(["", "s"]))))
        for _ in range(rng.randrange(3)):
            at = rng.randrange(len(data))
            if rng.random() < 0.5:
                data[at] = rng.randrange(256)
            else:
                data[at : at + rng.randrange(4)] = data[(other := rng.randrange(len(data))) : other + rng.randrange(9)]
        alone, together = (_result(bytes(data), known) for known in (None, items))
        assert together == alone, n


def test_an_inner_item_that_changes_what_is_before_it() -> None:
    filler = text("x" * 500)

    def made(first: int, last: int) -> bytes:
        change = get(5) + b"(" + number(7) + b"e"
        inner = dict_of(text("b"), filler, text("c"), change, text("d"), number(last))
        return program(dict_of(text("a"), list_of(number(first)) + put(5), text("o"), inner))

    items = repeats.Items()
    for n in range(5):
        value = Pickle(made(n % 2, n), "here", {}, lambda pid: pid, known=items).value
        assert value == {"a": [n % 2, 7], "o": {"b": "x" * 500, "c": [n % 2, 7], "d": n}}


def test_an_item_behind_shared_ones_that_changes_them() -> None:
    def made(n: int) -> bytes:
        inner = dict_of(
            text("b"), text("x" * 500), text("c"), list_of(number(1)) + put(6), text("d"), number(0),
            text("e"), get(6) + b"(" + number(n) + b"e",
        )  # fmt: skip
        return program(dict_of(text("o"), inner))

    items = repeats.Items()
    for n in range(5):
        value = Pickle(made(n), "here", {}, lambda pid: pid, known=items).value
        assert value["o"]["c"] == value["o"]["e"] == [1, n]


def test_dicts_side_by_side_are_not_confused() -> None:
    """The second inner dict begins like the first one, and in front of it there is a list."""

    def made(n: int) -> bytes:
        first = dict_of(text("k"), text("y" * 400), text("n"), number(n))
        second = list_of(text("k"), text("y" * 400), text("k"), text("y" * 400), number(n))
        return program(dict_of(text("a"), first, text("b"), second, text("c"), first))

    items = repeats.Items()
    for n in range(5):
        value = Pickle(made(n), "here", {}, lambda pid: pid, known=items).value
        same = {"k": "y" * 400, "n": n}
        assert value == {"a": same, "b": ["k", "y" * 400, "k", "y" * 400, n], "c": same}


def test_what_files_share_is_separated_once() -> None:
    """And means the same, also for an object at two places, and charges the same."""
    items, parts = repeats.Items(), {}
    for n in (1, 2, 3, 3, 8, 9):
        state = Pickle(pickled(zero2(n)), "x", REBUILD, persistent_storage, known=items).value
        for value in (state, {"a": state, "b": state}, {"b.x": 1, **state, "c": state["optimizer_state_dict"]}):
            again, alone = Plain(value, "x", 10_000, parts=parts), Plain(value, "x", 10_000)
            assert repr((again.rest, again.notes, again.inner)) == repr((alone.rest, alone.notes, alone.inner))
            assert list(again.tensors) == list(alone.tensors) and again.paths == alone.paths
            assert all(again.tensors[name] is tensor for name, tensor in alone.tensors.items())
            assert again._budget.left == alone._budget.left


def test_a_shared_part_that_expands_is_refused_each_time() -> None:
    bomb: Any = ["x" * 100] * 10
    for _ in range(7):
        bomb = [bomb] * 10
    parts: Any = {}
    for n in range(2):
        with pytest.raises(CorruptError, match="more"):
            Plain({"n": n, "bomb": {"inside": bomb}}, "x", 1000, parts=parts)
