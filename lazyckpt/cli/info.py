"""`lazyckpt info`: the description and the metadata of a checkpoint."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from ..errors import TensorNotFoundError, and_more
from ..io.plain_json import encode
from ..namespace import plain_meta
from ..show.about import LINES, facts_of, meta_lines
from . import completing
from .console import write_line, write_text
from .options import BaseOption, FormatOption, JsonOption, PathArg, RulesOption, TagOption, open_view, typed


def info(
    path: PathArg,
    key: Annotated[
        str,
        typer.Argument(
            metavar="KEY",
            help="A part of the metadata: args, or args.lr",
            autocompletion=completing.metadata,
            show_default=False,
        ),
    ] = "",
    depth: Annotated[int | None, typer.Option(min=1, metavar="N", help="Levels of the metadata to print.")] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Print all of the metadata: fold nothing, cut nothing.")
    ] = False,
    tag: TagOption = None,
    format: FormatOption = None,
    rules: RulesOption = None,
    base: BaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Describe a checkpoint and print its metadata as a tree.

    Prints format, mesh, sizes, dtypes, states, step and loss, then everything that is not a tensor. No tensor data is
    read.
    """
    view = open_view(path, None, False, tag, format, rules, base)
    meta = _part(plain_meta(view), typed(key))
    facts = [] if key else facts_of(view)
    if as_json:
        write_text(json.dumps({**dict(facts), "meta": encode(dict(meta) if not key else meta)}, indent=2))
        return
    width = max((len(what) for what, _ in facts), default=0)
    for what, value in facts:
        write_line((f"{what:<{width}}  ", "bold"), (value, ""))
    lines, left_out = meta_lines(
        meta if isinstance(meta, dict) or not key else {key: meta},
        depth,
        None if everything else LINES,
        fold=not everything,
    )
    if lines and facts:
        write_line(("", ""))
    for line in lines:
        write_line(("  " * line.depth, ""), (line.key, "cyan"), (": " if line.value else "", ""), (line.value, ""))
    if left_out:
        write_line((f"{and_more(left_out, 'lines')} (--all prints them)", "dim"))


def _part(meta: Any, key: str) -> Any:
    """Return the metadata at a dotted key, or raise TensorNotFoundError."""
    for n, part in enumerate(key.split(".") if key else []):
        if isinstance(meta, list | tuple) and part.isdigit() and int(part) < len(meta):
            meta = meta[int(part)]
        elif isinstance(found := getattr(meta, "__dict__", meta), dict) and part in found:
            meta = found[part]
        else:
            there = ".".join(key.split(".")[:n]) or "the metadata"
            raise TensorNotFoundError(f"{there} has no {part!r}: lazyckpt info PATH lists what there is")
    return meta
