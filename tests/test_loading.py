"""Filling modules: ``model.load_state_dict(view)`` and ``view.load_into(model)``."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import lazyckpt
from lazyckpt import CheckpointView, loading
from lazyckpt.io.reading.device import ring
from lazyckpt.testing.counting import opened
from lazyckpt.testing.oracle import same

from .writers import Case
from .writers.nasty_model import NastyModel


class Tied(nn.Module):
    """A tied head, a buffer that is saved and one that is not, and a frozen parameter."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.norm = nn.BatchNorm1d(width)
        self.body = nn.Sequential(nn.Linear(width, 13), nn.Linear(13, width, bias=False))
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("scratch", torch.full((2,), 9.0), persistent=False)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    model = Tied()
    model.norm(torch.randn(5, 6))  # its statistics are no longer zeros and ones
    torch.save(model.state_dict(), tmp_path / "model.pt")
    return tmp_path / "model.pt", model.state_dict()


def _snapshot(module: nn.Module) -> dict[str, tuple[int, torch.Tensor]]:
    return {name: (id(t), t.detach().clone()) for name, t in module.state_dict(keep_vars=True).items()}


def _untouched(module: nn.Module, before: dict[str, tuple[int, torch.Tensor]]) -> None:
    for name, t in module.state_dict(keep_vars=True).items():
        assert id(t) == before[name][0], f"{name} was replaced"
        same(t.detach(), before[name][1], name)


def _fill_with_nan(module: nn.Module) -> None:
    with torch.no_grad():
        for p in module.parameters():
            p.fill_(float("nan"))


@pytest.mark.parametrize("how", ["load_state_dict", "load_into"])
def test_a_module_is_filled(saved: tuple[Path, dict[str, torch.Tensor]], how: str) -> None:
    path, truth = saved
    model = Tied()
    _fill_with_nan(model)
    view = lazyckpt.open(path)
    kept = model.embed.weight
    answer: Any = model.load_state_dict(view) if how == "load_state_dict" else view.load_into(model)
    assert answer.missing_keys == [] and answer.unexpected_keys == []
    for name, tensor in model.state_dict().items():
        same(tensor, truth[name], name)
    assert model.embed.weight is kept and model.head.weight is kept, "filled in place"
    assert not model.frozen.requires_grad and model.embed.weight.requires_grad
    same(model.get_buffer("scratch"), torch.full((2,), 9.0), "what is not saved stays")


@pytest.mark.parametrize("how", ["load_state_dict", "load_into"])
def test_a_part_fills_a_part(saved: tuple[Path, dict[str, torch.Tensor]], how: str) -> None:
    path, truth = saved
    model = Tied()
    part = lazyckpt.open(path)["body"]
    if how == "load_state_dict":
        model.body.load_state_dict(part)
    else:
        part.load_into(model.body)
    for name, tensor in model.body.state_dict().items():
        same(tensor, truth[f"body.{name}"], name)
    assert not torch.equal(model.embed.weight, truth["embed.weight"])


def test_dtype_of_the_module_is_kept(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, truth = saved
    for dtype in (torch.bfloat16, torch.float64):
        model = Tied().to(dtype)
        lazyckpt.open(path).load_into(model)
        for name, tensor in model.state_dict().items():
            want = truth[name].to(dtype) if truth[name].is_floating_point() else truth[name]
            same(tensor, want, name)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_module_on_the_meta_device_gets_memory(
    saved: tuple[Path, dict[str, torch.Tensor]], dtype: torch.dtype | None
) -> None:
    path, truth = saved
    with torch.device("meta"):
        model = Tied()
    model = model if dtype is None else model.to(dtype)
    answer = lazyckpt.open(path).load_into(model)
    assert tuple(answer) == ([], [])
    for name, tensor in model.state_dict().items():
        want = truth[name].to(dtype) if dtype and truth[name].is_floating_point() else truth[name]
        same(tensor, want, name)
    assert model.head.weight is model.embed.weight, "tied as before"
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())
    assert model.embed.weight.requires_grad and not model.frozen.requires_grad
    assert model.get_buffer("scratch").is_meta, "the checkpoint does not hold it"
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in Tied().named_parameters()]


def test_strict_tells_missing_and_unexpected_names(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, _ = saved
    model = Tied()
    model.body.append(nn.Linear(6, 2))
    before = _snapshot(model)
    with pytest.raises(lazyckpt.DataError) as error:
        lazyckpt.open(path).select("[!f]*").load_into(model)
    assert "'body.2.weight'" in str(error.value) and "'frozen'" in str(error.value)
    _untouched(model, before)
    del model.norm
    before = _snapshot(model)
    with pytest.raises(lazyckpt.DataError) as error:
        lazyckpt.open(path).load_into(model)
    assert "'norm.weight'" in str(error.value) and "'body.2.bias'" in str(error.value)
    _untouched(model, before)


def test_not_strict_fills_what_fits(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, truth = saved
    model = Tied()
    model.body.append(nn.Linear(6, 2))
    del model.norm
    extra = model.get_parameter("body.2.weight").detach().clone()
    missing, unexpected = lazyckpt.open(path).load_into(model, strict=False)
    assert set(missing) == {"body.2.weight", "body.2.bias"}
    assert set(unexpected) == {n for n in truth if n.startswith("norm.")}
    same(model.get_parameter("body.2.weight").detach(), extra, "left alone")
    for name, tensor in model.state_dict().items():
        if name not in missing:
            same(tensor, truth[name], name)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("on_meta", [True, False])
def test_another_shape_leaves_the_module_untouched(
    saved: tuple[Path, dict[str, torch.Tensor]], strict: bool, on_meta: bool
) -> None:
    path, _ = saved
    with torch.device("meta" if on_meta else "cpu"):
        model = Tied()
        model.body[1] = nn.Linear(13, 7, bias=False)  # the last one to be filled but one
    kept = model.state_dict(keep_vars=True)
    before = {} if on_meta else _snapshot(model)
    with pytest.raises(lazyckpt.DataError) as error:
        lazyckpt.open(path).load_into(model, strict=strict)
    for word in ("body.1.weight", "(6, 13)", "(7, 13)"):
        assert word in str(error.value)
    assert all(kept[name] is t for name, t in model.state_dict(keep_vars=True).items())
    if not on_meta:
        _untouched(model, before)


@pytest.mark.parametrize("how", ["load_state_dict", "load_into"])
def test_errors_name_what_torch_would(saved: tuple[Path, dict[str, torch.Tensor]], how: str) -> None:
    path, _ = saved
    model = Tied(width=7)
    view = lazyckpt.open(path)
    with pytest.raises(RuntimeError) as error:
        _ = model.load_state_dict(view) if how == "load_state_dict" else view.load_into(model)
    assert "embed.weight" in str(error.value) and "body.0.weight" in str(error.value), "all of them, at once"


def test_one_tensor_at_a_time_and_each_once(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, _ = saved
    view, counts = opened(path)
    counts.clear()
    view.load_into(Tied())
    assert counts.bytes == view.nbytes, "the tied weight is read once"
    assert max(request.length for request in counts.log) <= max(t.nbytes for t in view.values())


def test_a_lost_file_leaves_the_module_untouched(zero_cases: dict[str, Case], tmp_path: Path) -> None:
    case = zero_cases["zero3_bf16_dp3"]
    folder = shutil.copytree(case.path, tmp_path / "copy")
    (lost,) = folder.glob("*/*zero_pp_rank_2_*optim_states.pt")
    lost.unlink()
    spec = case.info["spec"]
    for strict in (True, False):
        model = NastyModel(spec["hidden"], spec["layers"], spec["vocab"], with_empty=False)
        before = _snapshot(model)
        with pytest.raises(lazyckpt.MissingFileError, match=lost.name):
            lazyckpt.open(folder).load_into(model, strict=strict)
        _untouched(model, before)


def test_zero_weights_load_a_part_of_a_model(zero_cases: dict[str, Case]) -> None:
    case = zero_cases["zero3_fp32_dp4"]
    spec = case.info["spec"]
    model = NastyModel(spec["hidden"], spec["layers"], spec["vocab"], with_empty=False)
    view: CheckpointView = lazyckpt.open(case.path)
    view["blocks.0"].load_into(model.blocks[0])
    for name, tensor in model.blocks[0].state_dict().items():
        same(tensor, case.truth["fp32"][f"blocks.0.{name}"], name)
    moments = {name: torch.empty_like(p) for name, p in model.blocks[0].named_parameters()}
    for name, t in view["blocks.0"].states["exp_avg_sq"].items():
        moments[name].copy_(t.to())
        same(moments[name], case.truth["exp_avg_sq"][f"blocks.0.{name}"], name)


def test_weights_that_are_no_plain_block(saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    """Transposed in the file, transposed in the module, or both."""
    w = torch.randn(6, 13)
    torch.save({"weight": w.t()}, tmp_path / "t.pt")
    for target in (nn.Parameter(torch.empty(13, 6)), nn.Parameter(torch.empty(6, 13).t())):
        module = nn.Linear(6, 13, bias=False)
        module.weight = target
        lazyckpt.open(tmp_path / "t.pt").load_into(module)
        assert module.weight is target
        same(target.detach(), w.t(), "transposed")


@pytest.mark.slow
def test_modules_that_torch_wraps(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    path, truth = saved
    model = Tied()
    _fill_with_nan(model)
    model.body[0] = checkpoint_wrapper(model.body[0])
    assert tuple(lazyckpt.open(path).load_into(torch.compile(model))) == ([], [])
    for name, tensor in model.state_dict().items():
        same(tensor, truth[name], name)


@pytest.mark.slow
@pytest.mark.parametrize("wrapped_when_saved", [False, True])
def test_modules_of_data_parallelism(saved: tuple[Path, dict[str, torch.Tensor]], wrapped_when_saved: bool) -> None:
    """Their names begin with ``module.``; a view's do not, whether they did when they were saved or not."""
    path, truth = saved
    if wrapped_when_saved:
        path = path.with_name("wrapped.pt")
        torch.save({f"module.{name}": tensor for name, tensor in truth.items()}, path)
    model = Tied()
    _fill_with_nan(model)
    assert tuple(lazyckpt.open(path).load_into(torch.compile(nn.DataParallel(model)))) == ([], [])
    for name, tensor in model.state_dict().items():
        same(tensor, truth[name], name)


def test_through_a_ring_into_any_memory(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    """As to an accelerator: blocks, indexed rows, other strides and dtypes."""
    path, truth = saved
    w = lazyckpt.open(path)["embed.weight"]
    whole = truth["embed.weight"]
    keys: tuple[Any, ...] = (..., (slice(2, 7), slice(1, 4)), [3, 1, 1])
    cases = [(w.lazy[key], whole[key]) for key in keys] + [(w.lazy[::-1], whole.flip(0))]
    for lazy, want in cases:
        rows, columns = want.shape
        for out in (torch.empty(rows, columns), torch.empty(columns, rows).t(), torch.empty(rows, columns).double()):
            with ring(torch.device("cpu")) as way:
                assert lazy._send(way, out=out) is out
            same(out, want.to(out.dtype), "through a ring")


class Counted:
    """Stands for a bar."""

    bars: ClassVar[list[Counted]] = []

    def __init__(self, total: int, label: str, show: bool | None) -> None:
        self.total, self.show, self.done = total, show, 0
        self.bars.append(self)

    def add(self, nbytes: int) -> None:
        self.done += nbytes

    def __enter__(self) -> Counted:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("how", ["to", "dtype", "mapped", "load_into"])
@pytest.mark.parametrize("long", [True, False])
def test_what_takes_long_has_a_bar(
    saved: tuple[Path, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch, how: str, long: bool
) -> None:
    monkeypatch.setattr(loading, "Bar", Counted)
    monkeypatch.setattr(Counted, "bars", [])
    if long:
        monkeypatch.setattr(loading, "_LONG", 1)
    view = lazyckpt.open(saved[0])
    if how == "load_into":
        view.load_into(Tied())
    else:
        view.to(dtype=torch.float64 if how == "dtype" else None, copy=how != "mapped")
    (bar,) = Counted.bars
    assert bar.done == bar.total == view.nbytes
    assert bar.show is (None if long else False)
