"""Exports under other names than the view's: `names=` of `to_safetensors` and `to_torch`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import lazyckpt
from lazyckpt import DataError, TensorNotFoundError

from .writers import bit_equal


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A torch file with a tied name, and what is in it."""
    state = {"f32": torch.randn(40, 30), "bf16": torch.randn(333).bfloat16(), "f16": torch.randn(2, 3).half(),
             "i64": torch.arange(11), "bool": torch.rand(9) > 0.5, "deep.er.name": torch.randn(900)}  # fmt: skip
    state["tied"] = state["f32"]
    torch.save(state, tmp_path / "state.pt")
    return tmp_path / "state.pt", state


@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_other_names(saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, form: str) -> None:
    path, state = saved
    view = lazyckpt.open(path)

    def written(names: Any) -> lazyckpt.CheckpointView:
        out = tmp_path / str(len(list(tmp_path.iterdir())))
        getattr(view, f"to_{form}")(out, names=names, max_shard_size="5KB")
        return lazyckpt.open(out)

    found = written({"f16": "half", "deep.er.name": "deeper", "i64": None})
    assert found.keys() == state.keys() - {"f16", "deep.er.name", "i64"} | {"half", "deeper"}
    assert bit_equal(found["half"][...], state["f16"]) and bit_equal(found["deeper"][...], state["deep.er.name"])
    assert bit_equal(found["tied"][...], state["f32"])
    found = written(lambda name: f"model.{name}" if name.startswith(("f", "t")) else None)
    assert found.keys() == {f"model.{name}" for name in state if name.startswith(("f", "t"))}
    found = written({"f32": None})  # its other name is the tensor's, then
    assert found.keys() == state.keys() - {"f32"} and bit_equal(found["tied"][...], state["f32"])
    found = written({"tied": "f32", "f32": "tied"})
    assert bit_equal(found["tied"][...], state["f32"]) and bit_equal(found["f32"][...], state["f32"])
    found = written({"tied": "f32"})  # one tensor, twice the same name
    assert found.keys() == state.keys() - {"tied"}


def test_names_that_cannot_be(saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    view = lazyckpt.open(saved[0])
    with pytest.raises(DataError, match=r"'bf16' and 'f16' the same name, 'f16'|'f16' and 'bf16' the same name, 'f16'"):
        view.to_safetensors(tmp_path / "out", names={"bf16": "f16"})
    with pytest.raises(DataError, match="'tied' the same name, 'f16'"):
        view.to_torch(tmp_path / "out", names={"tied": "f16"})
    with pytest.raises(DataError, match="the same name, 'x'"):
        view.to_safetensors(tmp_path / "out", names=lambda name: "x")
    with pytest.raises(DataError, match="gives 'f32' a int"):
        view.to_safetensors(tmp_path / "out", names=len)  # type: ignore[arg-type]
    with pytest.raises(TensorNotFoundError, match=r"contains 'f31'.*Did you mean 'f32'"):
        view.to_safetensors(tmp_path / "out", names={"f31": "g"})
    with pytest.raises(TensorNotFoundError, match="contains 'f32'"):
        view.select("b*").to_safetensors(tmp_path / "out", names={"f32": "g"})
    assert not (tmp_path / "out").exists()
