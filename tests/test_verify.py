"""`lazyckpt verify`: every fault is found, named with its file and rows, and sound checkpoints have no error."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save, save_file
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from typer.testing import CliRunner

import lazyckpt
from lazyckpt import cli
from lazyckpt.errors import PROBLEM_CODES
from lazyckpt.inspect.codes import kind_of
from lazyckpt.inspect.report import Finding, Report
from lazyckpt.inspect.verify import structure
from lazyckpt.inspect.verify.tally import tally
from lazyckpt.testing.case import Case


def model(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return (0.02 * torch.randn(*shape, generator=made)).to(dtype)

    state = {"model.embed_tokens.weight": randn(128, 64)}
    for n in range(2):
        state[f"model.layers.{n}.mlp.up.weight"] = randn(256, 64)
        state[f"model.layers.{n}.mlp.up.bias"] = randn(256)
    return state


UP = "model.layers.1.mlp.up.weight"


def training(folder: Path, change: Callable[[dict[str, Any]], Any] | None = None) -> Path:
    """A file of a training loop, whose optimizer has made three steps."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 8))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for _ in range(3):
        net(torch.randn(4, 64)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}
    if change is not None:
        change(state)
    torch.save(state, folder / "train.pt")
    return folder / "train.pt"


def codes(report: Report) -> dict[str, str]:
    return {f.code: f.severity for f in report}


def only(report: Report, code: str) -> Finding:
    found = [f for f in report if f.code == code]
    assert len(found) == 1, report.to_text(verbose=True)
    return found[0]


# -- values


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.complex64])
def test_values_of_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    state = {"w": model()[UP].to(torch.complex64 if dtype.is_complex else torch.float32).to(dtype)}
    bits = state["w"].view({2: torch.int16, 8: torch.int64, 1: torch.uint8}[state["w"].itemsize])
    assert not lazyckpt.verify(saved(state, tmp_path / "good.pt"), progress=False)
    if dtype.is_complex:
        state["w"][3, 5] = complex(0, float("nan"))
    else:
        bits[3, 5] = {torch.float16: 0x7E00, torch.bfloat16: 0x7FC0, torch.float64: 0x7FF8 << 48}.get(dtype, 0x7F)
    found = only(lazyckpt.verify(saved(state, tmp_path / "bad.pt"), progress=False), "not-a-number")
    assert found.details["rows"] == [3] and found.details["first"] == [3, 5] and found.file == "bad.pt"


def saved(state: Any, path: Path) -> Path:
    torch.save(state, path)
    return path


def save_dcp(state: Any, path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


def test_fp16_that_was_cut_off(tmp_path: Path) -> None:
    state = model(torch.float16)
    state[UP][1, 2] = 65504
    assert only(lazyckpt.verify(saved(state, tmp_path / "x.pt")), "saturated-values").details["first"] == [1, 2]


def test_a_corrupt_shard_is_named(tmp_path: Path) -> None:
    """18 corrupt values in the file of one of eight ranks, as in OPT-175B (metaseq issue 122)."""
    state = model()
    big = {"w": 0.02 * torch.randn(512, 256, generator=torch.Generator().manual_seed(1))}
    for rank in range(8):
        part = big["w"][rank * 64 : rank * 64 + 64].clone()
        if rank == 5:
            part[10, :18] = 1e4
        save_file({"w": part}, tmp_path / f"r{rank}.safetensors")
    whole = torch.cat([lazyckpt.open(tmp_path / f"r{n}.safetensors")["w"][...] for n in range(8)])
    save_dcp({"w": whole, **state}, tmp_path / "dcp")
    found = only(lazyckpt.verify(tmp_path / "dcp"), "outlying-values")
    assert found.details["elements"] == 18 and found.details["rows"] == [5 * 64 + 10]


def test_ordinary_buffers_are_no_faults(tmp_path: Path) -> None:
    state = model() | {
        "causal_mask": torch.full((8, 8), float("-inf")).triu(1),
        "bias_mask": torch.full((8, 8), torch.finfo(torch.float32).min).triu(1),
        "norm.weight": torch.ones(64),
        "steps": torch.zeros((), dtype=torch.int64),
        "heavy": torch.randn(4096, generator=torch.Generator().manual_seed(3)) ** 5,
    }
    report = lazyckpt.verify(saved(state, tmp_path / "x.pt"))
    assert report.ok, report.to_text(verbose=True)


def test_tallies_are_those_of_torch() -> None:
    x = torch.randn(100_001, generator=torch.Generator().manual_seed(0))
    x[::7] = 0
    x[5], x[99_999], x[3] = float("nan"), float("inf"), torch.finfo(torch.float32).max
    (found,) = tally(x)
    finite = x[x.isfinite()]
    assert (found["count"], found["nan"], found["inf"], found["edge"]) == (100_001, 1, 1, 1)
    assert found["zeros"] == int((finite == 0).sum())
    assert (found["low"], found["high"]) == (float(finite.min()), float(finite.max()))


@pytest.mark.parametrize("shape", [(), (1,), (64, 64)])
def test_numbers_whose_squares_are_too_large(tmp_path: Path, shape: tuple[int, ...]) -> None:
    made = torch.Generator().manual_seed(0)
    x = torch.randint(-(1 << 63), (1 << 63) - 1, shape, generator=made).view(torch.float64)
    x = torch.where(x.isfinite(), x, 1.0)
    x.view(-1)[0] = -1e300
    (found,) = tally(x.reshape(-1))
    assert (found["squares"], found["high"]) == (float("inf"), float(x.max()))
    save_file({"a.weight": x}, tmp_path / "model.safetensors")
    report = lazyckpt.verify(tmp_path / "model.safetensors")
    assert not [one for one in report.findings if one.severity == "error"]


# -- files


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


@pytest.mark.parametrize("where", [0.3, 0.5, 0.9])
def test_a_flipped_bit_of_a_torch_file(tmp_path: Path, where: float) -> None:
    """torch.load reads it without a word."""
    path = saved(model(), tmp_path / "x.pt")
    at = int(path.stat().st_size * where)
    with zipfile.ZipFile(path) as file:
        within = [i for i in file.infolist() if i.header_offset < at < i.header_offset + i.file_size]
    assert within, "the bit is in the data of a record"
    flip(path, at)
    found = only(lazyckpt.verify(path), "wrong-checksum")
    assert found.file == "x.pt" and within[-1].filename.split("/")[-1] in found.details["record"]
    assert "wrong-checksum" not in codes(lazyckpt.verify(path, level="quick"))


def test_a_flipped_bit_of_a_distributed_checkpoint(tmp_path: Path) -> None:
    folder = save_dcp(model(), tmp_path / "dcp")
    (file,) = folder.glob("*.distcp")
    flip(file, file.stat().st_size * 2 // 3)
    assert only(lazyckpt.verify(folder), "wrong-checksum").file == file.name


def test_a_flipped_bit_of_an_object_among_others(tmp_path: Path) -> None:
    """Objects that are not tensors follow each other in the file; each is an archive with checksums of its own."""
    objects = {f"note{n}": "the quick brown fox " * 20 + str(n) for n in range(4)}
    folder = save_dcp(model() | objects, tmp_path / "dcp")
    (file,) = folder.glob("*.distcp")
    assert codes(lazyckpt.verify(folder)) == {}
    for n in range(4):
        at = file.read_bytes().index(f"fox {n}".encode()) - 30
        flip(file, at)
        assert only(lazyckpt.verify(folder), "wrong-checksum").file == file.name
        flip(file, at)


def test_a_zip_of_zarr(tmp_path: Path) -> None:
    """Its records may be compressed."""
    lazyckpt.open(saved(model(), tmp_path / "x.pt")).to_zarr(tmp_path / "x.zarr")
    path = tmp_path / "y.zarr.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for one in sorted((tmp_path / "x.zarr").rglob("*")):
            file.write(one, one.relative_to(tmp_path / "x.zarr").as_posix())
    if not _opens(path):
        pytest.skip("zips of Zarr are not read")
    assert "wrong-checksum" not in codes(lazyckpt.verify(path))


def test_a_file_without_checksums(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        path = saved(model(), tmp_path / "x.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    assert codes(lazyckpt.verify(path)) == {"no-checksum": "note"}


def test_integrity_json(tmp_path: Path) -> None:
    save_file(model(), tmp_path / "model.safetensors")
    digest = hashlib.sha256((tmp_path / "model.safetensors").read_bytes()).hexdigest()
    about = {"algorithm": "sha256", "files": {"model.safetensors": digest}}
    (tmp_path / "integrity.json").write_text(json.dumps(about))
    assert not lazyckpt.verify(tmp_path)
    flip(tmp_path / "model.safetensors", 5000)
    assert only(lazyckpt.verify(tmp_path), "wrong-checksum").file == "model.safetensors"
    (tmp_path / "integrity.json").write_text(json.dumps({**about, "files": {"../../etc/passwd": digest}}))
    assert "outside" in str(only(lazyckpt.verify(tmp_path), "unreadable-file"))
    (tmp_path / "integrity.json").write_text("{")
    assert only(lazyckpt.verify(tmp_path), "inconsistent-metadata").file == "integrity.json"


def test_the_record_of_a_download(tmp_path: Path) -> None:
    save_file(model(), tmp_path / "model.safetensors")
    digest = hashlib.sha256((tmp_path / "model.safetensors").read_bytes()).hexdigest()
    record = tmp_path / ".cache/huggingface/download/model.safetensors.metadata"
    record.parent.mkdir(parents=True)
    record.write_text(f"0123456789abcdef\n{digest}\n1700000000.0\n")
    assert not lazyckpt.verify(tmp_path)
    flip(tmp_path / "model.safetensors", 5000)
    assert only(lazyckpt.verify(tmp_path), "wrong-checksum").details["recorded"] == digest


@pytest.mark.skipif(os.name == "nt", reason="links need privileges")
def test_the_cache_of_huggingface(tmp_path: Path) -> None:
    save_file(model(), tmp_path / "x")
    digest = hashlib.sha256((tmp_path / "x").read_bytes()).hexdigest()
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshots/0a1b").mkdir(parents=True)
    (tmp_path / "x").rename(tmp_path / "blobs" / digest)
    (tmp_path / "snapshots/0a1b/model.safetensors").symlink_to(f"../../blobs/{digest}")
    assert "wrong-checksum" not in codes(lazyckpt.verify(tmp_path / "snapshots/0a1b"))
    flip(tmp_path / "blobs" / digest, 5000)
    assert only(lazyckpt.verify(tmp_path / "snapshots/0a1b"), "wrong-checksum")


def test_bytes_of_no_tensor(tmp_path: Path) -> None:
    """A header that leaves out a tensor is refused: no reader can know what the bytes are."""
    save_file(model(), tmp_path / "m.safetensors")
    data = (tmp_path / "m.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    del header["model.layers.0.mlp.up.bias"]
    text = json.dumps(header).encode()
    text += b" " * (size - len(text))
    (tmp_path / "m.safetensors").write_bytes(data[:8] + text + data[8 + size :])
    with pytest.raises(lazyckpt.CorruptError, match="gap"):
        lazyckpt.verify(tmp_path / "m.safetensors")
    assert _verify(tmp_path / "m.safetensors").exit_code == 2


@pytest.mark.parametrize("level", ["quick", "default"])
def test_a_missing_rank(tmp_path: Path, level: Any, zero_cases: Mapping[str, Case]) -> None:
    root = copied(zero_cases["zero2_bf16_dp2"].path, tmp_path)
    path = sorted(root.rglob("*zero_pp_rank_1*optim_states.pt"))[0]
    path.unlink()
    report = lazyckpt.verify(root, level=level)
    assert codes(report)["missing-file"] == "error" and report.exit_code() == 1


def copied(source: Path, folder: Path) -> Path:
    found = folder / source.name
    (shutil.copytree if source.is_dir() else shutil.copy)(source, found)
    return found


def _opens(path: Path) -> bool:
    try:
        lazyckpt.open(path)
    except lazyckpt.LazyckptError:
        return False
    return True


def test_a_file_that_is_cut_off_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(model(), tmp_path / "x.pt")
    view = lazyckpt.open(path)
    os.truncate(path, path.stat().st_size // 2)
    report = lazyckpt.verify(view)
    assert "unreadable-file" in codes(report) and report.exit_code() == 1


def test_a_chunk_that_is_there_twice(tmp_path: Path) -> None:
    folder = save_dcp(model(), tmp_path / "dcp")
    about = pickle.loads((folder / ".metadata").read_bytes())
    about.state_dict_metadata[UP].chunks.append(ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([256, 64])))
    (folder / ".metadata").write_bytes(pickle.dumps(about, 4))
    found = only(lazyckpt.verify(folder, level="quick"), "inconsistent-metadata")
    assert "overlap" in str(found) and UP in str(found)


def test_a_file_of_an_earlier_save(tmp_path: Path) -> None:
    for n in range(8):
        save_file({f"w{n}": model()[UP]}, tmp_path / f"model-{n + 1:05}-of-00008.safetensors")
    for n, path in enumerate(sorted(tmp_path.glob("*.safetensors"))):
        os.utime(path, (1_700_000_000 + n - 90_000 * (n == 4),) * 2)
    found = only(lazyckpt.verify(tmp_path, level="quick"), "stale-file")
    assert found.file == "model-00005-of-00008.safetensors" and "25.0 hours" in str(found)


# -- agreement


def test_a_sound_optimizer(tmp_path: Path) -> None:
    assert not lazyckpt.verify(training(tmp_path), level="full")


def _moments(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = state["optimizer"]["state"][0]
    return found


FAULTS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a negative second moment": (lambda s: _moments(s)["exp_avg_sq"].view(-1)[7].fill_(-1), "wrong-moment"),
    "moments that are zero": (lambda s: _moments(s)["exp_avg"].zero_(), "zero-moments"),
    "steps that differ": (lambda s: _moments(s)["step"].add_(2), "differing-steps"),
    "a NaN in a moment": (lambda s: _moments(s)["exp_avg"].view(-1)[3].fill_(float("nan")), "not-a-number"),
}


@pytest.mark.parametrize("what", FAULTS)
def test_an_optimizer(tmp_path: Path, what: str) -> None:
    change, code = FAULTS[what]
    report = lazyckpt.verify(training(tmp_path, change))
    assert list(codes(report)) == [code], report.to_text(verbose=True)
    assert report[0].tensor == "0.weight"


def test_fp32_weights_that_do_not_round_to_the_others(tmp_path: Path, zero_cases: Mapping[str, Case]) -> None:
    root = copied(zero_cases["zero2_bf16_dp2"].path, tmp_path)
    assert "rounding-mismatch" not in codes(lazyckpt.verify(root, level="full"))
    path = sorted(root.rglob("*optim_states.pt"))[0]
    state = torch.load(path, weights_only=False)
    state["optimizer_state_dict"]["single_partition_of_fp32_groups"][0].data.view(-1)[:3] += 1
    torch.save(state, path)
    found = [f for f in lazyckpt.verify(root, level="full") if f.code == "rounding-mismatch"]
    assert sum(f.details["elements"] for f in found) == 3 and all(f.severity == "error" for f in found)


def test_replicas_that_differ(tmp_path: Path, megatron_cases: Mapping[str, Case]) -> None:
    """A norm of the second tensor-parallel rank."""
    root = copied(megatron_cases["tp2_gelu_tied"].path, tmp_path)
    assert "differing-replicas" not in codes(lazyckpt.verify(root, level="full"))
    path = sorted(root.rglob("mp_rank_01*/model_optim_rng.pt"))[0]
    state = torch.load(path, weights_only=False)

    def norms(tree: Any) -> Iterator[torch.Tensor]:
        for key, value in tree.items() if isinstance(tree, dict) else ():
            if isinstance(value, torch.Tensor) and "norm" in str(key) and value.numel() > 4:
                yield value
            yield from norms(value)

    next(norms(state["model"])).data[3] += 0.5
    torch.save(state, path)
    found = only(lazyckpt.verify(root, level="full"), "differing-replicas")
    assert found.severity == "error" and found.details["elements"] == 1 and "norm" in str(found.tensor)
    assert any("mp_rank_01" in file for file in found.details["files"])


@pytest.mark.parametrize("kind", ["hidden_size", "vocab_size", "num_hidden_layers", "tokenizer"])
def test_a_configuration_of_another_model(tmp_path: Path, kind: str) -> None:
    save_file(model(), tmp_path / "model.safetensors")
    config = {"model_type": "llama", "hidden_size": 64, "vocab_size": 128, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert not lazyckpt.verify(tmp_path)
    if kind == "tokenizer":
        tokenizer = {"model": {"vocab": {"a": 0, "b": 128}}, "added_tokens": []}
        (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
        assert only(lazyckpt.verify(tmp_path), "tokenizer-mismatch").file == "tokenizer.json"
        return
    (tmp_path / "config.json").write_text(json.dumps(config | {kind: config[kind] + 1}))  # type: ignore[operator]
    assert only(lazyckpt.verify(tmp_path, level="quick"), "config-mismatch")


def test_a_padded_vocabulary(tmp_path: Path) -> None:
    save_file(model(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 64, "vocab_size": 100}))
    assert only(lazyckpt.verify(tmp_path), "padded-vocabulary").severity == "note"


# -- manifests


@pytest.mark.parametrize("form", ["safetensors", "torch", "dcp", "zarr"])
def test_against_a_manifest(tmp_path: Path, form: str) -> None:
    path = saved(model(), tmp_path / "x.pt")
    manifest = tmp_path / "manifest.json"
    manifest.write_text(lazyckpt.digest(path).to_json())
    view = lazyckpt.open(path)
    out = tmp_path / ("out.safetensors" if form == "safetensors" else "out")
    getattr(view, f"to_{form}")(out)
    assert not lazyckpt.verify(out, against=manifest)
    changed = model()
    changed[UP][0, 0] += 1
    bad = saved(changed, tmp_path / "bad.pt")
    found = only(lazyckpt.verify(bad, against=manifest), "digest-mismatch")
    assert found.tensor == UP and found.details["kind"] == "values"


def test_against_a_manifest_whose_first_state_has_another_name(tmp_path: Path) -> None:
    """An export of the weights is compared with the manifest of a checkpoint that calls them fp32."""
    path = saved(model(), tmp_path / "x.pt")
    weights = lazyckpt.digest(path).states["weights"]
    manifest = lazyckpt.Digest("sha256", {"fp32": weights, "exp_avg": weights})
    report = lazyckpt.verify(path, against=manifest)
    lost = only(report, "digest-mismatch")
    assert (lost.severity, lost.details["state"]) == ("warning", "exp_avg") and report.exit_code() == 0
    changed = model()
    changed[UP][0, 0] += 1
    bad = lazyckpt.verify(saved(changed, tmp_path / "bad.pt"), against=lazyckpt.Digest("sha256", {"fp32": weights}))
    assert only(bad, "digest-mismatch").tensor == UP and bad.exit_code() == 1
    # moments alone are not compared with weights
    other = lazyckpt.verify(path, against=lazyckpt.Digest("sha256", {"exp_avg": weights}))
    assert only(other, "digest-mismatch").severity == "warning"


def test_a_manifest_that_is_not_there(tmp_path: Path) -> None:
    path = saved(model(), tmp_path / "x.pt")
    result = _verify(path, "--against", tmp_path / "none.json")
    assert result.exit_code == 2 and "none.json: the manifest cannot be read" in result.output


# -- runs, the command, and the report


def test_a_run(tmp_path: Path) -> None:
    for step in (10, 20):
        torch.save({"step": step, "model": model()}, tmp_path / f"step_{step}.pt")
    state = model()
    state[UP][0] = float("nan")
    torch.save({"step": 30, "model": state}, tmp_path / "step_30.pt")
    report = lazyckpt.verify(lazyckpt.open_run(tmp_path))
    assert [str(f).split(":")[0] for f in report] == ["step 30"]
    assert _verify(tmp_path, "--run").output.count("  step ") == 3 + 1
    assert list(report.facts["checkpoints"]) == ["step 10", "step 20", "step 30"]


def test_a_run_with_a_checkpoint_that_cannot_be_opened(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        (tmp_path / f"checkpoint-{step}").mkdir()
        save_file(model(), tmp_path / f"checkpoint-{step}/model.safetensors")
    os.truncate(tmp_path / "checkpoint-30/model.safetensors", 100)
    report = lazyckpt.verify(lazyckpt.open_run(tmp_path), level="quick")
    assert only(report, "skipped-checkpoint").severity == "error" and report.exit_code() == 1
    assert report.facts["checkpoints"]["checkpoint-30"] == "cannot be opened"
    alone = lazyckpt.verify(tmp_path, level="quick")  # the newest that can be opened
    assert {f.code for f in alone} == {"skipped-checkpoint", "other-checkpoint"}
    assert "--run" in str(only(alone, "other-checkpoint"))


def test_a_run_beside_a_checkpoint_without_a_step(tmp_path: Path) -> None:
    for name in ("checkpoint-10", "checkpoint-20", "final"):
        (tmp_path / name).mkdir()
        save_file(model(), tmp_path / name / "model.safetensors")
    report = lazyckpt.verify(lazyckpt.open_run(tmp_path), level="quick")
    assert not report and list(report.facts["checkpoints"]) == ["step 10", "step 20", "final"]


def test_the_path_is_shown_as_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    save_file(model(), tmp_path / "folder" / "model.safetensors")
    file = saved(model(), tmp_path / "x.pt")
    assert [lazyckpt.verify(path).path for path in ("folder", "folder/", Path("x.pt"), file)] == [
        "folder", "folder/", "x.pt", str(file),
    ]  # fmt: skip
    assert _verify("x.pt").output.startswith("x.pt: no problems found (1 file, ")


def test_a_url() -> None:
    fsspec = pytest.importorskip("fsspec")
    state = model()
    state[UP][4, 4] = float("nan")
    memory = fsspec.filesystem("memory")
    memory.pipe("/verify/model.safetensors", save(state))
    report = lazyckpt.verify("memory://verify", level="full")
    assert only(report, "not-a-number").file == "model.safetensors"
    assert json.loads(report.to_sarif())["runs"][0]["originalUriBaseIds"]["CHECKPOINT"]["uri"] == "memory://verify/"


def _verify(*arguments: object) -> Any:
    return CliRunner().invoke(cli.app, ["verify", *map(str, arguments)])


def test_exit_codes(tmp_path: Path) -> None:
    good = saved(model(), tmp_path / "good.pt")
    state = model()
    state[UP].zero_()
    warn = saved(state, tmp_path / "warn.pt")
    state[UP][0, 0] = float("nan")
    bad = saved(state, tmp_path / "bad.pt")
    assert _verify(good).exit_code == 0 and "no problems found" in _verify(good).output
    assert _verify(warn).exit_code == 0 and _verify(warn, "--fail-on", "warning").exit_code == 1
    assert _verify(bad).exit_code == 1 and _verify(bad, "--fail-on", "never").exit_code == 0
    assert _verify(bad, "--quick").exit_code == 0
    assert _verify(tmp_path / "none.pt").exit_code == 2
    for wrong in (["--fail-on", "all"], ["--quick", "--full"], ["--json", "--sarif"]):
        assert _verify(good, *wrong).exit_code == 2


def test_json_and_sarif(tmp_path: Path) -> None:
    state = model()
    state[UP][4, 4] = float("nan")
    path = saved(state, tmp_path / "bad name.pt")
    about = json.loads(_verify(path, "--json").stdout)
    assert about["lazyckpt_report"] == 1 and about["counts"] == {"error": 1, "warning": 0, "note": 0}
    (one,) = about["findings"]
    assert (one["code"], one["tensor"], one["file"]) == ("not-a-number", UP, "bad name.pt") and one["todo"]
    sarif = json.loads(_verify(path, "--sarif").stdout)
    (run,) = sarif["runs"]
    assert sarif["version"] == "2.1.0" and run["tool"]["driver"]["rules"][0]["id"] == "not-a-number"
    (result,) = run["results"]
    assert result["level"] == "error" and result["ruleIndex"] == 0
    assert result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "bad%20name.pt"


def test_a_report_is_a_screen_at_most(tmp_path: Path) -> None:
    state = {f"layers.{n}.weight": torch.full((8, 8), float("nan")) for n in range(300)}
    report = lazyckpt.verify(saved(state, tmp_path / "x.pt"))
    assert len(str(report).splitlines()) <= 40 and "more" in str(report)
    assert len(report.to_text(verbose=True).splitlines()) >= 300
    assert "300 errors" in report.summary and "<table>" in report._repr_html_()


def test_findings_travel() -> None:
    one = Finding("not-a-number", "w has 3 NaN", "a.pt", "w", details={"rows": [1]})
    copy = pickle.loads(pickle.dumps(Report.of("p", "verify", [one, one], {})))
    assert len(copy) == 1 and copy[0].details == {"rows": [1]} and copy[0].severity == "error"
    assert (one.path, one.code, one.prefixed("s").tensor) == ("a.pt", "not-a-number", "w")


def test_the_advice_for_problems_is_that_of_the_page() -> None:
    page = (Path(__file__).parents[1] / "docs/reference/problems.md").read_text("utf-8").replace("`", "")
    for code in PROBLEM_CODES:
        assert f"| {kind_of(code).todo} |" in page, code


FAMILIES = ["zero_cases", "dcp_cases", "huggingface_cases", "rank_cases", "trainer_cases"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("level", ["quick", "full"])
def test_golden_checkpoints_have_no_errors(level: Any, family: str, request: pytest.FixtureRequest) -> None:
    cases: Mapping[str, Case] = request.getfixturevalue(family)
    for name in cases:
        try:
            view = lazyckpt.open(cases[name].path, **cases[name].info.get("open", {}))
        except lazyckpt.LazyckptError:
            continue
        report = lazyckpt.verify(view, level=level)
        # some were written with such values, or damaged on purpose
        known = {"not-a-number", "infinite-values"} | {problem.code for problem in view.problems}
        errors = {f.code for f in report if f.severity == "error"}
        assert errors <= known, (name, report.to_text(verbose=True))


def test_each_byte_is_read_once(tmp_path: Path) -> None:
    from lazyckpt.testing import opened

    path = saved({"w": torch.randn(1 << 20)}, tmp_path / "x.pt")
    view, counts = opened(path)
    counts.clear()
    lazyckpt.verify(view)
    assert path.stat().st_size * 0.9 < counts.bytes < path.stat().st_size * 1.02


def test_processes_give_the_same_report(tmp_path: Path) -> None:
    from concurrent.futures import ProcessPoolExecutor

    state = model()
    state[UP][4, 4] = float("nan")
    path = saved(state, tmp_path / "x.pt")
    with ProcessPoolExecutor(2) as pool:
        far = lazyckpt.verify(path, executor=pool, level="full")
    assert far.findings == lazyckpt.verify(path, level="full").findings


def test_numbers_are_not_needed_to_be_aligned(tmp_path: Path) -> None:
    """Runs that windows cut in the middle of an element."""
    rng = np.random.default_rng(0)
    state = {f"t{n}": torch.from_numpy(rng.standard_normal(int(rng.integers(1, 3_000_000)))) for n in range(4)}
    state["t2"][-1] = float("nan")
    save_dcp(state, tmp_path / "dcp")
    found = only(lazyckpt.verify(tmp_path / "dcp"), "not-a-number")
    assert found.details["first"] == [len(state["t2"]) - 1] and found.details["elements"] == 1


def test_a_flipped_bit_of_a_chunk_with_a_checksum(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    group = zarr.open_group(str(tmp_path / "x.zarr"), mode="w")
    array = group.create_array(
        "w", shape=(64, 64), chunks=(16, 64), dtype="float32",
        compressors=[zarr.codecs.Crc32cCodec()],
    )  # fmt: skip
    array[:] = np.random.default_rng(0).standard_normal((64, 64))
    assert not lazyckpt.verify(tmp_path / "x.zarr")
    chunk = sorted(path for path in (tmp_path / "x.zarr").rglob("*") if path.is_file() and path.suffix != ".json")[0]
    flip(chunk, 100)
    found = only(lazyckpt.verify(tmp_path / "x.zarr"), "wrong-checksum")
    assert found.file == "w/c/0/0"
    assert str(found.tensor).endswith("w") and found.severity == "error"


def test_a_moment_of_another_shape(tmp_path: Path) -> None:
    save_file({"w": torch.ones(4, 6), "v": torch.ones(4, 6), "flat": torch.ones(4, 6)}, tmp_path / "a.safetensors")
    save_file({"w": torch.ones(6, 4), "v": torch.ones(4, 6), "flat": torch.ones(24)}, tmp_path / "b.safetensors")
    weights, moments = (lazyckpt.open(tmp_path / f"{name}.safetensors") for name in "ab")
    (found,) = structure.shapes({"weights": weights, "exp_avg": moments})
    assert (found.code, found.tensor, found.details) == ("wrong-moment", "w", {"state": "exp_avg"})
    assert "[6, 4]" in found and "[4, 6]" in found


def test_a_file_that_is_replaced_while_it_is_read(tmp_path: Path) -> None:
    path = saved(model(), tmp_path / "x.pt")
    view = lazyckpt.open(path)
    os.replace(saved({name: t + 1 for name, t in model().items()}, tmp_path / "y.pt"), path)
    os.utime(path, (1, 1))
    assert "unreadable-file" in codes(lazyckpt.verify(view))
