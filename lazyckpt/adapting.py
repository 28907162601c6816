"""`lazyckpt.apply_lora` and `lazyckpt.extract_lora`: adapters into the weights of a model, and out of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .core.dtypes import F32
from .core.units import plural
from .derive.adapters.applying import applied
from .derive.adapters.building import CONFIG, FILE, AdapterBuilder
from .derive.adapters.extracting import low_rank
from .derive.arithmetic import combined, linear
from .derive.sources import all_views
from .errors import DataError, and_more, some
from .export.safetensors import contents
from .jobs.destination import Files
from .jobs.executor import run
from .jobs.guard import local_path
from .jobs.places import PIECE
from .jobs.plan import Text, WritePlan
from .jobs.progress import Bar
from .jobs.publish import once
from .jobs.write import write
from .view import CheckpointView, view_of

if TYPE_CHECKING:
    import torch

    from .tensor import LazyTensor

_SHOWN = 10  # tensors that a report lists

Adapter = str | os.PathLike[str] | CheckpointView


def apply_lora(
    base: CheckpointView,
    adapter: Adapter | Sequence[Adapter],
    scale: float | Sequence[float] | None = None,
    *,
    config: Mapping[str, Any] | None = None,
) -> CheckpointView:
    """Return a model with adapters in its weights, as a lazy view. Reads no weights.

    LoRA, rsLoRA, DoRA, LoHa and LoKr, with ranks and alphas per module, of linear layers, embeddings, convolutions and
    stacked experts, under the names of PEFT, kohya (and LyCORIS) and diffusers. ``modules_to_save`` and biases replace
    those of the base. The weights are those of `merge_and_unload` of PEFT on the CPU but for the order in which the
    products of the matrices are summed. A row of a changed weight reads a row of the base and one of B, and A.

    Parameters
    ----------
    base
        The model, in any format, under the names that the adapter was made for; modules around the model
        (``model.``, ``unet.``) may differ. ``view.rename`` gives other names, ``view.dequantize`` the weights of a
        quantized model.
    adapter
        A folder of PEFT, a file, or a view; or a list of them, which are applied in turn. A part of an adapter is
        ``lazyckpt.open(path).select(...)``.
    scale
        A factor of the adapter's own scale (``alpha / rank``), 1 by default; of several adapters a list.
    config
        The content of adapter_config.json, if it is not beside the adapter.

    Returns
    -------
    CheckpointView
        The changed model. Tied names stay tied: an adapter of one of them changes it for all.

    Raises
    ------
    DataError
        A tensor of the adapter matches nothing in the base or does not fit it; the base is quantized; the adapter is of
        another method, or has a setting that is not supported.
    LazyckptError
        What `lazyckpt.open` raises.
    """
    all_views([base], "lazyckpt.apply_lora")
    listed = [adapter] if isinstance(adapter, (str, os.PathLike, CheckpointView)) else list(adapter)
    scales = _scales(scale, len(listed))
    if base.format == "run":
        raise DataError("the tensors of a run are stacked over its steps: apply the adapter to run.at(step)")
    opened = []
    for one, factor in zip(listed, scales, strict=True):
        view = one if isinstance(one, CheckpointView) else CheckpointView(one)
        found = config if config is not None else view.meta.get("adapter_config")
        opened.append((view, found, factor))
    store, index = applied(base, opened)
    return view_of(store, index, next(iter(index.states)), ())


def _scales(scale: float | Sequence[float] | None, count: int) -> list[float]:
    if not count:
        raise DataError("there is no adapter to apply: give a path, a view or a list of them")
    if scale is None or isinstance(scale, (int, float)):
        scale = [1.0 if scale is None else scale] * count
    if len(scale) != count:
        raise DataError(f"{len(scale)} scales are given for {count} adapters: one for each")
    found = [float(one) for one in scale]
    if not all(map(isfinite, found)):
        raise DataError(f"a scale of an adapter is a finite number, not {next(x for x in found if not isfinite(x))}")
    return found


@dataclass(frozen=True)
class Extracted:
    """What `extract_lora` made of one tensor.

    Attributes
    ----------
    name
        Its name in the model.
    shape
        Its shape.
    rank
        The rank of its adapter. 0: the whole tensor is in the adapter.
    energy
        The share of the sum of squares of the difference that the adapter has; 1 for whole tensors.
    norm
        The Frobenius norm of the difference, if it was decomposed.
    """

    name: str
    shape: tuple[int, ...]
    rank: int
    energy: float
    norm: float | None


@dataclass(frozen=True)
class Extraction:
    """The report of `extract_lora`.

    Attributes
    ----------
    tensors
        A row for each tensor that differs.
    files
        The written files.
    left_out
        Tensors that differ and are not in the adapter -> why.
    """

    tensors: tuple[Extracted, ...]
    files: tuple[Path, ...]
    left_out: Mapping[str, str]

    @property
    def energy(self) -> float:
        """The share of the sum of squares of all decomposed differences that the adapter has."""
        rows = [(row.energy, row.norm**2) for row in self.tensors if row.norm is not None]
        total = sum(square for _, square in rows)
        return sum(share * square for share, square in rows) / total if total else 1.0

    def __repr__(self) -> str:
        lines = [f"{plural(len(self.tensors), 'tensor')}, {self.energy:.1%} of the energy of their differences"]
        lines += [f"  {row.name}  {_kind(row)}" for row in sorted(self.tensors, key=lambda row: row.energy)[:_SHOWN]]
        if len(self.tensors) > _SHOWN:
            lines.append(f"  {and_more(len(self.tensors) - _SHOWN, 'tensors')}")
        lines += [f"  left out: {name}: {why}" for name, why in list(self.left_out.items())[:_SHOWN]]
        return "\n".join(lines)


def _kind(row: Extracted) -> str:
    return f"rank {row.rank}, {row.energy:.1%}" if row.rank else "whole"


def extract_lora(
    tuned: CheckpointView,
    base: CheckpointView,
    dest: str | os.PathLike[str],
    *,
    rank: int = 64,
    energy: float | None = None,
    select: str | Callable[[str], bool] | None = None,
    others: Literal["save", "skip", "error"] = "save",
    seed: int = 0,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    progress: bool | None = None,
) -> Extraction:
    """Write the difference of two models as a LoRA adapter, a folder that ``PeftModel.from_pretrained(base, dest)``
    loads.

    Each weight of a linear layer, an embedding or a convolution gets the best approximation of its rank that randomized
    singular value decomposition finds (two iterations; the same seed gives the same adapter on the same machine).
    Memory is that of the adapter and of blocks of one tensor, which is read three times if it has more than 256 MiB.
    Weights that do not differ are left out. Differences and factors are computed in float32.

    Parameters
    ----------
    tuned, base
        The models, with the same names and shapes, in any formats.
    dest
        The folder to write: adapter_config.json and adapter_model.safetensors.
    rank
        The rank; with ``energy`` the largest rank.
    energy
        Take for each weight the smallest rank whose adapter has this share of the sum of squares of the difference.
    select
        A glob of names, or a function: only these weights are decomposed.
    others
        What to do with other tensors that differ (norms, biases, weights that ``select`` leaves out): "save" puts their
        modules into the adapter as a whole, "skip" leaves them out, "error" raises.
    seed
        Of the random directions.
    dtype
        The dtype of the adapter's matrices, by default float32.
    overwrite
        Replace an adapter in ``dest``.
    progress
        Print a bar; by default on a terminal.

    Returns
    -------
    Extraction
        The rank and the energy of each tensor, and the files.

    Raises
    ------
    DataError
        A name or shape differs; there is no difference; a tensor differs that is not floating-point, or that is no
        weight and ``others`` is "error".
    DestinationError
        The files exist and ``overwrite`` is False.
    """
    if rank < 1 or (energy is not None and not 0 < energy <= 1):
        raise DataError(f"rank={rank}, energy={energy}: a rank is 1 or more, a share between 0 and 1")
    if others not in ("save", "skip", "error"):
        raise DataError(f"others={others!r}: it is 'save', 'skip' or 'error'")
    all_views([tuned, base], "lazyckpt.extract_lora")
    place = local_path(dest)
    read = [*tuned.values(), *base.values()]
    # in the folder of a model, transformers takes an adapter for the model; no other file is mistaken for a part of it
    destination = Files(place, [CONFIG, FILE], read, overwrite, of_family=lambda name: False)
    destination.check()
    differences = _difference(tuned, base)
    wanted = _chosen(differences, select)
    owned = differences.once()[0]
    build = AdapterBuilder(base.meta, base.root, dtype)
    rows: list[Extracted] = []
    left_out: dict[str, str] = {}
    with Bar(sum(tensor.nbytes for tensor in owned.values()), "extract", progress) as bar:
        for name, tensor in owned.items():
            if name in wanted.full_names and build.takes(name, tensor):
                found = low_rank(tensor, rank, energy, seed)
                if found is not None:
                    build.add(name, tuple(tensor.shape), found)
                    rows.append(Extracted(name, tuple(tensor.shape), found.left.shape[1], found.energy, found.norm))
            elif _differs(tensor):
                if others == "error":
                    raise DataError(f"{name!r} differs and is not decomposed: others='save' or 'skip' says what to do")
                if others == "save" and build.save(name, tuned):
                    rows.append(Extracted(name, tuple(tensor.shape), 0, 1.0, None))
                else:
                    left_out[name] = "others='skip'" if others == "skip" else "it is no weight or bias of a module"
            bar.add(tensor.nbytes)
    if not rows:
        raise DataError(
            f"there is no adapter to extract: {tuned.root} and {base.root} do not differ in what it can hold"
        )
    texts: dict[str, Text] = {CONFIG: build.config(), FILE: lambda: contents(build.tensors)}
    write(WritePlan(destination, (), once(), texts=texts), verify=False, progress=False, run=run)
    return Extraction(tuple(rows), (place / CONFIG, place / FILE), left_out)


def adaptable(
    tuned: CheckpointView, base: CheckpointView, select: str | None, rank: int, dtype: torch.dtype | None
) -> tuple[list[str], int]:
    """Return the weights that `extract_lora` would decompose, and the bytes of their matrices at most. Reads nothing.
    Raises DataError if a name or shape differs."""
    differences = _difference(tuned, base)
    chosen = _chosen(differences, select)
    build = AdapterBuilder(base.meta, base.root, dtype)
    shapes = {n: t.shape for n, t in differences.once()[0].items() if n in chosen.full_names and build.takes(n, t)}
    numbers = sum(min(rank, s[0], s[1:].numel()) * (s[0] + s[1:].numel()) for s in shapes.values())
    return list(shapes), numbers * (4 if dtype is None else dtype.itemsize)


def _difference(tuned: CheckpointView, base: CheckpointView) -> CheckpointView:
    """Return the difference of two models in float32, as a lazy view."""
    store, index = combined([tuned, base], lambda _, two: linear(two, (1.0, -1.0)), what="the difference", dtype=F32)
    return view_of(store, index, next(iter(index.states)), ())


def _chosen(differences: CheckpointView, select: str | Callable[[str], bool] | None) -> CheckpointView:
    """Return the tensors that are decomposed. Raises DataError if ``select`` fits no name."""
    found = differences if select is None else differences.select(select)
    if not found:
        raise DataError(f"select={select!r} fits no tensor: names are for example {some(map(repr, differences), 2)}")
    return found


def _differs(difference: LazyTensor) -> bool:
    """Return whether an element of a difference is not zero. Raises DataError for tensors of integers that differ."""
    for _, piece in difference.pieces(PIECE):
        block = piece[...]
        if block.dtype.is_floating_point and bool(block.count_nonzero()):
            return True
    return False
