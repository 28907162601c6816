"""The raw namespace of formats that are made of many rank files: every tensor of every file, under the file's name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from ..core.index import Index, TensorSpec
from ..io.store import Store
from ..io.torchfile import Pickles
from .torchsave import stored_tensors


def stored_specs(store: Store, index: Index) -> dict[str, TensorSpec]:
    """``file/dotted.path`` -> spec, for all files of torch.save that the checkpoint stands on. Reads their pickles."""
    # a rank of Megatron's is a folder; others keep the files of a tag side by side, but for universal checkpoints
    least = 2 if index.format == "megatron" else 1
    return _read(store, _told_apart([path for path in index.files if path.endswith(".pt")], least))


def _told_apart(paths: Sequence[str], least: int) -> dict[str, str]:
    """Path -> as many of its last parts as no other path has, at least so many.

    >>> _told_apart(["t/zero/a/fp32.pt", "t/zero/b/fp32.pt", "t/model.pt"], 1)
    {'t/model.pt': 'model.pt', 't/zero/a/fp32.pt': 'a/fp32.pt', 't/zero/b/fp32.pt': 'b/fp32.pt'}
    """
    names: dict[str, str] = {}
    left, parts = list(paths), least
    while left:
        ends = {path: "/".join(path.split("/")[-parts:]) for path in left}
        counts = Counter(ends.values())
        names |= {path: end for path, end in ends.items() if counts[end] == 1 or end == path}
        left, parts = [path for path in left if path not in names], parts + 1
    return names


def _read(store: Store, names: Mapping[str, str]) -> dict[str, TensorSpec]:
    """``names``: path -> what the file's tensors stand under."""
    specs: dict[str, TensorSpec] = {}
    pickles = Pickles()
    for path, name in names.items():
        specs |= stored_tensors(store, path, f"{name}/", pickles)
    return specs


class RankStored(Mapping[str, TensorSpec]):
    """The same of some files only, whose pickles are read when it is first looked into."""

    def __init__(self, store: Store, paths: tuple[str, ...]) -> None:
        self._store = store
        self._paths = paths
        self._known: dict[str, TensorSpec] | None = None

    def _all(self) -> dict[str, TensorSpec]:
        if self._known is None:
            self._known = _read(self._store, {path: path for path in self._paths})
        return self._known

    def __getitem__(self, name: str) -> TensorSpec:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())
