"""`CheckpointView`: opening, arithmetic and pickling."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

from ..core.index import Index
from ..derive.arithmetic import weighted
from ..derive.deltas import in_folder
from ..derive.sources import note_opening
from ..errors import DataError
from ..formats.opening import opened
from ..io.parcels import packed, unpacked
from ..io.storage.base import Store
from ..io.storage.joined import Joined
from ..lookup import Step
from ..reshaping import of_part
from .bases import ABOUT, Bases, with_base
from .writing import Writable

if TYPE_CHECKING:
    from ..show.updates import Updates


class CheckpointView(Writable["CheckpointView"]):
    """A checkpoint, or a part of it, as a mapping from dotted names to lazy tensors. Opening reads no tensor data.

    `lazyckpt.open` is the same as calling this class.

    Parameters
    ----------
    path
        A file, a folder, or the URL of one.
    format
        The name of the reader to use. By default the first reader that recognises the path.
    tag
        Which checkpoint to open in a folder that has several. By default the one that the file ``latest`` names, or the
        newest complete one.
    rules
        How the shards of tensor-parallel ranks form a tensor, for names whose rule the checkpoint does not record:
        glob -> rule. `lazyckpt.open` lists the rules.
    cache
        Reuse the index of an earlier opening if the files are unchanged. The last indexes are kept in memory; those of
        large checkpoints (hundreds of files, megabytes of metadata) and of folders at URLs also in the user's cache
        folder, for other processes. "disk", a size ("50GiB"), a path, or a path and a size ("/scratch/me:50GiB"): keep
        also the bytes that are read from a URL, in the user's cache folder or at the path, up to 20 GiB or the size.
        False reads everything anew and keeps nothing.
    storage_options
        Options of fsspec's file system for a URL: credentials, endpoints.
    io
        How files are read. "auto": those of network file systems (NFS, Lustre, GPFS, FUSE, ...) are read in large
        requests, and those of local disks are mapped; "map": all are mapped; "read": none is mapped; "network": all are
        read as if they were on a network file system. The environment variable ``LAZYCKPT_IO`` replaces "auto" by
        another of these. No effect on URLs.
    base
        The base of a delta checkpoint (`lazyckpt.delta`): a view, or a path. By default the base is opened where the
        delta says that it was.

    Raises
    ------
    MissingFileError
        The path, or a file without which the checkpoint cannot be read, does not exist.
    FormatError
        No reader recognises the path, or the layout is not supported.
    CorruptError
        A file is damaged.
    """

    __slots__ = ()

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        format: str | None = None,
        tag: str | None = None,
        rules: Mapping[str, Any] | None = None,
        cache: bool | str | os.PathLike[str] = True,
        storage_options: Mapping[str, Any] | None = None,
        io: str = "auto",
        base: CheckpointView | str | os.PathLike[str] | None = None,
    ) -> None:
        store, index = opened(path, format, tag, rules, cache, storage_options, io)
        options = {"cache": cache, "storage_options": storage_options, "io": io}
        whole = with_base(store, index, format, Bases(CheckpointView, base, options))
        self._init(whole.store, whole.index, next(iter(whole.index.states)), (), True)
        self.kept |= whole.kept
        shown = {"format": format, "tag": tag, "rules": rules, "base": base}
        note_opening(self, "lazyckpt.open", os.fsdecode(path), shown)

    def _of(self, index: Index, steps: tuple[Step, ...] = ()) -> CheckpointView:
        # a view of one rank's shard must not find the stored names of other ranks
        return view_of(self._store, index, self._state, steps, self._of_all and index.layout is None)

    def updates(
        self,
        *,
        optimizer: str | Mapping[str, str] | None = None,
        gradients: CheckpointView | None = None,
        **options: Any,
    ) -> Updates:
        """Return what the optimizer's last step added to each weight, computed from its stored states. Reads nothing.

        Let d be the direction that the states determine (for AdamW the bias-corrected
        ``exp_avg / (sqrt(exp_avg_sq) + eps)``), lr the learning rate, wd a decoupled weight decay and w the weight as
        it is stored, after the step: fp32 weights where the checkpoint has them. The update is
        ``w - w_before = -(lr / (1 - lr * wd)) * (d + wd * w)``, or ``-(d + wd * w)`` if no learning rate is known.
        It is the last step's for Adam, AdamW, SGD with momentum, Muon without Nesterov's rule and Adafactor with
        ``beta1``. For Lion, and SGD and Muon with Nesterov's rule, it is the step for a gradient that does not change,
        unless ``gradients`` are given. Adafactor without ``beta1`` needs ``gradients``. Weight decay that is part of
        the gradient (Adam, SGD) is in the states.

        Optimizer and options are those that the checkpoint records for each parameter. Training loops save after the
        scheduler's step: then the recorded learning rate is that of the next step. Nothing is guessed: ``problems``
        of the result lists the parameters that are left out, and what to pass for them.

        Parameters
        ----------
        optimizer
            "adamw", "adam", "lion", "sgd", "adafactor" or "muon", for all parameters or by glob:
            ``{"*.weight": "muon", "*": "adamw"}``. By default what the checkpoint records.
        gradients
            The gradients of the last step, as a view with the names of the parameters.
        **options
            Options in place of the recorded ones, for all parameters or by glob: ``lr=1e-4``, ``betas=(0.9, 0.95)``,
            ``weight_decay={"*.bias": 0, "*": 0.1}``, ``eps``, ``step``, ``momentum``, ``nesterov``, and others with
            the names that torch.optim gives them.

        Returns
        -------
        Updates
            A mapping from names to lazy tensors. ``table()`` computes the norms in units of the weights', ``plot()``
            draws them, ``view`` is the same as a `CheckpointView`.

        Raises
        ------
        DataError
            The view has no optimizer states, or there is no such option or optimizer.
        """
        from ..derive.updates import steps_of
        from ..show.updates import Updates

        found = steps_of(self, optimizer, gradients, options)
        return Updates(view_of(found.store, found.index, "weights", self._steps), found.steps)

    # -- arithmetic of the tensors of the same names

    __array_ufunc__ = None  # so that numpy's numbers leave ``number * view`` to the view

    def _weighted(self, weights: Sequence[float], *others: CheckpointView, what: str) -> CheckpointView:
        store, index = weighted((self, *others), weights, what)
        return view_of(store, index, next(iter(index.states)), ())

    def __add__(self, other: CheckpointView) -> CheckpointView:
        """Return the sum of the tensors of the same names, as a lazy view. Reads nothing.

        ``a - b``, ``0.5 * a``, ``a / 2``, ``-a`` and `sum` work, too; ``0.5 * a + 0.5 * b`` is one operation, which
        computes in float32 (float64 if a tensor is float64) and is rounded once, to the dtype that torch promotes those
        of the tensors to.

        Parameters
        ----------
        other
            A view of any format, dtype and layout, with the same names and shapes. `lazyckpt.mean` and `lazyckpt.merge`
            have an option for views that lack some.

        Returns
        -------
        CheckpointView
            The view of the sums. Tensors that are not of floating-point numbers are kept if they are equal in both.

        Raises
        ------
        DataError
            A name or a shape is missing in one of the views; a tensor is of 8-bit floats, whose scales are other
            tensors.
        """
        return self._weighted((1, 1), other, what="a sum") if isinstance(other, CheckpointView) else NotImplemented

    def __radd__(self, other: object) -> CheckpointView:
        """Return the view itself for ``0 + view``, with which Python's `sum` begins."""
        return self if isinstance(other, int) and other == 0 else NotImplemented

    def __sub__(self, other: CheckpointView) -> CheckpointView:
        """Return the difference of the tensors of the same names, as a lazy view. See `__add__`."""
        if not isinstance(other, CheckpointView):
            return NotImplemented
        return self._weighted((1, -1), other, what="a difference")

    def __mul__(self, factor: float) -> CheckpointView:
        """Return the view whose floating-point tensors are multiplied by a number when they are read."""
        if not isinstance(factor, Real):
            return NotImplemented
        return self._weighted((float(factor),), what="a product")

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> CheckpointView:
        """Return the view whose floating-point tensors are divided by a number, as times its reciprocal in float64."""
        if not isinstance(divisor, Real):
            return NotImplemented
        return self._weighted((1 / float(divisor),), what="a quotient")

    def __neg__(self) -> CheckpointView:
        """Return the view of the negative floating-point tensors."""
        return self._weighted((-1,), what="a negative")

    def __pos__(self) -> CheckpointView:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the description of the view, of a part only that of its tensors: never elements."""
        about = self._store, of_part(self), self._state, self._pickled_steps(), self._of_all
        data = packed(about)
        return (view_of, about) if data is None else (_unpacked, (data,))


def unshard(views: Iterable[CheckpointView]) -> CheckpointView:
    """Merge the shards of all ranks into the view that `CheckpointView.shard` cut, in all states. Reads nothing.

    Parameters
    ----------
    views
        The shards of all ranks, in any order.

    Returns
    -------
    CheckpointView
        The whole view.

    Raises
    ------
    MeshError
        The shards are of several checkpoints or meshes, or a rank is missing.
    DataError
        A view is a part of a shard.
    """
    from ..layouts.shard import unsharded

    shards = list(views)
    if any(view._steps for view in shards):
        raise DataError("these views are parts of shards: put the whole shards together, then take the part")
    index = unsharded([view._index for view in shards])
    return shards[0]._of(index)


def with_wrappers(path: str | os.PathLike[str], format: str, tag: str | None = None) -> CheckpointView:
    """Open a checkpoint under its writer's names, which include the modules that wrap the model."""
    store, index = opened(path, format, tag)
    return view_of(store, index, next(iter(index.states)), (), True)


def view_of(store: Store, index: Index, state: str, steps: tuple[Step, ...], of_all: bool = False) -> CheckpointView:
    view = object.__new__(CheckpointView)
    view._init(store, index, state, steps, of_all)
    return view


def _unpacked(data: bytes) -> CheckpointView:
    return view_of(*unpacked(data))


def within(view: CheckpointView, folder: Store) -> CheckpointView:
    """Return a delta's view with the store of a folder that has both the delta and its base; else the view itself."""
    if ABOUT not in view.kept:
        return view
    index = in_folder(view._store, view._index, folder.root)
    if index is None or not isinstance(view._store, Joined):
        return view
    store = folder.pinned(index.pins)
    found = view_of(store, index, view._state, (), True)
    found.kept[ABOUT] = view.kept[ABOUT]
    return found
