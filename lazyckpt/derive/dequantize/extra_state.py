"""The ``_extra_state`` of Transformer Engine's modules: scales, as a pickle in the checkpoint. Nothing is executed.

A module returns its scales as bytes: of `torch.save` or of `pickle.dumps`, in a tensor of uint8 or in an `io.BytesIO`.
``scale_inv_fwd`` has what codes are multiplied by, for the inputs, weights and outputs of each product. TE 2 stores
only ``scale_fwd``, the scales of the next step, of which codes may have others: they are not used.

Source: NVIDIA/TransformerEngine 1.13, transformer_engine/pytorch/module/base.py (`get_extra_state`) and
csrc/common.h (`enum FP8FwdTensors`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core.dtypes import F32, U8
from ...errors import DataError, LazyckptError
from ...formats.shared.inner_pickle import array_in, inner_pickle
from ...io.containers.pickle.rebuild import StoredTensor
from ...io.containers.pickle.records import content_of
from .model import Model

_KEY = "_extra_state"
_NUMBERS = {"weight": 1, "fc1_weight": 1, "fc2_weight": 4}  # the number of a weight among a module's tensors


def has_scales(model: Model, name: str) -> bool:
    """Return whether a tensor may be the codes of a weight whose scale is in the ``_extra_state`` of its module."""
    module, _, last = name.rpartition(".")
    return last in _NUMBERS and (_beside(module) in model or _in_meta(model, name) is not None)


def _beside(module: str) -> str:
    return f"{module}.{_KEY}" if module else _KEY


def scale_of(model: Model, name: str) -> tuple[float, tuple[str, ...]]:
    """Return what the codes of a weight are multiplied by, and the tensors that say it.

    Raises
    ------
    DataError
        The state does not say it.
    """
    module, _, last = name.rpartition(".")
    beside = _beside(module)
    used: tuple[str, ...] = ()
    if beside in model:
        if model.kind(beside).dtype is not U8:
            raise DataError(f"its {_KEY} is {model.kind(beside).dtype}, not bytes")
        data, used = model.read(beside).contiguous().numpy().tobytes(), (beside,)
    else:
        found = _in_meta(model, name)
        data = b"" if found is None else found
    if not data:
        raise DataError(f"its {_KEY} is empty")
    scales = _scales(data, f"{model.view.root} ({beside})")
    number = _NUMBERS[last]
    if len(scales) <= number:
        raise DataError(f"its {_KEY} has {len(scales)} scales: none for the weight")
    return float(scales[number]), used


def _in_meta(model: Model, name: str) -> bytes | None:
    """Return the bytes of a module's state that is in the metadata of the checkpoint, not in a tensor."""
    spec = model.spec(name)
    stored = (spec.stored_as or spec.name).rpartition(".")[0]
    return content_of(_down(model.view._index.meta, _beside(stored)))


def _down(value: Any, path: str) -> Any:
    """Return what is at a dotted path of nested mappings, whose keys may have dots, too; None if nothing is."""
    if not isinstance(value, Mapping):
        return None
    if path in value:
        return value[path]
    for at, char in enumerate(path):
        if char == "." and path[:at] in value:
            found = _down(value[path[:at]], path[at + 1 :])
            if found is not None:
                return found
    return None


def _scales(data: bytes, where: str) -> NDArray[np.float32]:
    """Return ``scale_inv_fwd``. Raises DataError if there is none."""
    try:
        state, file = inner_pickle(data, where)
        table = state if isinstance(state, dict) else {}
        found = table.get("scale_inv_fwd")
        if isinstance(found, StoredTensor) and found.dtype is F32 and len(found.shape) == 1:
            return array_in(found, file, data)
    except LazyckptError as e:
        raise DataError(f"its {_KEY} cannot be read: {e}") from e
    if found is None and "scale_fwd" in table:
        raise DataError(f"its {_KEY} has only scale_fwd, the scale of the next step")
    raise DataError(f"its {_KEY} has no scale_inv_fwd")
