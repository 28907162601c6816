"""Checkpoints of Orbax: the contract on what the real writer wrote, requests, runs, unfinished saves, damage."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import google_crc32c
import pytest
import torch
from safetensors.torch import load_file

import lazyckpt
from lazyckpt import ChangedFileError, CorruptError, LazyckptError
from lazyckpt.core.extents import Chunk
from lazyckpt.core.placement import Mesh
from lazyckpt.core.specs import Fragment
from lazyckpt.formats.orbax.nodes import MANIFEST, manifest
from lazyckpt.formats.orbax.ocdbt import read_database
from lazyckpt.formats.orbax.trees import named
from lazyckpt.io.storage.local import LocalStore
from lazyckpt.testing import contract
from lazyckpt.testing.contract import Check
from lazyckpt.testing.counting import opened
from lazyckpt.testing.oracle import same

from .writers import Case

Cases = Mapping[str, Case]


@pytest.mark.product
@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
def test_contract(orbax_case: Case, check: Check) -> None:
    check(orbax_case)


def test_format_mesh_meta_and_problems(orbax_case: Case) -> None:
    view = contract.open_case(orbax_case)
    assert view.format == orbax_case.info["format"]
    assert view.mesh == Mesh(*orbax_case.info["mesh"])
    assert [problem.code for problem in view.problems] == orbax_case.info.get("problems", [])
    assert list(view.states) == list(orbax_case.truth)
    for key in ("strings", "config"):
        assert view.meta.get(key) == orbax_case.info.get(key)


def test_what_is_no_tensor_is_in_meta(orbax_cases: Cases) -> None:
    view = contract.open_case(orbax_cases["ocdbt"])
    assert view.meta["step"] == 2 and view.meta["axes"] == {"fsdp": 4, "tensor": 2}
    assert view.meta["random_keys"] == {"key": "threefry2x32"}
    assert view.meta["empty"]["nothing"] == "None" and view.meta["empty"]["empty"] == "Dict"
    assert contract.open_case(orbax_cases["manager"]).meta["metrics"] == {"loss": 0.25}
    view = contract.open_case(orbax_cases["handlers"])
    assert "number_value: 2.0" in view.meta["model"] and "rng" in view.problems[0]


@pytest.mark.parametrize("to", ["safetensors", "dcp", "zarr"])
@pytest.mark.parametrize("name", ["ocdbt", "plain_zarr3", "dtypes"])
def test_round_trip(orbax_cases: Cases, tmp_path: Path, name: str, to: str) -> None:
    case = orbax_cases[name]
    with contract.open_case(case) as view:
        getattr(view, f"to_{to}")(tmp_path / "out")
        found = lazyckpt.open(tmp_path / "out")
        assert set(found) == set(case.truth["weights"])
        for key, tensor in case.truth["weights"].items():
            same(found[key][...], tensor, (name, to, key))


# -- requests


def _window(fragment: Fragment) -> tuple[int, int]:
    assert isinstance(fragment.extent, Chunk) and fragment.extent.window is not None
    return fragment.extent.window


def test_a_slice_reads_only_its_chunks(orbax_cases: Cases) -> None:
    """The kernel of 64x48 is in chunks of 16x24; a chunk is part of a data file of OCDBT."""
    view, counts = opened(orbax_cases["ocdbt"].path)
    kernel = view["layers.0.kernel"]
    windows = [_window(fragment) for fragment in kernel.fragments]
    assert len(set(windows)) == 8
    counts.clear()
    kernel[3:5, 30:40]
    assert [(request.offset, request.length) for request in counts.log] == [windows[1]]
    counts.clear()
    kernel[15:17, 0]
    assert counts.bytes == windows[0][1] + windows[2][1]


def test_opening_reads_no_data(orbax_cases: Cases) -> None:
    view, counts = opened(orbax_cases["ocdbt"].path)
    chunks = {
        (f.extent.path, f.extent.window)
        for state in view.states.values()
        for t in state.values()
        for f in t.fragments
        if getattr(f.extent, "window", None)
    }
    assert chunks
    for request in counts.log:
        for path, (offset, length) in chunks:
            apart = request.offset + request.length <= offset or offset + length <= request.offset
            assert request.path != path or apart, request


# -- runs


@pytest.mark.parametrize(
    ("name", "newest", "older"), [("manager", "1000", "500"), ("manager_zarr3", "run_1000", "run_500")]
)
def test_a_run_opens_its_newest_step(orbax_cases: Cases, name: str, newest: str, older: str) -> None:
    case = orbax_cases[name]
    view = lazyckpt.open(case.path)
    assert Path(view.root).name == newest and view.meta["step"] == 1000
    truth = load_file(case.path.parent / "older.safetensors")
    with lazyckpt.open(case.path, tag=older) as before:
        for key, tensor in truth.items():
            state, _, inner = key.partition("|")
            same(before.states[state][inner][...], tensor, key)
    run = lazyckpt.open_run(case.path)
    assert run.steps == (0, 500, 1000) and run.problems == ()
    same(run["scale"][1], truth["weights|scale"], "scale")


def _copied(case: Case, to: Path) -> Path:
    return Path(shutil.copytree(case.path, to / "copy"))


def _codes(view: Any) -> list[str]:
    return [problem.code for problem in view.problems]


def test_steps_as_flax_names_them(orbax_cases: Cases, tmp_path: Path) -> None:
    folder = _copied(orbax_cases["manager"], tmp_path)
    for step in ("0", "500", "1000"):
        (folder / step).rename(folder / f"checkpoint_{step}")
    assert Path(lazyckpt.open(folder).root).name == "checkpoint_1000"
    assert lazyckpt.open_run(folder).steps == (0, 500, 1000)


def test_a_step_that_is_being_written_is_told(orbax_cases: Cases, tmp_path: Path) -> None:
    folder = _copied(orbax_cases["manager"], tmp_path)
    (folder / "1000").rename(folder / "1000.orbax-checkpoint-tmp-17")
    view = lazyckpt.open(folder)
    assert Path(view.root).name == "500" and _codes(view) == ["unfinished-save"]
    run = lazyckpt.open_run(folder)
    assert run.steps == (0, 500) and "unfinished-save" in _codes(run)
    assert "unfinished-save" in _codes(lazyckpt.open(folder / "1000.orbax-checkpoint-tmp-17"))


def test_a_step_without_its_commit_is_told(orbax_cases: Cases, tmp_path: Path) -> None:
    folder = _copied(orbax_cases["manager"], tmp_path)
    (folder / "1000" / "commit_success.txt").unlink()
    view = lazyckpt.open(folder)
    assert Path(view.root).name == "500" and _codes(view) == ["unfinished-save"]
    about = json.loads((folder / "1000" / "_CHECKPOINT_METADATA").read_text())
    (folder / "1000" / "_CHECKPOINT_METADATA").write_text(json.dumps(about | {"commit_timestamp_nsecs": None}))
    assert _codes(lazyckpt.open(folder / "1000")) == ["unfinished-save"]


def test_what_processes_wrote_is_read_if_nobody_joined_it(orbax_cases: Cases, tmp_path: Path) -> None:
    case = orbax_cases["ocdbt"]
    folder = _copied(case, tmp_path)
    (folder / "manifest.ocdbt").unlink()
    view = lazyckpt.open(folder)
    assert _codes(view) == ["unfinished-save"]
    for name, tensor in case.truth["weights"].items():
        same(view[name][...], tensor, name)


# -- damage


def _data(folder: Path) -> list[Path]:
    """The data files of the processes, the largest first."""
    return sorted(folder.glob("ocdbt.process_*/d/*"), key=lambda path: -path.stat().st_size)


def test_lost_and_truncated_data_files_are_told(orbax_cases: Cases, tmp_path: Path) -> None:
    case = orbax_cases["ocdbt"]
    folder = _copied(case, tmp_path)
    view = lazyckpt.open(folder, cache=False)
    used = {f.extent.path for t in view.values() for f in t.fragments}
    lost = next(path for path in _data(folder) if path.relative_to(folder).as_posix() in used)
    data = lost.read_bytes()
    for change in (lost.unlink, lambda: lost.write_bytes(data[: len(data) // 2])):
        change()
        view = lazyckpt.open(folder, cache=False)
        wrong = 0
        for name, tensor in case.truth["weights"].items():
            try:
                same(view[name][...], tensor, name)
            except LazyckptError:
                wrong += 1
        assert wrong
        assert not lost.exists() or view.problems or wrong
        if not lost.exists():
            assert "missing-file" in _codes(view)


def test_a_replaced_data_file_is_not_read(orbax_cases: Cases, tmp_path: Path) -> None:
    folder = _copied(orbax_cases["ocdbt"], tmp_path)
    view = lazyckpt.open(folder, cache=False)
    kernel = view["layers.0.kernel"]
    path = folder / kernel.fragments[0].extent.path
    path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(ChangedFileError):
        kernel[...]


def test_no_changed_byte_of_metadata_is_believed(orbax_cases: Cases, tmp_path: Path) -> None:
    """The checksums of the manifest and of the nodes cover every byte."""
    folder = _copied(orbax_cases["ocdbt"], tmp_path)
    files = [folder / "manifest.ocdbt", *(folder / "d").iterdir()]
    pick = random.Random(0)
    for path in files:
        data = path.read_bytes()
        for _ in range(40):
            at = pick.randrange(len(data))
            path.write_bytes(data[:at] + bytes([data[at] ^ (1 << pick.randrange(8))]) + data[at + 1 :])
            with pytest.raises(LazyckptError):
                lazyckpt.open(folder, cache=False)
        for length in (0, 3, 15, len(data) // 2, len(data) - 1):
            path.write_bytes(data[:length])
            with pytest.raises(LazyckptError):
                lazyckpt.open(folder, cache=False)
        path.write_bytes(data)
    assert lazyckpt.open(folder, cache=False).problems == ()


def test_an_array_that_is_not_there_is_told(orbax_cases: Cases, tmp_path: Path) -> None:
    folder = _copied(orbax_cases["plain"], tmp_path)
    shutil.rmtree(folder / "params.scale")
    view = lazyckpt.open(folder, cache=False)
    assert _codes(view) == ["missing-tensor"] and "scale" not in view
    assert "scale" in view.states["mu"] and "others" in view.states
    (folder / "params.layers.0.kernel" / "1.1").unlink()
    view = lazyckpt.open(folder, cache=False)
    same(view["layers.0.kernel"][:16], orbax_cases["plain"].truth["weights"]["layers.0.kernel"][:16], "the others")
    with pytest.raises(LazyckptError):  # all chunks are stored, so one that is not there is lost, not zero
        view["layers.0.kernel"][16:32]


def test_texts_whose_names_have_slashes(orbax_cases: Cases, tmp_path: Path) -> None:
    """The writer takes the name of a leaf for a path in the document."""
    folder = _copied(orbax_cases["plain"], tmp_path)
    (folder / "_strings.json").write_text('{"a": {"b.0": "c", "d": {"e": "f"}}, "g": "h"}')
    assert lazyckpt.open(folder, cache=False).meta["strings"] == {"a/b.0": "c", "a/d/e": "f", "g": "h"}


def test_documents_that_are_damaged_are_told(orbax_cases: Cases, tmp_path: Path) -> None:
    folder = _copied(orbax_cases["ocdbt"], tmp_path)
    for name in ("_sharding", "_strings.json"):
        (folder / name).write_text("{")
    assert _codes(lazyckpt.open(folder, cache=False)) == ["unreadable-file", "unreadable-file"]
    (folder / "_METADATA").write_text('{"tree_metadata": {"a": {}}}')
    with pytest.raises(CorruptError):
        lazyckpt.open(folder, cache=False)
    (folder / "_METADATA").unlink()
    view = lazyckpt.open(folder, cache=False)
    assert "missing-metadata" in _codes(view)
    assert set(view) == set(orbax_cases["ocdbt"].truth["weights"])


# -- OCDBT


def _databases() -> list[Any]:
    compressions: list[Any] = [{"id": "zstd", "level": 3}, None]
    return [
        (packing, inline, node, versions)
        for packing in compressions
        for inline, node, versions in ((0, 120, 1), (20, 300, 3), (100, 1 << 20, 40))
    ]


@pytest.mark.parametrize(("packing", "inline", "node", "versions"), _databases())
def test_ocdbt_is_what_tensorstore_reads(tmp_path: Path, packing: Any, inline: int, node: int, versions: int) -> None:
    """Trees of several levels, values in nodes and files, several versions with keys that are removed again."""
    tensorstore = pytest.importorskip("tensorstore")
    config = {"max_inline_value_bytes": inline, "max_decoded_node_bytes": node, "compression": packing}
    spec = {"driver": "ocdbt", "base": f"file://{tmp_path}/db/", "config": config | {"version_tree_arity_log2": 2}}
    store = tensorstore.KvStore.open(spec).result()
    pick = random.Random(f"{inline}{node}")
    held: dict[str, bytes] = {}
    for _ in range(versions):
        with tensorstore.Transaction() as transaction:
            for _ in range(120 if versions < 9 else 6):
                key = f"layer.{pick.randrange(40)}/{'c/' * pick.randrange(2)}{pick.randrange(300)}é"
                held[key] = pick.randbytes(pick.choice((0, 5, 19, 60, 400)))
                store.with_transaction(transaction)[key] = held[key]
            for key in pick.sample(sorted(held), len(held) // 9):
                del store.with_transaction(transaction)[key]
                del held[key]
    local = LocalStore(str(tmp_path / "db"))
    found = read_database(local, "")
    assert found.keys == sorted(held)
    for n, key in enumerate(found.keys):
        value = found.value(n)
        assert held[key] == (value if isinstance(value, bytes) else bytes(local.read(*value)))


def _framed(magic: int, body: bytes) -> bytes:
    data = magic.to_bytes(4, "big") + (len(body) + 18).to_bytes(8, "little") + b"\0\0" + body
    checksum: int = google_crc32c.value(data)
    return data + checksum.to_bytes(4, "little")


def _manifest(path: bytes, count: int = 1) -> bytes:
    """A manifest of one version whose root is in a file with this path."""
    table = bytes([1, len(path), 0]) + path
    root = bytes([count, 1, 0, 0, 0, 9, 0, 0, 0]) + bytes(8)
    return _framed(MANIFEST, bytes(16) + b"\0\x64\x64\x04\0" + table + root + b"\0")


def test_hostile_manifests_are_refused() -> None:
    assert manifest(_manifest(b"d/a"), "m").versions[0].node is not None
    for path in (b"../a", b"/etc/passwd", b"d/../../a", b"\xff", b"d\\a"):
        with pytest.raises(CorruptError):
            manifest(_manifest(path), "m")
    with pytest.raises(CorruptError):
        manifest(_manifest(b"d/a", count=99), "m")
    with pytest.raises(LazyckptError):
        manifest(_framed(MANIFEST, bytes(16) + b"\x07" + bytes(40)), "m")


# -- trees

Keys = list[tuple[str, ...]]


@pytest.mark.parametrize(
    ("keys", "states"),
    [
        pytest.param([("a", "w"), ("b",)], {"weights": ["a.w", "b"]}, id="weights only"),
        pytest.param([("params", "a"), ("step",)], {"weights": ["a"], "others": ["step"]}, id="params"),
        pytest.param(
            [("target", "a", "w"), ("state", "param_states", "a", "w", "v_row"), ("state", "step")],
            {"weights": ["a.w"], "v_row": ["a.w"], "others": ["state.step"]},
            id="T5X",
        ),
        pytest.param(
            [("net", "w"), ("opt", "0", "mu", "w"), ("opt", "1", "mu", "w")],
            {"weights": ["w"], "opt.0.mu": ["w"], "opt.1.mu": ["w"]},
            id="two moments of one name",
        ),
        pytest.param(
            [("params", "params", "w"), ("opt_state", "mu", "params", "w"), ("opt_state", "count")],
            {"weights": ["params.w"], "mu": ["params.w"], "count": ["params.w"]},
            id="MaxText",
        ),
        pytest.param(
            [("params", "w"), ("opt_state", "params", "w"), ("opt_state", "memory", "w")],
            {"weights": ["w"], "opt_state.params": ["w"], "memory": ["w"]},
            id="L-BFGS",
        ),
    ],
)
def test_leaves_have_their_states(keys: Keys, states: dict[str, list[str]]) -> None:
    found = named(keys)
    assert {state: list(table) for state, table in found.states.items()} == states and not found.problems


def test_an_optimizer_of_one_of_two_models_is_not_guessed() -> None:
    found = named([("gen", "w"), ("disc", "w"), ("opt", "0", "mu", "w")])
    assert list(found.states) == ["weights"] and [p.code for p in found.problems] == ["undecided-name"]
    assert list(found.states["weights"]) == ["gen.w", "disc.w", "opt.0.mu.w"]


def test_pickled_views_read_the_same(orbax_cases: Cases, tmp_path: Path) -> None:
    import pickle

    view = contract.open_case(orbax_cases["ocdbt_zarr3"])
    again = pickle.loads(pickle.dumps(view))
    for name, tensor in view.items():
        assert torch.equal(again[name][...].view(torch.uint8), tensor[...].view(torch.uint8))
