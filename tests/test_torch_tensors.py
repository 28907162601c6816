"""Tensors of torch.save that are more than a place in a storage: bits, devices without storages, views, subclasses."""

from __future__ import annotations

import contextlib
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import lazyckpt
from lazyckpt.errors import CorruptError, LazyckptError
from lazyckpt.io import plain_json as plainjson

from .handmade import (
    call,
    dict_of,
    legacy,
    list_of,
    named,
    number,
    program,
    storage,
    tensor,
    text,
    torch_zip,
    tuple_of,
)


def with_metadata(metadata: bytes, kind: str = "FloatStorage", numel: int = 4) -> bytes:
    return call(named("torch._utils", "_rebuild_tensor_v2"), storage(kind=kind, numel=numel), number(0),
                tuple_of(number(numel)), tuple_of(number(1)), b"\x89", call(named("collections", "OrderedDict")),
                metadata)  # fmt: skip


def written(folder: Path, root: bytes) -> Path:
    path = folder / "model.pt"
    path.write_bytes(torch_zip(program(root), {"0": bytes(range(1, 17))}))
    return path


@pytest.mark.parametrize("key", ["neg", "conj"])
@pytest.mark.parametrize("value", [b"\x88", b"\x89", b"K\x01"])
def test_bits_are_set_by_their_keys_as_torch_sets_them(key: str, value: bytes, tmp_path: Path) -> None:
    kind, numel = ("FloatStorage", 4) if key == "neg" else ("ComplexFloatStorage", 2)
    path = written(tmp_path, dict_of(text("w"), with_metadata(dict_of(text(key), value), kind, numel)))
    expected = torch.load(path)["w"]
    assert torch.equal(lazyckpt.open(path)["w"][...], expected.resolve_neg().resolve_conj())


@pytest.mark.parametrize("kind", ["BoolStorage", "Float8_e4m3fnStorage"])
def test_a_neg_bit_that_torch_cannot_resolve_is_an_error_on_reading(kind: str, tmp_path: Path) -> None:
    if kind.startswith("Float8"):
        bits = call(named("torch._utils", "_rebuild_tensor_v3"), storage(kind="UntypedStorage", numel=4), number(0),
                    tuple_of(number(4)), tuple_of(number(1)), b"\x89", call(named("collections", "OrderedDict")),
                    named("torch", "float8_e4m3fn"), dict_of(text("neg"), b"\x88"))  # fmt: skip
    else:
        bits = with_metadata(dict_of(text("neg"), b"\x88"), kind)
    path = written(tmp_path, dict_of(text("w"), bits, text("v"), tensor()))
    with pytest.raises((NotImplementedError, RuntimeError)):
        torch.load(path, weights_only=False)["w"].clone()
    view = lazyckpt.open(path)
    assert any("'w'" in str(line) for line in view.problems)
    with pytest.raises(LazyckptError, match="w"):
        view["w"][...]
    assert view["v"][...].shape == (4,)


@pytest.mark.parametrize("metadata", [dict_of(text("conj"), b"\x88"), dict_of(number(1), b"\x88"), text("neg")])
def test_metadata_that_torch_refuses_are_refused(metadata: bytes, tmp_path: Path) -> None:
    path = written(tmp_path, dict_of(text("w"), with_metadata(metadata)))
    with pytest.raises(Exception):  # noqa: B017 - assertions and RuntimeErrors, as torch has them
        torch.load(path, weights_only=False)
    with pytest.raises(CorruptError, match=r"model\.pt"):
        lazyckpt.open(path)


def test_a_tensor_that_is_moved_by_a_state_is_refused(tmp_path: Path) -> None:
    """torch.Tensor.__setstate__ takes (storage, offset, sizes, strides)."""
    state = tuple_of(storage(), number(2), tuple_of(number(2)), tuple_of(number(1)))
    path = written(tmp_path, dict_of(text("w"), tensor() + state + b"b"))
    assert torch.load(path, weights_only=False)["w"].shape == (2,)
    with pytest.raises(CorruptError, match=r"model\.pt"):
        lazyckpt.open(path)


def test_one_storage_of_two_dtypes_is_refused(tmp_path: Path) -> None:
    """torch.load takes the first for both."""
    other = tensor(storage(kind="IntStorage"))
    path = written(tmp_path, dict_of(text("a"), tensor(), text("b"), other))
    assert torch.load(path)["b"].dtype == torch.float32
    with pytest.raises(CorruptError, match=r"model\.pt"):
        lazyckpt.open(path)


class OnDevice:
    """Pickled as torch pickles a tensor of a device without storages."""

    def __init__(self, function: Any, data: Any, dtype: torch.dtype) -> None:
        self.made = function, (data, dtype, "xla:0", False)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.made


UTILS = torch._utils
FROM_NUMPY = UTILS._rebuild_device_tensor_from_numpy  # type: ignore[attr-defined]
FROM_CPU = UTILS._rebuild_device_tensor_from_cpu_tensor  # type: ignore[attr-defined]


def on_devices() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    base = np.arange(6, dtype=np.float32).reshape(2, 3)
    ones = torch.full((4,), 1.5)
    saved = {
        "w": OnDevice(FROM_NUMPY, base, torch.float32),
        "transposed": OnDevice(FROM_NUMPY, base.T, torch.float32),
        "bf16": OnDevice(FROM_NUMPY, base + 0.25, torch.bfloat16),
        "ids": OnDevice(UTILS._rebuild_xla_tensor, np.arange(300), torch.int64),  # type: ignore[attr-defined]
        "scalar": OnDevice(FROM_NUMPY, np.array(2.5), torch.float64),
        "empty": OnDevice(FROM_NUMPY, np.zeros((0, 3)), torch.float64),
        "cpu": OnDevice(FROM_CPU, ones, torch.float32),
    }
    truth = {
        "w": torch.from_numpy(base),
        "transposed": torch.from_numpy(base).T.contiguous(),
        "bf16": torch.from_numpy(base + 0.25).bfloat16(),
        "ids": torch.arange(300),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.zeros(0, 3, dtype=torch.float64),
        "cpu": ones,
    }
    return saved, truth


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("zipped", [True, False])
def test_tensors_of_devices_without_storages_are_tensors(protocol: int, zipped: bool, tmp_path: Path) -> None:
    saved, truth = on_devices()
    path = tmp_path / "model.pt"
    torch.save(saved | {"step": 3}, path, pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
    view = lazyckpt.open(path)
    assert (dict(view.meta), view.problems) == ({"step": 3}, ())
    assert {n: t[...].dtype for n, t in view.items()} == {n: t.dtype for n, t in truth.items()}
    assert all(torch.equal(view[n][...], t) for n, t in truth.items())
    assert torch.equal(view["ids"][10:290:7], truth["ids"][10:290:7])
    assert torch.equal(view["transposed"][1:, 1], truth["transposed"][1:, 1])
    again = pickle.loads(pickle.dumps(view))
    assert torch.equal(again["w"][...], truth["w"])


def test_tensors_of_devices_without_storages_are_exported(tmp_path: Path) -> None:
    saved, truth = on_devices()
    del saved["empty"], truth["empty"]
    torch.save(saved, tmp_path / "model.pt")
    view = lazyckpt.open(tmp_path / "model.pt")
    view.to_safetensors(tmp_path / "out.safetensors")
    view.to_torch(tmp_path / "out.pt")
    view.to_dcp(tmp_path / "dcp")
    view.to_zarr(tmp_path / "out.zarr")
    found = [load_file(tmp_path / "out.safetensors"), torch.load(tmp_path / "out.pt"),
             lazyckpt.open(tmp_path / "dcp").to(), lazyckpt.open(tmp_path / "out.zarr").to()]  # fmt: skip
    for tensors in found:
        assert {n: tensors[n] is not None and torch.equal(tensors[n], t) for n, t in truth.items()} == dict.fromkeys(
            truth, True
        )


def test_a_jagged_tensor_is_no_danger(tmp_path: Path) -> None:
    pieces = [torch.ones(2, 3), torch.zeros(4, 3)]
    torch.save({"n": torch.nested.nested_tensor(pieces, layout=torch.jagged)}, tmp_path / "model.pt")
    view = lazyckpt.open(tmp_path / "model.pt")
    assert torch.equal(view.stored["n.values"][...], torch.cat(pieces))
    assert view.stored["n.offsets"][...].tolist() == [0, 2, 6]
    assert not any(line.code == "unsafe-pickle" for line in view.problems)


class Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls, inner: torch.Tensor, device: str) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=device)  # type: ignore[attr-defined]
        return made

    def __init__(self, inner: torch.Tensor, device: str) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_tensors_inside_a_wrapper_are_read_and_said_to_be_inside(device: str, tmp_path: Path) -> None:
    torch.save({"w": Wrapper(torch.arange(4.0), device)}, tmp_path / "model.pt")
    view = lazyckpt.open(tmp_path / "model.pt")
    assert list(view) == ["w.inner"]
    assert torch.equal(view["w.inner"][...], torch.arange(4.0))
    (line,) = map(str, view.problems)
    assert "Wrapper" in line
    assert "plain tensor" not in line


# -- legacy files whose storages view others


def viewing(key: str, view: str, start: int, numel: int, whole: int = 6, kind: str = "FloatStorage") -> bytes:
    about = tuple_of(text(view), number(start), number(numel))
    return tuple_of(text("storage"), named("torch", kind), text(key), text("cpu"), number(whole), about) + b"Q"


def old(function: bytes, *args: bytes) -> bytes:
    return call(named("torch._utils", "_rebuild_tensor"), function, *args)


SIX = struct.pack("<q6f", 6, *range(6))


def test_legacy_storages_that_view_others_are_read_as_torch_reads_them(tmp_path: Path) -> None:
    root = dict_of(
        text("a"), old(viewing("0", "v0", 0, 2), number(0), tuple_of(number(2)), tuple_of(number(1))),
        text("b"), old(viewing("0", "v1", 2, 4), number(1), tuple_of(number(3)), tuple_of(number(1))),
        text("c"), old(viewing("0", "v1", 2, 4), number(0), tuple_of(number(2), number(2)),
                       tuple_of(number(1), number(2))),
    )  # fmt: skip
    path = tmp_path / "model.pt"
    path.write_bytes(legacy(program(root), program(list_of(text("0"))), SIX))
    expected = torch.load(path, weights_only=False)
    view = lazyckpt.open(path)
    assert expected["b"].tolist() == [3, 4, 5]
    assert all(torch.equal(view[name][...], t) for name, t in expected.items())


@pytest.mark.parametrize(
    "root",
    [
        old(viewing("0", "v", 4, 4), number(0), tuple_of(number(2)), tuple_of(number(1))),
        old(viewing("0", "v", 0, 2), number(0), tuple_of(number(4)), tuple_of(number(1))),
        old(viewing("0", "v", -1, 2), number(0), tuple_of(number(2)), tuple_of(number(1))),
        list_of(old(viewing("0", "v", 0, 2), number(0), tuple_of(number(2)), tuple_of(number(1))),
                old(viewing("0", "v", 2, 2), number(0), tuple_of(number(2)), tuple_of(number(1)))),
    ],
    ids=["past the storage", "past the view", "before it", "one view in two places"],
)  # fmt: skip
def test_views_that_cannot_be_are_refused(root: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(legacy(program(dict_of(text("w"), root)), program(list_of(text("0"))), SIX))
    with pytest.raises(CorruptError, match=r"model\.pt"):
        lazyckpt.open(path)


# -- names that lie, and what is shown


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "model.pt", "model"])
def test_files_are_opened_by_their_first_bytes(name: str, tmp_path: Path) -> None:
    for kind in ("torch", "legacy", "safetensors"):
        path = tmp_path / kind / name
        path.parent.mkdir()
        tensors = {"w": torch.arange(3.0)}
        if kind == "safetensors":
            save_file(tensors, path)
        else:
            torch.save(tensors, path, _use_new_zipfile_serialization=kind == "torch")
        assert torch.equal(lazyckpt.open(path)["w"][...], tensors["w"])


def test_what_is_printed_of_a_record_has_no_control_characters(tmp_path: Path) -> None:
    record = call(named("evil\x1b[31m", "Red\x07"), text("\x1b[2J\n")) + dict_of(text("a\x1b[0m"), text("\r")) + b"b"
    view = lazyckpt.open(written(tmp_path, dict_of(text("r\x1b"), record)))
    shown = repr(dict(view.meta))
    assert shown.isprintable(), shown


@pytest.mark.parametrize(
    "value",
    [
        {"$opaque": {"module": 1, "name": "a"}},
        {"$opaque": {"module": "a", "name": {"$tuple": []}}},
        {"$opaque": {"module": "a", "name": "b", "args": 3}},
        {"$opaque": {"module": "a", "name": "b", "items": 3, "entries": []}},
        {"$opaque": []},
        {"$numpy.dtype": "no dtype"},
        {"$numpy.dtype": "f4," * 1000},
        {"$numpy.dtype": "(1000000000,)f8"},
        {"$numpy.dtype": {}},
        {"$numpy.dtype": [["a"]]},
        {"$numpy.dtype": ",,,"},
        {"$numpy.array": {"dtype": "i4, (2,3)f8, ((", "shape": [1], "data": ""}},
        {"$tensor": 5},
        {"$dict": [[{"$tuple": [[]]}, 1]]},
        {"$set": [[1]]},
        {"$range": [1, 2, 0]},
        {"$int": "9" * 10},
        {"$torch.dtype": "torch.nn"},
        {"$torch.device": "\0"},
        {"$decimal": "x"},
        {"$datetime": "x" * 1000},
        {"$timedelta": [10**20, 0, 0]},
        {"$slice": [1]},
        {"$numpy.objects": [[1 << 40, 0], []]},
        {"$numpy.objects": 5},
    ],
    ids=str,
)
def test_attributes_that_nobody_wrote_are_corrupt_or_plain(value: Any) -> None:
    with contextlib.suppress(CorruptError):
        repr(plainjson.decode(value))


def test_a_dtype_is_decoded_as_a_dtype() -> None:
    for dtype in ("<f4", [["a", "<i4"], ["b", "<f8", [2, 3]]], "bfloat16"):
        decoded = plainjson.decode({"$numpy.dtype": dtype})
        assert isinstance(decoded, np.dtype)
        assert plainjson.decode(plainjson.encode(decoded)) == decoded
