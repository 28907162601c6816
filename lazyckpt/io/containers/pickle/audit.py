"""The judgement of the names in a pickle: what would they do if the file were unpickled the usual way?

lazyckpt runs none of them. `judge` puts a name into one of five grades; `view.problems` has the dangerous ones, and
`lazyckpt.scan` also has the unknown ones. Names of the standard library, torch and numpy that are not known to be
harmless are dangerous. Of other packages, functions whose names say that they run, load or look up something are
dangerous, and what is not known as a class of a framework is unknown. A dotted name is judged by its target:
``logging`` with ``os.system`` is ``os.system``.

The judgement does not depend on the Python that runs: the names of its standard library are those of all versions.
"""

from __future__ import annotations

import builtins
import re
import sys
from collections.abc import Iterable
from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias

from ....core.units import human_bytes
from ....errors import Problem, printable
from ...limits import CALLED, short_number
from .rebuild import REBUILD
from .techniques import BOMB, EXTENSION, PERSISTENT, framework, technique

Grade: TypeAlias = Literal["torch", "plain", "framework", "unknown", "dangerous"]
GRADES: tuple[Grade, ...] = ("dangerous", "unknown", "framework", "plain", "torch")  # the worst first
_MEMO = 1 << 20  # entries of a memo past the length of the pickle

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
        frozenset(n for n, v in vars(builtins).items() if isinstance(v, type) and n[0] != "_")
        - {"map", "filter", "super"}
        | {
            "long", "unicode", "xrange", "basestring", "Ellipsis", "NotImplemented", "NoneType", "len", "max", "min",
            "sum", "abs", "sorted", "print", "any", "all", "round", "id", "hash", "iter", "next", "callable",
            "chr", "ord", "divmod", "pow", "format", "isinstance", "issubclass", "hex", "bin", "oct",
        },
    ),
    "argparse": frozenset({"Namespace"}),
    "dataclasses": frozenset(
        {
            "Field", "FrozenInstanceError", "InitVar", "KW_ONLY", "MISSING", "field", "_DataclassParams",
            "_FIELD", "_FIELD_BASE", "_FIELD_CLASSVAR", "_FIELD_INITVAR",
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
# Functions and classes with lower-case names of the modules that are harmless as a whole. Their other such names are
# modules and functions that they import, such as ``pathlib.os``.
_DATES = frozenset({"datetime", "date", "time", "timedelta", "timezone", "tzinfo"})
_LOWER: dict[str, frozenset[str]] = {
    "math": _ALL, "cmath": _ALL, "datetime": _DATES, "_datetime": _DATES,
    "collections": frozenset({"deque", "defaultdict"}),
    "enum": frozenset({"auto"}),
    "itertools": frozenset(
        {
            "count", "cycle", "repeat", "chain", "islice", "product", "permutations", "combinations", "compress",
            "combinations_with_replacement", "zip_longest", "izip", "izip_longest",
            "pairwise", "batched", "_tee", "_tee_dataobject", "tee",
        }
    ),
}  # fmt: skip
_METHODS = {"zoneinfo.ZoneInfo._unpickle"}  # by which classes of these modules rebuild objects
_MAKES_TYPES = re.compile(r".(Meta|Type)$")  # classes of which the instances are classes, functions or modules
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
    "_zstd", "_remote_debugging", "compression", "_types", "_hmac", "_py_warnings", "_ast_unparse",
    "_pydatetime", "_pylong",
}  # fmt: skip
_STANDARD = sys.stdlib_module_names | _SOME_VERSIONS
# Packages whose purpose is to run, download or unpickle things.
_TOOLS = {
    "aiohttp", "requests", "httpx", "urllib3", "paramiko", "fabric", "sh", "plumbum", "pexpect", "dill", "cloudpickle",
    "joblib", "jsonpickle", "pip", "setuptools", "fsspec", "boto3", "IPython", "nbconvert", "nbclient", "pkg_resources",
    "invoke", "past", "cffi", "Cython", "pyximport", "jinja2", "mako", "numexpr", "execnet", "pytest", "_pytest",
}  # fmt: skip
_DATA = {"joblib.numpy_pickle.NumpyArrayWrapper", "joblib.numpy_pickle.NDArrayWrapper"}  # of these packages
# Functions of any package that run, load or look up something, by their names without leading underscores.
_RUNS = {
    "eval", "exec", "execfile", "system", "popen", "Popen", "spawn", "check_call", "check_output", "getoutput",
    "run_cell",
    "import_module", "import_string", "load_module", "exec_module", "load", "loads", "load_all", "full_load",
    "unsafe_load", "unsafe_load_all", "read_pickle", "unpickle", "load_model", "sympify", "lambdify", "parse_expr",
    "getattr", "resolve_name", "get_type_hints", "run_code", "run_path", "run_module", "run_command",
}  # fmt: skip
# Modules of the standard library that a dotted name must not pass through.
_REACHED = {
    "os", "sys", "subprocess", "builtins", "posix", "nt", "shutil", "socket", "importlib", "runpy", "ctypes", "pickle",
    "multiprocessing", "pty", "codecs", "io", "tempfile", "asyncio", "urllib", "http", "hub", "f2py", "cpp_extension",
}  # fmt: skip
# What checkpoints name of torch and numpy: functions (layers store their activation) by their modules or by the start
# of their full names, classes by their modules.
_FUNCTION_MODULES = {
    "torch.nn.functional", "torch._C._nn", "torch.nn.init", "numpy.random._pickle",
}  # fmt: skip
_FUNCTIONS = (
    "torch._utils._rebuild", "torch._tensor._rebuild", "torch.serialization._get_layout",
    "torch.amp.grad_scaler._refresh_per_optimizer_state", "torch.cuda.amp.grad_scaler._refresh_per_optimizer_state",
    "torch.distributed.remote_device._remote_device", "torch.nn.parameter._rebuild",
    "torch.nested._internal.nested_tensor._rebuild", "numpy.core.numeric._frombuffer",
    "numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct", "numpy.core.multiarray.scalar",
    "numpy._core.multiarray.scalar",
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


# Of the modules of functions: what calls its arguments, and modules.
_CALLERS = {
    "handle_torch_function", "boolean_dispatch", "_make_deprecate", "_add_docstr", "importlib", "torch", "np",
    "warnings", "math",
}  # fmt: skip
# Classes of torch that open files, sockets or processes, that run or load programs, or that make classes; also those
# of other modules under the names by which modules of torch import them.
_ACTIVE = re.compile(
    r"(File|TCP|Hash|Prefix)Store|PyTorchFile|FileSystem|Process(?!Group)|Executor|Launcher"
    r"|(Storage|Fsspec)(Writer|Reader)|AOTI|^_\w+Meta$|ABCMeta|(Function|Method|Module|Code|Frame|Traceback)Type$"
    r"|^(ExitStack|Connection|Thread|CompilationUnit|Script\w+|LiteScriptModule|Library|GraphModule|Graph|Tracer"
    r"|ExportedProgram|Interpreter\w*|FileCheck|Future|RRef)$"
)
# Functions that make a tensor of the size that their first argument says; those of torch also take several numbers.
_BY_SIZES = {"zeros", "ones", "empty", "rand", "randn"}
MAKERS = {
    *(("torch", name) for name in (*_BY_SIZES, "full", "arange", "range", "eye", "empty_strided", "randperm")),
    *(("numpy", name) for name in ("zeros", "ones", "empty", "full", "arange", "eye", "identity", "ndarray")),
    *((f"numpy.{c}.multiarray", name) for c in ("core", "_core") for name in ("zeros", "empty", "arange")),
}
_TORCH_ROOT = {
    "relu", "tanh", "sigmoid", "selu", "softmax", "log_softmax", "nn", "square", "sin", "cos", "exp", "log",
    "per_tensor_affine", "per_channel_affine", "per_tensor_symmetric", "per_channel_symmetric",
    "per_channel_affine_float_qparams",
}  # fmt: skip
_CONTAINERS = {("collections", "OrderedDict"), ("collections", "defaultdict"), ("builtins", "set")}


class Verdict(NamedTuple):
    """The judgement of a name: its ``grade``, and ``why``: what a dangerous one does, or the package of a framework."""

    grade: Grade
    why: str = ""


def judge(module: str, name: str) -> Verdict:
    """Judge a name in a pickle.

    Returns
    -------
    Verdict
        "torch": torch needs it to load tensors. "plain": a harmless name of Python, numpy or torch. "framework": a
        class of a known package. "unknown": not known to be harmless. "dangerous": it can run code, or reach what can.
    """
    if dangerous(module, name):
        return Verdict("dangerous", _why(module, name))
    root = module.split(".")[0]
    if (module, name) in _CONTAINERS or (root == "torch" and (module, name) in REBUILD):
        return Verdict("torch")
    last = name.split(".")[-1]
    if root == "torch" and module == root and _is_function(last) and last not in _TORCH_ROOT:
        return Verdict("unknown")
    if root == "numpy" and module == root and _is_function(last) and (module, name) not in REBUILD:
        return Verdict("plain" if _is_number(last) else "unknown")
    if root in _STANDARD or root in ("torch", "numpy"):
        return Verdict("plain")
    package = framework(module, name)
    return Verdict("framework", package) if package else Verdict("unknown")


def _is_number(name: str) -> bool:
    """Return whether a lower-case name of numpy is that of a type of numbers or arrays."""
    return name.rstrip("0123456789_") in {
        "int", "uint", "float", "complex", "bool", "str", "bytes", "void", "object", "ndarray", "dtype", "datetime",
        "timedelta", "generic", "number", "floating", "integer", "longdouble", "double", "single", "half", "byte",
        "ubyte", "short", "ushort", "intc", "uintc", "long", "ulong", "longlong", "ulonglong", "poly1d",
    }  # fmt: skip


def _why(module: str, name: str) -> str:
    """Return what a dangerous name does, in words."""
    if module in (PERSISTENT, BOMB) or (module == EXTENSION and name.startswith("extension ")):
        return technique("copyreg.extension" if module == EXTENSION else module)
    found = technique(f"{module}.{name}")
    parts = name.split(".")
    if len(parts) == 1 and found:
        return found
    for n in range(len(parts)):  # a dotted name is judged by its target
        target = technique(".".join(parts[n:])) if n + 1 < len(parts) else ""
        if target:
            return target
    if len(parts) > 1:
        return found or "it reaches functions through attributes"
    if module.split(".")[0] in _STANDARD:
        return "it is of the standard library, and not known to be harmless"
    return "it runs, loads or looks up something" if parts[-1].strip("_") in _RUNS else "no checkpoint needs it"


def sentence(module: str, name: str, loading: str = "torch.load this file") -> str:
    """Return the sentence about a dangerous name. ``loading`` describes the action that would run it."""
    if module in (PERSISTENT, BOMB) or (module == EXTENSION and name.startswith("extension ")):
        what = {PERSISTENT: "the persistent id ", EXTENSION: "the ", BOMB: ""}[module] + printable(name)
        return f"its pickle has {what} ({_why(module, name)}): nothing was run, but do not {loading}"
    return (
        f"its pickle names {printable(f'{module}.{name}')}, which no checkpoint needs ({_why(module, name)}): "
        f"nothing was run, but do not {loading}"
    )


def dangers(named: Iterable[tuple[str, str]], loading: str = "torch.load this file") -> list[Problem]:
    """Return a problem for each (module, name) in a pickle that is dangerous. ``loading`` describes the action that
    would run it."""
    return [Problem("unsafe-pickle", sentence(*key, loading)) for key in named if dangerous(*key)]


def bomb(entry: int, size: int) -> str:
    """Return what is wrong with an entry of the memo in a pickle of ``size`` bytes, "" if it is ordinary. Unpicklers
    written in C make room up to the largest entry."""
    if entry <= size + _MEMO:
        return ""
    return f"entry {short_number(entry)} in its memo, for which unpicklers take {human_bytes(min(entry, 1 << 60) * 16)}"


def large(name: str, count: object, size: int) -> str:
    """Return what is wrong with a call that makes ``count`` bytes in a pickle of ``size`` bytes, "" if nothing is."""
    if type(count) is not int or count <= max(CALLED, size):
        return ""
    return f"a call of {name} that makes {human_bytes(min(count, 1 << 60))}"


def excess(module: str, name: str, args: object, size: int) -> str:
    """Return what is wrong with a call of torch or numpy that makes a tensor, as `large` does."""
    if (module, name) not in MAKERS or type(args) is not tuple or not args:
        return ""
    shape = args if module == "torch" and type(args[0]) is int and name in _BY_SIZES else args[0]
    sizes = shape if isinstance(shape, tuple | list) else (shape,)
    count = 1
    for n in sizes[:64]:
        if type(n) is not int or n < 0:
            return ""
        count = min(count * n, 1 << 62)
    return large(f"{module}.{name}", count * (count if name in ("eye", "identity") else 1), size)


def dangerous(module: str, name: str) -> bool:
    """Return whether a name deserves a warning."""
    if (module, name) in REBUILD:
        return False
    if module in (PERSISTENT, BOMB):
        return True
    return _judged(module, name) if len(module) + len(name) < _SHORT else _judged.__wrapped__(module, name)


@lru_cache(1024)  # most files name the same few classes
def _judged(module: str, name: str) -> bool:
    root = module.split(".")[0]
    *path, last = name.split(".")
    if root in _STANDARD:
        harmless = _HARMLESS.get(module, frozenset())
        if harmless is _ALL:  # except dotted names, and what the module imports
            if path or _MAKES_TYPES.search(last):
                return f"{module}.{name}" not in _METHODS
            lower = _LOWER.get(module, frozenset())
            return _is_function(last) and last not in lower and (lower is not _ALL or last.startswith("_"))
        return (path[0] if path else last) not in harmless or _is_special(path, last)
    if f"{module}.{name}" in _DATA:
        return False
    if root in _TOOLS or _has_moves(module) or not _REACHED.isdisjoint(path) or any(map(_is_function, path)):
        return True
    if _is_special(path, last):
        return True
    if root in ("torch", "numpy"):
        full = f"{module}.{name}"
        if full.startswith(_NO_CHECKPOINT) or last == "memmap" or _ACTIVE.search(last):
            return True
        if _is_function(last):
            if module == "torch._C" and path == ["_VariableFunctionsClass"]:  # so pickles name ``torch.relu``
                return last not in _TORCH_ROOT
            known = module in _FUNCTION_MODULES and last not in _CALLERS
            return bool(path) or not (known or module == root or full.startswith(_FUNCTIONS))
        return module != root and not any(module == one or module.startswith(f"{one}.") for one in _CLASSES)
    return last.strip("_") in _RUNS or (_is_function(last) and technique(f"{module}.{name}") != "")


def _is_special(path: list[str], last: str) -> bool:
    """Return whether a dotted name reaches a special attribute, such as ``__globals__``."""
    return bool(path) and any(one.startswith("__") and one != "__new__" for one in (*path, last))


def _has_moves(module: str) -> bool:
    """Return whether a module holds other modules under their old names, such as ``six.moves``."""
    return module == "six.moves" or module.startswith("six.moves.")


def _is_function(name: str) -> bool:
    """Return whether a name is that of a function or module by the usual style: in lower case."""
    return name.lstrip("_")[:1].islower()
