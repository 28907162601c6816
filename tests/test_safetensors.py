"""Single safetensors files: the official writer's, and lawful ones that it would not write."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import lazyckpt
from lazyckpt.testing import contract
from lazyckpt.testing.contract import Check
from lazyckpt.testing.counting import opened
from lazyckpt.testing.oracle import indexed, keys, same

from .writers import Case, torch_contents

_METADATA = {"format": "pt", "author": "nobody", "größe": "klein"}


def _every_dtype() -> dict[str, torch.Tensor]:
    tensors = torch_contents.classic_dtypes() | torch_contents.modern_dtypes()
    for name in ("complex128", "complex32"):  # safetensors has no such dtypes
        del tensors[name]
    tensors["float4_e2m1fn_x2"] = tensors["float4_e2m1fn_x2"].view(torch.uint8).clone().view(torch.float4_e2m1fn_x2)
    return tensors


def _official(folder: Path) -> Case:
    g = torch.Generator().manual_seed(0)
    tensors = _every_dtype() | {
        "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
        "empty": torch.empty(0),
        "empty.2d": torch.empty(3, 0, dtype=torch.int16),
        "layers.0.w": torch.randn(33, 65, generator=g),
        "layers.10.w": torch.randn(4, 3, 2, 5, generator=g).half(),
        "layers.2.w": torch.randn(1, 7, 1, generator=g),
        'odd name / with \N{SNOWMAN} and "quotes"': torch.arange(5),
        "..": torch.arange(3),
        "": torch.arange(4),
    }
    save_file(tensors, folder / "model.safetensors", metadata=_METADATA)
    return Case(folder / "model.safetensors", {"weights": tensors}, {"metadata": _METADATA})


def write_by_hand(path: Path, tensors: dict[str, torch.Tensor], *, pad: str = "", extra: Any = None) -> None:
    """A header as the format allows it: any key order, any length, spaces behind it."""
    names = {t: n for n, t in lazyckpt_names().items()}
    header: dict[str, Any] = {"__metadata__": extra} if extra is not None else {}
    data = b""
    for name, t in tensors.items():
        raw = t.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        header[name] = {
            "data_offsets": [len(data), len(data) + len(raw)],
            "shape": list(t.shape),
            "dtype": names[t.dtype],
        }
        data += raw
    text = (json.dumps(dict(reversed(header.items()))) + pad).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def lazyckpt_names() -> dict[str, torch.dtype]:
    from safetensors.torch import _TYPES

    return {name: dtype for name, dtype in _TYPES.items() if isinstance(dtype, torch.dtype)}


def _unaligned(pad: str) -> Callable[[Path], Case]:
    """The data begins at an odd byte, and small tensors before large ones keep it so."""

    def write(folder: Path) -> Case:
        g = torch.Generator().manual_seed(1)
        tensors = {
            "bytes": torch.arange(7, dtype=torch.uint8),
            "doubles": torch.randn(9, 11, dtype=torch.float64, generator=g),
            "bool": torch.rand(5, generator=g) > 0.5,
            "complex": torch.randn(6, 5, dtype=torch.complex64, generator=g),
            "half": torch.randn(3, 3, generator=g).half(),
            "long": torch.arange(40).view(4, 10),
        }
        write_by_hand(folder / "x.safetensors", tensors, pad=pad)
        return Case(folder / "x.safetensors", {"weights": tensors}, {"metadata": {}})

    return write


_WRITERS = {
    "official": _official,
    "unaligned": _unaligned(""),
    "unaligned_padded": _unaligned("   "),
    "shifted": _unaligned(" "),
}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    return {name: write(tmp_path_factory.mktemp(name)) for name, write in _WRITERS.items()}


@pytest.fixture(params=_WRITERS)
def case(request: pytest.FixtureRequest, cases: dict[str, Case]) -> Case:
    return cases[request.param]


@pytest.mark.product
@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
def test_contract(case: Case, check: Check) -> None:
    check(case)


def test_format_metadata_and_stored(case: Case) -> None:
    view = lazyckpt.open(case.path)
    assert view.format == "safetensors"
    assert dict(view.meta) == case.info["metadata"]
    assert view.problems == () and dict(view.aliases) == {}
    assert set(view.stored) == set(case.truth["weights"])
    assert list(view.files) == [case.path.name]


def test_agrees_with_the_official_reader(cases: dict[str, Case]) -> None:
    for name in ("unaligned", "official"):
        path = cases[name].path
        if name == "official":  # its own torch loader knows fewer dtypes than it writes
            with safe_open(path, "pt") as file:
                oracle = {
                    key: file.get_tensor(key) for key in ("layers.0.w", "float8_e4m3fn", "bfloat16", "scalar", "bool")
                }
        else:
            oracle = load_file(path)
        view = lazyckpt.open(path)
        for key, tensor in oracle.items():
            same(view[key][...], tensor, key)


@pytest.mark.parametrize("name", ["renamed", "model.pt", "model.bin"])
def test_the_content_counts_not_the_name(cases: dict[str, Case], tmp_path: Path, name: str) -> None:
    case = cases["unaligned"]
    (tmp_path / name).write_bytes(case.path.read_bytes())
    view = lazyckpt.open(tmp_path / name)
    assert view.format == "safetensors"
    for key, whole in case.truth["weights"].items():
        same(view[key][...], whole, key)


def test_opening_reads_the_header_alone(tmp_path: Path) -> None:
    tensors = {f"t{n}": torch.zeros(1 << 18) for n in range(8)}
    save_file(tensors, tmp_path / "x.safetensors")
    view, counts = opened(tmp_path / "x.safetensors")
    assert len(view) == 8
    header = 8 + int.from_bytes((tmp_path / "x.safetensors").read_bytes()[:8], "little")
    assert counts.bytes <= header + 16384, counts  # a file's head and tail are sniffed at once
    counts.clear()
    same(view["t5"][100:200], torch.zeros(100), "t5")
    assert (counts.bytes, counts.requests) == (400, 1)


def test_a_gap_that_the_store_states_saves_requests(tmp_path: Path) -> None:
    whole = torch.arange(60 * 100).view(60, 100)
    save_file({"m": whole}, tmp_path / "x.safetensors")
    for key, runs, wanted, hull in (
        ((slice(None), 3), 60, 60, 59 * 100 + 1),
        ((slice(None), slice(10, 14)), 60, 240, 59 * 100 + 4),
        (slice(None, None, 20), 3, 300, 4100),
        ([7, 9, 50], 3, 300, None),
        (slice(3, 9), 1, 600, 600),
    ):
        view, counts = opened(tmp_path / "x.safetensors", gap=0)
        counts.clear()
        same(view["m"][key], whole[key], key)
        assert (counts.bytes, counts.requests) == (8 * wanted, runs), f"nothing but the elements: {key} {counts}"
        if hull is None:
            continue
        view, counts = opened(tmp_path / "x.safetensors", gap=20_000)
        counts.clear()
        same(view["m"][key], whole[key], key)
        assert (counts.bytes, counts.requests) == (8 * hull, 1), f"one request is cheaper: {key} {counts}"


def test_a_file_without_tensors(tmp_path: Path) -> None:
    save_file({}, tmp_path / "x.safetensors", metadata={"only": "words"})
    view = lazyckpt.open(tmp_path / "x.safetensors")
    assert len(view) == 0 and view.to() == {} and dict(view.meta) == {"only": "words"}
    assert repr(view) and len(pickle.loads(pickle.dumps(view))) == 0


@pytest.mark.parametrize(("kind", "bits"), [("F6_E2M3", 6), ("F6_E3M2", 6), ("F4", 4)])
def test_packed_floats_are_read_as_what_torch_can_hold(tmp_path: Path, kind: str, bits: int) -> None:
    raw = bytes(range(3 * 4 * bits // 8 + (3 * 4 * bits % 8 > 0)))
    header = json.dumps({"x": {"dtype": kind, "shape": [3, 4], "data_offsets": [0, len(raw)]}}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + raw)
    view = lazyckpt.open(tmp_path / "x.safetensors")
    t = view["x"]
    assert t[...].contiguous().view(torch.uint8).flatten().tolist() == list(raw)
    if t.dtype == torch.uint8:
        assert any("'x'" in line and kind in line for line in view.problems)
    else:
        assert (t.dtype, tuple(t.shape), view.problems) == (torch.float4_e2m1fn_x2, (3, 2), ())
        for key in keys(t.shape, kind):
            same(t[key], indexed(t[...], key), key)


def test_unknown_fields_in_an_entry_are_passed_over(tmp_path: Path) -> None:
    header = json.dumps({"x": {"dtype": "I8", "shape": [2], "data_offsets": [0, 2], "note": "later version"}}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\x01\xff")
    same(lazyckpt.open(tmp_path / "x.safetensors")["x"][...], torch.tensor([1, -1], dtype=torch.int8), "x")
