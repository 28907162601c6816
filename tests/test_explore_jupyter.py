"""The explorer's widget in a real JupyterLab, driven in Chromium. CONTRIBUTING.md says how to run this."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from .browser import chromium, running

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("jupyterlab") is None, reason="needs jupyterlab: pip install jupyterlab"),
    pytest.mark.skipif(find_spec("anywidget") is None, reason="needs anywidget"),
]
TOKEN = "0123456789abcdef"
CELLS = [
    "import lazyckpt\none = lazyckpt.open('one.pt').widget(height=500)\none",
    "one",
    "lazyckpt.open('two.pt').widget(height=500)",
]
EACH = [(True, False), (True, False), (False, True)]  # which names each widget shows
SHOWN = "return Array.from(document.querySelectorAll('.jp-OutputArea .lazyckpt-explorer'), e => e.innerText)"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """JupyterLab with a notebook of three widgets, two of which are views of the same; yields its address."""
    folder = tmp_path_factory.mktemp("lab")
    torch.save({f"alpha.{n}.weight": torch.randn(8, 8) for n in range(3)}, folder / "one.pt")
    torch.save({f"beta.{n}.weight": torch.randn(8, 8) for n in range(3)}, folder / "two.pt")
    cells = [
        {"cell_type": "code", "id": f"c{n}", "source": text, "metadata": {}, "outputs": [], "execution_count": None}
        for n, text in enumerate(CELLS)
    ]
    about = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    document = {"cells": cells, "metadata": about, "nbformat": 4, "nbformat_minor": 5}
    (folder / "widgets.ipynb").write_text(json.dumps(document))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}", "--ip=127.0.0.1"]
    command += [f"--IdentityProvider.token={TOKEN}", f"--ServerApp.root_dir={folder}", "--expose-app-in-browser"]
    own = {"JUPYTER_CONFIG_DIR": str(folder / "config"), "JUPYTER_DATA_DIR": str(folder / "data")}
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, env={**os.environ, **own, "PYTHONPATH": path}, stdout=log, stderr=log)
    address = f"http://127.0.0.1:{port}"
    try:
        until(lambda: answers(f"{address}/api/status"), 120)
        yield address
    finally:
        process.terminate()
        process.wait(30)


def answers(url: str, method: str = "GET") -> Any:
    """Return what JupyterLab answers, or None while it does not."""
    asked = urllib.request.Request(url, headers={"Authorization": f"token {TOKEN}"}, method=method)
    try:
        with urllib.request.urlopen(asked, timeout=30) as found:
            return json.loads(found.read() or b"true")
    except OSError:
        return None


def until(found: Callable[[], Any], seconds: float = 60) -> Any:
    """Wait for something that is true, and return it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = found()
        if value:
            return value
        time.sleep(0.2)
    raise AssertionError(f"after {seconds} seconds there is still none")


def test_widgets_in_jupyterlab(lab: str, tmp_path: Path) -> None:
    chromium()
    with running(tmp_path, tmp_path / "profile") as found:
        browser = found.driver
        browser.set_window_size(1400, 2400)  # JupyterLab leaves out what is not in view
        browser.get(f"{lab}/lab/tree/widgets.ipynb?token={TOKEN}&reset")
        shown: Callable[[], list[str]] = lambda: browser.execute_script(SHOWN)  # noqa: E731
        run = "window.jupyterapp.commands.execute('notebook:run-all-cells')"
        until(lambda: browser.execute_script("return !!document.querySelector('.jp-Notebook .jp-Cell')"), 120)
        until(lambda: any(one["execution_state"] == "idle" for one in answers(f"{lab}/api/kernels") or ()), 60)

        browser.execute_script(run)  # each shows its own names, also two views of one widget
        until(lambda: [("alpha" in text, "beta" in text) for text in shown()] == EACH)

        link = "querySelector('nav a[href*={}]').click()"
        page = f"document.querySelectorAll('.jp-OutputArea .lazyckpt-explorer')[{{}}].{link}"
        browser.execute_script(page.format(0, "architecture"))  # one view goes on, the others stay
        until(lambda: "ZeRO" in shown()[0])  # what the optimizer would take
        assert "ZeRO" not in shown()[1] and "alpha" in shown()[1] and "beta" in shown()[2]

        browser.execute_script(run)  # the widgets of the first run are gone
        until(lambda: [("alpha" in text, "beta" in text) for text in shown()] == EACH)

        for kernel in answers(f"{lab}/api/kernels"):
            answers(f"{lab}/api/kernels/{kernel['id']}", "DELETE")
        browser.execute_script(page.format(2, "architecture"))
        until(lambda: not shown() or any("kernel does not answer" in text for text in shown()), 30)
