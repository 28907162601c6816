"""The pane of the histogram: it reads a sample, or all elements until it is stopped."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from textual.app import App
from textual.content import Content
from textual.widgets import Static

from ..inspect.stats import stats_of
from ..show.sample import sample
from ..show.text import human_bytes, plural
from ..tensor import LazyTensor
from . import bars
from .background import Background, wrong

_MEMORY = 256 << 20  # bytes that reading all elements holds


class Histogram(Static):
    """``changed`` is called when it begins or ends to read."""

    def __init__(self, app: App[Any], changed: Callable[[], None]) -> None:
        super().__init__(markup=False)
        self._work = Background(app, changed)
        self._executor: ThreadPoolExecutor | None = None

    @property
    def busy(self) -> bool:
        return self._work.busy

    def show(self, t: LazyTensor | None) -> None:
        """Another tensor is looked at; None: none."""
        self.drop()
        self.update("choose a tensor" if t is None else f"h: a sample, a: all elements {_size(t)}")

    def read(self, t: LazyTensor, whole: bool, width: int) -> None:
        """Read all elements, or a sample, and draw them in so many columns."""
        self.drop()
        executor = self._executor = ThreadPoolExecutor(thread_name_prefix="lazyckpt-browse") if whole else None
        self.update(f"reading {f'all elements {_size(t)}; Esc stops' if whole else 'a sample'}…")

        def work() -> Content:
            if executor is None:
                return bars.of_sample(sample(t), width)
            return bars.of_stats(stats_of(t, bars.BINS, executor, _MEMORY, progress=False), t.nbytes, width)

        def done(found: Content) -> None:
            self.drop()
            self.update(found)

        self._work.ask(work, done, lambda e: done(wrong(e)))

    def stop(self) -> bool:
        """Read no more of all elements. Whether it did."""
        if self._executor is None:
            return False
        self.drop()
        self.update("stopped; h: a sample, a: all elements")
        return True

    def drop(self) -> None:
        """What is being read is of no use any more: an executor that takes no work ends what gives it some."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._executor = None
        self._work.drop()


def _size(t: LazyTensor) -> str:
    return f"({plural(t.numel(), 'element')}, {human_bytes(t.nbytes)})"
