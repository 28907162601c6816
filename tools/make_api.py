"""Write docs/api/: what is public, with signatures and docstrings, from the package itself.

    python tools/make_api.py          # writes the pages
    python tools/make_api.py --check  # exit code 1 if a page is not what it would write

Nothing is listed by hand but which page has what: members come from ``__all__``, from the classes and from the command
line as they are. tests/test_docs.py compares the pages with the package.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from types import MemberDescriptorType, ModuleType
from typing import Any, TypeVar, get_args, get_origin

import lazyckpt
from lazyckpt import cli, deepspeed, distributed, errors, interop, recipes
from lazyckpt.cli import program
from lazyckpt.core import box, extents, fragments, index, placement, specs
from lazyckpt.deepspeed import constants
from lazyckpt.export import options as export_options
from lazyckpt.export import registry as export_registry
from lazyckpt.formats import reader
from lazyckpt.inspect import table
from lazyckpt.inspect import updates as sizes
from lazyckpt.show import by_layer, plot, plot_tensor, updates

FOLDER = Path(__file__).parents[1] / "docs" / "api"
_WIDTH = 100  # columns of a signature on one line
# those that are worth a heading, where they have a docstring
_OPERATORS = ("__getitem__", "__iter__", "__array__", "__add__")
_HEAD = "<!-- Written by tools/make_api.py from the docstrings: edit those, and run it. -->\n\n"


def pages() -> dict[str, str]:
    """File name -> text of every page."""
    view, tensor, run = lazyckpt.CheckpointView, lazyckpt.LazyTensor, lazyckpt.RunView
    elsewhere = {"CheckpointView", "LazyTensor", "RunView", "open", "open_run", *errors.__all__}
    alone = [name for name in lazyckpt.__all__ if name not in elsewhere]
    array = tensor.__mro__[1]  # its module has the contract
    stepped = importlib.import_module("lazyckpt.runs.view").StepTensor
    doors = [importlib.import_module(f"lazyckpt.interop.{name}") for name in interop._DOORS]
    formats = [(name, importlib.import_module(f"lazyckpt.export.{name}")) for name in export_registry.NAMES]
    tables = {
        "view.md": (
            "CheckpointView",
            "`lazyckpt.open` gives one: a mapping from names to tensors.\n\n"
            + member("lazyckpt.open", lazyckpt.open, 2)
            + "\n"
            + class_(view, 2),
        ),
        "tensor.md": ("LazyTensor", text_of(module_of(array)) + "\n\n" + class_(tensor, 2)),
        "run.md": (
            "RunView",
            "`lazyckpt.open_run` gives one: a `CheckpointView` whose tensors have a first dimension of steps.\n\n"
            + member("lazyckpt.open_run", lazyckpt.open_run, 2)
            + "\n"
            + class_(run, 2)
            + "\n"
            + class_(stepped, 2),
        ),
        "lazyckpt.md": ("lazyckpt", "\n".join(member(name, getattr(lazyckpt, name), 2) for name in alone)),
        "writing.md": (
            "Writing",
            "The options of all `to_...` methods, and what each format has in it.\n\n"
            + class_(export_options.WriteOptions, 2)
            + "\n"
            + "\n\n".join(f"## {f'to_{name}'}\n\n{text_of(written)}" for name, written in formats),
        ),
        "stats.md": (
            "Statistics",
            "What `t.stats()`, `view.stats()`, `run.stats()`, `view.by_layer()` and `run.by_layer()` return.\n\n"
            + "\n".join(
                class_(o, 2)
                for o in (table.Stats, table.Table, table.Histogram, by_layer.LayerTable, by_layer.RunTable)
            ),
        ),
        "plots.md": (
            "Plots",
            f"What `t.plot`, `view.plot` and `run.plot` have. {text_of(plot)}\n\n"
            + "\n".join(
                class_(o, 2) for o in (plot_tensor.TensorPlots, plot.ViewPlots, plot_tensor.StepPlots, plot.RunPlots)
            ),
        ),
        "updates.md": (
            "Updates of optimizers",
            "What `view.updates()` and `run.updates()` return.\n\n"
            + "\n".join(
                class_(o, 2) for o in (updates.Updates, updates.RunUpdates, sizes.UpdateTable, sizes.UpdateSize)
            ),
        ),
        "recipes.md": ("lazyckpt.recipes", module(recipes)),
        "errors.md": ("Errors", text_of(errors) + "\n\n" + "\n".join(error(name) for name in errors.__all__)),
        "deepspeed.md": ("lazyckpt.deepspeed", module(deepspeed, set(constants.__all__)) + _constants()),
        "distributed.md": ("lazyckpt.distributed", module(distributed)),
        "interop.md": ("lazyckpt.interop", text_of(interop) + "\n\n" + "\n".join(whole(door) for door in doors)),
        "readers.md": (
            "For readers of other formats",
            "What `t.fragments` is made of, and what a reader of another package builds "
            "([CONTRIBUTING.md](../../CONTRIBUTING.md) has one).\n\n"
            + "\n".join(class_(o, 2) for o in (reader.Reader, reader.Source))
            + text_of(index)
            + "\n\n"
            + "\n".join(member(o.__name__, o, 2) for o in _data()),
        ),
        "cli.md": ("The command line", text_of(cli) + "\n\n" + command_line()),
    }
    found = {name: f"{_HEAD}# {title}\n\n{text.strip()}\n" for name, (title, text) in tables.items()}
    found["README.md"] = _HEAD + _contents(tables)
    return {name: re.sub(r"\n{3,}", "\n\n", text) for name, text in found.items()}


def _contents(tables: dict[str, tuple[str, str]]) -> str:
    lines = [f"# API reference\n\nlazyckpt {lazyckpt.__version__}. Sizes are bytes where nothing else is said.\n"]
    for name, (title, text) in tables.items():
        inside = re.findall(r"^## (.+)$", text, re.MULTILINE)
        listed = ", ".join(f"[{re.sub('`', '', t)}]({name}#{_anchor(t)})" for t in inside)
        lines.append(f"- **[{title}]({name})**" + (f": {listed}" if listed else ""))
    return "\n".join(lines) + "\n"


def _anchor(heading: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _data() -> list[Any]:
    modules = (extents, placement, specs, index)
    described = [getattr(of, name) for of in modules for name in vars(of) if _is_public_class(of, name)]
    return [box.Box, *described, fragments.Fragments, specs.whole]


def _is_public_class(of: ModuleType, name: str) -> bool:
    value = getattr(of, name)
    return not name.startswith("_") and inspect.isclass(value) and value.__module__ == of.__name__


# -- what there is to say of something


def module(of: ModuleType, besides: Iterable[str] = ()) -> str:
    """The docstring of a module, and all that it exports."""
    names = [name for name in of.__all__ if name not in set(besides)]
    return text_of(of) + "\n\n" + "\n".join(member(name, getattr(of, name), 2) for name in names)


def whole(of: ModuleType) -> str:
    """The same of a module without ``__all__``: what is defined there."""
    own = {n: v for n, v in vars(of).items() if not n.startswith("_") and getattr(v, "__module__", "") == of.__name__}
    listed = {n: v for n, v in own.items() if (inspect.isclass(v) or inspect.isfunction(v)) and not _is_protocol(v)}
    text = f"## {of.__name__}\n\n{text_of(of)}\n\n"
    return text + "\n".join(member(name, value, 3) for name, value in listed.items())


def _is_protocol(value: Any) -> bool:
    return bool(getattr(value, "_is_protocol", False))


def member(name: str, value: Any, level: int) -> str:
    if inspect.isclass(value):
        return class_(value, level)
    return f"{'#' * level} {name}\n\n{block(signature(name, value))}\n{text_of(value)}\n"


def class_(cls: type, level: int) -> str:
    """A class: how it is made, what it is, its fields, properties and methods."""
    lines = [f"{'#' * level} {cls.__name__}\n"]
    fields = _fields(cls)
    if fields is None and "__init__" in _mro(cls):
        lines.append(block(_resolved(cls, signature(cls.__name__, cls))))
    lines.append(text_of(cls) + "\n")
    if fields:
        lines.append(block("\n".join(f"{name}: {kind}" for name, kind in fields.items())))
    bare: list[str] = []
    # (what a class of another library asks of its own is not ours to describe)
    members = {} if level > 2 and "__init__" not in vars(cls) else _members(cls)
    for name, value in members.items():
        if fields and name in fields:
            continue
        text = text_of(value)
        if not text:
            bare.append(name)
            continue
        heading = f"{'#' * (level + 1)} {cls.__name__}.{name}\n"
        lines += [heading, block(_told(cls, name, value)), text + "\n"]
    if bare:
        lines.append(
            f"As in the class that it imitates (`torch.Tensor`, a mapping): {', '.join(f'`{n}`' for n in bare)}.\n"
        )
    return "\n".join(lines)


def _told(cls: type, name: str, value: Any) -> str:
    return _resolved(cls, _written(name, value))


def _resolved(cls: type, text: str) -> str:
    """A signature with the classes that ``cls`` has in the place of the type variables of its bases."""
    for variable, kind in _variables(cls).items():
        text = re.sub(rf"\b{variable}\b", kind, text)
    return text


def _variables(cls: type) -> dict[str, str]:
    """Name of a type variable of a base -> the class that ``cls`` or a base below it has in its place."""
    found: dict[str, str] = {}
    for one in cls.__mro__:
        for base in vars(one).get("__orig_bases__", ()):
            for variable, kind in zip(_parameters(get_origin(base)), get_args(base), strict=False):
                if not isinstance(kind, TypeVar):
                    found.setdefault(variable.__name__, kind if isinstance(kind, str) else kind.__name__)
    return found


def _parameters(generic: Any) -> list[TypeVar]:
    """The type variables of a generic class of lazyckpt."""
    if not getattr(generic, "__module__", "").startswith("lazyckpt."):
        return []
    return [
        variable for base in vars(generic).get("__orig_bases__", ()) for variable in getattr(base, "__parameters__", ())
    ]


def _written(name: str, value: Any) -> str:
    if isinstance(value, property | cached_property):
        getter = value.fget if isinstance(value, property) else value.func
        kind = inspect.signature(getter).return_annotation if getter is not None else Any
        return f"{name}: {_annotation(kind)}"
    if isinstance(value, classmethod | staticmethod):
        value = value.__func__
    return signature(name, value)


def _mro(cls: type) -> dict[str, Any]:
    """What lazyckpt's own classes define: the members of the last base first, then what the classes above it add."""
    own = [vars(c) for c in cls.__mro__ if c.__module__.split(".")[0] == "lazyckpt"]
    return {name: next(table[name] for table in own if name in table) for table in own[::-1] for name in table}


def _members(cls: type) -> dict[str, Any]:
    """Public members in their order; of a class that has a base in the reference, its own only."""
    skip = {id(v) for base in (lazyckpt.CheckpointView, lazyckpt.LazyTensor) if cls is not base for v in _all(base)}
    found = {}
    for name, value in _mro(cls).items():
        public = not name.startswith("_") or (name in _OPERATORS and inspect.getdoc(value))
        described = callable(value) or isinstance(value, property | cached_property | classmethod | staticmethod)
        if public and described and not isinstance(value, MemberDescriptorType) and id(value) not in skip:
            found[name] = value
    return found


def _all(cls: type) -> Iterator[Any]:
    yield from _mro(cls).values()


def _fields(cls: type) -> dict[str, str] | None:
    """Name -> type of the fields of a dataclass or a named tuple; None for other classes."""
    if dataclasses.is_dataclass(cls):
        return {
            f.name: _annotation(f.type) + _default(f.default)
            for f in dataclasses.fields(cls)
            if not f.name.startswith("_")
        }
    names = getattr(cls, "_fields", None)
    if names is None or not issubclass(cls, tuple):
        return None
    defaults = getattr(cls, "_field_defaults", {})
    kinds = cls.__annotations__
    return {n: _annotation(kinds[n]) + _default(defaults.get(n, dataclasses.MISSING)) for n in names}


def _default(value: Any) -> str:
    return "" if value is dataclasses.MISSING else f" = {value!r}"


def error(name: str) -> str:
    cls = getattr(errors, name)
    bases = ", ".join(base.__name__ for base in cls.__bases__)
    return f"## {name}\n\n{block(f'class {name}({bases})')}\n{text_of(cls)}\n"


def _constants() -> str:
    """deepspeed's constants, as their module has them: with a comment on what each is in a file."""
    source = inspect.getsource(constants)
    code = source[source.index("# -- ") : source.index("__all__")].rstrip()
    return f"\n## Constants\n\n{text_of(constants)}\n\n{block(code)}"


def command_line() -> str:
    """Every command with its arguments and options."""
    parts = []
    for name in program.COMMANDS:
        command = program.command(name)
        arguments = [p for p in command.params if p.param_type_name == "argument"]
        options = [p for p in command.params if p.param_type_name == "option"]
        usage = " ".join(["lazyckpt", name, "[OPTION...]", *(_argument(p) for p in arguments)])
        rows = [f"| `{_argument(p)}` | {_cell(p.help)} |" for p in arguments]
        rows += [f"| `{_option(p)}` | {_cell(p.help)} |" for p in options]
        text = f"## lazyckpt {name}\n\n```sh\n{usage}\n```\n\n{markdown(inspect.cleandoc(command.help or ''))}\n"
        parts.append(text + ("\n| | |\n|---|---|\n" + "\n".join(rows) + "\n" if rows else ""))
    return "\n".join(parts)


def _argument(p: Any) -> str:
    label = p.metavar or p.name.upper()
    return label if p.required or label.startswith("[") else f"[{label}]"


def _option(p: Any) -> str:
    flags = ", ".join([*p.opts, *p.secondary_opts])
    return flags if p.is_flag else f"{flags} {p.metavar or p.type.name.upper()}"


def _cell(text: str | None) -> str:
    return (text or "").replace("|", "\\|")


# -- text


def module_of(value: Any) -> ModuleType:
    return sys.modules[value.__module__]


def text_of(value: Any) -> str:
    """The docstring as Markdown; "" where there is none of its own."""
    own = value.__func__ if isinstance(value, classmethod | staticmethod) else value
    text = getattr(own, "__doc__", None) or ""
    generated = inspect.isclass(value) and text.startswith(f"{value.__name__}(")  # of a dataclass or a named tuple
    return "" if generated else markdown(inspect.cleandoc(text))


def markdown(text: str) -> str:
    """A docstring as Markdown: ``code`` in single ticks, sections as lists, examples and indented text in fences.

    >>> print(markdown('''Of ``x``.
    ...
    ... >>> 1 + 1
    ... 2
    ...
    ... More.
    ...
    ... Parameters
    ... ----------
    ... n
    ...     Bytes, or text
    ...     such as ``"5GB"``.'''))
    Of `x`.
    <BLANKLINE>
    ```pycon
    >>> 1 + 1
    2
    ```
    <BLANKLINE>
    More.
    <BLANKLINE>
    **Parameters**
    <BLANKLINE>
    - `n`: Bytes, or text
      such as `"5GB"`.
    """
    parts = []
    for paragraph in re.split(r"\n\s*\n", _lists(text)):
        if paragraph.startswith(">>> "):
            shown = re.sub(r" *# doctest: .+$", "", paragraph, flags=re.MULTILINE)
            parts.append(f"```pycon\n{shown}\n```")
        elif paragraph and all(line.startswith("    ") for line in paragraph.splitlines()):
            parts.append(f"```\n{inspect.cleandoc(paragraph)}\n```")
        else:
            parts.append(re.sub(r"``(.+?)``", r"`\1`", paragraph, flags=re.DOTALL))
    return re.sub(r"\n```\n\n```\n", "\n\n", "\n\n".join(parts))


def _lists(text: str) -> str:
    """A docstring whose numpy-style sections are lists."""
    start, *rest = re.split(r"^([A-Z]\w+)\n-{3,}\n", text, flags=re.MULTILINE)
    parts = [start]
    for title, body in zip(rest[::2], rest[1::2], strict=True):
        items = re.sub(r"^(\S.*)\n    (.*(?:\n    .*)*)", _item, body, flags=re.MULTILINE)
        parts.append(f"**{title}**\n\n{items}")
    return "".join(parts)


def _item(match: re.Match[str]) -> str:
    lines = match[2].splitlines()
    return "\n".join([f"- `{match[1]}`: {lines[0]}", *(line.removeprefix("  ") for line in lines[1:])])


def block(code: str) -> str:
    return f"```python\n{code}\n```\n"


def signature(name: str, value: Any) -> str:
    """With annotations as they are written; over several lines if it is long."""
    found = inspect.signature(value)
    parameters = []
    seen_star = False
    for n, p in enumerate(found.parameters.values()):
        if n == 0 and p.name == "self":
            continue
        if p.kind is p.KEYWORD_ONLY and not seen_star:
            parameters.append("*")
            seen_star = True
        seen_star = seen_star or p.kind is p.VAR_POSITIONAL
        stars = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        text = stars + p.name
        if p.annotation is not p.empty:
            text += f": {_annotation(p.annotation)}"
        if p.default is not p.empty:
            text += f" = {_shown(p.default)}" if p.annotation is not p.empty else f"={_shown(p.default)}"
        parameters.append(text)
    empty = found.return_annotation is found.empty or inspect.isclass(value)
    end = "" if empty else f" -> {_annotation(found.return_annotation)}"
    line = f"{name}({', '.join(parameters)}){end}"
    if len(line) <= _WIDTH:
        return line
    return f"{name}(\n" + "".join(f"    {p},\n" for p in parameters) + f"){end}"


def _shown(value: Any) -> str:
    return "..." if value is ... else repr(value)


def _annotation(kind: Any) -> str:
    kind = getattr(kind, "__forward_arg__", kind)  # of a named tuple
    return kind if isinstance(kind, str) else inspect.formatannotation(kind)


def main() -> int:
    new = pages()
    old = {path.name: path.read_text("utf-8") for path in FOLDER.glob("*.md")}
    if "--check" in sys.argv:
        wrong = sorted(n for n in {*new, *old} if new.get(n) != old.get(n))
        print("\n".join(f"docs/api/{name} is not up to date: run tools/make_api.py" for name in wrong))
        return 1 if wrong else 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in {*old} - {*new}:
        (FOLDER / name).unlink()
    for name, text in new.items():
        (FOLDER / name).write_text(text, "utf-8")
    print(f"{len(new)} pages in {FOLDER}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
