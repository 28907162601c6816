"""The command line: `lazyckpt ls`, `lazyckpt show`, `lazyckpt convert` and so on.

Each command has a module of the same name, which is imported when the command is called. Output is coloured on a
terminal and plain text elsewhere. Text of a checkpoint (names, paths, problems) is printed literally, without markup or
escape codes. An error is one line on stderr, with exit code 2; the code is 130 after Ctrl-C, and 141 if the reader of a
pipe has closed it. `program` has what all commands share, `console` prints, and `options` defines the options that
select what to open.
"""

from .program import app, main

__all__ = ["app", "main"]
