"""The methods of a view that show and read it, and that compute statistics and digests."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any, ClassVar, Self

from ..core.units import size_in_bytes
from ..errors import DataError, Problem
from ..explore.subject import Subject
from ..inspect.kept import with_files
from ..namespace import Namespace
from ..show.notebook import States
from ..show.records import Problems, shown_meta
from ..show.text import explain, frame_of, summary, tree
from ..tensor import LazyTensor

if TYPE_CHECKING:
    import torch
    from torch.nn.modules.module import _IncompatibleKeys

    from ..explore.report import Written
    from ..inspect.manifest import Digest
    from ..inspect.table import Table
    from ..show.by_layer import LayerTable
    from ..show.plot import ViewPlots
else:
    from ..deferred import torch


class Readable(Namespace[LazyTensor]):
    """A namespace with the methods that show, read and measure its tensors."""

    __slots__ = ()

    _tensor: ClassVar[type[LazyTensor]] = LazyTensor
    _states: ClassVar[type[States]] = States

    # -- showing

    def tree(self, depth: int | None = None) -> str:
        """Return names, shapes, dtypes, sizes and parameter counts as an indented tree. Reads no tensor data.

        Parameters
        ----------
        depth
            Levels of names to show. By default all.

        Returns
        -------
        str
            Several lines of text.
        """
        return tree(self, depth)

    def explain(self) -> str:
        """Describe the files of the checkpoint, and what reading this view would cost. Reads no tensor data.

        Returns
        -------
        str
            Several lines of text.
        """
        return explain(self)

    def to_frame(self) -> Any:
        """Return a data frame with a row for each name. Reads no tensor data.

        Returns
        -------
        pandas.DataFrame or polars.DataFrame
            A pandas data frame if pandas is installed. Columns: ``name`` (in the whole checkpoint), ``dtype``,
            ``shape``, ``numel``, ``nbytes`` (bytes of the elements), ``tied`` (the name that owns the tensor, or None).

        Raises
        ------
        DataError
            Neither pandas nor polars is installed.
        """
        return frame_of(self)

    def __repr__(self) -> str:
        return f"{summary(self)}\n{tree(self, None, limit=40, fold=True)}"

    def _repr_html_(self) -> str:
        """Return the view as HTML for Jupyter: a tree that opens and closes. Reads no tensor data."""
        from ..show.html import view_html

        return view_html(self)

    @property
    def meta(self) -> Mapping[str, Any]:
        """Everything in the checkpoint that is not a tensor, as plain objects and inert records (`Opaque`)."""
        if self._meta is None:
            self._meta = shown_meta(super().meta)
        return self._meta

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What is missing or unusual in the checkpoint: sentences with a ``code`` to filter by and, if one file or
        tensor is concerned, its ``path`` (`lazyckpt.Problem`).

        If only values can decide the names of an optimizer's states, these are compared when such a state is first
        listed or looked up. A problem says so until then, and remains if the values do not decide.
        """
        return Problems(super().problems)

    # -- reading

    def to(
        self, device: str | torch.device | torch.dtype = "cpu", dtype: torch.dtype | None = None, copy: bool = True
    ) -> dict[str, torch.Tensor]:
        """Read all tensors of the view.

        Parameters
        ----------
        device
            Where to put the tensors. A dtype here (``view.to(torch.float32)``) is taken as ``dtype``, on the CPU.
        dtype
            Convert floating-point and complex tensors to this dtype, as `torch.nn.Module.to` does.
        copy
            False maps a tensor that is one contiguous run of a file instead of reading it, if ``device`` is the CPU and
            the file is on a local disk; files of network file systems are read (see ``io``). The mapping is private:
            writing to the tensor changes memory only, but truncating the file breaks it.

        Returns
        -------
        dict of str to torch.Tensor
            The tensors by name. Tied names share one tensor.

        Raises
        ------
        MissingFileError
            A file that holds elements of the view does not exist.
        CorruptError, ChangedFileError
            A file is damaged, or is not the one that was opened.
        DataError
            torch cannot convert a tensor to ``dtype``, or a tensor has no data or no merge rule.
        """
        from ..loading import read_all

        place, dtype = ("cpu", device) if isinstance(device, torch.dtype) else (device, dtype)
        done = read_all(self._owned(), torch.device(place), dtype, copy)
        if not self._index.aliases:
            return {name: done[full] for name, full in self._listed.items()}
        return {name: done[self.owner(name)] for name in self._listed}

    def state_dict(
        self, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
    ) -> dict[str, torch.Tensor]:
        """Read all tensors of the view, for `torch.nn.Module.load_state_dict`. The same as `to`.

        Parameters
        ----------
        device
            Where to put the tensors.
        dtype
            Convert floating-point and complex tensors to this dtype.

        Returns
        -------
        dict of str to torch.Tensor
            The tensors by name. Tied names share one tensor.

        Raises
        ------
        LazyckptError
            What `to` raises.
        """
        return self.to(device, dtype)

    def load_into(self, module: torch.nn.Module, strict: bool = True) -> _IncompatibleKeys:
        """Read the view into the parameters and buffers of a module, on their devices and in their dtypes.

        No second copy of the model is made. Each rank reads only its own part of a DTensor (FSDP2, tensor parallelism),
        without communication. Parameters on the meta device get memory: on the CPU, or on the devices of a DTensor's
        mesh. Names, shapes and missing files are checked before anything is written.

        Parameters
        ----------
        module
            The module to fill.
        strict
            Raise if the names of the view and of the module differ.

        Returns
        -------
        NamedTuple of missing_keys and unexpected_keys
            The same as `torch.nn.Module.load_state_dict` returns.

        Raises
        ------
        DataError
            Names differ and ``strict`` is True, a shape differs, or a DTensor's placement is not supported.
        LazyckptError
            What reading a `LazyTensor` raises.
        """
        from ..loading import load_into

        return load_into(self, module, strict)

    # -- statistics and plots

    def stats(
        self,
        *,
        bins: int | Sequence[float] | None = None,
        executor: Executor | None = None,
        memory: int | str | None = None,
        progress: bool | None = None,
    ) -> Table:
        """Compute the statistics of every tensor of the view. Tied tensors are counted once.

        Every tensor is read once, in pieces, on several threads, in bounded memory.

        Parameters
        ----------
        bins
            Number of bins of a histogram for each tensor, over its own range; or the edges of the bins, for all.
        executor, memory, progress
            See `WriteOptions`.

        Returns
        -------
        Table
            A row for each tensor, in the order of the view, and ``table.total``. The `Stats` of a tensor that cannot be
            read has the reason in ``error``. ``pandas.DataFrame(table)`` and ``polars.DataFrame(table)`` work.

        Raises
        ------
        DataError
            ``bins`` is not a number of bins or a rising sequence of edges.
        WorkerError
            Workers of the executor died.
        """
        from ..inspect.stats import stats_of_all

        return stats_of_all(self.once()[0], bins, executor, memory, progress)

    def by_layer(
        self,
        quantity: str = "norm",
        *,
        executor: Executor | None = None,
        memory: int | str | None = None,
        progress: bool | None = None,
    ) -> LayerTable:
        """Compute a quantity of every tensor, by kind of parameter and layer. Every tensor is read once.

        The layer is the first number between the dots of a full name, the kind is the name with "*" for such numbers.
        Tensors of the same layer and kind (experts) are taken together.

        Parameters
        ----------
        quantity
            "norm" (L2), "rms", "std", "absmax", "l1", "mean", "min", "max", "zeros", "nan" or "inf" (shares of the
            elements).
        executor, memory, progress
            See `WriteOptions`.

        Returns
        -------
        LayerTable
            ``table.values`` has a row for each kind and a column for each layer; ``pandas.DataFrame(table)`` has a row
            for each value; ``table.plot()`` draws a heat map, ``table.plot(lines=True)`` curves.

        Raises
        ------
        DataError
            There is no such quantity.
        WorkerError
            Workers of the executor died.
        """
        from ..show.by_layer import of_view

        return of_view(self, quantity, executor=executor, memory=memory, progress=progress)

    def digest(
        self,
        *,
        algorithm: str = "sha256",
        states: Sequence[str] | None = None,
        executor: Executor | None = None,
        memory: int | str | None = None,
        progress: bool | None = None,
    ) -> Digest:
        """Compute digests of the contents, which do not depend on format, layout or files.

        The same tensors have the same digest in ZeRO, tensor-parallel, DCP, Hugging Face and Zarr checkpoints.
        docs/formats/digest.md specifies how it is computed. Every byte is read once, on several threads.

        Parameters
        ----------
        algorithm
            "sha256", or "blake3" (needs the package blake3).
        states
            Names of the states to include. By default all states, or the view's own state if it is not the
            checkpoint's default.
        executor, memory, progress
            See `WriteOptions`.

        Returns
        -------
        Digest
            ``digest.root`` covers everything, ``digest.root_of(state)`` a state, ``digest[name].digest`` a tensor.
            ``digest.to_json()`` is a manifest, ``digest.mismatches(manifest)`` compares. A tensor that cannot be read
            has an ``error`` in place of its digest, and the roots that include it are None.

        Raises
        ------
        DataError
            The algorithm is unknown, or its package is not installed.
        TensorNotFoundError
            There is no state of a name in ``states``.
        WorkerError
            Workers of the executor died.
        """
        from ..inspect.digest import digest
        from ..jobs.executor import runner

        chosen = self._states_or(states)
        lost = {next(iter(chosen)): self.unreadable} if chosen else {}
        run = runner(executor, memory)
        return with_files(self, digest(chosen, lost, algorithm, run, progress, processes=executor is None))

    def _states_or(self, names: Sequence[str] | None) -> dict[str, Self]:
        """Return the states of these names, or by default all, or the own one of a view of another state."""
        if names is None:
            whole = self.state == next(iter(self.states), None)
            return dict(self.states) if whole else {self.state: self}
        names = [names] if isinstance(names, str) else list(names)
        if not names:
            raise DataError("states=[]: there is nothing to compute; None takes all states")
        return {name: self.states[name] for name in names}

    @property
    def plot(self) -> ViewPlots:
        """Plots with matplotlib: ``view.plot()`` for an overview, ``view.plot.layers()``, ``view.plot.hist(name)``, and
        others (`ViewPlots`)."""
        from ..show.plot import ViewPlots

        return ViewPlots(self)

    # -- the explorer

    def _subject(self, other: Namespace[Any] | None = None) -> Subject:
        """Return what the explorer shows of this view."""
        return Subject(self, other)

    def widget(self, other: Namespace[Any] | None = None, *, height: int = 640) -> Any:
        """Show the explorer in a notebook: tree, architecture, ranks, values, moments.

        The widget asks the kernel for what it shows; only the data that is looked at is read. `lazyckpt.serve` shows
        the same as a web page, `report` as a file.

        Parameters
        ----------
        other
            A second view, to compare this one with.
        height
            Height in CSS pixels.

        Returns
        -------
        anywidget.AnyWidget
            The widget, for JupyterLab, VS Code, Colab and marimo.

        Raises
        ------
        DataError
            anywidget is not installed.
        """
        from ..explore.api import Explorer
        from ..explore.widget import widget

        return widget(Explorer(self._subject(other)), height)

    def report(
        self,
        dest: str | os.PathLike[str],
        other: Namespace[Any] | None = None,
        *,
        max_size: int | str = "5MiB",
        max_read: int | str = "4GiB",
        progress: bool | None = None,
    ) -> Written:
        """Write the explorer as one HTML file, for a wiki, a pull request or an e-mail.

        The file holds the tree, and as many figures and values as fit. It needs no server and no network.

        Parameters
        ----------
        dest
            The file. An existing one is replaced when the new one is complete.
        other
            A second view, to compare this one with.
        max_size
            Largest size of the file: bytes, or text such as "5MiB".
        max_read
            How many bytes of tensors are read at most, for statistics and pictures: bytes, or text such as "4GiB".
        progress
            See `WriteOptions`. The display counts the bytes of the file, of at most ``max_size``.

        Returns
        -------
        Written
            The path, the size in bytes, and how many answers were left out to keep to the limits.

        Raises
        ------
        DataError
            ``max_size`` is too small for the application and the tree.
        DestinationError
            The file cannot be written, or it is one of the checkpoint.
        """
        from ..explore.api import Explorer
        from ..explore.report import report
        from ..jobs.progress import Bar

        limits = size_in_bytes(max_size), size_in_bytes(max_read)
        with Bar(limits[0], "report", progress) as bar:
            told = 0

            def tell(_: int, nbytes: int) -> None:
                nonlocal told
                bar.add(nbytes - told)
                told = nbytes

            return report(Explorer(self._subject(other)), dest, *limits, tell)
