"""Python programs in processes of their own, which do not import torch anew: forks of one process that has imported it.

A program that is to be killed, to run out of memory or to patch what it imports needs a process; a fresh interpreter
spends two seconds of the processor on importing torch. Where there is no fork, each program gets a fresh interpreter.

``python -m tests.processes FD`` is the process that is forked: a program's arguments, environment and standard streams
come through the socket of this number, its exit status goes back.
"""

from __future__ import annotations

import array
import gc
import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import traceback
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["end", "run"]

ROOT = Path(__file__).parents[1]
_FORKS = sys.platform == "linux"


def run(
    *arguments: str | Path, env: Mapping[str, str] | None = None, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run a Python program, ``-c CODE`` or ``-m MODULE`` with arguments, and capture what it prints.

    It finds torch and lazyckpt imported: a program that tests importing needs `subprocess.run`.
    """
    command = [str(one) for one in arguments]
    environment = {**(os.environ if env is None else env), "PYTHONPATH": str(ROOT)}
    if not _FORKS:
        return subprocess.run(
            [sys.executable, *command], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=timeout, check=False,
        )  # fmt: skip
    return _forked(command, environment, timeout)


# -- the process that asks


_server: tuple[int, subprocess.Popen[bytes], socket.socket] | None = None


def _connected() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """The process that is forked, which is started for the first program, and its socket."""
    global _server
    if _server is None or _server[0] != os.getpid() or _server[1].poll() is not None:
        ours, theirs = socket.socketpair()
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.processes", str(theirs.fileno())],
            cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, pass_fds=[theirs.fileno()],
        )  # fmt: skip
        theirs.close()
        _server = os.getpid(), process, ours
    return _server[1:]


def _forked(command: list[str], env: Mapping[str, str], timeout: float) -> subprocess.CompletedProcess[str]:
    process, connection = _connected()
    with open(os.devnull, "rb") as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        request = json.dumps({"command": command, "env": dict(env)}).encode()
        streams = array.array("i", [given.fileno(), out.fileno(), errors.fileno()])
        connection.sendmsg([len(request).to_bytes(8, "little")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
        connection.sendall(request)
        connection.settimeout(timeout)
        try:
            answer = connection.recv(64)
        except TimeoutError:
            process.kill()
            end()
            raise subprocess.TimeoutExpired(command, timeout) from None
        assert answer, "the process that is forked has ended"
        found = []
        for stream in (out, errors):
            stream.seek(0)
            found.append(stream.read().decode(errors="backslashreplace"))
    return subprocess.CompletedProcess([sys.executable, *command], int(answer), *found)


def end() -> None:
    """End the process that is forked, if there is one; the next program starts another."""
    global _server
    if _server is not None and _server[0] == os.getpid():
        _server[2].close()
        _server[1].wait()
    _server = None


# -- the process that is forked


def _serve(number: int) -> None:
    """Fork for each request, until the other end is closed."""
    import torch  # noqa: F401

    import lazyckpt

    for name in lazyckpt.__all__:
        getattr(lazyckpt, name)
    gc.collect()
    gc.freeze()  # a collection in a fork neither looks at what is imported nor copies its memory
    connection = socket.socket(fileno=number)
    while True:
        size, given, *_ = connection.recvmsg(8, socket.CMSG_SPACE(3 * array.array("i").itemsize))
        if not size:
            return
        streams = array.array("i", given[0][2])
        request = json.loads(_exactly(connection, int.from_bytes(size, "little")))
        child = os.fork()
        if child == 0:
            connection.close()
            for target, stream in enumerate(streams):
                os.dup2(stream, target)
                os.close(stream)
            _exit(_status(request))
        for stream in streams:
            os.close(stream)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        connection.sendall(str(status).encode())


def _exactly(connection: socket.socket, size: int) -> bytes:
    parts = b""
    while len(parts) < size:
        parts += connection.recv(size - len(parts))
    return parts


def _status(request: dict[str, Any]) -> int:
    """Run a program as ``python -c`` and ``python -m`` do: its exit status."""
    try:
        _program(*request["command"], env=request["env"])
    except SystemExit as e:
        if isinstance(e.code, str):
            print(e.code, file=sys.stderr)
        return e.code if isinstance(e.code, int) else int(e.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _program(kind: str, what: str, *arguments: str, env: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(env)
    sys.argv = [kind, *arguments]
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(what, "<string>", "exec"), main.__dict__)


def _exit(status: int) -> None:
    """End at once, with all threads: taking the imported modules down would copy their memory, which takes time."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
