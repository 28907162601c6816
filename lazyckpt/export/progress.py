"""A bar for what takes long: tqdm's, where somebody is looking."""

from __future__ import annotations

import sys
from typing import Any


class Bar:
    """Bytes done of ``total``. ``show``: None for only on a terminal or in a notebook."""

    def __init__(self, total: int, label: str, show: bool | None) -> None:
        if show is None:
            show = sys.stderr.isatty() or "ipykernel" in sys.modules
        self._bar: Any = None
        if show:
            from tqdm.auto import tqdm

            self._bar = tqdm(total=total, desc=label, unit="B", unit_scale=True, unit_divisor=1024)

    def add(self, nbytes: int) -> None:
        """So many more bytes are done."""
        if self._bar is not None:
            self._bar.update(nbytes)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
