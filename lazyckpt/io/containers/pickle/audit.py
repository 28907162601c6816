"""Warnings about names in a pickle that could do harm if the file were unpickled the usual way.

lazyckpt runs none of them. Names of the standard library, torch and numpy pass only if they are known to be harmless;
unknown packages (the classes of a training script) pass, except for functions whose name says that they run, load or
look up something. A dotted name is judged by its target: ``logging`` with ``os.system`` is ``os.system``.

The judgement does not depend on the Python that runs: the names of its standard library are those of all versions.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterable
from functools import lru_cache

from ....errors import Problem
from .rebuild import REBUILD

_ALL = frozenset({"*"})
_SHORT = 256  # characters of names whose judgement is kept
_HARMLESS: dict[str, frozenset[str]] = {
    **dict.fromkeys(
        (
            "collections", "collections.abc", "_collections_abc", "enum", "datetime", "_datetime", "decimal",
            "fractions", "typing", "itertools", "ipaddress", "string", "zoneinfo",
            "numbers", "math", "cmath", "calendar", "pathlib", "pathlib._local",
        ),
        _ALL,
    ),
    **dict.fromkeys(
        ("builtins", "__builtin__"),
        frozenset(n for n, v in vars(builtins).items() if isinstance(v, type))
        | {
            "long", "unicode", "xrange", "basestring", "Ellipsis", "NotImplemented", "NoneType", "len", "max", "min",
            "sum", "abs", "sorted", "print", "any", "all", "round", "id", "hash", "iter", "next", "callable",
            "chr", "ord", "divmod", "pow", "format", "isinstance", "issubclass", "hex", "bin", "oct",
        },
    ),
    "argparse": frozenset({"Namespace"}),
    "dataclasses": frozenset(
        {
            "Field", "FrozenInstanceError", "InitVar", "KW_ONLY", "MISSING", "asdict", "astuple", "dataclass", "field",
            "replace", "_DataclassParams", "_FIELD", "_FIELD_BASE", "_FIELD_CLASSVAR", "_FIELD_INITVAR",
            "_HAS_DEFAULT_FACTORY_CLASS", "_KW_ONLY_TYPE", "_MISSING_TYPE",
        }
    ),
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
# Modules that only some versions of Python have.
_SOME_VERSIONS = {
    "__builtin__", "commands", "httplib", "urllib2", "urlparse", "cPickle", "copy_reg", "popen2", "imp",
    "StringIO", "cStringIO", "Queue", "thread", "dummy_thread", "HTMLParser", "ConfigParser", "SocketServer",
    "BaseHTTPServer", "SimpleHTTPServer", "CGIHTTPServer", "xmlrpclib", "repr", "anydbm", "dbhash", "telnetlib",
    "nntplib", "distutils", "lib2to3", "asyncore", "asynchat", "smtpd", "binhex",
    "macpath", "macurl2path", "dummy_threading", "aifc", "audioop", "cgi", "cgitb", "crypt", "imghdr",
    "mailcap", "msilib", "nis", "ossaudiodev", "pipes", "sndhdr", "spwd", "sunau", "uu", "xdrlib", "_crypt",
    "_msi", "idlelib", "turtledemo", "test", "_testcapi", "_pyrepl", "_android_support", "_apple_support",
    "_ios_support", "_colorize", "_opcode_metadata", "_sysconfig", "_interpreters", "_interpqueues",
    "_interpchannels", "_xxsubinterpreters", "_suggestions", "_typing", "_aix_support", "_osx_support", "_winapi",
    "winreg", "_winreg", "msvcrt", "nt", "ntpath", "winsound", "_overlapped", "annotationlib",
    "_zstd", "_remote_debugging",
}  # fmt: skip
_STANDARD = sys.stdlib_module_names | _SOME_VERSIONS
# Packages whose purpose is to run, download or unpickle things.
_TOOLS = {
    "aiohttp", "requests", "httpx", "urllib3", "paramiko", "fabric", "sh", "plumbum", "pexpect", "dill", "cloudpickle",
    "joblib", "jsonpickle", "pip", "setuptools", "fsspec", "boto3", "IPython", "nbconvert", "nbclient",
}  # fmt: skip
# Functions of any package that run, load or look up something, by their names without leading underscores.
_RUNS = {
    "eval", "exec", "execfile", "system", "popen", "spawn", "check_call", "check_output", "getoutput", "run_cell",
    "import_module", "import_string", "load_module", "load", "loads", "load_all", "full_load", "unsafe_load",
    "unsafe_load_all", "read_pickle", "unpickle", "sympify", "parse_expr", "getattr", "resolve_name", "run_code",
}  # fmt: skip
# Modules of the standard library that a dotted name must not pass through.
_REACHED = {
    "os", "sys", "subprocess", "builtins", "posix", "nt", "shutil", "socket", "importlib", "runpy", "ctypes", "pickle",
    "multiprocessing", "pty", "codecs", "io", "tempfile", "asyncio", "urllib", "http", "hub", "f2py", "cpp_extension",
}  # fmt: skip
# What checkpoints name of torch and numpy: functions (layers store their activation) by their modules or by the start
# of their full names, classes by their modules.
_FUNCTION_MODULES = {
    "torch.nn.functional", "torch._C._nn", "torch.nn.init", "numpy.core.multiarray", "numpy._core.multiarray",
    "numpy.random._pickle",
}  # fmt: skip
_FUNCTIONS = (
    "torch._utils._rebuild", "torch._tensor._rebuild", "torch.serialization._get_layout",
    "torch.distributed.remote_device._remote_device", "torch.nn.parameter._rebuild",
    "torch.nested._internal.nested_tensor._rebuild", "numpy.core.numeric._frombuffer",
    "numpy._core.numeric._frombuffer", "numpy.random.bit_generator.__pyx_unpickle", "numpy.ma.core._mareconstruct",
    "numpy.core.records.rec", "numpy.rec.rec",
)  # fmt: skip
_CLASSES = (
    "torch.nn", "torch.optim", "torch.storage", "torch._tensor", "torch._utils", "torch._C", "torch.amp",
    "torch.cuda.amp", "torch.cpu.amp", "torch.random", "torch.types", "torch.version", "torch.torch_version",
    "torch.utils.hooks", "torch.utils.data.sampler", "torch.utils.data.distributed", "torch.utils.data.dataset",
    "torch.utils.data._utils", "torch.utils.data.dataloader", "torch.utils.checkpoint", "torch.utils._pytree",
    "torch.utils._python_dispatch", "torch._dynamo.decorators", "torch.ao", "torch.quantization",
    "torch.distributions", "torch.nested",
    "torch.sparse", "torch.masked", "torch.cuda", "torch.serialization", "torch.return_types", "torch.functional",
    "torch.distributed.checkpoint", "torch.distributed.tensor", "torch.distributed._tensor",
    "torch.distributed.device_mesh", "torch.distributed._mesh_layout", "torch.distributed._shard",
    "torch.distributed.fsdp", "torch.distributed._composable", "torch.distributed.remote_device",
    "torch.distributed.algorithms", "torch.distributed.optim", "torch.distributed.distributed_c10d",
    "torch.distributed.pipelining", "torch._subclasses", "torch.testing._internal.two_tensor",
    "numpy.core", "numpy._core", "numpy.random", "numpy.ma", "numpy.dtypes", "numpy.matrixlib", "numpy.rec",
    "numpy.lib.mixins", "numpy.polynomial",
)  # fmt: skip
_NO_CHECKPOINT = (
    "torch.load", "torch.save", "torch.hub", "torch.jit", "torch.package", "torch.compile", "torch._inductor",
    "torch.utils.cpp_extension", "torch.ops", "torch.classes", "torch.from_file", "torch.import_ir", "torch.library",
    "numpy.load", "numpy.save", "numpy.memmap", "numpy.from", "numpy.genfromtxt", "numpy.core.multiarray.from",
    "numpy._core.multiarray.from", "numpy.DataSource", "numpy.f2py", "numpy.testing", "numpy.distutils",
    "numpy.core.memmap", "numpy._core.memmap", "torch.distributed.checkpoint.examples",
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
        if dangerous(module, name)
    ]


def dangerous(module: str, name: str) -> bool:
    """Return whether a name deserves a warning."""
    if (module, name) in REBUILD:
        return False
    return _judged(module, name) if len(module) + len(name) < _SHORT else _judged.__wrapped__(module, name)


@lru_cache(1024)  # most files name the same few classes
def _judged(module: str, name: str) -> bool:
    root = module.split(".")[0]
    *path, last = name.split(".")
    if root in _STANDARD:
        harmless = _HARMLESS.get(module, frozenset())
        if harmless is _ALL:  # except dotted names that pass through the module, and functions that are not public
            return bool(path) or (last.startswith("_") and _is_function(last)) or last == "get_type_hints"
        return (path[0] if path else last) not in harmless
    if root in _TOOLS or not _REACHED.isdisjoint(path) or any(map(_is_function, path)):
        return True
    if root in ("torch", "numpy"):
        full = f"{module}.{name}"
        if full.startswith(_NO_CHECKPOINT) or last == "memmap":
            return True
        if _is_function(last):
            return bool(path) or not (module in _FUNCTION_MODULES or module == root or full.startswith(_FUNCTIONS))
        return module != root and not any(module == one or module.startswith(f"{one}.") for one in _CLASSES)
    return last.strip("_") in _RUNS


def _is_function(name: str) -> bool:
    """Return whether a name is that of a function or module by the usual style: in lower case."""
    return name.lstrip("_")[:1].islower()
