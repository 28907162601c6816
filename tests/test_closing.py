"""A view lets go of its files when it is closed, and says so when it is read afterwards; importing changes nothing."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import lazyckpt

WHOLE = {"l.0.w": torch.arange(12.0).view(3, 4), "l.0.b": torch.ones(3), "head": torch.ones(2)}


@pytest.fixture(params=["torch", "safetensors", "dcp"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "torch":
        torch.save(WHOLE, tmp_path / "x.pt")
        return tmp_path / "x.pt"
    if request.param == "safetensors":
        save_file(WHOLE, tmp_path / "x.safetensors")
        return tmp_path / "x.safetensors"
    dcp.save(dict(WHOLE), checkpoint_id=tmp_path / "x", no_dist=True)
    return tmp_path / "x"


def held_open(folder: Path) -> set[str]:
    """The files below a folder that this process has open or mapped."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    maps = Path("/proc/self/maps").read_text().splitlines()
    found |= {line.split(maxsplit=5)[5] for line in maps if line.count(" ") and len(line.split(maxsplit=5)) == 6}
    return {name for name in found if name.startswith(str(folder))}


@pytest.mark.filterwarnings("ignore")
def test_nothing_is_read_after_closing(path: Path) -> None:
    view, other = lazyckpt.open(path), lazyckpt.open(path)
    t, part, whole = view["l.0.w"], view["l"], view["head"][...]
    mapped = view["l.0.w"].to(copy=False)
    assert torch.equal(t[1], WHOLE["l.0.w"][1])
    view.close()
    view.close()
    for read in (
        lambda: t[...],
        lambda: t[0, 0],
        lambda: t.to(copy=False),
        lambda: t.lazy[1:].numpy(),
        lambda: part["0.b"][...],
        lambda: view.states["weights"]["head"][0],
        lambda: view.stored[next(iter(view.stored))][...],
        view.to,
    ):
        with pytest.raises(lazyckpt.DataError, match="closed"):
            read()
    assert (t.shape, t.dtype, set(part)) == ((3, 4), torch.float32, {"0.w", "0.b"}), "what it is stays known"
    assert repr(view) and torch.equal(whole, WHOLE["head"]) and torch.equal(mapped, WHOLE["l.0.w"])
    assert torch.equal(other["l.0.w"][...], WHOLE["l.0.w"]), "another view of the same path"
    assert torch.equal(lazyckpt.open(path)["head"][...], WHOLE["head"])
    assert torch.equal(pickle.loads(pickle.dumps(other["head"]))[...], WHOLE["head"])


@pytest.mark.filterwarnings("ignore")
def test_with(path: Path) -> None:
    with lazyckpt.open(path, cache=False) as view:
        t = view["l.0.w"]
        assert torch.equal(t[1:], WHOLE["l.0.w"][1:])
    with pytest.raises(lazyckpt.DataError, match="closed"):
        t[...]
    with pytest.raises(ZeroDivisionError), lazyckpt.open(path) as view:
        _ = 1 / 0
    with pytest.raises(lazyckpt.DataError, match="closed"):
        view.to()


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.filterwarnings("ignore")
def test_files_are_let_go_of(path: Path) -> None:
    view = lazyckpt.open(path, cache=False)
    for t in view.values():
        t[...], t[:1]
    assert held_open(path.parent)
    view.close()
    assert not held_open(path.parent)


def test_a_run(tmp_path: Path) -> None:
    for step in (1, 2):
        torch.save({"w": torch.full((3,), float(step))}, tmp_path / f"step_{step}.pt")
    with lazyckpt.open_run(tmp_path) as run:
        w, first = run["w"], run.at(1)["w"]
        assert w[:, 0].tolist() == [1, 2] and first[0].item() == 1
    for t in (w, first):
        with pytest.raises(lazyckpt.DataError, match="closed"):
            t[...]
    with lazyckpt.open_run(tmp_path) as unopened:
        pass
    with pytest.raises(lazyckpt.LazyckptError):
        unopened.at(1)
    unopened.close()
    assert lazyckpt.open_run(tmp_path)["w"][:, 0].tolist() == [1, 2]


def test_a_view_behind_a_url(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    torch.save(WHOLE, tmp_path / "x.pt")
    fsspec.filesystem("memory").pipe("/closing/x.pt", (tmp_path / "x.pt").read_bytes())
    other = lazyckpt.open("memory://closing/x.pt")
    with lazyckpt.open("memory://closing/x.pt") as view:
        assert torch.equal(view["head"][...], WHOLE["head"])
    with pytest.raises(lazyckpt.DataError, match="closed"):
        view["head"][...]
    assert torch.equal(other["head"][...], WHOLE["head"])


@pytest.mark.slow
def test_importing_leaves_ipython_as_it_is() -> None:
    pytest.importorskip("IPython")
    code = """
import IPython, pickle
from IPython.core import guarded_eval
limited = guarded_eval.EVALUATION_POLICIES["limited"]
def seen():
    return {name: set(value) for name, value in vars(limited).items() if isinstance(value, set)}
before = seen()
import lazyckpt
assert seen() == before
lazyckpt.load_ipython_extension(None)
assert seen() != before
lazyckpt.unload_ipython_extension(None)
assert seen() == before
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
