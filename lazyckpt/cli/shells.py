"""How bash, zsh and fish ask for completions, and how proposals are quoted for them.

Typer's scripts (`typer/_completion_shared.py`, Typer 0.29) do not quote names with spaces, quotes, ``$`` or ``;``. The
one for bash takes what follows ``:``, ``=`` or ``@`` for the whole word, and the one for zsh proposes nothing at the
first Tab. The scripts below pass the line up to the cursor in ``_LAZYCKPT_LINE`` and evaluate nothing. zsh and fish
quote proposals; bash inserts them as they are, so that they are quoted here.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

from typer import _completion_classes, _completion_shared

_PLAIN = re.compile(r"[A-Za-z0-9_./+,-]+")
_LINE, _BREAKS = "_LAZYCKPT_LINE", "_LAZYCKPT_BREAKS"  # environment: the line to complete; bash's $COMP_WORDBREAKS

_BASH = """
%(complete_func)s() {
    mapfile -t COMPREPLY < <(env _LAZYCKPT_LINE="${COMP_LINE:0:COMP_POINT}" _LAZYCKPT_BREAKS="$COMP_WORDBREAKS" \\
        %(autocomplete_var)s=complete_bash "$1")
}

complete -o default -F %(complete_func)s %(prog_name)s
"""

# zsh loads the file as the body of `_lazyckpt` at the first Tab, which has to complete, too.
_ZSH = """
#compdef %(prog_name)s

%(complete_func)s() {
  local line value
  local -a found described levels values
  found=("${(@f)$(env _LAZYCKPT_LINE="${(j: :)words[1,CURRENT-1]} ${words[CURRENT][1,-1-$#SUFFIX]}" \\
    %(autocomplete_var)s=complete_zsh %(prog_name)s)}")
  for line in "${(@)found}"; do
    value="${line%%%%$'\\t'*}"
    if [[ -z "$value" ]]; then
      continue
    elif [[ "$value" != "$line" ]]; then
      described+=("$value:${line#*$'\\t'}")
    elif [[ "$value" == *. ]]; then
      levels+=("$value")
    else
      values+=("$value")
    fi
  done
  if (( $#described + $#levels + $#values == 0 )); then
    _files
    return
  fi
  (( $#described )) && _describe %(prog_name)s described
  (( $#levels )) && compadd -S '' -- "${(@)levels}"
  (( $#values )) && compadd -- "${(@)values}"
}

compdef %(complete_func)s %(prog_name)s
if [[ $funcstack[1] == _%(prog_name)s ]]; then
  %(complete_func)s "$@"
fi
"""

_FISH = """
function __%(prog_name)s_complete
    set -l line (commandline -cp | string collect)
    set -l found (env _LAZYCKPT_LINE=$line %(autocomplete_var)s=complete_fish %(prog_name)s)
    if test -n "$found"
        printf '%%s\\n' $found
    else
        __fish_complete_path (commandline -ct)
    end
end
complete --command %(prog_name)s --no-files --arguments "(__%(prog_name)s_complete)"
"""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a shell up to the cursor."""

    words: list[str]
    """The words before the last one, without quotes."""
    last: str
    """The text of the last word, without quotes: "" after a space."""
    quote: str
    """The quote that is open at the end: ``'``, ``"`` or none."""
    kept: int
    """How many characters of ``last`` bash keeps, because it takes what follows them for a word."""


def read_line(line: str, breaks: str = "", fish: bool = False) -> Line:
    r"""Split a line into words as a shell does, without expanding anything.

    ``breaks`` are characters that begin another word for bash when they are not quoted. In fish, a backslash in single
    quotes escapes a quote or a backslash.

    >>> read_line(r"lazyckpt show a\ b 'c d", breaks=":=")
    Line(words=['lazyckpt', 'show', 'a b'], last='c d', quote="'", kept=0)
    >>> read_line("lazyckpt ls a:b", breaks=":=").kept
    2
    """
    words: list[str] = []
    text, quote, kept, begun = "", "", 0, False
    letters = iter(line)
    for c in letters:
        if c == "\\" and (quote != "'" or fish):
            after = next(letters, "")
            escaped = not quote or after in {"'": "\\'", '"': '\\"$`'}[quote]
            text, begun = text + (after if escaped else c + after), True
        elif c == quote:
            quote, kept = "", len(text)
        elif quote or c not in " \t\n'\"":
            text, begun = text + c, True
            kept = len(text) if not quote and c in breaks else kept
        elif c in "'\"":
            quote, begun, kept = c, True, len(text)
        elif begun:
            words.append(text)
            text, kept, begun = "", 0, False
    return Line(words, text, quote, kept)


def for_bash(values: list[str], line: Line) -> list[str]:
    r"""Return what bash inserts for these values in place of the part of the last word that it does not keep.

    >>> for_bash(["a b.x", "a c$"], read_line("lazyckpt show ", ":="))
    ['a\\ b.x', 'a\\ c\\$']
    >>> for_bash(["a b", "a;c"], read_line("lazyckpt show a", ":="))
    ["'a b'", "'a;c'"]
    >>> for_bash(['a"'], read_line('lazyckpt show "a'))
    ['a\\""']
    """
    rest = [value[line.kept :] for value in values]
    if line.quote:
        if line.quote == "'":
            quoted = [one.replace("'", "'\\''") for one in rest]
        else:
            quoted = [re.sub(r'([\\"$`])', r"\\\1", one).replace("!", "\"'!'\"") for one in rest]
        # bash closes the quote, but for a text that seems to have done so
        return [one + line.quote if one.endswith(line.quote) else one for one in quoted]
    escaped = [_escaped(one) for one in rest]
    first, last = min(escaped, default=""), max(escaped, default="")
    common = next((n for n, pair in enumerate(zip(first, last, strict=False)) if len(set(pair)) > 1), len(first))
    if first != last and first[:common].endswith("\\"):  # bash inserts what all begin with
        return ["'" + one.replace("'", "'\\''") + "'" for one in rest]
    return escaped


def _escaped(text: str) -> str:
    return "".join(c if _PLAIN.fullmatch(c) or not c.isascii() else "\\" + c for c in text)


def _asked(self: Any, line: Line) -> list[Any]:
    """Return the proposals for a line, as items of Typer whose values replace the whole last word."""
    items: list[Any] = self.get_completions(line.words[1:], line.last)
    option, equals, _ = line.last.partition("=")
    if equals and option.startswith("-"):
        for item in items:
            item.value = f"{option}={item.value}"
    return items


class Bash(_completion_classes.BashComplete):
    """Completion for bash."""

    def complete(self) -> str:
        """Return a line for each proposal."""
        line = read_line(os.environ.get(_LINE, ""), os.environ.get(_BREAKS, ""))
        return "\n".join(for_bash([str(item.value) for item in _asked(self, line)], line))


class Zsh(_completion_classes.ZshComplete):
    """Completion for zsh, which quotes the proposals."""

    def complete(self) -> str:
        """Return a line for each proposal, with its help after a tab."""
        return _described(_asked(self, read_line(os.environ.get(_LINE, ""))))


class Fish(_completion_classes.FishComplete):
    """Completion for fish, which quotes the proposals."""

    def complete(self) -> str:
        """Return a line for each proposal, with its help after a tab."""
        return _described(_asked(self, read_line(os.environ.get(_LINE, ""), fish=True)))


class PowerShell(_completion_classes.PowerShellComplete):
    """Completion for PowerShell: names with characters that mean something to a shell are not proposed."""

    def get_completions(self, args: list[str], incomplete: str) -> list[Any]:
        """Return the proposals."""
        return [one for one in super().get_completions(args, incomplete) if _PLAIN.fullmatch(str(one.value))]


def _described(items: list[Any]) -> str:
    return "\n".join(f"{one.value}\t{' '.join(one.help.split())}" if one.help else str(one.value) for one in items)


def prepare() -> None:
    """Put these scripts and answers in the place of Typer's."""
    _completion_shared._completion_scripts.update({"bash": _BASH, "zsh": _ZSH, "fish": _FISH})
    for name, one in (("Bash", Bash), ("Zsh", Zsh), ("Fish", Fish), ("PowerShell", PowerShell)):
        setattr(_completion_classes, f"{name}Complete", one)
