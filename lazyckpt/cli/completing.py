"""What Tab completes on the command line: names and prefixes of tensors, states and formats.

A completion prints nothing but its proposals, reads no tensor data and opens no URLs. A shell evaluates what is
proposed: names with any character that may mean something to a shell are not.
"""

from __future__ import annotations

import os
import re
import warnings
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from ..view import CheckpointView

_PLAIN = re.compile(r"[A-Za-z0-9_./+@,-]+")
_MOST = 500  # proposals
_STATES = ("weights", "fp32", "exp_avg", "exp_avg_sq", "momentum_buffer", "step")


def levels(names: Sequence[str], start: str) -> list[str]:
    """Return how names that begin with a text go on, up to the next dot. ``names`` are sorted.

    >>> levels(["layers.0.up", "layers.1.up", "norm"], "l")
    ['layers.0.up', 'layers.1.up']
    >>> levels(["a.0.down", "a.0.up", "a.1.up"], "a.")
    ['a.0.', 'a.1.up']
    """
    while True:
        found: list[str] = []
        at = bisect_left(names, start)
        while at < len(names) and names[at].startswith(start) and len(found) < _MOST:
            dot = names[at].find(".", len(start))
            if dot < 0:
                found.append(names[at])
                at += 1
            else:
                level = names[at][: dot + 1]
                stop = bisect_left(names, level[:-1] + "/", at)  # "/" follows "." in ASCII
                found.append(level if stop - at > 1 else names[at])
                at = max(stop, at + 1)
        if len(found) != 1 or not found[0].endswith("."):
            return found
        start = found[0]  # a level with nothing beside it: go on below it


def tensors(ctx: typer.Context, incomplete: str) -> list[str]:
    """Propose the names of the checkpoint's tensors, level by level."""
    return _of_view(ctx, lambda view: levels(view.names.sorted, incomplete))


def states(incomplete: str) -> list[str]:
    """Propose the states that trainers write; which ones a checkpoint has, `lazyckpt info` says."""
    return [state for state in _STATES if state.startswith(incomplete)]


def formats(incomplete: str) -> list[str]:
    """Propose the names of readers."""
    from ..formats.registry import readers

    return [reader.name for reader in readers() if reader.name.startswith(incomplete)]


def _of_view(ctx: typer.Context, propose: Callable[[CheckpointView], list[str]]) -> list[str]:
    from ..io.storage.urls import is_url
    from ..view import CheckpointView

    given: dict[str, Any] = ctx.params
    path, state = given.get("path"), given.get("state")
    if not path or is_url(path):
        return []
    options: dict[str, Any] = {name: given.get(name) for name in ("tag", "format", "base")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            view = CheckpointView(os.path.expanduser(path), **options)
            chosen = view.stored if given.get("stored") else view if state is None else view.states[state]
            return [name for name in propose(chosen) if _PLAIN.fullmatch(name)]
        except Exception:  # there is nothing to propose; the command itself says why
            return []


# Typer's script for zsh, whose first Tab in each shell proposes nothing: zsh loads the file as the body of `_lazyckpt`,
# which defined a function and did not call it (`typer/_completion_shared.py`, Typer 0.29).
_ZSH = """
#compdef %(prog_name)s

%(complete_func)s() {
  eval $(env _TYPER_COMPLETE_ARGS="${words[1,$CURRENT]}" %(autocomplete_var)s=complete_zsh %(prog_name)s)
}

compdef %(complete_func)s %(prog_name)s
if [[ $funcstack[1] == _%(prog_name)s ]]; then
  %(complete_func)s "$@"
fi
"""


def prepare_scripts() -> None:
    """Replace the script for zsh that ``--install-completion`` and ``--show-completion`` write."""
    from typer import _completion_shared

    _completion_shared._completion_scripts["zsh"] = _ZSH
