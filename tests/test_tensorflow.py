"""Checkpoints of TensorFlow: recordings of TensorFlow itself, and files made by the published format
(tests/writers/tensorflow_files.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import lazyckpt
from lazyckpt import CorruptError, FormatError, LazyckptError, MissingFileError, testing
from lazyckpt.formats.tensorflow import slice_key

from .fuzz.targets.sources import golden
from .lanes import rounds
from .writers import tensorflow_files as tf

GOLDEN = golden("tensorflow", "files")
VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"


def tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view("u2").copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def variables() -> dict[str, np.ndarray[Any, Any]]:
    values = np.random.default_rng(0).standard_normal((5, 6)) * 40
    names = [name for name in tf.KINDS if name not in ("bool", "bfloat16") and not name.startswith("float8")]
    found = {f"model/layer_{n}/{name}": values.astype(name) for n, name in enumerate(names)}
    return found | {
        "model/flag": values > 0,
        "model/half": values.astype(ml_dtypes.bfloat16),
        "model/empty": np.zeros((0, 4), "f4"),
        "save_counter": np.array(3, "i8"),
    }


@pytest.fixture(scope="module", params=["one", "sharded", "big", "old"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> testing.Case:
    folder = tmp_path_factory.mktemp("tf")
    held, old = variables(), request.param == "old"
    slots = ("Adam", "Adam_1") if old else ("m", "v")
    arrays, truth = {}, {"weights": {name.replace("/", "."): tensor(a) for name, a in held.items()}}
    for name, array in held.items():
        arrays[name + ("" if old else VALUE)] = array
        if array.dtype == np.float32 and array.size:
            for n, slot in enumerate(slots):
                key = f"{name}/{slot}" if old else f"{name}/.OPTIMIZER_SLOT/optimizer/{slot}{VALUE}"
                arrays[key] = array * (n + 2)
                truth.setdefault(slot, {})[name.replace("/", ".")] = tensor(arrays[key])
    tf.write(folder / "ckpt-1", arrays, 3 if request.param == "sharded" else 1, request.param == "big")
    path = folder if request.param == "sharded" else folder / "ckpt-1.index"
    return testing.Case(path, truth, {})


@pytest.mark.parametrize("check", testing.CHECKS, ids=lambda check: check.__name__)
def test_contract(case: testing.Case, check: testing.Check) -> None:
    check(case)


def test_a_partitioned_variable(tmp_path: Path) -> None:
    whole = np.arange(600, dtype="f4").reshape(200, 3)
    entries, data = {b"": tf.header()}, b""
    slices: list[list[tuple[int, int] | None]] = [[(0, 70), None], [(70, 130), None]]
    for (start, length), _ in slices:  # type: ignore[misc]
        part = whole[start : start + length]
        entries[slice_key(b"w/embedding", ((start, length), None))] = tf.entry(part, 0, len(data))
        data += part.tobytes()
    entries[b"w/embedding"] = tf.sliced((200, 3), 1, slices)
    (tmp_path / "m.index").write_bytes(tf.table(entries))
    (tmp_path / "m.data-00000-of-00001").write_bytes(data)
    view, counts = testing.opened(tmp_path / "m.index")
    assert set(view) == {"w.embedding"}
    assert set(view.stored) == {"w/embedding"}
    assert torch.equal(view["w.embedding"][...], torch.from_numpy(whole))
    counts.clear()
    assert torch.equal(view["w.embedding"][68:72, 1], torch.from_numpy(whole)[68:72, 1])
    assert counts.bytes <= 4 * 12


def test_keys_of_slices() -> None:
    """By tensorflow/core/lib/strings/ordered_code.cc: -1 is 7f, 63 is bf, 64 is c040; 00 and ff are escaped."""
    assert slice_key(b"a", ((0, -1),)) == b"\0a\0\1\1\1\x80\x7f"
    assert slice_key(b"a\0\xff", ((63, 64),)) == b"\0a\0\xff\xff\0\0\1\1\1\xbf\xc0\x40"


def test_text_is_told(tmp_path: Path) -> None:
    one = np.zeros(2, "f4")
    entries = {b"": tf.header(), b"a": tf.entry(one, 0, 0), b"words": tf.entry(one, 0, 0, 7)}
    entries[b"_CHECKPOINTABLE_OBJECT_GRAPH"] = tf.entry(one, 0, 0, 7)
    (tmp_path / "m.index").write_bytes(tf.table(entries))
    (tmp_path / "m.data-00000-of-00001").write_bytes(bytes(8))
    view = lazyckpt.open(tmp_path / "m.index")
    assert set(view) == {"a"}
    assert [(p.code, p.path) for p in view.problems] == [("unsupported-tensor", "words")]


def test_a_missing_and_a_truncated_data_file(tmp_path: Path) -> None:
    arrays = {name: np.full(6, n, "f4") for n, name in enumerate("abcd")}
    tf.write(tmp_path / "m", arrays, 2)
    (tmp_path / "m.data-00000-of-00002").unlink()
    data = tmp_path / "m.data-00001-of-00002"
    data.write_bytes(data.read_bytes()[:30])
    view = lazyckpt.open(tmp_path / "m.index")
    assert view["b"][...].tolist() == [1] * 6
    assert {p.code for p in view.problems} == {"missing-file", "unreadable-file"}
    for name in "acd":
        with pytest.raises(MissingFileError):
            view[name][...]


def test_a_folder_of_several(tmp_path: Path) -> None:
    for n in (1, 2):
        tf.write(tmp_path / f"ckpt-{n}", {"a": np.full(2, n, "f4")})
    with pytest.raises(FormatError):
        lazyckpt.open(tmp_path, format="tensorflow")
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "ckpt-1"\nall_model_checkpoint_paths: "ckpt-1"\n')
    assert lazyckpt.open(tmp_path)["a"][...].tolist() == [1, 1]


def hostile() -> dict[str, bytes]:
    one = np.zeros(2, "f4")
    good = {b"": tf.header(), b"a": tf.entry(one, 0, 0)}
    huge = tf.field(1, 1) + tf.field(2, tf.shape_of((1 << 61, 1 << 61))) + tf.field(5, 8)
    return {
        "nothing": b"",
        "no footer": tf.table(good)[:-1],
        "no header": tf.table({b"a": tf.entry(one, 0, 0)}),
        "another size": tf.table(good | {b"a": tf.entry(one, 0, 0).replace(tf.field(5, 8), tf.field(5, 9))}),
        "a huge shape": tf.table(good | {b"a": huge}),
        "a negative size": tf.table(good | {b"a": tf.field(1, 1) + tf.field(2, tf.shape_of(((1 << 64) - 1,)))}),
        "another shard": tf.table(good | {b"a": tf.entry(one, 5, 0)}),
        "millions of shards": tf.table(good | {b"": tf.header(1 << 40)}),
        "a slice that is not there": tf.table(good | {b"a": tf.sliced((4,), 1, [[(0, 2)]])}),
        "a slice outside": tf.table(good | {b"a": tf.sliced((4,), 1, [[(3, 2)]])}),
        "no protocol buffer": tf.table(good | {b"a": b"\xff" * 20}),
        "a block far away": tf.table(good)[:-48].ljust(100, b"\0") + tf.varint(1 << 40) * 4 + bytes(16),
    }


@pytest.mark.parametrize("name", hostile())
def test_hostile(name: str, tmp_path: Path) -> None:
    (tmp_path / "m.index").write_bytes(hostile()[name])
    (tmp_path / "m.data-00000-of-00001").write_bytes(bytes(64))
    with pytest.raises(CorruptError):
        lazyckpt.open(tmp_path / "m.index")


def test_changed_bytes(tmp_path: Path) -> None:
    """Every block that is read has a checksum: a changed byte of the index is an error, or changes nothing."""
    held = variables()
    tf.write(tmp_path / "m", held)
    data = (tmp_path / "m.index").read_bytes()
    rng = np.random.default_rng(5)
    for n in range(rounds(60)):
        changed = bytearray(data)
        changed[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
        (tmp_path / f"x{n}.index").write_bytes(changed)
        (tmp_path / f"x{n}.data-00000-of-00001").write_bytes((tmp_path / "m.data-00000-of-00001").read_bytes())
        try:
            view = lazyckpt.open(tmp_path / f"x{n}.index")
        except LazyckptError:
            continue
        assert set(view.stored) == set(held)
        assert all(testing.bit_equal(view.stored[name][...], tensor(array)) for name, array in held.items())


@pytest.mark.parametrize(("which", "file"), [("obj", "ckpt-1.index"), ("v1", "model.ckpt-2.index")])
def test_what_tensorflow_wrote(which: str, file: str) -> None:
    """tests/writers/tensorflow_golden.py"""
    view = lazyckpt.open(GOLDEN / file)
    with np.load(GOLDEN / "truth.npz") as table:
        truth = {
            name.partition("|")[2].replace("|", "/"): table[name] for name in table if name.startswith(f"{which}|")
        }
    assert set(view.stored) == set(truth)
    for name, value in truth.items():
        found = view.stored[name][...]
        wide = found.to(torch.float32) if found.dtype == torch.bfloat16 else found
        assert np.array_equal(wide.numpy(), value), name
    if which == "v1":
        assert {state: set(view.states[state]) for state in ("Adam", "Adam_1")} == {
            "Adam": {"part", "scope.kernel"},
            "Adam_1": {"part", "scope.kernel"},
        }
    else:
        assert [line.path for line in view.problems] == ["model/text/.ATTRIBUTES/VARIABLE_VALUE"]
