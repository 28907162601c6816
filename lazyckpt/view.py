"""`CheckpointView`: a namespace of lazy tensors with the methods that read, write, convert and show a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

from .core.index import Index
from .errors import DataError
from .export.options import with_options
from .export.registry import export
from .formats.opening import opened
from .inspect.kept import OPENED, with_files
from .io.parcels import packed, unpacked
from .io.storage.base import Store
from .namespace import Namespace, Step
from .reshaping import of_part, of_rank, with_dtype, with_names
from .show.notebook import States
from .show.text import explain, frame_of, summary, tree
from .tensor import LazyTensor

if TYPE_CHECKING:
    import torch
    import xarray as xr
    from torch.nn.modules.module import _IncompatibleKeys

    from .export.files import NewNames
    from .export.options import WriteOptions, WriteResult
    from .inspect.manifest import Digest
    from .inspect.table import Table
    from .show.plot import ViewPlots
else:
    from .deferred import torch


class CheckpointView(Namespace[LazyTensor]):
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
        large checkpoints (hundreds of files, megabytes of metadata) also in the user's cache folder, for other
        processes. False reads everything anew and keeps nothing.
    storage_options
        Options of fsspec's file system for a URL: credentials, endpoints.

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

    _tensor: ClassVar[type[LazyTensor]] = LazyTensor
    _states: ClassVar[type[States]] = States

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        format: str | None = None,
        tag: str | None = None,
        rules: Mapping[str, Any] | None = None,
        cache: bool = True,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        store, index = opened(path, format, tag, rules, cache, storage_options)
        self._init(store, index, next(iter(index.states)), (), True)
        self.kept[OPENED] = True

    def _of(self, index: Index, steps: tuple[Step, ...] = ()) -> CheckpointView:
        # a view of one rank's shard must not find the stored names of other ranks
        return _restore(self._store, index, self._state, steps, self._of_all and index.layout is None)

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
        from .show.html import view_html

        return view_html(self)

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
            False maps a tensor that is one contiguous run of a file instead of reading it, if ``device`` is the CPU.
            The mapping is private: writing to the tensor changes memory only, but truncating the file breaks it.

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
        from .loading import read_all

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
        from .loading import load_into

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
        from .inspect.stats import stats_of_all

        return stats_of_all(self.once()[0], bins, executor, memory, progress)

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
        from .inspect.digest import digest
        from .jobs.executor import runner

        chosen = self._states_or(states)
        lost = {next(iter(chosen)): self.unreadable} if chosen else {}
        run = runner(executor, memory)
        return with_files(self, digest(chosen, lost, algorithm, run, progress, processes=executor is None))

    def _states_or(self, names: Sequence[str] | None) -> dict[str, CheckpointView]:
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
        """Plots with matplotlib: ``view.plot.norms()``, ``hist(name)``, ``layout(name)``, ``singular_values(name)``."""
        from .show.plot import ViewPlots

        return ViewPlots(self)

    # -- views of the same tensors under other names, in another dtype, cut for other ranks

    def rename(self, names: str | Mapping[str, Any], *, reverse: bool = False) -> CheckpointView:
        """Return a view of the same tensors under other names. Copies and reads nothing.

        Tensors that the other naming splits or joins (q, k and v; gate and up) are split or joined lazily.

        Parameters
        ----------
        names
            "hf" converts megatron-core's names to Hugging Face's, "megatron" converts them back. Other values are the
            name of a table in `lazyckpt.layouts.rename` ("llama", "mixtral", "qwen_moe", "gpt2", "gpt_neox",
            "nemotron"), or a table of your own such as ``{"decoder.layers.{l}.mlp.linear_fc2.{p}":
            "model.layers.{l}.mlp.down_proj.{p}"}``; ``{"extends": "llama", ...}`` adds lines to a table.
        reverse
            Read the table from right to left.

        Returns
        -------
        CheckpointView
            A tensor that no line of the table matches, or that cannot be split, keeps its name and has an entry in
            ``problems``.

        Raises
        ------
        FormatError
            There is no such table, or a line of it is invalid.
        DataError
            The view is a part below a prefix. Rename the whole view, then take the part.
        """
        return self._of(with_names(self, names, reverse))

    def astype(self, dtype: torch.dtype) -> CheckpointView:
        """Return a view that converts floating-point tensors to another dtype when they are read.

        Integer, bool and complex tensors keep their dtype, and so do the other states: in a training checkpoint the
        weights are converted, the fp32 master weights and the moments are not.

        Parameters
        ----------
        dtype
            A floating-point dtype.

        Returns
        -------
        CheckpointView
            The converted view. Nothing is read.

        Raises
        ------
        DataError
            ``dtype`` is not a floating-point dtype, or torch cannot convert a tensor to it.
        """
        return self._of(with_dtype(self, dtype), self._steps)

    def shard(
        self,
        *,
        tp: int = 1,
        pp: int = 1,
        dp: int = 1,
        ep: int = 1,
        rank: int | tuple[int, ...] | Mapping[str, int],
        rules: Mapping[str, Any] | None = None,
    ) -> CheckpointView:
        """Return the part of every state that one rank of another parallel layout holds. Reads nothing.

        Tensors are cut by the same rules that merge the shards of a checkpoint. A slice of a shard reads only its own
        bytes. The shard of a shard is the shard of the product of the degrees. `lazyckpt.unshard` is the inverse.

        Parameters
        ----------
        tp
            Tensor-parallel degree. gate and up are cut separately, attention in whole groups of heads; the rows of a
            vocabulary that do not divide are padded with zeros.
        pp
            Pipeline-parallel degree: layers are distributed over stages. Megatron's names number the layers of each
            stage from 0; other names keep their numbers.
        dp
            Data-parallel degree. Above 1 each tensor becomes the rank's flat partition, as ZeRO-3 stores weights and
            moments, of shape (ceil(n / dp),) for n elements.
        ep
            Expert-parallel degree: experts are distributed over ranks.
        rank
            Which rank: a global number (tp varies fastest, then ep, dp, pp), a tuple (tp, pp, dp, ep), or a mapping
            such as ``{"tp": 1}``.
        rules
            How tensors are cut for which no rule is known, as in `lazyckpt.open`.

        Returns
        -------
        CheckpointView
            The view of the rank's shard.

        Raises
        ------
        MeshError
            A degree does not divide what it splits.
        FormatError
            No rule is known for a tensor, or ``rules`` is invalid.
        SelectionError
            There is no such rank.
        DataError
            The view is a part below a prefix. Shard the whole view, then take the part.
        """
        return self._of(of_rank(self, (tp, pp, dp, ep), rank, rules or {}))

    # -- writing (``options`` are those of `WriteOptions`)

    @with_options
    def to_safetensors(
        self,
        dest: str | os.PathLike[str],
        *,
        dtype: torch.dtype | None = None,
        max_shard_size: int | str | None = "5GB",
        names: NewNames | None = None,
        **options: Unpack[WriteOptions],
    ) -> WriteResult:
        """Write the view as safetensors, in bounded memory.

        A tied tensor is stored once; its other names are in the header's metadata. `lazyckpt.recipes.to_hf` also writes
        the files that transformers needs beside the tensors.

        Parameters
        ----------
        dest
            A file that ends with ``.safetensors``, or a folder. A folder gets ``model.safetensors`` or, above
            ``max_shard_size``, numbered shards and their index, as Hugging Face names them.
        dtype
            Convert floating-point tensors to this dtype.
        max_shard_size
            Largest size of a file, in bytes or as text such as "5GB". None writes one file.
        names
            New names: ``{old: new}``, or a function from the old name to the new one. A new name of None leaves the
            tensor out.
        **options
            ``overwrite``, ``resume``, ``verify``, ``progress``, ``executor``, ``memory``: see `WriteOptions`.

        Returns
        -------
        WriteResult
            The files. They are published when all are complete. After an interruption the same call resumes, also
            within a file, from a hidden folder beside ``dest``.

        Raises
        ------
        DestinationError
            The destination exists and ``overwrite`` is False, the disk is too small, or permissions are missing.
        DataError
            The format lacks a dtype, or two tensors get the same name.
        TensorNotFoundError
            ``names`` has a name that is not in the view.
        MissingFileError
            A file of the source does not exist. Raised before anything is written.
        WorkerError, CorruptError, ChangedFileError
            Workers died; ``verify`` found a difference or a source is damaged; a source was changed meanwhile.
        """
        return export("safetensors", self, dest, options, dtype=dtype, max_shard_size=max_shard_size, names=names)

    @with_options
    def to_torch(
        self,
        dest: str | os.PathLike[str],
        *,
        dtype: torch.dtype | None = None,
        max_shard_size: int | str | None = "5GB",
        names: NewNames | None = None,
        **options: Unpack[WriteOptions],
    ) -> WriteResult:
        """Write the view as state dicts that `torch.load` reads, with tied names on the same storage.

        Parameters
        ----------
        dest
            A file that ends with ``.pt``, ``.pth``, ``.bin`` or ``.ckpt``, or a folder. A folder gets
            ``pytorch_model.bin`` or, above ``max_shard_size``, numbered shards and their index.
        dtype, max_shard_size, names, **options
            The same as for `to_safetensors`.

        Returns
        -------
        WriteResult
            The files.

        Raises
        ------
        LazyckptError
            What `to_safetensors` raises.
        """
        return export("torch", self, dest, options, dtype=dtype, max_shard_size=max_shard_size, names=names)

    @with_options
    def to_zarr(
        self,
        dest: str | os.PathLike[str],
        *,
        dtype: torch.dtype | None = None,
        states: Sequence[str] | None = None,
        codec: Any = None,
        chunk: int | str | None = None,
        shard: int | str | bool | None = None,
        pack: int | str | bool | None = None,
        storage_options: Mapping[str, Any] | None = None,
        **options: Unpack[WriteOptions],
    ) -> WriteResult:
        """Write the view as a Zarr v3 hierarchy: a group for each state, and in it groups by the dotted names.

        Parameters
        ----------
        dest
            A folder, a file that ends with ``.zip``, or a URL.
        dtype
            Convert the floating-point tensors of the view's state to this dtype, as `astype` does.
        states
            Names of the states to write. By default all states, or the view's own state if it is not the checkpoint's
            default.
        codec
            None, "zstd", "blosc" (byte-shuffled zstd), "gzip", any codec of numcodecs (instance or configuration), or a
            Zarr v3 codec as JSON: ``{"name": "zstd", "configuration": {"level": 9}}``.
        chunk
            Largest size of a chunk, in bytes or as text; by default "64MiB", and "4MiB" within shards. Chunks follow
            the fragments of the files where these form a grid.
        shard
            True, or the largest size of a shard in bytes or as text: store many chunks in one file ("512MiB").
        pack
            True, or a size in bytes or as text: store tensors of up to this size ("64KiB") together, those of a state
            and dtype in one 1-d array. For many thousands of small tensors, which would each take a folder and two
            files. Other programs than lazyckpt see the 1-d arrays, whose attributes list the names and shapes.
        storage_options
            Options of fsspec's file system for a URL.
        **options
            See `WriteOptions`; ``memory`` also bounds the chunks.

        Returns
        -------
        WriteResult
            The folder or zip file, which is published when it is complete.

        Raises
        ------
        DataError
            Zarr or the codec does not support a dtype, or ``memory`` is too small.
        DestinationError
            As for `to_safetensors`; also for a folder that holds anything else than an earlier result.
        LazyckptError
            What `to_safetensors` raises.
        """
        own = {"states": states, "codec": codec, "chunk": chunk, "shard": shard, "pack": pack}
        own["storage_options"] = storage_options
        return export("zarr", self if dtype is None else self.astype(dtype), dest, options, **own)

    @with_options
    def to_dcp(
        self, dest: str | os.PathLike[str], *, dtype: torch.dtype | None = None, **options: Unpack[WriteOptions]
    ) -> WriteResult:
        """Write the view as a checkpoint of torch.distributed.checkpoint (DCP).

        `dcp.load` reads it into a model and its optimizer on any number of ranks. `lazyckpt.export.dcp` describes the
        keys.

        Parameters
        ----------
        dest
            A folder.
        dtype
            Convert the floating-point tensors of the view's state to this dtype, as `astype` does.
        **options
            See `WriteOptions`.

        Returns
        -------
        WriteResult
            The folder. ``left_out`` has the parts of ``meta`` that are not written (objects whose class would have to
            be imported): dotted path -> reason.

        Raises
        ------
        LazyckptError
            What `to_safetensors` raises; DestinationError also for a folder that holds anything else.
        """
        return export("dcp", self if dtype is None else self.astype(dtype), dest, options)

    @with_options
    def to_universal(self, dest: str | os.PathLike[str], **options: Unpack[WriteOptions]) -> WriteResult:
        """Write the view as a DeepSpeed universal checkpoint.

        An engine with ``"checkpoint": {"load_universal": true}`` loads it by ``engine.load_checkpoint(dest)``, on any
        number of ranks and with any stage of ZeRO but 0. The names have to be those of the engine's module.
        `lazyckpt.export.universal` describes the files.

        Parameters
        ----------
        dest
            A folder.
        **options
            See `WriteOptions`.

        Returns
        -------
        WriteResult
            The folder. ``left_out`` has the parts of ``meta`` that are not written, and the states that are written but
            that engines of ZeRO-3 do not load: dotted path or state -> reason.

        Raises
        ------
        DataError
            The view's state is neither "weights" nor "fp32", or a name cannot be the name of a folder.
        LazyckptError
            What `to_dcp` raises.
        """
        return export("universal", self, dest, options)

    @with_options
    def to_megatron(
        self,
        dest: str | os.PathLike[str],
        *,
        tp: int = 1,
        pp: int = 1,
        ep: int = 1,
        dtype: torch.dtype | None = None,
        **options: Unpack[WriteOptions],
    ) -> WriteResult:
        """Write the view as a Megatron-LM checkpoint of rank files (``--ckpt-format torch``), which Megatron-LM loads.

        Names have to be megatron-core's: use ``view.rename("megatron")`` on other checkpoints.
        `lazyckpt.export.megatron` describes the files.

        Parameters
        ----------
        dest
            A folder. It gets ``iter_0000003/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt`` and
            ``latest_checkpointed_iteration.txt``.
        tp, pp, ep
            Tensor-, pipeline- and expert-parallel degrees. Each rank's files have the tensors that `shard` returns.
        dtype, **options
            The same as for `to_dcp`.

        Returns
        -------
        WriteResult
            The folder. ``left_out`` is the same as for `to_dcp`.

        Raises
        ------
        MeshError
            A degree does not divide the layers, heads, experts or tensors.
        DataError
            Names are not megatron-core's, or the view's state is neither "weights" nor "fp32".
        LazyckptError
            What `to_dcp` raises.
        """
        return export("megatron", self if dtype is None else self.astype(dtype), dest, options, tp=tp, pp=pp, ep=ep)

    def to_virtual(
        self,
        dest: str | os.PathLike[str] | Any,
        *,
        format: str | None = None,
        bits: bool = False,
        overwrite: bool = False,
    ) -> WriteResult:
        """Write a Zarr hierarchy of references to the bytes of the checkpoint's files, without a copy.

        Any reader of Zarr opens it through fsspec's "reference" file system, without lazyckpt or torch. The layout is
        that of `to_zarr`. The files have to stay where they are.

        Parameters
        ----------
        dest
            A file that ends with ``.json``; or a folder, for parquet (needs kerchunk, pandas and pyarrow); or the store
            of a writable Icechunk session, which the caller commits.
        format
            "json", "parquet", or "icechunk" for a new Icechunk repository in the folder ``dest``. By default the type
            of ``dest`` decides.
        bits
            Show bfloat16 and 8-bit floats as unsigned integers of the same bits, for readers that lack these dtypes.
        overwrite
            Replace existing references.

        Returns
        -------
        WriteResult
            The references. ``left_out`` has the tensors that references cannot express (a span that ends within a row,
            packed or byte-swapped elements, a missing file): path in the hierarchy -> reason. The attributes of the
            root list them, too.

        Raises
        ------
        FormatError
            A package is not installed.
        MissingFileError, ChangedFileError
            A file does not exist, or is not the one that was opened.
        LazyckptError
            What `to_zarr` raises.
        """
        return export("virtual", self, dest, {"overwrite": overwrite}, format=format, bits=bits)

    def to_xarray(self, *, chunks: Mapping[str, Any] | None = None, widen: bool = True) -> xr.DataTree:
        """Return the view as an `xarray.DataTree`. Reads nothing; indexing a variable reads the indexed elements.

        Groups are the dotted names and variables the tensors. Dimensions are named by their size ("d4096").

        Parameters
        ----------
        chunks
            None for xarray's own lazy arrays, ``{}`` for Dask arrays in chunks of 8 to 64 MiB that follow the fragments
            where these form a grid, ``{"d4096": 512}`` for other chunks along a dimension.
        widen
            Convert floats of 8 and 16 bits to float32 when they are read, so that xarray computes correctly; the
            attribute ``stored_dtype`` has the stored dtype. False keeps dtypes and bits: sums in bf16, fp8 and fp16 are
            wrong, so convert with `lazyckpt.interop.xarray.to_f32` before any reduction.

        Returns
        -------
        xarray.DataTree
            Tensors whose dtype numpy lacks are left out and listed in ``attrs["left_out"]``.

        Raises
        ------
        DataError
            ``chunks`` is given and dask is not installed.
        TypeError
            ``chunks`` is neither None nor a mapping.
        """
        from .interop.xarray import tree

        return tree(self, chunks, widen=widen)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the description of the view, of a part only that of its tensors: never elements."""
        about = self._store, of_part(self), self._state, self._pickled_steps(), self._of_all
        data = packed(about)
        return (_restore, about) if data is None else (_unpacked, (data,))


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
    from .layouts.shard import unsharded

    shards = list(views)
    if any(view._steps for view in shards):
        raise DataError("these views are parts of shards: put the whole shards together, then take the part")
    index = unsharded([view._index for view in shards])
    return shards[0]._of(index)


def with_wrappers(path: str | os.PathLike[str], format: str, tag: str | None = None) -> CheckpointView:
    """Open a checkpoint under its writer's names, which include the modules that wrap the model."""
    store, index = opened(path, format, tag)
    return _restore(store, index, next(iter(index.states)), (), True)


def _restore(store: Store, index: Index, state: str, steps: tuple[Step, ...], of_all: bool = False) -> CheckpointView:
    view = object.__new__(CheckpointView)
    view._init(store, index, state, steps, of_all)
    return view


def _unpacked(data: bytes) -> CheckpointView:
    return _restore(*unpacked(data))
