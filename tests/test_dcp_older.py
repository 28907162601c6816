"""Distributed checkpoints as older torch wrote them, and with ranks that had nothing to write."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties

import lazyckpt


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = {"w": torch.arange(6.0).view(2, 3), "b": torch.ones(2, dtype=torch.bfloat16), "epoch": 3}
        dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    return tmp_path


def test_metadata_of_torch_2_2(folder: Path) -> None:
    """Its tensors' properties were those of ShardedTensor; it had neither paths of keys nor `storage_meta`."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    for entry in metadata.state_dict_metadata.values():
        if hasattr(entry, "properties"):
            entry.properties = TensorProperties(dtype=entry.properties.dtype)
    metadata.planner_data = None
    del metadata.__dict__["storage_meta"]
    path.write_bytes(pickle.dumps(metadata))
    view = lazyckpt.open(folder)
    assert view.problems == ()
    assert view["w"][...].tolist() == [[0, 1, 2], [3, 4, 5]] and view["b"].dtype == torch.bfloat16
    assert view.meta["epoch"] == 3


def test_empty_files_of_ranks_are_no_left_overs(folder: Path) -> None:
    for rank in (1, 2):
        (folder / f"__{rank}_0.distcp").touch()
    assert lazyckpt.open(folder, cache=False).problems == ()
    (folder / "__3_0.distcp").write_bytes(b"of another save")
    assert any("__3_0.distcp" in line for line in lazyckpt.open(folder, cache=False).problems)
