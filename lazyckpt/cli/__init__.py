"""The command line: `lazyckpt ls`, `lazyckpt show`, `lazyckpt convert` and so on.

Each command has a module of the same name, which is imported when the command is called. Output is coloured on a
terminal and plain text elsewhere. Text of a checkpoint (names, paths, problems) is printed literally, without markup or
escape codes. An error is one line on stderr, with exit code 2; the code is 130 after Ctrl-C, and 141 if the reader of a
pipe has closed it. `program` has what all commands share, `console` prints, and `options` defines the options that
select what to open.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .program import app

__all__ = ["app", "main"]


def main() -> None:
    """Run the console script."""
    try:
        from .program import main as run

        run()
    except KeyboardInterrupt:  # while modules are imported
        sys.stderr.write("error: interrupted\n")
        sys.exit(130)


def __getattr__(name: str) -> Any:
    if name == "app":
        from .program import app

        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
