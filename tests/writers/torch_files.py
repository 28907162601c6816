"""Files that ``torch.save`` and its relatives write: each function writes one and returns ``(path, expected)``.

``expected`` is the very tree that was saved (:func:`~.torch_contents.walk` lists its tensors by path of keys), except
for :func:`write_zip64`.
"""

from __future__ import annotations

import os
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.package.package_exporter import PackageExporter
from torch.utils.serialization import config

from . import torch_contents as contents

__all__ = [
    "write_aligned",
    "write_colliding",
    "write_cyclic",
    "write_exotic",
    "write_flat",
    "write_legacy",
    "write_legacy_training",
    "write_no_crc",
    "write_package",
    "write_protocol",
    "write_single",
    "write_torchscript",
    "write_training",
    "write_views",
    "write_wrapped",
    "write_zip64",
]

Written = tuple[Path, dict[Any, Any]]


def _save(folder: Path, name: str, tree: dict[Any, Any], **options: Any) -> Written:
    path = folder / name
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # prototypes (nested tensors) and deprecations (quantized ones) inside torch
        torch.save(tree, path, **options)
    return path, tree


def write_flat(folder: Path) -> Written:
    """A flat state dict with a tied weight and a tensor of every dtype."""
    tree = contents.tied_state_dict()
    tree |= contents.classic_dtypes() | contents.modern_dtypes()  # in place: it stays the OrderedDict with _metadata
    return _save(folder, "flat.pt", tree)


def write_views(folder: Path) -> Written:
    return _save(folder, "views.pt", contents.views())


def write_wrapped(folder: Path) -> Written:
    return _save(folder, "wrapped.pt", contents.wrapped())


def write_exotic(folder: Path) -> Written:
    return _save(folder, "exotic.pt", contents.exotic())


def write_training(folder: Path) -> Written:
    return _save(folder, "training.pt", contents.training())


def write_single(folder: Path) -> tuple[Path, Tensor]:
    """A lone tensor, in no dict."""
    path, tensor = folder / "single.pt", torch.arange(12.0).view(3, 4)
    torch.save(tensor, path)
    return path, tensor


def write_colliding(folder: Path) -> Written:
    """Two tensors whose paths read the same once joined by dots."""
    return _save(folder, "colliding.pt", {"a": {"b.c": torch.zeros(2)}, "a.b": {"c": torch.ones(3)}})


def write_cyclic(folder: Path) -> Written:
    """A tree that contains itself."""
    tree: dict[Any, Any] = {"w": torch.arange(3)}
    tree["self"] = tree
    tree["list"] = [tree]
    return _save(folder, "cyclic.pt", tree)


def write_protocol(folder: Path, protocol: int) -> Written:
    """Pickle protocols 2 (torch's own choice) to 5: frames, memoised globals, out-of-order memo, bytes opcodes."""
    return _save(folder, f"protocol{protocol}.pt", contents.training(), pickle_protocol=protocol)


def write_legacy(folder: Path) -> Written:
    """The format before torch 1.6: five pickles and raw storages.

    Without the modern dtypes (torch writes them, but its own loader fails) and with every view of :func:`views`.
    """
    tree = contents.tied_state_dict()
    tree |= contents.classic_dtypes() | contents.views()
    return _save(folder, "legacy.pt", tree, _use_new_zipfile_serialization=False)


def write_legacy_training(folder: Path) -> Written:
    return _save(folder, "legacy_training.pt", contents.training(), _use_new_zipfile_serialization=False)


def write_aligned(folder: Path, alignment: int) -> Written:
    """Records aligned to ``alignment`` bytes in place of 64."""
    settings: Any = config  # torch gives the module its patch() at run time
    with settings.patch({"save.storage_alignment": alignment}):
        return _save(folder, f"aligned{alignment}.pt", contents.tied_state_dict() | contents.views())


def write_no_crc(folder: Path) -> Written:
    """The central directory says CRC 0 for every record."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        return _save(folder, "no_crc.pt", contents.tied_state_dict())
    finally:
        torch.serialization.set_crc32_options(before)


def write_zip64(folder: Path) -> tuple[Path, dict[str, dict[int, Tensor]]]:
    """A sparse file over 4 GiB, where both a record's size and a record's place need 64 bits.

    It holds ``first`` (float32, 3), ``big`` (float32, 17 x 67,108,864 elements) and ``last`` (int32, 5 x 7).
    ``expected`` gives, for each name, flat element positions and the values from there on; all other elements are zero.
    """
    path = folder / "zip64.pt"
    rows, columns = 17, 1 << 26
    tree = {
        "first": torch.zeros(3),
        "big": torch.empty(rows, columns),  # 4.25 GiB of address space, never touched
        "last": torch.zeros(5, 7, dtype=torch.int32),
    }
    with torch.serialization.skip_data():
        torch.save(tree, path)
    expected = {
        "first": {0: torch.tensor([1.0, 2.0, 3.0])},
        "big": {
            0: torch.tensor([0.5, -0.5]),
            (1 << 30) - 3: torch.arange(1.0, 7.0),  # across the 4 GiB line of the tensor, and of the file
            rows * columns - 2: torch.tensor([8.0, 9.0]),
        },
        "last": {0: torch.arange(1, 36, dtype=torch.int32)},
    }
    with zipfile.ZipFile(path) as archive, path.open("r+b") as file:
        for number, (name, pieces) in enumerate(expected.items()):  # torch numbers storages in the order it meets them
            start = _data_offset(file, archive.getinfo(f"{path.stem}/data/{number}").header_offset)
            for element, values in pieces.items():
                file.seek(start + element * tree[name].element_size())
                file.write(values.numpy().tobytes())
    stat = os.stat(path)
    if stat.st_blocks * 512 > 1 << 20:
        path.unlink()
        raise RuntimeError(f"this filesystem writes no sparse files: {stat.st_blocks * 512} bytes taken")
    return path, expected


def _data_offset(file: Any, header: int) -> int:
    """A ZIP local header is 30 bytes, then a name and an extra field whose lengths are its last two numbers."""
    file.seek(header + 26)
    name, extra = file.read(2), file.read(2)
    return header + 30 + int.from_bytes(name, "little") + int.from_bytes(extra, "little")


def _linear() -> nn.Module:
    torch.manual_seed(8)
    return nn.Linear(3, 2)


def _quietly(write: Callable[[], object]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated; it is what is wanted here all the same
        write()


def write_torchscript(folder: Path) -> Written:
    path, module = folder / "script.pt", _linear()
    _quietly(lambda: torch.jit.save(torch.jit.script(module), path))
    return path, module.state_dict()


def write_package(folder: Path) -> Written:
    path, state = folder / "package.pt", _linear().state_dict()
    with PackageExporter(path) as exporter:
        exporter.save_pickle("model", "model.pkl", dict(state))
    return path, state
