"""The command line: `lazyckpt ls`, `lazyckpt show`, `lazyckpt convert` and so on.

Coloured on a terminal, plain text elsewhere. What a checkpoint brings (names, paths, problems) is printed literally: no
markup, no escape codes. Errors are one line on stderr, with exit code 2; 130 is Ctrl-C, 141 a pipe whose reader has
seen enough. `program` is what all commands have in common, `console` how they print, `opening` how they open; a module
for each group of commands.
"""

from ..core.indices import parse_index
from .browsing import browse
from .converting import convert
from .differing import diff
from .looking import ls, show
from .program import app, main
from .pruning import prune
from .reading import formats
from .stats import stats
from .walking import demo

__all__ = ["app", "main", "parse_index"]

for _command in (
    ls,
    show,
    browse,
    stats,
    diff,
    convert,
    prune,
    formats,
    demo,
):  # in the order in which --help lists them
    app.command()(_command)
