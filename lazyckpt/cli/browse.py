"""`lazyckpt browse`: the interactive terminal browser."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import LazyckptError
from ..io.storage.urls import is_url
from .console import replace_unknown
from .options import (
    BaseOption,
    FormatOption,
    PathArg,
    RulesOption,
    StateOption,
    StoredOption,
    TagOption,
    open_view,
    read_rules,
    state_of,
)

if TYPE_CHECKING:
    from ..browse.subject import One, Subject


def browse(
    path: PathArg,
    other: Annotated[
        str, typer.Argument(metavar="OTHER", help="A checkpoint to compare with.", show_default=False)
    ] = "",
    state: StateOption = None,
    stored: StoredOption = False,
    tag: TagOption = None,
    format: FormatOption = None,
    rules: RulesOption = None,
    base: BaseOption = None,
) -> None:
    """Browse a checkpoint interactively in the terminal.

    Shows names, details, heat maps, values, histograms, and which file holds which block. A folder of several
    checkpoints is a run, with a line of its steps; --tag opens one of them alone. With OTHER, the names have the
    colours of their differences. Only the data that is shown is read; a comparison of up to 2 GiB is read at once.
    Press ? for the keys. Needs a terminal (ssh works) and Textual: pip install 'lazyckpt[browse]'.
    """
    if find_spec("textual") is None:
        raise LazyckptError("browse needs Textual: pip install 'lazyckpt[browse]'")
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise LazyckptError("browse needs a terminal: ls and show print, also into pipes")
    if os.environ.get("TERM") in ("dumb", "unknown"):
        raise LazyckptError(
            "browse needs a terminal with a cursor to place, and TERM says that this one has none: use ls and show"
        )
    from ..browse.app import Browser

    def one(where: str) -> One:
        from ..browse.subject import One

        view = open_view(where, None, False, tag, format, rules, base)
        return One(view, state_of(view, where, state, stored), _opening(where, tag, format, rules, base))

    def subject() -> Subject:
        from ..browse.subject import Pair, Subject, run_of

        if other:
            return Pair(one(path), one(other))
        if tag is None and format is None and rules is None and base is None:
            run = run_of(path, _address(path), "stored" if stored else state)
            if run is not None:
                return run
        return Subject(one(path))

    browser = Browser(subject, " and ".join(_address(p) for p in (path, other) if p))
    replace_unknown("lazyckpt-cells")
    try:
        error = browser.run()
    finally:
        replace_unknown("lazyckpt")
    if error is not None:
        raise error
    if browser.return_code:  # a signal, or a failure whose reason Textual has printed
        raise typer.Exit(browser.return_code)


def _address(path: str) -> str:
    return path if is_url(path) else os.path.abspath(path)


def _opening(path: str, tag: str | None, format: str | None, rules: str | None, base: str | None) -> str:
    """Return the line of Python that opens a checkpoint."""
    from ..browse.detail import opening

    options = {"tag": tag, "format": format, "rules": None if rules is None else read_rules(rules), "base": base}
    return opening(_address(path), options)
