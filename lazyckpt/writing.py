"""The doors from a view to other formats: its `to_...` methods."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from .errors import MissingFileError
from .export.files import FileFormat, export
from .export.job import Run, runner
from .export.names import NewNames, under
from .export.safetensors import SAFETENSORS
from .export.torch import TORCH
from .formats.zarr.contents import Part, contents
from .show.text import plural
from .tensor import LazyTensor

if TYPE_CHECKING:
    import xarray as xr


class Writing(Mapping[str, LazyTensor]):
    """What a view can be written as. Nothing here changes the view or its checkpoint."""

    __slots__ = ("__weakref__",)

    @abstractmethod
    def owner(self, name: str) -> str:
        """The full name that owns the tensor of this name of the view."""

    @property
    @abstractmethod
    def unreadable(self) -> Mapping[str, str]:
        """Names that cannot even be described -> the reason."""

    @abstractmethod
    def full_name(self, name: str) -> str:
        """The name that a name of this view has in the whole checkpoint."""

    def to_safetensors(
        self,
        dest: str | os.PathLike[str],
        *,
        dtype: torch.dtype | None = None,
        max_shard_size: int | str | None = "5GB",
        names: NewNames | None = None,
        overwrite: bool = False,
        progress: bool | None = None,
        executor: Executor | None = None,
        memory: int | str | None = None,
        verify: bool = False,
    ) -> list[Path]:
        """Write the view as safetensors, in bounded memory (some 16 MiB a thread), and return the paths of the files.

        ``dest``: a folder, which gets ``model.safetensors`` or, above ``max_shard_size`` (bytes, or text such as
        "5GB"; None for one file), numbered shards and their index, as Hugging Face names them; or a file that ends
        with ``.safetensors``. A tied tensor is stored once; its other names stand in the header's metadata. ``dtype``
        converts floating-point tensors. ``names``: other names, as {old: new} or a function of the name; None for a new
        name leaves the tensor out. ``progress``: a bar; None for one on a terminal or in a notebook.

        Only tensors are written: what transformers wants beside them (config.json, a tokenizer) `lazyckpt.recipes`
        brings along.

        ``executor``: who does the work, any of concurrent.futures: threads of this process by default, processes, or a
        Dask cluster's ``client.get_executor()``; workers read the source and write the files themselves, so both have
        to be where they can reach them. ``memory``: bytes (or "2GB") that the work in flight may hold, 1 GiB by
        default. ``verify``: read everything again and compare it with the source before the files appear.

        The files appear when all are complete. If it is interrupted, the same call goes on where it was, also within a
        file: what is finished is kept in a hidden folder beside ``dest``. Raises DestinationError (something is there
        already and not ``overwrite``, no room, no right to write), DataError (a dtype that the format lacks, one name
        for two tensors), TensorNotFoundError (``names`` tells of one that is not there), WorkerError (workers died),
        CorruptError (``verify``: what was written differs), ChangedFileError (a source was written to meanwhile), and
        what reading raises.
        """
        return self._export(
            SAFETENSORS, dest, dtype, max_shard_size, names, overwrite, progress, runner(executor, memory), verify
        )

    def to_torch(
        self,
        dest: str | os.PathLike[str],
        *,
        dtype: torch.dtype | None = None,
        max_shard_size: int | str | None = "5GB",
        names: NewNames | None = None,
        overwrite: bool = False,
        progress: bool | None = None,
        executor: Executor | None = None,
        memory: int | str | None = None,
        verify: bool = False,
    ) -> list[Path]:
        """Write the view as state dicts that `torch.load` reads, tied names on the same storage; otherwise as
        `to_safetensors`. ``dest``: a file that ends with .pt, .pth, .bin or .ckpt, or a folder, which gets
        ``pytorch_model.bin`` or numbered shards and their index."""
        return self._export(
            TORCH, dest, dtype, max_shard_size, names, overwrite, progress, runner(executor, memory), verify
        )

    def to_zarr(
        self,
        dest: str | os.PathLike[str],
        *,
        states: Sequence[str] | None = None,
        codec: Any = None,
        chunk: int | str | None = None,
        shard: int | str | bool | None = None,
        memory: int | str | None = None,
        executor: Executor | None = None,
        overwrite: bool = False,
        verify: bool = False,
        progress: bool | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Write the view as a Zarr v3 hierarchy: a group for each state, below it groups by the dotted names; bfloat16
        and float8 under their own data types; names, tied names, mesh and ``meta`` as attributes.

        ``dest``: a folder; a file that ends with ``.zip``; or a URL of fsspec's (``storage_options`` are for it).
        ``states``: by default all, of which the same part is written, or the one that this view reads if that is not
        the checkpoint's default. ``codec``: None, "zstd", "blosc" (byte-shuffled zstd), "gzip", any codec of numcodecs
        (instance or configuration), or a Zarr v3 codec as JSON: {"name": "zstd", "configuration": {"level": 9}}.
        ``chunk``: bytes of a chunk at most, 64 MiB by default (4 MiB in shards); chunks follow the files' own pieces
        where these form a grid. ``shard``: True, or bytes: put chunks together in files of at most so much (512 MiB).
        Sizes are numbers of bytes or text such as "64MiB".

        ``memory``: bytes that the work in flight may hold, 1 GiB by default. ``executor``: who does it, as for
        `to_safetensors`. ``verify``: read everything again and compare it with the source before it appears.
        ``progress``: a bar; None for one on a terminal or in a notebook.

        A folder or zip file appears when it is complete; of an object store, the root's document is written last. If
        it is interrupted, the same call goes on with what is finished: that is kept in a hidden folder beside ``dest``
        (where a zip file needs its size twice while it is made), on an object store in place.

        Raises DestinationError (something is there already, and not ``overwrite`` or no Zarr hierarchy; no room, no
        right to write), DataError (a dtype that Zarr or the codec does not take, too little
        ``memory``), WorkerError (workers died), CorruptError (``verify``: what was written differs), and what reading
        raises; a missing file before anything is written.
        """
        from .export.zarr import export_zarr

        check_whole(self)
        export_zarr(
            contents(cast("Part[LazyTensor]", self), states),  # all that write are views
            dest,
            codec=codec,
            chunk=chunk,
            shard=shard,
            memory=memory,
            executor=executor,
            overwrite=overwrite,
            verify=verify,
            progress=progress,
            storage_options=storage_options,
        )

    def to_dcp(
        self,
        dest: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        progress: bool | None = None,
        executor: Executor | None = None,
        memory: int | str | None = None,
        verify: bool = False,
    ) -> dict[str, str]:
        """Write the view as a folder of torch.distributed.checkpoint, which `dcp.load` reads into a model on any number
        of ranks (FSDP2, tensor parallelism), with its optimizer: ``{"model": ..., "optim": ...}`` of torch's
        `get_state_dict`.

        What this view reads, "weights" or "fp32", becomes ``model.NAME``; the optimizer's states
        ``optim.state.NAME.STATE``, its options ``optim.param_groups.N.OPTION`` where the checkpoint tells of which
        parameters they are; "fp32" beside "weights" ``fp32.NAME``; ``meta`` as it stands there. A view of one of the
        optimizer's states brings that alone. Tied names are there both, on the same bytes. Tensors are cut in chunks of
        whole rows, of at most 32 MiB where a row is not larger; a count of steps that no tensor holds becomes
        ``optim.state.NAME.step``.

        Options are those of `to_safetensors`; as with `to_zarr`, the folder appears when it is complete, and the same
        call goes on with what an interrupted one finished. Returns what of ``meta`` is left out: dotted path -> reason
        (objects of classes that would have to be imported). Raises as `to_safetensors` does; DestinationError also for
        a folder that holds anything else.
        """
        from .export.dcp import View, export_dcp

        check_whole(self)
        return export_dcp(
            cast(View, self),
            dest,
            overwrite=overwrite,
            verify=verify,
            progress=progress,
            run=runner(executor, memory),
        )

    def to_universal(
        self,
        dest: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        progress: bool | None = None,
        executor: Executor | None = None,
        memory: int | str | None = None,
        verify: bool = False,
    ) -> dict[str, str]:
        """Write the view as a DeepSpeed universal checkpoint, which an engine with ``"checkpoint": {"load_universal":
        true}`` loads on any number of ranks, with any stage of ZeRO but 0: ``engine.load_checkpoint(dest)``. Of any
        checkpoint that lazyckpt reads; names stay as they are, and have to be the engine's.

        ``zero/NAME/`` has the parameter in float32 (fp32.pt) and the states of its shape, whatever the optimizer;
        step.pt; buffers and frozen parameters as fp32.pt alone. The model states, ``mp_rank_00_model_states.pt``, have
        what the engine goes on with: of a DeepSpeed checkpoint its counters, scheduler, client state and
        universal_checkpoint_info; of others, ``meta["step"]`` as ``global_steps`` and defaults (no scheduler: pass
        ``load_lr_scheduler_states=False`` if the engine has one). The optimizer's options come along where the
        checkpoint tells them, in the source's order of groups; else the engine keeps its own. Objects of DeepSpeed's
        own classes (the state of fp16's loss scaler) are left out.

        Options are those of `to_safetensors`; as with `to_zarr`, the folder appears when it is complete, and the same
        call goes on with what an interrupted one finished. Returns what is left out: dotted path -> reason; and the
        states that are written, but that engines of ZeRO-3 do not load: they take exp_avg and exp_avg_sq alone. Raises
        as `to_safetensors` does; DataError also for a view of another state than "weights" or "fp32", and for a name
        that no folder can have.
        """
        from .export.dcp import View
        from .export.universal import export_universal

        check_whole(self)
        return export_universal(
            cast(View, self),
            dest,
            overwrite=overwrite,
            verify=verify,
            progress=progress,
            run=runner(executor, memory),
        )

    def to_megatron(
        self,
        dest: str | os.PathLike[str],
        *,
        tp: int = 1,
        pp: int = 1,
        ep: int = 1,
        overwrite: bool = False,
        progress: bool | None = None,
        executor: Executor | None = None,
        memory: int | str | None = None,
        verify: bool = False,
    ) -> dict[str, str]:
        """Write the view as Megatron-LM's checkpoint of rank files (``--ckpt-format torch``), which its own loader
        takes with these tensor-, pipeline- and expert-parallel degrees: ``iter_0000003/mp_rank_TT[_PPP][_EEE]/
        model_optim_rng.pt`` and ``latest_checkpointed_iteration.txt``. Names have to be megatron-core's: other
        checkpoints' after ``view.rename("megatron")``. What a rank has is what `CheckpointView.shard` gives it:
        layers are dealt evenly, experts cut as all else is (expert-tensor-parallel degree = tp).

        The vocabulary is padded with zeros to a multiple of make_vocab_size_divisible_by * tp where the arguments of
        the source tell that, else of tp; rows of padding that fewer ranks lack go where the arguments tell them from
        tokens. The last of several stages has its copy of a tied embedding. ``args`` is the source's, with the degrees
        made right, or what names, shapes and a config.json tell. Weights of a view of fp32 copies get the dtype
        that the arguments name.

        The optimizer is written as Megatron has it without ``--use-distributed-optimizer``, if the view has Adam's or
        SGD's states of all parameters and, of weights of 16 bits, their fp32 copies: groups and options are the
        source's. Adam's count of steps stands where a source of Megatron's has it (with each parameter: torch's AdamW;
        in the groups: FusedAdam of Transformer Engine or apex), of other sources in the groups. Without a known
        iteration the checkpoint is a "release", of which Megatron loads the weights alone. States of generators are not
        written: load with ``--no-load-rng``.

        Experts stay in the form that they have names of: SequentialMLP (``local_experts.N``), TEGroupedMLP
        (``linear_fc1.weightN``), GroupedMLP (``weight1``). So do norms: models of Transformer Engine's layers call
        theirs ``linear_qkv.layer_norm_weight`` and ``mlp.linear_fc1.layer_norm_weight`` (``view.rename`` with a table
        of your own), those of ``--transformer-impl local`` ``input_layernorm.weight`` and ``pre_mlp_layernorm.weight``.

        Options are those of `to_safetensors`; as with `to_zarr`, the folder appears when it is complete, and the same
        call goes on with what an interrupted one finished. Returns what is left out: dotted path -> reason. Raises as
        `to_safetensors` does; DataError also for names that are not megatron-core's and for a view of another state
        than "weights" or "fp32", MeshError for degrees that do not divide the layers, heads, experts or tensors.
        """
        from .export.dcp import View
        from .export.megatron import export_megatron

        check_whole(self)
        return export_megatron(
            cast(View, self),
            dest,
            tp=tp,
            pp=pp,
            ep=ep,
            overwrite=overwrite,
            verify=verify,
            progress=progress,
            run=runner(executor, memory),
        )

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
        from .interop.xarray import View, tree

        return tree(cast(View, self), chunks, widen=widen)

    def to_virtual(
        self, dest: str | os.PathLike[str] | Any, *, format: str | None = None, bits: bool = False
    ) -> dict[str, str]:
        """Write references to the bytes of the checkpoint's files, as a zarr hierarchy that copies none of them: any
        reader of zarr opens it, through fsspec's "reference" file system, without lazyckpt or torch. The layout is
        that of `to_zarr`; the files have to stay where they are.

        ``dest``: a file that ends with .json, or a folder, which gets parquet (kerchunk, pandas and pyarrow have to be
        installed). ``format``: "json", "parquet", or "icechunk": a new Icechunk repository in that folder; ``dest``
        may also be the store of a writable Icechunk session, which the caller commits. ``bits``: bfloat16 and 8-bit
        floats appear as unsigned integers of the same bits, their attributes say what they are: for readers that do
        not have these dtypes, as zarr-python by itself has not.

        A tensor can be told as references if its fragments form a grid of plain runs of bytes. Returns what is left
        out: path in the hierarchy -> reason (a span that ends within a row, packed or swapped bytes, a missing file);
        the root's attributes list it, too. Raises DestinationError, FormatError (a package is missing), DataError, and
        MissingFileError or ChangedFileError if a file is not what it was when it was opened.
        """
        from .export.virtual import to_virtual

        return to_virtual(cast("Part[LazyTensor]", self), dest, format, bits)  # all that write are views

    def once(self) -> tuple[dict[str, LazyTensor], dict[str, str]]:
        """What there is to write: (name of this view -> tensor, each tied one once, under the name that owns it if
        that is in the view; further name -> the name it is tied to)."""
        names: dict[str, str] = {}  # the name that owns a tensor -> the one it is written under
        for name in self:
            owner = self.owner(name)
            if owner == self.full_name(name) or owner not in names:
                names[owner] = name
        aliases = {name: kept for name in self if (kept := names[self.owner(name)]) != name}
        return {name: self[name] for name in names.values()}, aliases

    def _export(
        self,
        form: FileFormat,
        dest: str | os.PathLike[str],
        dtype: torch.dtype | None,
        max_shard_size: int | str | None,
        names: NewNames | None,
        overwrite: bool,
        progress: bool | None,
        run: Run,
        verify: bool,
    ) -> list[Path]:
        check_whole(self)
        tensors, aliases = under(names, *self.once())
        return export(
            form,
            tensors,
            aliases,
            dest,
            dtype=dtype,
            max_shard_size=max_shard_size,
            overwrite=overwrite,
            progress=progress,
            run=run,
            verify=verify,
        )


def check_whole(view: Writing) -> None:
    """Raises MissingFileError for a view that lacks tensors of which nothing is known but the name."""
    for name, why in view.unreadable.items():
        raise MissingFileError(
            f"{plural(len(view.unreadable), 'tensor')} would be missing in what is written: {name}: {why}. Without "
            f"{'it' if len(view.unreadable) == 1 else 'them'}: view.select(lambda name: name not in view.unreadable)"
        )
