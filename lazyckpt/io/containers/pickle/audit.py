"""Warnings about names in a pickle that could do harm if the file were unpickled the usual way.

lazyckpt runs none of them. Names of the standard library pass only if they are known to be harmless, functions of torch
and numpy only if checkpoints are known to name them; unknown packages (the classes of a training script) pass. A dotted
name is judged by its target: ``logging`` with ``os.system`` is ``os.system``.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterable

from ....errors import Problem
from .rebuild import REBUILD

_ALL = frozenset({"*"})
_HARMLESS: dict[str, frozenset[str]] = {
    **dict.fromkeys(
        (
            "collections", "collections.abc", "_collections_abc", "enum", "datetime", "_datetime", "decimal",
            "fractions", "typing", "itertools", "dataclasses", "ipaddress", "string", "zoneinfo",
            "numbers", "math", "cmath", "calendar", "pathlib", "pathlib._local",
        ),
        _ALL,
    ),
    **dict.fromkeys(
        ("builtins", "__builtin__"),
        frozenset(n for n, v in vars(builtins).items() if isinstance(v, type))
        | {
            "long", "unicode", "xrange", "basestring", "Ellipsis", "NotImplemented", "NoneType", "len", "max", "min",
            "sum", "abs", "sorted", "print", "any", "all", "round", "repr", "id", "hash", "iter", "next", "callable",
            "chr", "ord", "divmod", "pow", "format", "isinstance", "issubclass", "hex", "bin", "oct",
        },
    ),
    "argparse": frozenset({"Namespace"}),
    "types": frozenset(
        {"SimpleNamespace", "GenericAlias", "MappingProxyType", "NoneType", "UnionType", "EllipsisType"}
    ),
    "functools": frozenset({"partial", "partialmethod", "cached_property"}),
    "signal": frozenset({"Signals", "Handlers", "Sigmasks"}),
    "random": frozenset({"Random"}),
    "_random": frozenset({"Random"}),
    "re": frozenset({"_compile", "compile", "RegexFlag", "Pattern"}),
    "array": frozenset({"array", "_array_reconstructor"}),
    "copyreg": frozenset({"_reconstructor", "__newobj__", "__newobj_ex__"}),
    "copy_reg": frozenset({"_reconstructor", "__newobj__", "__newobj_ex__"}),
    "_codecs": frozenset({"encode"}),
    "operator": frozenset({"getitem", "or_", "itemgetter"}),
    "_operator": frozenset({"getitem", "or_", "itemgetter"}),
    "uuid": frozenset({"UUID", "SafeUUID"}),
    "time": frozenset({"struct_time"}),
    "logging": frozenset({"getLogger", "Logger", "RootLogger", "root"}),
    "http": frozenset({"HTTPStatus"}),
    "io": frozenset({"BytesIO", "StringIO"}),  # returned by get_extra_state of TransformerEngine's modules
    "_io": frozenset({"BytesIO", "StringIO"}),
    "weakref": frozenset({"WeakSet", "WeakKeyDictionary", "WeakValueDictionary", "ref"}),
}  # fmt: skip
_PYTHON_2 = {
    "__builtin__", "commands", "httplib", "urllib2", "urlparse", "cPickle", "copy_reg", "popen2", "imp", "StringIO",
    "cStringIO", "Queue", "thread", "telnetlib", "nntplib", "distutils", "lib2to3", "asyncore", "smtpd",
}  # fmt: skip
_STANDARD = sys.stdlib_module_names | _PYTHON_2
# Packages whose purpose is to run, download or unpickle things.
_TOOLS = {
    "aiohttp", "requests", "httpx", "urllib3", "paramiko", "fabric", "sh", "plumbum", "pexpect", "dill", "cloudpickle",
    "joblib", "jsonpickle", "pip", "setuptools", "fsspec", "boto3",
}  # fmt: skip
# Modules of the standard library that a dotted name must not pass through.
_REACHED = {
    "os", "sys", "subprocess", "builtins", "posix", "nt", "shutil", "socket", "importlib", "runpy", "ctypes", "pickle",
    "multiprocessing", "pty", "codecs", "io", "tempfile", "asyncio", "urllib", "http", "hub", "f2py", "cpp_extension",
}  # fmt: skip
# Functions of torch and numpy that checkpoints legitimately name (layers store their activation), and names that no
# checkpoint needs.
_FUNCTIONS = (
    "torch._utils._rebuild", "torch._tensor._rebuild", "torch.nn.functional.", "torch._C._nn.", "torch.nn.init.",
    "torch.storage._load_from_bytes", "torch.distributed.", "numpy.core.", "numpy._core.", "numpy.random.",
)  # fmt: skip
_NO_CHECKPOINT = (
    "torch.load", "torch.save", "torch.hub", "torch.jit", "torch.package", "torch.compile", "torch._inductor",
    "torch.utils.cpp_extension", "numpy.load", "numpy.save", "numpy.memmap", "numpy.from", "numpy.genfromtxt",
    "numpy.DataSource", "numpy.f2py", "numpy.testing", "numpy.lib.", "numpy.distutils",
)  # fmt: skip


def dangers(named: Iterable[tuple[str, str]], loading: str = "torch.load this file") -> list[Problem]:
    """Return a problem for each (module, name) in a pickle that deserves a warning. ``loading`` describes the action
    that would run it."""
    return [
        Problem(
            "unsafe-pickle",
            f"its pickle names {module}.{name}, which no checkpoint needs: nothing was run, but do not {loading}",
        )
        for module, name in named
        if _dangerous(module, name)
    ]


def _dangerous(module: str, name: str) -> bool:
    if (module, name) in REBUILD:
        return False
    full = f"{module}.{name}"
    root = module.split(".")[0]
    *path, last = name.split(".")
    if root in _STANDARD:
        harmless = _HARMLESS.get(module, frozenset())
        if harmless is _ALL:  # except dotted names that pass through the module
            return bool(path)
        return (path[0] if path else last) not in harmless
    if root in _TOOLS or not _REACHED.isdisjoint(path):
        return True
    if root in ("torch", "numpy") and not full.startswith(_FUNCTIONS):
        function = last.lstrip("_")[:1].islower()
        return full.startswith(_NO_CHECKPOINT) or (function and (module != root or bool(path)))
    return False
