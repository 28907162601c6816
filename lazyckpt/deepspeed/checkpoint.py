"""deepspeed's `DeepSpeedCheckpoint` on lazy tensors.

Its peer is deepspeed/checkpoint/deepspeed_checkpoint.py. Results are the same where that class is correct. Differences:

- Files are those of the tag's folder, not of folders in it, in the order of their ranks. (As text, mp_rank_100 sorts
  before mp_rank_11.)
- The model states define the degrees. A missing file is listed in the maps, and only what needs the file fails.
- Transformer layers are distributed over stages as evenly as possible. The peer loses the remainder, or gives it to a
  stage that does not exist.
- Shards are merged by the rules of `lazyckpt.open` (universal_checkpoint_info, families, ``rules``), not by a table of
  names. If more tensor-parallel ranks are wanted than are stored, the shards are cut.
- ZeRO-0 and ZeRO-3 checkpoints, and folders with ``latest``, are supported.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ..core.names import natural
from ..errors import SelectionError
from ..formats.deepspeed.files import LAYER_FILE_PREFIX
from ..layouts.cut import stored_ranks
from . import constants as c
from .mapping import Degrees, Map2D, balanced, check_reshape
from .states import FileProblem, Opened, file_problems
from .zero_checkpoint import ZeROCheckpoint

EMBEDDING_LAYER_INDEX = 0
FINAL_LAYER_NORM_INDEX = -1
ARGS_KEY = "args"
CHECKPOINT_INFO_KEY = "checkpoint_info"
ITERATION_KEY = "iteration"

_UNMERGED = (
    "an optimizer numbers its parameters rank by rank, those of several ranks cannot be put together here; "
    "lazyckpt.open(dir).states has them by name"
)


class DeepSpeedCheckpoint:
    """A DeepSpeed checkpoint, regrouped for ranks of other parallel degrees.

    The states that methods return are dicts with a `LazyTensor` in the place of each tensor; no method reads tensor
    data. Reading a tensor raises DataError if no rule merges its shards. A vocabulary keeps its padding.

    Parameters
    ----------
    dir
        The folder of a tag, or a folder with ``latest``.
    tp_degree, pp_degree, dp_degree
        Wanted numbers of tensor-, pipeline- and data-parallel ranks. By default the stored numbers.
    final_layer_norm_idx
        Index of the final norm among the layers. The layers between the first one and this one are the transformer
        layers.
    tag, rules
        The same as for `lazyckpt.open`.

    Raises
    ------
    MissingFileError
        The folder, or a file without which it cannot be read, does not exist.
    FormatError
        The folder is not one of DeepSpeed, or the stored ranks cannot be regrouped to the wanted degrees.
    CorruptError
        A file is damaged.
    """

    def __init__(
        self,
        dir: str | os.PathLike[str],
        tp_degree: int | None = None,
        pp_degree: int | None = None,
        dp_degree: int | None = None,
        final_layer_norm_idx: int = FINAL_LAYER_NORM_INDEX,
        *,
        tag: str | None = None,
        rules: Mapping[str, Any] | None = None,
    ) -> None:
        self.dir = dir
        self.final_layer_norm_idx = final_layer_norm_idx
        opened = self._opened = Opened(dir, tag, rules)
        stored = opened.stored
        self.tp_degree = stored.tp if tp_degree is None else tp_degree
        self.pp_degree = stored.pp if pp_degree is None else pp_degree
        self.dp_degree = stored.dp if dp_degree is None else dp_degree
        wanted = self._wanted = Degrees(self.pp_degree, self.tp_degree, self.dp_degree)
        check_reshape(stored, wanted)
        self.original_world_size = stored.world_size
        self.world_size = wanted.world_size

        folder = opened.files.folder
        names = [n for n, e in opened.b.store.list(folder).items() if not e.is_dir]
        self._listed = [f"{folder}/{n}" if folder else n for n in sorted(names, key=natural)]
        self.file_list = [opened.full(path) for path in self._listed]
        self.mp_rank_files = [opened.full(opened.model_path(mp)) for mp in range(stored.pp * stored.tp)]
        self.layer_keys = [f"{LAYER_FILE_PREFIX}{layer:02d}" for layer in opened.layers]
        self.layer_count = len(self.layer_keys)
        self.layer_files = [path for layer in range(self.layer_count) for path in self._layer_paths(layer)]
        self.zero_checkpoint = ZeROCheckpoint(opened, wanted)
        self.global_state = self._first_values((ARGS_KEY, CHECKPOINT_INFO_KEY, c.UNIVERSAL_CHECKPOINT_INFO))

        self.old_2d_map = Map2D(stored, stored)
        self.new_2d_map = Map2D(stored, wanted)
        dealt = balanced(range(self.layer_count)[1 : self.final_layer_norm_idx], self.pp_degree)
        self._stage_layers = dict(enumerate(dealt))
        self.pp_to_transformer_map = {
            pp: [self.layer_keys[n] for n in layers] for pp, layers in self._stage_layers.items()
        }
        self.transformer_file_map = {
            (tp, pp): [self._files_of_rank(n, tp) for n in layers]
            for pp, layers in self._stage_layers.items()
            if layers
            for tp in range(self.tp_degree)
        }
        self.tp_to_embedding_map = self._other_layer_map(EMBEDDING_LAYER_INDEX)
        self.tp_to_final_norm_map = self._other_layer_map(self.final_layer_norm_idx)

    # -- degrees

    def is_change_tp_degree(self) -> bool:
        """Return whether the wanted tensor-parallel degree differs from the stored one."""
        return self.tp_degree != self._opened.stored.tp

    def is_change_pp_degree(self) -> bool:
        """Return whether the wanted pipeline-parallel degree differs from the stored one."""
        return self.pp_degree != self._opened.stored.pp

    def is_change_dp_degree(self) -> bool:
        """Return whether the wanted data-parallel degree differs from the stored one."""
        return self.dp_degree != self._opened.stored.dp

    # -- maps, printed

    def show_2d_mapping(self) -> None:
        """Print the files of model states for each (pp, tp) rank."""
        print("reshaped 2d map ---- begin")
        for pp in range(self.pp_degree):
            for tp in range(self.tp_degree):
                print(f"[{pp}, {tp}] = {self.get_2d_parallel_files(tp_index=tp, pp_index=pp)}")
        print("reshaped 2d map ---- end")

    def show_tp_embedding_map(self) -> None:
        """Print the files of the first layer, by tp rank."""
        _dump(self.tp_to_embedding_map, "tp_to_embedding_layers")

    def show_tp_final_norm_map(self) -> None:
        """Print the files of the final norm, by tp rank."""
        _dump(self.tp_to_final_norm_map, "tp_to_final_norm_layers")

    def show_pp_transformer_map(self) -> None:
        """Print the keys of the transformer layers, by stage."""
        _dump(self.pp_to_transformer_map, "pp_to_transformer_layers")

    def show_transformer_file_map(self) -> None:
        """Print the files of the transformer layers, a list for each layer, by (tp, pp) rank."""
        _dump(self.transformer_file_map, "rank_to_transformer_files")

    # -- the optimizer's files

    def get_zero_checkpoint_state(
        self, pp_index: int, tp_index: int, dp_index: int, strip_tensor_paddings: bool = True
    ) -> dict[str, Any]:
        """Return the contents of the optimizer file of a rank.

        Parameters
        ----------
        pp_index, tp_index, dp_index
            The rank, by the wanted degrees.
        strip_tensor_paddings
            Leave out the padding at the end of each group.

        Returns
        -------
        dict
            The optimizer state of the rank, with `LazyTensor`s. ``param_shapes`` is left out.

        Raises
        ------
        SelectionError
            There is no such rank.
        MissingFileError
            The checkpoint has no optimizer files, or a file of this rank is missing.
        FormatError
            The layout does not allow the partitions of several ranks to be joined.
        """
        ignored = (c.PARAM_SHAPES,)
        return self.zero_checkpoint.get_state_for_rank(pp_index, tp_index, dp_index, ignored, strip_tensor_paddings)

    def get_zero_files(self, pp_index: int, tp_index: int, dp_index: int) -> list[str]:
        """Return the stored optimizer files that make up the optimizer file of a rank.

        Parameters
        ----------
        pp_index, tp_index, dp_index
            The rank, by the wanted degrees.

        Returns
        -------
        list of str
            Paths; empty without ZeRO.

        Raises
        ------
        SelectionError
            There is no such rank.
        """
        return self.zero_checkpoint.get_files_for_rank(pp_index, tp_index, dp_index)

    # -- layers of a pipeline

    def get_embedding_layer_id(self) -> str:
        """Return the key of the first layer that has a file. Raises SelectionError if no layer has one."""
        return self.layer_keys[self._layer(EMBEDDING_LAYER_INDEX)]

    def get_final_norm_layer_id(self) -> str:
        """Return the key of the final norm. Raises SelectionError if the checkpoint has no such layer."""
        return self.layer_keys[self._layer(self.final_layer_norm_idx)]

    def get_embedding_state(self, tp_index: int) -> dict[str, Any]:
        """Return the first layer's state dict for a tensor-parallel rank.

        Parameters
        ----------
        tp_index
            The rank, by the wanted degree.

        Returns
        -------
        dict
            Names within the layer -> `LazyTensor`s.

        Raises
        ------
        SelectionError
            There is no such rank, or the checkpoint has no layer files.
        """
        return self._layer_state(self._layer(EMBEDDING_LAYER_INDEX), tp_index)

    def get_embedding_files(self, tp_index: int) -> list[str]:
        """Return the files of the first layer's state dict for a tensor-parallel rank.

        Parameters
        ----------
        tp_index
            The rank, by the wanted degree.

        Returns
        -------
        list of str
            Paths.

        Raises
        ------
        SelectionError
            There is no such rank, or the checkpoint has no layer files.
        """
        return self._files_of_rank(self._layer(EMBEDDING_LAYER_INDEX), tp_index)

    def get_final_norm_state(self, tp_index: int) -> dict[str, Any]:
        """Return the final norm's state dict for a tensor-parallel rank.

        Parameters
        ----------
        tp_index
            The rank, by the wanted degree.

        Returns
        -------
        dict
            Names within the layer -> `LazyTensor`s.

        Raises
        ------
        SelectionError
            There is no such rank or layer.
        """
        return self._layer_state(self._layer(self.final_layer_norm_idx), tp_index)

    def get_final_norm_files(self, tp_index: int) -> list[str]:
        """Return the files of the final norm's state dict for a tensor-parallel rank.

        Parameters
        ----------
        tp_index
            The rank, by the wanted degree.

        Returns
        -------
        list of str
            Paths.

        Raises
        ------
        SelectionError
            There is no such rank or layer.
        """
        return self._files_of_rank(self._layer(self.final_layer_norm_idx), tp_index)

    def get_transformer_state(self, tp_index: int, pp_index: int) -> list[dict[str, Any]]:
        """Return the state dicts of a stage's transformer layers for a tensor-parallel rank.

        Parameters
        ----------
        tp_index, pp_index
            The rank, by the wanted degrees.

        Returns
        -------
        list of dict
            For each layer, names within the layer -> `LazyTensor`s.

        Raises
        ------
        SelectionError
            There is no such rank.
        """
        self._wanted.check(tp=tp_index, pp=pp_index)
        return [self._layer_state(n, tp_index) for n in self._stage_layers[pp_index]]

    def get_pp_transformer_map(self, pp_index: int) -> list[str]:
        """Return the keys of a stage's transformer layers.

        Parameters
        ----------
        pp_index
            The stage, by the wanted degree.

        Returns
        -------
        list of str
            Keys such as "layer_03".

        Raises
        ------
        SelectionError
            There is no such stage.
        """
        self._wanted.check(pp=pp_index)
        return self.pp_to_transformer_map[pp_index]

    def _layer(self, index: int) -> int:
        if not -self.layer_count <= index < self.layer_count:
            raise SelectionError(
                f"{self.dir} has {self.layer_count} layer files ({LAYER_FILE_PREFIX}*), none is number {index}: only "
                "pipelines have them"
            )
        return index % self.layer_count

    def _layer_state(self, n: int, tp_index: int) -> dict[str, Any]:
        self._wanted.check(tp=tp_index)
        return self._opened.layer_state(self._opened.layers[n], self.tp_degree, tp_index)

    def _layer_paths(self, n: int) -> list[str]:
        opened = self._opened
        return [opened.full(opened.layer_path(opened.layers[n], tp)) for tp in range(opened.stored.tp)]

    def _files_of_rank(self, n: int, tp_index: int) -> list[str]:
        self._wanted.check(tp=tp_index)
        paths = self._layer_paths(n)
        return [paths[tp] for tp in stored_ranks(self._opened.stored.tp, self.tp_degree, tp_index)]

    def _other_layer_map(self, index: int) -> dict[int, list[str]]:
        if not self.layer_keys:
            return {}
        n = self._layer(index)
        return {tp: self._files_of_rank(n, tp) for tp in range(self.tp_degree)}

    # -- model states

    def get_2d_parallel_state(self, tp_index: int, pp_index: int) -> dict[str, Any]:
        """Return the model states of a rank.

        Several stored ranks are combined: ``module`` and ``param_shapes`` are merged over tensor-parallel ranks, dicts
        and lists of names are joined over stages, everything else is taken from the lowest rank. Reading the tensors of
        an optimizer in combined states (ZeRO-0) raises DataError.

        Parameters
        ----------
        tp_index, pp_index
            The rank, by the wanted degrees.

        Returns
        -------
        dict
            The model states, with `LazyTensor`s.

        Raises
        ------
        SelectionError
            There is no such rank.
        MissingFileError
            The file of the lowest rank is missing.
        """
        files = self.get_2d_parallel_files(tp_index, pp_index)
        unmerged = _UNMERGED if len(files) > 1 or self.is_change_tp_degree() else ""
        stages = stored_ranks(self._opened.stored.pp, self.pp_degree, pp_index)
        states = [self._opened.model_state(pp, self.tp_degree, tp_index, unmerged) for pp in stages]
        state = states[0]
        for other in states[1:]:
            state = _union(state, other)
        return state

    def get_2d_parallel_files(self, tp_index: int, pp_index: int) -> list[str]:
        """Return the stored files that make up the model states of a rank.

        Parameters
        ----------
        tp_index, pp_index
            The rank, by the wanted degrees.

        Returns
        -------
        list of str
            Paths.

        Raises
        ------
        SelectionError
            There is no such rank.
        """
        self._wanted.check(tp=tp_index, pp=pp_index)
        return [self.mp_rank_files[mp] for mp in self.new_2d_map.get_data(pp_index=pp_index, tp_index=tp_index)]

    def get_iteration(self) -> int:
        """Return ``iteration`` of the model states, which Megatron writes; 0 if there is none.

        deepspeed's own count of steps is ``global_steps``, also in `lazyckpt.open(dir).meta`.
        """
        iteration: int = self.global_state[ITERATION_KEY]
        return iteration

    def get_args(self) -> Any:
        """Return ``args`` of the model states, an `argparse.Namespace` that Megatron writes; None if there are none."""
        return self.global_state[ARGS_KEY]

    def get_checkpoint_info(self, info_key: str = CHECKPOINT_INFO_KEY) -> Any:
        """Return a value of the first rank's model states.

        Parameters
        ----------
        info_key
            A key of the model states.

        Returns
        -------
        Any
            The value; None if there is no such key.
        """
        if info_key not in self.global_state:
            self.global_state |= self._first_values((info_key,))
        return self.global_state[info_key]

    def _first_values(self, keys: tuple[str, ...]) -> dict[str, Any]:
        """Return values of the lowest rank whose model states can be read, always with the iteration."""
        opened = self._opened
        state = opened.values(opened.stages[min(opened.stages)].file.path)
        return {ITERATION_KEY: state.get(ITERATION_KEY, 0), **{key: state.get(key) for key in keys}}

    # -- files

    def validate_files(self) -> list[FileProblem]:
        """Check all files of the checkpoint, and print a line for every missing file. Reads no tensor data.

        Returns
        -------
        list of FileProblem
            Files that are missing, cannot be read, or are left over from a save with more ranks.
        """
        problems = file_problems(self._opened, self._listed)
        for problem in problems:
            if problem.what == "missing":
                print(f"Error: {problem.path} is not existent")
        return problems


def _dump(table: Mapping[Any, Any], title: str) -> None:
    print(f"Dump mapping: {title}")
    for key, value in table.items():
        print(f"{key} = {value}")


def _union(a: Any, b: Any) -> Any:
    """Join the states of two stages: join dicts and lists of names, take everything else from the first."""
    if isinstance(a, dict) and isinstance(b, dict):
        joined = {k: _union(v, b[k]) if k in b else v for k, v in a.items()}
        return joined | {k: v for k, v in b.items() if k not in a}
    if isinstance(a, list) and isinstance(b, list):
        if all(isinstance(v, dict) for v in (*a, *b)):
            both = [_union(x, y) for x, y in zip(a, b, strict=False)]
            return both + a[len(both) :] + b[len(both) :]
        if all(isinstance(v, str) for v in (*a, *b)):
            return list(dict.fromkeys([*a, *b]))
    return a
