"""Execute the notebooks, each in a kernel of this Python, and write them back with their outputs.

    python tools/run_notebooks.py                                  # all in notebooks/
    python tools/run_notebooks.py notebooks/1_explore.ipynb        # some

Outputs are made such that executing again changes little: no times, no paths of this machine, nothing that a kernel
numbers anew each time. tests/test_notebooks.py executes by the same functions.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from jupyter_core.utils import run_sync
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "notebooks"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
_TEMPORARY = re.compile(r"(?:file://)?[^\s'\"<>()=:]*/lazyckpt-notebook-\w+/?")  # checkpoints.temporary_folder
_MEASURED = re.compile(r"[\d.]+ \w+(?= free\b)|(?<= in )[\d.:]+(?: s)?, [\d.]+ ?\w+/s")  # what `lazyckpt convert` tells
_PROGRESS = re.compile(r"^\S+: \d+%, .* left\n", re.MULTILINE)
_ADDRESS = re.compile(r"(?<= at )0x[0-9a-f]{6,}")
_WIDGET = "application/vnd.jupyter.widget-view+json"
_UUID = re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b")
_ABSOLUTE = re.compile(
    r"(?:(?<![\w.:/<-])|(?<=file://))/(?:tmp|home|root|usr|opt|var|work|mnt|Users|private)/|lazyckpt-notebook-"
)


class _ThisPython(KernelSpecManager):
    """Whatever kernel a notebook names, and whatever this machine has installed: this interpreter's."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=argv, display_name=kernel_name, language="python")


def execute(path: Path, timeout: float = 600) -> Any:
    """The notebook with the outputs that it has now; nothing is written. ``timeout``: seconds for a cell.

    Raises nbclient's CellExecutionError, which shows the cell and the error; RuntimeError if temporary files are left.
    """
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as scratch:
        temporary = Path(scratch, "tmp")
        temporary.mkdir()
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "PYTHONWARNINGS": "ignore:IProgress not found",  # tqdm's, about bars, which are off:
            "TQDM_DISABLE": "1",
            "IPYTHONDIR": scratch,
            "TMPDIR": str(temporary),
            "TORCHINDUCTOR_CACHE_DIR": scratch,  # a folder that torch makes when transformers' models are imported
            "MPLBACKEND": "module://matplotlib_inline.backend_inline",
            "CUDA_VISIBLE_DEVICES": "",  # the same outputs everywhere
        }
        manager = AsyncKernelManager(
            kernel_spec_manager=_ThisPython(), connection_file=os.path.join(scratch, "kernel"), transport="ipc"
        )
        manager.shutdown_wait_time = 120  # seconds: on a busy machine a kernel takes long to remove its files
        resources = {"metadata": {"path": str(path.parent)}}
        client = NotebookClient(notebook, km=manager, timeout=timeout, record_timing=False, resources=resources)
        try:
            client.execute(env=env)
        finally:
            if manager.has_kernel:
                run_sync(manager.shutdown_kernel)()
        left = sorted(p.name for p in temporary.iterdir())
        if left:
            raise RuntimeError(f"{path} has left files in the folder of temporary ones: {', '.join(left)}")
    return _normal(notebook)


def _normal(notebook: Any) -> Any:
    notebook.metadata = nbformat.from_dict(METADATA)
    numbers: dict[str, str] = {}
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({})
        outputs: list[Any] = []
        for output in cell.get("outputs", []):
            last = outputs[-1] if outputs else None
            if output.output_type == "stream" and last and last.get("name") == output.name:
                last.text += output.text  # however the kernel's flushes have cut it
            else:
                outputs.append(output)
        for output in outputs:
            if output.output_type == "stream":
                output.text = _plain(output.text)
            elif "data" in output:
                output.data.pop(_WIDGET, None)  # its kernel is gone: what stays is its static HTML
                output.metadata = nbformat.from_dict({})
                for kind, data in output.data.items():
                    if isinstance(data, str) and kind.startswith("text/"):
                        output.data[kind] = _renumbered(_plain(data), numbers)
        if cell.cell_type == "code":
            cell.outputs = outputs
    return notebook


def _renumbered(text: str, numbers: dict[str, str]) -> str:
    """With the ids that xarray draws for its HTML counted instead: alike each time, and different from each other."""
    return _UUID.sub(lambda m: numbers.setdefault(m[0], f"n{len(numbers)}"), text)


def _plain(text: str) -> str:
    for pattern, instead in ((_TEMPORARY, ""), (_ADDRESS, "0x..."), (_PROGRESS, ""), (_MEASURED, "...")):
        text = pattern.sub(instead, text)
    return text


def faults(notebook: Any) -> list[str]:
    """What an executed notebook must not have, a line each."""
    found = []
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    if [cell.execution_count for cell in code] != list(range(1, len(code) + 1)):
        found.append("it was not executed from the first cell to the last")
    if not any(cell.outputs for cell in code):
        found.append("it has no outputs")
    for cell in code:
        for output in cell.outputs:
            texts = [output.get("text", ""), *(v for v in output.get("data", {}).values() if isinstance(v, str))]
            where = f"cell {cell.execution_count}"
            if output.output_type == "error":
                found.append(f"{where}: {output.ename}: {output.evalue}")
            elif output.get("name") == "stderr":
                found.append(f"{where} prints to stderr: {output.text}")
            found += [f"{where} shows a path of this machine: {m[0]}" for t in texts if (m := _ABSOLUTE.search(t))]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, default=sorted(FOLDER.glob("*.ipynb")))
    options = parser.parse_args()
    bad = 0
    for path in options.paths:
        notebook = execute(path.resolve())
        lines = faults(notebook)
        bad += bool(lines)
        print(f"{path.name}: {'; '.join(lines) or 'executed'}", flush=True)
        nbformat.write(notebook, path)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
