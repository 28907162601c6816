"""What Tab completes on the command line: names and prefixes of tensors, metadata, checkpoints of a run, and the values
of options.

A completion prints nothing but its proposals, reads no tensor data and opens no URLs. Names that a shell cannot insert
are not proposed: those with control characters, those that the encoding lacks, and those that look like options.
"""

from __future__ import annotations

import os
import sys
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from ..runs.view import RunView
    from ..view import CheckpointView

_MOST = 500  # proposals
_STATES = ("weights", "fp32", "exp_avg", "exp_avg_sq", "momentum_buffer", "step")


def levels(names: Sequence[str], start: str) -> list[str]:
    """Return how names that begin with a text go on, up to the next dot. ``names`` are sorted.

    >>> levels(["layers.0.up", "layers.1.up", "norm"], "l")
    ['layers.0.up', 'layers.1.up']
    >>> levels(["a.0.down", "a.0.up", "a.1.up"], "a.")
    ['a.0.', 'a.1.up']
    """
    while True:
        found: list[str] = []
        at = bisect_left(names, start)
        while at < len(names) and names[at].startswith(start) and len(found) < _MOST:
            dot = names[at].find(".", len(start))
            if dot < 0:
                found.append(names[at])
                at += 1
            else:
                level = names[at][: dot + 1]
                stop = bisect_left(names, level[:-1] + "/", at)  # "/" follows "." in ASCII
                found.append(level if stop - at > 1 else names[at])
                at = max(stop, at + 1)
        if len(found) != 1 or not found[0].endswith("."):
            return found
        start = found[0]  # a level with nothing beside it: go on below it


def tensors(ctx: typer.Context, incomplete: str) -> list[str]:
    """Propose the names of the checkpoint's tensors, level by level."""
    return _of_view(ctx, lambda view: levels(view.names.sorted, incomplete))


def states(incomplete: str) -> list[str]:
    """Propose the states that trainers write; which ones a checkpoint has, `lazyckpt info` says."""
    return [state for state in _STATES if state.startswith(incomplete)]


def formats(incomplete: str) -> list[str]:
    """Propose the names of readers."""
    from ..formats.registry import readers

    return [reader.name for reader in readers() if reader.name.startswith(incomplete)]


def words(*values: str) -> Callable[[str], list[str]]:
    """Return a function that proposes these values."""
    return lambda incomplete: [value for value in values if value.startswith(incomplete)]


def dtypes(incomplete: str) -> list[str]:
    """Propose the names of dtypes that are usual for weights."""
    return words("bf16", "fp16", "fp32", "fp64", "fp8_e4m3", "fp8_e5m2")(incomplete)


def tables(incomplete: str) -> list[str]:
    """Propose the names that `--rename` takes."""
    from ..layouts.rename.table import names

    return words(*names())(incomplete)


def targets(incomplete: str) -> list[str]:
    """Propose the formats that `lazyckpt convert` writes."""
    from ..export.registry import NAMES

    return words(*(name for name in NAMES if name != "virtual"))(incomplete)


def quantizations(incomplete: str) -> list[str]:
    """Propose the kinds of `--quantize`."""
    from ..derive.quantize import KINDS

    return words(*KINDS)(incomplete)


def methods(incomplete: str) -> list[str]:
    """Propose the methods of `lazyckpt merge`."""
    from ..derive.merges import METHODS

    return words(*METHODS)(incomplete)


def tags(ctx: typer.Context, incomplete: str) -> list[str]:
    """Propose the names of the checkpoints of a run."""
    return _quietly(lambda: words(*map(os.path.basename, _run(ctx).paths.values()))(incomplete))


def steps(ctx: typer.Context, incomplete: str) -> list[str]:
    """Propose the steps of a run, as `--average` takes them."""
    return _quietly(lambda: words("all", "last:", *map(str, _run(ctx).steps))(incomplete))


def metadata(ctx: typer.Context, incomplete: str) -> list[str]:
    """Propose the keys of the metadata, level by level."""

    def keys(value: Any, above: str) -> Iterator[str]:
        for key, below in value.items() if isinstance(value, Mapping) else ():
            name = f"{above}{key}"
            yield from keys(below, f"{name}.") if isinstance(below, Mapping) and below else (name,)

    def propose(view: CheckpointView) -> list[str]:
        from ..namespace import plain_meta

        return levels(sorted(keys(plain_meta(view), "")), incomplete)

    return _of_view(ctx, propose)


def _run(ctx: typer.Context) -> RunView:
    from ..io.storage.urls import is_url
    from ..runs.view import RunView

    path: str = ctx.params.get("path") or ctx.params.get("src") or ""
    if not path or is_url(path):
        raise FileNotFoundError(path)
    return RunView(os.path.expanduser(path))


def _quietly(propose: Callable[[], list[str]]) -> list[str]:
    """Return what is proposed, or nothing if that fails: the command itself says why."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return [name for name in propose() if _inserted(name)]
        except Exception:
            return []


def _inserted(name: str) -> bool:
    """Return whether a shell can insert a name as an argument."""
    encoding = sys.stdout.encoding or "utf-8"
    return name.isprintable() and not name.startswith("-") and name == name.encode(encoding, "ignore").decode(encoding)


def _of_view(ctx: typer.Context, propose: Callable[[CheckpointView], list[str]]) -> list[str]:
    from ..io.storage.urls import is_url
    from ..view import CheckpointView

    given: dict[str, Any] = ctx.params
    path, state = given.get("path"), given.get("state")
    if not path or is_url(path):
        return []
    options: dict[str, Any] = {name: given.get(name) for name in ("tag", "format", "base")}

    def found() -> list[str]:
        view = CheckpointView(os.path.expanduser(path), **options)
        return propose(view.stored if given.get("stored") else view if state is None else view.states[state])

    return _quietly(found)
