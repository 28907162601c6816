"""Delta checkpoints: what one holds, and the checkpoint that it and its base make together.

docs/formats/delta.md specifies the format: a Zarr hierarchy of lazyckpt whose states are named ``xor.weights``,
``overwrite.exp_avg``, ``whole.weights``: how the tensors are stored, and the state that they are of. Its ``meta`` has
the key `KEY`, which describes the tensors and their base.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from ..core.box import Box, Shape
from ..core.dtypes import DType, dtype_named
from ..core.expr import computed, make, operand, relocated, relocated_sources
from ..core.index import FileInfo, Index
from ..core.placement import Part, Placement
from ..core.specs import Expr, Input, TensorSpec
from ..errors import CorruptError, DataError, FormatError, LazyckptError, some
from ..formats.catalog import FILES
from ..io.storage.base import Store
from ..io.storage.joined import Joined, joined, stores_of
from ..namespace import Namespace

KEY = "lazyckpt_delta"
FORMAT = "delta"
VERSION = 1
How = Literal["same", "xor", "overwrite", "whole"]
HOWS: tuple[How, ...] = ("same", "xor", "overwrite", "whole")


class Entry(NamedTuple):
    """How a tensor is stored in a delta.

    Attributes
    ----------
    how
        "same": it is the base's tensor. "xor": the base's tensor, combined with the stored bits by exclusive or.
        "overwrite": the base's tensor, with the stored rows in the places of ``runs``. "whole": the stored tensor.
    dtype, shape
        Those of the tensor.
    digest
        Its SHA-256 digest (docs/formats/digest.md).
    base
        The digest of the base's tensor of the same name; "" for "whole".
    runs
        The intervals of rows, for "overwrite".
    """

    how: How
    dtype: DType
    shape: Shape
    digest: str
    base: str = ""
    runs: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Base:
    """What a delta says of its base.

    Attributes
    ----------
    location
        Its path, relative to the folder of the delta if both were written to the same disk, or its URL.
    digest
        The digest of those of its states that the delta has, which identifies it for the user.
    files
        What identifies its files (`inspect.manifest.files_mark`); "" if that is not known.
    """

    location: str
    digest: str
    files: str = ""


@dataclass(frozen=True, slots=True)
class About:
    """The description of a delta: its base, its tensors by state and name, and what its checkpoint is.

    Attributes
    ----------
    base
        The base.
    digest
        The digest of all tensors of the delta's checkpoint.
    states
        State -> name -> entry.
    aliases
        Tied name -> the name that owns the tensor.
    format
        The format of the checkpoint that the delta was made from.
    """

    base: Base
    digest: str
    states: Mapping[str, Mapping[str, Entry]]
    aliases: Mapping[str, str]
    format: str

    @property
    def needs_base(self) -> bool:
        """Whether a tensor is made from that of the base."""
        return any(entry.how != "whole" for table in self.states.values() for entry in table.values())

    def to_meta(self) -> dict[str, Any]:
        """Return the description as plain objects."""
        states = {
            state: {
                name: [e.how, e.dtype.name, list(e.shape), e.digest, e.base, [list(run) for run in e.runs]]
                for name, e in table.items()
            }
            for state, table in self.states.items()
        }
        return {
            "version": VERSION,
            "algorithm": "sha256",
            "digest": self.digest,
            "format": self.format,
            "base": {"location": self.base.location, "digest": self.base.digest, "files": self.base.files},
            "aliases": dict(self.aliases),
            "states": states,
        }

    @staticmethod
    def from_meta(found: Any, where: str) -> About:
        """Return the description that `to_meta` returned.

        Raises
        ------
        FormatError
            A later version wrote it.
        CorruptError
            It is not such a description.
        """
        if isinstance(found, dict) and type(found.get("version")) is int and found["version"] > VERSION:
            raise FormatError(f"{where}: a delta of version {found['version']}; this lazyckpt reads {VERSION}: update")
        try:
            states = {
                str(state): {str(name): _entry(*entry) for name, entry in table.items()}
                for state, table in found["states"].items()
            }
            base = Base(*(_text(found["base"][key]) for key in ("location", "digest", "files")))
            aliases = {_text(a): _text(o) for a, o in found["aliases"].items()}
            if not states or found["algorithm"] != "sha256":
                raise ValueError("no states")
            return About(base, _text(found["digest"]), states, aliases, _text(found["format"]))
        except (LookupError, TypeError, ValueError, AttributeError, LazyckptError) as e:
            raise CorruptError(f"{where}: its description of the delta is damaged ({e!s:.80}): copy it again") from None


def _entry(how: Any, dtype: Any, shape: Any, digest: Any, base: Any, runs: Any) -> Entry:
    if how not in HOWS or any(type(n) is not int or n < 0 for n in (*shape, *(n for run in runs for n in run))):
        raise ValueError(f"{how!r} {shape!r}")
    pairs = tuple((a, b) for a, b in runs)
    return Entry(how, dtype_named(_text(dtype)), tuple(shape), _text(digest), _text(base), pairs)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is no text")
    return value


def about_of(index: Index, where: str) -> About | None:
    """Return the description of a delta; None if an index is that of another checkpoint.

    Parameters
    ----------
    index
        The index of a Zarr hierarchy.
    where
        The path, for messages.
    """
    if index.format != "zarr" or KEY not in index.meta:
        return None
    return About.from_meta(index.meta[KEY], where)


def location_of(base: str, delta: str, is_url: Callable[[str], bool]) -> str:
    """Return how a delta names the place of its base: relative to its own folder if both are local."""
    if is_url(base) or is_url(delta):
        return base
    try:
        return os.path.relpath(os.path.realpath(base), os.path.realpath(delta)).replace(os.sep, "/")
    except ValueError:  # another drive of Windows
        return os.path.abspath(base)


def located(location: str, delta: str, is_url: Callable[[str], bool]) -> str:
    """Return the path or URL of a base, as `location_of` named it."""
    if is_url(location) or os.path.isabs(location):
        return location
    if is_url(delta):  # a run that was copied to a bucket
        scheme, _, place = delta.partition("://")
        return f"{scheme}://{posixpath.normpath(posixpath.join(place, location))}"
    return os.path.normpath(os.path.join(os.path.realpath(delta), location))


def without_ending(name: str) -> str:
    """Return the name of the folder that a checkpoint of a single file becomes when a run is thinned; "" if the name
    has no such ending.

    >>> without_ending("step_100.safetensors")
    'step_100'
    """
    return next((name[: -len(end)] for end in FILES if name.endswith(end)), "")


def payload(state: str, how: How) -> str:
    """Return the name of the state that has the stored tensors.

    >>> payload("weights", "xor")
    'xor.weights'
    """
    return f"{how}.{state}"


def difference(
    how: How, new: Expr | Input, base: Expr | Input | None, runs: Sequence[tuple[int, int]]
) -> Expr | Input | None:
    """Return what a delta stores of a tensor; None if it stores nothing."""
    if how == "same":
        return None
    if how == "xor":
        assert base is not None
        bits = make("delta.bits", new)
        return make("delta.xor", bits, make("delta.bits", base), dtype=bits.dtype)
    if how == "whole":
        return make("delta.bits", new)
    at, parts, rest = 0, [], new.shape[1:]
    for a, b in runs:
        box = Box((a, *(0 for _ in rest)), (b, *rest))
        parts.append(Part(box, (at, *(0 for _ in rest))))
        at += b - a
    rows = make("place", new, shape=(at, *rest), placements=(Placement(new.shape, tuple(parts)),))
    return make("delta.bits", rows)


Known = Callable[[str, str], "str | bool | None"]


def restored(
    store: Store, index: Index, about: About, base: Namespace[Any] | None, known: Known, where: str
) -> tuple[Store, Index]:
    """Return the store and the index of the checkpoint that a delta and its base make together.

    Parameters
    ----------
    store, index
        Those of the delta's Zarr hierarchy.
    about
        Its description.
    base
        The view of the base; None if the delta does not need it.
    known
        (state, name) -> the digest of a tensor of the base if it is known without reading, True if the files are known
        to be those that the delta was made from, else None. A tensor that is not known is compared when it is read.
    where
        The path of the delta, for messages.

    Raises
    ------
    DataError
        The base is another checkpoint than the one that the delta was made from.
    CorruptError
        The delta lacks a tensor that its description names.
    """
    stores, numbers = joined([store] if base is None else [base._store, store])
    several = base is not None and isinstance(base._store, Joined)

    wrong: list[str] = []
    states: dict[str, dict[str, TensorSpec]] = {}
    for state, table in about.states.items():
        side = None if base is None else base.states.get(state)
        states[state] = {}
        for name, entry in table.items():
            old: Expr | Input | None = None
            if entry.how != "whole":
                spec = None if side is None else side._spec(name)
                digest = known(state, name)
                fits = spec is not None and (spec.dtype, spec.shape) == (entry.dtype, entry.shape)
                if spec is None or not fits or (isinstance(digest, str) and digest != entry.base):
                    wrong.append(name if state == "weights" else f"{state}: {name}")
                    continue
                old = operand(spec)
                if digest is None:
                    old = make("delta.checked", old, digest=entry.base, where=f"{where}: {name!r:.80}")
                old = relocated_sources(old, numbers[0])
            found: Expr | Input | None = None
            if entry.how != "same":
                stored = index.states.get(payload(state, entry.how), {}).get(name)
                if stored is None:
                    raise CorruptError(f"{where}: the tensor {name!r:.80} is not in it: the delta is damaged")
                found = relocated_sources(operand(stored), numbers[-1])
            rule = _RULES[entry.how] + (f" (a delta over {about.base.location})" if entry.how != "whole" else "")
            try:
                node = _node(entry, old, found)
            except DataError as e:
                raise CorruptError(f"{where}: {name!r:.80}: {e}") from None
            states[state][name] = computed(name, node, rule)
    if wrong and base is not None:
        raise DataError(
            f"{base.root} is not the base of {where}: other tensors are {some(wrong, 3)}. "
            f"Its base has the digest {about.base.digest[:16]}... and was {about.base.location}: open it with base="
        )
    lost = [owner for owner in about.aliases.values() if not any(owner in table for table in states.values())]
    if lost:
        raise CorruptError(f"{where}: names are tied to {lost[0]!r:.80}, which it does not have: the delta is damaged")
    meta = index.meta.get("meta", {})
    if not isinstance(meta, Mapping):
        raise CorruptError(f"{where}: its metadata are {meta!r:.40}, no table: the delta is damaged")
    first = next(iter(states))
    files: list[Mapping[str, FileInfo]] = [index.files, index.pins]
    if base is not None:
        theirs = base._index
        files = [
            _numbered(each, numbers[0], several) | _numbered(own, numbers[1])
            for each, own in ((theirs.files, index.files), (theirs.pins, index.pins))
        ]
    return stores, replace(
        index,
        format=FORMAT,
        states=states,
        stored=states[first],
        files=files[0],
        watched=files[1],
        aliases=about.aliases,
        meta=meta,
        indexed={},
    )


_RULES: dict[How, str] = {
    "same": "unchanged",
    "xor": "combined with the base by exclusive or",
    "overwrite": "rows of the base overwritten",
    "whole": "stored whole",
}


def _node(entry: Entry, old: Expr | Input | None, found: Expr | Input | None) -> Expr | Input:
    """Return a tensor of the checkpoint, from that of the base and what is stored."""
    if found is None:
        assert old is not None
        return old
    if entry.how == "xor":
        assert old is not None
        node = make("delta.xor", old, found, dtype=entry.dtype)
    else:
        node = make("delta.bits", found, dtype=entry.dtype)
        if entry.how == "overwrite":
            assert old is not None
            node = make("delta.overwrite", old, node, runs=entry.runs)
    if node.shape != entry.shape:
        raise DataError(f"the stored shape {node.shape} is not {entry.shape}")
    return node


def _numbered(files: Mapping[str, FileInfo], number: int, several: bool = False) -> dict[str, FileInfo]:
    """Return files by their paths in a joined store; those of a joined store have their numbers already."""
    return dict(files) if several else {f"{number}/{path}": info for path, info in files.items()}


def in_folder(store: Store, index: Index, root: str) -> Index | None:
    """Return the index of a delta and its base with paths relative to a folder that both are in, as a run has them.

    Parameters
    ----------
    store, index
        What `restored` returned.
    root
        The path or URL of the folder.

    Returns
    -------
    Index or None
        None if one of the checkpoints is elsewhere.
    """
    roots = [one.root for one in stores_of(store)]
    if len(roots) == 1:  # without a base
        return index
    if not all(one == root or one.startswith(f"{root}/") for one in roots):
        return None
    folders = [one[len(root) :].lstrip("/") for one in roots]

    def moved(node: Expr | Input) -> Expr | Input:
        if isinstance(node, Expr):
            return replace(node, inputs=tuple(map(moved, node.inputs)), kept={})
        folder = folders[node.source]
        return Input(relocated(node.spec, folder) if folder else node.spec)

    def spec_of(spec: TensorSpec) -> TensorSpec:
        assert spec.expr is not None
        expr = moved(spec.expr)
        assert isinstance(expr, Expr)
        return replace(spec, expr=expr)

    def paths(files: Mapping[str, FileInfo]) -> dict[str, FileInfo]:
        found = {}
        for path, info in files.items():
            number, _, rest = path.partition("/")
            folder = folders[int(number)]
            found[f"{folder}/{rest}" if folder else rest] = info
        return found

    states = {state: {name: spec_of(spec) for name, spec in table.items()} for state, table in index.states.items()}
    return replace(
        index,
        states=states,
        stored=next(iter(states.values())),
        files=paths(index.files),
        watched=None if index.watched is None else paths(index.watched),
    )
