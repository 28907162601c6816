"""`lazyckpt convert`: every target from real checkpoints; its plan and exit codes; stopped at any moment it goes on."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import Executor, Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import zarr
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import lazyckpt
import lazyckpt.interop.zarr_dtypes
from lazyckpt import cli, demo
from lazyckpt.cli import jobs
from lazyckpt.core.dtypes import dtype_named
from lazyckpt.errors import DataError
from lazyckpt.export import megatron
from lazyckpt.jobs import destination, places, progress
from lazyckpt.jobs.destination import Session
from lazyckpt.jobs.plan import WritePlan

from . import processes
from .conftest import complete
from .writers import Case, bit_equal

SOURCES = ("zero2", "zero3", "dcp", "torch", "huggingface")


@pytest.fixture(params=SOURCES)
def source(request: pytest.FixtureRequest) -> Case:
    fixture, name = {
        "zero2": ("zero_cases", "zero2_bf16_dp2"),
        "zero3": ("zero_cases", "zero3_bf16_dp3"),
        "dcp": ("dcp_cases", "fsdp2_uneven"),
        "torch": ("torch_cases", "training"),
        "huggingface": ("huggingface_cases", "llama_sharded"),
    }[request.param]
    case: Case = request.getfixturevalue(fixture)[name]
    return complete(case) if fixture == "zero_cases" else case


@pytest.fixture
def model(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A file of 24 tensors, two of them tied."""
    g = torch.Generator().manual_seed(0)
    state = {f"layers.{n}.w": torch.randn(16, 32 + 2 * n, generator=g) for n in range(24)}
    torch.save(state | {"tied": state["layers.3.w"]}, tmp_path / "model.pt")
    return tmp_path / "model.pt", state


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A model that divides by the ranks of some meshes."""
    demo.write(tmp_path / "demo")
    return tmp_path / "demo" / "model"


def run(*args: str | Path) -> Any:
    return CliRunner().invoke(cli.app, ["convert", *map(str, args)])


def convert(*args: str | Path) -> str:
    """What a conversion that must succeed prints."""
    result = run(*args)
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.output
    return str(result.stdout)


def plan_of(*args: str | Path) -> dict[str, Any]:
    told = json.loads(convert(*args, "--dry-run", "--json"))
    assert (told["result"], told["error"], told["exit_code"]) == (None, None, 0)
    plan: dict[str, Any] = told["plan"]
    return plan


def same(found: Any, truth: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(truth)
    for name, tensor in truth.items():
        assert bit_equal(found[name][...], tensor), name


def first(case: Case) -> tuple[str, dict[str, torch.Tensor]]:
    state = "weights" if "weights" in case.truth else "fp32"
    return state, case.truth[state]


# -- every target


def test_to_safetensors(source: Case, tmp_path: Path) -> None:
    convert(source.path, tmp_path / "out", "--to", "safetensors", "--max-shard-size", "5KB", "--verify")
    truth = first(source)[1]
    same(lazyckpt.open(tmp_path / "out"), truth)
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    found = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    tied = source.info.get("tied", {})
    assert truth.keys() - tied.keys() <= found.keys()
    assert all(bit_equal(tensor, truth[name]) for name, tensor in found.items())


def test_to_torch(source: Case, tmp_path: Path) -> None:
    convert(source.path, tmp_path / "out.pt")
    truth = first(source)[1]
    same(torch.load(tmp_path / "out.pt", weights_only=True), truth)
    same(lazyckpt.open(tmp_path / "out.pt"), truth)


@pytest.mark.slow
def test_to_dcp(source: Case, tmp_path: Path) -> None:
    convert(source.path, tmp_path / "out", "--to", "dcp")
    view, (_, truth) = lazyckpt.open(tmp_path / "out"), first(source)
    same(view, truth)
    assert {s for s in source.truth if s not in ("weights", "fp32")} <= set(view.states)
    loaded = {name: torch.empty_like(tensor) for name, tensor in truth.items()}
    dcp.load({"model": loaded}, checkpoint_id=tmp_path / "out", no_dist=True)
    same(loaded, truth)


def test_to_universal(source: Case, tmp_path: Path) -> None:
    convert(source.path, tmp_path / "out", "--to", "universal")
    state, truth = first(source)
    masters = source.truth.get("fp32", truth)
    for folder in (tmp_path / "out" / "zero").iterdir():
        if folder.is_dir():
            param = torch.load(folder / "fp32.pt", weights_only=False)["param"]
            want = masters.get(folder.name, truth.get(folder.name))
            assert want is not None
            assert bit_equal(param, want.float() if want.dtype.is_floating_point else want)
    moments = source.truth.get("exp_avg", {})
    for name, want in moments.items():
        found = torch.load(tmp_path / "out" / "zero" / name / "exp_avg.pt", weights_only=False)["param"]
        assert bit_equal(found.view(want.shape), want)
    assert lazyckpt.open(tmp_path / "out").states.keys() >= {"fp32"} | ({"exp_avg"} if moments else set())
    assert state in ("weights", "fp32")


@pytest.mark.slow
def test_to_zarr(source: Case, tmp_path: Path) -> None:
    convert(source.path, tmp_path / "out.zarr", "--codec", "zstd")
    view = lazyckpt.open(tmp_path / "out.zarr")
    assert list(view.states) == list(lazyckpt.open(source.path).states)
    for state, truth in source.truth.items():
        same(view.states[state], {n: t for n, t in truth.items() if n in view.states[state]})
    same(view, first(source)[1])
    group = zarr.open_group(tmp_path / "out.zarr", mode="r")
    name, tensor = next((n, t) for n, t in first(source)[1].items() if n not in view.aliases and t.ndim == 2)
    array = group[f"{view.state}/{name.replace('.', '/')}"]
    assert torch.equal(torch.from_numpy(array[...].astype("f8")), tensor.double())
    if source.path.name == "llama_sharded":
        convert(source.path, tmp_path / "out.zarr.zip")
        same(lazyckpt.open(tmp_path / "out.zarr.zip"), first(source)[1])


def test_to_a_url(model: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, state = model
    convert(path, "memory://convert/out.zarr", "--to", "zarr")
    same(lazyckpt.open("memory://convert/out.zarr"), state | {"tied": state["layers.3.w"]})
    assert run(path, "memory://convert/out.zarr", "--to", "zarr").exit_code == 2


def test_to_megatron(
    model: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own tests are elsewhere: here is what it is asked for."""
    asked: dict[str, Any] = {}

    def plan(view: Any, dest: str, options: dict[str, Any], **own: Any) -> WritePlan:
        asked.update(options, **own, names=list(view), dest=dest)
        return WritePlan(Session(lambda: None), (), "", left_out={"optimizer": "of another kind"})

    monkeypatch.setattr(megatron, "WRITER", replace(megatron.WRITER, plan=plan))
    text = convert(model[0], tmp_path / "out", "--to", "megatron", "--tp", "2", "--ep", "4", "--overwrite")
    assert (asked["tp"], asked["ep"], asked["overwrite"]) == (2, 4, True)
    assert not {"pp", "etp", "vpp", "layout", "vocab_multiple", "ckpt_format"} & asked.keys(), "as to_megatron has it"
    assert "left out optimizer: of another kind" in text
    more = ["--etp", "1", "--pp", "2", "--vpp", "2", "--vocab-multiple", "8", "--ckpt-format", "torch_dist"]
    for layout, wanted in (("3,4,4,1", [3, 4, 4, 1]), ("Et|t|t|tL", "Et|t|t|tL")):
        convert(model[0], tmp_path / "out", "--to", "megatron", *more, "--layout", layout)
        assert (asked["etp"], asked["pp"], asked["vpp"], asked["layout"]) == (1, 2, 2, wanted)
        assert (asked["vocab_multiple"], asked["ckpt_format"]) == (8, "torch_dist")


# -- what of it, as what


def test_select_state_and_dtype(zero_cases: dict[str, Case], tmp_path: Path) -> None:
    case = complete(zero_cases["zero2_bf16_dp2"])
    convert(case.path, tmp_path / "a", "--to", "safetensors", "--select", "*.weight", "--state", "exp_avg")
    moments = {name: t for name, t in case.truth["exp_avg"].items() if name.endswith(".weight")}
    same(load_file(tmp_path / "a" / "model.safetensors"), moments)
    # all states of what is selected; the weights are converted, what they were made from is not
    for to in ("dcp", "zarr"):
        out = tmp_path / f"b.{to}"
        convert(case.path, out, "--to", to, "--select", "*.weight", "--dtype", "fp16")
        view = lazyckpt.open(out)
        same(view, {n: t.half() for n, t in case.truth["weights"].items() if n.endswith(".weight")})  # all floats
        same(view.states["exp_avg"], moments)
        same(view.states["fp32"], {n: t for n, t in case.truth["fp32"].items() if n.endswith(".weight")})
    convert(case.path, tmp_path / "c.pt", "--state", "fp32", "--dtype", "BF16")
    truth = case.truth["fp32"]
    same(torch.load(tmp_path / "c.pt"), {n: t.bfloat16() if t.is_floating_point() else t for n, t in truth.items()})


def test_stored_tag_format_and_rules_as_elsewhere(zero_cases: dict[str, Case], tmp_path: Path) -> None:
    case = zero_cases["zero2_bf16_dp2"]
    view = lazyckpt.open(case.path)
    tag = (case.path / "latest").read_text().strip()
    convert(case.path, tmp_path / "s.pt", "--stored", "--select", "*/module.*", "--tag", tag, "--format", "deepspeed")
    want = {name: t[...] for name, t in view.stored.select("*/module.*").items()}
    assert want
    same(torch.load(tmp_path / "s.pt"), want)
    convert(case.path, tmp_path / "s.zarr", "--stored", "--select", "*/module.*")
    rules = tmp_path / "rules.toml"
    rules.write_text("[rules]\n'nothing' = 'row'\n")
    assert "rules['nothing'] matches no tensor" in convert(case.path, tmp_path / "r.pt", "--rules", rules)


@pytest.mark.slow
def test_rename(megatron_cases: dict[str, Case], tmp_path: Path) -> None:
    case = megatron_cases["tp2_pp2_distopt_tied"]
    convert(case.path, tmp_path / "hf", "--to", "safetensors", "--rename", "hf")
    want = lazyckpt.open(case.path).rename("hf")
    assert any(name.endswith("q_proj.weight") for name in want)
    same(lazyckpt.open(tmp_path / "hf"), {name: t[...] for name, t in want.items()})


@pytest.mark.parametrize("ending", ["toml", "json"])
def test_rename_by_a_file(model: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, ending: str) -> None:
    table = tmp_path / f"names.{ending}"
    text = {"toml": '"layers.{l}.w" = "h.{l}.weight"', "json": '{"layers.{l}.w": "h.{l}.weight"}'}[ending]
    table.write_text(text)
    convert(model[0], tmp_path / "out.pt", "--rename", table, "--select", "layers.*")
    same(torch.load(tmp_path / "out.pt"), {f"h.{n}.weight": model[1][f"layers.{n}.w"] for n in range(24)})
    for bad in ("= x", "[1]", '"a" = 3', '{"a{l}": "b"}', ""):
        table.write_text(bad)
        result = run(model[0], tmp_path / "bad.pt", "--rename", table)
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
        assert f"names.{ending}" in result.stderr


@pytest.mark.slow
def test_a_folder_for_each_rank(llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    told = json.loads(convert(llama, out, "--to", "safetensors", "--tp", "2", "--dtype", "fp16", "--json"))
    assert told["plan"]["ranks"] == ["mp_rank_00", "mp_rank_01"]
    assert told["result"]["files"] == [str(out / "mp_rank_00"), str(out / "mp_rank_01")]
    assert sorted(p.name for p in out.iterdir()) == ["mp_rank_00", "mp_rank_01"]
    view = lazyckpt.open(llama).astype(torch.float16)
    for tp in range(2):
        assert [p.name for p in (out / f"mp_rank_{tp:02d}").iterdir()] == ["model.safetensors"]
        rank = {name: t[...] for name, t in view.shard(tp=2, rank=tp).items()}
        same(lazyckpt.open(out / f"mp_rank_{tp:02d}"), rank)
    again = run(llama, out, "--to", "safetensors", "--tp", "2")
    assert again.exit_code == 2 and "exists already" in again.stderr
    convert(llama, out, "--to", "safetensors", "--tp", "1", "--pp", "2", "--overwrite")
    assert sorted(p.name for p in out.iterdir()) == ["mp_rank_00_000", "mp_rank_00_001"]
    (out / "mine.txt").write_text("mine")
    refused = run(llama, out, "--to", "torch", "--tp", "2", "--overwrite")
    assert refused.exit_code == 2 and "mine.txt is no rank's folder" in refused.stderr


@pytest.mark.slow
def test_processes(model: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    convert(model[0], tmp_path / "out.zarr", "--workers", "2", "--memory", "200MB", "--verify")
    same(lazyckpt.open(tmp_path / "out.zarr"), model[1] | {"tied": model[1]["layers.3.w"]})


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("bf16", torch.bfloat16), ("bfloat16", torch.bfloat16), ("BF16", torch.bfloat16), ("fp16", torch.float16),
        ("float16", torch.float16), ("half", torch.float16), ("f16", torch.float16), ("fp32", torch.float32),
        ("float32", torch.float32), ("f32", torch.float32), ("float", torch.float32), ("torch.float64", torch.float64),
        ("double", torch.float64), ("fp64", torch.float64), ("fp8_e4m3", torch.float8_e4m3fn),
        ("f8_e4m3", torch.float8_e4m3fn), ("float8_e4m3fn", torch.float8_e4m3fn), ("fp8_e4m3fn", torch.float8_e4m3fn),
        ("F8_E5M2", torch.float8_e5m2), ("fp8_e5m2", torch.float8_e5m2), ("i64", torch.int64), ("bool", torch.bool),
    ],
)  # fmt: skip
def test_names_of_dtypes(name: str, dtype: torch.dtype) -> None:
    assert dtype_named(name).torch == dtype


def test_astype_of_a_view(zero_cases: dict[str, Case]) -> None:
    case = complete(zero_cases["zero2_bf16_dp2"])
    view = lazyckpt.open(case.path)
    half = view.astype(torch.float16)
    same(view, case.truth["weights"])
    same(half, {n: t.half() if t.is_floating_point() else t for n, t in case.truth["weights"].items()})
    same(half.states["fp32"], case.truth["fp32"])
    prefix = next(name for name in view if name.count(".") > 1).partition(".")[0]
    part = view[prefix].select("*.weight")
    assert part
    same(part.astype(torch.float64), {n: t[...].double() for n, t in part.items()})
    name = next(n for n, t in case.truth["exp_avg"].items() if t.ndim == 2)
    moments = view.states["exp_avg"].astype(torch.bfloat16)
    assert moments[name].dtype == torch.bfloat16 and moments.states["weights"][name].dtype == torch.bfloat16
    with pytest.raises(DataError, match="floating-point dtype"):
        view.astype(torch.int8)


def test_a_shard_of_a_converted_shard(llama: Path) -> None:
    view = lazyckpt.open(llama)
    shard = view.shard(pp=2, rank=1).astype(torch.float64)
    want = view.shard(tp=2, pp=2, rank=(1, 1))
    same(shard.shard(tp=2, rank=1), {n: t[...].double() for n, t in want.items()})


# -- the plan


@pytest.mark.slow
def test_the_plan_comes_first_and_is_true(source: Case, tmp_path: Path) -> None:
    for to in ("safetensors", "torch", "dcp", "universal", "zarr"):
        out = tmp_path / to
        plan = plan_of(source.path, out, "--to", to)
        assert not out.exists() and list(tmp_path.glob(".*")) == []
        convert(source.path, out, "--to", to)
        there = [p for p in out.rglob("*") if p.is_file()]
        assert plan["files"] in (None, len(there))
        view = lazyckpt.open(out)
        for state, amount in plan["states"].items():
            if to in ("safetensors", "torch") or (to, state) == ("universal", "weights"):
                continue  # states that go into one; what DeepSpeed keeps beside the masters
            own = state == lazyckpt.open(source.path).state  # of DCP that is the model's, whatever it was
            assert amount["nbytes"] == (view if own else view.states[state]).nbytes, (to, state)
        if to in ("safetensors", "torch"):
            assert plan["nbytes"] == view.nbytes
        assert plan["nbytes"] == sum(s["nbytes"] for s in plan["states"].values())


def test_the_plan_knows_how_much_room_it_takes(tmp_path: Path) -> None:
    weights = {"a.weight": torch.zeros(1 << 20), "b.weight": torch.zeros(1 << 20, dtype=torch.bfloat16)}
    moments = {n: {"exp_avg": torch.zeros(1 << 20), "exp_avg_sq": torch.zeros(1 << 20)} for n in range(2)}
    groups = [{"params": [0, 1], "lr": 0.1}]
    torch.save({"model": weights, "optimizer": {"state": moments, "param_groups": groups}}, tmp_path / "t.pt")
    for to in ("safetensors", "torch", "dcp", "universal", "zarr"):
        plan = plan_of(tmp_path / "t.pt", tmp_path / to, "--to", to)
        convert(tmp_path / "t.pt", tmp_path / to, "--to", to)
        size = sum(p.stat().st_size for p in (tmp_path / to).rglob("*") if p.is_file())
        assert abs(size - plan["room"]) < size / 100, to


def test_the_plan_as_text(zero_cases: dict[str, Case], tmp_path: Path) -> None:
    case = zero_cases["zero2_bf16_dp2"]
    text = convert(case.path, tmp_path / "out", "--to", "dcp", "--memory", "256MiB", "--dry-run")
    lines = {line[:9].strip(): line[9:] for line in text.splitlines()}
    assert lines["source"].startswith(f"{case.path}: deepspeed-zero2 (dp=2), ")
    assert re.search(r"^write    weights: \d+ tensors, .* as bf16", text, re.MULTILINE)
    assert re.search(r"^write    exp_avg: \d+ tensors, .* as f32", text, re.MULTILINE)
    assert lines["to"] == f"{tmp_path / 'out'}: dcp"
    assert lines["memory"] == "256.0 MiB for the work in flight"
    assert re.fullmatch(r"\d.* needed, \d.* free", lines["space"])
    assert not (tmp_path / "out").exists()


def test_a_dry_run_reads_nothing_but_tells_what_is_missing(
    dcp_hole: tuple[lazyckpt.CheckpointView, Case], tmp_path: Path
) -> None:
    result = run(dcp_hole[0].root, tmp_path / "out", "--to", "dcp", "--dry-run")
    assert result.exit_code == 2 and "__1_0.distcp" in result.stderr
    assert "problem" in result.stdout and "__1_0.distcp" in result.stdout
    told = json.loads(run(dcp_hole[0].root, tmp_path / "out", "--to", "dcp", "--dry-run", "--json").stdout)
    assert (told["exit_code"], told["result"], told["plan"]["to"]) == (2, None, "dcp")
    assert "__1_0.distcp" in told["error"]


@pytest.mark.slow
def test_piped_it_is_plain(model: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    done = process(model[0], tmp_path / "out.zarr")
    assert done.returncode == 0
    assert "\x1b" not in done.stdout + done.stderr and "\r" not in done.stdout + done.stderr
    assert done.stdout.splitlines()[0].startswith("source") and done.stdout.splitlines()[-1].startswith("done")
    *before, last = done.stderr.splitlines()
    assert re.fullmatch(r"out.zarr: [\d.]+ KiB in \d\d:\d\d, [\d.]+ ([KM]i)?B/s", last)
    assert all(re.match(r"out.zarr: \d+%, ", line) for line in before), "a slow machine tells how far it is"
    quiet = process(model[0], tmp_path / "quiet.zarr", "--quiet")
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, "", "")
    as_json = process(model[0], tmp_path / "json.zarr", "--json", "-q")
    told = json.loads(as_json.stdout)
    assert as_json.stderr == "" and told["exit_code"] == 0 and told["result"]["left_out"] == {}


def test_lines_of_progress(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with progress.Bar(100 << 30, "out", True) as bar:
        for _ in range(100):
            now[0] += 4.0
            bar.add(1 << 30)
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "out: 3%, 3.0 GiB of 100.0 GiB in 00:12, 256.0 MiB/s, 06:28 left"
    assert len(lines) == 34 and lines[-1] == "out: 100.0 GiB in 06:40, 256.0 MiB/s"
    with pytest.raises(ValueError, match="stop"), progress.Bar(10, "out", True) as bar:
        bar.add(5)
        raise ValueError("stop")
    assert capfd.readouterr().err == ""


def test_quick_work_leaves_no_bar_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for show, found in ((None, False), (True, True)):
        with progress.Bar(10, "out", show) as bar:
            bar.add(10)
        assert ("100%" in capsys.readouterr().err) == found


def test_progress_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quick work shows nothing; long work a line, which is empty in the end."""
    shown: list[str] = []

    class Handle:
        def update(self, data: dict[str, str], raw: bool) -> None:
            shown.append(data["text/html"])

    def display(data: dict[str, str], raw: bool, display_id: bool) -> Handle:
        shown.append(data["text/html"])
        return Handle()

    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    monkeypatch.setattr(progress, "in_notebook", lambda: True)
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    for seconds, count in ((0.1, 0), (1.0, 9)):
        with progress.Bar(10 << 20, "<b>", None) as bar:
            for _ in range(10):
                now[0] += seconds
                bar.add(1 << 20)
        assert len(shown) == count
    assert "&lt;b&gt;: 20%, 2.0 MiB of 10.0 MiB" in shown[0] and shown[-1] == ""
    with progress.Bar(10, "x", False) as bar:
        bar.add(5)
    assert len(shown) == 9


def test_names_are_literal(tmp_path: Path) -> None:
    name = "[bold]x[/bold]\x1b[31m"
    save_file({name: torch.ones(2)}, tmp_path / "[red]a.safetensors")
    text = convert(tmp_path / "[red]a.safetensors", tmp_path / "[red]b.pt")
    assert "[red]a.safetensors: safetensors" in text and "[red]b.pt: torch" in text
    assert list(torch.load(tmp_path / "[red]b.pt")) == [name]
    result = run(tmp_path / "[red]a.safetensors", tmp_path / "c", "--to", "universal", "--dtype", "[red]")
    assert result.exit_code == 2


# -- what it is not asked for


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["out"], "does not tell what to write: say --to, one of safetensors"),
        (["out", "--to", "onnx"], "--to 'onnx' is none of safetensors"),
        (["out.safetensors", "--to", "torch"], "does not go with the name"),
        (["out", "--to", "universal", "--dtype", "bf16"], "it always is in float32"),
        (["out", "--to", "dcp", "--tp", "2"], "--tp cannot be had with --to dcp"),
        (["out.zarr", "--vocab-multiple", "2"], "--vocab-multiple cannot be had with --to zarr"),
        (["out", "--to", "dcp", "--ckpt-format", "torch"], "only megatron has several formats"),
        (
            ["out", "--to", "megatron", "--ckpt-format", "zarr", "--dry-run"],
            "can be written are 'torch' and 'torch_dist'",
        ),
        (["out", "--to", "megatron", "--layout", "3,4", "--dry-run"], "give pp=, too"),
        (["out", "--to", "universal", "--pp", "1"], "any number of them loads it"),
        (["out.zarr", "--ep", "2"], "does not depend on ranks"),
        (["out", "--to", "dcp", "--stored"], "--stored cannot be had with --to dcp"),
        (["out.pt", "--stored", "--rename", "hf"], "as they are stored: leave out --rename"),
        (["out.pt", "--stored", "--tp", "2", "--rename", "hf"], "leave out --tp and --rename"),
        (["out.pt", "--tp", "2"], "has to be a folder's name"),
        (["out.zarr", "--max-shard-size", "1GB"], "only safetensors and torch have shards"),
        (["out.pt", "--codec", "zstd"], "only zarr compresses"),
        (["out.zarr", "--codec", "zip9"], "zip9"),
        (["out.pt", "--dtype", "f33"], "'f33' is no dtype: write for instance fp32, bf16"),
        (["out.pt", "--dtype", "int8"], "name a floating-point dtype"),
        (["out.pt", "--select", "nothing.*"], "--select 'nothing.*' matches none of 25 names"),
        (["out.pt", "--state", "exp_avg"], "has no state 'exp_avg'"),
        (["out.pt", "--memory", "much"], "the size 'much' is not understood"),
        (["out.pt", "--rename", "klingon"], "there is no table of names 'klingon'"),
        (["out.pt", "--rename", "{}/none.toml"], "none.toml: no such file"),
        (["model.pt", "--overwrite"], "that is read"),
        (["out.pt", "--average", "all", "--ema", "2"], "--ema 2: it is how much"),
        (["https://example.org/out.pt"], "a web server is only read"),
    ],
)
def test_errors_are_one_line(
    model: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, args: list[str], says: str
) -> None:
    dest, *rest = args
    dest = dest if "://" in dest else f"{tmp_path}/{dest}"
    result = run(model[0], dest, *(a.format(tmp_path) for a in rest), "--quiet")
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert says in result.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["model.pt"]


def test_what_is_there_stays(model: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    convert(model[0], tmp_path / "out.zarr", "--select", "layers.1.*")
    assert plan_of(model[0], tmp_path / "out.zarr")["exists"]
    result = run(model[0], tmp_path / "out.zarr")
    assert result.exit_code == 2 and "exists already" in result.stderr and "only --overwrite replaces" in result.stdout
    assert list(lazyckpt.open(tmp_path / "out.zarr")) == ["layers.1.w"]
    convert(model[0], tmp_path / "out.zarr", "--overwrite")
    assert len(lazyckpt.open(tmp_path / "out.zarr")) == 25
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")  # weights may come beside it
    assert not plan_of(model[0], tmp_path / "hf", "--to", "safetensors")["exists"]
    convert(model[0], tmp_path / "hf", "--to", "safetensors")
    assert plan_of(model[0], tmp_path / "hf", "--to", "safetensors")["exists"]


# -- stopped


def process(*args: str | Path, code: str = "") -> subprocess.CompletedProcess[str]:
    """A real process, piped; ``code`` is run in it first."""
    return processes.run(*command(*args, code=code))


def command(*args: str | Path, code: str = "") -> list[str]:
    start = f"{code}\nimport sys\nfrom lazyckpt.cli import main\nsys.argv[0] = 'lazyckpt'\nmain()"
    return ["-c", start, "convert", *map(str, args)]


# The process gets the signal when it begins its ninth file, and the files from then on wait for the signal: it always
# finds the work half done. Two threads write on every machine. The files that they have begun when SIGINT arrives are
# finished and kept, and no others begin.
STOPPED = """
import itertools, os, signal, threading
from concurrent.futures import ThreadPoolExecutor
from lazyckpt.jobs import executor as job
from lazyckpt.jobs.places import Folder
told = threading.Event()
def interrupted(*_):
    told.set()
    raise KeyboardInterrupt
signal.signal(signal.SIGINT, interrupted)
put, begun = Folder.put, itertools.count()
def stopped(*arguments):
    number = next(begun)
    if number == 8:
        os.kill(os.getpid(), {how})
    if number >= 8:
        told.wait()
    return put(*arguments)
Folder.put = stopped
pool = ThreadPoolExecutor(2)
job.threads, job._TOGETHER = lambda: pool, 2
"""


def stamps(folder: Path) -> dict[str, tuple[int, int]]:
    """What is finished in a folder."""
    found = {}
    for path in folder.rglob("*"):
        if path.is_file() and not path.name.endswith(".part") and ".lazyckpt" not in path.name:
            found[str(path.relative_to(folder))] = (path.stat().st_ino, path.stat().st_mtime_ns)
    return found


def stop(dest: Path, how: signal.Signals, *args: str | Path) -> tuple[int, str]:
    """Begin a conversion, stop it when some of it is finished; (exit code, stderr)."""
    done = process(*args, dest, code=STOPPED.format(how=int(how)))
    assert not dest.exists()
    return done.returncode, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_stopped_it_goes_on(model: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, how: signal.Signals) -> None:
    path, state = model
    out = tmp_path / "out.zarr"
    code, err = stop(out, how, path)
    if how == signal.SIGINT:
        assert code == 130
        *_, last = err.splitlines()  # a slow one shows how far it is
        assert re.fullmatch(
            r"error: interrupted; .* are finished and kept: the same command goes on, --no-resume begins anew", last
        )
    else:
        assert code == -signal.SIGKILL
    staging = tmp_path / ".out.zarr.incomplete"
    before = stamps(staging)
    assert len(before) >= 3
    plan = plan_of(path, out)
    assert 0 < plan["kept"] < plan["nbytes"]
    assert "of an interrupted conversion are there" in convert(path, out)
    after = stamps(out)
    assert {key: after[key] for key in before} == before, "what was finished is not written again"
    same(lazyckpt.open(out), state | {"tied": state["layers.3.w"]})
    assert not staging.exists()


@pytest.mark.slow
def test_no_resume_begins_anew(model: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    path, state = model
    out = tmp_path / "out.zarr"
    stop(out, signal.SIGKILL, path)
    before = stamps(tmp_path / ".out.zarr.incomplete")
    kept = {key: os.open(tmp_path / ".out.zarr.incomplete" / key, os.O_RDONLY) for key in before}  # inodes stay taken
    try:
        convert(path, out, "--no-resume")
        after = stamps(out)
        assert not {after[key][0] for key in before} & {before[key][0] for key in before}
    finally:
        for fd in kept.values():
            os.close(fd)
    same(lazyckpt.open(out), state | {"tied": state["layers.3.w"]})


@pytest.mark.slow
def test_finished_ranks_stay(llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    staging = tmp_path / ".out.incomplete"
    args = (llama, out, "--to", "torch", "--tp", "2", "--pp", "2")
    stop_after = """
import os, signal
from lazyckpt.export import torch as saved
from lazyckpt.jobs import ledger
real, done = saved.layout_of, []
def layout_of(*args):
    if len(done) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    done.append(1)
    return real(*args)
saved.layout_of = layout_of
ledger._HELD = 0
"""
    assert process(*args, code=stop_after).returncode == -signal.SIGKILL
    assert not out.exists()
    before = {p.parent.name: p.stat().st_ino for p in staging.rglob("*.bin")}
    assert sorted(before) == ["mp_rank_00_000", "mp_rank_01_000"]
    convert(*args)
    after = {p.parent.name: p.stat().st_ino for p in out.rglob("*.bin")}
    assert len(after) == 4 and {name: after[name] for name in before} == before
    view = lazyckpt.open(llama)
    for tp, pp in ((0, 0), (1, 0), (0, 1), (1, 1)):
        found = torch.load(out / f"mp_rank_{tp:02d}_{pp:03d}" / "pytorch_model.bin")
        same(found, {n: t[...] for n, t in view.shard(tp=2, pp=2, rank=(tp, pp)).items()})
    assert [p.name for p in out.rglob(".*")] == []


def test_no_space_half_way(
    model: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = places._write, [0]

    def full(fd: int, data: Any) -> None:
        calls[0] += 1
        if calls[0] > 6:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd, data)

    with monkeypatch.context() as patch:
        patch.setattr(places, "_write", full)
        result = run(model[0], tmp_path / "out.zarr", "--json", "--quiet")
    assert result.exit_code == 3
    assert result.stderr.count("\n") == 1 and "No space left" in result.stderr and "begins anew" in result.stderr
    told = json.loads(result.stdout)
    assert told["result"] is None and "No space left" in told["error"] and told["exit_code"] == 3
    # there still is none: nothing to go on with is lost
    with monkeypatch.context() as patch:
        patch.setattr(destination.shutil, "disk_usage", lambda _: type("Full", (), {"free": 100}))
        assert run(model[0], tmp_path / "out.zarr").exit_code == 3
        assert run(model[0], tmp_path / "new.zarr").exit_code == 2
    assert not (tmp_path / "out.zarr").exists()
    # another call would not help, whatever is kept
    assert run(model[0], tmp_path / "out.zarr", "--dtype", "f33").exit_code == 2
    convert(model[0], tmp_path / "out.zarr")
    assert len(lazyckpt.open(tmp_path / "out.zarr")) == 25


def test_workers_die(
    model: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Dying(Executor):
        calls = 0

        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            self.calls += 1
            future: Future[Any] = Future()
            if self.calls > 1:
                future.set_exception(BrokenProcessPool("killed"))
            else:
                future.set_result(fn(*args, **kwargs))
            return future

    @contextmanager
    def dying(workers: int | None) -> Any:
        yield Dying()

    monkeypatch.setattr(jobs, "_executor", dying)
    monkeypatch.setattr("lazyckpt.jobs.executor._TOGETHER", 4)
    result = run(model[0], tmp_path / "out.zarr", "--workers", "2", "--quiet")
    assert result.exit_code == 3, result.output
    assert "lost workers" in result.stderr and result.stderr.count("\n") == 1
    monkeypatch.undo()
    convert(model[0], tmp_path / "out.zarr")
    assert len(lazyckpt.open(tmp_path / "out.zarr")) == 25


def test_the_codes_are_told() -> None:
    text = " ".join(run("--help").stdout.split())
    for said in ("0 done", "2 an error", "3 stopped half way", "130 the same after Ctrl-C"):
        assert said in text
