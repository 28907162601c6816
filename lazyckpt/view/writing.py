"""The methods of a view that write it in other formats. Their ``options`` are those of `WriteOptions`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from ..export.options import with_options
from ..export.registry import export
from .derived import Derivable, View

if TYPE_CHECKING:
    import torch
    import xarray as xr

    from ..export.files import NewNames
    from ..export.options import WriteOptions, WriteResult


class Writable(Derivable[View]):
    """A view with the methods that write it."""

    __slots__ = ()

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
            A file that ends with ``.safetensors``, or a folder; a path, or a URL such as ``s3://bucket/folder``, which
            is written to without a local copy. A folder gets ``model.safetensors`` or, above
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
            The files; no paths for a URL. They are published when all are complete. After an interruption the same call
            resumes, also within a file, from a hidden folder beside ``dest``, or from what a bucket has.

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
            be imported), and "optim.state" where the states of the optimizer have names that no tensor of the model
            has (as in the source): dotted path -> reason.

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
        etp: int | None = None,
        vpp: int = 1,
        layout: str | Sequence[int] | None = None,
        vocab_multiple: int | None = None,
        ckpt_format: str = "torch",
        distributed_optimizer: bool | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[WriteOptions],
    ) -> WriteResult:
        """Write the view as a checkpoint that Megatron-LM loads: rank files, or a distributed checkpoint.

        Names have to be megatron-core's: use ``view.rename("megatron")`` on other checkpoints.
        `lazyckpt.export.megatron`, `lazyckpt.export.megatron_dist` and `lazyckpt.export.megatron_fsdp` describe the
        files.

        Parameters
        ----------
        dest
            A folder. It gets ``latest_checkpointed_iteration.txt`` and ``iter_0000003/``, with
            ``mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt`` or the files of a distributed checkpoint.
        tp, pp, ep
            Tensor-, pipeline- and expert-parallel degrees. Each rank's files have the tensors that `shard` returns.
        etp, vpp, layout
            The same as for `shard`: the expert-tensor-parallel degree, model chunks of each stage, and how many layers
            each has. In rank files ``etp`` has to divide ``tp``.
        vocab_multiple
            ``--make-vocab-size-divisible-by``: the rows of the vocabulary are padded with zeros to a multiple of it
            times ``tp``. By default that of the source's arguments, else 1.
        ckpt_format
            As in Megatron-LM: "torch" writes a file for each rank, "torch_dist" a distributed checkpoint, which any
            layout loads, "fsdp_dtensor" one for runs with ``--use-megatron-fsdp``. In the last two the degrees are
            those in ``args``, ``tp`` says how a vocabulary is padded, and ``ep`` above 1 that a run that loads
            "torch_dist" has an optimizer for experts.
        distributed_optimizer
            Whether the run that loads a distributed checkpoint has ``--use-distributed-optimizer``. By default what the
            source's arguments say, else False.
        dtype, **options
            The same as for `to_dcp`.

        Returns
        -------
        WriteResult
            The folder. ``left_out`` is the same as for `to_dcp`.

        Raises
        ------
        MeshError
            A degree does not divide the layers, heads, experts or tensors, or the layout does not fit the layers.
        DataError
            Names are not megatron-core's, or the view's state is neither "weights" nor "fp32".
        LazyckptError
            What `to_dcp` raises.
        """
        return export(
            "megatron",
            self if dtype is None else self.astype(dtype),
            dest,
            options,
            tp=tp,
            pp=pp,
            ep=ep,
            etp=etp,
            vpp=vpp,
            layout=layout,
            vocab_multiple=vocab_multiple,
            ckpt_format=ckpt_format,
            distributed_optimizer=distributed_optimizer,
        )

    @with_options
    def to_gguf(
        self,
        dest: str | os.PathLike[str],
        *,
        dtype: str = "f16",
        config: str | os.PathLike[str] | None = None,
        **options: Unpack[WriteOptions],
    ) -> WriteResult:
        """Write the view as a GGUF file, which llama.cpp loads: models of the types llama, mistral, qwen2 and qwen3.

        Names have to be Hugging Face's. Matrices are converted or quantized in blocks, in bounded memory; vectors are
        float32. The metadata come from config.json, tokenizer.json, tokenizer.model and tokenizer_config.json.
        docs/formats/gguf.md describes the file.

        Parameters
        ----------
        dest
            A file that ends with ``.gguf``, or a folder, which gets ``model.gguf``; a path or a URL.
        dtype
            The type of the matrices: "f32", "f16", "bf16", "q8_0" or "q4_0". A matrix whose rows are no multiple of the
            32 elements of a block is float16.
        config
            The folder with config.json and the tokenizer; by default that of the checkpoint.
        **options
            See `WriteOptions`.

        Returns
        -------
        WriteResult
            The file. ``left_out`` has the buffers that the model computes itself, and "tokenizer" if there is none:
            llama.cpp then takes and returns numbers of tokens only.

        Raises
        ------
        DataError
            The model is of another type, a tensor has no name in GGUF or is quantized in another format, or the
            tokenizer is of a kind that to_gguf does not know.
        MissingFileError
            There is no config.json.
        LazyckptError
            What `to_safetensors` raises.
        """
        return export("gguf", self, dest, options, dtype=dtype, config=config)

    def to_virtual(
        self,
        dest: str | os.PathLike[str] | Any,
        *,
        format: str | None = None,
        bits: bool = False,
        overwrite: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> WriteResult:
        """Write a Zarr hierarchy of references to the bytes of the checkpoint's files, without a copy.

        Any reader of Zarr opens it through fsspec's "reference" file system, without lazyckpt or torch. The layout is
        that of `to_zarr`. The files have to stay where they are.

        Parameters
        ----------
        dest
            A file that ends with ``.json``, a path or a URL; or a folder, for parquet (needs kerchunk, pandas and
            pyarrow); or the store of a writable Icechunk session, which the caller commits.
        format
            "json", "parquet", or "icechunk" for a new Icechunk repository in the folder ``dest``. By default the type
            of ``dest`` decides.
        bits
            Show bfloat16 and 8-bit floats as unsigned integers of the same bits, for readers that lack these dtypes.
        overwrite
            Replace existing references.
        storage_options
            Credentials and other options for a ``dest`` that is a URL, as for `lazyckpt.open`.

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
        given: WriteOptions = {"overwrite": overwrite, "storage_options": storage_options}
        return export("virtual", self, dest, given, format=format, bits=bits)

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
        from ..interop.xarray import tree

        return tree(self, chunks, widen=widen)
