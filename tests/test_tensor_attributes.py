"""Attributes of tensors: those that are tensors are listed, the others are in the meta."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import lazyckpt
from lazyckpt.io.containers.pickle.plain import TensorRef
from lazyckpt.testing import same

from .handmade import (
    call,
    dict_of,
    get,
    list_of,
    named,
    number,
    program,
    put,
    storage,
    tensor,
    text,
    torch_zip,
    tuple_of,
)


class Slotted(torch.Tensor):
    __slots__ = ("inner",)


def plain() -> torch.Tensor:
    t = torch.arange(3.0)
    t.inner = torch.ones(4)  # type: ignore[attr-defined]
    return t


def parameter() -> torch.Tensor:
    t = torch.nn.Parameter(torch.arange(3.0))
    t.inner = torch.ones(4)  # type: ignore[attr-defined]
    return t


def slotted() -> torch.Tensor:
    t = torch.arange(3.0).as_subclass(Slotted)
    t.inner = torch.ones(4)
    t.further = {"deep": [torch.zeros(2)]}  # type: ignore[attr-defined]
    return t


def sparse() -> torch.Tensor:
    t = torch.eye(3).to_sparse()
    t.inner = torch.ones(4)  # type: ignore[attr-defined]
    return t


def of_attributes() -> torch.Tensor:
    t = plain()
    t.inner.inner = torch.ones(4)  # type: ignore[attr-defined]
    return t


def parameter_of_attributes() -> torch.Tensor:
    t = torch.nn.Parameter(torch.arange(3.0).as_subclass(Slotted))
    t.another = torch.zeros(5)  # type: ignore[attr-defined]
    return t


def quantized() -> torch.Tensor:
    return torch.quantize_per_channel(torch.ones(2, 2), torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), 0, torch.quint8)


KINDS = {plain: 1, parameter: 1, slotted: 2, sparse: 1, of_attributes: 2, parameter_of_attributes: 1, quantized: 2}


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("legacy", (False, True))
def test_every_storage_of_a_file_has_a_name(tmp_path: Path, make: Callable[[], torch.Tensor], legacy: bool) -> None:
    path = tmp_path / "c.pt"
    torch.save({"w": make(), "b": torch.zeros(7)}, path, _use_new_zipfile_serialization=not legacy)
    view = lazyckpt.open(path)
    inner = [name for name in view.stored if name.startswith("w.")]
    if make is sparse:
        inner = [name for name in inner if name == "w.inner"]
    assert len(inner) == KINDS[make]
    assert any(inner[0] in str(line) for line in view.problems)
    assert "b" in view and list(view.states) == ["weights"]
    assert set(view).isdisjoint(inner)
    if "w.inner" in inner:
        same(view.stored["w.inner"][...], torch.ones(4), "w.inner")


def test_an_attribute_takes_no_name_from_another_tensor(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    torch.save({"w": plain(), "w.inner": torch.zeros(6)}, path)
    view = lazyckpt.open(path)
    same(view["w.inner"][...], torch.zeros(6), "w.inner")
    (other,) = set(view.stored) - {"w", "w.inner"}
    same(view.stored[other][...], torch.ones(4), other)


def test_numbered_states_are_named_as_without_attributes(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 5))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    weights = dict(model.named_parameters())
    weights["0.weight"].scale = torch.ones(4, 3)  # type: ignore[attr-defined]
    path = tmp_path / "c.pt"
    torch.save({"model": weights, "optimizer": optimizer.state_dict()}, path)
    view = lazyckpt.open(path)
    assert list(view.states["exp_avg"]) == list(weights) == list(view)
    assert any("scale" in name for name in view.stored)


def test_attributes_that_are_no_tensors_are_in_the_meta_only(tmp_path: Path) -> None:
    """As those that Megatron and DeepSpeed give to every parameter."""
    tree = {}
    for n in range(100):
        p = torch.nn.Parameter(torch.zeros(2))
        p.tensor_model_parallel, p.partition_dim, p.ds_id = True, n % 2, n  # type: ignore[attr-defined]
        tree[f"layers.{n}"] = p
    path = tmp_path / "c.pt"
    torch.save({"model": tree, "epoch": 3}, path)
    view = lazyckpt.open(path)
    assert view.problems == () and list(view) == list(tree)
    assert view.meta["epoch"] == 3
    given = view.meta["tensor_attributes"]
    assert given["model.layers.7"] == {"tensor_model_parallel": True, "partition_dim": 1, "ds_id": 7}
    assert len(given) == 100


def test_the_meta_says_where_a_tensor_was_an_attribute(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    t = plain()
    t.label = "first"  # type: ignore[attr-defined]
    torch.save({"w": t, "tied": t, "tensor_attributes": 5}, path)
    view = lazyckpt.open(path)
    assert view.meta["tensor_attributes"] == 5
    (found,) = (v for k, v in view.meta.items() if k != "tensor_attributes")
    assert found == {"w": {"inner": TensorRef("w.inner"), "label": "first"}}
    assert sum("inner" in name for name in view.stored) == 1  # the tied name has no copy of them


def test_a_model_of_one_wrapper_is_still_unwrapped(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    torch.save({"state_dict": {"a.w": plain(), "a.b": torch.zeros(2)}}, path)
    assert list(lazyckpt.open(path)) == ["a.w", "a.b"]


def test_a_folder_of_shards_lists_attributes(tmp_path: Path) -> None:
    for n in (1, 2):
        torch.save({f"w{n}": plain()}, tmp_path / f"pytorch_model-0000{n}-of-00002.bin")
    index = {f"w{n}": f"pytorch_model-0000{n}-of-00002.bin" for n in (1, 2)}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    view = lazyckpt.open(tmp_path)
    assert {"w1", "w1.inner", "w2", "w2.inner"} <= set(view.stored)
    assert list(view) == ["w1", "w2"] and any("w1.inner" in line for line in view.problems)


TENSOR = named("torch", "Tensor")
ARGUMENTS = tuple_of(
    storage(), number(0), tuple_of(number(4)), tuple_of(number(1)), b"\x89", call(named("collections", "OrderedDict"))
)


def having(state: bytes) -> bytes:
    function = named("torch._utils", "_rebuild_tensor_v2")
    return call(named("torch._tensor", "_rebuild_from_type_v2"), function, TENSOR, ARGUMENTS, state)


def opened(path: Path, *items: bytes) -> lazyckpt.CheckpointView:
    path.write_bytes(torch_zip(program(dict_of(*items))))
    return lazyckpt.open(path)


STATES = {
    "a list": list_of(tensor(), text("what it likes")),
    "a tensor": tensor(),
    "slots": tuple_of(b"N", dict_of(text("a"), tensor())),
    "a pair of tensors": tuple_of(tensor(), tensor()),
    "a record": call(named("some.module", "State"), tensor()),
}


@pytest.mark.parametrize("name", STATES)
def test_attributes_of_any_kind_are_listed(tmp_path: Path, name: str) -> None:
    view = opened(tmp_path / "c.pt", text("w"), having(STATES[name]), text("v"), tensor(size=tuple_of(number(2))))
    assert list(view) == ["w", "v"]
    inner = set(view.stored) - {"w", "v"}
    assert len(inner) == (2 if "pair" in name else 1)
    assert any(line.code == "nested-tensor" for line in view.problems)


def test_a_parameter_keeps_the_attributes_of_the_tensor_it_is_made_from(tmp_path: Path) -> None:
    hooks = call(named("collections", "OrderedDict"))
    of = having(dict_of(text("a"), tensor(), text("b"), number(1)))
    state = dict_of(text("b"), number(2), text("c"), tensor())
    made = call(named("torch._utils", "_rebuild_parameter_with_state"), of, b"\x89", hooks, state)
    view = opened(tmp_path / "c.pt", text("w"), made)
    assert set(view.stored) == {"w", "w.a", "w.c"}
    assert view.meta["tensor_attributes"]["w"]["b"] == 2


def test_a_tensor_may_be_its_own_attribute(tmp_path: Path) -> None:
    loop = tensor() + put(1) + dict_of(text("me"), get(1), text("other"), tensor()) + b"b"
    view = opened(tmp_path / "c.pt", text("w"), loop)
    assert {"w", "w.me", "w.other"} <= set(view.stored)


@pytest.mark.slow
@pytest.mark.parametrize("shared", (False, True))
def test_attributes_cost_no_more_than_the_file_is_long(tmp_path: Path, shared: bool) -> None:
    """A chain of tensors that are each an attribute of the one before; thousands that have the same attributes."""
    if shared:
        state = dict_of(*(text(f"{n:05}") + b"N" for n in range(20_000))) + put(9) + b"0"
        body = state + list_of(*[having(get(9))] * 2_000)
    else:
        body = tensor() + put(1) + b"0" + tensor() + put(2) + b"0"
        for n in range(3_000):
            body += get(1 + n) + dict_of(text("a"), get(2 + n)) + b"b0" + tensor() + put(3 + n) + b"0"
        body += dict_of(text("w"), get(1))
    path = tmp_path / "c.pt"
    path.write_bytes(torch_zip(program(body)))
    began = time.process_time()
    with contextlib.suppress(lazyckpt.CorruptError):
        assert len(lazyckpt.open(path).stored) > 1000
    assert time.process_time() - began < 20, "it takes less than a second"
