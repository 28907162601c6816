"""The same tensors otherwise: under other names, in another dtype, cut for ranks of another layout. Reads nothing."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from .core.index import Index, TensorSpec, converted, renamed
from .core.names import Pattern
from .errors import DataError
from .formats.renaming.apply import renamed_index
from .formats.sharding.ranks import mesh_of
from .formats.sharding.shard import sharded, unsharded
from .inspecting import Inspecting

if TYPE_CHECKING:
    from .view import CheckpointView

STORED = "stored"  # the state of the tensors as they are stored, under their raw names

# How a part of a checkpoint was chosen: by a prefix, which its names then lack, or by their names.
Step = tuple[Literal["below"], str] | tuple[Literal["select"], Pattern | frozenset[str]]


class Reshaping(Inspecting):
    """What other views can be made of one."""

    __slots__ = ()

    _index: Index
    _state: str
    _steps: tuple[Step, ...]

    @property
    @abstractmethod
    def specs(self) -> Mapping[str, TensorSpec]:
        """The tensors of this state as data, by full name."""

    @property
    @abstractmethod
    def states(self) -> Mapping[str, CheckpointView]:
        """The same part of every state."""

    @property
    @abstractmethod
    def _listed(self) -> dict[str, str]:
        """The names of this view -> full names."""

    @abstractmethod
    def _of(self, index: Index, steps: tuple[Step, ...] = ()) -> CheckpointView:
        """This state of another index over the same files."""

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
        index, shown = self._shown("rename")
        return self._of(renamed_index(index, shown, names, reverse))

    def astype(self, dtype: torch.dtype) -> CheckpointView:
        """The same view with the floating-point tensors that it reads converted to ``dtype`` when they are read.
        Integers, bools and complex numbers stay what they are, and so do the other states: of a training checkpoint the
        weights are converted, masters and moments are not.

        Raises DataError for a dtype that is no floating-point one, or that torch cannot convert a tensor to.
        """
        if not dtype.is_floating_point:
            raise DataError(f"floating-point tensors are not converted to {dtype}: name a floating-point dtype")

        def of(index: Index) -> Index:
            if self._state == STORED:
                return replace(index, stored=converted(self.specs, dtype))
            layout = index.layout and replace(index.layout, source=of(index.layout.source))
            states = {**index.states, self._state: converted(index.states[self._state], dtype)}
            return replace(index, states=states, layout=layout)

        return self._of(of(self._index), self._steps)

    def shard(
        self,
        tp: int = 1,
        pp: int = 1,
        dp: int = 1,
        ep: int = 1,
        *,
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
        index, shown = self._shown("shard")
        return self._of(sharded(index, shown, mesh_of(tp, pp, dp, ep), rank, rules or {}))

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


def unshard(views: Iterable[CheckpointView]) -> CheckpointView:
    """The view that `CheckpointView.shard` cut, from the shards of all its ranks, in any order: all states, lazily.

    Raises MeshError if they are not of one checkpoint on one mesh, or a rank is missing; DataError for parts of shards.
    """
    shards = list(views)
    if any(view._steps for view in shards):
        raise DataError("these views are parts of shards: put the whole shards together, then take the part")
    index = unsharded([view._index for view in shards])
    return shards[0]._of(index)
