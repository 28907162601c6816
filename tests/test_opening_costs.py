"""Short ways through frequent files: they give what the general parsers give; their cost is counted by the tensor."""

from __future__ import annotations

import errno
import gc
import io
import json
import os
import pickle
import pickletools
import random
import struct
import sys
import tracemalloc
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import lazyckpt
from lazyckpt.core.names import Names
from lazyckpt.errors import LazyckptError, MissingFileError
from lazyckpt.formats.reader import Source
from lazyckpt.formats.registry import read_index
from lazyckpt.io.containers import safetensors, zip_columns, zip_directory
from lazyckpt.io.containers.pickle import machine
from lazyckpt.io.containers.pickle.memo import Items
from lazyckpt.io.containers.pickle.rebuild import REBUILD, StoredTensor, persistent_storage
from lazyckpt.io.containers.torch_file import read_torch_file
from lazyckpt.io.storage.base import Fetched
from lazyckpt.io.storage.local import LocalStore
from lazyckpt.io.storage.streams import StoreFile

from .writers import Case


def calls(work: Any) -> int:
    """How many functions of Python a piece of work calls, without what the collector of garbage calls meanwhile."""
    count = 0
    gc.collect()

    def called(frame: FrameType, event: str, arg: object) -> None:
        nonlocal count
        count += event == "call"

    gc.disable()
    sys.setprofile(called)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


# -- pickles of torch.save


def pickled(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    with zipfile.ZipFile(file) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))


def state_dict(rng: random.Random, count: int) -> dict[str, Any]:
    tensors: dict[str, Any] = {}
    for n in range(count):
        shape = [rng.choice([0, 1, 3, 7]) for _ in range(rng.choice([0, 1, 2, 2, 2, 5]))]
        shape = [300 if rng.random() < 0.3 else n for n in shape[:1]] + shape[1:]
        t = torch.zeros(shape, dtype=rng.choice([torch.float32, torch.bfloat16, torch.int64, torch.complex64]))
        match rng.randrange(9):
            case 0 if t.ndim > 1:
                t = t.transpose(0, 1)
            case 1:
                t = torch.nn.Parameter(t) if t.is_floating_point() else t
            case 2 if tensors:
                t = rng.choice([v for v in tensors.values() if isinstance(v, torch.Tensor)])
            case 3:
                t = t.requires_grad_() if t.is_floating_point() else t
            case 4:
                tensors[f"step.{n}"] = n
            case 5 if t.is_complex():
                t = t.conj()
        tensors[f"layers.{n}.weight"] = t
    return tensors


def plain(value: Any) -> Any:
    if isinstance(value, StoredTensor):
        return tuple(plain(getattr(value, slot)) for slot in StoredTensor.__slots__)
    if isinstance(value, dict):
        return type(value).__name__, [(plain(k), plain(v)) for k, v in value.items()]
    return [plain(v) for v in value] if type(value) in (list, tuple) else repr(value)


def parsed(data: bytes, known: Items | None = None) -> Any:
    try:
        found = machine.Pickle(data, "x", REBUILD, persistent_storage, known=known)
    except LazyckptError as e:
        return str(e)
    return plain(found.value), found.end, found.globals


@pytest.mark.parametrize("seed", range(30))
def test_tensors_in_one_step_are_those_of_the_machine(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    value: Any = state_dict(rng, 120)
    data = bytearray(pickled({"model": value} if seed % 2 else value))
    for _ in range(seed % 3):
        data[rng.randrange(2000, len(data))] = rng.randrange(256)
    found = parsed(bytes(data))
    monkeypatch.setattr(machine, "TENSOR", object())
    assert parsed(bytes(data)) == found


def test_the_tensors_of_a_state_dict_take_one_step_each() -> None:
    data = pickled({f"layers.{n}.weight": torch.zeros(4, 4) for n in range(1000)})
    assert calls(lambda: machine.Pickle(data, "x", REBUILD, persistent_storage)) < 12_000


def test_what_ranks_share_is_learned_in_linear_time() -> None:
    few, many = (pickled({f"layers.{n}": torch.zeros(1) for n in range(count)}) for count in (2000, 8000))
    costs = [
        calls(lambda data=data: machine.Pickle(data, "x", REBUILD, persistent_storage, known=Items()))
        for data in (few, many)
    ]
    assert costs[1] < 4.2 * costs[0]


def test_learning_looks_at_few_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    learn = Items.learn

    def counted(self: Items, data: bytes, notes: Any) -> None:
        seen.append(sum(len(note.stack) for note in notes))
        learn(self, data, notes)

    monkeypatch.setattr(Items, "learn", counted)
    data = pickled({f"layers.{n}": torch.zeros(1) for n in range(5000)})
    machine.Pickle(data, "x", REBUILD, persistent_storage, known=Items())
    assert len(seen) == 5 and max(seen) < 5000, "the keys and values of a batch, not the memo"


@pytest.mark.parametrize("seed", range(8))
def test_opcodes_that_follow_each_other_mean_the_same_in_any_frames(seed: int) -> None:
    """An opcode is read together with the ones behind it; a frame may end between any two of them, and in none."""
    rng = random.Random(seed)
    parts = []
    for n in range(12):
        namespace = b"\x8c\x08argparse\x8c\x09Namespace\x93\x94)\x81\x94}\x94(\x8c\x01nK" + bytes([n]) + b"ub"
        sizes = rng.choice([b"K\x05\x85", b"K\x05K" + bytes([n]) + b"\x86", b"K\x05K\x06K\x07\x87"])
        size = b"\x8c\x05torch\x8c\x04Size\x93\x94" + sizes + b"\x94\x85\x94R\x94"
        parts.append(rng.choice([namespace, size, b"K\x01\x85\x94", b")\x94", b"K\x01K\x02K\x03\x87\x94", b"})"]))
    body = b"(" + b"".join(parts) + b"t."
    ops = [at for _, _, at in pickletools.genops(b"\x80\x04" + body)][1:] + [2 + len(body)]
    wanted = parsed(b"\x80\x04" + body)[0]
    assert wanted != parsed(b"\x80\x04N.")[0]
    whole = b"\x80\x04" + body
    for cut in ops[1:-1]:
        first, second = whole[2:cut], whole[cut:]
        framed = b"\x80\x04\x95" + struct.pack("<Q", len(first)) + first
        assert parsed(framed + second)[0] == wanted, "unframed opcodes behind a frame"
        assert parsed(framed + b"\x95" + struct.pack("<Q", len(second)) + second)[0] == wanted
    for cut in set(range(3, ops[-1])) - set(ops):
        first = b"\x80\x04\x95" + struct.pack("<Q", cut - 2)
        assert "cuts an opcode in two" in parsed(first + whole[2:])


# -- directories of zips


def directory(data: bytes, path: Path) -> Any:
    path.write_bytes(data)
    file = StoreFile(LocalStore(str(path.parent)), path.name)
    try:
        start, records, order, at = zip_columns.read_columns(file)
    except LazyckptError as e:
        return str(e)
    columns = [c.tolist() for c in records[1:]]
    return start, list(records.names), columns, order.tolist(), at.tolist()


@pytest.mark.parametrize("seed", range(60))
def test_columns_of_a_zip_are_its_entries(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    held = io.BytesIO()
    torch.save({f"layers.{n}": torch.zeros(2) for n in range(80)}, held)
    data = bytearray(held.getvalue())
    first = data.index(b"PK\x01\x02")
    for _ in range(rng.randrange(3)):
        data[rng.randrange(first, len(data))] = rng.choice([0, 1, 0x2E, 0x2F, 0x50, 0xFF, rng.randrange(256)])
    found = directory(bytes(data), tmp_path / "x.pt")
    monkeypatch.setattr(zip_columns, "_columns", lambda *_: None)
    assert directory(bytes(data), tmp_path / "x.pt") == found


def records(data: bytes, path: Path) -> Any:
    path.write_bytes(data)
    try:
        found = zip_directory.Directories().read(StoreFile(LocalStore(str(path.parent)), path.name))
    except LazyckptError as e:
        return str(e)
    return [dict(table) for table in found]


@pytest.mark.parametrize("seed", range(60))
def test_a_small_zip_is_read_like_a_large_one(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    held = io.BytesIO()
    torch.save({f"layers.{n}": torch.ones(2) for n in range(4)}, held)
    data = bytearray(held.getvalue())
    first = data.index(b"PK\x01\x02") if seed % 2 else 0
    for _ in range(rng.randrange(3)):
        data[rng.randrange(first, len(data))] = rng.choice([0, 1, 0x2E, 0x2F, 0x50, 0xFF, rng.randrange(256)])
    found = records(bytes(data), tmp_path / "x.pt")
    monkeypatch.setattr(zip_directory, "_FEW", 0)
    assert records(bytes(data), tmp_path / "x.pt") == found


def test_the_headers_of_a_small_zip_take_one_request(tmp_path: Path) -> None:
    """The pickle is in the same bytes as the first headers."""
    torch.save({f"layers.{n}": torch.ones(50_000) for n in range(6)}, tmp_path / "x.pt")
    requests: list[int] = []

    class Counted(LocalStore):
        def _fetch(self, path: str, offset: int, target: memoryview) -> Fetched:
            requests.append(offset)
            return super()._fetch(path, offset, target)

        def _fetch_pieces(self, path: str, pieces: Any) -> None:
            requests.append(len(pieces))
            super()._fetch_pieces(path, pieces)

    read_torch_file(Counted(str(tmp_path)), "x.pt")
    assert len(requests) == 3 and requests[-1] > 4  # the first bytes, the directory, the headers


# -- headers of safetensors


def header(entries: dict[str, Any], metadata: Any = None, gap: str = "") -> bytes:
    table = ({"__metadata__": metadata} if metadata is not None else {}) | entries
    return json.dumps(table, separators=(f",{gap}", f":{gap}"), ensure_ascii=False).encode()


def entry(shape: list[int], begin: int, kind: str = "F32", size: int = 4) -> dict[str, Any]:
    count = 1
    for n in shape:
        count *= n
    return {"dtype": kind, "shape": shape, "data_offsets": [begin, begin + count * size]}


ENTRIES = {"a": entry([2], 0), "layers.0.b": entry([3, 0], 8), "c ä": entry([], 8), "d},": entry([2, 2], 12, "BF16", 2)}


def read(raw: bytes, folder: Path) -> Any:
    (folder / "x.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(20))
    try:
        file = safetensors.read_safetensors(LocalStore(str(folder)), "x.safetensors")
    except LazyckptError as e:
        return str(e)
    return list(file.extents.items()), file.metadata, file.notes


@pytest.mark.parametrize("gap", ["", " "])
def test_the_usual_header_takes_the_short_way(gap: str) -> None:
    for metadata in (None, {}, {"format": "pt"}):
        found = safetensors._usual("x", header(ENTRIES, metadata, gap) + b"  ")
        assert found is not None and list(found.names) == list(ENTRIES) and found.metadata == metadata
        assert found.begins.tolist() == [0, 8, 8, 12] and found.ends.tolist() == [8, 8, 12, 20]


def test_a_usual_header_takes_few_steps_for_an_entry() -> None:
    raw = header({f"layers.{n}.weight": entry([2, 3], 24 * n) for n in range(20_000)})
    assert calls(lambda: safetensors._usual("x", raw)) < 2000
    tracemalloc.start()
    try:
        found = safetensors._usual("x", raw)
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found is not None and peak - held < 3 * len(raw), "the rest of the header is freed piece by piece"


@pytest.mark.parametrize("seed", range(300))
def test_headers_are_read_alike(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    names = list(ENTRIES)
    rng.shuffle(names)
    entries = {name: ENTRIES[name] for name in names}
    raw = bytearray(header(entries, rng.choice([None, {"format": "pt"}, {"x": 1}]), rng.choice(["", " "])))
    monkeypatch.setattr(safetensors, "_PIECE", rng.choice([1, 40, 1 << 18]))
    for _ in range(rng.randrange(3)):
        at = rng.randrange(len(raw))
        match rng.randrange(4):
            case 0:
                raw[at] = rng.choice(b'{}[]":,0123456789 \\\n')
            case 1:
                del raw[at]
            case 2:
                raw[at:at] = rng.choice(
                    [b" ", b"0", b"-", b".0", b"\\u0041", b',"a":{}', b"]", b"{", b'"', b"9" * 20, b"},", b"\t"]
                )
            case 3:
                raw = bytearray(bytes(raw).replace(b'"d},"', b'"a"'))
    found = read(bytes(raw), tmp_path)
    monkeypatch.setattr(safetensors, "_usual", lambda *_: None)
    assert read(bytes(raw), tmp_path) == found


# -- folders of Hugging Face


def folder_of_shards(root: Path, shards: int, each: int) -> Path:
    root.mkdir()
    weight_map = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        entries = {f"model.layers.{shard}.experts.{n}.weight": entry([2, 2], 16 * n) for n in range(each)}
        raw = header(entries, {"format": "pt"})
        (root / name).write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(16 * each))
        weight_map |= dict.fromkeys(entries, name)
    (root / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return root


def one_safetensors(root: Path) -> Path:
    raw = header({f"model.layers.{n}.experts.weight": entry([2, 2], 16 * n) for n in range(10_000)})
    root.with_suffix(".safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(160_000))
    return root.with_suffix(".safetensors")


def one_torch(root: Path) -> Path:
    tensors = {f"model.layers.{n}.experts.weight": torch.zeros(2, 2) for n in range(10_000)}
    torch.save(tensors, root.with_suffix(".pt"))
    return root.with_suffix(".pt")


@pytest.mark.parametrize("write", [lambda root: folder_of_shards(root, 20, 500), one_safetensors, one_torch])
def test_a_stored_tensor_takes_two_hundred_bytes(write: Callable[[Path], Path], tmp_path: Path) -> None:
    root = write(tmp_path / "x")
    lazyckpt.open(root, cache=False)  # imports
    tracemalloc.start()
    try:
        view = lazyckpt.open(root, cache=False)
        gc.collect()  # what is left of the opening
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    names = list(view._index.states["weights"])
    assert len(names) == 10_000 and held < 200 * len(names)


def test_opening_and_showing_call_few_functions_for_a_name(tmp_path: Path) -> None:
    few, many = folder_of_shards(tmp_path / "few", 10, 50), folder_of_shards(tmp_path / "many", 10, 1000)
    repr(lazyckpt.open(few, cache=False))  # imports
    views = [lazyckpt.open(root, cache=False) for root in (few, many)]
    more = calls(lambda: lazyckpt.open(many, cache=False)) - calls(lambda: lazyckpt.open(few, cache=False))
    assert more < 9500, "less than one call for each of 9,500 names"
    for show in (repr, lambda view: view.tree(2), lambda view: view.get("no.such.name")):
        assert calls(lambda s=show: s(views[1])) - calls(lambda s=show: s(views[0])) < 2 * 9500
    assert views[1].numel == 4 * 10_000 and views[1].nbytes == 16 * 10_000
    assert views[1]["model.layers.3.experts.999.weight"].shape == (2, 2)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.t(),
        lambda t: t[:, 1:],
        lambda t: torch.complex(t, t).conj(),
        lambda t: t.expand(5, *t.shape),
        lambda t: t[0],
        lambda t: t[:0],
    ],
)
def test_tensors_of_one_odd_file_are_those_of_plain_ones(change: Callable[[Any], Any], tmp_path: Path) -> None:
    """A file of plain tensors is kept as columns, one with any other tensor is not: both give what torch gives."""
    plain = {f"layers.{n}": torch.arange(12.0).reshape(3, 4) + n for n in range(5)}
    torch.save(plain, tmp_path / "plain.pt")
    torch.save(plain | {"odd": change(plain["layers.1"])}, tmp_path / "odd.pt")
    for path in (tmp_path / "plain.pt", tmp_path / "odd.pt"):
        view = lazyckpt.open(path, cache=False)
        expected = torch.load(path)
        assert list(view) == list(expected)
        for name, tensor in expected.items():
            assert torch.equal(view[name][...], tensor) and tuple(view[name].shape) == tuple(tensor.shape)


def test_a_wrong_name_is_compared_with_the_names_beside_it() -> None:
    names = Names(f"model.layers.{n // 100}.experts.{n % 100}.weight" for n in range(30_000))
    assert calls(lambda: names.near("model.layers.299.experts.wait")) < 10_000, "not one for each of 30,000"
    found = names.near("model.layers.299.expert.7.weight")
    assert found and all(name.startswith("model.layers.299.experts.") for name in found)
    assert names.near("model.layer.3.experts.7.weight"), "the others are compared if none is beside it"
    assert names.near("no." * 60_000) == []


# -- errors of the file system


class Failing(LocalStore):
    """A store that cannot read one file."""

    bad = ""

    def _fetch(self, path: str, offset: int, target: memoryview) -> Fetched:
        if self.bad in path:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return super()._fetch(path, offset, target)


def failing(case: Case, bad: str) -> Failing:
    store = Failing(str(case.path))
    store.bad = bad
    return store


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("autotp_zero1", "mp_rank_01_model_states.pt"),
        ("zero3", "zero_pp_rank_1_mp_rank_00_model_states.pt"),
        ("zero3", "zero_pp_rank_0_mp_rank_00_model_states.pt"),
        ("zero2_fp32_dp3", "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        ("megatron_3d", "mp_rank_02_model_states.pt"),
    ],
)
def test_an_io_error_of_one_rank_is_a_problem(kinds: Mapping[str, Case], name: str, bad: str) -> None:
    index = read_index(Source(failing(kinds[name], bad)))
    assert any(p.path and p.path.endswith(bad) and "Input/output error" in p for p in index.problems)
    assert any(index.states.values())


def test_tensors_of_a_file_with_an_io_error_name_it(kinds: Mapping[str, Case]) -> None:
    store = failing(kinds["autotp_zero1"], "mp_rank_01_model_states.pt")
    view = object.__new__(lazyckpt.CheckpointView)
    index = read_index(Source(store))
    view._init(store, index, "weights", (), True)
    lost = 0
    for tensor in view.values():
        try:
            tensor[...]
        except MissingFileError as e:
            assert "mp_rank_01_model_states.pt" in str(e)
            lost += 1
    assert lost > 0


def test_without_any_other_source_of_names_the_error_stays(kinds: Mapping[str, Case]) -> None:
    with pytest.raises(MissingFileError, match=r"mp_rank_00_model_states\.pt cannot be read: Input/output error"):
        read_index(Source(failing(kinds["zero2_fp32_dp3"], "model_states.pt")))


# -- ranks whose files are alike


def frozen_ranks(root: Path, world: int, count: int) -> Path:
    """ZeRO-3 with ``count`` frozen parameters and buffers, of which every rank has its own bytes."""
    tag = root / "global_step1"
    tag.mkdir(parents=True)
    shapes = {f"layers.{n}.norm": torch.Size([2 * world]) for n in range(count)}
    trained = {"head": torch.Size([world])}
    buffers = {f"layers.{n}.seen": torch.ones(3, dtype=torch.int64) for n in range(count)}
    for rank in range(world):
        model = {
            "module": {"head": torch.empty(0), **{name: torch.empty(0) for name in shapes}, **buffers},
            "buffer_names": list(buffers),
            "param_shapes": [trained],
            "frozen_param_shapes": shapes,
            "frozen_param_fragments": {n: torch.full((2,), 1.0 + rank) for n in shapes},
            "shared_params": {},
            "dp_world_size": world,
            "mp_world_size": 1,
        }
        torch.save(model, tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        state = {
            "zero_stage": 3,
            "partition_count": world,
            "optimizer_state_dict": {"state": {0: {"exp_avg": torch.zeros(1)}}, "param_groups": []},
            "fp32_flat_groups": [torch.ones(1)],
        }
        torch.save({"optimizer_state_dict": state}, tag / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    (root / "latest").write_text("global_step1")
    return root


def test_the_parameters_of_a_rank_like_another_take_no_call_each(tmp_path: Path) -> None:
    """The ranks' files differ in their bytes only: what is the same in all of them is looked at once."""
    cost = {}
    for count in (80, 240):
        for world in (4, 9):
            root = frozen_ranks(tmp_path / f"{count}-{world}", world, count)
            lazyckpt.open(root, cache=False)  # imports
            cost[count, world] = calls(lambda root=root: lazyckpt.open(root, cache=False))
    more = (cost[240, 9] - cost[240, 4]) - (cost[80, 9] - cost[80, 4])
    assert more < 5 * 160 // 2, "less than a call for two of 160 more parameters (and buffers) on 5 more ranks"
    view = lazyckpt.open(tmp_path / "80-9", cache=False)
    assert not view.problems
    assert view["layers.7.norm"].tolist() == [1.0 + n // 2 for n in range(18)]
    copy = pickle.loads(pickle.dumps(view["layers.7.norm"]))
    assert list(copy.fragments) == list(view["layers.7.norm"].fragments) and len(copy.fragments) == 9


def test_a_buffer_that_differs_on_a_rank_like_the_others_is_reported(tmp_path: Path) -> None:
    root = frozen_ranks(tmp_path / "x", 6, 40)
    path = root / "global_step1" / "zero_pp_rank_4_mp_rank_00_model_states.pt"
    model = torch.load(path)
    model["module"]["layers.3.seen"] = torch.full((3,), 7)
    torch.save(model, path)
    (problem,) = lazyckpt.open(root, cache=False).problems
    assert problem.code == "differing-replicas" and "'layers.3.seen' differs on rank 4:" in problem
