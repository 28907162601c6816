"""`to_universal`: DeepSpeed goes on from it on other ranks as if it had never stopped; lazyckpt reads the same."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyckpt
from lazyckpt.errors import DataError, DestinationError
from lazyckpt.jobs import write as stream
from lazyckpt.jobs.publish import unfinished

from .conftest import need, once
from .lanes import sampled
from .writers import bit_equal
from .writers.deepspeed_launch import launch
from .writers.deepspeed_specs import ResumeSpec

pytestmark = pytest.mark.slow

SOURCES = {
    "zero1": ResumeSpec(stage=1, dp=2),
    "zero1_bf16": ResumeSpec(stage=1, dp=2, dtype="bf16"),
    "zero2_sgd": ResumeSpec(stage=2, dp=3, optimizer="sgd"),
    "zero1_one": ResumeSpec(stage=1, dp=2, one_group=True),
    "zero3": ResumeSpec(stage=3, dp=2, one_group=True),
    "zero0": ResumeSpec(stage=0, dp=2),
    "torch": ResumeSpec(stage=0, dp=1, optimizer="torch", scheduler=False),
}
THEIRS = ("zero1", "zero1_bf16", "zero2_sgd", "zero3")
# the source, and how it goes on
TARGETS = {
    "zero1_on_1": ("zero1", ResumeSpec(stage=1, dp=1)),
    "zero1_on_3": ("zero1", ResumeSpec(stage=1, dp=3)),
    "zero1_to_zero2": ("zero1", ResumeSpec(stage=2, dp=2)),
    "zero1_to_zero3": ("zero1_one", ResumeSpec(stage=3, dp=2, one_group=True)),
    "zero1_bf16_on_3": ("zero1_bf16", ResumeSpec(stage=1, dp=3, dtype="bf16")),
    "sgd_on_2": ("zero2_sgd", ResumeSpec(stage=2, dp=2, optimizer="sgd")),
    "zero3_on_3": ("zero3", ResumeSpec(stage=3, dp=3, one_group=True)),
    "zero3_to_zero1": ("zero3", ResumeSpec(stage=1, dp=1, one_group=True)),
    "zero0_to_zero2": ("zero0", ResumeSpec(stage=2, dp=3)),
    "torch_to_zero1": ("torch", ResumeSpec(stage=1, dp=2, optimizer="torch", scheduler=False)),
    "dcp_to_zero2": ("torch", ResumeSpec(stage=2, dp=2, optimizer="torch", scheduler=False)),
}
COMPARED = ("zero1_on_3", "zero1_bf16_on_3", "zero3_on_3")  # with what ds_to_universal makes
# The default lane: each source, stage, and change of the number of ranks; fewer runs of more than two ranks.
SOME = ("zero1_on_1", "zero1_on_3", "zero1_bf16_on_3", "sgd_on_2", "zero3_to_zero1", "zero1_to_zero3", "zero0_to_zero2",
        "dcp_to_zero2")  # fmt: skip
SOME_COMPARED = ("zero1_on_3",)


@pytest.fixture(scope="session")
def resumed(session_folder: Path, pytestconfig: pytest.Config) -> Path:
    need("deepspeed")
    everything = pytestconfig.getoption("lane") == "all"
    targets, compared = (TARGETS, COMPARED) if everything else (SOME, SOME_COMPARED)
    return once(session_folder, "to_universal", lambda folder: _resume(folder, targets, compared))


def _resume(folder: Path, targets: Iterable[str], compared: Iterable[str]) -> Path:
    launch(folder, SOURCES, {name: ["universal_only"] for name in THEIRS})
    for name in SOURCES:
        lazyckpt.open(source(folder, name)).to_universal(folder / name / "universal" / "ours", verify=True)
    lazyckpt.open(source(folder, "torch")).to_dcp(folder / "torch" / "dcp")
    lazyckpt.open(folder / "torch" / "dcp").to_universal(folder / "torch" / "universal" / "from_dcp")
    runs = {}
    for name in targets:
        of, spec = TARGETS[name]
        made = "from_dcp" if name.startswith("dcp") else "ours"
        runs[name] = _from(spec, folder / of / "universal" / made)
    for name in compared:
        of, spec = TARGETS[name]
        theirs = folder / of / "universal" / "theirs"
        (theirs / "latest_universal").write_text(".")  # theirs stands in the folder above
        runs[f"{name}.theirs"] = _from(spec, theirs)
    launch(folder, runs)
    return folder


def _from(spec: ResumeSpec, path: Path) -> ResumeSpec:
    return replace(spec, load=str(path))


def source(folder: Path, name: str) -> Path:
    ckpt = folder / name / "ckpt"
    return ckpt / "training.pt" if name == "torch" else ckpt


def losses(folder: Path, name: str) -> list[float]:
    found: list[float] = json.loads((folder / name / "losses.json").read_text())
    return found


@pytest.mark.parametrize("name", sampled(TARGETS, SOME))
def test_training_resumes(resumed: Path, name: str) -> None:
    of, spec = TARGETS[name]
    tolerance = {"rel": 2e-2} if spec.dtype == "bf16" else {"rel": 2e-5}
    assert losses(resumed, name) == pytest.approx(losses(resumed, of), **tolerance)


@pytest.mark.parametrize("name", sampled(COMPARED, SOME_COMPARED))
def test_equals_ds_to_universal(resumed: Path, name: str) -> None:
    assert losses(resumed, name) == losses(resumed, f"{name}.theirs")


@pytest.mark.parametrize("name", ["zero1", "zero1_bf16"])
def test_the_same_files_as_ds_to_universal(resumed: Path, name: str) -> None:
    ours, theirs = (resumed / name / "universal" / who / "zero" for who in ("ours", "theirs"))
    trained = sorted(path.parent.name for path in theirs.glob("*/exp_avg.pt"))
    assert trained == sorted(path.parent.name for path in ours.glob("*/exp_avg.pt"))
    for parameter in trained:
        for state in ("fp32", "exp_avg", "exp_avg_sq"):
            a, b = (torch.load(who / parameter / f"{state}.pt", weights_only=False) for who in (ours, theirs))
            assert a.keys() == b.keys() and a["cat_dim"] == b["cat_dim"]
            assert bit_equal(a["param"], b["param"])
        a, b = (torch.load(who / parameter / "step.pt", weights_only=False) for who in (ours, theirs))
        assert type(a) is type(b) and a == b


def test_what_ds_to_universal_cannot_take(resumed: Path) -> None:
    assert "exp_avg" in (resumed / "zero2_sgd" / "refused.txt").read_text()


@pytest.mark.parametrize("name", SOURCES)
def test_it_is_read_back(resumed: Path, name: str) -> None:
    view = lazyckpt.open(source(resumed, name))
    found = lazyckpt.open(resumed / name / "universal" / "ours")
    assert found.format == "deepspeed-universal" and not found.problems
    masters = view.states.get("fp32", view)
    assert set(found) == set(masters) and dict(found.aliases) == dict(view.aliases)
    for part, other in [(found, masters), *((found.states[s], view.states[s]) for s in view.states if s not in FULL)]:
        more = set(part) - set(other)  # those that never had a gradient: DeepSpeed wants all of a group to be alike
        assert not set(other) - set(part) and more <= NEVER and (not more or name in ("zero0", "torch"))
        assert part is found.states.get("step") or not any(part[n][...].count_nonzero() for n in more)
        for key, tensor in other.items():
            assert torch.equal(part[key][...], tensor[...].to(part[key].dtype)), key
    assert found.meta["global_steps"] == 3 and (name == "torch" or found.meta["epoch"] == 7)


FULL = ("weights", "fp32")
NEVER = {"pos", "unused.weight", "unused.bias"}


def test_resume_and_refused_destinations(resumed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    view = lazyckpt.open(resumed / "torch" / "ckpt" / "training.pt")
    monkeypatch.setattr("lazyckpt.jobs.executor._TOGETHER", 1)
    real, calls = stream._finish, []

    def finish(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 10:
            raise OSError(5, "Input/output error")
        real(*args)

    monkeypatch.setattr(stream, "_finish", finish)
    with pytest.raises(DestinationError, match="call again"):
        view.to_universal(tmp_path / "out")
    assert not (tmp_path / "out").exists() and unfinished(tmp_path / "out")
    view.to_universal(tmp_path / "out", verify=True)
    first, second = (
        {p.relative_to(root): p.stat().st_size for p in root.rglob("*") if p.is_file()}
        for root in (tmp_path / "out", resumed / "torch" / "universal" / "ours")
    )
    assert first == second
    for path in (tmp_path / "out").rglob("*.pt"):
        assert zipfile.ZipFile(path).testzip() is None  # the checksums are right
    with pytest.raises(DestinationError, match="exists already"):
        view.to_universal(tmp_path / "out")
    view.select("norm*").to_universal(tmp_path / "out", overwrite=True)
    assert set(lazyckpt.open(tmp_path / "out")) == {"norm.weight", "norm.bias", "norm_alias.bias"} | {
        n for n in view.aliases if n.startswith("norm")
    }
    with pytest.raises(DataError, match="a view of 'exp_avg'"):
        view.states["exp_avg"].to_universal(tmp_path / "moment")


def test_names_that_no_folder_can_have(tmp_path: Path) -> None:
    torch.save({"../out": torch.ones(2)}, tmp_path / "m.pt")
    with pytest.raises(DataError, match="name of a folder"):
        lazyckpt.open(tmp_path / "m.pt").to_universal(tmp_path / "u")
    shutil.rmtree(tmp_path / "u", ignore_errors=True)


def test_weights_alone(tmp_path: Path) -> None:
    """Without an optimizer: its options and states stay the engine's."""
    torch.save({"w": torch.ones(3, 2).bfloat16(), "n": torch.arange(3)}, tmp_path / "m.pt")
    assert lazyckpt.open(tmp_path / "m.pt").to_universal(tmp_path / "u") == {}
    found = lazyckpt.open(tmp_path / "u")
    assert list(found.states) == ["fp32"] and found["w"].dtype == torch.float32 and found["n"].dtype == torch.int64
    groups = torch.load(tmp_path / "u" / "zero" / "optimizer_state.pt")["param_groups"]
    assert all(group.keys() == {"params"} for group in groups)
