"""The digests of a checkpoint as an object, and as a manifest in JSON. docs/formats/digest.md specifies both."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from json.encoder import encode_basestring_ascii as quoted
from typing import Any, Literal, NamedTuple

from ..core.box import Shape
from ..core.index import FileInfo
from ..core.merkle import SIZE, hash_of
from ..errors import CorruptError, FormatError, printable

VERSION = 2
MANIFEST = "lazyckpt-manifest.json"  # the name of the manifest in the folder of an export

Kind = Literal["values", "dtype", "shape", "only here", "only there", "unreadable"]


def beside(name: str) -> str:
    """Return the name of the manifest of an export that is a single file.

    >>> beside("model.safetensors")
    'model.safetensors.manifest.json'
    """
    return f"{name}.manifest.json"


def files_mark(files: Mapping[str, FileInfo]) -> str:
    """Return what identifies the state of files: a hash of their paths, sizes and times of modification or versions."""
    lines = [f"{quoted(path)} {f.size} {f.version or f.mtime_ns}\n" for path, f in sorted(files.items())]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


class TensorDigest(NamedTuple):
    """The digest of a tensor.

    Attributes
    ----------
    dtype
        The dtype's name, as torch and Zarr spell it.
    shape
        In elements.
    digest
        Hexadecimal digits; None if the tensor cannot be read.
    error
        Why the tensor cannot be read.
    """

    dtype: str
    shape: Shape
    digest: str | None
    error: str | None = None


class Mismatch(NamedTuple):
    """A tensor whose digest is not that of a manifest.

    Attributes
    ----------
    state, name
        The tensor.
    kind
        "values", "dtype" or "shape" differ; "only here": the manifest lacks it; "only there": the checkpoint lacks it;
        "unreadable": see ``error``.
    error
        Why the tensor cannot be read.
    """

    state: str
    name: str
    kind: Kind
    error: str | None = None

    def __str__(self) -> str:
        texts = {
            "values": "its values differ", "dtype": "its dtype differs", "shape": "its shape differs",
            "only here": "the manifest lacks it", "only there": "the checkpoint lacks it",
            "unreadable": f"it cannot be read: {self.error}",
        }  # fmt: skip
        return printable(f"{self.state}: {self.name}: {texts[self.kind]}")


class StateDigest(Mapping[str, TensorDigest]):
    """The digests of a state: a mapping from names to `TensorDigest`. Tied names have the digest of their tensor.

    They are kept as columns, because a checkpoint may have a million tensors.

    Parameters
    ----------
    rows
        Name -> number of its row. Tied names share a row.
    kinds
        The dtypes by name, and the shapes.
    marks
        The number of the kind of each row.
    digests
        The digests of all rows, one after the other.
    errors
        Number of a row -> why the tensor cannot be read.
    aliases
        Tied name -> the name of its tensor.
    """

    __slots__ = ("_digests", "_errors", "_kinds", "_marks", "_rows", "aliases")

    def __init__(
        self,
        rows: Mapping[str, int],
        kinds: Sequence[tuple[str, Shape]],
        marks: Sequence[int],
        digests: bytes | bytearray,
        errors: Mapping[int, str],
        aliases: Mapping[str, str],
    ) -> None:
        self._rows, self._kinds, self._marks, self._digests = rows, kinds, marks, digests
        self._errors = errors
        self.aliases = aliases

    @classmethod
    def of(cls, tensors: Mapping[str, TensorDigest], aliases: Mapping[str, str]) -> StateDigest:
        """Return the digests of some tensors.

        Parameters
        ----------
        tensors
            Name -> digest.
        aliases
            Tied name -> the name of its tensor.

        Returns
        -------
        StateDigest
            The same, as columns.
        """
        kinds: dict[tuple[str, Shape], int] = {}
        marks = [kinds.setdefault((one.dtype, one.shape), len(kinds)) for one in tensors.values()]
        digests = b"".join(bytes(SIZE) if one.digest is None else bytes.fromhex(one.digest) for one in tensors.values())
        errors = {n: one.error or "" for n, one in enumerate(tensors.values()) if one.digest is None}
        return cls({name: n for n, name in enumerate(tensors)}, list(kinds), marks, digests, errors, aliases)

    def __getitem__(self, name: str) -> TensorDigest:
        n = self._rows[name]
        dtype, shape = self._kinds[self._marks[n]]
        if n in self._errors:
            return TensorDigest(dtype, shape, None, self._errors[n])
        return TensorDigest(dtype, shape, self._digests[SIZE * n : SIZE * (n + 1)].hex())

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def errors(self) -> dict[str, str]:
        """Name -> why the tensor cannot be read."""
        if not self._errors:
            return {}
        return {name: self._errors[n] for name, n in self._rows.items() if n in self._errors}

    def lines(self) -> str:
        """Return the lines that the state's digest is computed from. No tensor may have an error.

        Returns
        -------
        str
            A line for each name, in the order of the names' bytes in UTF-8, which is that of their code points.
        """
        text, width = self._digests.hex(), 2 * SIZE
        rows = sorted(self._rows.items())
        return "".join(f"{text[width * n : width * (n + 1)]} {quoted(name)}\n" for name, n in rows)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Digest(Mapping[str, TensorDigest]):
    """The digests of a checkpoint.

    A mapping from the names of the first state to `TensorDigest`. Two digests are equal if their roots are.

    Attributes
    ----------
    algorithm
        "sha256" or "blake3".
    states
        State name -> `StateDigest`.
    files
        Identifies the state of the files that the digests are of: their paths, sizes and times of modification. None
        if it is not known.
    """

    algorithm: str
    states: Mapping[str, StateDigest]
    files: str | None = None

    @property
    def root(self) -> str | None:
        """The digest of everything: of the names of all states, and of the digests of all tensors. None if a tensor
        cannot be read."""
        roots = {state: self.root_of(state) for state in self.states}
        if None in roots.values():
            return None
        return self._hash("lazyckpt checkpoint 2", "".join(f"{roots[name]} {quoted(name)}\n" for name in sorted(roots)))

    def root_of(self, state: str) -> str | None:
        """Return the digest of a state, which is the same in every format and layout.

        Parameters
        ----------
        state
            The name of the state.

        Returns
        -------
        str or None
            Hexadecimal digits; None if a tensor of the state cannot be read.

        Raises
        ------
        KeyError
            There is no such state.
        """
        table = self.states[state]
        return None if table.errors else self._hash("lazyckpt state 2", table.lines())

    def _hash(self, title: str, lines: str) -> str:
        return str(hash_of(self.algorithm)(f"{title}\n{lines}".encode()).hexdigest())

    @property
    def errors(self) -> dict[tuple[str, str], str]:
        """(State, name) -> why the tensor cannot be read."""
        return {(state, name): why for state, table in self.states.items() for name, why in table.errors.items()}

    def __getitem__(self, name: str) -> TensorDigest:
        return self._first[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._first)

    def __len__(self) -> int:
        return len(self._first)

    @property
    def _first(self) -> Mapping[str, TensorDigest]:
        return next(iter(self.states.values()), {})

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Digest):
            return NotImplemented
        mine = self.root
        return self.algorithm == other.algorithm and mine is not None and mine == other.root

    def __hash__(self) -> int:
        return hash((self.algorithm, self.root))

    def __str__(self) -> str:
        return self.root or ""

    def __repr__(self) -> str:
        lines = [
            f"  {state}: {len(table):,} tensors, {self.root_of(state) or 'incomplete'}"
            for state, table in self.states.items()
        ]
        head = f"<Digest {self.algorithm} {self.root or 'incomplete: tensors cannot be read'}"
        return printable("\n".join([head, *lines])) + ">"

    def mismatches(self, manifest: Digest) -> list[Mismatch]:
        """Compare these digests with those of a manifest, for the states that the manifest has.

        Parameters
        ----------
        manifest
            What `Digest.from_json` returns.

        Returns
        -------
        list of Mismatch
            The tensors that differ, in the order of the manifest, then those that only the checkpoint has.

        Raises
        ------
        FormatError
            The algorithms differ.
        """
        if self.algorithm != manifest.algorithm:
            raise FormatError(
                f"the manifest has {manifest.algorithm} digests, these are {self.algorithm}: compute them with "
                f"algorithm={manifest.algorithm!r}"
            )
        found: list[Mismatch] = []
        for state, theirs in manifest.states.items():
            ours: Mapping[str, TensorDigest] = self.states.get(state, {})
            for name, want in theirs.items():
                have = ours.get(name)
                kind, error = _compared(have, want)
                if kind is not None:
                    found.append(Mismatch(state, name, kind, error))
            found += [Mismatch(state, name, "only here") for name in ours if name not in theirs]
        return found

    def to_json(self) -> str:
        """Return the manifest, one line for each tensor. `from_json` reads it."""
        lines = []
        for state, table in self.states.items():
            tensors = [
                f"    {json.dumps(name)}: {json.dumps(_entry(one, table.aliases.get(name)))}"
                for name, one in table.items()
            ]
            body = "{\n" + ",\n".join(tensors) + "\n   }" if tensors else "{}"
            lines.append(f'  {json.dumps(state)}: {{"root": {json.dumps(self.root_of(state))}, "tensors": {body}}}')
        head = f'"lazyckpt_manifest": {VERSION},\n "algorithm": "{self.algorithm}",\n "root": {json.dumps(self.root)}'
        head += "" if self.files is None else f',\n "files": {json.dumps(self.files)}'
        return "{" + head + ',\n "states": {\n' + ",\n".join(lines) + "\n }}\n"

    @staticmethod
    def from_json(text: str | bytes) -> Digest:
        """Return the digests of a manifest.

        Parameters
        ----------
        text
            What `to_json` or `lazyckpt digest` wrote.

        Returns
        -------
        Digest
            Equal to the one that was written.

        Raises
        ------
        FormatError
            It is not a manifest, or one of a later version.
        CorruptError
            It contradicts itself: its roots are not those of its tensors.
        """
        try:
            about = json.loads(text)
        except (ValueError, RecursionError) as e:
            raise FormatError(f"the manifest is not JSON ({e!s:.80}): `lazyckpt digest PATH` writes one") from None
        version = about.get("lazyckpt_manifest") if isinstance(about, dict) else None
        if type(version) is not int:
            raise FormatError("this is not a manifest of `lazyckpt digest`: its key lazyckpt_manifest is missing")
        if version != VERSION:
            what = "use a later one" if version > VERSION else "compute the digests anew, which are other ones now"
            said = str(version)[:20]
            raise FormatError(f"a manifest of version {said}; this lazyckpt reads version {VERSION}: {what}")
        files = about.get("files")
        found = replace(Digest(*_parsed(about)), files=files if isinstance(files, str) else None)
        if found.root != about.get("root") or any(
            found.root_of(state) != one.get("root") for state, one in about["states"].items()
        ):
            raise CorruptError("the manifest contradicts itself: its roots are not those of its tensors; it was edited")
        return found


def _compared(have: TensorDigest | None, want: TensorDigest) -> tuple[Kind | None, str | None]:
    if have is None:
        return "only there", None
    if have.error is not None or want.digest is None:
        return "unreadable", have.error or want.error
    if have.dtype != want.dtype:
        return "dtype", None
    if have.shape != want.shape:
        return "shape", None
    return (None if have.digest == want.digest else "values"), None


def _entry(one: TensorDigest, owner: str | None) -> dict[str, Any]:
    found: dict[str, Any] = {"dtype": one.dtype, "shape": list(one.shape), "digest": one.digest}
    if one.error is not None:
        found["error"] = one.error
    if owner is not None:
        found["tied"] = owner
    return found


def _parsed(about: dict[str, Any]) -> tuple[str, dict[str, StateDigest]]:
    algorithm, states = about.get("algorithm"), about.get("states")
    if algorithm not in ("sha256", "blake3") or not isinstance(states, dict):
        raise FormatError("the manifest has no algorithm that is known, or no states: it is damaged")
    found = {}
    for state, one in states.items():
        tensors = one.get("tensors") if isinstance(one, dict) else None
        if not isinstance(tensors, dict):
            raise FormatError(f"the manifest has no tensors of the state {state!r:.60}: it is damaged")
        table = {name: _tensor(name, entry) for name, entry in tensors.items()}
        tied = {name: entry["tied"] for name, entry in tensors.items() if isinstance(entry.get("tied"), str)}
        found[state] = StateDigest.of(table, tied)
    return str(algorithm), found


def _tensor(name: str, entry: Any) -> TensorDigest:
    values = entry if isinstance(entry, dict) else {}
    dtype, shape, digest, error = (values.get(key) for key in ("dtype", "shape", "digest", "error"))
    valid = isinstance(dtype, str) and isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)
    hexadecimal = isinstance(digest, str) and len(digest) == 64 and set(digest) <= set("0123456789abcdef")
    if not valid or not (hexadecimal or (digest is None and isinstance(error, str))):
        raise FormatError(f"the manifest does not describe the tensor {name!r:.80}: it is damaged")
    return TensorDigest(str(dtype), tuple(shape or ()), digest, error)
