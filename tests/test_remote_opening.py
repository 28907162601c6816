"""Opening a checkpoint behind a network: few requests for each file, many at a time, nothing twice."""

from __future__ import annotations

import json
import pickle
import random
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import lazyckpt
from lazyckpt import CorruptError
from lazyckpt.io.containers.needs import SAFETENSORS, TORCH
from lazyckpt.io.storage import prefetch
from lazyckpt.io.storage.announced import Layout, Needs
from lazyckpt.io.storage.base import Entry
from lazyckpt.io.storage.local import LocalStore
from lazyckpt.io.storage.prefetch import THREADS

from . import recordings
from .network import Network, Traffic, behind, opened
from .test_deferred_headers import LIES
from .test_megatron_dist import write_zarr

# Each family of checkpoints -> recorded cases, and the subfolder in which a case has its checkpoint.
FAMILIES = {
    "deepspeed_zero": ("zero1_bf16_dp4", "zero2_dp11", "zero3_bf16_dp4", "zero3_sub_groups", "bf16_optimizer_dp3"),
    "deepspeed_kinds": (
        "zero3_fp32_dp3",
        "zero3_fp32_dp3.universal",
        "pipe_zero1_pp3",
        "megatron_3d",
        "moe_zero2",
        "autoep_zero3",
        "autotp_zero1_tp4",
        "zero0_lion",
    ),
    "deepspeed_run": ("zero2", "zero3"),
    "huggingface": ("llama_sharded", "llama_single", "bert", "mixtral", "bin_sharded"),
    "dcp": (
        "fsdp2",
        "as_safetensors",
        "zstd",
        "hub_ranks",
        "hub_mapped",
        "hub_consolidated",
        "not_flattened",
        "file_per_item",
        "odd",
        "flat_optimizer",
    ),
    "rank_files": ("verl_fsdp2", "verl_hsdp", "accelerate_local", "accelerate_sharded", "meshes", "whole_states"),
    "torch_programs": ("script", "export", "export_2_7", "aoti"),
    "gguf": ("every", "split", "version1", "big_endian_blocks"),
    "megatron": ("tp2_pp2_bf16", "pp2_ep2_distopt", "tp2_dp2_distopt_buckets", "single"),
    "orbax": ("ocdbt", "ocdbt_zarr3", "plain", "plain_zarr3", "manager", "subchunks", "aggregate"),
    "trainers": (
        "trainer_gpt2",
        "accelerate_fsdp1",
        "accelerate_two",
        "lightning_fsdp",
        "torch_checkpointing",
        "torch_checkpointing_safetensors",
    ),
}


@pytest.fixture(scope="session")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    known: dict[str, Path] = {}

    def unpacked(group: str) -> Path:
        if group not in known:
            known[group] = tmp_path_factory.mktemp(group)
            recordings.unpack(group, known[group])
        return known[group]

    return unpacked


def places(folder: Path) -> list[Path]:
    """The checkpoints of a case."""
    return [path for name in ("ckpt", "legacy", "dist") if (path := folder / name).is_dir()]


def check_traffic(carried: Traffic, files: int) -> None:
    """Opening took at most 2.5 requests a file, listed each folder once and asked for no byte twice."""
    assert not carried.twice
    assert not carried.heads, "the listings tell the states of files"
    folders = Counter(carried.lists)
    assert len(carried.gets) <= 2.5 * max(files, len({get.path for get in carried.gets})), Counter(
        get.path for get in carried.gets
    )
    # a folder that may be a checkpoint of its own is looked at by itself, too
    assert max(folders.values(), default=0) <= 2, folders


@pytest.mark.parametrize(("group", "case"), [(group, case) for group, cases in FAMILIES.items() for case in cases])
def test_opening_takes_few_requests_a_file(group: str, case: str, golden: Callable[[str], Path]) -> None:
    found = places(golden(group) / case)
    assert found
    for path in found:
        view, carried = opened(path)
        check_traffic(carried, len(view.files))
        local = lazyckpt.open(path, cache=False)
        assert [p.code for p in view.problems] == [p.code for p in local.problems]
        assert {s: list(t) for s, t in view.states.items()} == {s: list(t) for s, t in local.states.items()}
        for state, tensors in local.states.items():
            for name, tensor in islice(tensors.items(), 40):
                if readable(tensor):
                    carried.clear()
                    part = (slice(0, 1),) if tensor.shape else ()
                    assert same(view.states[state][name][part], tensor[part])
                    # where an archive or a rank's file has the elements is looked up, too
                    assert len(carried.gets) <= 3 * max(1, len(tensor.fragments))


def readable(tensor: Any) -> bool:
    try:
        tensor[...]
    except lazyckpt.LazyckptError:
        return False
    return True


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return not a.numel() or torch.equal(*(t.flatten().contiguous().view(torch.uint8) for t in (a, b)))


# -- a thousand ranks


def zero3(folder: Path, world: int, elements: int, frozen: bool = False) -> Path:
    """A ZeRO-3 checkpoint whose ranks hold ``elements`` of each of four parameters, in files with holes."""
    tag = folder / "global_step1"
    tag.mkdir(parents=True)
    names = [f"layers.{n}.w" for n in range(4)]
    shapes = {name: torch.Size([world, elements]) for name in names}
    for rank in range(world):
        model = {
            "module": {name: torch.empty(0) for name in names} | ({"seen": torch.ones(3)} if frozen else {}),
            "buffer_names": ["seen"] if frozen else [],
            "param_shapes": [shapes],
            "frozen_param_shapes": {},
            "frozen_param_fragments": {},
            "shared_params": {},
            "dp_world_size": world,
            "mp_world_size": 1,
        }
        torch.save(model, tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        with FakeTensorMode():
            flats = [torch.empty(4 * elements) for _ in range(3)]
            state = {
                "zero_stage": 3,
                "partition_count": world,
                "optimizer_state_dict": {
                    "state": {0: {"step": torch.empty(()), "exp_avg": flats[0], "exp_avg_sq": flats[1]}},
                    "param_groups": [],
                },
                "fp32_flat_groups": [flats[2]],
            }
            with torch.serialization.skip_data(materialize_fake_tensors=True):
                torch.save({"optimizer_state_dict": state}, tag / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    (folder / "latest").write_text("global_step1")
    return folder


@pytest.mark.parametrize("world", [64, pytest.param(1024, marks=pytest.mark.slow)])
def test_ranks_of_zero3_are_opened_at_the_same_time(tmp_path: Path, world: int) -> None:
    folder = zero3(tmp_path / "x", world, 1 << 18)
    view, carried = opened(folder, delay=0.002)
    files = 2 * world + 1
    assert len(carried.gets) <= 2 * files + 8, "the optimizer's files: head, tail and headers; the others: an end"
    assert len(carried.lists) == 2
    assert not carried.heads and not carried.twice
    assert 16 < carried.most <= THREADS + 1
    total = sum(path.stat().st_size for path in folder.rglob("*.pt"))
    assert carried.nbytes <= total / 100
    carried.clear()
    assert view.states["fp32"]["layers.2.w"][5].shape == (1 << 18,)
    assert len({get.path for get in carried.gets}) == 1
    assert len(carried.gets) == 1, "the header of the record that the row lies in was read while opening"


def test_buffers_of_all_ranks_are_read_at_the_same_time(tmp_path: Path) -> None:
    folder = zero3(tmp_path / "x", 24, 1 << 18, frozen=True)
    view, carried = opened(folder, delay=0.002)
    assert not view.problems
    assert len(carried.gets) <= 3 * 24 + 24 + 8, "head, tail and headers of optimizer files; buffers"
    assert not carried.twice
    assert carried.most > 8


def test_raw_names_of_all_ranks_are_read_at_the_same_time(tmp_path: Path) -> None:
    folder = zero3(tmp_path / "x", 24, 1 << 18)
    view, carried = opened(folder, delay=0.002)
    carried.clear()
    assert list(view.stored) == list(lazyckpt.open(folder, cache=False).stored)
    assert len(carried.gets) <= 3 * 48 and not carried.heads
    assert not carried.twice


# -- runs and hierarchies


def test_the_steps_of_a_run_are_opened_at_the_same_time(tmp_path: Path) -> None:
    for step in range(40):
        torch.save({"w": torch.full((300, 100), step), "b": torch.ones(5)}, tmp_path / f"step_{step}.pt")
    carried = Traffic(0.01)
    with behind(carried):
        run = lazyckpt.open_run(tmp_path)
        assert len(run.steps) == 40
        assert list(run) == ["w", "b"]
        assert len(carried.lists) <= 2
        assert len(carried.gets) <= 2 * 40
        assert not carried.twice
        assert carried.most > 8


def test_folders_of_a_hierarchy_are_listed_at_the_same_time(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    root = zarr.open_group(tmp_path / "x", mode="w", zarr_format=3)
    for group in range(4):
        for array in range(6):
            root.create_array(f"g{group}/a{array}", data=np.arange(10.0))
    view, carried = opened(tmp_path / "x", delay=0.005)
    assert len(view) == 24
    assert len(carried.gets) <= 4 + 24 + 1 and len(carried.lists) <= 4 + 24 + 1 + 1  # the chunks of all arrays
    assert not carried.twice and carried.most > 8


def test_arrays_of_megatron_are_listed_at_the_same_time(tmp_path: Path) -> None:
    for n in range(12):
        write_zarr(tmp_path, f"decoder.layers.{n}.weight", torch.arange(32.0).reshape(4, 8), (2, 8), "<f4")
    torch.save({"iteration": 3}, tmp_path / "common.pt")
    (tmp_path / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))
    view, carried = opened(tmp_path, delay=0.005)
    assert view.format == "megatron-zarr"
    assert len(carried.lists) <= 14 and len(carried.gets) <= 14
    assert not carried.heads and not carried.twice and carried.most > 6


# -- small reads


def test_a_single_file_takes_its_two_ends(tmp_path: Path) -> None:
    torch.save({f"w{n}": torch.full((400, 256), n) for n in range(40)}, tmp_path / "x.pt")
    view, carried = opened(tmp_path / "x.pt")
    assert len(carried.gets) == 2 and len(carried.heads) <= 1
    for name, rows in (("w3", slice(None)), ("w4", slice(100, 103))):
        carried.clear()
        assert same(view[name][rows], torch.full((400, 256), int(name[1]))[rows])
    carried.clear()
    assert all(int(t[0, 0]) == int(name[1:]) for name, t in view.to().items())
    assert carried.nbytes < 1.01 * (tmp_path / "x.pt").stat().st_size, "headers are read with the data behind them"
    assert not [get for get in carried.gets if get.length < 1000]


def test_headers_that_contradict_the_directory_are_refused_where_they_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({f"w{n}": torch.full((400, 256), n) for n in range(8)}, path)
    with zipfile.ZipFile(path) as archive:
        at = next(i.header_offset for i in archive.infolist() if i.filename.endswith("/data/5"))
    data = bytearray(path.read_bytes())
    data[at + 33] ^= 1
    path.write_bytes(data)
    view, _ = opened(path)
    tensor = pickle.loads(pickle.dumps(view["w5"]))
    for _ in range(2):
        for read in (lambda: view["w5"][...], lambda: view["w5"][7:9], lambda: view.to(), lambda: tensor[3]):
            with pytest.raises(CorruptError, match=r"x\.pt"):
                read()
    assert int(view["w4"][0, 0]) == 4


@pytest.mark.parametrize("steps", [False, True], ids=["large records only", "small ones between"])
@pytest.mark.parametrize("field", LIES)
def test_headers_that_opening_reads_are_refused_where_they_are_read(field: str, steps: bool, tmp_path: Path) -> None:
    """A lie about any record of a file whose headers opening checks: its tensor is refused, and no other."""
    state: dict[str, torch.Tensor] = {}
    for n in range(3):
        state[f"w{n}"] = torch.full((900, 256), n)
        if steps:
            state[f"step{n}"] = torch.full((), n)
    path = tmp_path / "x.pt"
    torch.save(state, path)
    whole = path.read_bytes()
    view, carried = opened(path)
    asked = len(carried.gets)
    assert asked == 3, "head, tail, and the headers at one other place"
    carried.clear()
    assert view["w2"][7].tolist() == [2] * 256
    assert len(carried.gets) == 1
    for number, name in enumerate(state):
        with zipfile.ZipFile(path) as archive:
            at = next(i.header_offset for i in archive.infolist() if i.filename.endswith(f"/data/{number}"))
        data = bytearray(whole)
        data[at + LIES[field]] ^= 1
        (tmp_path / "y.pt").write_bytes(data)
        try:
            view, carried = opened(tmp_path / "y.pt")
        except CorruptError:
            assert number == 0, "opening compares the first header, to know whether torch wrote the file"
            continue
        assert len(carried.gets) <= asked
        for other, tensor in state.items():
            for _ in range(2):
                if other == name:
                    with pytest.raises(CorruptError, match=r"y\.pt"):
                        view[other][...]
                else:
                    assert same(view[other][...], tensor)


def test_archives_of_a_file_are_looked_up_together(tmp_path: Path) -> None:
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    state = {f"layers.{n}.w": torch.full((300, 100), n) for n in range(30)}
    dcp.save(state, checkpoint_id=tmp_path / "x", no_dist=True)
    view, carried = opened(tmp_path / "x")
    assert len(carried.gets) == 1
    carried.clear()
    assert all(same(tensor, state[name]) for name, tensor in view.to().items())
    assert len(carried.gets) <= 31 + 30
    assert carried.nbytes <= 1.2 * sum(path.stat().st_size for path in (tmp_path / "x").iterdir())


# -- files that change, vanish, and lie


def test_a_file_that_is_replaced_after_the_listing_is_refused(tmp_path: Path) -> None:
    folder = zero3(tmp_path / "x", 8, 1 << 16)
    victim = next(folder.rglob("*_rank_5_*optim*"))

    class Replacing(Network):
        def list(self, folder: str = "") -> Mapping[str, Entry]:
            found = super().list(folder)
            if folder:
                victim.write_bytes(victim.read_bytes() + b"x")
            return found

    with behind(Traffic(), Replacing):
        view = lazyckpt.open(folder, cache=False)
    assert any("rank_5" in str(p) and "is not the file that was opened" in str(p) for p in view.problems)
    assert view.states["fp32"]["layers.0.w"][4].shape == (1 << 16,)
    with pytest.raises(lazyckpt.LazyckptError, match="rank_5"):
        view.states["fp32"]["layers.0.w"][5]


def test_files_that_cannot_be_read_are_problems_as_on_a_disk(tmp_path: Path) -> None:
    folder = zero3(tmp_path / "x", 8, 1 << 16)

    class Failing(Network):
        def _open(self, path: str, start: int, stop: int) -> Any:
            if "rank_3_" in path and "optim" in path:
                raise OSError(f"{self.root}/{path}: the server is on fire")
            return super()._open(path, start, stop)

    with behind(Traffic(), Failing):
        view = lazyckpt.open(folder, cache=False)
    assert any("on fire" in str(problem) for problem in view.problems)
    assert view.states["fp32"]["layers.0.w"][4].shape == (1 << 16,)
    with pytest.raises(lazyckpt.LazyckptError):
        view.states["fp32"]["layers.0.w"][3]


def test_what_a_file_needs_is_guessed_without_errors(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3000)}, tmp_path / "x.pt")
    good = (tmp_path / "x.pt").read_bytes()
    rng = random.Random(0)
    for _ in range(2000):
        data = bytearray(good[: rng.choice([len(good), rng.randrange(len(good))])])
        for _ in range(rng.randrange(4)):
            at = rng.randrange(max(0, len(data) - 600), len(data)) if data else 0
            data[at : at + 4] = rng.choice([b"\xff" * 4, rng.randbytes(4), b"PK\x05\x06", b"PK\x06\x06"])
        start, stop = sorted((rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)))

        def held(offset: int, length: int, data: bytes = bytes(data), gap: tuple[int, int] = (start, stop)) -> Any:
            inside = offset >= 0 and offset + length <= len(data)
            apart = offset + length <= gap[0] or gap[1] <= offset
            return data[offset : offset + length] if inside and apart else None

        for layout in (TORCH, SAFETENSORS):
            assert layout.needs is not None
            head, tail = layout.needs(len(data), held)
            assert head >= 0 and tail >= 0
    size = len(good)
    needs = TORCH.needs(size, lambda offset, length: good[offset : offset + length])  # type: ignore[misc]
    assert 0 < needs.head < 8192 and 0 < needs.tail < 8192


def test_the_bytes_held_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "_UNREAD", 1 << 20)
    monkeypatch.setattr(prefetch, "_KEPT", 1 << 20)
    monkeypatch.setattr(prefetch, "THREADS", 4)
    names = []
    for n in range(60):
        names.append(f"{n}.bin")
        (tmp_path / names[-1]).write_bytes(bytes([n]) * 50_000)
    carried = Traffic()
    store = Network(LocalStore(str(tmp_path)), carried)
    store.look_ahead()
    assert store.ahead is not None
    store.ahead.listed("")
    store.ahead.expect(names, Layout(Needs(1 << 20)))
    most = 0
    for n, name in enumerate(names):
        assert store.read(name, 10, 5) == bytes([n]) * 5
        most = max(most, sum(file.nbytes for file in store.ahead._files.values()))
    assert len(carried.gets) == 60
    assert most <= (2 << 20) + 6 * 50_000
    assert store.read(names[0], 0, 5) == bytes(5), "what was dropped is requested again"
    store.stop_ahead()
    assert store.ahead is None


def test_threads_that_want_the_same_bytes_make_one_request(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(range(256)) * 4096)
    carried = Traffic(0.05)
    store = Network(LocalStore(str(tmp_path)), carried)
    store.look_ahead()
    assert store.ahead is not None
    store.stat("x")
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: bytes(store.read("x", 256 * n, 256)), [3] * 8 + [5, 7]))
    assert found == [bytes(range(256))] * 10
    assert len({get.offset for get in carried.gets}) == len(carried.gets) <= 3
