"""Text that comes from files (names, paths, messages), made safe to print.

A name in a checkpoint may hold escape codes that recolour or overwrite a terminal, line breaks that forge a line of a
report, or marks that reverse the reading direction. People see all of these escaped. Data stays exact: the keys of a
view, ``meta`` and JSON hold what the file holds.
"""

from __future__ import annotations


def printable(text: str) -> str:
    """The text as one line: every character that a terminal would not print as itself is escaped.

    >>> print(printable("red\\x1b[31m"), printable("two\\nlines"))
    red\\x1b[31m two\\nlines
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
