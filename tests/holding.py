"""Work that is held back half way, so that a test can stop it there on a machine of any speed."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["files_held"]


def files_held(after: int, go: Path) -> Callable[[], None]:
    """Return a function that makes the process in which it is called write ``after`` files of a folder, and then wait
    until the file ``go`` exists. Clients of clusters pickle it by value."""

    def hold() -> None:
        import itertools

        from lazyckpt.jobs.places import Folder

        put, count = Folder.put, itertools.count()

        def held(*arguments: object) -> int:
            if next(count) >= after:
                while not go.exists():
                    time.sleep(0.01)
            return put(*arguments)  # type: ignore[arg-type]

        Folder.put = held  # type: ignore[method-assign, assignment]

    return hold
