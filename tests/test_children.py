"""Programs of their own that parse a file: what they say, how they end, and that they always end."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lazyckpt import CorruptError, FormatError
from lazyckpt.io import children
from lazyckpt.io.children import Child

from .hostility import deadline

POSIX = pytest.mark.skipif(os.name != "posix", reason="signals")
_START = """
import json, os, signal, struct, sys, time
about = json.loads(sys.stdin.buffer.readline())
def say(said, data=b""):
    text = json.dumps(said).encode()
    sys.stdout.buffer.write(struct.pack("<IQ", len(text), len(data)) + text + data)
    sys.stdout.buffer.flush()
say({"pid": os.getpid()})
"""

Start = Callable[[str], Child]


@pytest.fixture
def program(tmp_path: Path) -> Start:
    def start(code: str, **about: Any) -> Child:
        (tmp_path / "program.py").write_text(_START + code)
        return Child(tmp_path / "program.py", "the-file.h5", about)

    return start


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_it_answers(program: Start) -> None:
    with program("say({'n': 1}, sys.stdin.buffer.read(3) * 2)") as child:
        child.write(b"abc")
        assert child.frame(60).said.keys() == {"pid"}
        assert child.frame(60) == ({"n": 1}, b"abcabc")


@POSIX
@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize(
    "code",
    [
        "os.kill(os.getpid(), signal.SIGSEGV)",
        "sys.exit(3)",
        "time.sleep(600)",
        "sys.stdout.buffer.write(b'\\0' * 7); sys.stdout.buffer.flush(); time.sleep(600)",
        "sys.stdout.buffer.write(b'\\xff' * 99)",
        "sys.stdout.buffer.write(struct.pack('<IQ', 2, 0) + b'[]')",
        "sys.stdout.buffer.write(struct.pack('<IQ', 4000, 0) + b'[' * 4000)",
    ],
)
def test_what_goes_wrong_is_one_error(
    program: Start, code: str, portable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if portable:
        monkeypatch.setattr(children, "POLL", None)
    with deadline(60), program(code) as child:
        pid = child.frame(60).said["pid"]
        child.write(b"unread" * 100_000 if "exit" in code else b"")
        with pytest.raises(CorruptError, match=r"the-file\.h5"):
            child.frame(0.3 if "600" in code else 60)
    assert not alive(pid)


@POSIX
def test_it_ends_when_it_is_interrupted(program: Start) -> None:
    pid = 0
    with pytest.raises(KeyboardInterrupt), program("time.sleep(600)") as child:
        pid = child.frame(60).said["pid"]
        raise KeyboardInterrupt
    assert pid and not alive(pid)


@POSIX
def test_a_fork_that_has_its_pipes_does_not_keep_it(program: Start) -> None:
    """The end of a program is noticed, although another process has its end of the pipe."""
    with deadline(60), program("os.fork() or time.sleep(5); os.kill(os.getpid(), signal.SIGKILL)") as child:
        child.frame(60)
        begun = time.monotonic()
        with pytest.raises(CorruptError):
            child.frame(60)
        assert time.monotonic() - begun < 4


def test_threads_have_one_each(program: Start) -> None:
    found: list[int] = []

    def run(child: Child) -> None:
        with child:
            found.append(child.frame(60).said["pid"])

    threads = [threading.Thread(target=run, args=(child,)) for child in [program("") for _ in range(4)]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 4


def test_without_an_interpreter_it_is_told(program: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/opt/an-application")
    with pytest.raises(FormatError, match=r"the-file\.h5"):
        program("")
