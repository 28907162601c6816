"""The optimizer files of a ZeRO checkpoint, regrouped for ranks of other degrees.

Layout: deepspeed/runtime/zero/stage_1_and_2.py `state_dict`, runtime/bf16_optimizer.py; API:
deepspeed/checkpoint/zero_checkpoint.py. A rank's partition of a flat group is an interval of the group, so the
partitions of several ranks are joined by concatenation. Two layouts do not allow that and are refused: ZeRO-3 cuts
every parameter separately, and the groups of tensor-parallel ranks hold shards. `lazyckpt.open(dir).states` has whole
parameters of both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from math import prod
from typing import Any

from ..core.box import Box
from ..core.compose import Composed
from ..core.placement import Placement
from ..core.specs import TensorSpec
from ..errors import FormatError, MissingFileError
from ..tensor import LazyTensor
from . import constants as c
from .mapping import Degrees, zero_ranks
from .states import Opened

_STATES = "state"  # of a torch optimizer's state dict
_REFUSED = (
    "the partitions of several ranks cannot be joined, they hold {}; lazyckpt.open(dir).states has whole parameters, "
    "and under the stored degrees every file reads as it is"
)


class ZeROCheckpoint:
    """The optimizer files: the degrees of the ranks that wrote them (src), and which files make up a wanted rank."""

    def __init__(self, opened: Opened, wanted: Degrees) -> None:
        self._opened = opened
        self._wanted = wanted
        stored = opened.stored
        self.dir = opened.dir
        ranks = [(dp, mp) for dp in range(stored.dp) for mp in range(stored.pp * stored.tp)]
        self.file_list = [opened.full(opened.optim_path(*rank)) for rank in ranks] if opened.files.optim else []
        self.num_files = len(self.file_list)

    def get_src_world_size(self) -> int:
        return self._opened.stored.world_size

    def get_src_tp_degree(self) -> int:
        return self._opened.stored.tp

    def get_src_pp_degree(self) -> int:
        return self._opened.stored.pp

    def get_src_dp_degree(self) -> int:
        return self._opened.stored.dp

    def get_file_indices_for_rank(self, pp_index: int, tp_index: int, dp_index: int) -> list[int]:
        """Return the indices in ``file_list`` of the files that make up a rank's state, in order."""
        self._wanted.check(pp=pp_index, tp=tp_index, dp=dp_index)
        stored = self._opened.stored
        ranks = zero_ranks(stored, self._wanted, pp_index, tp_index, dp_index)
        return [dp * stored.pp * stored.tp + mp for dp, mp in ranks]

    def get_files_for_rank(self, pp_index: int, tp_index: int, dp_index: int) -> list[str]:
        """Return the paths of the files that make up a rank's state, in order; none without ZeRO."""
        indices = self.get_file_indices_for_rank(pp_index, tp_index, dp_index)
        return [self.file_list[i] for i in indices] if self.file_list else []

    def get_state_for_rank(
        self,
        pp_index: int,
        tp_index: int,
        dp_index: int,
        keys_to_ignore: Iterable[str] = (),
        strip_tensor_paddings: bool = True,
    ) -> dict[str, Any]:
        """Return the optimizer file of a rank, with lazy tensors: its 1-d partitions of the flat groups, joined over
        the stored ranks.

        If several stored ranks are joined, everything but partitions (``step``, the loss scaler, options) is taken from
        the first rank, ``param_slice_mappings`` (offsets within one rank's partition) are left out, and the groups of
        joined stages follow each other.

        Parameters
        ----------
        pp_index, tp_index, dp_index
            The rank, by the wanted degrees.
        keys_to_ignore
            Keys of the file to leave out.
        strip_tensor_paddings
            Leave out the padding at the end of each group.

        Returns
        -------
        dict
            The contents of the file.

        Raises
        ------
        MissingFileError
            There is no such file.
        FormatError
            The layout does not allow the ranks to be joined.
        """
        opened = self._opened
        self._wanted.check(pp=pp_index, tp=tp_index, dp=dp_index)
        if not opened.files.optim:
            raise MissingFileError(
                f"{self.dir} has no optimizer files ({c.ZERO_FILE_PREFIX}*): without ZeRO the optimizer is in the "
                "model states, under 'optimizer'; lazyckpt.open(dir).states has it by parameter"
            )
        ranks = zero_ranks(opened.stored, self._wanted, pp_index, tp_index, dp_index)
        if opened.stored.tp != self._wanted.tp:
            raise FormatError(f"{self.dir}: {_REFUSED.format('shards of tensor-parallel ranks')}")
        if len(ranks) > 1 and opened.sharded:
            raise FormatError(f"{self.dir}: {_REFUSED.format('parameters that ZeRO-3 cut one by one')}")
        states = [self._state(dp, mp, strip_tensor_paddings) for dp, mp in ranks]
        if len(states) > 1:
            _join_alignment([state[c.OPTIMIZER_STATE_DICT] for state in states], [mp for _, mp in ranks])
        state = states[0] if len(states) == 1 else self._joined(states, "")
        inner = state[c.OPTIMIZER_STATE_DICT]
        if strip_tensor_paddings and isinstance(inner.get(c.GROUP_PADDINGS), list):
            inner[c.GROUP_PADDINGS] = [0] * len(inner[c.GROUP_PADDINGS])
        counts = inner.get(c.PARTITION_COUNT)
        if len(states) > 1 and isinstance(counts, list):
            if any(n != opened.stored.dp for n in counts):
                raise FormatError(f"{self.dir}: {_REFUSED.format('experts that not all data-parallel ranks share')}")
            inner[c.PARTITION_COUNT] = [self._wanted.dp] * len(counts)
        for key in keys_to_ignore:
            state.pop(key, None)
        return state

    def _state(self, dp: int, mp: int, strip: bool) -> dict[Any, Any]:
        """Return the contents of one stored file, without padding if ``strip``."""
        path = self._opened.optim_path(dp, mp)
        state: dict[Any, Any] = self._opened.values(path)
        inner = state.get(c.OPTIMIZER_STATE_DICT) if isinstance(state, dict) else None
        if not isinstance(inner, dict):
            raise FormatError(f"{self._opened.full(path)} holds no {c.OPTIMIZER_STATE_DICT}: no optimizer file of ZeRO")
        base = inner.get(c.BASE_OPTIMIZER_STATE)  # a list in elastic checkpoints, which are written without padding
        groups = base.get(_STATES) if isinstance(base, dict) else None
        if strip and isinstance(groups, dict):
            for g, group in groups.items():
                if isinstance(group, dict) and type(g) is int:
                    group.update({k: self._stripped(t, g, dp, mp, inner) for k, t in group.items()})
        masters = inner.get(c.SINGLE_PARTITION_OF_FP32_GROUPS)
        if strip and isinstance(masters, list) and c.ZERO_STAGE not in inner:  # only BF16_Optimizer writes padding here
            inner[c.SINGLE_PARTITION_OF_FP32_GROUPS] = [
                self._stripped(t, g, dp, mp, inner) for g, t in enumerate(masters)
            ]
        return state

    def _stripped(self, t: Any, g: int, dp: int, mp: int, inner: dict[Any, Any]) -> Any:
        """Return a rank's partition of a group without what follows the group's last parameter. The end of the group is
        computed from the parameters' shapes, because ``group_paddings`` of BF16_Optimizer can exceed the partition."""
        if not isinstance(t, LazyTensor) or t.ndim != 1:
            return t
        stage = self._opened.stages.get(mp)
        if stage is None or g >= len(stage.groups):
            return t
        aligned = inner.get(c.PARAM_ALIGNMENT_PADDINGS)
        pads = aligned[g] if isinstance(aligned, list) and g < len(aligned) else []
        end = sum(map(prod, stage.groups[g].values())) + sum(n for n in pads if type(n) is int)
        counts = inner.get(c.PARTITION_COUNT)
        world = self._opened.stored.dp
        count = counts[g] if isinstance(counts, list) and g < len(counts) and type(counts[g]) is int else world
        if count < 1 or world % count:
            return t
        config = stage.model.get("ds_config")
        data_first = isinstance(config, dict) and config.get("use_data_before_expert_parallelism") is True
        place = dp % count if data_first else dp // (world // count)
        width = t.numel()
        return self._concatenated([t], [min(width, max(0, end - place * width))])

    def _joined(self, values: Sequence[Any], where: str) -> Any:
        """Join the same place of several files: concatenate 1-d tensors, join containers item by item."""
        first = values[0]
        if all(isinstance(v, dict) for v in values):
            keys = dict.fromkeys(k for v in values for k in v)
            return {k: self._joined([v[k] for v in values if k in v], f"{where}.{k}") for k in keys}
        if all(isinstance(v, list) for v in values):
            if len({len(v) for v in values}) > 1:
                raise FormatError(
                    f"{where[1:]}: lists of {[len(v) for v in values]} items in ranks that are to be joined"
                )
            return [self._joined(items, f"{where}.{n}") for n, items in enumerate(zip(*values, strict=True))]
        if all(isinstance(v, LazyTensor) and v.ndim == 1 for v in values):
            return self._concatenated(values, [v.numel() for v in values])
        return first

    def _concatenated(self, tensors: Sequence[LazyTensor], lengths: Sequence[int]) -> LazyTensor:
        """Concatenate the first ``lengths`` elements of 1-d tensors."""
        placements, at = [], 0
        for tensor, length in zip(tensors, lengths, strict=True):
            placements.append(Placement.of(tensor.spec.shape, Box((0,), (length,)), (at,)))
            at += length
        spec = tensors[0].spec
        fragments = Composed(tuple(t.spec.fragments for t in tensors), tuple(placements), merged=True)
        return self._opened.tensor(TensorSpec(spec.name, (at,), spec.dtype, fragments))


def _join_alignment(states: Sequence[dict[Any, Any]], mps: Sequence[int]) -> None:
    """Prepare states for joining: remove entries about a single rank's partition, and give each state the parameter
    paddings of all states, because the parameters of several stages follow each other."""
    stages = {mp: state.get(c.PARAM_ALIGNMENT_PADDINGS) for mp, state in zip(mps, states, strict=True)}
    lists = [groups for groups in stages.values() if isinstance(groups, list)]
    for state in states:
        state.pop(c.PARAM_SLICE_MAPPINGS, None)
        if state.pop(c.PARAM_ALIGNMENT_PADDINGS, None) is not None:
            state[c.PARAM_ALIGNMENT_PADDINGS] = [[*chain(*groups)] for groups in zip(*lists, strict=False)]
