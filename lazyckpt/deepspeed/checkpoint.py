"""What deepspeed's `DeepSpeedCheckpoint` answers, on lazy tensors.

Its peer is deepspeed/checkpoint/deepspeed_checkpoint.py. The answers are the same where that class gives right ones;
the differences, each with a reason:

- Files are those of the tag's folder, not of folders in it, in the order of their ranks: as text mp_rank_100 sorts
  before mp_rank_11.
- Degrees are what the model states say. A file that should be there stands in the maps, and only what needs it fails.
- Transformer layers are dealt to stages as evenly as can be. The peer loses those that are left over, or gives them to
  a stage that does not exist.
- Shards are merged by the rules of `lazyckpt.open` (universal_checkpoint_info, families, ``rules``), not by a table of
  names; more tensor-parallel ranks than are stored get pieces of the shards.
- ZeRO-0 and ZeRO-3 checkpoints, and folders with ``latest``, are taken too.
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
    """A DeepSpeed checkpoint as ranks of other degrees would have it.

    ``dir``: the folder of a tag, or one with ``latest``. ``tp_degree``, ``pp_degree``, ``dp_degree``: as many tensor-,
    pipeline- and data-parallel ranks are wanted (by default as are stored). ``final_layer_norm_idx``: which of the
    layers is the final norm; those between the first and it are the transformer's. ``tag`` and ``rules`` are those of
    `lazyckpt.open`.

    States are dicts in which `LazyTensor`s stand for tensors; opening and asking read no tensor data. A tensor whose
    shards nothing tells how to merge raises DataError when it is read, and says so. A vocabulary keeps its padding.

    Raises MissingFileError, FormatError (no DeepSpeed folder; degrees that the stored ones cannot be regrouped to),
    CorruptError; SelectionError for the index of a rank that there is not.
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
        """Whether another tensor-parallel degree is wanted than is stored."""
        return self.tp_degree != self._opened.stored.tp

    def is_change_pp_degree(self) -> bool:
        """Whether another pipeline degree is wanted than is stored."""
        return self.pp_degree != self._opened.stored.pp

    def is_change_dp_degree(self) -> bool:
        """Whether another data-parallel degree is wanted than is stored."""
        return self.dp_degree != self._opened.stored.dp

    # -- maps, printed

    def show_2d_mapping(self) -> None:
        """Print the model states that each (pp, tp) rank is made of."""
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
        """The optimizer file that the rank would have; see `ZeROCheckpoint.get_state_for_rank`."""
        ignored = (c.PARAM_SHAPES,)
        return self.zero_checkpoint.get_state_for_rank(pp_index, tp_index, dp_index, ignored, strip_tensor_paddings)

    def get_zero_files(self, pp_index: int, tp_index: int, dp_index: int) -> list[str]:
        """The optimizer files that the rank's is made of; none where there is no ZeRO."""
        return self.zero_checkpoint.get_files_for_rank(pp_index, tp_index, dp_index)

    # -- layers of a pipeline

    def get_embedding_layer_id(self) -> str:
        """The key of the first layer that has a file."""
        return self.layer_keys[self._layer(EMBEDDING_LAYER_INDEX)]

    def get_final_norm_layer_id(self) -> str:
        """The key of the final norm."""
        return self.layer_keys[self._layer(self.final_layer_norm_idx)]

    def get_embedding_state(self, tp_index: int) -> dict[str, Any]:
        """The state dict of the first layer (names within the layer -> lazy tensors), as tp rank ``tp_index`` would
        have it."""
        return self._layer_state(self._layer(EMBEDDING_LAYER_INDEX), tp_index)

    def get_embedding_files(self, tp_index: int) -> list[str]:
        """The files that is made of."""
        return self._files_of_rank(self._layer(EMBEDDING_LAYER_INDEX), tp_index)

    def get_final_norm_state(self, tp_index: int) -> dict[str, Any]:
        """The state dict of the final norm, as tp rank ``tp_index`` would have it."""
        return self._layer_state(self._layer(self.final_layer_norm_idx), tp_index)

    def get_final_norm_files(self, tp_index: int) -> list[str]:
        """The files that is made of."""
        return self._files_of_rank(self._layer(self.final_layer_norm_idx), tp_index)

    def get_transformer_state(self, tp_index: int, pp_index: int) -> list[dict[str, Any]]:
        """The state dicts of a stage's transformer layers, as tp rank ``tp_index`` would have them."""
        self._wanted.check(tp=tp_index, pp=pp_index)
        return [self._layer_state(n, tp_index) for n in self._stage_layers[pp_index]]

    def get_pp_transformer_map(self, pp_index: int) -> list[str]:
        """The keys of a stage's transformer layers."""
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
        """The model states that the rank would have, with lazy tensors in them.

        Of several stored ranks: ``module`` and ``param_shapes`` are put together over tensor-parallel ranks, tables and
        lists of names joined over stages, and all else is the lowest rank's. An optimizer's tensors in it (ZeRO-0)
        raise DataError when they are read then.
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
        """The model states that the rank's are made of."""
        self._wanted.check(tp=tp_index, pp=pp_index)
        return [self.mp_rank_files[mp] for mp in self.new_2d_map.get_data(pp_index=pp_index, tp_index=tp_index)]

    def get_iteration(self) -> int:
        """``iteration`` of the model states, which Megatron keeps there; 0 where there is none. (deepspeed's own count
        of steps is ``global_steps``, also in `lazyckpt.open(dir).meta`.)"""
        iteration: int = self.global_state[ITERATION_KEY]
        return iteration

    def get_args(self) -> Any:
        """``args`` of the model states, as an `argparse.Namespace`, which Megatron keeps there; None where there are
        none."""
        return self.global_state[ARGS_KEY]

    def get_checkpoint_info(self, info_key: str = CHECKPOINT_INFO_KEY) -> Any:
        """What the first rank's model states have under a key; None if nothing."""
        if info_key not in self.global_state:
            self.global_state |= self._first_values((info_key,))
        return self.global_state[info_key]

    def _first_values(self, keys: tuple[str, ...]) -> dict[str, Any]:
        """Values of the lowest rank whose model states can be read; always with the iteration."""
        opened = self._opened
        state = opened.values(opened.stages[min(opened.stages)].file.path)
        return {ITERATION_KEY: state.get(ITERATION_KEY, 0), **{key: state.get(key) for key in keys}}

    # -- files

    def validate_files(self) -> list[FileProblem]:
        """Print a line for every file that is missing, and return all that is wrong with the files: those that are
        missing, cannot be read, or are left over from a save with more ranks. Reads the rank files' lists of contents,
        no tensor data."""
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
    """Two stages' states as one: tables and lists of names joined, all else the first's."""
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
