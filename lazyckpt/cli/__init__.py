"""The command line: `lazyckpt ls`, `lazyckpt show`, `lazyckpt convert` and so on.

A module has the name of its command, and is imported when the command is called. Output is coloured on a terminal, and
plain text elsewhere. What comes from a checkpoint (names, paths, problems) is printed literally: no markup, no escape
codes. An error is one line on stderr, with exit code 2; 130 is Ctrl-C, 141 a pipe that its reader has closed. `program`
is what all commands have in common, `console` prints, `options` has the options that say what to open.
"""

from .program import app, main

__all__ = ["app", "main"]
