"""The options and arguments that select what to open, and their evaluation."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from ..core.select import parse_index
from ..core.units import plural
from ..derive.arithmetic import Missing
from ..errors import DataError, FormatError, MissingFileError, SelectionError, TensorNotFoundError
from ..inspect.codes import SEVERITIES
from ..inspect.report import FailOn
from ..layouts.merge import user_rules
from ..tensor import LazyTensor
from ..view import CheckpointView
from . import completing

PathArg = Annotated[
    str, typer.Argument(metavar="PATH", help="A checkpoint: a file, a folder, a URL.", show_default=False)
]
StateOption = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="State to open: weights, fp32, exp_avg, ...", autocompletion=completing.states),
]
StoredOption = Annotated[bool, typer.Option("--stored", help="All tensors as stored, under their raw names.")]
TagOption = Annotated[
    str | None,
    typer.Option(metavar="TAG", help="Checkpoint to open if the folder has several.", autocompletion=completing.tags),
]
FormatOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Reader to use (default: detect; see `lazyckpt formats`).",
        autocompletion=completing.formats,
    ),
]
RulesOption = Annotated[str | None, typer.Option(metavar="FILE", help="Merge rules: a TOML file with a table [rules].")]
BaseOption = Annotated[
    str | None, typer.Option("--base", metavar="PATH", help="The base of a delta, if it is not where it was.")
]
MissingOption = Annotated[
    Missing, typer.Option(metavar="HOW", help="A name or shape that one lacks: error, skip, or keep (the first one's).")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print everything as JSON.")]
FailOnOption = Annotated[
    str,
    typer.Option(
        "--fail-on",
        metavar="LEVEL",
        help="Least severity for exit code 1: error, warning, note, never.",
        autocompletion=completing.words(*SEVERITIES, "never"),
    ),
]


def checked_severity(text: str) -> FailOn:
    """Return the value of --fail-on. Raises DataError for an unknown one."""
    if text not in (*SEVERITIES, "never"):
        raise DataError(f"--fail-on {text!r:.40}: it is one of {', '.join(SEVERITIES)} and never")
    return cast("FailOn", text)


def open_view(
    path: str,
    state: str | None,
    stored: bool,
    tag: str | None,
    format: str | None,
    rules: str | None,
    base: str | None = None,
) -> CheckpointView:
    """Open the view that the options select. Raises the errors of opening, and TensorNotFoundError for an unknown
    state."""
    view = CheckpointView(path, tag=tag, format=format, rules=None if rules is None else read_rules(rules), base=base)
    return state_of(view, path, state, stored)


def state_of(view: CheckpointView, path: str, state: str | None, stored: bool) -> CheckpointView:
    """Return the selected state of a view, or raise a TensorNotFoundError that names the path."""
    if stored and state is not None:
        raise TensorNotFoundError("--stored lists the tensors of all states under their raw names: leave out --state")
    if stored:
        return view.stored
    if state is None:
        return view
    if state not in view.states:
        raise TensorNotFoundError(f"{path} has no state {state!r}; it has: {', '.join(view.states)}")
    return view.states[state]


def typed(name: str) -> str:
    """Decode an argument of the command line as UTF-8, whatever the locale's encoding."""
    try:
        return os.fsencode(name).decode("utf-8")
    except UnicodeError:
        return name


def part_of(view: CheckpointView, prefix: str) -> CheckpointView:
    """Return the part of a view below a prefix or of the name of one tensor; either may be a glob."""
    prefix = typed(prefix)
    if not prefix:
        return view
    if is_glob(prefix) and prefix not in view:
        return _globbed(view, prefix)
    found = view[prefix]
    if isinstance(found, CheckpointView):
        return found
    # an optimizer state lists only the owner of a tied name, and a tensor found by its raw name may not be listed
    listed = set(view)
    name = next((n for n in (prefix, found.name, view.owner(prefix)) if n in listed), None)
    return view.stored.select({found.name}.__contains__) if name is None else view.select({name}.__contains__)


def is_glob(text: str) -> bool:
    """Return whether an argument of the command line may be a glob."""
    return bool(set(text) & set("*?["))


def _globbed(view: CheckpointView, pattern: str) -> CheckpointView:
    """Select the tensors whose names, or prefixes of names, match a glob, or raise TensorNotFoundError."""
    below = f"{pattern.removesuffix('.')}.*"
    names = {*view.select(pattern), *view.select(below)}
    if not names:
        raise TensorNotFoundError(
            f"{pattern!r} matches no name or prefix of the {len(view):,} names: lazyckpt ls lists them"
        )
    return view.select(names.__contains__)


def matching(view: CheckpointView, pattern: str, option: str) -> CheckpointView:
    """Select the tensors whose names match a glob, or raise a TensorNotFoundError that names the option."""
    part = view.select(typed(pattern))
    if not part:
        raise TensorNotFoundError(
            f"{option} {pattern!r} matches none of {len(view):,} names, which are compared whole ('*.mlp.*'): "
            "lazyckpt ls shows them"
        )
    return part


def find(view: CheckpointView, text: str) -> tuple[LazyTensor, Any, str | None]:
    """Return the tensor, the key and the text of the key of ``NAME[INDEX]``.

    Names may contain brackets, so the longest existing name wins. Without a name, the only tensor is found."""
    text = typed(text)
    splits = [len(text)]
    if text.endswith("]"):
        splits += [n for n in range(len(text) - 1, -1, -1) if text[n] == "["]
    error: TensorNotFoundError | None = None
    prefix: str | None = None
    for n in splits:
        try:
            found = view[text[:n]]
        except TensorNotFoundError as e:
            error = e
            continue
        if isinstance(found, LazyTensor):
            return _indexed(found, text, n)
        if not text[:n]:
            if len(view) == 1:
                return _indexed(next(iter(view.values())), text, n)
            raise TensorNotFoundError(f"there are {len(view):,} tensors: say the name of one; ls lists them")
        prefix = prefix or text[:n]
    if prefix is None and is_glob(text):
        names = list(view.select(text))
        if len(names) == 1:
            return view.tensor(names[0]), None, None
        if names:
            raise TensorNotFoundError(f"{text!r} matches {len(names):,} tensors, such as {names[0]!r}: name one")
    if prefix is not None:
        below = len(view[prefix])
        raise TensorNotFoundError(
            f"{prefix!r} is no tensor, {plural(below, 'tensor')} {'is' if below == 1 else 'are'} below it: use ls"
        )
    if text.count("[") > text.count("]"):
        raise SelectionError(f"{text!r} has a bracket that is not closed: write NAME[INDEX]")
    assert error is not None  # every way to split the text raised one
    raise error


def _indexed(t: LazyTensor, text: str, n: int) -> tuple[LazyTensor, Any, str | None]:
    index = text[n + 1 : -1] if n < len(text) else None
    return t, None if index is None else parse_index(index), index


def read_rules(path: str | Path) -> dict[str, Any]:
    """Read merge rules from a TOML file: glob of the logical name -> rule (see `lazyckpt.layouts.merge.user_rules`).

    Raises MissingFileError; FormatError if the file is not TOML, lacks the table [rules], or has an invalid rule.
    """
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise MissingFileError(f"{path}: no such file (it should hold merge rules: --rules)") from None
    except (ValueError, RecursionError) as e:  # invalid syntax, not UTF-8, or nested too deep
        raise FormatError(f"{path} is no TOML: {e}") from None
    rules = table.get("rules")
    if not isinstance(rules, dict) or len(table) > 1:
        raise FormatError(
            f"{path} has {', '.join(f'[{k}]' for k in table) or 'nothing in it'}: it should have one table [rules] "
            "with lines of pattern = rule"
        )
    try:
        user_rules(rules)
    except FormatError as e:
        raise FormatError(f"{path}: {e}") from None
    return rules
