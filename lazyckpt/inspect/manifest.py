"""The digests of a checkpoint as an object, and as a manifest in JSON. docs/formats/digest.md specifies both."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from ..core.box import Shape
from ..errors import CorruptError, DataError, FormatError, printable

VERSION = 1

Hash = Callable[..., Any]  # hashlib.sha256, or another function of the same kind
Kind = Literal["values", "dtype", "shape", "only here", "only there", "unreadable"]


def hash_of(algorithm: str) -> Hash:
    """Return the hash function of a name. Raises DataError for an unknown one, or if its package is not installed."""
    if algorithm == "sha256":
        return hashlib.sha256
    if algorithm == "blake3":
        try:
            from blake3 import blake3
        except ImportError:
            raise DataError('algorithm="blake3" needs a package: pip install "lazyckpt[blake3]"') from None
        found: Hash = blake3
        return found
    raise DataError(f"algorithm={algorithm!r:.40}: the digest is computed with sha256 or blake3")


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


@dataclass(frozen=True, slots=True, eq=False)
class StateDigest(Mapping[str, TensorDigest]):
    """The digests of a state: a mapping from names to `TensorDigest`. Tied names have the digest of their tensor."""

    tensors: Mapping[str, TensorDigest]
    aliases: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> TensorDigest:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


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
    """

    algorithm: str
    states: Mapping[str, StateDigest]

    @property
    def root(self) -> str | None:
        """The digest of everything: of the names of all states, and of the digests of all tensors. None if a tensor
        cannot be read."""
        return _joined(self.algorithm, "lazyckpt checkpoint 1", {state: self.root_of(state) for state in self.states})

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
        digests = {name: one.digest for name, one in self.states[state].items()}
        return _joined(self.algorithm, "lazyckpt state 1", digests)

    @property
    def errors(self) -> dict[tuple[str, str], str]:
        """(State, name) -> why the tensor cannot be read."""
        return {
            (state, name): one.error
            for state, table in self.states.items()
            for name, one in table.items()
            if one.error is not None
        }

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
        if version > VERSION:
            raise FormatError(f"a manifest of version {version}; this lazyckpt reads up to {VERSION}: use a later one")
        found = Digest(*_parsed(about))
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


def _joined(algorithm: str, title: str, digests: Mapping[str, str | None]) -> str | None:
    """Return the digest of names with digests, in the order of the names' bytes."""
    if None in digests.values():
        return None
    lines = [f"{digests[name]} {json.dumps(name)}\n" for name in sorted(digests, key=_bytes)]
    return str(hash_of(algorithm)(f"{title}\n{''.join(lines)}".encode()).hexdigest())


def _bytes(name: str) -> bytes:
    return name.encode("utf-8", "surrogatepass")


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
        found[state] = StateDigest(table, tied)
    return str(algorithm), found


def _tensor(name: str, entry: Any) -> TensorDigest:
    values = entry if isinstance(entry, dict) else {}
    dtype, shape, digest, error = (values.get(key) for key in ("dtype", "shape", "digest", "error"))
    valid = isinstance(dtype, str) and isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)
    hexadecimal = isinstance(digest, str) and len(digest) == 64 and set(digest) <= set("0123456789abcdef")
    if not valid or not (hexadecimal or (digest is None and isinstance(error, str))):
        raise FormatError(f"the manifest does not describe the tensor {name!r:.80}: it is damaged")
    return TensorDigest(str(dtype), tuple(shape or ()), digest, error)
