"""What `import lazyckpt` costs beside `import torch`, which it imports on first use."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

from ..case import Area, Case, Goal, Settings
from ..contest import Contest
from ..sample import Timed


def _imported(module: str) -> Callable[[], None]:
    return lambda: subprocess.run([sys.executable, "-c", f"import {module}"], check=True) and None


def _contest() -> Contest:
    return Contest(
        Timed(_imported("lazyckpt")),
        ("import torch", Timed(_imported("torch"))),
        calls=1,
        rehearse=False,
        most=9,
        least=2,
    )


def _cases(settings: Settings) -> list[Case]:
    return [Case("`import lazyckpt` in a fresh process", _contest, [Goal(0.1)])]


AREA = Area(
    "importing",
    "Importing",
    "Every module is imported when a name of it is first used, torch included.",
    _cases,
)
