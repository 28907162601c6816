"""What Transformer Engine's modules save beside their weights, in megatron-core's distributed checkpoints.

Writers: megatron/core/transformer/utils.py `make_sharded_tensors_for_checkpoint` (an object ``MODULE._extra_state`` for
each module, at ``shard_LAYER_LAYERS``, of experts at ``shard_LAYER.EXPERT_LAYERS.EXPERTS``),
megatron/core/extensions/transformer_engine.py `_encode_extra_state` and Transformer Engine's
pytorch/module/base.py `get_extra_state`: bytes of `torch.save` in an `io.BytesIO`, or since 2.0 of `pickle.dumps` in a
tensor. They hold the scales and the history of delayed scaling, and the recipe. The weights beside them are no codes:
tensors of FP8 are saved in the model's dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...core.dtypes import U8
from ...core.extents import Extent
from ...core.specs import TensorSpec
from ...errors import CorruptError, DataError
from ...io.containers.pickle.plain import Path, Plain
from ...io.containers.pickle.records import content_of
from ...io.plain_json import OnDemand
from ...io.storage.base import Store
from ...layouts.tables import pattern
from ..dcp.items import Item
from ..dcp.objects import Objects
from ..shared.inner_pickle import array_in, inner_pickle

EXTRA = "_extra_state"
_MOST = 16 << 20  # bytes of one; honest ones have less than 100 KB


class ExtraStates(OnDemand):
    """The states of modules by the module's name, each read when it is asked for. They are not listed with the rest of
    ``meta``, because a model may have tens of thousands.

    Parameters
    ----------
    objects
        The objects of the checkpoint.
    """

    def __init__(self, objects: Objects) -> None:
        self.objects = objects
        self._names: dict[str, str] = {}
        for key in objects.items:
            name = _name(key)
            self._names[key if name in self._names else name] = key

    def __getitem__(self, name: str) -> Any:
        """Return the state of a module: a dict of plain values and numpy arrays; None if the module has none.

        Raises KeyError, CorruptError, and the errors of reading."""
        key = self._names[name]
        where = f"{self.objects.store.root} ({name}.{EXTRA})"
        try:
            data = _bytes(self.objects, key)
            return None if not data else _opened(data, where)
        except DataError as e:
            raise CorruptError(f"{where} cannot be read: {e}") from e

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def keys(self) -> list[str]:
        """Return the names of the modules."""
        return list(self._names)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ExtraStates) and self.objects.items == other.objects.items

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<states of {len(self):,} modules, by name>"


class ExtraMeta(Mapping[str, Any]):
    """Metadata with the entry "extra_states" alone."""

    def __init__(self, objects: Objects) -> None:
        self.states = ExtraStates(objects)

    def __getitem__(self, key: str) -> Any:
        if key != "extra_states":
            raise KeyError(key)
        return self.states

    def __iter__(self) -> Iterator[str]:
        return iter(("extra_states",))

    def __len__(self) -> int:
        return 1


def extra_meta(store: Store, items: Mapping[str, tuple[Path, Item]], args: Any) -> ExtraMeta | None:
    """Return the metadata of these objects; None if the run did not compute in FP8: all of them are None then."""
    if not items or (args is not None and not getattr(args, "fp8", None)):
        return None
    return ExtraMeta(Objects(store, items))


def _name(key: str) -> str:
    """Return the name of the module in the model on one rank; the key itself where a key is of another kind."""
    match = pattern("megatron.extra_state").fullmatch(key)
    if match is None:
        return key
    name, places = match["module"], [int(n[:9]) for n in match["place"].split(".")]
    layer = pattern("megatron.dist_layers").fullmatch(name)
    if layer is not None:
        name = f"{layer['head']}.{places.pop(0)}.{layer['tail']}"
    expert = pattern("megatron.dist_experts").fullmatch(name)
    if expert is not None and places:
        name = f"{expert['head']}.local_experts.{places.pop(0)}.{expert['tail']}"
    return name if not any(places) else key


def _bytes(objects: Objects, key: str) -> bytes:
    """Return the bytes in an object: a list of one io.BytesIO or one tensor of bytes."""
    found = objects[key]
    if found.tensors:
        spec: TensorSpec = next(iter(found.tensors.values()))
        extent = spec.fragments[0].extent if len(spec.fragments) == 1 else None
        wanted = len(spec.shape) == 1 and spec.dtype is U8 and spec.nbytes <= _MOST
        if not isinstance(extent, Extent) or extent.within is not None or not wanted:
            raise DataError(f"it is a tensor of {spec.dtype} of shape {spec.shape}, not bytes")
        return bytes(objects.store.read(extent.path, extent.offset, spec.nbytes)) if spec.nbytes else b""
    value = found.rest[0] if isinstance(found.rest, list) and len(found.rest) == 1 else found.rest
    if (content := content_of(value)) is not None:
        return content
    if value is None or value == {}:
        return b""
    raise DataError(f"it is {type(value).__name__}, not bytes")


def _opened(data: bytes, where: str) -> Any:
    root, file = inner_pickle(data, where)

    def array(_: str, tensor: Any) -> Any:
        return array_in(tensor, file, data)

    return Plain(root, where, len(data), keep=array).rest
