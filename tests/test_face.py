"""What a view and a tensor offer beside reading: typed look-up, search, data frames, torch's names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import lazyckpt
from lazyckpt import CheckpointView, LazyTensor, SelectionError, TensorNotFoundError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tied = torch.arange(12.0).view(4, 3)
    state = {
        "embed.weight": tied,
        "layers.0.mlp.up.weight": torch.arange(6.0, dtype=torch.bfloat16).view(2, 3),
        "layers.1.mlp.up.weight": torch.ones(2, 3, dtype=torch.bfloat16),
        "head.weight": tied,
    }
    torch.save(state, tmp_path / "model.pt")
    return tmp_path / "model.pt"


def test_open_is_a_function_that_gives_a_view(path: Path) -> None:
    assert not isinstance(lazyckpt.open, type) and not isinstance(lazyckpt.open_run, type)
    with lazyckpt.open(path) as view:
        assert type(view) is CheckpointView
        assert list(view) == list(CheckpointView(path))
    with pytest.raises(lazyckpt.DataError):
        view["embed.weight"][...]


def test_typed_look_up(path: Path) -> None:
    view = lazyckpt.open(path)
    assert type(view.tensor("layers.0.mlp.up.weight")) is LazyTensor
    assert list(view.prefix("layers.0")) == ["mlp.up.weight"]
    assert view.prefix("layers").tensor("1.mlp.up.weight").shape == (2, 3)
    with pytest.raises(TensorNotFoundError, match=r"view\.prefix"):
        view.tensor("layers.0")
    with pytest.raises(TensorNotFoundError, match=r"view\.tensor"):
        view.prefix("embed.weight")
    with pytest.raises(KeyError):
        view.tensor("absent")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", 4),
        ("UP weight", 2),
        ("up 1", 1),
        ("*.up.*", 2),
        ("layers.?.* up", 2),
        ("nothing", 0),
    ],
)
def test_search(path: Path, text: str, found: int) -> None:
    view = lazyckpt.open(path).search(text)
    assert isinstance(view, CheckpointView) and len(view) == found
    assert all(name in lazyckpt.open(path) for name in view)


@pytest.mark.parametrize("package", ["pandas", "polars"])
def test_a_frame_has_a_row_for_each_name(path: Path, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(package)
    if package == "polars":
        monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    frame = lazyckpt.open(path).to_frame()
    assert type(frame).__module__.startswith(package)
    assert list(frame["name"]) == list(lazyckpt.open(path))
    assert list(frame["nbytes"]) == [48, 12, 12, 48]
    assert list(frame["tied"]).count("embed.weight") == 1


def test_a_dtype_in_place_of_a_device(path: Path) -> None:
    view = lazyckpt.open(path)
    assert {t.dtype for t in view.prefix("layers").to(torch.float32).values()} == {torch.float32}
    state = view.state_dict()
    assert state["head.weight"] is state["embed.weight"] and list(state) == list(view)


def test_names_of_torch(path: Path) -> None:
    t = lazyckpt.open(path).tensor("layers.0.mlp.up.weight")
    whole = t[...]
    assert torch.equal(t.T, whole.T) and torch.equal(t.float(), whole.float()) and torch.equal(t.cpu(), whole)
    assert t.double().dtype == torch.float64
    with pytest.raises(AttributeError, match=r"t\[\.\.\.\]\.mean"):
        t.mean()  # type: ignore[attr-defined]
    with pytest.raises(AttributeError) as error:
        t.nonsense  # type: ignore[attr-defined]  # noqa: B018
    assert "t[...]" not in str(error.value)


def test_masks_of_several_dimensions(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(5, 4, 3, generator=generator)
    torch.save({"w": whole}, tmp_path / "x.pt")
    t = lazyckpt.open(tmp_path / "x.pt").tensor("w")
    for dims in (2, 3):
        for share in (0.0, 0.1, 0.5, 1.0):
            mask = torch.rand(whole.shape[:dims], generator=generator) < share
            assert torch.equal(t[mask], whole[mask])
            assert torch.equal(t[mask.numpy()], whole[mask])
            part = t.lazy[1:4]
            assert torch.equal(part[mask[1:4]], whole[1:4][mask[1:4]])
    assert torch.equal(t[np.asfortranarray(whole.numpy() > 0)], whole[whole > 0])
    with pytest.raises(SelectionError):
        t[torch.ones(5, 3, dtype=torch.bool)]
