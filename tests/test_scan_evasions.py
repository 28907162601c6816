"""Files that were written to get past the scan: each runs code when it is loaded the usual way."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np
import pytest
import torch

import lazyckpt
from lazyckpt.io.containers.pickle.audit import judge

from .handmade import call, dict_of, list_of, named, number, program, text, tuple_of, write_pickle
from .scan_corpus import torch_zip
from .scan_evasions import FILES, PICKLES
from .test_pickles_malicious import nothing_runs

LOADER = """
import json, sys
for path, program in json.load(sys.stdin):
    try:
        exec(program, {"path": path})
    except BaseException:
        pass
"""
# needs modules that only some versions of Python import under these names
SOME_VERSIONS = {
    name for name in PICKLES if sys.version_info[:2] != (3, 11) and not name.startswith(("byte", "a text"))
}


def test_the_files_are_live(tmp_path: Path) -> None:
    """Else the next tests prove nothing."""
    runs, markers = [], {}
    made: dict[str, Any] = {
        name: ("m.pkl", data, "import pickle; pickle.load(open(path, 'rb'))") for name, data in PICKLES.items()
    }
    for n, (name, (file, data, load)) in enumerate((made | FILES).items()):
        if name in SOME_VERSIONS:
            continue
        markers[name] = tmp_path / f"marker{n}"
        path = tmp_path / f"{n}-{file}"
        path.write_bytes(data(markers[name]))
        runs.append((str(path), load))
    done = subprocess.run(
        [sys.executable, "-c", LOADER], input=json.dumps(runs), text=True, timeout=120, check=False, cwd=tmp_path
    )
    assert done.returncode == 0
    for _ in range(100):  # popen does not wait
        if all(marker.exists() for marker in markers.values()):
            break
        sleep(0.1)
    assert [name for name, marker in markers.items() if not marker.exists()] == []


@pytest.mark.parametrize("name", PICKLES)
def test_a_pickle_is_an_error_and_a_problem(name: str, tmp_path: Path) -> None:
    marker, path = tmp_path / "marker", tmp_path / "a.pt"
    path.write_bytes(torch_zip(PICKLES[name](marker)))
    with nothing_runs(lambda: lazyckpt.scan(path)):
        report = lazyckpt.scan(path)
    assert any(f.code == "dangerous-pickle" for f in report), report
    try:
        view = lazyckpt.open(path, cache=False)
        assert "unsafe-pickle" in [p.code for p in view.problems]
    except lazyckpt.LazyckptError:
        pass  # refused
    assert not marker.exists()


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_an_error(name: str, tmp_path: Path) -> None:
    file, data, _ = FILES[name]
    marker, path = tmp_path / "marker", tmp_path / file
    path.write_bytes(data(marker))
    with nothing_runs(lambda: lazyckpt.scan(path)):
        report = lazyckpt.scan(path)
    assert any(f.code == "dangerous-pickle" and ".system" in str(f) for f in report), report
    assert not marker.exists()


@pytest.mark.parametrize(
    "name",
    [
        "pathlib attrgetter", "pathlib os", "enum sys", "enum bltins", "enum reduce", "typing evaluate_forward_ref",
        "typing ABCMeta", "_collections_abc FunctionType", "builtins __loader__", "dataclasses asdict",
        "dataclasses replace", "collections namedtuple", "torch._C._aoti AOTIModelContainerRunnerCpu",
        "torch._C._aoti AOTIModelPackageLoader", "torch._C CompilationUnit", "torch CompilationUnit",
        "torch.ao.quantization.quantize_fx GraphModule", "torch.nn.functional handle_torch_function",
        "torch.nn.functional importlib", "torch.nn.parameter _ParameterMeta", "torch._utils ModuleType",
        "torch.distributed.checkpoint._fsspec_filesystem FsspecWriter", "numpy._core.multiarray _vec_string",
    ],
)  # fmt: skip
def test_names_of_other_modules_are_dangerous(name: str) -> None:
    """Also where the running Python or torch has no such name."""
    assert judge(*name.split()).grade == "dangerous"


@pytest.mark.parametrize(
    "name",
    [
        "scipy.io FortranFile",
        "pandas ExcelWriter",
        "pandas HDFStore",
        "torchvision.models resnet50",
        "scipy.sparse save_npz",
    ],
)
def test_what_writes_files_or_downloads_is_unknown(name: str) -> None:
    assert judge(*name.split()).grade == "unknown"


@pytest.mark.parametrize(
    "name",
    [
        "zoneinfo ZoneInfo._unpickle", "collections deque", "datetime datetime", "itertools count", "enum auto",
        "typing Any", "pathlib PosixPath", "numpy.core.multiarray _reconstruct", "numpy._core.multiarray scalar",
        "torch.distributed.tensor._dtensor_spec TensorMeta", "torch.nn.functional gelu", "math inf",
        "torch._C._distributed_c10d ReduceOp", "calendar Month", "fractions Fraction", "ipaddress IPv4Address",
    ],
)  # fmt: skip
def test_names_of_genuine_checkpoints_stay_harmless(name: str) -> None:
    assert judge(*name.split()).grade in ("plain", "torch")


SIZES = {
    "torch.zeros of a number": call(named("torch", "zeros"), number(1 << 40)),
    "torch.empty of a tuple": call(named("torch", "empty"), tuple_of(number(1 << 20), number(1 << 20))),
    "torch.ones of numbers": call(named("torch", "ones"), number(60_000), number(60_000)),
    "torch.zeros of a list": call(named("torch", "zeros"), list_of(number(1 << 20), number(1 << 20))),
    "torch.zeros of a size": call(named("torch", "zeros"), call(named("torch", "Size"), tuple_of(number(1 << 40)))),
    "torch.eye": call(named("torch", "eye"), number(1 << 20)),
    "numpy.zeros of a number": call(named("numpy", "zeros"), number(1 << 40)),
    "numpy.empty of a tuple": call(named("numpy", "empty"), tuple_of(number(1 << 20), number(1 << 20)), text("f4")),
    "numpy.ndarray": named("numpy", "ndarray") + tuple_of(tuple_of(number(1 << 40))) + b"\x81",
}


@pytest.mark.parametrize("name", SIZES)
def test_calls_that_make_huge_tensors_are_bombs(name: str, tmp_path: Path) -> None:
    path = write_pickle(tmp_path / "a.pt", program(dict_of(text("x"), SIZES[name])))
    view = lazyckpt.open(path, cache=False)
    assert any(p.code == "unsafe-pickle" and "memory" in str(p) for p in view.problems), view.problems
    assert any(f.code == "pickle-bomb" for f in lazyckpt.scan(path))


@pytest.mark.parametrize(
    "body", [call(named("torch", "zeros"), number(3)), call(named("numpy", "zeros"), tuple_of(number(9), number(9)))]
)
def test_calls_that_make_small_tensors_are_none(body: bytes, tmp_path: Path) -> None:
    path = write_pickle(tmp_path / "a.pt", program(dict_of(text("x"), body)))
    assert not any("memory" in str(p) for p in lazyckpt.open(path, cache=False).problems)
    assert not any(f.code == "pickle-bomb" for f in lazyckpt.scan(path))


def test_arrays_whose_fields_have_names_are_no_pickles(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.ones(1000, [("fortran_order", "<f4"), ("x", "<i8")]))
    np.save(tmp_path / "b.npy", torch.ones(1000).bool().numpy())
    assert len(lazyckpt.scan(tmp_path)) == 0


def test_genuine_functions_and_scalers_are_no_dangers(tmp_path: Path) -> None:
    layer = torch.nn.TransformerEncoderLayer(8, 2, activation=torch.relu)
    tree = {"module": layer, "scaler": torch.amp.GradScaler("cpu"), "zip": zip([1], [2], strict=False)}
    for protocol in (0, 2, 4):
        (tmp_path / f"{protocol}.pkl").write_bytes(pickle.dumps(tree, protocol))
        (tmp_path / f"tensors{protocol}.pkl").write_bytes(pickle.dumps(layer.state_dict(), protocol))
    assert len(lazyckpt.scan(tmp_path)) == 0, lazyckpt.scan(tmp_path)
