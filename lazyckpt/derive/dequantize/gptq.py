"""GPTQ, as AutoGPTQ and GPTQModel write it: ``qweight``, ``qzeros``, ``scales`` and ``g_idx`` of each layer.

config.json (or quantize_config.json) must say that it is GPTQ: AWQ has the same names. Two conventions for zero points
exist, and only ``checkpoint_format`` tells them apart: "gptq" (the default) stores z - 1, "gptq_v2" and "gptq_p" z.
The bits of a layer follow from its shapes, because ``dynamic`` may give layers bits of their own. "marlin" is a layout
of its own (marlin.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...core.dtypes import DType
from ...core.expr import Kind, make
from ...errors import DataError, Problem, only_one, some
from .conv1d import as_unquantized
from .marlin import dense_weight
from .model import Model, Weight

_FILE = "quantize_config.json"
_VERSIONS = {"": "z-1", "gptq": "z-1", "gptq_v2": "z", "gptq_p": "z"}
_PLANAR = (5, 6, 7)  # bits that have no other layout


class Gptq:
    """GPTQ's matrices."""

    name = "gptq"
    methods = ("gptq", "marlin")

    def detect(self, model: Model) -> bool:
        said = model.evidence.method
        return said in self.methods or (not said and "bits" in model.evidence.others.get(_FILE, {}))

    def weights(self, model: Model, dtype: DType) -> Iterator[Weight | Problem]:
        settings = {**model.evidence.others.get(_FILE, {}), **model.evidence.quantization}
        layers = list(model.ending(".qweight", ".scales"))
        version = str(settings.get("checkpoint_format") or settings.get("format") or "").lower()
        if settings.get("is_marlin_format") or model.evidence.method == "marlin":
            version = "marlin"
        if version not in (*_VERSIONS, "marlin"):
            line = f"the GPTQ layers have the layout {version!r}, which is not read: they stay as stored"
            yield Problem("undecided-quantization", line)
            return
        if version == "marlin":
            yield from _marlin(model, layers, settings, dtype)
            return
        if settings.get("rotation"):
            line = f"GPTQ layers are of a rotated model ({settings['rotation']!r}): their weights are those after it"
            yield Problem("undecided-quantization", line)
        for layer in layers:
            try:
                yield _weight(model, layer, settings, version, dtype)
            except DataError as e:
                yield Problem("contradicting-quantization", f"{layer!r}: {e}", layer)


def _marlin(
    model: Model, layers: Sequence[str], settings: Mapping[str, Any], dtype: DType
) -> Iterator[Weight | Problem]:
    if layers:
        line = f"the configuration says that layers are in Marlin's layout, but {some(layers)} have qweight: undecided"
        yield Problem("contradicting-quantization", line, only_one(layers))
    for layer in model.ending(".B", ".s"):
        try:
            yield dense_weight(model, layer, settings, dtype)
        except DataError as e:
            yield Problem("contradicting-quantization", f"{layer!r}: {e}", layer)


def _weight(model: Model, layer: str, settings: Mapping[str, Any], version: str, dtype: DType) -> Weight:
    names = [f"{layer}.{last}" for last in ("qweight", "qzeros", "scales", "g_idx")]
    if names[1] not in model:
        raise DataError("there are no zero points (qzeros)")
    codes, zeros, scales = map(model.kind, names[:3])
    if len({len(one.shape) for one in (codes, zeros, scales)}) != 1 or len(codes.shape) < 2:
        raise DataError(f"qweight, qzeros and scales have shapes {codes.shape}, {zeros.shape} and {scales.shape}")
    order = model.kind(names[3]).shape if names[3] in model else None
    size, bits = _sizes(codes, zeros, settings, order)
    planar = version == "gptq_p" or bits in _PLANAR
    stored = "z" if planar else _VERSIONS[version]
    if stored == "z-1" and _by_gptqmodel(settings) and 32 % bits == 0:
        stored = "words-1"
    operands = [model.operand(name) for name in names[:3]]
    group = _group(size, scales.shape[-2], settings, order is not None)
    if group is None:
        operands.append(model.operand(names[3]))
    value = make(
        "dequantize.gptq", *operands, bits=bits, inputs=size, group_size=group, zeros=stored, planar=planar, dtype=dtype
    )
    return Weight(f"{layer}.weight", as_unquantized(model, layer, value), model.present(names))


def _sizes(codes: Kind, zeros: Kind, settings: Mapping[str, Any], order: tuple[int, ...] | None) -> tuple[int, int]:
    """Return the inputs of a layer and the bits of its codes. Raises DataError if they are not certain."""
    word, words, outputs = codes.dtype.itemsize * 8, codes.shape[-2], codes.shape[-1]
    said = settings.get("bits")
    wide = zeros.dtype.itemsize * 8
    if order is None:
        if type(said) is not int or not 2 <= said <= 8 or words * word % said:
            raise DataError(f"without g_idx, {words:,} words of {said!r} bits do not tell the number of inputs")
        return words * word // said, said
    size = order[-1] if order else 0
    fitting = [
        bits
        for bits in range(2, 9)
        if -(-size * bits // word) == words and -(-outputs * bits // wide) == zeros.shape[-1]
    ]
    if said in fitting:
        return size, int(said)
    if len(fitting) == 1 and (said is None or settings.get("dynamic")):
        return size, fitting[0]
    raise DataError(f"{words:,} words for {size:,} inputs do not have {said!r} bits, which the configuration says")


def _group(size: int, count: int, settings: Mapping[str, Any], ordered: bool) -> int | None:
    """Return the number of neighbours with the same scale; None to look it up in g_idx.

    g_idx is not read where the configuration says that inputs are not reordered (``desc_act`` false) and its group
    size results in the groups that there are. Raises DataError if neither decides.
    """
    said = settings.get("group_size")
    asked = size if said in (-1, None) else said
    certain = type(asked) is int and asked > 0 and -(-size // asked) == count
    if certain and settings.get("desc_act") is False and "desc_act" not in str(settings.get("dynamic")):
        return int(asked)
    if ordered:
        return None
    if certain and not settings.get("desc_act"):
        return int(asked)
    raise DataError(f"groups of {said!r} of {size:,} inputs do not result in {count:,} groups; there is no g_idx")


def _by_gptqmodel(settings: Mapping[str, Any]) -> bool:
    meta = settings.get("meta")
    said = meta.get("quantizer") if isinstance(meta, Mapping) else None
    return any(str(one).lower().startswith("gptqmodel") for one in (said if isinstance(said, list) else [said]))


FAMILY = Gptq()
