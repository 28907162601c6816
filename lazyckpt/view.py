"""A checkpoint as users have it: a namespace of lazy tensors, and the methods that read, write, convert and show it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from .core.dtypes import dtype_of
from .core.index import Index, TensorSpec, converted, renamed
from .core.names import matcher
from .core.units import plural
from .errors import DataError, MissingFileError, TensorNotFoundError
from .formats.opening import opened
from .formats.zarr.documents import contents
from .io.storage.base import Store
from .jobs.executor import Run, runner
from .layouts.ranks import mesh_of
from .namespace import STORED, Namespace, Step
from .show.notebook import States
from .show.text import COLUMNS, explain, rows_of, summary, tree
from .tensor import LazyTensor

if TYPE_CHECKING:
    import torch
    import xarray as xr

    from .export.files import FileFormat
    from .export.names import NewNames
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
        self._init(store, index, next(iter(index.states)), (), True)

    def _of(self, index: Index, steps: tuple[Step, ...] = ()) -> CheckpointView:
        # one rank's part of a checkpoint does not answer with what lies on the others
        return _restore(self._store, index, self._state, steps, self._of_all and index.layout is None)

    # -- the namespace, typed

    def tensor(self, name: str) -> LazyTensor:
        """Return the tensor that ``view[name]`` gives.

        Parameters
        ----------
        name
            A full name, a tied name, or a path that occurs at one place inside the names.

        Raises
        ------
        TensorNotFoundError
            There is none, or the name is a prefix.
        MissingFileError
            The tensor's file does not exist.
        """
        found = self[name]
        if not isinstance(found, LazyTensor):
            raise TensorNotFoundError(
                f"{name!r} is a prefix of {len(found):,} names, no tensor: view.prefix gives them"
            )
        return found

    def prefix(self, path: str) -> CheckpointView:
        """Return the part of the view that ``view[path]`` gives, with names relative to it.

        Parameters
        ----------
        path
            A prefix of names, or a path that occurs at one place inside them.

        Raises
        ------
        TensorNotFoundError
            There is no such prefix, or the path is a tensor's name.
        """
        found = self[path]
        if not isinstance(found, CheckpointView):
            raise TensorNotFoundError(f"{path!r} is a tensor: view.tensor gives it")
        return found

    def search(self, text: str) -> CheckpointView:
        """Return the tensors whose names have all words of a text in them, whatever their case.

        Parameters
        ----------
        text
            Words separated by spaces. One with ``*``, ``?`` or ``[`` is a glob of the whole name. An empty text gives
            all tensors.

        Returns
        -------
        CheckpointView
            The tensors under their names in this view; empty if none matches.
        """
        words = text.casefold().split()
        tests = [matcher(word) if set(word) & set("*?[") else partial(_holds, word) for word in words]
        return self.select(lambda name: all(test(name.casefold()) for test in tests))

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
        table = rows_of(self)
        columns = {key: [row[key] for row in table] for key in COLUMNS}
        for package in ("pandas", "polars"):
            try:
                return import_module(package).DataFrame(columns)
            except ModuleNotFoundError as e:
                if e.name != package:
                    raise
        raise DataError("to_frame needs pandas or polars: pip install pandas")

    def __repr__(self) -> str:
        return f"{summary(self)}\n{tree(self, None, limit=40, fold=True)}"

    def _repr_html_(self) -> str:
        """For Jupyter: a tree that opens and closes. Reads no tensor data."""
        from .show.html import view_html

        return view_html(self)

    # -- reading

    def to(
        self,
        device: str | torch.device | torch.dtype = "cpu",
        dtype: torch.dtype | None = None,
        copy: bool = True,
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
        from .layouts.rename.apply import renamed_index

        index, shown = self._shown("rename")
        return self._of(renamed_index(index, shown, names, reverse))

    def astype(self, dtype: torch.dtype) -> CheckpointView:
        """The same view with the floating-point tensors that it reads converted to ``dtype`` when they are read.
        Integers, bools and complex numbers stay what they are, and so do the other states: of a training checkpoint the
        weights are converted, masters and moments are not.

        Raises DataError for a dtype that is no floating-point one, or that torch cannot convert a tensor to.
        """
        wanted = dtype_of(dtype)
        if not wanted.is_floating_point:
            raise DataError(f"floating-point tensors are not converted to {dtype}: name a floating-point dtype")

        def of(index: Index) -> Index:
            if self._state == STORED:
                return replace(index, stored=converted(self.specs, wanted))
            layout = index.layout and replace(index.layout, source=of(index.layout.source))
            states = {**index.states, self._state: converted(index.states[self._state], wanted)}
            return replace(index, states=states, layout=layout)

        return self._of(of(self._index), self._steps)

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
        from .layouts.shard import sharded

        index, shown = self._shown("shard")
        return self._of(sharded(index, shown, mesh_of(tp, pp, dp, ep), rank, rules or {}, self.kept))

    def _shown(self, what: str) -> tuple[Index, dict[str, dict[str, TensorSpec]]]:
        """The index, and what this view shows of every state, by full names. The index ties no name that is not shown;
        of a tensor whose own name is not, the first tied one that is owns it."""
        if any(kind == "below" for kind, _ in self._steps):
            raise DataError(
                f"the names of this view are relative to a prefix: {what} the whole view, then take the part"
            )
        index, sides = self._index, self.states
        shown = {
            state: {name: side.specs[name] for name in side._listed if name in side.specs}
            for state, side in sides.items()
        }
        if not self._steps:
            return index, shown
        listed = {name for side in sides.values() for name in side._listed}
        aliases: dict[str, str] = {}
        heirs: dict[str, str] = {}
        for alias, owner in index.aliases.items():
            if alias in listed:
                new = owner if owner in listed else heirs.setdefault(owner, alias)
                aliases |= {alias: new} if new != alias else {}
        if heirs and index.layout is not None:
            owner, alias = next(iter(heirs.items()))
            raise DataError(f"{alias!r} is a tied name of {owner!r} in this shard: select that to {what} it")
        states = dict(index.states)
        for state, side in sides.items():
            own = {o: heir for o, heir in heirs.items() if heir in side._listed and o in side.specs}
            added = {heir: renamed(side.specs[owner], heir) for owner, heir in own.items()}
            states[state] = {**states[state], **added}
            shown[state] |= added
        return replace(index, states=states, aliases=aliases), shown

    # -- writing

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
        from .export.safetensors import SAFETENSORS

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
        from .export.torch import TORCH

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
            contents(self, states),
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
        from .export.dcp import export_dcp

        check_whole(self)
        return export_dcp(
            self,
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
        from .export.universal import export_universal

        check_whole(self)
        return export_universal(
            self,
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
        from .export.megatron import export_megatron

        check_whole(self)
        return export_megatron(
            self,
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
        from .interop.xarray import tree

        return tree(self, chunks, widen=widen)

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

        return to_virtual(self, dest, format, bits)

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
        from .export.files import export
        from .export.names import under

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

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self._store, self._index, self._state, self._pickled_steps(), self._of_all)


def _holds(word: str, name: str) -> bool:
    return word in name


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


def check_whole(view: Namespace[Any]) -> None:
    """Raises MissingFileError for a view that lacks tensors of which nothing is known but the name."""
    for name, why in view.unreadable.items():
        raise MissingFileError(
            f"{plural(len(view.unreadable), 'tensor')} would be missing in what is written: {name}: {why}. Without "
            f"{'it' if len(view.unreadable) == 1 else 'them'}: view.select(lambda name: name not in view.unreadable)"
        )


def with_wrappers(path: str | os.PathLike[str], format: str, tag: str | None = None) -> CheckpointView:
    """A checkpoint under the names that its writer gives, with those of the modules that wrap the model."""
    store, index = opened(path, format, tag)
    return _restore(store, index, next(iter(index.states)), (), True)


def _restore(store: Store, index: Index, state: str, steps: tuple[Step, ...], of_all: bool = False) -> CheckpointView:
    view = object.__new__(CheckpointView)
    view._init(store, index, state, steps, of_all)
    return view
