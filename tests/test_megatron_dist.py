"""megatron-core's distributed checkpoints: each layer and expert a tensor, whatever the parallel layout was."""

from __future__ import annotations

import argparse
import io
import json
import pickle
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, save

import lazyckpt
from lazyckpt.core.box import Box, c_strides
from lazyckpt.core.extents import Extent
from lazyckpt.core.placement import Part
from lazyckpt.core.specs import Fragment, TensorSpec
from lazyckpt.formats.megatron.buckets import ranks_of, walk
from lazyckpt.formats.megatron.stacks import regridded
from lazyckpt.io.storage.local import LocalStore
from lazyckpt.tensor import LazyTensor
from lazyckpt.testing.contract import CHECKS, Check
from lazyckpt.testing.counting import opened
from lazyckpt.testing.oracle import indexed, keys, same

from .index_caches import cache, entries, loads, opened_twice
from .writers import Case
from .writers.megatron_core import CASES, load_case

__all__ = ["cache", "loads"]

# buffers of the distributed optimizer as ranks hold them: what stands where follows from chunks and arguments
BUCKETS = [name for name, spec in CASES.items() if spec.distributed and spec.dist == "dp_reshardable"]
STACKS = [name for name in BUCKETS if CASES[name].grouped]  # experts of which it does not
KINDS = ("tp2_gelu_tied", "pp2_vpp2", "ep2", "tp2_mixed", "tp2_dp2_distopt_buckets")


@pytest.fixture(scope="module")
def cases(megatron_folder: Path) -> dict[str, Case]:
    there = [name for name in CASES if (megatron_folder / name).is_dir()]  # (not all are recorded)
    return {name: _case(load_case(megatron_folder, name, "dist"), name) for name in there}


def _case(case: Case, name: str) -> Case:
    """With the names of such a checkpoint: grouped experts are saved one by one, as `SequentialMLP` names them."""
    spec = CASES[name]
    truth = {}
    for state, tensors in case.truth.items():
        if state == "step" and spec.distributed:
            continue
        truth[state] = {}
        for key, whole in tensors.items():
            base, found, matrix = key.partition("experts.weight")
            if not found:
                truth[state][key] = whole
                continue
            if name in STACKS and state != "weights":
                continue
            for e in range(spec.experts or 0):
                one = f"{base}experts.local_experts.{e}.linear_fc{matrix}.weight"
                truth[state][one] = whole[e].T.contiguous() if whole.ndim == 3 else whole
    return Case(case.path, truth, case.info | {"archives": True})


@pytest.mark.product
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", KINDS)
def test_contract(cases: dict[str, Case], name: str, check: Check) -> None:
    check(cases[name])


@pytest.mark.parametrize("name", CASES)
def test_every_state_equals_what_the_ranks_held(cases: dict[str, Case], name: str) -> None:
    case, spec = cases[name], CASES[name]
    view = lazyckpt.open(case.path)
    assert set(view.states) == set(case.truth)
    for state, truth in case.truth.items():
        assert set(view.states[state]) == set(truth), state
        for key, whole in truth.items():
            same(view.states[state][key][...], whole, (state, key))
    assert (view.format, view.mesh) == ("megatron-dist", lazyckpt.Mesh(spec.tp, spec.pp, spec.dp, spec.ep))
    assert (view.meta["iteration"], view.meta["checkpoint_version"]) == (3, 3.0)
    assert [line for line in view.problems if "grouped GEMM are one array" not in line] == []
    assert bool(view.problems) == (name in STACKS), "said, and left in view.stored"
    assert not any("_extra_state" in key for key in view.meta) and any("rng_state" in key for key in view.meta)


@pytest.mark.slow
def test_the_model_on_one_rank_gives_the_parallel_models_logits(megatron_logits: dict[str, dict[str, float]]) -> None:
    found = megatron_logits["dist"]
    assert len(found) >= sum(not spec.grouped for spec in CASES.values()) - 2  # (two are not recorded)
    assert {n: d for n, d in found.items() if d > (0.03 if CASES[n].bf16 else 1e-5)} == {}


def _changed(case: Case, folder: Path, change: dict[str, Any] | None) -> Path:
    """A copy whose args are others; None: has none, as where Megatron-LM is not the one who saves."""
    shutil.copytree(case.path, folder)
    path = next(folder.glob("*/common.pt"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # megatron-core, on import: enums of it are among the args
        common = torch.load(path, weights_only=False)
    if change is None:
        del common["args"]
    else:
        vars(common["args"]).update(change)
    torch.save(common, path)
    return folder


@pytest.mark.parametrize("name", [name for name in BUCKETS if name not in STACKS])
def test_buckets_without_arguments(cases: dict[str, Case], tmp_path: Path, name: str) -> None:
    view = lazyckpt.open(_changed(cases[name], tmp_path / "run", None))
    assert view.problems == ()
    for state in ("fp32", "exp_avg", "exp_avg_sq"):
        truth = cases[name].truth.get(state, {})
        trained = {key for key in view if not key.endswith("expert_bias")}
        assert set(view.states[state]) == trained, "norms have the names they are saved under"
        for key in set(truth) & set(view):
            same(view.states[state][key][...], truth[key], (state, key))
    text = view.states["exp_avg"]["decoder.layers.0.self_attention.linear_proj.weight"].explain()
    assert "as its chunks confirm" in text and "there are no args" in text


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("pp2_ep2_distopt", {"expert_model_parallel_size": 1}, "4 model-parallel ranks have buffers of parameters"),
        ("pp2_ep2_distopt", {"pipeline_model_parallel_size": 1}, "model-parallel ranks have buffers of parameters"),
        ("pp2_ep2_distopt", {"pipeline_model_parallel_size": 1 << 19}, "pp=524288"),
        ("pp2_ep2_distopt", {"num_layers": 3}, "do not tell which layers"),
        ("pp2_dp2_vpp2_distopt_tied", {"virtual_pipeline_model_parallel_size": None}, "are expected for its chunks"),
        ("tp2_pp2_distopt_tied", {"decoder_first_pipeline_num_layers": 1}, "do not fill"),
        ("tp2_pp2_distopt_tied", {"tensor_model_parallel_size": 4}, "tp=4"),
        ("ep2_distopt", {"moe_grouped_gemm": True, "transformer_impl": None}, ""),
    ],
)
def test_buckets_that_arguments_do_not_fit(
    cases: dict[str, Case], tmp_path: Path, name: str, change: dict[str, Any], words: str
) -> None:
    """Chunks that end elsewhere refute what the arguments say: no state is named on a guess."""
    view = lazyckpt.open(_changed(cases[name], tmp_path / "run", change))
    told = " ".join(line for line in view.problems if line.code == "undecided-layout")
    assert words in told and bool(told) == bool(words), view.problems
    for state, tensors in view.states.items():
        for key, t in tensors.items():
            if key in cases[name].truth[state]:
                same(t[...], cases[name].truth[state][key], (state, key))


def test_a_lost_file_of_buckets(cases: dict[str, Case], tmp_path: Path) -> None:
    case = cases["tp2_dp2_distopt_buckets"]
    folder = _changed(case, tmp_path / "run", {})
    next(folder.glob("*/__2_0.distcp")).unlink()
    states = lazyckpt.open(folder).states
    failed = 0
    for state in ("fp32", "exp_avg", "exp_avg_sq"):
        for key, t in states[state].items():
            try:
                same(t[...], case.truth[state][key], (state, key))
            except lazyckpt.MissingFileError as e:
                failed += 1
                assert "__2_0.distcp" in str(e)
    assert 0 < failed < 3 * len(states["fp32"])


def test_where_parameters_lie_in_buckets() -> None:
    assert walk([4, 3, 100], [168]) is None, "3 from element 128 on, 4 from 192 on"
    assert walk([4, 3, 100], [196]) == [(0, 192), (0, 128), (0, 0)]
    assert walk([4, 3, 100], [100, 68]) == [(1, 64), (1, 0), (0, 0)]
    assert walk([4, 3, 100], [128, 3, 4]) == [(2, 0), (1, 0), (0, 0)], "the next has a bucket of its own"
    assert walk([4, 3, 100], [128, 3, 5]) is walk([4, 3, 100], [128, 3]) is walk([4], [4, 4]) is walk([], [1]) is None
    ends = [{0, 100, 128, 131, 192, 196}]
    assert ranks_of(ends, ends) == 1
    assert ranks_of([ends[0] | {86, 172}], ends) is None, "cuts are where whole widths end"
    assert ranks_of([ends[0] | {64}], ends) == 4, "4 ranks of 64: other cuts are where something ends"
    assert ranks_of([ends[0] - {131}], ends) is None


def test_a_layer_of_a_stack_reads_its_own_bytes(cases: dict[str, Case]) -> None:
    name = "decoder.layers.1.mlp.linear_fc1.weight"
    view, store = opened(cases["tp4_gelu"].path)
    same(view[name][3:5], cases["tp4_gelu"].truth["weights"][name][3:5], name)
    before = store.bytes
    same(view[name][3:5], cases["tp4_gelu"].truth["weights"][name][3:5], "the archives are known now")
    assert store.bytes - before == 2 * 16 * 4
    text = view[name].explain()
    assert "layer 1 of the 2 that are stacked" in text and "stored as 'decoder.layers.mlp.linear_fc1.weight'" in text
    assert view.stored["decoder.layers.mlp.linear_fc1.weight"].shape[0] == 2


@pytest.mark.slow
def test_under_hugging_faces_names(cases: dict[str, Case]) -> None:
    for name, table in (("tp2_pp2_bf16", "llama"), ("ep2", "mixtral"), ("tp2_gelu_tied", "gpt2")):
        view = lazyckpt.open(cases[name].path)
        if table == "mixtral":  # with shared experts, which several families have: one has to be named
            with pytest.raises(lazyckpt.FormatError):
                view.rename("hf")
        there = view.rename(table if table == "mixtral" else "hf")
        back = there.rename("megatron")
        left = [key for key in there if key in view]
        assert left == [] or all("shared_experts" in key for key in left), (table, left)
        for state, truth in cases[name].truth.items():
            for key, whole in truth.items():
                if state == "weights" or key in back.states[state]:
                    same(back.states[state][key][...], whole, (name, state, key))


def test_the_folder_of_the_run_and_tags(cases: dict[str, Case], tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(cases["single"].path, run)
    iteration = next(p for p in run.iterdir() if p.is_dir())
    view = lazyckpt.open(run)
    assert list(lazyckpt.open(iteration)) == list(view) == list(lazyckpt.open(run, tag="3"))
    shutil.copytree(iteration, run / "iter_0000009")
    assert any("iter_0000009" in line and line.code == "unfinished-save" for line in lazyckpt.open(run).problems)
    with pytest.raises(lazyckpt.MissingFileError, match="iter_0000004"):
        lazyckpt.open(run, tag="4")


@pytest.fixture
def copied(cases: dict[str, Case], tmp_path: Path) -> Path:
    run = tmp_path / "run"
    shutil.copytree(cases["tp2_pp2_bf16"].path, run)
    return next(p for p in run.iterdir() if p.is_dir())


def test_without_common_pt(copied: Path, cases: dict[str, Case]) -> None:
    (copied / "common.pt").unlink()
    view = lazyckpt.open(copied)
    assert any((line.code, line.path) == ("missing-file", "common.pt") for line in view.problems)
    name = "decoder.layers.3.self_attention.linear_qkv.weight"
    same(view[name][...], cases["tp2_pp2_bf16"].truth["weights"][name], "the tensors are intact")


def test_without_metadata_json(copied: Path) -> None:
    (copied / "metadata.json").unlink()
    view = lazyckpt.open(copied)
    assert view.format == "megatron-dist" and any(line.code == "unfinished-save" for line in view.problems)


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "does not name"), ('{"sharded_backend": "tape"}', "'tape' is none"), ("[]", "does not name")],
)
def test_a_metadata_json_that_cannot_be(copied: Path, text: str, words: str) -> None:
    (copied / "metadata.json").write_text(text)
    with pytest.raises(lazyckpt.LazyckptError, match=words):
        lazyckpt.open(copied)


def test_a_lost_file(copied: Path) -> None:
    (copied / "__3_0.distcp").unlink()
    view = lazyckpt.open(copied)
    assert any("__3_0.distcp" in line for line in view.problems)
    failed = 0
    for t in view.values():
        try:
            t[...]
        except lazyckpt.MissingFileError as e:
            failed += 1
            assert "__3_0.distcp" in str(e)
    assert 0 < failed < len(view)


def test_ranges_of_flattened_parameters(tmp_path: Path) -> None:
    """What megatron-core up to 0.14 makes of a distributed optimizer ("fully_sharded_model_space"): blocks, each flat.
    Its reshaping is imitated (today's version has it no more); torch writes the files."""
    whole = torch.arange(4 * 6 * 8.0).view(4, 6, 8)
    weight = "decoder.layers.self_attention.linear_proj.weight"
    key = f"optimizer.state.exp_avg.{weight}"
    folder = tmp_path / "iter_0000001"
    save({key: whole.view(1, 1, 1, -1), weight: whole * 2}, storage_writer=FileSystemWriter(folder))
    metadata: Any = pickle.loads((folder / ".metadata").read_bytes())
    metadata.mcore_data = {key: {"nd_reformulated_orig_global_shape": (4, 6, 8)}}
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    view = lazyckpt.open(folder)
    for n in range(4):
        name = f"decoder.layers.{n}.self_attention.linear_proj.weight"
        same(view[name][...], whole[n] * 2, name)
        same(view.states["exp_avg"][name][...], whole[n], "in its own shape")
        same(view.states["exp_avg"][name][1:5:2, 3:6], whole[n][1:5:2, 3:6], "a slice")
    metadata.mcore_data[key]["nd_reformulated_orig_global_shape"] = (4, 6, 9)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(lazyckpt.CorruptError, match="cannot be"):
        lazyckpt.open(folder, cache=False)


def test_parts_of_fused_matrices_are_put_together(tmp_path: Path) -> None:
    """As ssm/mamba_mixer.py and ssm/gated_delta_net.py save them: each part a tensor, its name at the end."""
    torch.manual_seed(0)
    mixers = {
        "decoder.layers.0.mixer.in_proj.weight": (["z", "x", "B", "C", "dt"], [8, 8, 3, 3, 2]),
        "decoder.layers.0.mixer.conv1d.bias": (["x", "B", "C"], [8, 3, 3]),
        "decoder.layers.1.self_attention.in_proj.weight": (
            ["query", "key", "value", "z", "beta", "alpha"],
            [4, 4, 6, 6, 2, 2],
        ),
        "decoder.layers.1.self_attention.conv1d.weight": (["query", "key", "value"], [4, 4, 6]),
    }
    wholes = {name: torch.randn(sum(sizes), 5) for name, (_, sizes) in mixers.items()}
    keys_ = {
        f"{name}.{part}": block
        for name, (parts, sizes) in mixers.items()
        for part, block in zip(parts, wholes[name].split(sizes), strict=True)
    }
    folder = tmp_path / "iter_0000001"
    save(dict(keys_), storage_writer=FileSystemWriter(folder))
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    view = lazyckpt.open(folder)
    assert set(view) == set(wholes) and set(view.stored) == set(keys_)
    for name, whole in wholes.items():
        same(view[name][...], whole, name)
        same(view[name][2:9, 1:], whole[2:9, 1:], name)


def test_a_grid_of_flat_blocks_in_ranges(tmp_path: Path) -> None:
    """Blocks of several tensor-parallel ranks, each cut over data-parallel ones."""
    whole = torch.arange(4 * 6 * 8, dtype=torch.float32).view(4, 6, 8)
    grid = whole.view(4, 1, 6, 2, 4).permute(0, 1, 3, 2, 4).reshape(4, 1, 2, 24)  # (4, 1, 2) blocks of [1, 6, 4]
    (tmp_path / "flat").write_bytes(grid.numpy().tobytes())
    fragments = []
    for n, (a, b) in enumerate((a, b) for a in range(4) for b in range(2)):
        for low, high in ((0, 7), (7, 24)):
            shape = (1, 1, 1, high - low)
            extent = Extent("flat", (n * 24 + low) * 4, torch.float32, shape, c_strides(shape))
            fragments.append(Fragment(extent, shape, (Part(Box.of(shape), (a, 0, b, low)),)))
    spec = regridded(TensorSpec("t", tuple(grid.shape), torch.float32, tuple(fragments)), (4, 6, 8))
    tensor = LazyTensor(LocalStore(tmp_path), spec)
    same(tensor[...], whole, "whole")
    for key in keys(whole.shape, "grid", 20):
        same(tensor[key], indexed(whole, key), key)
    assert "a grid of 4x1x2 flat blocks" in tensor.explain()
    assert regridded(spec, None) is spec and regridded(spec, (4, 6, 8)) is spec


# -- the zarr backend


def write_zarr(folder: Path, key: str, whole: torch.Tensor, chunk: tuple[int, ...], dtype: str) -> None:
    """As megatron-core's strategies/zarr.py until 0.15: zarr v2, no compression, edge chunks in full size."""
    (folder / key).mkdir(parents=True)
    about = {"chunks": chunk, "compressor": None, "dtype": dtype, "fill_value": None, "filters": None, "order": "C"}
    (folder / key / ".zarray").write_text(json.dumps(about | {"shape": list(whole.shape), "zarr_format": 2}))
    grid = [range(-(-n // c)) for n, c in zip(whole.shape, chunk, strict=True)]
    for place in torch.cartesian_prod(*map(torch.tensor, map(list, grid))).reshape(-1, len(grid)).tolist():
        padded = torch.zeros(chunk, dtype=whole.dtype)
        block = whole[tuple(slice(p * c, (p + 1) * c) for p, c in zip(place, chunk, strict=True))]
        padded[tuple(slice(n) for n in block.shape)] = block
        (folder / key / ".".join(map(str, place))).write_bytes(bytes(padded.flatten().view(torch.uint8).numpy()))


@pytest.fixture
def zarr_folder(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = tmp_path / "iter_0000002"
    torch.manual_seed(3)
    tensors = {
        "decoder.layers.mlp.linear_fc2.weight": torch.randn(3, 5, 8).to(torch.bfloat16),
        "optimizer.state.fp32_param.decoder.layers.mlp.linear_fc2.weight": torch.randn(3, 5, 8),
        "decoder.final_layernorm.weight": torch.randn(8),
    }
    write_zarr(
        folder,
        "decoder.layers.mlp.linear_fc2.weight",
        tensors["decoder.layers.mlp.linear_fc2.weight"],
        (1, 5, 4),
        "bfloat16",
    )
    for key in list(tensors)[1:]:
        write_zarr(folder, key, tensors[key], (1, 2, 4) if tensors[key].ndim == 3 else (8,), "<f4")
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))
    torch.save({"iteration": 2}, folder / "common.pt")
    (folder / "rng_state").mkdir()
    torch.save([{"seed": 5}], folder / "rng_state" / "shard_0.0_1.1.pt")
    return folder, tensors


def test_the_zarr_backend(zarr_folder: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, tensors = zarr_folder
    view = lazyckpt.open(folder)
    assert (view.format, view.problems) == ("megatron-zarr", ())
    for n in range(3):
        name = f"decoder.layers.{n}.mlp.linear_fc2.weight"
        same(view[name][...], tensors["decoder.layers.mlp.linear_fc2.weight"][n], name)
        same(view.states["fp32"][name][1:, 2:7], tensors[list(tensors)[1]][n][1:, 2:7], "edge chunks")
    same(view["decoder.final_layernorm.weight"][...], tensors["decoder.final_layernorm.weight"], "one chunk")
    assert view.meta["iteration"] == 2 and view.meta["rng_state/shard_0.0_1.1"] == [{"seed": 5}]


def test_states_of_modules_in_the_zarr_backend(zarr_folder: tuple[Path, dict[str, torch.Tensor]]) -> None:
    """strategies/zarr.py `ZarrSaveShardedStrategy`: an object is a file of torch.save in the folder of its key."""
    folder, _ = zarr_folder
    held = {n: _fp8_state(n, "bytes") for n in range(3)}
    extra = folder / "decoder.layers.mlp.linear_fc2._extra_state"
    extra.mkdir()
    for n, (packed, _) in held.items():
        torch.save(packed, extra / f"shard_{n}_3.pt")
    view = lazyckpt.open(folder)
    found: Any = view.meta["extra_states"]
    assert set(found) == {f"decoder.layers.{n}.mlp.linear_fc2" for n in held} and not view.problems
    for n, (_, truth) in held.items():
        scales = found[f"decoder.layers.{n}.mlp.linear_fc2"]["scale_fwd"]
        assert torch.equal(torch.from_numpy(scales.copy()), truth["scale_fwd"])


def test_a_lost_chunk(zarr_folder: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, tensors = zarr_folder
    key = "decoder.layers.mlp.linear_fc2.weight"
    (folder / key / "1.0.1").unlink()
    (folder / key / "2.0.0").write_bytes(b"short")
    view = lazyckpt.open(folder)
    assert any(line.code == "missing-elements" for line in view.problems)
    same(view["decoder.layers.0.mlp.linear_fc2.weight"][...], tensors[key][0], "another layer")
    same(view["decoder.layers.1.mlp.linear_fc2.weight"][:, :4], tensors[key][1][:, :4], "what is there")
    with pytest.raises(lazyckpt.MissingFileError, match=r"1\.0\.1 is missing"):
        view["decoder.layers.1.mlp.linear_fc2.weight"][...]
    with pytest.raises(lazyckpt.MissingFileError, match="has 5 bytes"):
        view["decoder.layers.2.mlp.linear_fc2.weight"][...]


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "<q9"},
        {"shape": [3, -5, 8]},
        {"shape": [1 << 40, 1 << 40, 1 << 40]},
        {"shape": [1 << 30, 5, 8]},
        {"chunks": [1, 0, 4]},
        {"chunks": [1, 5]},
        {"compressor": {"id": "zlib"}},
        {"order": "F"},
        {"shape": "text"},
        {"zarr_format": 3},
    ],
    ids=str,
)
def test_an_array_that_cannot_be(zarr_folder: tuple[Path, dict[str, torch.Tensor]], change: dict[str, Any]) -> None:
    path = zarr_folder[0] / "decoder.layers.mlp.linear_fc2.weight" / ".zarray"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    view = lazyckpt.open(zarr_folder[0])
    (line,) = view.problems
    assert (line.code, line.path) == ("unreadable-file", "decoder.layers.mlp.linear_fc2.weight") and ".zarray" in line
    assert "decoder.final_layernorm.weight" in view and not any("linear_fc2" in name for name in view)


# -- states of Transformer Engine's modules: megatron/core/extensions/transformer_engine.py `_encode_extra_state`


class _Planner(DefaultSavePlanner):
    """megatron/core/dist_checkpointing/strategies/torch.py `MCoreSavePlanner`: objects are packed already."""

    def transform_object(self, write_item: Any, object: Any) -> Any:
        return object if isinstance(object, io.BytesIO) else super().transform_object(write_item, object)  # type: ignore[no-untyped-call]


def _packed(value: Any) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer


def _fp8_state(number: int, form: str) -> Any:
    state = {"scale_fwd": torch.full((3,), float(number)), "amax_history_fwd": torch.rand(4, 3), "recipe": "delayed"}
    if form == "pickle":  # since Transformer Engine 2
        return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8), state
    return _packed(state), state


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("form", ["pickle", "bytes"])
def test_states_of_modules_are_read_one_by_one(tmp_path: Path, form: str) -> None:
    folder = tmp_path / "ckpt"
    names = {
        "decoder.layers.self_attention.linear_qkv._extra_state/shard_0_2": "decoder.layers.0.self_attention.linear_qkv",
        "decoder.layers.self_attention.linear_qkv._extra_state/shard_1_2": "decoder.layers.1.self_attention.linear_qkv",
        "decoder.layers.mlp.experts.experts.linear_fc1._extra_state/shard_1.3_2.4":
            "decoder.layers.1.mlp.experts.local_experts.3.linear_fc1",
        "output_layer._extra_state/shard_0_1": "output_layer",
    }  # fmt: skip
    held = {key: _fp8_state(n, form) for n, key in enumerate(names)}
    state: dict[str, Any] = {"output_layer.weight": torch.ones(4, 2), "rng_state/shard_0_1": [{"x": 1}]}
    state |= {key: _packed([one]) for key, (one, _) in held.items()}
    state["embedding._extra_state/shard_0_1"] = _packed([None])
    save(state, storage_writer=FileSystemWriter(folder), planner=_Planner())
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    torch.save({"args": argparse.Namespace(fp8="hybrid", num_layers=2), "iteration": 1}, folder / "common.pt")
    view = lazyckpt.open(folder)
    assert list(view) == ["output_layer.weight"] and not view.problems
    found: Any = view.meta["extra_states"]
    assert set(found) == {*names.values(), "embedding"} and found["embedding"] is None
    for key, (_, truth) in held.items():
        one = found[names[key]]
        assert one["recipe"] == "delayed"
        for name in ("scale_fwd", "amax_history_fwd"):
            assert torch.equal(torch.from_numpy(one[name].copy()), truth[name])
    assert not any("_extra_state" in key for key in view.meta)
    assert "extra_states" in view.to_dcp(tmp_path / "dcp").left_out
    view.to_zarr(tmp_path / "zarr")
    assert lazyckpt.open(tmp_path / "zarr").meta["extra_states"] == "<states of 5 modules, by name>"
    torch.save({"args": argparse.Namespace(fp8=None), "iteration": 1}, folder / "common.pt")
    assert "extra_states" not in lazyckpt.open(folder).meta


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_states_of_modules_are_in_the_index_cache(tmp_path: Path, cache: Path, loads: list[bool]) -> None:
    packed, truth = _fp8_state(3, "pickle")
    state = {"a.weight": torch.ones(2), "a._extra_state/shard_0_1": _packed([packed])}
    save(state, storage_writer=FileSystemWriter(tmp_path / "ckpt"), planner=_Planner())
    (tmp_path / "ckpt" / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    torch.save({"iteration": 1}, tmp_path / "ckpt" / "common.pt")
    for view in opened_twice(tmp_path / "ckpt"):
        found: Any = pickle.loads(pickle.dumps(view)).meta["extra_states"]
        assert torch.equal(torch.from_numpy(found["a"]["scale_fwd"].copy()), truth["scale_fwd"])
    assert loads == [False, True] and entries(cache)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_state_of_a_module_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    bad = torch.frombuffer(bytearray(pickle.dumps({"scale_fwd": _Runs()})), dtype=torch.uint8)
    state = {
        "a.weight": torch.ones(2),
        "a._extra_state/shard_0_1": _packed([bad]),
        "b._extra_state/shard_0_1": _packed([bad[:20].clone()]),
    }
    save(state, storage_writer=FileSystemWriter(tmp_path), planner=_Planner())
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    torch.save({"iteration": 1}, tmp_path / "common.pt")
    found: Any = lazyckpt.open(tmp_path).meta["extra_states"]
    assert "touch" in repr(found["a"]["scale_fwd"]) and not Path("executed").exists()
    with pytest.raises(lazyckpt.CorruptError):
        found["b"]


class _Runs:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("executed"),)
