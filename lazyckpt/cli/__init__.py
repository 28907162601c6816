"""The command line: `lazyckpt ls`, `lazyckpt show`, `lazyckpt convert` and so on.

A module has the name of its command. Output is coloured on a terminal, and plain text elsewhere. What comes from a
checkpoint (names, paths, problems) is printed literally: no markup, no escape codes. An error is one line on stderr,
with exit code 2; 130 is Ctrl-C, 141 a pipe that its reader has closed. `program` is what all commands have in common,
`console` prints, `options` has the options that say what to open.
"""

from ..core.indices import parse_index
from . import browse, convert, demo, diff, formats, info, ls, prune, show, stats
from .program import app, main

__all__ = ["app", "main", "parse_index"]

for _command in (
    ls.ls,
    show.show,
    info.info,
    browse.browse,
    stats.stats,
    diff.diff,
    convert.convert,
    prune.prune,
    formats.formats,
    demo.demo,
):  # in the order in which --help lists them
    app.command()(_command)
