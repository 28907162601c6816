"""Pickles that would do harm: nothing of them runs, they open as records, and view.problems says what they name."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyckpt
from lazyckpt.io.containers.pickle.records import Opaque

from .handmade import call, dict_of, list_of, named, number, program, tensor, text, tuple_of, write_pickle

Payload = Callable[[Path], bytes]


def stack(module: str, name: str) -> bytes:
    """A global by STACK_GLOBAL: protocol 4 and 5, where a name may have dots."""
    return text(module) + text(name) + b"\x93"


def touch(marker: Path) -> bytes:
    return text(f"touch {marker}")


def words(marker: Path) -> bytes:
    return list_of(text("touch"), text(str(marker)))


def module_of(name: str) -> bytes:
    return call(named("importlib", "import_module"), text(name))


def opener(module: str, name: str, *more: bytes) -> Payload:
    return lambda m: call(named(module, name), text(str(m)), *more)


class Exploit:
    """The classic: an object whose __reduce__ names what is to run."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


def reduced(protocol: int) -> Payload:
    return lambda m: pickle.dumps({"epoch": 1, "model": [{"weight": (1.0, Exploit(m))}]}, protocol)


def set_state(m: Path) -> bytes:
    """BUILD calls __setstate__, and an instance may bring its own."""
    victim = call(named("argparse", "Namespace"))
    return victim + dict_of(text("__setstate__"), named("os", "system")) + b"b" + touch(m) + b"b"


def script(m: Path) -> bytes:
    path = m.with_suffix(".py")
    path.write_text(f"open({str(m)!r}, 'w')")
    return call(named("runpy", "run_path"), text(str(path)))


def pickled_inside(m: Path) -> bytes:
    inner = program(call(named("os", "system"), touch(m)))
    return call(named("_pickle", "loads"), b"B" + len(inner).to_bytes(4, "little") + inner)


# name -> (body of a pickle that makes the marker when it is loaded, what problems must name)
LIVE: dict[str, tuple[Payload, str]] = {
    "os.system": (lambda m: call(named("os", "system"), touch(m)), "os.system"),
    "posix.system": (lambda m: call(named("posix", "system"), touch(m)), "posix.system"),
    "os.popen": (lambda m: call(named("os", "popen"), touch(m)), "os.popen"),
    "os.mkdir": (opener("os", "mkdir"), "os.mkdir"),
    "subprocess.Popen": (lambda m: call(named("subprocess", "Popen"), words(m)), "subprocess.Popen"),
    "subprocess.check_output": (lambda m: call(named("subprocess", "check_output"), words(m)), "subprocess.check"),
    "eval": (lambda m: call(named("builtins", "eval"), text(f"open({str(m)!r}, 'w')")), "builtins.eval"),
    "exec": (lambda m: call(named("builtins", "exec"), text(f"open({str(m)!r}, 'w')")), "builtins.exec"),
    "eval of Python 2": (lambda m: call(named("__builtin__", "eval"), text(f"open({str(m)!r}, 'w')")), "eval"),
    "compile": (
        lambda m: call(
            named("builtins", "exec"),
            call(named("builtins", "compile"), text(f"open({str(m)!r}, 'w')"), text("x"), text("exec")),
        ),
        "builtins.compile",
    ),
    "open": (opener("builtins", "open", text("w")), "builtins.open"),
    "io.open": (opener("io", "open", text("w")), "io.open"),
    "_io.open": (opener("_io", "open", text("w")), "_io.open"),
    "FileIO": (opener("_io", "FileIO", text("w")), "_io.FileIO"),
    "codecs.open": (opener("codecs", "open", text("w")), "codecs.open"),
    "gzip.open": (opener("gzip", "open", text("w")), "gzip.open"),
    "bz2.open": (opener("bz2", "open", text("w")), "bz2.open"),
    "zipfile": (opener("zipfile", "ZipFile", text("w")), "zipfile.ZipFile"),
    "tarfile": (opener("tarfile", "open", text("w")), "tarfile.open"),
    "logging": (opener("logging", "FileHandler"), "logging.FileHandler"),
    "shutil": (lambda m: call(named("shutil", "copyfile"), text(__file__), text(str(m))), "shutil.copyfile"),
    "getattr chain": (
        lambda m: call(
            call(named("builtins", "getattr"), call(named("builtins", "__import__"), text("os")), text("system")),
            touch(m),
        ),
        "builtins.__import__",
    ),
    "importlib": (
        lambda m: call(call(named("builtins", "getattr"), module_of("os"), text("system")), touch(m)),
        "importlib.import_module",
    ),
    "attrgetter": (
        lambda m: call(call(call(named("operator", "attrgetter"), text("system")), module_of("os")), touch(m)),
        "operator.attrgetter",
    ),
    "methodcaller": (
        lambda m: call(call(named("_operator", "methodcaller"), text("system"), touch(m)), module_of("os")),
        "_operator.methodcaller",
    ),
    "partial": (
        lambda m: call(call(named("functools", "partial"), named("os", "system"), touch(m))),
        "os.system",
    ),
    "runpy": (script, "runpy.run_path"),
    "timeit": (
        lambda m: call(named("timeit", "timeit"), text("pass"), text(f"open({str(m)!r}, 'w')")),
        "timeit.timeit",
    ),
    "cProfile": (
        lambda m: call(named("cProfile", "runctx"), text(f"open({str(m)!r}, 'w')"), b"}", b"}"),
        "cProfile.runctx",
    ),
    "a pickle in a pickle": (pickled_inside, "_pickle.loads"),
    "copyreg": (
        lambda m: call(
            named("copyreg", "_reconstructor"), named("subprocess", "Popen"), named("subprocess", "Popen"), words(m)
        ),
        "subprocess.Popen",
    ),
    "__setstate__": (set_state, "os.system"),
    "INST": (lambda m: b"(" + touch(m) + b"ios\nsystem\n", "os.system"),
    "OBJ": (lambda m: b"(" + named("subprocess", "Popen") + words(m) + b"o", "subprocess.Popen"),
    "by way of the memo": (
        lambda m: named("os", "system") + b"q\x010" + touch(m) + b"q\x020" + b"h\x01h\x02\x85R",
        "os.system",
    ),
    "as a key": (lambda m: dict_of(call(named("os", "system"), touch(m)), number(1)), "os.system"),
    "in a set": (lambda m: b"\x8f(" + call(named("os", "system"), touch(m)) + b"\x90", "os.system"),
    "as a dead value": (lambda m: call(named("os", "system"), touch(m)) + b"0N", "os.system"),
    "beside a good model": (
        lambda m: dict_of(text("w"), number(1), text("x"), call(named("os", "system"), touch(m))),
        "os.system",
    ),
    "another module's os": (lambda m: call(stack("logging", "os.system"), touch(m)), "logging.os.system"),
    "a path's os": (lambda m: call(stack("posixpath", "os.system"), touch(m)), "posixpath.os.system"),
    "a method": (
        lambda m: call(
            stack("pathlib", "Path.write_text"), call(stack("pathlib", "PosixPath"), text(str(m))), text("x")
        ),
        "pathlib.Path.write_text",
    ),
    "the code of a module": (lambda m: call(named("probe_of_an_import", "thing")), "probe_of_an_import"),
    **{f"__reduce__, protocol {p}": (reduced(p), "posix.system") for p in range(6)},
}
UNCALLED = {"the code of a module"}  # an unknown module is not dangerous by its name: it is just not imported


def pickled(name: str, marker: Path) -> bytes:
    body = LIVE[name][0](marker)
    return body if name.startswith("__reduce__") else program(body, 4 if b"\x93" in body else 2)


LOADER = """
import json, pickle, sys, threading
for path in json.load(sys.stdin):
    try:
        pickle.loads(open(path, "rb").read())
    except BaseException:
        pass
"""


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a module that makes a marker when it is imported."""
    folder = tmp_path_factory.mktemp("probe")
    (folder / "probe_of_an_import.py").write_text(
        "import os\nopen(os.path.join(os.path.dirname(__file__), 'marker-import'), 'w')\n"
    )
    return folder


def test_the_payloads_are_live(tmp_path: Path, probe: Path) -> None:
    """Else the tests below prove nothing: CPython's own pickle runs every one of them."""
    paths, markers = [], {}
    for n, name in enumerate(LIVE):
        markers[name] = probe / "marker-import" if name in UNCALLED else tmp_path / f"marker{n}"
        (tmp_path / f"{n}.pkl").write_bytes(pickled(name, markers[name]))
        paths.append(str(tmp_path / f"{n}.pkl"))
    env = os.environ | {"PYTHONPATH": str(probe)}
    done = subprocess.run([sys.executable, "-c", LOADER], input=json.dumps(paths), text=True, env=env, timeout=60)
    dead = [name for name, marker in markers.items() if not marker.exists()]
    (probe / "marker-import").unlink(missing_ok=True)
    assert done.returncode == 0
    assert not dead


WATCHED = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "subprocess.Popen",
    "exec",
    "compile",
    "socket",
    "ctypes",
)
_seen: list[str] | None = None


def _watch(event: str, args: tuple[Any, ...]) -> None:
    if _seen is None:
        return
    if event.startswith(WATCHED) or (event == "import" and args[0] in ("probe_of_an_import", "probe")):
        _seen.append(event)
    if event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        _seen.append(f"open {args[0]!r} for writing")


sys.addaudithook(_watch)


@contextmanager
def nothing_runs(first: Callable[[], object]) -> Iterator[None]:
    """Python itself tells of commands, code, sockets and files that are opened to write. ``first`` is done before it
    listens: modules of our own that are imported late run code too."""
    global _seen
    first()
    _seen = []
    try:
        yield
        seen = _seen
    finally:
        _seen = None
    assert not seen
    assert "probe_of_an_import" not in sys.modules


@pytest.mark.parametrize("name", LIVE)
def test_nothing_runs(name: str, tmp_path: Path, probe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marker = probe / "marker-import" if name in UNCALLED else tmp_path / "marker"
    path = write_pickle(tmp_path / "model.pt", pickled(name, marker))
    monkeypatch.syspath_prepend(str(probe))

    def look() -> lazyckpt.CheckpointView:
        view = lazyckpt.open(path, cache=False)
        repr(view), view.tree(), view.explain(), repr(dict(view.meta))
        list(view.values()), view.to("cpu"), view.stored
        return view

    with nothing_runs(look):
        view = look()
    assert not marker.exists(), "it ran"
    if name not in UNCALLED:
        lines = [line for line in view.problems if LIVE[name][1] in line]
        assert lines, f"problems do not name it: {view.problems}"
        assert all("model.pt" in line and "nothing was run" in line for line in lines)


def test_payload_is_kept_as_a_record(tmp_path: Path) -> None:
    path = write_pickle(tmp_path / "m.pt", program(dict_of(text("x"), call(named("os", "system"), text("rm -rf /")))))
    record = lazyckpt.open(path).meta["x"]
    assert type(record) is Opaque
    assert (record.module, record.name, record.args) == ("os", "system", ("rm -rf /",))
    assert repr(record) == "<os.system args=('rm -rf /')>"


NAMES = """
    os.execv os.remove os.unlink os.rename os.environ os.kill os.fork os.path.os.system nt.system posix.execv sys.exit
    subprocess.call subprocess.getoutput subprocess.run builtins.breakpoint builtins.__import__ builtins.setattr
    builtins.delattr builtins.globals builtins.vars builtins.input __builtin__.apply __builtin__.execfile
    shutil.rmtree socket.socket socket.create_connection runpy.run_module runpy._run_code importlib.import_module
    importlib.reload importlib.machinery.SourceFileLoader imp.load_source pty.spawn commands.getoutput popen2.popen3
    code.InteractiveInterpreter code.interact codeop.compile_command pickle.load pickle.loads _pickle.Unpickler
    marshal.loads webbrowser.open ctypes.CDLL ctypes.cdll.LoadLibrary asyncio.create_subprocess_shell pdb.run
    bdb.Bdb.run profile.run trace.Trace timeit.main doctest.debug_script pydoc.pipepager pydoc.locate venv.create
    pip.main pip._internal.main ensurepip._run_pip idlelib.pyshell.ModifiedInterpreter.runcode
    lib2to3.pgen2.grammar.Grammar.loads distutils.file_util.write_file multiprocessing.util.spawnv_passfds
    tempfile.mkstemp uuid._get_command_stdout requests.get urllib.request.urlopen urllib.request.urlretrieve
    http.client.HTTPConnection httplib.HTTPConnection ftplib.FTP smtplib.SMTP ssl.create_default_context
    xmlrpc.client.ServerProxy aiohttp.client.ClientSession types.FunctionType types.CodeType operator.attrgetter
    operator.methodcaller joblib.load dill.loads cloudpickle.loads shelve.open sqlite3.connect lzma.open
    fileinput.input mmap.mmap logging.config.fileConfig logging.config.dictConfig pathlib.Path.touch
    pathlib.PosixPath.unlink site.main
    torch.hub.load torch.hub.load_state_dict_from_url torch.load torch.save torch.serialization.load
    torch.serialization.save torch.jit.load torch.utils.cpp_extension.load torch.utils.cpp_extension.load_inline
    torch.package.PackageImporter torch._inductor.codecache.compile_file torch.utils.collect_env.run
    torch.utils.bottleneck.__main__.run_cprofile torch._dynamo.guards.GuardBuilder.get
    torch.fx.experimental.symbolic_shapes.ShapeEnv.evaluate_guards_expression
    torch.jit.unsupported_tensor_ops.execWrapper torch.utils.data.datapipes.utils.decoder.basichandlers
    torch.utils._config_module.ConfigModule.load_config
    numpy.load numpy.save numpy.memmap numpy.fromfile numpy.f2py.crackfortran.getlincoef numpy.f2py.compile
    numpy.testing._private.utils.runstring numpy.ndarray.tofile
    torch.storage._load_from_bytes torch.distributed.rpc.internal.deserialize
    torch.distributed.launcher.api.launch_agent
    torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler.SubprocessHandler
    typing._eval_type typing.get_type_hints dataclasses._create_fn dataclasses.make_dataclass numpy.core.memmap.memmap
    numpy._core.memmap.memmap sympy.core.sympify.sympify yaml.unsafe_load pandas.io.pickle.read_pickle
    _pyrepl.pager.pipe_pager test.support.script_helper.assert_python_ok torch.nn.functional.importlib.import_module
    torch.nn.functional.torch.load numpy.core.multiarray.fromfile torch.multiprocessing.spawn.spawn
    cloudpickle.cloudpickle._make_function imaplib.IMAP4_stream pkgutil.resolve_name bdb.Bdb code.InteractiveInterpreter
    _aix_support._read_cmd_output _osx_support._find_build_tool cProfile.runctx asyncore.dispatcher telnetlib.Telnet
    mypackage.util.eval mypackage.util.os.system
"""


@pytest.mark.parametrize("dotted", NAMES.split())
def test_dangerous_names_are_reported(dotted: str, tmp_path: Path) -> None:
    """Called or only named, also where it hides, and wherever the dot between module and name is put."""

    def named_in(body: bytes, module: str, name: str) -> bool:
        view = lazyckpt.open(write_pickle(tmp_path / "m.pt", program(body, 4)))
        return any(f" {module}.{name}," in line for line in view.problems)

    parts = dotted.split(".")
    for cut in range(1, len(parts)):
        module, name = ".".join(parts[:cut]), ".".join(parts[cut:])
        assert named_in(call(stack(module, name), number(1)), module, name), (module, name)
    it = stack(module, name)
    assert named_in(dict_of(text("hook"), it), module, name)
    assert named_in(call(named("torch._tensor", "_rebuild_from_type_v2"), it, b"N", b")", b"N"), module, name)
    hidden = tuple_of(text("storage"), it, text("0"), text("cpu"), number(4)) + b"Q"
    assert named_in(dict_of(text("w"), tensor(hidden)), module, name)


def test_names_before_a_pickle_breaks_off_are_reported(tmp_path: Path) -> None:
    """torch.load runs them before it comes to the damage."""
    for damage in (b"", b"\xff", text("x") + b"R", b"\x95" + (1 << 40).to_bytes(8, "little")):
        body = dict_of(text("x"), call(stack("os", "system"), text("true")))
        path = write_pickle(tmp_path / "m.pt", program(body, 4)[:-1] + damage)
        with pytest.raises(lazyckpt.CorruptError, match=r"It names os\.system, .* nothing was run") as found:
            lazyckpt.open(path, cache=False)
        assert len(str(found.value).splitlines()) <= 3
    path = write_pickle(tmp_path / "m.pt", program(dict_of(text("x"), number(1)))[:-1])
    with pytest.raises(lazyckpt.CorruptError) as found:
        lazyckpt.open(path, cache=False)
    assert "It names" not in str(found.value)


def test_dangerous_names_in_legacy_files_are_reported(tmp_path: Path) -> None:
    """In any of their five pickles."""
    marker, path = tmp_path / "marker", tmp_path / "legacy.pt"
    torch.save({"a": 1}, path, _use_new_zipfile_serialization=False)
    good = path.read_bytes()
    exploit = pickle.dumps({"x": Exploit(marker)}, 2)
    at = good.index(pickle.dumps({"a": 1}, 2)[2:8])
    path.write_bytes(good[: at - 2] + exploit + good[good.index(b".", at) + 1 :])
    with nothing_runs(lambda: lazyckpt.open(path, cache=False)):
        view = lazyckpt.open(path, cache=False)
    assert not marker.exists()
    assert any("posix.system" in line for line in view.problems)


def test_dangerous_names_in_shards_are_reported(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    torch.save({"w": torch.ones(2)}, tmp_path / "pytorch_model-00001-of-00002.bin")
    torch.save({"v": torch.ones(2), "x": Exploit(marker)}, tmp_path / "pytorch_model-00002-of-00002.bin")
    names = {"w": "pytorch_model-00001-of-00002.bin", "v": "pytorch_model-00002-of-00002.bin"}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    with nothing_runs(lambda: lazyckpt.open(tmp_path, cache=False)):
        view = lazyckpt.open(tmp_path, cache=False)
        assert torch.equal(view["v"][...], torch.ones(2))
    assert not marker.exists()
    assert any("posix.system" in line and "pytorch_model-00002" in line for line in view.problems)
