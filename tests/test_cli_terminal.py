"""The command line as it is used: options in its errors, locales without UTF-8, tensors without a name."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import lazyckpt
from lazyckpt import cli
from lazyckpt.formats.reader import Reader

pytestmark = pytest.mark.slow

_CHILD = """
import json, sys
from lazyckpt import cli
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["lazyckpt", *arguments]
    try:
        cli.main()
    except SystemExit as e:
        assert not e.code, arguments
"""


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_terminals_without_utf_8(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "x.pt"
    torch.save({"schicht_\u00e4.w": torch.randn(40, 40), "\u65e5.b": torch.ones(3)}, path)
    commands = [("ls",), ("stats", "--bins", "8"), ("show", "schicht_\u00e4.w"), ("ls", "schicht_\u00e4")]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("LC_", "LANG"))}
    environment |= {"PYTHONIOENCODING": encoding, "PYTHONUTF8": "0", "LC_ALL": "C"}
    asked = json.dumps([[command, str(path), *rest] for command, *rest in commands])
    command = [sys.executable, "-c", _CHILD, asked]
    done = subprocess.run(command, capture_output=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert b"\\u25" not in done.stdout, "blocks of a histogram are drawn, not escaped"
    assert done.stdout.decode(encoding).count("schicht_") == 3, "the last shows what is below it"


def test_errors_name_options(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "x.pt")
    torch.save({"w": torch.ones(2)}, tmp_path / "there.pt")
    call = ["convert", str(tmp_path / "x.pt"), str(tmp_path / "there.pt"), "--json"]
    done = CliRunner().invoke(cli.app, call)
    for text in (done.stderr, json.loads(done.stdout)["error"]):
        assert "--overwrite" in text and "overwrite=" not in text
    for name in ("one", "two"):
        torch.save({"w": torch.ones(2)}, tmp_path / f"{name}.pt")
    done = CliRunner().invoke(cli.app, ["ls", str(tmp_path)])
    assert done.exit_code == 2 and "--tag" in done.stderr and "tag=" not in done.stderr
    assert CliRunner().invoke(cli.app, ["ls", str(tmp_path), "--tag", "one.pt"]).exit_code == 0
    call = ["convert", str(tmp_path / "x.pt"), str(tmp_path / "out"), "--to", "megatron"]
    done = CliRunner().invoke(cli.app, call)
    assert done.exit_code == 2 and "--rename megatron" in done.stderr and "view." not in done.stderr


def test_a_tensor_without_a_name(tmp_path: Path) -> None:
    path = tmp_path / "bare.pt"
    torch.save(torch.arange(6.0).view(2, 3), path)
    assert lazyckpt.open(path)[""][...].tolist() == [[0, 1, 2], [3, 4, 5]]
    done = CliRunner().invoke(cli.app, ["show", str(path), "--json"])
    assert json.loads(done.stdout)["values"] == [[0, 1, 2], [3, 4, 5]]
    done = CliRunner().invoke(cli.app, ["show", str(path), "[1]", "--json"])
    assert json.loads(done.stdout)["values"] == [3, 4, 5]


def test_show_without_a_name(tmp_path: Path) -> None:
    torch.save({"only": torch.ones(2)}, tmp_path / "one.pt")
    done = CliRunner().invoke(cli.app, ["show", str(tmp_path / "one.pt"), "--json"])
    assert json.loads(done.stdout)["name"] == "only"
    torch.save({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "two.pt")
    assert CliRunner().invoke(cli.app, ["show", str(tmp_path / "two.pt")]).exit_code == 2


class _Plugin:
    def load(self) -> Reader:
        return Reader("acme", "files of ACME", lambda source: False, lambda source: None)  # type: ignore[arg-type,return-value]


def test_formats_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lazyckpt.formats.registry._points", lambda: [_Plugin()])
    rows = json.loads(CliRunner().invoke(cli.app, ["formats", "--json"]).stdout)
    found = {row["name"]: row for row in rows}
    assert {"dcp", "deepspeed", "huggingface", "megatron", "safetensors", "torch", "zarr"} <= set(found)
    assert found["acme"] == {"name": "acme", "reads": "files of ACME", "plugin": True}
    text = CliRunner().invoke(cli.app, ["formats"]).stdout
    assert all(name in text for name in found)


def test_browse_in_a_terminal_of_ascii(tmp_path: Path) -> None:
    """Keys that are typed during the start are no search, those after "/" are, though they arrive with it; a signal
    leaves the terminal as it was."""
    import pty
    import select

    pytest.importorskip("textual")
    torch.save({"layer.w": torch.ones(2)}, tmp_path / "x.pt")
    pid, fd = pty.fork()
    if pid == 0:  # pragma: no cover - the child
        os.environ |= {"TERM": "xterm-256color", "PYTHONIOENCODING": "ascii"}
        os.execv(sys.executable, [sys.executable, "-m", "lazyckpt", "browse", str(tmp_path / "x.pt")])
    shown, start = b"", time.monotonic()
    try:
        while time.monotonic() - start < 60 and b"layer" not in shown:
            if select.select([fd], [], [], 0.02)[0]:
                shown += os.read(fd, 1 << 16)
            os.write(fd, b"Z")
        os.write(fd, b"/qsn")
        while time.monotonic() - start < 60 and b"there are no tensors" not in shown:
            if select.select([fd], [], [], 0.02)[0]:
                shown += os.read(fd, 1 << 16)
        os.kill(pid, signal.SIGTERM)
        ended = 0
        while time.monotonic() - start < 60 and not ended:
            if select.select([fd], [], [], 0.02)[0]:
                with suppress(OSError):  # the other end is closed
                    shown += os.read(fd, 1 << 16)
            ended, status = os.waitpid(pid, os.WNOHANG)
        assert ended and os.waitstatus_to_exitcode(status) == 128 + signal.SIGTERM
    finally:
        with suppress(OSError):  # it has ended
            os.kill(pid, 9)
            os.waitpid(pid, 0)
        os.close(fd)
    _, begun, screen = shown.partition(b"\x1b[?1049h")
    assert begun and b"layer" in screen and b"there are no tensors" in screen
    assert b"ZZ" not in screen.split(b"\x1b[?2026$p")[-1]
    assert screen.isascii() and b"\\u" not in screen
    assert all(screen.rfind(b"\x1b[?" + mode) > 0 for mode in (b"1049l", b"25h", b"1003l", b"2004l"))


def test_an_interrupt_while_modules_are_imported() -> None:
    code = """
import sys

class Interrupted:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupted())
from lazyckpt.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "error: interrupted\n")


def test_an_unknown_command_is_told_with_its_neighbours() -> None:
    done = CliRunner().invoke(cli.app, ["comvert"])
    assert done.exit_code == 2 and "did you mean convert" in done.stderr
    done = CliRunner().invoke(cli.app, ["a\x1b[31m"])
    assert done.exit_code == 2 and "'a\\x1b[31m'" in done.stderr and "\x1b" not in done.stderr


def test_columns_are_aligned_beside_wide_characters(tmp_path: Path) -> None:
    names = ["plain", "\u65e5\u672c", "e\u0301", " outer "]
    torch.save({name: torch.ones(2) for name in names}, tmp_path / "x.pt")
    lines = CliRunner().invoke(cli.app, ["ls", str(tmp_path / "x.pt")]).stdout.splitlines()[1:]
    before = {line.split()[0]: line[: line.index("f32")] for line in lines if "outer" not in line}
    assert {name: len(text) for name, text in before.items()} == {"plain": 11, "\u65e5\u672c": 9, "e\u0301": 12}
    assert any(line.startswith("' outer '  f32") for line in lines)
