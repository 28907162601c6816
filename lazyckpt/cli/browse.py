"""`lazyckpt browse`: the interactive terminal browser."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

import typer

from ..errors import LazyckptError
from ..io.storage.urls import is_url
from ..view import CheckpointView
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


def browse(
    path: PathArg,
    state: StateOption = None,
    stored: StoredOption = False,
    tag: TagOption = None,
    format: FormatOption = None,
    rules: RulesOption = None,
    base: BaseOption = None,
) -> None:
    """Browse a checkpoint interactively in the terminal.

    Shows names, details, which file holds which block, values and histograms. Only the data that is shown is read.
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

    def both() -> tuple[CheckpointView, CheckpointView]:
        view = open_view(path, None, False, tag, format, rules, base)
        return view, state_of(view, path, state, stored)

    options = {"tag": tag, "format": format, "rules": None if rules is None else read_rules(rules), "base": base}
    browser = Browser(both, path if is_url(path) else os.path.abspath(path), options)
    error = browser.run()
    if error is not None:
        raise error
    if browser.return_code:  # Textual has printed the reason
        raise typer.Exit(browser.return_code)
