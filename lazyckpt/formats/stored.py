"""The raw namespace of formats that are made of many rank files: every tensor of every file, under the file's name."""

from __future__ import annotations

from ..core.index import Index, TensorSpec
from ..io.store import Store
from ..io.torchfile import Pickles
from .torchsave import stored_tensors


def stored_specs(store: Store, index: Index) -> dict[str, TensorSpec]:
    """``file/dotted.path`` -> spec, for all files of torch.save that the checkpoint stands on. Reads their pickles."""
    specs: dict[str, TensorSpec] = {}
    pickles = Pickles()
    for path in index.files:
        if path.endswith(".pt"):
            parts = path.split("/")
            # a rank of Megatron's is a folder; all others keep the files of a tag side by side
            name = "/".join(parts[-2:] if index.format == "megatron" else parts[-1:])
            specs.update(stored_tensors(store, path, f"{name}/", pickles))
    return specs
