"""Progress of long-running jobs: a bar on a terminal, a quiet line in a notebook, occasional lines in a log."""

from __future__ import annotations

import os
import sys
import time
from importlib import import_module
from typing import Any

from ..core.units import human_bytes
from ..markup import page, safe, tag

_EVERY = 10.0  # seconds between two lines of a log, or ...
_SHARE = 0.1  # ... this share of the whole, whichever comes first, ...
_LEAST = 1.0  # ... but at least this many seconds apart
_SOON = 0.5  # seconds before a terminal shows a bar that was not asked for
_PATIENCE = 2.0  # seconds before a notebook shows anything
_OFTEN = 0.25  # seconds between two updates in a notebook


class Bar:
    """A progress display of ``total`` bytes.

    With ``show=True`` it is a bar on a terminal, a line in a notebook, and lines of text elsewhere. With None the bar
    appears on a terminal after half a second; in a notebook the line appears after two seconds and goes when the work
    is done; elsewhere there is nothing. The environment variable TQDM_DISABLE switches the first two off."""

    def __init__(self, total: int, label: str, show: bool | None) -> None:
        self._bar: Any = None
        if show is False:
            return
        if in_notebook():
            if not os.environ.get("TQDM_DISABLE"):
                self._bar = _Cell(total, label, 0.0 if show else _PATIENCE)
        elif sys.stderr.isatty():
            self._bar = _terminal(total, label, 0.0 if show else _SOON)
        elif show:
            self._bar = _Lines(total, label)

    def add(self, nbytes: int) -> None:
        """Advance by ``nbytes`` bytes."""
        if self._bar is not None:
            self._bar.update(nbytes)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()


def in_notebook() -> bool:
    """Return whether this process is a Jupyter kernel; imported Jupyter packages alone do not prove it."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return hasattr(shell, "kernel")


def _told(done: int, total: int, passed: float) -> str:
    """Return how far the work is, how fast, and how long the rest takes, as text."""
    from tqdm import tqdm

    rate = done / passed if passed > 0 else 0.0
    spent = f"{tqdm.format_interval(passed)}, {human_bytes(int(rate))}/s"
    left = total - done
    if left <= 0:
        return f"{human_bytes(done)} in {spent}"
    rest = tqdm.format_interval(left / rate) if rate else "?"
    return f"{done / total:.0%}, {human_bytes(done)} of {human_bytes(total)} in {spent}, {rest} left"


def _terminal(total: int, label: str, delay: float) -> Any:
    """Return a bar of tqdm that appears after ``delay`` seconds and has the units of all other output."""
    from tqdm import tqdm

    class Terminal(tqdm):  # type: ignore[misc]  # it has no types
        @property
        def format_dict(self) -> dict[str, Any]:
            found: dict[str, Any] = super().format_dict
            rate = found["rate"] or (found["n"] / found["elapsed"] if found["elapsed"] else 0)
            sizes = {"done": found["n"], "all": found["total"], "speed": rate}
            return found | {name: human_bytes(int(size)) for name, size in sizes.items()}

    return Terminal(
        total=total,
        desc=label,
        delay=delay,
        bar_format="{l_bar}{bar}| {done} of {all} [{elapsed}<{remaining}, {speed}/s]",
    )


class _Cell:
    """A line with a thin bar in the output of a notebook's cell. It is emptied when the work is done."""

    def __init__(self, total: int, label: str, patience: float) -> None:
        self._total, self._label, self._done = total, label, 0
        self._begun = time.monotonic()
        self._next = self._begun + patience
        self._handle: Any = None

    def update(self, nbytes: int) -> None:
        self._done += nbytes
        if time.monotonic() >= self._next and self._done < self._total:
            self._next = time.monotonic() + _OFTEN
            share = 100 * self._done / self._total
            bar = tag("span", tag("span", "", style=f"width:{share:.3g}%"), "strip")
            text = safe(f"{self._label}: {_told(self._done, self._total, time.monotonic() - self._begun)}", 200)
            self._show(page([tag("div", f"{bar} {tag('span', text, 'dim')}", "row")]))

    def close(self) -> None:
        if self._handle is not None:
            self._show("")

    def _show(self, html: str) -> None:
        display = import_module("IPython.display").display
        data = {"text/html": html, "text/plain": ""}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)


class _Lines:
    """The part of tqdm's interface that `Bar` uses, printed as lines of text."""

    def __init__(self, total: int, label: str) -> None:
        self._total, self._label, self._done = total, label, 0
        self._begun = self._said_at = time.monotonic()
        self._said = 0

    def update(self, nbytes: int) -> None:
        self._done += nbytes
        waited = time.monotonic() - self._said_at
        much = self._done - self._said >= _SHARE * self._total
        if self._done < self._total and (waited >= _EVERY or (much and waited >= _LEAST)):
            self._say()

    def close(self) -> None:
        if self._done >= self._total:
            self._say()

    def _say(self) -> None:
        self._said, self._said_at = self._done, time.monotonic()
        print(
            f"{self._label}: {_told(self._done, self._total, self._said_at - self._begun)}", file=sys.stderr, flush=True
        )
