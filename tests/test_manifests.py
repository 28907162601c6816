"""Manifests that exports write as they go: equal to digests of what was written, and nothing is read twice for them."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import lazyckpt
from lazyckpt import cli
from lazyckpt.core import merkle
from lazyckpt.errors import DestinationError, FormatError
from lazyckpt.inspect import digest as engine
from lazyckpt.inspect import small
from lazyckpt.jobs import executor as job
from lazyckpt.jobs import ledger, pieces
from lazyckpt.jobs import write as stream
from lazyckpt.jobs.publish import unfinished
from lazyckpt.testing.counting import opened

from .conftest import need
from .megatron_handmade import args, columns, halves, rows, same, save_tensor_parallel
from .writers import Case

Write = Callable[[Any, Path], Any]

# name -> (what it is written to, the call)
WRITERS: dict[str, tuple[str, Write]] = {
    "safetensors": ("x.safetensors", lambda v, to: v.to_safetensors(to, manifest=True)),
    "shards": ("hf", lambda v, to: v.to_safetensors(to, max_shard_size="90KB", manifest=True)),
    "torch": ("x.pt", lambda v, to: v.to_torch(to, manifest=True)),
    "dcp": ("dcp", lambda v, to: v.to_dcp(to, manifest=True)),
    "universal": ("universal", lambda v, to: v.to_universal(to, manifest=True)),
    "zarr": ("x.zarr", lambda v, to: v.to_zarr(to, chunk="12KB", manifest=True)),
    "zstd": ("z.zarr", lambda v, to: v.to_zarr(to, codec="zstd", chunk="5KB", manifest=True)),
    "shard": ("s.zarr", lambda v, to: v.to_zarr(to, shard="64KB", chunk="9KB", manifest=True)),
    "pack": ("p.zarr", lambda v, to: v.to_zarr(to, pack=True, manifest=True)),
    "zip": ("x.zarr.zip", lambda v, to: v.to_zarr(to, manifest=True)),
}
READ_AGAIN = {"universal", "pack"}  # whose tensors partly lie in files that no task of the engine hashes


@pytest.fixture(autouse=True)
def small_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of the tree and of the engine that are small enough for tensors of some KiB to have many of them."""
    monkeypatch.setattr(merkle, "RUN", 1024)
    monkeypatch.setattr(stream, "RUN", 4096)
    monkeypatch.setattr(stream, "PIECE", 4096)
    monkeypatch.setattr(pieces, "PIECE", 4096)
    monkeypatch.setattr(small, "SMALL", 512)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    g = torch.Generator().manual_seed(0)
    state = {f"l.{n}.w": torch.randn(37, 41 + n, generator=g) for n in range(9)}
    state |= {f"l.{n}.b": torch.randn(n + 1, generator=g).bfloat16() for n in range(9)}
    state |= {"cube": torch.randn(9, 16, 64, generator=g), "even": torch.randn(64, 256, generator=g)}
    state |= {"n": torch.tensor(7), "empty": torch.empty(0, 3), "exact": torch.randn(256, generator=g)}
    path = tmp_path_factory.mktemp("source") / "x.pt"
    torch.save(state | {"tied": state["l.0.w"]}, path)
    return path


def manifest_of(written: Any) -> lazyckpt.Digest:
    return lazyckpt.Digest.from_json(Path(written.manifest).read_bytes())


def check(written: Any, path: Path) -> lazyckpt.Digest:
    """The manifest is that of the digests of what was written, and of its files."""
    found = manifest_of(written)
    view = lazyckpt.open(path)
    wanted = view.digest()
    assert found == wanted and list(found.states) == list(wanted.states)
    for state, table in wanted.states.items():
        assert dict(found.states[state]) == dict(table) and found.states[state].aliases == table.aliases
    return found


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of written files that were read again to be hashed."""
    read: list[int] = []
    of_large, together = engine._of_large, engine._State._together

    def large(*given: Any) -> Iterator[Any]:
        for task in of_large(*given):
            read.append(task.nbytes)
            yield task

    def some(self: Any, tensors: Any, size: int) -> Any:
        read.append(size)
        return together(self, tensors, size)

    monkeypatch.setattr(engine, "_of_large", large)
    monkeypatch.setattr(engine._State, "_together", some)
    return read


@pytest.mark.parametrize("name", WRITERS)
def test_every_writer(source: Path, tmp_path: Path, again: list[int], name: str) -> None:
    """The manifest is that of the export; the hashes come from what is written, so files are not read again."""
    view, (to, write) = lazyckpt.open(source), WRITERS[name]
    written = write(view, tmp_path / to)
    back = sum(again)
    found = check(written, tmp_path / to)
    assert name == "universal" or view.digest() == found
    assert name in READ_AGAIN or back == 0


def test_chunks_that_cut_runs(source: Path, tmp_path: Path, again: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of which two chunks of DCP have a part is read from the written file; no other is."""
    from lazyckpt.export import dcp

    monkeypatch.setattr(dcp, "CHUNK", 3000)
    view = lazyckpt.open(source)
    written = view.to_dcp(tmp_path / "dcp", manifest=True)
    assert 0 < sum(again) < sum(t.nbytes for t in view.values()) // 2
    check(written, tmp_path / "dcp")


@pytest.mark.parametrize("name", ["safetensors", "torch", "dcp", "zarr", "zstd"])
def test_the_source_is_read_once(source: Path, tmp_path: Path, name: str) -> None:
    read = []
    for manifest in (False, True):
        view, counts = opened(source, cache=False)
        counts.clear()
        to = tmp_path / f"{manifest}.{WRITERS[name][0]}"
        write: Any = getattr(view, f"to_{'zarr' if name == 'zstd' else name}")
        write(to, manifest=manifest, **({"codec": "zstd"} if name == "zstd" else {}))
        read.append(counts.bytes)
    assert read[0] == read[1] >= sum(t.nbytes for t in lazyckpt.open(source).once()[0].values())


def test_all_states(zero_cases: Mapping[str, Case], tmp_path: Path) -> None:
    view = lazyckpt.open(zero_cases["zero2_fp32_dp2"].path)
    for name in ("dcp", "universal", "zarr"):
        found = check(WRITERS[name][1](view, tmp_path / name), tmp_path / name)
        assert "exp_avg" in found.states
        if name != "universal":
            assert found.root_of("weights") == view.digest().root_of("weights")


def test_another_dtype(source: Path, tmp_path: Path, again: list[int]) -> None:
    view = lazyckpt.open(source)
    for name, call in {"x.safetensors": view.to_safetensors, "x.zarr": view.to_zarr}.items():
        check(call(tmp_path / name, dtype=torch.float16, manifest=True), tmp_path / name)
    assert lazyckpt.digest(tmp_path / "x.zarr") == lazyckpt.digest(tmp_path / "x.safetensors")


@pytest.mark.slow
def test_processes_and_shares(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: list[int]) -> None:
    view = lazyckpt.open(source)
    for name, call in {"hf": view.to_safetensors, "dcp": view.to_dcp, "x.zarr": view.to_zarr}.items():
        options: dict[str, Any] = {"max_shard_size": "50KB"} if name == "hf" else {}
        for n in (1, 0):
            written = call(tmp_path / name, share=(n, 2), manifest=True, **options)
        assert sum(again) == 0
        check(written, tmp_path / name)
        again.clear()
    monkeypatch.undo()  # workers have runs of the usual size
    with ProcessPoolExecutor(2) as executor:
        for name in ("x.safetensors", "y.zarr"):
            call = view.to_zarr if name == "y.zarr" else view.to_safetensors
            written = call(tmp_path / name, executor=executor, manifest=True)
            check(written, tmp_path / name)
            assert lazyckpt.digest(tmp_path / name, executor=executor) == manifest_of(written)


@pytest.mark.parametrize("name", ["safetensors", "shards", "dcp", "zstd"])
def test_an_export_that_is_killed_and_resumed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """What the first call has written is hashed from the file; the manifest is complete."""
    from lazyckpt.export import chunks

    view, (to, write) = lazyckpt.open(source), WRITERS[name]
    monkeypatch.setattr(ledger, "_HELD", 0)
    monkeypatch.setattr(job, "_TOGETHER", 1)
    turns = itertools.count()

    def killed(real: Any) -> Any:
        def call(*given: Any) -> Any:
            if next(turns) >= 6:
                raise OSError(28, "no space")
            return real(*given)

        return call

    with monkeypatch.context() as patch, pytest.raises(DestinationError):
        patch.setattr(stream, "_pass", killed(stream._pass))
        patch.setattr(chunks, "write_hashed", killed(chunks.write_hashed))
        write(view, tmp_path / to)
    assert unfinished(tmp_path / to) and os.listdir(tmp_path) == [f".{to}.incomplete"]
    check(write(view, tmp_path / to), tmp_path / to)
    # and of one that is killed when all files are complete
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(stream, "check_unchanged", lambda tensors: (_ for _ in ()).throw(KeyboardInterrupt))
        write(view, tmp_path / f"2.{to}")
    check(write(view, tmp_path / f"2.{to}"), tmp_path / f"2.{to}")


def test_readers_of_the_formats(source: Path, tmp_path: Path) -> None:
    """A manifest is no part of a checkpoint to anybody."""
    view = lazyckpt.open(source)
    view.to_safetensors(tmp_path / "hf", manifest=True)
    assert len(load_file(tmp_path / "hf" / "model.safetensors")) == len(view) - 1
    view.to_dcp(tmp_path / "dcp", manifest=True)
    dcp = importlib.import_module("torch.distributed.checkpoint")
    state = {"model": {"even": torch.zeros(64, 256)}}
    dcp.load(state, storage_reader=dcp.FileSystemReader(tmp_path / "dcp"), no_dist=True)
    assert torch.equal(state["model"]["even"], view["even"][...])
    for name in ("hf", "dcp"):
        assert lazyckpt.verify(tmp_path / name, level="quick").exit_code("error") == 0
        assert not lazyckpt.open(tmp_path / name).problems
    need("zarr")
    zarr = importlib.import_module("zarr")
    importlib.import_module("lazyckpt.interop.zarr_dtypes")  # bfloat16 for zarr-python
    view.to_zarr(tmp_path / "x.zarr", manifest=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [name for name, _ in zarr.open_group(tmp_path / "x.zarr", mode="r").members()] == ["weights"]
    assert sorted(os.listdir(tmp_path / "x.zarr")) == ["weights", "zarr.json"]


def test_over_a_url(source: Path) -> None:
    need("fsspec")
    fsspec = importlib.import_module("fsspec")
    view = lazyckpt.open(source)
    written = view.to_zarr("memory://manifests/x.zarr", manifest=True)
    assert written.manifest == "memory://manifests/x.zarr.manifest.json"
    with fsspec.open(written.manifest) as file:
        found = lazyckpt.Digest.from_json(file.read())
    assert found == lazyckpt.digest("memory://manifests/x.zarr") == lazyckpt.digest(source)


def test_another_file_in_the_place_of_the_manifest(source: Path, tmp_path: Path) -> None:
    need("zarr")
    (tmp_path / "x.zarr.manifest.json").write_text("{}")
    with pytest.raises(DestinationError, match="no manifest"):
        lazyckpt.open(source).to_zarr(tmp_path / "x.zarr", manifest=True)
    assert (tmp_path / "x.zarr.manifest.json").read_text() == "{}" and not (tmp_path / "x.zarr").exists()


def test_the_commands(source: Path, tmp_path: Path) -> None:
    run = CliRunner()

    def call(*given: object) -> Any:
        return run.invoke(cli.app, list(map(str, given)))

    done = call("convert", source, tmp_path / "hf", "--to", "safetensors", "--manifest", "--json")
    assert done.exit_code == 0, done.output
    manifest = json.loads(done.stdout)["result"]["manifest"]
    assert call("verify", source, "--against", manifest, "--fail-on", "error").exit_code == 0
    done = call("convert", source, tmp_path / "ranks", "--to", "torch", "--tp", "1", "--pp", "1", "--manifest", "-q")
    assert done.exit_code == 0, done.output
    (rank,) = (tmp_path / "ranks").iterdir()
    assert lazyckpt.Digest.from_json((rank / "lazyckpt-manifest.json").read_bytes()) == lazyckpt.digest(rank)
    assert call("digest", source, "--files", "--workers", 2).exit_code == 2


def test_a_run(source: Path, tmp_path: Path) -> None:
    for step in (1, 2):
        view = lazyckpt.open(source).select("even" if step == 1 else "l.*")
        view.to_safetensors(tmp_path / f"checkpoint-{step}", manifest=True)
    done = CliRunner().invoke(cli.app, ["digest", str(tmp_path), "--run"])
    assert done.exit_code == 0, done.output
    roots = [lazyckpt.digest(tmp_path / f"checkpoint-{step}").root for step in (1, 2)]
    assert done.stdout.splitlines() == [f"sha256 {root} {step}" for step, root in enumerate(roots, 1)]
    assert CliRunner().invoke(cli.app, ["digest", str(tmp_path), "--run", "--root"]).exit_code == 2


# -- the same weights in many layouts


def _tensor_parallel(root: Path) -> Path:
    g = torch.Generator().manual_seed(1)
    layer = "decoder.layers.0."
    model = {
        "embedding.word_embeddings.weight": (torch.randn(64, 32, generator=g), rows),
        f"{layer}self_attention.linear_qkv.weight": (torch.randn(96, 32, generator=g), rows),
        f"{layer}self_attention.linear_proj.weight": (torch.randn(32, 32, generator=g), columns),
        f"{layer}mlp.linear_fc1.weight": (torch.randn(256, 32, generator=g), halves),
        f"{layer}mlp.linear_fc2.weight": (torch.randn(32, 128, generator=g), columns),
        "decoder.final_layernorm.weight": (torch.randn(32, generator=g), same),
        "output_layer.weight": (torch.randn(64, 32, generator=g), rows),
    }
    about = vars(args(num_layers=1, num_attention_heads=8, hidden_size=32, swiglu=True))
    about.pop("tensor_model_parallel_size", None)
    return save_tensor_parallel(root, model, 8, args=about)


def test_six_formats_and_a_flipped_bit_in_each(zero_cases: Mapping[str, Case], tmp_path: Path) -> None:
    zero = lazyckpt.open(zero_cases["zero2_fp32_dp2"].path)
    megatron = lazyckpt.open(_tensor_parallel(tmp_path / "tp8"))
    assert megatron.mesh.tp == 8
    for n, view in enumerate((zero, megatron)):
        folder = tmp_path / str(n)
        view.to_safetensors(folder / "hf", max_shard_size="4KB")
        view.to_torch(folder / "x.pt")
        view.to_dcp(folder / "dcp")
        view.to_zarr(folder / "x.zarr")
        view.to_zarr(folder / "packed.zarr", pack=True)
        paths = {path.name: path for path in folder.iterdir()}
        if n:
            check(view.to_megatron(folder / "tp2", tp=2, manifest=True), folder / "tp2")
            paths |= {"tp2": folder / "tp2", "tp8": tmp_path / "tp8"}
        else:
            shutil.copytree(zero_cases["zero2_fp32_dp2"].path, folder / "zero2")
            paths["zero2"] = folder / "zero2"
        assert len(paths) >= 6
        wanted = view.digest()
        for name, path in paths.items():
            assert lazyckpt.digest(path).root_of("weights") == wanted.root_of("weights"), name
        for name, path in paths.items():
            floats = [t for t in lazyckpt.open(path).values() if t.dtype.is_floating_point and t.ndim]
            tensor = next(t for t in floats if t.shape[-1] > 3)
            _flip(path, tensor)
            now = lazyckpt.open(path, cache=False).digest(states=["weights"])
            differ = now.mismatches(lazyckpt.Digest("sha256", {"weights": wanted.states["weights"]}))
            assert tensor.name in {one.name for one in differ}, name
            assert {one.kind for one in differ} <= {"values", "unreadable"}, name
            assert now.root_of("weights") != wanted.root_of("weights"), name


def _flip(path: Path, tensor: Any) -> None:
    """Flip a bit of the second element, in every file that holds the first ones."""
    first = tensor.lazy[(*(0,) * (tensor.ndim - 1), slice(0, 4))][...].contiguous().view(torch.uint8).numpy().tobytes()
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    changed = 0
    for file in files:
        data = bytearray(file.read_bytes())
        at = data.find(first)
        if at >= 0:
            data[at + tensor.itemsize] ^= 1
            file.write_bytes(data)
            changed += 1
    assert changed, f"{path}: {tensor.explain()}"


# -- very many small tensors


def test_processes_hash_many_small_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small, "_cores", lambda: 3)
    state = {f"w.{n}": torch.full((n % 40, 3), float(n)) for n in range(300)}
    state |= {f"b.{n}": torch.full((n % 7,), n, dtype=torch.int16) for n in range(300)} | {"big": torch.randn(3000)}
    save_file(state, tmp_path / "x.safetensors")
    wanted = lazyckpt.open(tmp_path / "x.safetensors", cache=False).digest()
    monkeypatch.setattr(small, "MANY", 100)
    started = []
    child = small._child
    monkeypatch.setattr(small, "_child", lambda fd, rows: (started.append(len(rows.offsets)), child(fd, rows))[1])
    assert lazyckpt.digest(tmp_path / "x.safetensors") == wanted
    assert len(started) == 3 and sum(started) == 600
    torch.save(state, tmp_path / "x.pt")
    assert lazyckpt.digest(tmp_path / "x.pt") == wanted
    # a process that fails, and an interpreter that cannot be started
    monkeypatch.setattr(small, "_child", lambda fd, rows: b"")
    assert lazyckpt.digest(tmp_path / "x.safetensors") == wanted
    monkeypatch.setattr(small, "_child", child)
    monkeypatch.setattr("sys.executable", "")
    assert not small._can_start()
    assert lazyckpt.digest(tmp_path / "x.safetensors") == wanted


def test_a_file_that_changes_while_processes_hash_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small, "_cores", lambda: 2)
    monkeypatch.setattr(small, "MANY", 10)
    path = tmp_path / "x.safetensors"
    save_file({f"w.{n}": torch.full((4,), float(n)) for n in range(50)}, path)
    view = lazyckpt.open(path, cache=False)
    child = small._child

    def changed(fd: int, given: Any) -> bytes:
        data = child(fd, given)
        path.write_bytes(path.read_bytes() + b"more")
        return data

    monkeypatch.setattr(small, "_child", changed)
    found = view.digest()
    assert found.root is None and len(found.errors) == 50


def test_memory_does_not_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a tensor of 1 TiB: tasks are made when they are needed, each holds a buffer, and what stays are the hashes."""
    monkeypatch.setattr(merkle, "RUN", 1 << 20)
    size = 1 << 40
    header = json.dumps({"w": {"dtype": "U8", "shape": [1 << 20, 1 << 20], "data_offsets": [0, size]}}).encode()
    with open(tmp_path / "x.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)  # takes no room on the disk
    view = lazyckpt.open(tmp_path / "x.safetensors")
    state = engine._State("weights", view, {}, "sha256", None)
    for seen, task in enumerate(itertools.islice(state.tasks(0), 2000)):
        assert task.memory <= 32 << 20 and task.nbytes == 64 << 20
        hashes = tuple(bytes(32) for _ in range(64))
        state.add(engine._Read(0, merkle.Leaves(64 * seen, hashes)))
    assert sum(map(len, state._open.values())) == 2000 * 64 and len(state.digests) == 32


# -- diff


def _pair(tmp_path: Path) -> tuple[Any, Any]:
    state = {f"l.{n}": torch.randn(20, 30) for n in range(6)}
    torch.save(state, tmp_path / "a.pt")
    state["l.3"][4, 5] += 1
    torch.save(state | {"more": torch.ones(2)}, tmp_path / "b.pt")
    a = lazyckpt.open(tmp_path / "a.pt").to_safetensors(tmp_path / "a", manifest=True)
    return a, lazyckpt.open(tmp_path / "b.pt").to_dcp(tmp_path / "b", manifest=True)


def test_diff_reads_what_differs(tmp_path: Path) -> None:
    _pair(tmp_path)
    found = lazyckpt.diff(tmp_path / "a", tmp_path / "b")
    read = lazyckpt.diff(tmp_path / "a", tmp_path / "b", digests=False)
    assert [(r.name, r.status, r.count, r.at) for r in found] == [(r.name, r.status, r.count, r.at) for r in read]
    assert found.digests == 5 and read.digests == 0 and "5 compared by the digests" in repr(found)
    assert {row.name for row in found if row.by_digest} == {f"l.{n}" for n in (0, 1, 2, 4, 5)}
    every = lazyckpt.diff(tmp_path / "a", tmp_path / "b", states="all")
    assert every.digests == 5 and [row.status for row in every] == [row.status for row in found]


@pytest.mark.skipif(os.name != "posix", reason="Windows has no time of change")
@pytest.mark.parametrize("form", ["safetensors", "shards", "torch", "dcp", "zarr", "folder"])
def test_diff_does_not_trust_times_that_were_set_back(form: str, source: Path, tmp_path: Path) -> None:
    """A file that was edited in place and whose size and time of modification are those of the manifest is read."""
    if form == "zarr":
        need("zarr")
    name, write = WRITERS["shards" if form == "folder" else form]
    paths = []
    for side in "ab":
        paths.append(tmp_path / side / name)
        paths[-1].parent.mkdir()
        if form == "folder":  # its files are renamed one by one, the index last
            paths[-1].mkdir()
        write(lazyckpt.open(source), paths[-1])
    assert lazyckpt.diff(*paths).digests == len(lazyckpt.open(source))
    files = [path for path in (tmp_path / "b").rglob("*") if path.is_file() and "manifest" not in path.name]
    before = {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in files}
    _flip(paths[1], lazyckpt.open(paths[1])["exact"])
    for path, (_, time) in before.items():
        os.utime(path, ns=(time, time))
    assert before == {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in files}
    found = lazyckpt.diff(*paths)
    assert found.digests == 0 and [row.name for row in found.differing] == ["exact"]


def test_diff_does_not_trust_a_stale_manifest(tmp_path: Path) -> None:
    _pair(tmp_path)
    file = tmp_path / "a" / "model.safetensors"
    view = lazyckpt.open(tmp_path / "a")
    assert lazyckpt.diff(view, tmp_path / "b").digests == 5
    data = bytearray(file.read_bytes())
    data[-1] ^= 64
    file.write_bytes(data)
    found = lazyckpt.diff(tmp_path / "a", tmp_path / "b")
    assert found.digests == 0 and [row.name for row in found.differing] == ["l.3", "l.5", "more"]
    # names that a view has changed are not those of the manifest
    lazyckpt.open(tmp_path / "a.pt").to_safetensors(tmp_path / "c", manifest=True)
    swapped = lazyckpt.open(tmp_path / "c").rename({"l.0": "l.1", "l.1": "l.0"})
    found = lazyckpt.diff(swapped, lazyckpt.open(tmp_path / "b"))
    assert found.digests == 0 and {"l.0", "l.1"} <= {row.name for row in found.differing}
    manifest = tmp_path / "c" / "lazyckpt-manifest.json"
    manifest.write_text(manifest.read_text()[:-30])
    assert lazyckpt.diff(tmp_path / "c", tmp_path / "a.pt").digests == 0


def test_diff_of_manifests(tmp_path: Path) -> None:
    a, b = _pair(tmp_path)
    found = lazyckpt.diff(a.manifest, b.manifest)
    assert {row.name: row.status for row in found.differing} == {"l.3": "values", "more": "only in b"}
    assert found.digests == len(found) == 7 and "l.3: the digests differ" in repr(found)
    assert lazyckpt.diff(manifest_of(a), tmp_path / "a.pt").equal
    assert lazyckpt.diff(tmp_path / "a.pt", a.manifest, states="all").equal
    run = CliRunner()
    done = run.invoke(cli.app, ["diff", str(a.manifest), str(tmp_path / "b")])
    assert done.exit_code == 1 and "the digests differ" in done.output
    done = run.invoke(cli.app, ["diff", str(tmp_path / "a"), str(tmp_path / "b")])
    assert done.exit_code == 1 and "compared by the digests of manifests (--read reads them)" in done.output
    done = run.invoke(cli.app, ["diff", str(tmp_path / "a"), str(tmp_path / "b"), "--read", "--json"])
    assert json.loads(done.stdout)["by_digest"] == 0
    need("blake3")
    other = lazyckpt.digest(tmp_path / "a", algorithm="blake3")
    with pytest.raises(FormatError, match="blake3"):
        lazyckpt.diff(other, a.manifest)


def test_blake3_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(importlib.import_module("sys").modules, "blake3", None)
    torch.save({"w": torch.ones(2)}, tmp_path / "x.pt")
    done = CliRunner().invoke(cli.app, ["digest", str(tmp_path / "x.pt"), "--algorithm", "blake3"])
    assert done.exit_code == 2 and "pip install" in done.stderr
