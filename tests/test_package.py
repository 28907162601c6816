"""What holds of the package as a whole: what importing it costs, which room imports which, what is in the wheel."""

from __future__ import annotations

import ast
import doctest
import functools
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

import lazyckpt
from lazyckpt import demo, errors
from lazyckpt.cli import program
from lazyckpt.formats.reader import GROUP

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lazyckpt"
MODULES = sorted(PACKAGE.rglob("*.py"))

# -- importing it

HEAVY = (
    "zarr", "xarray", "numcodecs", "dask", "matplotlib", "obstore", "fsspec", "aiohttp", "typer", "rich", "click",
    "deepspeed", "transformers", "megatron", "accelerate", "lightning", "pandas", "safetensors", "textual",
)  # fmt: skip


_ALONE = "import torch, numpy, ml_dtypes"


@functools.cache
def loaded_by(code: str) -> set[str]:
    """The top-level modules that a fresh interpreter has loaded after ``code``, less those that torch alone loads."""
    tail = "\nimport sys, json; print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    command = [sys.executable, "-c", code + tail]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


_WITHOUT_DASK = """
import sys, warnings
sys.modules["dask"] = None  # as if it were not installed
warnings.simplefilter("error")  # xarray warns of an engine that cannot be imported
import torch, xarray
import lazyckpt
torch.save({"w": torch.arange(6.0)}, sys.argv[1])
view = lazyckpt.open(sys.argv[1])
assert xarray.open_datatree(sys.argv[1], engine="lazyckpt")["w"].values.sum() == 15
assert view.to_xarray()["w"].values.sum() == 15
for call in (view["w"].to_dask, lambda: view.to_xarray(chunks={})):
    try:
        call()
    except lazyckpt.LazyckptError as e:
        print(e)
"""


@pytest.mark.slow
def test_without_dask_xarray_works_and_the_rest_says_what_to_install(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _WITHOUT_DASK, str(tmp_path / "x.pt")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("pip install 'lazyckpt[dask]'") == 2


def test_what_tab_offers_is_public() -> None:
    public = {name for name in dir(lazyckpt) if not name.startswith("_")}
    assert public - set(lazyckpt.__all__) == {"deepspeed", "distributed", "interop", "recipes"}
    assert all(getattr(lazyckpt, name) is not None for name in public)


@pytest.mark.slow
@pytest.mark.xdist_group("interpreters")  # `loaded_by` starts an interpreter once for the same code
def test_importing_is_light() -> None:
    """What is for distributed models is imported on demand."""
    code = "import sys, lazyckpt; assert not {'torch.distributed.tensor', 'lazyckpt.distributed'} & set(sys.modules)"
    assert "lazyckpt" in loaded_by(code)
    assert (loaded_by(code) - loaded_by(_ALONE)) & set(HEAVY) == set()
    assert "lazyckpt" in loaded_by("import lazyckpt; lazyckpt.distributed.LazyReader")


@pytest.mark.slow
@pytest.mark.xdist_group("interpreters")
def test_reading_needs_no_writer(tmp_path: Path) -> None:
    demo.write(tmp_path)
    code = f"""
import lazyckpt
for name in ("zero3", "model", "training.pt", "bomb.pt"):
    view = lazyckpt.open({str(tmp_path)!r} + "/" + name)
    repr(view), view.to("cpu"), view.explain()
"""
    assert (loaded_by(code) - loaded_by(_ALONE)) & set(HEAVY) == set()
    assert not (tmp_path / "it_ran").exists()


# -- the layer rule: imports point down, and no files import each other in a circle

LAYERS: tuple[tuple[str, ...], ...] = (
    ("deferred", "errors"),
    ("core",),
    ("io", "layouts", "likeness", "markup"),
    ("formats", "lazy"),
    ("lookup",),
    ("interop", "jobs", "namespace"),
    ("derive", "inspect", "loading", "reshaping"),
    ("export",),
    ("show",),
    ("explore",),
    ("tensor",),
    ("view",),
    ("adapting", "combining", "deepspeed", "distributed", "engine", "runs"),
    ("browse", "recipes"),
    ("exploring",),
    ("", "demo"),  # "": lazyckpt/__init__.py
    ("cli", "testing"),
    ("__main__",),
)
RANK = {room: rank for rank, rooms in enumerate(LAYERS) for room in rooms}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(path): path for path in MODULES}


@functools.cache
def imports(path: Path) -> set[str]:
    """The modules of lazyckpt that a module imports: anywhere in it, also for type checkers only, and by name."""
    package = path.relative_to(ROOT).parent.parts
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            inside = {f"{module}.{a.name}" for a in node.names}
            found |= inside & FILES.keys() or {module}
            if any(name not in FILES for name in inside):
                found.add(module)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # two name modules beside them; other names in strings are whole ("lazyckpt" is only a word)
            beside = path.name in ("registry.py", "program.py")
            found |= {".".join((*package, node.value))} if beside else {node.value} - {"lazyckpt"}
    found.discard(name_of(path))
    return {name for name in found if name in FILES}


def room_of(name: str) -> str:
    return name.split(".")[1] if "." in name else ""


@pytest.mark.xdist_group("imports")  # one process parses the modules for all tests of imports
def test_imports_point_down() -> None:
    wrong = []
    for name, path in FILES.items():
        room = room_of(name)
        assert room in RANK, f"{name} is in a new room: say in LAYERS where it stands"
        above = [o for o in imports(path) if room_of(o) != room and RANK[room_of(o)] >= RANK[room]]
        wrong += [f"{name} imports {other}" for other in above]
    assert not wrong


@pytest.mark.xdist_group("imports")
def test_the_map_has_every_module_above_what_it_imports() -> None:
    """The map of CONTRIBUTING.md."""
    listed = re.findall(r"^\| (`.+?) \| .+ \|$", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.MULTILINE)
    rows = {name.rstrip("/"): row for row, cell in enumerate(listed) for name in re.findall(r"`(.+?)`", cell)}
    assert all((PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file() for name in rows)
    at = {}
    for name, path in FILES.items():
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        places = [row for row in (rows.get("/".join(parts[:n])) for n in range(1, len(parts) + 1)) if row is not None]
        assert len(places) == 1 or parts == ("io", "__init__"), f"{name} is in {len(places)} rows of the map"
        at[name] = places[0] if places else len(listed)
    assert not [(name, o) for name, path in FILES.items() for o in imports(path) if at[o] < at[name]]


@pytest.mark.xdist_group("imports")
def test_no_files_import_each_other_in_a_circle() -> None:
    left = {name: {other for other in imports(path) if other in FILES} for name, path in FILES.items()}
    while free := [name for name, others in left.items() if not others & left.keys()]:
        for name in free:
            del left[name]
    assert not left, f"in a circle, or above one: {sorted(left)}"


def test_the_rule_sees_imports() -> None:
    view = imports(PACKAGE / "view/reading.py")
    assert {"lazyckpt.namespace", "lazyckpt.tensor", "lazyckpt.show.text"} <= view
    assert "lazyckpt.inspect.table" in view, "for type checkers only"
    assert "lazyckpt.inspect.stats" in view, "in a function"
    assert {"lazyckpt.cli.ls", "lazyckpt.cli.convert"} <= imports(PACKAGE / "cli/program.py")
    families = {"lazyckpt.formats.zarr.reader", "lazyckpt.formats.trainers.lightning"}
    assert families <= imports(PACKAGE / "formats/registry.py")
    assert {"lazyckpt.export.zarr", "lazyckpt.export.torch"} <= imports(PACKAGE / "export/registry.py")


@functools.cache
def bound_in(path: Path) -> set[str]:
    """The names that a module's code binds."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.alias):
            found.add(node.asname or node.name)
    return found


def test_tools_import_what_is_there() -> None:
    """No lane runs them, and mypy does not read them."""
    for path in (*(ROOT / "tools").glob("*.py"), *(ROOT / "benchmarks").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            module = node.module if isinstance(node, ast.ImportFrom) and not node.level else None
            if not isinstance(node, ast.ImportFrom) or not module or module.split(".")[0] not in ("lazyckpt", "tests"):
                continue
            folder = ROOT.joinpath(*module.split("."))
            source = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
            for name in (alias.name for alias in node.names):
                inner = folder / f"{name}.py", folder / name
                known = any(one.exists() for one in inner) or (source.exists() and name in bound_in(source))
                assert known, f"{path.name}: {module} has no {name}"


def test_the_core_does_no_io() -> None:
    for path in (PACKAGE / "core").glob("*.py"):
        modules = {
            name.split(".")[0]
            for node in ast.walk(ast.parse(path.read_text("utf-8")))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in ([a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""])
        }
        assert not modules & {"os", "io", "mmap", "pathlib", "socket", "shutil", "tempfile", "zipfile"}, path


# Files that only describe a checkpoint; those of these rooms that are left out read or make tensors.
_NO_TORCH = ("core/", "formats/", "layouts/", "io/", "show/", "namespace.py", "cli/")
_TENSORS = {
    "io/reading/device.py", "io/reading/gather.py", "io/tensors.py",
    "io/metadata.py",  # gives users torch's own objects
    "io/plain_json.py",  # tensors among metadata
    "show/plot.py", "show/plot_tensor.py", "show/values.py",
}  # fmt: skip


@pytest.mark.slow
def test_what_describes_checkpoints_imports_no_torch() -> None:
    """Not at its top, nor in a function."""
    for path in MODULES:
        name = path.relative_to(PACKAGE).as_posix()
        if not name.startswith(_NO_TORCH) or name in _TENSORS:
            continue
        text = path.read_text("utf-8")
        if "torch" not in text and "deferred" not in text:
            continue  # without these words it imports neither; parsing takes long
        tree = ast.parse(text)
        for_types = {
            id(inner)
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
            for inner in ast.walk(node)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in for_types:
                modules = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
                outside = isinstance(node, ast.Import) or not node.level
                assert not (outside and any(m.split(".")[0] == "torch" for m in modules)), name
                assert outside or modules != ["deferred"], name


# -- documentation


@pytest.mark.slow
def test_every_module_and_public_name_is_documented() -> None:
    for path in MODULES:
        text = path.read_text("utf-8")
        if path.name != "__init__.py" or text.strip():
            assert re.match(r'"""\w', text) or ast.get_docstring(ast.parse(text)), path  # parsing takes long
    for name in lazyckpt.__all__:
        assert inspect.getdoc(getattr(lazyckpt, name)), name
    for owner in (lazyckpt.CheckpointView, lazyckpt.LazyTensor):
        for name, member in vars(owner).items():
            described = callable(member) or isinstance(member, property | classmethod | staticmethod)
            if described and not name.startswith("_") and not hasattr(torch.Tensor, name):  # those are as in torch
                assert inspect.getdoc(member), f"{owner.__name__}.{name}"


def test_all_is_sorted_and_complete() -> None:
    assert sorted(lazyckpt.__all__) == list(lazyckpt.__all__)
    assert all(getattr(lazyckpt, name) is not None for name in lazyckpt.__all__)  # (most are imported by that)
    public = {n for n, v in vars(lazyckpt).items() if not n.startswith("_") and not isinstance(v, ModuleType)}
    # IPython calls the first two; the last is a switch of the compiler
    hooks = {"load_ipython_extension", "unload_ipython_extension", "annotations"}
    assert public - hooks == set(lazyckpt.__all__)


def test_the_tree_of_errors_is_drawn() -> None:
    for name in errors.__all__:
        error = getattr(errors, name)
        assert issubclass(error, lazyckpt.LazyckptError)
        assert name in (errors.__doc__ or "")
        assert getattr(lazyckpt, name) is error


def readme_blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL | re.MULTILINE)


def test_the_tour_of_the_readme_is_true(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    demo.write(tmp_path / "demo")
    blocks = readme_blocks("pycon")
    assert blocks
    test = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, "README.md", "README.md", 0)
    report: list[str] = []
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    failed, tried = doctest.DocTestRunner(optionflags=flags).run(test, out=report.append)
    assert tried > 5
    assert not failed, "".join(report)


def test_the_commands_of_the_readme_exist() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    commands = set(program.COMMANDS)
    named = [name for block in readme_blocks("sh") for name in re.findall(r"^lazyckpt (\w+)", block, re.MULTILINE)]
    assert named
    assert set(named) <= commands
    for name in re.findall(r"\./run (\w+)", text):
        assert re.search(rf"^    {name}\)", (ROOT / "run").read_text("utf-8"), re.MULTILINE), name
    for path in re.findall(r"\]\(([\w./-]+)\)", text):
        assert (ROOT / path).exists(), path


# -- distribution


def test_the_version_stands_in_one_place() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", lazyckpt.__version__)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert "version" in project["dynamic"]
    assert [p.name for p in MODULES if re.search(r"^__version__ =", p.read_text("utf-8"), re.MULTILINE)] == [
        "__init__.py"
    ]
    assert f"[{lazyckpt.__version__}]" in (ROOT / "CHANGELOG.md").read_text("utf-8")
    with suppress(metadata.PackageNotFoundError):  # not installed: run from the source tree
        assert metadata.version("lazyckpt") == lazyckpt.__version__


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_constraints_pin_everything_that_is_asked_for() -> None:
    requirements = pytest.importorskip("packaging.requirements")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = [*project["dependencies"], *(r for extra in project["optional-dependencies"].values() for r in extra)]
    pinned = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pins().items()}
    for text in wanted:
        requirement = requirements.Requirement(text)
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        assert requirement.specifier.contains(pinned[name]), f"{text}: the pin is {pinned[name]}"
    assert all("+" not in version for version in pinned.values())


def test_the_wheel_is_whole(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"lazyckpt-{lazyckpt.__version__}-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    kinds = (".css", ".js", ".json", ".tcss", ".toml", ".typed", ".zip")
    front_end = PACKAGE / "explore" / "frontend"  # sources; what their build makes is in explore/assets
    files = {p for p in PACKAGE.rglob("*") if p.suffix in kinds and not p.is_relative_to(front_end)}
    data = {str(p.relative_to(ROOT)) for p in files}
    assert data >= {
        "lazyckpt/py.typed",
        "lazyckpt/demo/zero3.zip",
        "lazyckpt/explore/assets/explorer.css",
        "lazyckpt/explore/assets/explorer.js",
        "lazyckpt/formats/hf_ties.json",
        "lazyckpt/layouts/rename/gguf.toml",
        "lazyckpt/layouts/rename/tables.toml",
        "lazyckpt/layouts/tables.toml",
    }
    assert {str(p.relative_to(ROOT)) for p in MODULES} | data <= names
    assert all(name.startswith(("lazyckpt/", "lazyckpt-")) for name in names)
    assert not any(name.startswith("lazyckpt/explore/frontend") for name in names)
    info = f"lazyckpt-{lazyckpt.__version__}.dist-info"
    assert f"{info}/licenses/LICENSE" in names
    assert "lazyckpt = lazyckpt.cli:main" in zipfile.ZipFile(wheel).read(f"{info}/entry_points.txt").decode()


@pytest.mark.slow
def test_a_reader_of_another_package(tmp_path: Path) -> None:
    """The one of CONTRIBUTING.md, installed as an entry point."""
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    (table,) = re.findall(r"^```toml\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    (group,) = tomllib.loads(table)["project"]["entry-points"].items()
    assert group[0] == GROUP
    (tmp_path / "mypackage").mkdir()
    (tmp_path / "mypackage" / "npy.py").write_text(code)
    info = tmp_path / "mypackage-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mypackage\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group[0]}]\n" + "\n".join(f"{k} = {v}" for k, v in group[1].items()))
    np.save(tmp_path / "a.npy", np.arange(6.0).reshape(2, 3))
    code = (
        "import lazyckpt; v = lazyckpt.open('a.npy'); print(v.format, v['array'][1].tolist(), "
        "lazyckpt.open('a.npy', format='npy')['array'].shape, list(v.stored))"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "npy [3.0, 4.0, 5.0] torch.Size([2, 3]) ['array']\n", done.stderr


def test_benchmarks_import_names_that_exist() -> None:
    for path in (ROOT / "benchmarks").rglob("*.py"):
        for module, names in re.findall(
            r"^from (tests[.\w]*|lazyckpt[.\w]*) import (.+)$", path.read_text("utf-8"), re.M
        ):
            found = importlib.import_module(module)
            assert all(hasattr(found, name.strip()) for name in names.split(",")), (path.name, module, names)
