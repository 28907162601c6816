"""What goes into the ``torch.save`` files of :mod:`.torch_files`: trees of tensors and objects, each built afresh."""

from __future__ import annotations

import argparse
import collections
import datetime
import enum
import pathlib
import random
import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["classic_dtypes", "exotic", "modern_dtypes", "tied_state_dict", "training", "views", "walk", "wrapped"]

Tree = dict[Any, Any]

MODERN = [
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
    torch.complex32,
]
"""dtypes without a storage class of their own: saved over an UntypedStorage, and not loadable from legacy files."""

CLASSIC = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
]


def walk(tree: Any) -> dict[tuple[Any, ...], Tensor]:
    """Every tensor in nested dicts, lists and tuples, by its path of raw keys; other objects are not entered."""
    found: dict[tuple[Any, ...], Tensor] = {}

    def visit(node: Any, path: tuple[Any, ...]) -> None:
        if isinstance(node, Tensor):
            found[path] = node
        elif isinstance(node, dict):
            for key, child in node.items():
                visit(child, (*path, key))
        elif isinstance(node, (list, tuple)):
            for number, child in enumerate(node):
                visit(child, (*path, number))

    visit(tree, ())
    return found


def _random_bits(dtype: torch.dtype, shape: tuple[int, ...], g: torch.Generator) -> Tensor:
    """Any bits at all, so NaNs with payloads, infinities and denormals too."""
    size = dtype.itemsize
    *lead, last = shape
    return torch.randint(256, (*lead, last * size), dtype=torch.uint8, generator=g).view(dtype)


def _of_dtypes(dtypes: list[torch.dtype]) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(1)
    return {str(d).removeprefix("torch."): _random_bits(d, (5, 7), g) for d in dtypes}


def classic_dtypes() -> dict[str, Tensor]:
    return _of_dtypes(CLASSIC) | {"bool": torch.arange(35).view(5, 7) % 3 == 0}


def modern_dtypes() -> dict[str, Tensor]:
    return _of_dtypes(MODERN)


def tied_state_dict() -> dict[str, Tensor]:
    """What ``module.state_dict()`` gives: an OrderedDict with ``_metadata``, here with a weight under two names."""
    torch.manual_seed(2)
    model = nn.Sequential(
        collections.OrderedDict(
            embed=nn.Embedding(11, 6), norm=nn.BatchNorm1d(6), mlp=nn.Linear(6, 13), head=nn.Linear(6, 11, bias=False)
        )
    )
    model.head.weight = model.embed.weight  # type: ignore[union-attr]
    state: dict[str, Tensor] = model.state_dict()
    return state


def views() -> dict[str, Tensor]:
    """Views whose strides, offsets and storages no reader may take for granted; most share one storage."""
    g = torch.Generator().manual_seed(3)
    base = torch.randn(60, 100, generator=g)
    cplx = torch.randn(6, 8, dtype=torch.complex64, generator=g)
    other = torch.randn(4, 5, dtype=torch.complex128, generator=g)
    return {
        "base": base,
        "rows": base[7:19],
        "columns": base[:, 10:25],
        "block": base[3:50, 97:],
        "transposed": base.t(),
        "step": base[::4, 1::5],
        "diagonal": base.diagonal(),
        "expanded": base[3].expand(5, 100),
        "expanded_scalar": base[2, 2].expand(3, 4),
        "unfold": base[:, 0].unfold(0, 8, 3),
        "overlapping": torch.as_strided(base, (10, 7), (2, 3), 41),
        "zero_dim": base[59, 99],
        "last_row": base[-1],
        "reshaped": base.view(3, 20, 10, 10).permute(2, 0, 3, 1),
        "empty_view": base[5:5],
        "of_size_one": base[4:5, 6:7].expand(1, 1),  # a size-1 dimension may have any stride
        "odd_strides": torch.as_strided(base, (1, 5), (12345, 2), 9),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.empty(0),
        "empty_2d": torch.empty(3, 0, 2, dtype=torch.int16),
        "channels_last": torch.randn(2, 3, 4, 5, generator=g).contiguous(memory_format=torch.channels_last),
        "channels_last_3d": torch.randn(2, 3, 2, 4, 5, generator=g).contiguous(memory_format=torch.channels_last_3d),
        "conj": cplx.conj(),
        "conj_transposed": cplx.mH,
        "conj_rows": cplx[2:4].conj(),
        "neg": other.conj().imag,  # a float64 view, negated lazily, of a complex storage
        "real": torch.randn(4, 5, dtype=torch.complex64, generator=g).real,
    }


class MarkedTensor(torch.Tensor):
    """A tensor subclass of the user's own."""


def wrapped() -> dict[str, Tensor]:
    """Tensors that pickle through other functions than the usual one."""
    g = torch.Generator().manual_seed(4)

    def fresh() -> Tensor:
        return torch.randn(3, 4, generator=g)

    attributed = nn.Parameter(fresh())
    attributed.partition_dim = 1  # type: ignore[attr-defined]
    noted = fresh()
    noted.ds_id = "2_20"  # type: ignore[attr-defined]
    marked = fresh().as_subclass(MarkedTensor)
    marked.tag = {"rank": 3}  # type: ignore[attr-defined]
    return {
        "parameter": nn.Parameter(fresh()),
        "frozen": nn.Parameter(torch.arange(5), requires_grad=False),
        "buffer": nn.Buffer(fresh()),
        "attributed_parameter": attributed,
        "attributed_tensor": noted,
        "subclass": fresh().as_subclass(MarkedTensor),
        "attributed_subclass": marked,
        "requires_grad": fresh().requires_grad_(),
        "view_of_parameter": nn.Parameter(fresh()).detach()[1:],
    }


def exotic() -> dict[str, Tensor]:
    """Tensors that are not one strided block of bytes."""
    g = torch.Generator().manual_seed(5)
    x = torch.randn(6, 4, generator=g)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # prototypes and deprecations, every one
        sparse = x.relu()
        return {
            "plain": x,
            "quantized": torch.quantize_per_tensor(x, 0.1, 3, torch.quint8),
            "quantized_channels": torch.quantize_per_channel(
                x, torch.rand(6, generator=g) + 0.1, torch.zeros(6, dtype=torch.int64), 0, torch.qint8
            ),
            "coo": sparse.to_sparse(),
            "coo_uncoalesced": torch.sparse_coo_tensor(torch.tensor([[1, 1, 0], [2, 2, 3]]), torch.ones(3), (6, 4)),
            "csr": sparse.to_sparse_csr(),
            "csc": sparse.to_sparse_csc(),
            "bsr": sparse.to_sparse_bsr((2, 2)),
            "nested": torch.nested.nested_tensor([x[:2], x[2:5]]),
            "jagged": torch.nested.nested_tensor([x[:2], x[2:5]], layout=torch.jagged),
            "meta": torch.empty(3, 4, dtype=torch.bfloat16, device="meta"),
        }


class Phase(enum.Enum):
    WARMUP = "warmup"
    DECAY = 2


class Level(enum.IntEnum):
    LOW = 1


@dataclass
class RunState:
    epoch: int
    best: float
    ema: Tensor


class Custom:
    """An ordinary object, pickled by its ``__dict__``."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.names = ["a", "b"]


class Slots:
    __slots__ = ("left", "right")

    def __init__(self) -> None:
        self.left, self.right = 1, [2]


class Reduced:
    """Pickled as a call of a class method, with list items and a state on top."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __reduce__(self) -> tuple[Any, ...]:
        return Reduced, (self.size,), {"note": "state"}


class ListLike(list[Any]):
    """Pickled through APPENDS and BUILD."""


class DictLike(dict[Any, Any]):
    """Pickled through SETITEMS and BUILD."""


class Pair(NamedTuple):
    left: Tensor
    right: int


def training() -> Tree:
    """A training checkpoint as research code writes them: nested, and full of objects no reader has the classes of."""
    torch.manual_seed(6)
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(3):
        model(torch.randn(2, 4)).square().sum().backward()
        optimizer.step()
        scheduler.step()
    counts: collections.defaultdict[str, list[int]] = collections.defaultdict(list, {"seen": [1, 2]})
    listlike, dictlike = ListLike([1, torch.full((2,), 2.0)]), DictLike(x=torch.full((3,), 3.0))
    listlike.note = dictlike.note = "attribute"  # type: ignore[attr-defined]
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "args": argparse.Namespace(lr=1e-2, dtype=torch.bfloat16, device=torch.device("cpu"), out=pathlib.Path("run")),
        "rng": {
            "python": random.Random(7).getstate(),
            "numpy": np.random.RandomState(7).get_state(),
            "torch": torch.Generator().manual_seed(7).get_state(),
        },
        "numpy": {
            "array": np.arange(6, dtype=np.float32).reshape(2, 3),
            "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
            "scalar": np.float64(1.5),
            "strings": np.array(["a", "bcd"]),
            "objects": np.array([None, {"x": 1}], dtype=object),
            "records": np.array([(1, 2.0)], dtype=[("i", "<i4"), ("f", "<f8")]),
        },
        "objects": {
            "enum": Phase.WARMUP,
            "int_enum": Level.LOW,
            "dataclass": RunState(3, 0.5, torch.full((4,), 0.25)),
            "custom": Custom(torch.full((2, 2), 0.75)),
            "slots": Slots(),
            "reduced": Reduced(9),
            "list_like": listlike,
            "dict_like": dictlike,
            "named_tuple": Pair(torch.full((3,), 1.25), 4),
            "function": walk,
            "class": Custom,
            "module": nn.Linear(2, 2),
            "date": datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC),
            "defaultdict": counts,
            "counter": collections.Counter("abca"),
            "deque": collections.deque([1, 2], maxlen=3),
            "set": {1, 2},
            "frozenset": frozenset({3}),
            "bytes": b"\x00\xff",
            "bytearray": bytearray(b"xy"),
            "complex": 1 + 2j,
            "big_int": 1 << 200,
            "range": range(1, 9, 2),
            "slice": slice(1, None, 2),
            "ellipsis": Ellipsis,
            "size": torch.Size([2, 3]),
            "none": None,
            "unicode": "naïve \N{SNOWMAN} \ud800",
        },
        "lists": [torch.full((1,), 1.0), {"deep": (torch.full((2,), 2.0), [torch.full((3,), 3.0)])}],
        ("tuple", "key"): torch.full((5,), 5.0),
        "": torch.full((6,), 6.0),
        "with.dots": {"more.dots": torch.full((7,), 7.0)},
        3: {True: torch.full((8,), 8.0), None: torch.full((9,), 9.0), 2.5: torch.full((10,), 10.0)},
        "spaces and / slashes": torch.full((11,), 11.0),
        "epoch": 3,
    }
