"""The command line: `lazyckpt ls`, `lazyckpt show`, `lazyckpt prune`, `lazyckpt demo`.

Coloured on a terminal, plain text elsewhere. What a checkpoint brings (names, paths, problems) is printed literally: no
markup, no escape codes. Errors are one line on stderr, with exit code 2.
"""

from __future__ import annotations

import ast
import io
import json
import os
import shutil
import sys
import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from . import __version__
from . import open as open_checkpoint
from . import prune as prune_folder
from .demo import walk
from .errors import LazyckptError, SelectionError, TensorNotFoundError
from .formats.rulesfile import read_rules
from .show.text import human_bytes, kind, plural, printable, rows, rows_of, summary
from .show.values import LIMIT, json_values, values
from .tensor import LazyTensor
from .view import CheckpointView

_PROBLEMS = 20  # lines of problems that `ls` prints
_PLAIN_WIDTH = 100  # columns for values where there is no terminal


class _Group(TyperGroup):
    """Commands whose expected errors are one line, and that end quietly when the reader of a pipe has seen enough."""

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except BrokenPipeError:
            # the interpreter flushes stdout once more at its end: into nothing
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from None
        except (LazyckptError, OSError) as e:
            _print(("error: ", "bold red"), (" ".join(str(e).split()), ""), err=True)
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=_Group, no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
)

_Path = Annotated[str, typer.Argument(metavar="PATH", help="A checkpoint: a file or a folder.", show_default=False)]
_State = Annotated[str | None, typer.Option(metavar="NAME", help="weights, fp32, exp_avg, ... (view.states)")]
_Stored = Annotated[bool, typer.Option("--stored", help="Every tensor as it is stored (view.stored).")]
_Tag = Annotated[str | None, typer.Option(metavar="TAG", help="Which of several checkpoints in the folder.")]
_Format = Annotated[str | None, typer.Option(metavar="NAME", help="The reader to use, where it is not to be guessed.")]
_Rules = Annotated[str | None, typer.Option(metavar="FILE", help="Merge rules: a TOML file with a table [rules].")]
_Json = Annotated[bool, typer.Option("--json", help="Everything as JSON.")]


def main() -> None:
    """The console script."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names may hold what the terminal's encoding lacks
            stream.reconfigure(errors="backslashreplace")
    app(prog_name="lazyckpt")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lazyckpt {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Open huge model checkpoints as one namespace of lazy tensors."""


@app.command()
def ls(
    path: _Path,
    prefix: Annotated[str, typer.Argument(metavar="PREFIX", help="A part: layers.3.mlp", show_default=False)] = "",
    depth: Annotated[int | None, typer.Option(min=1, metavar="N", help="Levels of the tree to print.")] = None,
    state: _State = None,
    stored: _Stored = False,
    tag: _Tag = None,
    format: _Format = None,
    rules: _Rules = None,
    as_json: _Json = False,
) -> None:
    """List the tensors of a checkpoint as a tree: names, dtypes, shapes, sizes, parameter counts. Reads no data."""
    view = _open(path, state, stored, tag, format, rules)
    part = _part(view, prefix)
    if as_json:
        _write(json.dumps(_described(part), indent=2))
        return
    _print((summary(part), "bold"))
    for problem in view.problems[:_PROBLEMS]:
        _print(("problem: ", "yellow"), (problem, ""))
    if len(view.problems) > _PROBLEMS:
        _print((f"... and {len(view.problems) - _PROBLEMS:,} more problems (--json has them all)", "yellow"))
    table = rows(part, depth)
    for leaf, (name, shape, size, note) in table:
        cells = ((name, "" if leaf else "bold"), (shape, "cyan" if leaf else "dim"), (size, ""), (note, "dim"))
        _print(*(piece for cell in cells for piece in (cell, ("  ", ""))), strip=True)
    if not table:
        _print(("(no tensors)", "dim"))


@app.command()
def show(
    path: _Path,
    name: Annotated[str, typer.Argument(metavar="NAME[INDEX]", help="'layers.3.mlp.up.weight[0:4, ::8]'")],
    explain: Annotated[
        bool, typer.Option("--explain", help="Which bytes of which files it takes; reads none.")
    ] = False,
    state: _State = None,
    stored: _Stored = False,
    tag: _Tag = None,
    format: _Format = None,
    rules: _Rules = None,
    as_json: _Json = False,
) -> None:
    """Print a tensor or, as in Python, a part of it: ints, slices, ..., None, a list of ints. Reads what it prints."""
    view = _open(path, state, stored, tag, format, rules)
    whole, key, text = _find(view, name)
    t = whole if text is None else whole.lazy[key]
    if as_json:
        described: dict[str, Any] = {"name": whole.name, "index": text, "dtype": str(t.dtype).removeprefix("torch.")}
        described |= {"shape": list(t.shape), "nbytes": t.nbytes}
        described |= {"explain": t.explain()} if explain else {"values": json_values(t)}
        _write(json.dumps(described, allow_nan=False))
        return
    if explain:
        for line in t.explain().splitlines():
            _print((line, ""))
        return
    console = _console()
    printed = values(t, console.width if console.is_terminal else _PLAIN_WIDTH)
    notes = [human_bytes(t.nbytes)]
    if text is not None:
        notes.append(f"of {kind(whole)}")
    if t.numel() > LIMIT:
        notes.append("the edges of it")
    label = whole.name + (f"[{text}]" if text is not None else "")
    _print((label, "bold"), ("  ", ""), (kind(t), "cyan"), ("  " + ", ".join(notes), "dim"))
    if whole.spec.rule:
        _print((whole.spec.rule, "dim"))
    for line in printed.splitlines():
        _print((line, ""))


@app.command()
def prune(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="The folder of a run.", show_default=False)],
    keep: Annotated[int, typer.Option(metavar="N", help="How many of the newest complete checkpoints stay.")],
    delete: Annotated[bool, typer.Option("--delete", help="Remove them; without it, only say what would go.")] = False,
    incomplete: Annotated[
        bool, typer.Option("--incomplete", help="Also those that are not complete: not while a trainer is writing.")
    ] = False,
    as_json: _Json = False,
) -> None:
    """Remove the older checkpoints of a run: not the newest N complete ones, nor what `latest` and the like name.

    Exit codes: 0 done (or nothing to do), 1 something could not be removed, 2 an error, and nothing was.
    """
    done = prune_folder(folder, keep, delete=delete, incomplete=incomplete)
    if as_json:
        _write(json.dumps(done.as_dict(), indent=2))
    else:
        for item in done.keep:
            _print(("keep    ", "green"), (item.name, "bold"), (f"  {human_bytes(item.nbytes)}  {item.reason}", "dim"))
        for item in (*done.leftovers, *done.remove):
            label = "removed " if delete else "remove  "
            _print((label, "red"), (item.name, "bold"), (f"  {human_bytes(item.nbytes)}  {item.reason}", "dim"))
        for line in done.failed:
            _print(("failed: ", "bold red"), (line, ""), err=True)
        count = plural(len(done.remove) + len(done.leftovers), "checkpoint")
        freed = human_bytes(done.nbytes)
        tail = "removed" if delete else "would go; --delete removes them"
        _print((f"{count}, {freed} {tail}" if done.remove or done.leftovers else "nothing to remove", ""))
    if done.failed:
        raise typer.Exit(1)


@app.command()
def demo(
    keep: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write the files there, and keep them (default: a temporary folder)."),
    ] = None,
) -> None:
    """Write small real checkpoints and walk through what lazyckpt does with them."""
    if keep is not None and keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise LazyckptError(f"{keep} is not an empty folder: the demo would overwrite what is there")
    folder = keep or Path(tempfile.mkdtemp(prefix="lazyckpt-demo-"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for step in walk(folder):
            if step.code:
                _print((">>> ", "green"), (step.code, "bold"))
            for line in step.text.splitlines():
                _print((line, "" if step.code else "cyan"))
            if not step.code or step.text:
                _print()
    finally:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    if keep is not None:
        _print((f"The files are in {keep}. Try: lazyckpt ls {keep / 'model'}", "cyan"))
    else:
        _print(("The files are gone again; `lazyckpt demo --keep DIR` keeps them.", "cyan"))


# -- what the commands share


def _open(
    path: str, state: str | None, stored: bool, tag: str | None, format: str | None, rules: str | None
) -> CheckpointView:
    if stored and state is not None:
        raise TensorNotFoundError("--stored lists the tensors of all states under their raw names: leave out --state")
    view = open_checkpoint(path, tag=tag, format=format, rules=None if rules is None else read_rules(rules))
    if stored:
        return view.stored
    if state is None:
        return view
    if state not in view.states:
        raise TensorNotFoundError(f"{path} has no state {state!r}; it has: {', '.join(view.states)}")
    return view.states[state]


def _part(view: CheckpointView, prefix: str) -> CheckpointView:
    """The part of a view that a prefix, or the name of one tensor, stands for."""
    if not prefix:
        return view
    found = view[prefix]
    if isinstance(found, CheckpointView):
        return found
    # a state of the optimizer lists the owner of a tied name only
    listed = set(view)
    name = next(n for n in (prefix, found.name, view.owner(prefix)) if n in listed)
    return view.select(lambda n: n == name)


def _find(view: CheckpointView, text: str) -> tuple[LazyTensor, Any, str | None]:
    """(the tensor, the key, the key as it was written) of ``NAME[INDEX]``. A name may hold brackets of its own, so the
    longest name that there is wins."""
    splits = [len(text)]
    if text.endswith("]"):
        splits += [n for n in range(len(text) - 1, -1, -1) if text[n] == "["]
    for n in splits:
        if text[:n] in view:
            return _indexed(view[text[:n]], text, n)
    # no exact name: an inner path, or else the error that says what is near
    error: LazyckptError | None = None
    for n in splits:
        try:
            found = view[text[:n]]
        except TensorNotFoundError as e:
            error = e
            continue
        if isinstance(found, LazyTensor):
            return _indexed(found, text, n)
        raise TensorNotFoundError(f"{text[:n]!r} is no tensor, {len(found):,} tensors are below it: use ls to see them")
    assert error is not None  # every way to split the text raised one
    raise error


def _indexed(t: LazyTensor, text: str, n: int) -> tuple[LazyTensor, Any, str | None]:
    index = text[n + 1 : -1] if n < len(text) else None
    return t, None if index is None else parse_index(index), index


def parse_index(text: str) -> Any:
    """The key that ``t[text]`` would index with; nothing is evaluated. Raises SelectionError for all but literals.

    >>> parse_index("0:4, ::-8")
    (slice(0, 4, None), slice(None, None, -8))
    >>> parse_index("..., [3, 1], None")
    (Ellipsis, [3, 1], None)
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(f"_[{text}]", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        tree = None
    if not isinstance(tree, ast.Subscript) or not isinstance(tree.value, ast.Name):
        raise SelectionError(_not_understood(text))
    return _item(tree.slice, text)


def _item(node: ast.expr, text: str) -> Any:
    match node:
        case ast.Tuple(elts):
            return tuple(_item(e, text) for e in elts)
        case ast.List(elts):
            return [_literal(e, text) for e in elts]
        case ast.Slice(lower, upper, step):
            return slice(*(None if e is None else _literal(e, text) for e in (lower, upper, step)))
        case ast.Constant(value) if value is Ellipsis:
            return value
    return _literal(node, text)


def _literal(node: ast.expr, text: str) -> int | None:
    match node:
        case ast.Constant(value) if value is None or isinstance(value, int):
            return value
        case ast.UnaryOp(ast.USub(), ast.Constant(value)) if type(value) is int:
            return -value
    raise SelectionError(_not_understood(text))


def _not_understood(text: str) -> str:
    return f"the index [{text}] is not understood: it takes ints, slices, ..., None and one list of ints"


def _described(view: CheckpointView) -> dict[str, Any]:
    """Everything that `ls` shows, as plain objects."""
    return {
        "root": view.root,
        "format": view.format,
        "mesh": {"tp": view.mesh.tp, "pp": view.mesh.pp, "dp": view.mesh.dp, "ep": view.mesh.ep},
        "state": view.state,
        "states": list(view.states),
        "numel": view.numel,
        "nbytes": view.nbytes,
        "files": {path: info.size for path, info in view.files.items()},
        "problems": list(view.problems),
        "tensors": rows_of(view),
    }


def _write(text: str) -> None:
    """Text for machines, in pieces: an unbuffered stdout would not notice that the reader left in the middle of one."""
    for at in range(0, len(text), 1 << 14):
        sys.stdout.write(text[at : at + (1 << 14)])
    sys.stdout.write("\n")


@cache
def _console(err: bool = False) -> Console:
    return Console(stderr=err, markup=False, highlight=False, emoji=False, soft_wrap=True)


def _print(*pieces: tuple[str, str], err: bool = False, strip: bool = False) -> None:
    """One line of (text, style) pieces, literally."""
    line = Text()
    for text, style in pieces:
        line.append(printable(text), style)
    if strip:
        line.rstrip()
    _console(err).print(line)
