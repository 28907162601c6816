"""The digest of a tensor, from hashes of fixed runs of its bytes. docs/formats/digest.md specifies it. No I/O.

A tensor of up to one run has one hash. The runs of a larger one are the leaves of a Merkle tree (RFC 6962), so they are
hashed in any order, by any number of workers, or while the bytes pass through an export.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import DataError
from .box import Shape

RUN = 1 << 20  # bytes of a run; part of the format
SIZE = 32  # bytes of a hash
LEAF, NODE = b"\x00", b"\x01"  # prefixes of RFC 6962, section 2.1

Hash = Callable[..., Any]  # hashlib.sha256, or another function of the same kind


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


class Form(NamedTuple):
    """What a tensor that is hashed is: its dtype by name, its shape, and its size in bytes."""

    dtype: str
    shape: Shape
    nbytes: int

    @property
    def head(self) -> bytes:
        """The bytes that are hashed before the contents, or before the root of the tree."""
        return f"lazyckpt tensor 2\n{self.dtype}\n{','.join(map(str, self.shape))}\n".encode()

    @property
    def runs(self) -> int:
        """The number of runs; 1 for an empty tensor."""
        return max(1, -(-self.nbytes // RUN))

    def digest(self, leaves: Sequence[bytes], new: Hash) -> bytes:
        """Return the tensor's digest, from the hashes of all runs."""
        if self.nbytes <= RUN:
            return leaves[0]
        return bytes(new(self.head + root(leaves, new)).digest())


class Leaves(NamedTuple):
    """The hashes of consecutive runs of a tensor, from run number ``first`` on.

    ``edges`` are the bytes of incomplete runs, each with its position, if they were kept."""

    first: int
    hashes: tuple[bytes, ...]
    edges: tuple[tuple[int, bytes], ...] = ()


class Hasher:
    """Hashes consecutive bytes of a tensor, from byte ``at`` on. Incomplete runs are left out.

    Parameters
    ----------
    whole
        The tensor.
    at
        The position of the first byte, in C order.
    new
        The hash function.
    nbytes
        The number of bytes, if the bytes of incomplete runs are to be kept; None if not.
    """

    __slots__ = ("_at", "_edges", "_first", "_hash", "_hashes", "_head", "_new", "_tail", "_whole")

    def __init__(self, whole: Form, at: int, new: Hash, nbytes: int | None = None) -> None:
        self._whole, self._at, self._new = whole, at, new
        self._first = -(-at // RUN)
        self._hashes: list[bytes] = []
        self._edges: list[tuple[int, bytearray]] = []
        self._hash: Any = None if at % RUN else self._begun()
        self._head = self._tail = -1  # bytes before the first position and from the second one on are kept
        if nbytes is not None:
            end = at + nbytes
            self._head = self._first * RUN
            self._tail = end if end == whole.nbytes else end // RUN * RUN

    def _begun(self) -> Any:
        return self._new(self._whole.head if self._whole.nbytes <= RUN else LEAF)

    def update(self, data: memoryview) -> None:
        """Hash the next bytes."""
        while data:
            left = RUN - self._at % RUN
            taken, data = data[:left], data[left:]
            if self._hash is not None:
                self._hash.update(taken)
            if self._at < self._head or (self._tail >= 0 and self._at >= self._tail):
                self._keep(taken)
            self._at += len(taken)
            if len(taken) == left:
                self._end()
                self._hash = self._begun()

    def _keep(self, data: memoryview) -> None:
        if not self._edges or self._edges[-1][0] // RUN != self._at // RUN:
            self._edges.append((self._at, bytearray()))
        self._edges[-1][1].extend(data)

    def _end(self) -> None:
        if self._hash is not None:
            self._hashes.append(self._hash.digest())
        self._hash = None

    def leaves(self) -> Leaves:
        """Return the hashes of the runs whose bytes were all there, and what was kept."""
        whole = self._whole
        if self._at == whole.nbytes and (whole.nbytes % RUN or not whole.nbytes):
            self._end()
        return Leaves(self._first, tuple(self._hashes), tuple((at, bytes(kept)) for at, kept in self._edges))


def run_of(whole: Form, n: int, pieces: Mapping[int, bytes], new: Hash) -> bytes | None:
    """Return the hash of run number ``n``, from pieces of it by their positions; None if some are missing."""
    data = b"".join(pieces[at] for at in sorted(pieces))
    if len(data) != min(RUN, whole.nbytes - n * RUN):
        return None
    return bytes(new((whole.head if whole.nbytes <= RUN else LEAF) + data).digest())


def root(leaves: Sequence[bytes], new: Hash) -> bytes:
    """Return the root of the Merkle tree over leaves that are hashed already, as RFC 6962 defines it.

    Joining neighbours level by level gives the same tree as the RFC's recursion: an odd last node moves up as it is.
    """
    if not leaves:
        return bytes(new().digest())
    level = list(leaves)
    while len(level) > 1:
        pairs = zip(level[::2], level[1::2], strict=False)
        above = [new(NODE + a + b).digest() for a, b in pairs]
        level = [*above, level[-1]] if len(level) % 2 else above
    return level[0]
