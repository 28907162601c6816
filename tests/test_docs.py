"""The documentation: examples run, links lead somewhere, and the reference is what the package says of itself."""

from __future__ import annotations

import builtins
import doctest
import importlib
import importlib.util
import inspect
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import lazyckpt
from lazyckpt import demo, errors, recipes
from lazyckpt.cli import program
from lazyckpt.export.options import WriteOptions
from lazyckpt.formats.registry import builtin
from lazyckpt.inspect import table as inspect_table
from lazyckpt.show import plot
from tests.servers.fixtures import need_obstore
from tests.servers.hub import Hub
from tests.servers.s3 import serve_s3

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
# test_package runs the README's tour; pytest runs the docstrings, which docs/api repeats
PAGES = sorted(path for path in DOCS.rglob("*.md") if path.parent.name != "api")
FORMATS = sorted((DOCS / "formats").glob("*.md"))
LINKED = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def make_api() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_api", ROOT / "tools" / "make_api.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def api() -> ModuleType:
    pytest.importorskip("dask")  # the reference has what needs it, too
    return make_api()


# -- examples

SERVERS = {"remote.md": "bucket", "hub.md": "hub"}  # pages, and the server that their examples read from


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The demo's files as the objects of the bucket "models", for whoever reads the environment."""
    need_obstore()
    with serve_s3(tmp_path, delay=0, bucket="models") as server:
        for name, value in {"ENDPOINT_URL": server.endpoint, "ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "s"}.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        yield


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A Hub with the demo's model, and with a run of two checkpoints of it."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with Hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        hub.push("org/model", tmp_path / "demo" / "model")
        for step in (100, 200):
            for path in (tmp_path / "demo" / "model").iterdir():
                hub.push("org/run", {f"checkpoint-{step}/{path.name}": path.read_bytes()})
        yield


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_examples_are_true(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """All of a page's, one after the other, where the demo's files are in ``demo``."""
    blocks = re.findall(r"^```pycon\n(.*?)^```", path.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    if not blocks:
        pytest.skip("it has none")
    monkeypatch.chdir(tmp_path)
    demo.write(tmp_path / "demo")
    if path.name in SERVERS:
        request.getfixturevalue(SERVERS[path.name])
    test = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, path.name, str(path), 0)
    report: list[str] = []
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    failed, _ = doctest.DocTestRunner(optionflags=flags).run(test, out=report.append)
    assert not failed, "".join(report)


def test_every_example_is_in_a_block_that_runs() -> None:
    """Prompts outside of ```pycon would never be run."""
    for path in [*PAGES, ROOT / "README.md"]:
        rest = re.sub(r"^```pycon\n.*?^```", "", path.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
        assert not re.search(r"^\s*>>> ", rest, re.MULTILINE), path


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_python_in_pages_is_python(path: Path) -> None:
    for code in re.findall(r"^```python\n(.*?)^```", path.read_text("utf-8"), re.DOTALL | re.MULTILINE):
        compile(code, name_of(path), "exec")


def test_every_example_in_a_docstring_is_found() -> None:
    """Those of nested functions, for one, doctest would pass over."""
    package = ROOT / "lazyckpt"
    for path in sorted(package.rglob("*.py")):
        prompts = len(re.findall(r"^\s*>>> ", path.read_text("utf-8"), re.MULTILINE))
        if prompts:
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            found = doctest.DocTestFinder().find(importlib.import_module(name))
            assert sum(len(test.examples) for test in found) == prompts, path


# -- links


@pytest.mark.parametrize("path", LINKED, ids=name_of)
def test_links_lead_somewhere(path: Path) -> None:
    text = re.sub(r"^```.*?^```", "", path.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        assert there.exists(), f"{name_of(path)}: {target}"
        if anchor and there.suffix == ".md":
            headings = re.findall(r"^#+ (.+)$", there.read_text("utf-8"), re.MULTILINE)
            known = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}
            assert anchor in known, f"{name_of(path)}: {target}"
    for module in re.findall(r"\b(?:benchmarks|lazyckpt|tests|tools)/[a-z_/]+\.py\b", text):
        assert (ROOT / module).exists(), f"{name_of(path)}: {module}"


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:")[2]))
    outside = {"contributing.md", "changelog.md"}  # tools/docs_hook.py brings them
    assert listed == {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} | outside


def test_every_page_of_a_folder_is_listed_in_its_readme() -> None:
    for readme in DOCS.rglob("README.md"):
        text = readme.read_text("utf-8")
        for page in readme.parent.glob("*.md"):
            assert page.name == "README.md" or f"]({page.name}" in text, name_of(page)


def test_the_site_builds(tmp_path: Path) -> None:
    pytest.importorskip("material")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_pictures_are_used_and_light() -> None:
    """tools/make_picture.py and tools/make_screenshots.py draw them."""
    pictures = {path.name: path for path in (DOCS / "pictures").iterdir()}
    text = "\n".join(path.read_text("utf-8") for path in LINKED)
    assert set(re.findall(r"pictures/([\w-]+\.png)[)\"]", text)) == set(pictures)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures.values())
    assert sum(path.stat().st_size for path in pictures.values()) < 1_500_000


def test_figures_of_the_readme_are_those_measured() -> None:
    """`python -m benchmarks page` writes both."""

    def figures(page: str) -> set[tuple[str, ...]]:
        blocks = re.findall(r"<!-- benchmarks: \S+ -->\n(.*?)<!-- end -->", (ROOT / page).read_text("utf-8"), re.DOTALL)
        rows = [row.split(" | ") for row in "\n".join(blocks).splitlines() if row.startswith("| ")]
        return {tuple(row[:3]) for row in rows}

    assert len(figures("README.md")) > 5 and figures("README.md") <= figures("docs/explanation/speed.md")


# -- formats


def test_every_reader_is_described() -> None:
    """By the name that `open(format=...)` knows it by."""
    text = "\n".join(path.read_text("utf-8") for path in FORMATS)
    for reader in builtin():
        assert f"`{reader.name}`" in text, reader.name


def test_readers_are_listed_in_their_order() -> None:
    text = (DOCS / "formats" / "README.md").read_text("utf-8").partition("| reader |")[2]
    listed = re.findall(r"^\| `([\w-]+)` \|", text, re.MULTILINE)
    assert listed == [reader.name for reader in builtin()]


def test_the_matrix_has_every_reader_and_every_recording() -> None:
    """A row for each reader, without an empty cell; a dash has a reason. The recordings that it names are there."""
    rows = re.findall(r"^\| (`[\w-]+` \|.*) \|$", (DOCS / "formats" / "matrix.md").read_text("utf-8"), re.MULTILINE)
    cells = [[cell.strip() for cell in row.split("|")] for row in rows]
    assert [row[0].strip("`") for row in cells] == [reader.name for reader in builtin()]
    for row in cells:
        assert len(row) == 6 and all(len(cell) > 3 for cell in row), row
    groups = {path.name for path in (ROOT / "tests" / "golden").iterdir()}
    named = {name for row in cells for name in re.findall(r"`(\w+)`", row[5])}
    assert named <= groups
    merges = {"mergekit"}  # not a format
    assert {name for name in groups - merges if not name.startswith("quantized_")} <= named


def test_every_format_is_described() -> None:
    """By what `view.format` calls it."""
    text = "\n".join(path.read_text("utf-8") for path in FORMATS)
    found: set[str] = set()
    for path in (ROOT / "lazyckpt" / "formats").rglob("*.py"):
        code = path.read_text("utf-8")
        found |= set(re.findall(r'\bformat="([a-z][a-z0-9-]+)"', code))
    assert len(found) > 8
    for name in found:
        assert f"`{name}`" in text, name


@pytest.mark.parametrize("path", FORMATS, ids=name_of)
def test_sources_of_lazyckpt_are_there(path: Path) -> None:
    """A page names the modules that read and write what it describes."""
    text = path.read_text("utf-8")
    named = re.findall(r"`(lazyckpt/[\w/]+(?:\.py|/))`", text)
    assert named or path.name in ("README.md", "matrix.md")
    for name in named:
        assert (ROOT / name).exists(), f"{name_of(path)}: {name}"


# -- the reference


def test_the_reference_is_up_to_date(api: ModuleType) -> None:
    pages = api.pages()
    assert {path.name for path in api.FOLDER.glob("*.md")} == set(pages)
    for name, text in pages.items():
        assert (api.FOLDER / name).read_text("utf-8") == text, f"docs/api/{name}: run tools/make_api.py"


def test_the_reference_has_everything_public(api: ModuleType) -> None:
    pages = "\n".join(api.pages().values())
    for name in lazyckpt.__all__:
        assert re.search(rf"^## {name}$", pages, re.MULTILINE) or f"lazyckpt.{name}(" in pages, name


def test_what_public_functions_return_is_in_the_reference(api: ModuleType) -> None:
    """What `stats()`, `plot` and `diff` give is where a user looks for units and errors."""
    pages = "\n".join(api.pages().values())
    headings = set(re.findall(r"^##+ (\w+)$", pages, re.MULTILINE))
    returned = {word for kind in re.findall(r"-> (.+)$", pages, re.MULTILINE) for word in re.findall(r"[A-Z]\w+", kind)}
    doors = set(re.findall(r"^plot: (\w+)$", pages, re.MULTILINE))
    assert {"Stats", "Table", "Diff"} <= returned
    assert {"TensorPlots", "ViewPlots", "StepPlots", "RunPlots"} <= doors
    given = [getattr(m, name, None) for m in (inspect_table, plot, lazyckpt) for name in returned | doors]
    own = {value.__name__ for value in given if getattr(value, "__module__", "").startswith("lazyckpt")}
    assert own <= headings, own - headings
    assert set(recipes.__all__) <= headings


@pytest.mark.parametrize("path", [ROOT / "README.md", *PAGES], ids=name_of)
def test_commands_are_understood(path: Path) -> None:
    """Every `lazyckpt ...` in a page parses: the command is there, and so are its options."""
    for block in re.findall(r"^```sh\n(.*?)^```", path.read_text("utf-8"), re.DOTALL | re.MULTILINE):
        for line in block.splitlines():
            words = shlex.split(line, comments=True)
            if ">" in words:  # what is behind it is for the shell
                words = words[: words.index(">")]
            if words[:1] == ["lazyckpt"]:
                program.command(words[1]).make_context(words[1], words[2:])


def test_public_functions_are_described() -> None:
    from lazyckpt import deepspeed, distributed, interop

    modules = [deepspeed, distributed, *(getattr(interop, door) for door in interop._DOORS if door != "dask")]
    for module in modules:
        names = getattr(module, "__all__", None) or [
            n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__
        ]
        for name in names:
            value = getattr(module, name)
            if callable(value) and not name.startswith("_"):
                assert inspect.getdoc(value), f"{module.__name__}.{name}"


# Rooms below the public classes, whose docstrings describe fields, not parameters.
_WITHOUT_SECTIONS = (
    "lazyckpt.core",
    "lazyckpt.errors",
    "lazyckpt.export",
    "lazyckpt.formats",
    "lazyckpt.io",
    "lazyckpt.show",
)


def test_public_functions_describe_parameters_and_results(api: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """In sections of their docstrings; "public" is everything that the reference shows with a signature."""
    listed: list[Any] = []
    signature = api.signature
    monkeypatch.setattr(api, "signature", lambda name, value: [listed.append(value), signature(name, value)][1])
    api.pages()
    described = [value for value in listed if not value.__module__.startswith(_WITHOUT_SECTIONS)]
    assert len(described) > 100
    for value in described:
        found = inspect.signature(value)
        parameters = sorted(found.parameters.keys() - {"self", "cls"})
        sections = sections_of(value)
        assert parameters_in(sections.get("Parameters", ""), parameters) == parameters, value
        if parameters and not inspect.isclass(value) and found.return_annotation != "None":
            assert sections.keys() & {"Returns", "Yields", "Raises"}, value


def sections_of(value: Any) -> dict[str, str]:
    """Title -> text of the numpy-style sections of a docstring."""
    _, *rest = re.split(r"^(\w+)\n-{3,}$", inspect.cleandoc(value.__doc__ or ""), flags=re.MULTILINE)
    return dict(zip(rest[::2], rest[1::2], strict=True))


def parameters_in(section: str, known: list[str]) -> list[str]:
    """The names that a Parameters section describes; ``**options`` of a writer are those of `WriteOptions`."""
    heads = [line.partition(" :")[0] for line in re.findall(r"^\S.*$", section, re.MULTILINE)]
    names = [name.strip().lstrip("*") for head in heads for name in head.split(",")]
    if "options" in names and "options" not in known:
        names = [name for name in names if name != "options"] + list(WriteOptions.__annotations__)
    return sorted(names)


def test_errors_that_are_named_exist(api: ModuleType) -> None:
    """A docstring that promises an error which there is not would send its reader the wrong way."""
    known = {*errors.__all__, *(n for n in dir(builtins) if n.endswith("Error"))}
    for page, text in api.pages().items():
        assert set(re.findall(r"\b[A-Z]\w+Error\b", text)) <= known, page
