"""The notebooks: each runs from its first cell to its last, on checkpoints that it writes, and is committed with its
outputs."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from .conftest import need
from .lanes import sampled

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# The default lane runs the quickest: each of the others takes twenty seconds or more.
EACH = sampled(NOTEBOOKS, [path for path in NOTEBOOKS if path.stem[0] == "6"])
MOST = 7 << 18  # bytes of all together: 1.75 MiB

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")


def _tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_notebooks", ROOT / "tools" / "run_notebooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


run_notebooks = _tool()


def _read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


@pytest.mark.parametrize("path", EACH, ids=lambda path: path.stem)
def test_it_runs(path: Path) -> None:
    need("deepspeed", "transformers", "matplotlib", "dask")
    before = {*os.listdir(path.parent), "__pycache__"}
    executed = run_notebooks.execute(path)
    assert not run_notebooks.faults(executed)
    assert {*os.listdir(path.parent), "__pycache__"} == before, "it has left files"
    kinds = [[_kind(o) for o in cell.get("outputs", [])] for cell in executed.cells]
    assert kinds == [[_kind(o) for o in cell.get("outputs", [])] for cell in _read(path).cells], (
        "what is committed is not what it shows now: python tools/run_notebooks.py"
    )


def _kind(output: Any) -> tuple[str, bool]:
    return output.output_type, "image/png" in output.get("data", {})


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_committed_with_its_outputs(path: Path) -> None:
    notebook = _read(path)
    nbformat.validate(notebook)
    assert not run_notebooks.faults(notebook)
    assert notebook.metadata == run_notebooks.METADATA
    for cell in notebook.cells:
        assert not cell.metadata, "no times, no settings of an editor"
    text = path.read_text("utf-8")
    assert str(ROOT) not in text and str(Path.home()) not in text


def test_they_are_six_and_small() -> None:
    assert [path.stem[0] for path in NOTEBOOKS] == list("123456")
    assert sum(path.stat().st_size for path in NOTEBOOKS) < MOST


def test_faults_are_seen() -> None:
    """The checks above would tell."""
    v4 = nbformat.v4

    def told(*outputs: Any) -> list[str]:
        cell = v4.new_code_cell("x", execution_count=1, outputs=list(outputs))
        found: list[str] = run_notebooks.faults(v4.new_notebook(cells=[cell]))
        return found

    assert told(v4.new_output("stream", text="a/b: 3")) == []
    assert told() == ["it has no outputs"]
    assert "stderr" in told(v4.new_output("stream", name="stderr", text="Warning"))[0]
    assert "ValueError: no" in told(v4.new_output("error", ename="ValueError", evalue="no"))[0]
    assert "/home/" in told(v4.new_output("display_data", {"text/html": "<b>/home/somebody/x.pt</b>"}))[0]
    assert "/tmp/" in told(v4.new_output("stream", text="file:///tmp/x"))[0]
    assert "executed" in run_notebooks.faults(v4.new_notebook(cells=[v4.new_code_cell("x")]))[0]
