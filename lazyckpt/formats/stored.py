"""The raw namespace of formats that are made of many rank files: every tensor of every file, under the file's name."""

from __future__ import annotations

from ..core.index import Index, TensorSpec
from ..io.store import Store
from .torchsave import stored_tensors


def stored_specs(store: Store, index: Index) -> dict[str, TensorSpec]:
    """``file/dotted.path`` -> spec, for all files of torch.save that the checkpoint stands on. Reads their pickles."""
    specs: dict[str, TensorSpec] = {}
    for path in index.files:
        if path.endswith((".pt", ".pth", ".bin", ".ckpt")):
            name = path.rsplit("/", 1)[-1]
            specs.update(stored_tensors(store, path, f"{name}/"))
    return specs
