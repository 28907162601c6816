"""Progress of long-running jobs: tqdm's bar on a terminal or in a notebook, occasional lines in a log."""

from __future__ import annotations

import sys
import time
import warnings
from functools import partial
from typing import Any

_EVERY = 10.0  # seconds between two lines of a log, or ...
_SHARE = 0.1  # ... this share of the whole, whichever comes first, ...
_LEAST = 1.0  # ... but at least this many seconds apart


class Bar:
    """A progress display of ``total`` bytes.

    With ``show=True`` it is a bar, or lines if stderr is not a terminal; with None, it is a bar on a terminal or in a
    notebook, and nothing elsewhere."""

    def __init__(self, total: int, label: str, show: bool | None) -> None:
        interactive = sys.stderr.isatty() or _in_notebook()
        self._bar: Any = None
        if show or (show is None and interactive):
            if interactive:
                tqdm = _tqdm()
                self._bar = tqdm(total=total, desc=label, unit="B", unit_scale=True, unit_divisor=1024)
            else:
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


def _in_notebook() -> bool:
    """Return whether this process is a Jupyter kernel; imported Jupyter packages alone do not prove it."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return hasattr(shell, "kernel")


def _tqdm() -> Any:
    """Return the tqdm class for the environment: a text bar, without a warning, in a notebook without ipywidgets."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tqdm.auto import tqdm
    return tqdm


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
        from tqdm import tqdm

        self._said, self._said_at = self._done, time.monotonic()
        passed = self._said_at - self._begun
        rate = self._done / passed if passed > 0 else 0.0
        size = partial(tqdm.format_sizeof, suffix="B", divisor=1024)
        spent = f"{tqdm.format_interval(passed)}, {size(rate)}/s"
        left = self._total - self._done
        if left > 0:
            share, rest = self._done / self._total, tqdm.format_interval(left / rate) if rate else "?"
            text = f"{share:.0%}, {size(self._done)} of {size(self._total)} in {spent}, {rest} left"
        else:
            text = f"{size(self._done)} in {spent}"
        print(f"{self._label}: {text}", file=sys.stderr, flush=True)
