"""Files that run code when they are loaded the usual way, one for each technique and container, for tests of the scan.

All of them only make a marker: an empty file or folder. `LIVE` pickles make it when ``pickle.loads`` reads them, which
`test_scan` proves. ``tools/compare_scanners.py`` gives the same files to other scanners.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import marshal
import os
import pickle
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from .handmade import call, dict_of, list_of, named, number, program, raw_bytes, text, tuple_of
from .test_pickles_malicious import LIVE as NAMED
from .test_pickles_malicious import pickled, stack, touch, words

Payload = Callable[[Path], bytes]


def code_of(marker: Path) -> str:
    return f"open({str(marker)!r}, 'w').close()"


def expression(marker: Path) -> bytes:
    return text(f"__import__('os').system('touch {marker}')")


def system(marker: Path) -> bytes:
    return call(named("os", "system"), touch(marker))


def exploit(marker: Path, protocol: int = 2) -> bytes:
    return program(system(marker), protocol)


def _function(m: Path) -> bytes:
    code = marshal.dumps(compile(code_of(m), "x", "exec"))
    return call(call(named("types", "FunctionType"), call(named("marshal", "loads"), raw_bytes(code)), b"}"))


def _configured(m: Path) -> bytes:
    factory = dict_of(text("()"), text("os.mkdir"), text("path"), text(str(m)))
    return call(
        named("logging.config", "dictConfig"),
        dict_of(text("version"), number(1), text("formatters"), dict_of(text("f"), factory)),
    )


def _self_and(module: str, cls: str, method: str, *args: bytes) -> bytes:
    return call(stack(module, f"{cls}.{method}"), call(named(module, cls)), *args)


# name -> the body of a pickle that makes the marker when it is loaded
MORE: dict[str, Payload] = {
    "map": lambda m: call(
        named("builtins", "list"), call(named("builtins", "map"), named("os", "system"), list_of(touch(m)))
    ),
    "filter": lambda m: call(
        named("builtins", "list"), call(named("builtins", "filter"), named("os", "system"), list_of(touch(m)))
    ),
    "functools.reduce": lambda m: call(
        named("functools", "reduce"), named("os", "popen"), list_of(text("r")), touch(m)
    ),
    "itertools.starmap": lambda m: call(
        named("builtins", "list"),
        call(named("itertools", "starmap"), named("os", "system"), list_of(tuple_of(touch(m)))),
    ),
    "torch.storage._load_from_bytes": lambda m: call(
        named("torch.storage", "_load_from_bytes"), raw_bytes(_legacy(exploit(m)))
    ),
    "logging.config": _configured,
    "numpy.f2py": lambda m: call(named("numpy.f2py.crackfortran", "getlincoef"), expression(m), b"}"),
    "numpy.ndarray.tofile": lambda m: call(
        stack("numpy", "ndarray.tofile"), call(named("numpy", "array"), list_of(number(1))), text(str(m))
    ),
    "numpy.memmap": lambda m: call(
        named("numpy", "memmap"), text(str(m)), text("uint8"), text("w+"), number(0), number(1)
    ),
    "torch.save": lambda m: call(named("torch", "save"), number(1), text(str(m))),
    "torch file writer": lambda m: call(named("torch._C", "PyTorchFileWriter"), text(str(m))),
    "torch.jit execWrapper": lambda m: call(
        named("torch.jit.unsupported_tensor_ops", "execWrapper"), text(code_of(m)), b"}", b"}"
    ),
    "torch.utils.collect_env": lambda m: call(named("torch.utils.collect_env", "run"), touch(m)),
    "torch decoder": lambda m: call(
        named("torch.utils.data.datapipes.utils.decoder", "basichandlers"), text("pickle"), raw_bytes(exploit(m))
    ),
    "pydoc.pipepager": lambda m: call(named("pydoc", "pipepager"), text("x"), touch(m)),
    "bdb": lambda m: _self_and("bdb", "Bdb", "run", text(code_of(m))),
    "code": lambda m: _self_and("code", "InteractiveInterpreter", "runsource", text(code_of(m))),
    "profile": lambda m: call(named("profile", "run"), text(code_of(m)), number(-1)),
    "trace": lambda m: call(
        stack("trace", "Trace.run"), call(named("trace", "Trace"), number(0), number(0)), text(code_of(m))
    ),
    "types and marshal": _function,
    "uuid": lambda m: call(named("uuid", "_get_command_stdout"), text("touch"), text(str(m))),
    "_osx_support": lambda m: call(named("_osx_support", "_read_output"), touch(m)),
    "multiprocessing": lambda m: call(
        named("multiprocessing.util", "spawnv_passfds"),
        raw_bytes(b"/usr/bin/touch"),
        list_of(text("touch"), text(str(m))),
        list_of(),
    ),
    "asyncio": lambda m: call(named("asyncio", "run"), call(named("asyncio", "create_subprocess_shell"), touch(m))),
    "ctypes": lambda m: call(
        call(named("builtins", "getattr"), call(named("ctypes", "CDLL"), b"N"), text("system")),
        raw_bytes(f"touch {m}".encode()),
    ),
    "pkgutil": lambda m: call(call(named("pkgutil", "resolve_name"), text("os:system")), touch(m)),
    "sympy": lambda m: call(named("sympy", "sympify"), expression(m)),
    "yaml": lambda m: call(named("yaml", "unsafe_load"), text(f"!!python/object/apply:os.system ['touch {m}']")),
    "webbrowser": lambda m: call(
        stack("webbrowser", "BackgroundBrowser.open"),
        call(named("webbrowser", "BackgroundBrowser"), text("touch")),
        text(str(m)),
    ),
    "script_helper": lambda m: call(
        named("test.support.script_helper", "assert_python_ok"), text("-c"), text(code_of(m))
    ),
    "extension code": lambda m: (
        call(named("copyreg", "add_extension"), text("os"), text("system"), number(5))
        + b"0"
        + b"\x82\x05"
        + tuple_of(touch(m))
        + b"R"
    ),
    "computed name": lambda m: call(call(named("builtins", "str"), text("os")) + text("system") + b"\x93", touch(m)),
    "computed in the memo": lambda m: (
        call(named("builtins", "str"), text("posix")) + b"q\x010" + call(b"h\x01" + text("system") + b"\x93", touch(m))
    ),
    "Python 2's commands": lambda m: call(named("commands", "getoutput"), touch(m)),
    "_posixsubprocess": lambda m: call(
        stack("subprocess", "Popen.__init__"),
        call(stack("subprocess", "Popen.__new__"), named("subprocess", "Popen")),
        words(m),
    ),
    "a traversed sys.modules": lambda m: call(
        call(named("builtins", "getattr"), call(stack("collections", "_sys.modules.get"), text("os")), text("system")),
        touch(m),
    ),
    "a traversed module": lambda m: call(stack("torch", "serialization.os.system"), touch(m)),
    "special attributes": lambda m: call(
        call(stack("argparse", "Namespace.__init__.__builtins__.get"), text("eval")), expression(m)
    ),
    "attributes of a value": lambda m: call(
        call(
            call(
                named("builtins", "getattr"),
                call(
                    named("builtins", "getattr"),
                    call(named("builtins", "getattr"), call(named("argparse", "Namespace")), text("__init__")),
                    text("__builtins__"),
                ),
                text("get"),
            ),
            text("eval"),
        ),
        expression(m),
    ),
    "lambdify": lambda m: call(named("sympy", "lambdify"), text("x"), expression(m)) + b"0" + system(m),
    "a second protocol": lambda m: b"\x80\x04" + system(m),
    "damaged behind the call": lambda m: system(m) + b"0\xff\xff",
    "cut off behind the call": lambda m: system(m) + b"0X\xff\0\0\0ab",
    "an argument that is not a number": lambda m: b"I0x10\n0" + system(m),
    "a frame that is too long": lambda m: b"\x95\x04\0\0\0\0\0\0\0" + system(m),
    "many marks": lambda m: b"(" * 50 + system(m),
    "a class of its own": lambda m: (
        call(
            named("builtins", "type"),
            text("X"),
            tuple_of(named("builtins", "object")),
            dict_of(text("run"), named("os", "system")),
        )
        + b"0"
        + system(m)
    ),
    "dead reduce": lambda m: system(m) + b"0" + dict_of(text("w"), number(1)),
    "as a default factory": lambda m: call(
        stack("collections", "defaultdict.__missing__"),
        call(named("collections", "defaultdict"), call(named("functools", "partial"), named("os", "system"), touch(m))),
        number(1),
    ),
}
# what need not be installed where the test runs
OPTIONAL = {"sympy": "sympy", "yaml": "yaml", "script_helper": "test.support", "torch decoder": "torch"}


def live() -> dict[str, Callable[[Path], bytes]]:
    """Return all pickles that make the marker when they are loaded, by name."""
    found: dict[str, Callable[[Path], bytes]] = {
        name: (lambda m, name=name: pickled(name, m)) for name in NAMED if name != "the code of a module"
    }
    for name, body in MORE.items():
        found[name] = lambda m, body=body: program(body(m), 4 if b"\x93" in body(m) else 2)
    return found


def _legacy(main: bytes) -> bytes:
    """Return a legacy torch file around a pickle."""
    magic = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
    system_info = {"protocol_version": 1001, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}
    return magic + pickle.dumps(1001, 2) + pickle.dumps(system_info, 2) + main + pickle.dumps([], 2)


def torch_zip(main: bytes, folder: str = "archive", method: int = zipfile.ZIP_STORED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        archive.writestr(f"{folder}/data.pkl", main)
        archive.writestr(f"{folder}/version", b"3\n")
        archive.writestr(f"{folder}/data/0", b"\0" * 16)
    return out.getvalue()


def _zip(members: dict[str, bytes | str]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return out.getvalue()


def _tar(members: dict[str, bytes], mode: str = "w") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as archive:  # type: ignore[call-overload]
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def _npy(m: Path) -> bytes:
    out = io.BytesIO()
    np.save(out, np.array([None], object), allow_pickle=True)
    data = out.getvalue()
    return data[: data.index(b"\n") + 1] + exploit(m)


def _held(value: bytes) -> bytes:
    """Return a pickle of bytes in an io.BytesIO, as get_extra_state returns them."""
    return program(named("_io", "BytesIO") + b")\x81" + tuple_of(raw_bytes(value), number(0), b"N") + b"b")


def _latin(value: bytes) -> bytes:
    return program(call(named("_codecs", "encode"), text(value.decode("latin1")), text("latin1")))


def _patched(data: bytes, at: int, patch: bytes) -> bytes:
    return data[:at] + patch + data[at + len(patch) :]


def _flagged(m: Path) -> bytes:
    """Return a zip whose directory says that its records are encrypted; torch does not look at that."""
    data = torch_zip(exploit(m))
    at = data.index(b"PK\x01\x02")
    return _patched(data, at + 8, struct.pack("<H", 1))


def _wrong_crc(m: Path) -> bytes:
    data = torch_zip(exploit(m))
    data = _patched(data, data.index(b"PK\x01\x02") + 16, b"\1\2\3\4")
    return _patched(data, 14, b"\1\2\3\4")


def _two_names(m: Path) -> bytes:
    """Return a zip whose record has another name in its own header than in the directory."""
    return torch_zip(exploit(m)).replace(b"archive/data.pkl", b"archive/data.txt", 1)


def _unlisted(m: Path) -> bytes:
    """Return a zip with a record in front that its directory does not name."""
    hidden = torch_zip(exploit(m))
    hidden = hidden[: hidden.index(b"PK\x03\x04", 4)]
    return hidden + torch_zip(pickle.dumps({"w": 1}, 2))


# name -> (name of the file, its bytes): each makes the marker if a program loads the pickle in it
FILES: dict[str, tuple[str, Payload]] = {
    "torch zip": ("model.pt", lambda m: torch_zip(exploit(m))),
    "torch zip, deflated": ("model.pt", lambda m: torch_zip(exploit(m), method=zipfile.ZIP_DEFLATED)),
    "zip in a zip": ("bundle.zip", lambda m: _zip({"a/model.pt": torch_zip(exploit(m))})),
    "zip in a zip in a zip": ("bundle.bin", lambda m: _zip({"x": _zip({"y": torch_zip(exploit(m))})})),
    "legacy torch file": ("model.pth", lambda m: _legacy(exploit(m))),
    "last pickle of a legacy file": ("model.pth", lambda m: _legacy(pickle.dumps({}, 2))[:-4] + exploit(m)),
    "tar of torch 0.1": ("model.pt", lambda m: _tar({"storages": pickle.dumps(0, 2), "pickle": exploit(m)})),
    "tar.gz": ("model.tar.gz", lambda m: _tar({"model.bin": torch_zip(exploit(m))}, "w:gz")),
    "distcp": (
        "__0_0.distcp",
        lambda m: torch_zip(pickle.dumps(1, 2)) + torch_zip(exploit(m)) + torch_zip(pickle.dumps(2, 2)),
    ),
    "distcp behind raw bytes": (
        "__0_1.distcp",
        lambda m: b"\0" * 999 + torch_zip(exploit(m)) + torch_zip(pickle.dumps(2, 2)),
    ),
    ".metadata of DCP": (".metadata", lambda m: exploit(m, 4)),
    "bare pickle": ("data.pkl", exploit),
    "pickle without an ending": ("optimizer", exploit),
    "protocol 0": ("optim.ckpt", lambda m: pickle.dumps(_Exploit(m), 0)),
    "npy": ("array.npy", _npy),
    "npz": ("arrays.npz", lambda m: _zip({"a.npy": _npy(m)})),
    "gzip": ("model.pkl.gz", lambda m: gzip.compress(exploit(m))),
    "bzip2": ("model.pkl.bz2", lambda m: bz2.compress(exploit(m))),
    "xz": ("model.pkl.xz", lambda m: lzma.compress(exploit(m))),
    "joblib, zlib": ("model.joblib", lambda m: zlib.compress(exploit(m))),
    "joblib, behind raw numbers": (
        "model.joblib",
        lambda m: program(dict_of(text("x"), number(1)))[:-1] + b"0\xfe" * 40 + system(m) + b".",
    ),
    "safetensors by name": ("model.safetensors", exploit),
    "json by name": ("config.json", exploit),
    "text by name": ("notes.txt", lambda m: pickle.dumps(_Exploit(m), 0)),
    "python by name": ("model.py", exploit),
    "bytes in BytesIO": ("state.pt", lambda m: torch_zip(_held(exploit(m)))),
    "zip in BytesIO": ("state.pt", lambda m: torch_zip(_held(torch_zip(exploit(m))))),
    "bytes as a text": ("state.pkl", lambda m: _latin(exploit(m))),
    "bytearray": ("state.pkl", lambda m: pickle.dumps({"x": bytearray(exploit(m))}, 5)),
    "second pickle": ("state.pkl", lambda m: pickle.dumps({"w": 1}, 2) + exploit(m)),
    "behind data.pkl": ("state.pt", lambda m: torch_zip(pickle.dumps({"w": 1}, 2) + exploit(m))),
    "pickle and zip": ("state.bin", lambda m: exploit(m) + torch_zip(pickle.dumps({"w": 1}, 2))),
    "zip with flags": ("model.pt", _flagged),
    "zip with wrong checksums": ("model.pt", _wrong_crc),
    "zip with two names": ("model.pt", _two_names),
    "zip with an unlisted record": ("model.pt", _unlisted),
    "Lightning": (
        "epoch=1.ckpt",
        lambda m: torch_zip(program(dict_of(text("hyper_parameters"), dict_of(text("x"), system(m))))),
    ),
    "hidden folder": (".cache/deep/er/rng_state_3.pth", lambda m: torch_zip(exploit(m))),
}


class _Exploit:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


_LAMBDA = {
    "class_name": "Sequential",
    "config": {"layers": [{"class_name": "Lambda", "config": {"function": ["4wEA"]}}]},
}
_ELF = b"\x7fELF\x02\x01\x01" + b"\0" * 200
_PE = b"MZ" + b"\0" * 58 + struct.pack("<I", 64) + b"PE\0\0" + b"\0" * 100

# name -> (files, the code of the finding): code outside of pickles, and what exhausts memory
OTHERS: dict[str, tuple[dict[str, bytes | str], str]] = {
    "Keras Lambda": ({"config.json": json.dumps(_LAMBDA)}, "shipped-code"),
    "Keras Lambda in .keras": (
        {"model.keras": _zip({"config.json": json.dumps(_LAMBDA), "metadata.json": "{}"})},
        "shipped-code",
    ),
    "Keras Lambda in HDF5": (
        {"model.h5": b"\x89HDF\r\n\x1a\n" + b"\0" * 99 + json.dumps(_LAMBDA).encode()},
        "shipped-code",
    ),
    "Keras function": (
        {"config.json": json.dumps({"class_name": "function", "module": "os", "config": "system"})},
        "shipped-code",
    ),
    "TorchScript": (
        {"model.pt": _zip({"m/data.pkl": pickle.dumps(1), "m/constants.pkl": pickle.dumps(()), "m/code/a.py": "x"})},
        "shipped-code",
    ),
    "torch.package": ({"model.pt": _zip({"m/.data/extern_modules": "", "m/code.py": "x"})}, "shipped-code"),
    "torch.export": ({"model.pt2": _zip({"m/archive_format": "pt2", "m/data/aotinductor/a.so": _ELF})}, "shipped-code"),
    "auto_map": (
        {"config.json": json.dumps({"auto_map": {"AutoModel": "modeling_x.X"}}), "modeling_x.py": "1"},
        "shipped-code",
    ),
    "chat template": (
        {"tokenizer_config.json": json.dumps({"chat_template": "{{ ''.__class__.__mro__ }}"})},
        "shipped-code",
    ),
    "ELF": ({"weights.bin": _ELF}, "shipped-code"),
    "Mach-O": ({"lib": b"\xcf\xfa\xed\xfe" + b"\0" * 99}, "shipped-code"),
    "PE": ({"setup.dat": _PE}, "shipped-code"),
    "shebang": ({"run": "#!/bin/sh\ntrue\n"}, "shipped-code"),
    "path file": ({"x.pth": "import os; os.getpid()\n"}, "shipped-code"),
    "7z": ({"model.7z": b"7z\xbc\xaf\x27\x1c" + b"\0" * 99}, "not-examined"),
    "bytearray bomb": ({"a.pkl": program(call(named("builtins", "bytearray"), number(1 << 40)))}, "pickle-bomb"),
    "range bomb": (
        {"a.pkl": program(call(named("builtins", "list"), call(named("builtins", "range"), number(1 << 40))))},
        "pickle-bomb",
    ),
    "memo bomb": ({"a.pkl": program(b"Nr\xff\xff\xff\x7f")}, "pickle-bomb"),
    "persistent id": ({"a.pkl": program(text("module:os") + b"Q")}, "dangerous-pickle"),
    "extension code alone": ({"a.pkl": program(b"\x82\x05)R")}, "dangerous-pickle"),
    "unknown call": ({"a.pkl": program(call(named("mymodule", "build"), number(1)))}, "unknown-global"),
    "tar member outside": ({"a.tar": _tar({"../../x.txt": b"1"})}, "outside-link"),
}
