"""Faults of files of torch.save, of files of ranks, of trainers' folders, and of Zarr hierarchies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from .fault import (
    FAILS,
    Fault,
    both,
    copy,
    cut,
    edit,
    edit_json,
    flip,
    record,
    remove,
    rename,
    storage,
)

_VERL, _HSDP = "rank_files/verl_fsdp2/ckpt", "rank_files/verl_hsdp/ckpt"
_TRAINER, _TITAN, _LIGHTNING = "trainers/trainer_llama/ckpt", "trainers/torchtitan/ckpt", "trainers/lightning_fsdp/ckpt"


def weights() -> dict[str, torch.Tensor]:
    """A model that is large enough to have a usual size of elements."""
    made = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return 0.02 * torch.randn(*shape, generator=made)

    state = {"model.embed_tokens.weight": randn(128, 64)}
    for n in range(2):
        state[f"model.layers.{n}.mlp.up.weight"] = randn(256, 64)
        state[f"model.layers.{n}.mlp.up.bias"] = randn(256)
    return state


def _torch(change: Any = None) -> Any:
    def make(folder: Path) -> Path:
        path = folder / "model.pt"
        torch.save(weights(), path)
        if change is not None:
            change(folder)
        return path

    return make


def _views(folder: Path) -> Path:
    torch.save({"w": torch.zeros(1 << 16)[:64] + 0, "v": torch.randn(1 << 20)[:64]}, folder / "model.pt")
    return folder / "model.pt"


def _no_crc(folder: Path) -> Path:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(weights(), folder / "model.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    return folder / "model.pt"


def _legacy(folder: Path) -> Path:
    torch.save(weights(), folder / "model.pt", _use_new_zipfile_serialization=False)
    cut("model.pt", 0.9)(folder)
    return folder / "model.pt"


def _training(change: Any) -> Any:
    """A file of a training loop, whose optimizer has made three steps."""

    def make(folder: Path) -> Path:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 8))
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        for _ in range(3):
            net(torch.randn(4, 64)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}
        change(state["optimizer"]["state"])
        torch.save(state, folder / "train.pt")
        return folder / "train.pt"

    return make


def _forgotten(states: Any) -> None:
    states[0]["exp_avg"].zero_()
    states[0]["exp_avg_sq"].zero_()


def _shape(states: Any) -> None:
    states[0]["exp_avg"] = states[0]["exp_avg"].t().contiguous()


def _replica(state: dict[str, Any]) -> None:
    tensor = state["emb.weight"]
    getattr(tensor, "_local_tensor", tensor).view(-1)[0] += 0.5


def _zarr(change: Any, **options: Any) -> Any:
    """A hierarchy of zarr-python: one array of four chunks."""

    def make(folder: Path) -> Path:
        import numpy as np
        import zarr

        root = folder / "x.zarr"
        group = zarr.open_group(str(root), mode="w")
        made = {"crc32c": [zarr.codecs.Crc32cCodec()], "zstd": [zarr.codecs.ZstdCodec(checksum=True)], "none": None}
        array = group.create_array(
            "w", shape=(64, 64), chunks=(16, 64), dtype="float32", compressors=made[options.get("codec", "none")]
        )
        array[:] = np.random.default_rng(0).standard_normal((64, 64))
        change(root)
        return root

    return make


def _export(change: Any) -> Any:
    """An export of lazyckpt to Zarr."""

    def make(folder: Path) -> Path:
        import lazyckpt

        torch.save(weights(), folder / "model.pt")
        lazyckpt.open(folder / "model.pt").to_zarr(folder / "x.zarr", chunk="16KB")
        change(folder / "x.zarr")
        return folder / "x.zarr"

    return make


def _chunk(root: Path) -> Path:
    return sorted(path for path in root.rglob("*") if path.is_file() and path.suffix != ".json")[0]


def _drop(root: Path) -> None:
    _chunk(root).unlink()


def _flip_chunk(root: Path) -> None:
    path = _chunk(root)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def _cut_chunk(root: Path) -> None:
    path = _chunk(root)
    path.write_bytes(path.read_bytes()[:-7])


OTHERS = (
    Fault("a flipped bit in a storage", "torch.save", "", _torch(flip("model.pt", storage)), "default",
          "wrong-checksum", file="model.pt"),
    Fault("a flipped bit in the pickle", "torch.save", "", _torch(flip("model.pt", record("data.pkl"))), FAILS),
    Fault("a flipped bit in the record `version`", "torch.save", "", _torch(flip("model.pt", record("/version"))),
          "default", "wrong-checksum", file="model.pt"),
    Fault("the file is cut off", "torch.save", "", _torch(cut("model.pt")), FAILS),
    Fault("the file is cut off", "torch.save (legacy)", "", _legacy, FAILS),
    Fault("the writer recorded no checksums", "torch.save", "", _no_crc, "default", "no-checksum", file="model.pt"),
    Fault("most bytes of a file belong to no tensor", "torch.save", "", _views, "quick", "oversized-file",
          file="model.pt"),
    Fault("a safetensors file is named .pt", "torch.save", "huggingface/llama_single/ckpt",
          both(remove("config.json"), rename("model.safetensors", "pytorch_model.bin")), "quick", "misnamed-file",
          file="pytorch_model.bin"),
    Fault("the moments of a parameter are zero after three steps", "torch.save", "", _training(_forgotten),
          "default", "zero-moments", tensor="0.weight"),
    Fault("the first moment of a parameter is zero, the second is not", "torch.save", "",
          _training(lambda s: s[0]["exp_avg"].zero_()), "default", "zero-moments", tensor="0.weight"),
    Fault("a moment has another shape than its parameter", "torch.save", "", _training(_shape), "quick",
          "wrong-moment", tensor="0.weight"),
    Fault("a second moment is negative", "torch.save", "",
          _training(lambda s: s[0]["exp_avg_sq"].view(-1)[7].fill_(-1)), "default", "wrong-moment",
          tensor="0.weight", text="row 0"),
    Fault("a parameter records another step", "torch.save", "", _training(lambda s: s[0]["step"].add_(2)), "default",
          "differing-steps", tensor="0.weight"),
    Fault("the file of a rank is missing", "FSDP rank files", _VERL, remove("model_world_size_3_rank_1.pt"), "quick",
          "missing-file", file="rank_1"),
    Fault("the file of a rank is cut off", "FSDP rank files", _VERL, cut("model_world_size_3_rank_1.pt"), "quick",
          "unreadable-file", file="rank_1"),
    Fault("the file of a rank is a copy of another's", "FSDP rank files", _VERL,
          copy("model_world_size_3_rank_0.pt", "model_world_size_3_rank_1.pt"), "default", "missing-elements"),
    Fault("files of a save with fewer ranks lie beside", "FSDP rank files", _VERL,
          copy("model_world_size_3_rank_0.pt", "model_world_size_2_rank_0.pt"), "quick", "left-over-file"),
    Fault("replicas differ between the groups of HSDP", "FSDP rank files", _HSDP,
          edit("model_world_size_*_rank_2.pt", _replica), "full", "differing-replicas", tensor="emb.weight",
          text="rank_2"),
    Fault("the optimizer's file is missing", "Hugging Face Trainer", _TRAINER, remove("checkpoint-4/optimizer.pt"),
          "quick", "missing-optimizer"),
    Fault("the weights are missing", "Hugging Face Trainer", _TRAINER, remove("checkpoint-4/model.safetensors"),
          "quick", "missing-weights"),
    Fault("the trainer's state is of another step than the folder", "Hugging Face Trainer", _TRAINER,
          edit_json("checkpoint-4/trainer_state.json", lambda a: a.update(global_step=7)), "quick", "step-mismatch"),
    Fault("the newest checkpoint was not finished", "torchtitan", _TITAN, remove("step-2/.metadata"), "quick",
          "skipped-checkpoint", file="step-2", text="not finished"),
    Fault("the file of a rank is missing", "Lightning", _LIGHTNING, remove("__1_0.distcp"), "quick", "missing-file",
          file="__1_0"),
    Fault("a chunk is missing", "Zarr", "", _zarr(_drop), "default", "absent-chunks", tensor="w"),
    Fault("a chunk is missing", "Zarr (export of lazyckpt)", "", _export(_drop), "default", "missing-elements",
          file="embed_tokens/weight/c/0/0"),
    Fault("a flipped bit in a chunk with CRC32C", "Zarr", "", _zarr(_flip_chunk, codec="crc32c"), "default",
          "wrong-checksum", file="w/c/0/0", tensor="w"),
    Fault("a flipped bit in a Zstandard frame with a checksum", "Zarr", "", _zarr(_flip_chunk, codec="zstd"), "default",
          "unreadable-file", tensor="w"),
    Fault("a chunk is cut off", "Zarr", "", _zarr(_cut_chunk), "default", "unreadable-file", file="w/c/0/0",
          tensor="w"),
    Fault("`zarr.json` of an array cannot be parsed", "Zarr", "", _zarr(lambda r: (r / "w/zarr.json").write_text("{")),
          FAILS),
    Fault("the shape in `zarr.json` is larger than what was written", "Zarr", "",
          _zarr(edit_json("w/zarr.json", lambda a: a.update(shape=[128, 64]))), "default", "absent-chunks", tensor="w"),
)  # fmt: skip
