"""A checkpoint as users have it: a namespace of lazy tensors, and the methods that read, write, convert and show it."""

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
from .formats.shared.wrappers import without_wrappers
from .io.storage.base import Store
from .namespace import Namespace, Step
from .reshaping import of_rank, with_dtype, with_names
from .show.notebook import States
from .show.text import explain, frame_of, summary, tree
from .tensor import LazyTensor

if TYPE_CHECKING:
    import torch
    import xarray as xr

    from .export.files import NewNames
    from .export.options import WriteOptions, WriteResult
    from .inspect.table import Table
    from .show.plot import ViewPlots
else:
    from .deferred import torch


class CheckpointView(Namespace[LazyTensor]):
    """A checkpoint, or a part of it, as a mapping from dotted names to lazy tensors. Opening reads no tensor data.

    ``path``: a file or a folder, or the URL of one. ``format``: the reader to use (by default the first that recognises
    the path). ``tag``: which of several checkpoints in the folder (by default what ``latest`` names, or the newest
    complete one). ``rules``: glob of a name -> how the shards of tensor-parallel ranks form the whole, where the
    checkpoint does not tell: "column" (cut along dimension 0), "row" (along 1), "replicated", "average", "swiglu", or a
    table such as {"cat": 0, "parts": [4096, 1024, 1024]}; of FSDP1's flat parameters {"flat": {"up.weight": [64, 32]}}.
    ``cache``: keep what opening found out for the next time this process opens the same, unchanged files.
    ``storage_options``: what fsspec's file system of a URL takes (credentials, endpoints).

    Raises MissingFileError, FormatError (no reader, or a layout that is refused by name), CorruptError.
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
        self._init(store, without_wrappers(index), next(iter(index.states)), (), True)

    def _of(self, index: Index, steps: tuple[Step, ...] = ()) -> CheckpointView:
        # one rank's part of a checkpoint does not answer with what lies on the others
        return _restore(self._store, index, self._state, steps, self._of_all and index.layout is None)

    # -- showing

    def tree(self, depth: int | None = None) -> str:
        """Names, shapes, dtypes, sizes and parameter counts as an indented tree. Reads no tensor data."""
        return tree(self, depth)

    def explain(self) -> str:
        """What the checkpoint is made of, and what it would cost to read this view. Reads no tensor data."""
        return explain(self)

    def to_frame(self) -> Any:
        """Return a data frame with a row for each name. Reads no tensor data.

        Returns
        -------
        pandas.DataFrame or polars.DataFrame
            pandas' if pandas is installed. Columns: ``name`` (in the whole checkpoint), ``dtype``, ``shape``,
            ``numel``, ``nbytes`` (bytes of the elements), ``tied`` (the name of the tensor that it is tied to, or
            None).

        Raises
        ------
        DataError
            Neither pandas nor polars is installed.
        """
        return frame_of(self)

    def __repr__(self) -> str:
        return f"{summary(self)}\n{tree(self, None, limit=40, fold=True)}"

    def _repr_html_(self) -> str:
        """For Jupyter: a tree that opens and closes. Reads no tensor data."""
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
            Where to; a dtype in its place (``view.to(torch.float32)``) is ``dtype``, on the CPU.
        dtype
            Convert floating-point and complex tensors to it, as `torch.nn.Module.to` does.
        copy
            False: on the CPU, a tensor that is one contiguous run of a file stays mapped instead of being read. The
            mapping is private: writing to the tensor changes memory only, but truncating the file breaks it.

        Returns
        -------
        dict of str to torch.Tensor
            By name; tied names have the same tensor.

        Raises
        ------
        LazyckptError
            What reading a `LazyTensor` raises.
        """
        from .loading import read_all

        place, dtype = ("cpu", device) if isinstance(device, torch.dtype) else (device, dtype)
        owners = {name: self.owner(name) for name in self._listed}
        done = read_all({owner: self[name] for name, owner in owners.items()}, torch.device(place), dtype, copy)
        return {name: done[owner] for name, owner in owners.items()}

    def state_dict(
        self, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
    ) -> dict[str, torch.Tensor]:
        """Read all tensors of the view, for `torch.nn.Module.load_state_dict`: the same as `to`."""
        return self.to(device, dtype)

    def load_into(self, module: torch.nn.Module, strict: bool = True) -> Any:
        """Fill an nn.Module's parameters and buffers, wherever they live and in their dtype, without a second copy.

        Of DTensors (FSDP2, tensor parallelism) each rank reads what it holds of them, and no more; nothing is
        communicated. Parameters on the meta device get memory: on the CPU, DTensors on their mesh's devices. Names,
        shapes, and files missing that this rank needs, are checked before anything is written. Returns (missing_keys,
        unexpected_keys) as `load_state_dict` does. Raises DataError if ``strict`` and the names differ, or if a shape
        differs.
        """
        from .loading import load_into

        return load_into(self, module, strict)

    # -- looking at its elements

    def stats(
        self,
        *,
        bins: int | Sequence[float] | None = None,
        executor: Executor | None = None,
        memory: int | str | None = None,
        progress: bool | None = None,
    ) -> Table:
        """Statistics of every tensor, tied ones once, as a table: a row each, in order (`LazyTensor.stats` tells of
        what), and ``table.total``. ``pandas.DataFrame(view.stats())`` and ``polars.DataFrame(view.stats())`` have its
        columns; ``view.select("*.norm.weight").stats()`` is of a part.

        Everything is read once, in pieces, on several threads, in bounded memory. A tensor that cannot be read (the
        file of a rank is lost) has a row whose ``error`` says why. ``bins``: of every tensor a histogram of its own
        range, or with these edges, for all. ``executor``, ``memory``, ``progress``: as for `to_safetensors`.

        Raises DataError for bins that are none, WorkerError (workers died).
        """
        from .inspect.stats import stats_of_all

        return stats_of_all(self.once()[0], bins, executor, memory, progress)

    @property
    def plot(self) -> ViewPlots:
        """Plots, with matplotlib: ``view.plot.norms()``, ``view.plot.hist(name)``, ``view.plot.layout(name)``,
        ``view.plot.singular_values(name)``."""
        from .show.plot import ViewPlots

        return ViewPlots(self)

    # -- the same tensors otherwise: under other names, in another dtype, cut for other ranks

    def rename(self, names: str | Mapping[str, Any], *, reverse: bool = False) -> CheckpointView:
        """The same tensors under other names, lazily; those that the other side has in pieces (q, k and v; gate and up)
        are cut or joined by placement, nothing is copied.

        ``names``: "hf" for Hugging Face's names of a model in megatron-core's, "megatron" for the way back, one of
        the tables of `lazyckpt.formats.renaming` ("llama", "mixtral", "qwen_moe", "gpt2", "gpt_neox", "nemotron"), or
        one of your own:
        {"decoder.layers.{l}.mlp.linear_fc2.{p}": "model.layers.{l}.mlp.down_proj.{p}", ...}, as tables.toml there
        explains; {"extends": "llama", ...} adds to one. ``reverse`` reads the table from right to left.

        What no line is about, or cannot be cut, keeps its name, with a line in ``problems``. Raises FormatError (no
        such table, or a line that cannot be), DataError (of a part of a checkpoint below a prefix: rename first).
        """
        return self._of(with_names(self, names, reverse))

    def astype(self, dtype: torch.dtype) -> CheckpointView:
        """The same view with the floating-point tensors that it reads converted to ``dtype`` when they are read.
        Integers, bools and complex numbers stay what they are, and so do the other states: of a training checkpoint the
        weights are converted, masters and moments are not.

        Raises DataError for a dtype that is no floating-point one, or that torch cannot convert a tensor to.
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
        """What one rank of another parallel layout has, in all states, lazily: blocks of the tensors, by the merge
        rules run backwards. Nothing is read; a slice of a shard reads its own bytes.

        ``tp`` cuts tensors (gate and up each; whole groups of heads), the rows of a vocabulary padded with zeros where
        they do not divide. ``pp`` deals layers to stages: Megatron's names count them from 0 on each, others keep
        their numbers. ``ep`` deals experts. ``dp`` above 1: of each tensor the rank's flat partition, as ZeRO-3 keeps
        weights and moments; shape (ceil(n / dp),). ``rank``: a global number (tp fastest, then ep, dp, pp), (tp, pp,
        dp, ep), or {"tp": 1, ...}. ``rules``: as of `lazyckpt.open`, for tensors that nothing else tells of.

        A shard of a shard is that of the degrees multiplied; `lazyckpt.unshard` puts the shards of all ranks together.
        Raises MeshError (a degree that does not divide), FormatError (a tensor that no rule is known of, or rules that
        are not understood), SelectionError (no such rank), DataError (of a part below a prefix).
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
        """Write the view as safetensors, in bounded memory. A tied tensor is stored once; its other names are in the
        header's metadata. `lazyckpt.recipes` adds what transformers needs beside the tensors.

        Parameters
        ----------
        dest
            A file that ends with ``.safetensors``, or a folder. A folder gets ``model.safetensors`` or, above
            ``max_shard_size``, numbered shards and their index, as Hugging Face names them.
        dtype
            Convert floating-point tensors to it.
        max_shard_size
            Bytes, or text such as "5GB"; None for one file.
        names
            Other names: {old: new}, or a function of the name. None as a new name leaves the tensor out.
        **options
            ``overwrite``, ``resume``, ``verify``, ``progress``, ``executor``, ``memory``: see `WriteOptions`.

        Returns
        -------
        WriteResult
            The files. They appear when all are complete; after an interrupted call the same call continues, also within
            a file, with what is kept in a hidden folder beside ``dest``.

        Raises
        ------
        DestinationError
            Something is there already and not ``overwrite``; no room; no right to write.
        DataError
            A dtype that the format lacks, or one name for two tensors.
        TensorNotFoundError
            ``names`` has a name that is not in the view.
        WorkerError, CorruptError, ChangedFileError
            Workers died; ``verify`` found what differs; a source was written to meanwhile.
        LazyckptError
            What reading raises; for a missing file before anything is written.
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

        Parameters, result and errors are those of `to_safetensors`. ``dest`` is a file that ends with .pt, .pth, .bin
        or .ckpt, or a folder, which gets ``pytorch_model.bin`` or numbered shards and their index.
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
        storage_options: Mapping[str, Any] | None = None,
        **options: Unpack[WriteOptions],
    ) -> WriteResult:
        """Write the view as a Zarr v3 hierarchy: a group for each state, below it groups by the dotted names.

        Parameters
        ----------
        dest, storage_options
            A folder, a file that ends with ``.zip``, or a URL with the options of fsspec's file system for it.
        dtype
            Convert floating-point tensors that the view reads, as `astype` does.
        states
            By default all, of which the same part is written, or the one that this view reads if that is not the
            checkpoint's default.
        codec
            None, "zstd", "blosc" (byte-shuffled zstd), "gzip", any codec of numcodecs (instance or configuration), or a
            Zarr v3 codec as JSON: ``{"name": "zstd", "configuration": {"level": 9}}``.
        chunk, shard
            Bytes of a chunk at most: by default "64MiB", in shards "4MiB". Chunks follow the files' own pieces where
            these form a grid. ``shard``: True, or bytes: put chunks together in files of at most so much ("512MiB").
        **options
            See `WriteOptions`; ``memory`` also bounds the chunks.

        Returns
        -------
        WriteResult
            The folder or zip file, which appears when it is complete.

        Raises
        ------
        DataError
            A dtype that Zarr or the codec does not take, or too little ``memory``.
        LazyckptError
            What `to_safetensors` raises; DestinationError also for a folder that holds anything else.
        """
        own = {"states": states, "codec": codec, "chunk": chunk, "shard": shard, "storage_options": storage_options}
        return export("zarr", self if dtype is None else self.astype(dtype), dest, options, **own)

    @with_options
    def to_dcp(
        self, dest: str | os.PathLike[str], *, dtype: torch.dtype | None = None, **options: Unpack[WriteOptions]
    ) -> WriteResult:
        """Write the view as a folder of torch.distributed.checkpoint, which `dcp.load` reads into a model on any number
        of ranks, with its optimizer. `lazyckpt.export.dcp` says which keys it has.

        Parameters, files and errors are those of `to_zarr`. ``left_out`` of the result has what of ``meta`` is not
        written: dotted path -> reason (objects of classes that would have to be imported).
        """
        return export("dcp", self if dtype is None else self.astype(dtype), dest, options)

    @with_options
    def to_universal(self, dest: str | os.PathLike[str], **options: Unpack[WriteOptions]) -> WriteResult:
        """Write the view as a DeepSpeed universal checkpoint, which an engine with ``"checkpoint": {"load_universal":
        true}`` loads on any number of ranks, with any stage of ZeRO but 0: ``engine.load_checkpoint(dest)``. Names have
        to be the engine's. `lazyckpt.export.universal` says what is in it.

        Options, files and errors are those of `to_dcp`. ``left_out`` of the result has dotted path -> reason, and the
        states that are written, but that engines of ZeRO-3 do not load. Raises DataError also for a view of another
        state than "weights" or "fp32", and for a name that no folder can have.
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
        """Write the view as Megatron-LM's checkpoint of rank files (``--ckpt-format torch``), which its own loader
        takes. Names have to be megatron-core's: other checkpoints' after ``view.rename("megatron")``.
        `lazyckpt.export.megatron` says what the files have.

        Parameters
        ----------
        dest
            A folder, which gets ``iter_0000003/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt`` and
            ``latest_checkpointed_iteration.txt``.
        tp, pp, ep
            Tensor-, pipeline- and expert-parallel degrees. A rank gets what `shard` gives it.
        dtype, **options
            As for `to_dcp`, and so is the result.

        Raises
        ------
        MeshError
            Degrees that do not divide the layers, heads, experts or tensors.
        LazyckptError
            What `to_dcp` raises; DataError also for names that are not megatron-core's, and for a view of another state
            than "weights" or "fp32".
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
        """Write references to the bytes of the checkpoint's files, as a zarr hierarchy that copies none of them: any
        reader of zarr opens it, through fsspec's "reference" file system, without lazyckpt or torch. The layout is
        that of `to_zarr`; the files have to stay where they are.

        Parameters
        ----------
        dest
            A file that ends with .json, or a folder, which gets parquet (needs kerchunk, pandas and pyarrow).
        format
            "json", "parquet", or "icechunk": a new Icechunk repository in that folder; ``dest`` may also be the store
            of a writable Icechunk session, which the caller commits.
        bits
            Show bfloat16 and 8-bit floats as unsigned integers of the same bits, for readers that lack these dtypes.
        overwrite
            Replace references that are there.

        Returns
        -------
        WriteResult
            ``left_out`` has path in the hierarchy -> why references cannot express the tensor: a span that ends within
            a row, packed or swapped bytes, a missing file. The root's attributes list it, too.

        Raises
        ------
        FormatError
            A package is missing.
        MissingFileError, ChangedFileError
            A file is not what it was when it was opened.
        LazyckptError
            What `to_zarr` raises.
        """
        return export("virtual", self, dest, {"overwrite": overwrite}, format=format, bits=bits)

    def to_xarray(self, *, chunks: Mapping[str, Any] | None = None, widen: bool = True) -> xr.DataTree:
        """The view as an `xarray.DataTree`: groups are the dotted names, variables the tensors, dimensions are named by
        their size ("d4096"). Reads nothing; a variable reads what is indexed of it.

        ``chunks``: None for xarray's own lazy arrays; {} for Dask arrays, in chunks of 8 to 64 MiB that follow the
        fragments where these form a grid; {"d4096": 512} for other chunks along a dimension. ``widen``: floats of 8
        and 16 bits become float32 when they are read, which xarray computes with correctly (the attribute
        ``stored_dtype`` names their own). False keeps dtypes and bits; reduce what
        `lazyckpt.interop.xarray.to_f32` makes of them, as sums in bf16, fp8 and fp16 are wrong.

        Tensors whose dtype numpy lacks are left out, and named in ``attrs["left_out"]``. Raises DataError for
        ``chunks`` where dask is not installed, TypeError for ``chunks`` that are neither None nor a mapping.
        """
        from .interop.xarray import tree

        return tree(self, chunks, widen=widen)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self._store, self._index, self._state, self._pickled_steps(), self._of_all)


def unshard(views: Iterable[CheckpointView]) -> CheckpointView:
    """The view that `CheckpointView.shard` cut, from the shards of all its ranks, in any order: all states, lazily.

    Raises MeshError if they are not of one checkpoint on one mesh, or a rank is missing; DataError for parts of shards.
    """
    from .layouts.shard import unsharded

    shards = list(views)
    if any(view._steps for view in shards):
        raise DataError("these views are parts of shards: put the whole shards together, then take the part")
    index = unsharded([view._index for view in shards])
    return shards[0]._of(index)


def with_wrappers(path: str | os.PathLike[str], format: str, tag: str | None = None) -> CheckpointView:
    """A checkpoint under the names that its writer gives, with those of the modules that wrap the model."""
    store, index = opened(path, format, tag)
    return _restore(store, index, next(iter(index.states)), (), True)


def _restore(store: Store, index: Index, state: str, steps: tuple[Step, ...], of_all: bool = False) -> CheckpointView:
    view = object.__new__(CheckpointView)
    view._init(store, index, state, steps, of_all)
    return view
