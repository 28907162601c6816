"""A hash of the contents of tensors that does not depend on files, layout or the order of names.

docs/formats/digest.md specifies it. A tensor's bytes (C order, little-endian) are cut into runs of 1 MiB; the hashes of
the runs are joined as in the Merkle tree of RFC 6962; the root, with dtype and shape, gives the tensor's digest. So
runs are hashed in any order, by any number of threads or workers. Many small tensors are read together, as a pack.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from ..core.box import span_boxes
from ..core.packs import packed
from ..errors import LazyckptError
from ..io.memory import many_objects
from ..jobs.batching import Task
from ..jobs.executor import OVERHEAD, runner
from ..jobs.places import PIECE
from ..jobs.progress import Bar
from ..jobs.write import contents
from ..lazy import LazyArray, shape_of
from .manifest import Digest, Hash, StateDigest, TensorDigest, hash_of

RUN = 1 << 20  # bytes of a leaf of the tree; part of the format
_TASK = 64 << 20  # most bytes of a task, whole runs
_SMALL = 64 << 10  # tensors of up to this many bytes are read together
_TOGETHER = 4 << 20  # bytes of the small tensors in one task
_LEAF, _NODE = b"\x00", b"\x01"  # prefixes of RFC 6962, section 2.1


def root(leaves: Sequence[bytes], new: Hash) -> bytes:
    """Return the root of the Merkle tree over leaves that are hashed already, as RFC 6962 defines it.

    Joining neighbours level by level gives the same tree as the RFC's recursion: an odd last node moves up as it is.
    """
    if not leaves:
        return bytes(new().digest())
    level = list(leaves)
    while len(level) > 1:
        pairs = zip(level[::2], level[1::2], strict=False)
        above = [new(_NODE + a + b).digest() for a, b in pairs]
        level = [*above, level[-1]] if len(level) % 2 else above
    return level[0]


def of_tensor(dtype: str, shape: Sequence[int], top: bytes, new: Hash) -> str:
    """Return the digest of a tensor with the root ``top``, as hexadecimal digits."""
    head = f"lazyckpt tensor 1\n{dtype}\n{','.join(map(str, shape))}\n"
    return str(new(head.encode() + top).hexdigest())


def digest(
    states: Mapping[str, Mapping[str, LazyArray]],
    aliases: Mapping[str, Mapping[str, str]],
    lost: Mapping[str, Mapping[str, str]],
    algorithm: str = "sha256",
    executor: Any = None,
    memory: int | str | None = None,
    progress: bool | None = None,
) -> Digest:
    """Return the digests of all tensors of some states. ``aliases`` has the tied names of each state: name -> name of
    the tensor that is in ``states``; ``lost`` the names whose file is missing: name -> reason. See
    `CheckpointView.digest`."""
    new = hash_of(algorithm)
    found = [_Found(state, name, t) for state, tensors in states.items() for name, t in tensors.items()]
    with many_objects(), Bar(sum(one.nbytes for one in found), "digest", progress) as bar:

        def done(task: Task, results: Sequence[_Result]) -> None:
            for result in results:
                found[result.number].add(result)
            bar.add(task.nbytes)

        runner(executor, memory)(_tasks(found, algorithm), done, tensors=[one.tensor for one in found])
    rows: dict[str, dict[str, TensorDigest]] = {state: {} for state in states}
    for one in found:
        rows[one.state][one.name] = one.row(new)
    tables = {}
    for state, table in rows.items():
        tied = {name: table[owner] for name, owner in aliases.get(state, {}).items()}
        gone = {name: TensorDigest("", (), None, _line(why)) for name, why in lost.get(state, {}).items()}
        tables[state] = StateDigest(table | tied | gone, dict(aliases.get(state, {})))
    return Digest(algorithm, tables)


class _Result(NamedTuple):
    """The leaves of a tensor from number ``first`` on; or the error of reading them."""

    number: int
    first: int
    leaves: list[bytes]
    error: str | None = None


class _Found:
    """The leaves of a tensor so far."""

    __slots__ = ("error", "leaves", "name", "nbytes", "state", "tensor")

    def __init__(self, state: str, name: str, tensor: LazyArray) -> None:
        self.state, self.name, self.tensor, self.nbytes = state, name, tensor, tensor.nbytes
        self.leaves: dict[int, list[bytes]] = {}
        self.error: str | None = None

    def add(self, result: _Result) -> None:
        self.leaves[result.first] = result.leaves
        self.error = self.error or result.error

    def row(self, new: Hash) -> TensorDigest:
        spec, shape = self.tensor.spec, shape_of(self.tensor)
        if self.error is not None:
            return TensorDigest(spec.dtype.name, shape, None, self.error)
        leaves = [leaf for first in sorted(self.leaves) for leaf in self.leaves[first]]
        return TensorDigest(spec.dtype.name, shape, of_tensor(spec.dtype.name, shape, root(leaves, new), new))


def _tasks(found: Sequence[_Found], algorithm: str) -> Iterator[Task]:
    """Yield the tasks that hash all tensors."""
    small: list[tuple[int, int, LazyArray]] = []
    size, kind = 0, None
    for n, one in enumerate(found):
        t, nbytes = one.tensor, one.nbytes
        if nbytes <= _SMALL and t._selection is None and t.spec.combine == "first":
            now = id(t.store), t.spec.dtype
            if small and (now != kind or size >= _TOGETHER):
                yield _together(small, size, algorithm)
                small, size = [], 0
            small.append((n, nbytes, t))
            size, kind = size + nbytes, now
            continue
        try:
            yield from _of_large(n, t, algorithm)
        except (LazyckptError, OSError) as e:
            one.error = _line(e)
    if small:
        yield _together(small, size, algorithm)


def _together(small: Sequence[tuple[int, int, LazyArray]], size: int, algorithm: str) -> Task:
    tensors = [t for _, _, t in small]
    together = LazyArray(tensors[0].store, packed("", [t.spec for t in tensors]))
    work = partial(_hash_small, together, [(n, nbytes) for n, nbytes, _ in small], algorithm, tensors)
    return Task(size, size + PIECE + OVERHEAD, work, together)


def _hash_small(
    together: LazyArray, sizes: Sequence[tuple[int, int]], algorithm: str, tensors: Sequence[LazyArray]
) -> list[_Result]:
    """Hash tensors of one run each."""
    new = hash_of(algorithm)
    found: list[_Result] = []
    memory, at = bytearray(sum(size for _, size in sizes)), 0
    try:
        for offset, piece in contents(together):
            memory[offset : offset + len(piece)] = piece
    except (LazyckptError, OSError):  # one of them cannot be read
        return [result for (n, _), t in zip(sizes, tensors, strict=True) for result in _hash([t], n, 0, algorithm)]
    data = memoryview(memory)
    for n, size in sizes:
        leaf = new(_LEAF)
        leaf.update(data[at : at + size])
        found.append(_Result(n, 0, [leaf.digest()] if size else []))
        at += size
    return found


def _of_large(n: int, tensor: LazyArray, algorithm: str) -> Iterator[Task]:
    """Yield the tasks of a tensor of any size: whole runs, as few blocks of the tensor."""
    tensor._check()
    next(tensor.pieces(_TASK), None)  # raises if the tensor is too large to be read
    shape, numel, each = shape_of(tensor), tensor.numel(), _TASK // tensor.itemsize
    for lo in range(0, numel, each):
        hi = min(lo + each, numel)
        whole = hi - lo == numel
        parts = [tensor] if whole else [tensor.lazy[box.slices] for box in span_boxes(shape, lo, hi)]
        work = partial(_hash, parts, n, lo * tensor.itemsize // RUN, algorithm)
        yield Task((hi - lo) * tensor.itemsize, PIECE + OVERHEAD, work, parts[0])


def _hash(parts: Iterable[LazyArray], number: int, first: int, algorithm: str) -> list[_Result]:
    """Hash the runs of parts of a tensor that follow one another."""
    new = hash_of(algorithm)
    leaves: list[bytes] = []
    leaf, left = new(_LEAF), RUN
    try:
        for part in parts:
            for _, piece in contents(part):
                at = 0
                while at < len(piece):
                    taken = piece[at : at + left]
                    leaf.update(taken)
                    at, left = at + len(taken), left - len(taken)
                    if not left:
                        leaves.append(leaf.digest())
                        leaf, left = new(_LEAF), RUN
    except (LazyckptError, OSError) as e:
        return [_Result(number, first, [], _line(e))]
    if left < RUN:
        leaves.append(leaf.digest())
    return [_Result(number, first, leaves)]


def _line(error: object) -> str:
    return " ".join(str(error).split())
