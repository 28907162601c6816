"""The target format of `lazyckpt convert`, and the checks of its options."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..adapting import apply_lora
from ..core.dtypes import dtype_named
from ..errors import DataError, FormatError
from ..export.megatron import check_format
from ..export.registry import convertible
from ..export.writer import Writer
from ..layouts.rename.table import ENDINGS, read_table
from ..reshaping import division
from ..view import CheckpointView
from .choices import Change, changes
from .options import matching

if TYPE_CHECKING:
    import torch

_ANY = (  # options that go with every format
    "select", "rename", "lora", "dequantize", "quantize", "quantize_skip", "layers", "keep_experts", "drop_experts",
    "upcycle",
)  # fmt: skip
_ONLY = {
    "max_shard_size": "have shards",
    "codec": "compresses",
    "ckpt_format": "has several formats",
}
_DEGREES = ("tp", "pp", "ep", "etp", "vpp", "layout", "vocab_multiple")  # what says which rank has what
_COUNTS = re.compile(r"\d{1,6}(,\d{1,6})*")  # layers of each stage


@dataclass(frozen=True, slots=True)
class Wanted:
    """The options that change the output. Degrees and counts are None unless they were given."""

    select: str | None
    dtype: str | None
    rename: str | None
    stored: bool
    max_shard_size: str | None
    codec: str | None
    dequantize: bool = False
    quantize: str | None = None
    quantize_skip: str | None = None
    lora: tuple[str, ...] = ()
    layers: str | None = None
    keep_experts: str | None = None
    drop_experts: str | None = None
    upcycle: str | None = None
    tp: int | None = None
    pp: int | None = None
    ep: int | None = None
    etp: int | None = None
    vpp: int | None = None
    layout: str | None = None
    vocab_multiple: int | None = None
    ckpt_format: str | None = None

    def describe(self) -> dict[str, Any]:
        """Return the options that were given."""
        return {name: value for name, value in asdict(self).items() if value not in (None, False, ())}

    @property
    def division(self) -> dict[str, Any]:
        """The degrees and the distribution of layers that were given, as arguments of `CheckpointView.shard`."""
        found = {name: getattr(self, name) for name in _DEGREES if getattr(self, name) is not None}
        if self.layout is not None and _COUNTS.fullmatch(self.layout):
            found["layout"] = [int(count) for count in self.layout.split(",")]
        return found

    @property
    def restacks(self) -> bool:
        """Whether the output has other layers or experts."""
        return any(one is not None for one in (self.layers, self.keep_experts, self.drop_experts, self.upcycle))

    @property
    def weights(self) -> torch.dtype:
        """The dtype of dequantized weights."""
        return dtype_named(self.dtype or "bf16").torch

    def own(self, writer: Writer) -> dict[str, Any]:
        """Return the options of a writer's plan and forecast."""
        found: dict[str, Any] = {}
        if "max_shard_size" in writer.options:
            found["max_shard_size"] = self.max_shard_size or "5GB"
        if "codec" in writer.options:
            found["codec"] = self.codec
        if "ckpt_format" in writer.options and self.ckpt_format is not None:
            found["ckpt_format"] = self.ckpt_format
        if "mesh" in writer.options and not writer.by_rank:
            found |= self.division
        if writer.dtypes and self.dtype is not None and not self.dequantize:
            found["dtype"] = self.dtype
        return found


def target_of(dest: str, to: str | None) -> Writer:
    """Return the writer for ``to`` or, if that is None, for the ending of the destination.

    Raises FormatError if neither identifies a format, or if they contradict each other."""
    known = {writer.name: writer for writer in convertible()}
    suffixes = {end: writer for writer in known.values() for end in writer.endings}
    end = next((end for end in sorted(suffixes, key=len, reverse=True) if dest.rstrip("/").endswith(end)), None)
    choices = "; ".join(f"{writer.name} ({writer.what})" for writer in known.values())
    if to is None:
        if end is None:
            raise FormatError(f"the ending of {dest!r} does not tell what to write: say --to, one of {choices}")
        return suffixes[end]
    if to not in known:
        raise FormatError(f"--to {to!r} is none of {choices}")
    if end is not None and suffixes[end].name != to:
        raise FormatError(f"--to {to} does not go with the name {dest!r}, whose ending is that of {suffixes[end].name}")
    return known[to]


def check(to: Writer, dest: str, wanted: Wanted) -> None:
    """Raise DataError for options that the format does not have."""
    for option, given in wanted.describe().items():
        kind = "mesh" if option in _DEGREES else option
        if given and kind not in (*to.options, *_ANY):
            named = "--" + option.replace("_", "-")
            takers = [writer.name for writer in convertible() if kind in writer.options]
            why = to.refused.get(kind, f"only {' and '.join(takers)} {_ONLY.get(kind)}")
            raise DataError(f"{named} cannot be had with --to {to.name}: {why}")
    degrees = ["--" + option.replace("_", "-") for option in wanted.division]
    changing = degrees if wanted.rename is None else [*degrees, "--rename"]
    if wanted.stored and changing:
        raise DataError(f"--stored writes tensors as they are stored: leave out {' and '.join(changing)}")
    if wanted.stored and (wanted.dequantize or wanted.quantize):
        raise DataError("--stored writes tensors as they are stored: leave out --dequantize and --quantize")
    if wanted.quantize_skip is not None and wanted.quantize is None:
        raise DataError("--quantize-skip needs --quantize")
    if wanted.stored and wanted.lora:
        raise DataError("--stored writes tensors as they are stored: leave out --lora")
    if wanted.stored and wanted.restacks:
        raise DataError(
            "--stored writes tensors as they are stored: leave out --layers, --keep-experts, --drop-experts, --upcycle"
        )
    experts = {
        "--keep-experts": wanted.keep_experts,
        "--drop-experts": wanted.drop_experts,
        "--upcycle": wanted.upcycle,
    }
    chosen = [option for option, text in experts.items() if text is not None]
    if len(chosen) > 1:
        raise DataError(f"{' and '.join(chosen)} exclude each other: leave one out")
    # these raise for wrong values, before anything is read
    restacking(wanted)
    division(**wanted.division)
    if wanted.ckpt_format is not None:
        check_format(wanted.ckpt_format)
    if to.by_rank and wanted.division and dest.endswith(to.endings):
        raise DataError(f"with {degrees[0]} each rank gets a folder: {dest!r} has to be a folder's name")


def restacking(wanted: Wanted) -> list[Change]:
    """Return what --layers and the options of experts do to a view, in order. Raises DataError for a wrong value."""
    return changes(wanted.layers, wanted.keep_experts, wanted.drop_experts, wanted.upcycle)


def prepared(view: CheckpointView, wanted: Wanted, to: Writer) -> CheckpointView:
    """Apply --dequantize, --lora, --layers and the options of experts, --select, --rename, --dtype and --quantize to a
    view, in this order, for the writer ``to``, which may apply --dtype itself.

    With --dequantize, the dtype is that of the dequantized weights, and other tensors keep theirs.

    Raises TensorNotFoundError if nothing is selected, and the errors of renaming and converting."""
    if wanted.dequantize:
        view = view.dequantize(wanted.weights)
    if wanted.lora:
        adapters = [_scaled(text) for text in wanted.lora]
        view = apply_lora(view, [path for path, _ in adapters], [scale for _, scale in adapters])
    for change in restacking(wanted):
        view = change(view)
    if wanted.select is not None:
        view = matching(view, wanted.select, "--select")
    if wanted.rename is not None:
        view = view.rename(read_table(wanted.rename) if wanted.rename.endswith(ENDINGS) else wanted.rename)
    if wanted.dtype is not None and not wanted.dequantize and not to.dtypes:
        view = view.astype(dtype_named(wanted.dtype).torch)
    if wanted.quantize is None:
        return view
    skip = None if wanted.quantize_skip is None else [one for one in wanted.quantize_skip.split(",") if one]
    return view.quantize(wanted.quantize, skip=skip)


def _scaled(text: str) -> tuple[str, float]:
    """Return the adapter and the scale of ``ADAPTER=SCALE``; a path may have ``=`` in it, too."""
    path, equals, scale = text.rpartition("=")
    if not equals or "/" in scale:
        return text, 1.0
    try:
        return path, float(scale)
    except ValueError:
        raise DataError(f"--lora {text!r}: write ADAPTER or ADAPTER=SCALE, as in --lora adapter=0.5") from None
