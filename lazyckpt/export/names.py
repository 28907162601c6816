"""Names that tensors get in the files, where these are not those of the view."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..core.names import Names
from ..errors import DataError, TensorNotFoundError
from ..lazy import LazyArray

NewNames = Mapping[str, str | None] | Callable[[str], str | None]


def under(
    names: NewNames | None, tensors: Mapping[str, LazyArray], aliases: Mapping[str, str]
) -> tuple[dict[str, LazyArray], dict[str, str]]:
    """The tensors, and the further names of tied ones, under new names: of a mapping, where a name that it lacks stays
    as it is, or of a function. None leaves a name out; a tensor stays if a tied name of it does.

    Raises DataError (two tensors get one name, or a name is no text), TensorNotFoundError (a mapping tells of a name
    that is not there).
    """
    if names is None:
        return dict(tensors), dict(aliases)
    if not callable(names):
        for name in names:
            if name not in tensors and name not in aliases:
                near = Names([*tensors, *aliases]).near(name)
                hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
                raise TensorNotFoundError(f"names= tells of {name!r}, which is not among what is written.{hint}")
    found: dict[str, LazyArray] = {}
    tied: dict[str, str] = {}
    was: dict[str, str] = {}  # new name -> the first old name that got it
    kept: dict[str, str] = {}  # the old name of a tensor -> the new one
    for old, owner in [(name, name) for name in tensors] + list(aliases.items()):
        new = names(old) if callable(names) else names.get(old, old)
        if new is None:
            continue
        if not isinstance(new, str):
            raise DataError(f"names= gives {old!r} a {type(new).__name__} for a name: a str, or None to leave it out")
        first = was.setdefault(new, old)
        if aliases.get(first, first) != owner:
            raise DataError(f"names= gives {first!r} and {old!r} the same name, {new!r}, and they are two tensors")
        if kept.setdefault(owner, new) == new:
            found[new] = tensors[owner]
        else:
            tied[new] = kept[owner]
    return found, tied
