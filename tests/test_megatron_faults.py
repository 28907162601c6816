"""Checkpoints of Megatron with something missing, mixed up or damaged: a problem that names it, and the rest reads."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyckpt

from .megatron_handmade import args, columns, rows, same, save_rank, save_tensor_parallel
from .writers import Case, bit_equal

ITERATION = "iter_0000003"


@pytest.fixture
def copied(megatron_cases: dict[str, Case], tmp_path: Path) -> Callable[[str], tuple[Path, Case]]:
    def copy(name: str) -> tuple[Path, Case]:
        case = megatron_cases[name]
        return shutil.copytree(case.path, tmp_path / name), case

    return copy


def change(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    state = torch.load(path, weights_only=False)
    edit(state)
    torch.save(state, path)


def reads(view: lazyckpt.CheckpointView, case: Case, state: str = "weights") -> set[str]:
    """The names that read as the truth; the others raise an error that is lazyckpt's own."""
    good = set()
    for name, whole in case.truth[state].items():
        try:
            value = view.states[state][name][...]
        except lazyckpt.LazyckptError:
            continue
        assert bit_equal(value, whole), name
        good.add(name)
    return good


def test_a_lost_tensor_parallel_rank(copied: Callable[[str], tuple[Path, Case]]) -> None:
    path, case = copied("tp2_gelu_tied")
    shutil.rmtree(path / ITERATION / "mp_rank_01")
    view = lazyckpt.open(path)
    lost = f"{ITERATION}/mp_rank_01/model_optim_rng.pt"
    assert any((line.code, line.path) == ("missing-file", lost) for line in view.problems)
    good = reads(view, case)
    assert "decoder.layers.0.input_layernorm.weight" in good
    fc1 = view["decoder.layers.0.mlp.linear_fc1.weight"]
    assert fc1.name not in good
    assert bit_equal(fc1[:12], case.truth["weights"][fc1.name][:12]), "what the other rank has reads"
    with pytest.raises(lazyckpt.MissingFileError, match="mp_rank_01"):
        fc1[12:]


def test_a_lost_pipeline_stage(copied: Callable[[str], tuple[Path, Case]]) -> None:
    path, case = copied("pp2_uneven")  # the first stage has two of five layers
    shutil.rmtree(path / ITERATION / "mp_rank_00_000")
    view = lazyckpt.open(path)
    assert any("mp_rank_00_000" in line for line in view.problems)
    assert {n for n in case.truth["weights"] if ".layers.3." in n} <= reads(view, case)
    for name in ("decoder.layers.1.mlp.linear_fc1.weight", "embedding.word_embeddings.weight"):
        with pytest.raises(lazyckpt.MissingFileError, match="mp_rank_00_000"):
            view[name]
    with pytest.raises(lazyckpt.MissingFileError, match="mp_rank_00_000"):
        view.rename("hf")["model.embed_tokens.weight"]


def test_a_file_that_is_cut_short(copied: Callable[[str], tuple[Path, Case]]) -> None:
    path, case = copied("tp2_pp2_bf16")
    file = path / ITERATION / "mp_rank_01_001" / "model_optim_rng.pt"
    file.write_bytes(file.read_bytes()[:5000])
    view = lazyckpt.open(path)
    assert any("mp_rank_01_001" in line and line.code == "unreadable-file" for line in view.problems)
    good = reads(view, case)
    assert {n for n in case.truth["weights"] if ".layers.0." in n} <= good
    assert "decoder.layers.3.mlp.linear_fc1.weight" not in good


def test_a_lost_expert_parallel_rank(copied: Callable[[str], tuple[Path, Case]]) -> None:
    path, case = copied("ep2")
    shutil.rmtree(path / ITERATION / "mp_rank_00_001")
    view = lazyckpt.open(path)
    (line,) = view.problems
    assert (line.code, line.path) == ("missing-file", f"{ITERATION}/mp_rank_*_001/model_optim_rng.pt")
    lost = set(case.truth["weights"]) - reads(view, case)
    assert lost and all(".experts." in name for name in lost)
    with pytest.raises(lazyckpt.MissingFileError, match=r"mp_rank_\*_001"):
        view[min(lost)]


def test_expert_parallel_ranks_without_arguments(copied: Callable[[str], tuple[Path, Case]]) -> None:
    """A pipeline would not have the embedding in all of its files."""
    path, case = copied("ep2")
    for file in path.glob("*/*/model_optim_rng.pt"):
        change(file, lambda state: state.pop("args"))
    view = lazyckpt.open(path)
    assert reads(view, case) == set(case.truth["weights"]) == set(view)


def test_an_output_layer_of_its_own_without_arguments(tmp_path: Path) -> None:
    """It is no copy of the embedding: its bytes are others."""
    embedding, head, norm = torch.randn(8, 4), torch.randn(8, 4), torch.randn(4)
    layer = {"decoder.layers.0.input_layernorm.weight": norm}
    stages = [
        {"embedding.word_embeddings.weight": embedding, **layer},
        {**layer, "output_layer.weight": head, "decoder.final_layernorm.weight": norm},
    ]
    for pp, model in enumerate(stages):
        save_rank(tmp_path / ITERATION, f"mp_rank_00_{pp:03d}", {"model": model})
    view = lazyckpt.open(tmp_path)
    assert bit_equal(view["output_layer.weight"][...], head)
    assert bit_equal(view["embedding.word_embeddings.weight"][...], embedding)


def test_ranks_of_two_iterations_are_not_mixed(copied: Callable[[str], tuple[Path, Case]]) -> None:
    path, case = copied("tp2_gelu_tied")
    change(path / ITERATION / "mp_rank_01" / "model_optim_rng.pt", lambda state: state.update(iteration=2))
    view = lazyckpt.open(path)
    assert any("mp_rank_01" in line and line.code == "left-over-file" for line in view.problems)
    assert "decoder.layers.0.mlp.linear_fc1.weight" not in reads(view, case)


def test_a_rank_of_another_layout_is_left_out(copied: Callable[[str], tuple[Path, Case]]) -> None:
    path, case = copied("tp2_gelu_tied")
    extra = path / ITERATION / "mp_rank_02"
    shutil.copytree(path / ITERATION / "mp_rank_01", extra)
    change(extra / "model_optim_rng.pt", lambda state: setattr(state["args"], "tensor_model_parallel_size", 4))
    view = lazyckpt.open(path)
    assert any("mp_rank_02" in line and "tp=4" in line for line in view.problems)
    assert reads(view, case) == set(case.truth["weights"])


def test_a_folder_that_does_not_fit_the_arguments(copied: Callable[[str], tuple[Path, Case]]) -> None:
    path, case = copied("tp2_gelu_tied")
    shutil.copytree(path / ITERATION / "mp_rank_01", path / ITERATION / "mp_rank_01_000")
    view = lazyckpt.open(path)
    assert any("mp_rank_01_000" in line and line.code == "left-over-file" for line in view.problems)
    assert reads(view, case) == set(case.truth["weights"])


def test_files_without_arguments(copied: Callable[[str], tuple[Path, Case]]) -> None:
    path, case = copied("pp2_tied_bf16")
    for file in path.glob("*/*/model_optim_rng.pt"):
        change(file, lambda state: state.pop("args"))
    view = lazyckpt.open(path)
    assert any(line.code == "missing-metadata" for line in view.problems)
    assert reads(view, case) == set(case.truth["weights"]), "names and files tell the stages"


def test_a_parameter_that_nothing_is_known_of(tmp_path: Path) -> None:
    whole = torch.randn(8, 4)
    model = {
        "decoder.layers.0.adapter.weight": (whole, rows),
        "decoder.layers.1.adapter.weight": (whole, rows),
        "decoder.layers.0.mlp.linear_fc2.weight": (whole, columns),
        "decoder.layers.0.input_layernorm.weight": (whole[0], same),
    }
    path = save_tensor_parallel(tmp_path, model, 2)
    view = lazyckpt.open(path)
    (line,) = view.problems
    assert (line.code, line.path) == ("unmerged-tensor", None) and "decoder.layers.0.adapter.weight" in line
    assert bit_equal(view["decoder.layers.0.mlp.linear_fc2.weight"][...], whole)
    with pytest.raises(lazyckpt.DataError, match="rules="):
        view["decoder.layers.0.adapter.weight"][...]
    assert bit_equal(view.stored["mp_rank_01/model_optim_rng.pt/model.decoder.layers.0.adapter.weight"][...], whole[4:])
    view = lazyckpt.open(path, rules={"*.adapter.weight": "column"})
    assert bit_equal(view["decoder.layers.0.adapter.weight"][...], whole)
    assert "rules['*.adapter.weight']" in view["decoder.layers.0.adapter.weight"].explain()
    assert view.problems == ()


def test_a_gated_matrix_without_the_switch(tmp_path: Path) -> None:
    """Nothing tells whether fc1 is gate and up in one: it is not merged on a guess."""
    path = save_tensor_parallel(tmp_path, {"decoder.layers.0.mlp.linear_fc1.weight": (torch.randn(8, 4), rows)}, 2)
    for file in path.glob("*/*/model_optim_rng.pt"):
        change(file, lambda state: delattr(state["args"], "swiglu"))
    with pytest.raises(lazyckpt.DataError, match="rules="):
        lazyckpt.open(path)["decoder.layers.0.mlp.linear_fc1.weight"][...]


def test_shards_that_do_not_divide(tmp_path: Path) -> None:
    for rank, width in enumerate((5, 4)):
        settings = args(tensor_model_parallel_size=2, swiglu=True)
        model = {
            "decoder.layers.0.mlp.linear_fc1.weight": torch.randn(width, 4),
            "decoder.layers.0.self_attention.linear_qkv.weight": torch.full((width, 2), float(rank)),
        }
        save_rank(tmp_path / ITERATION, f"mp_rank_{rank:02d}", {"args": settings, "model": model})
    view = lazyckpt.open(tmp_path)
    assert any("linear_fc1" in line and line.code == "unmerged-tensor" for line in view.problems)
    assert view["decoder.layers.0.self_attention.linear_qkv.weight"][...].shape == (9, 2)


# -- optimizers


def test_groups_that_megatron_does_not_make_are_told_by_shapes(copied: Callable[[str], tuple[Path, Case]]) -> None:
    path, case = copied("single")

    def swap(state: dict[str, Any]) -> None:
        for group in state["optimizer"]["param_groups"]:
            del group["wd_mult"]

    change(path / ITERATION / "mp_rank_00" / "model_optim_rng.pt", swap)
    view = lazyckpt.open(path)
    assert view.problems == ()
    assert reads(view, case, "exp_avg") == set(case.truth["exp_avg"])


def test_an_optimizer_of_another_model(copied: Callable[[str], tuple[Path, Case]]) -> None:
    path, case = copied("single")
    change(
        path / ITERATION / "mp_rank_00" / "model_optim_rng.pt",
        lambda state: state["model"].pop("decoder.layers.0.mlp.linear_fc1.weight"),
    )
    view = lazyckpt.open(path)
    (line,) = view.problems
    assert line.code == "undecided-name"
    assert reads(view, case) == set(case.truth["weights"]) - {"decoder.layers.0.mlp.linear_fc1.weight"}
    assert any("optimizer.state.0.exp_avg" in name for name in view.stored)


def test_a_distributed_optimizers_buffer_of_no_known_layout(copied: Callable[[str], tuple[Path, Case]]) -> None:
    path, case = copied("tp2_dp2_distopt")

    def longer(state: dict[Any, Any]) -> None:
        for buffer in state[0].values():
            buffer["exp_avg"] = torch.zeros(len(buffer["exp_avg"]) + 7)

    change(path / ITERATION / "mp_rank_01" / "distrib_optim.pt", longer)
    view = lazyckpt.open(path)
    assert any("mp_rank_01/distrib_optim.pt" in line and line.code == "undecided-layout" for line in view.problems)
    assert reads(view, case) == set(case.truth["weights"])
    assert "decoder.final_layernorm.weight" in reads(view, case, "exp_avg")


def test_a_distributed_optimizers_file_that_is_missing(copied: Callable[[str], tuple[Path, Case]]) -> None:
    path, case = copied("tp2_pp2_distopt_tied")
    (path / ITERATION / "mp_rank_01_001" / "distrib_optim.pt").unlink()
    view = lazyckpt.open(path)
    assert any(line.code == "missing-file" and "mp_rank_01_001/distrib_optim.pt" in line for line in view.problems)
    assert reads(view, case) == set(case.truth["weights"])
    good = reads(view, case, "fp32")
    assert "decoder.layers.0.mlp.linear_fc1.weight" in good
    assert "decoder.layers.3.mlp.linear_fc1.weight" not in good


def test_buckets_that_older_files_keep_apart(copied: Callable[[str], tuple[Path, Case]]) -> None:
    """Without ``buckets_coalesced``, every state is a list of the buckets' tensors, padded at the end."""
    path, case = copied("tp2_pp2_distopt_tied")
    for file in path.glob("*/*/distrib_optim.pt"):
        change(file, _apart)
    view = lazyckpt.open(path)
    assert view.problems == ()
    for state in ("fp32", "exp_avg", "exp_avg_sq"):
        assert reads(view, case, state) == set(case.truth[state])


def _apart(state: dict[Any, Any]) -> None:
    del state["buckets_coalesced"]
    for buffers in state.values():
        for key, buffer in buffers.items():
            total = buffer.pop("numel_unpadded")
            last = (
                32 * 16
            )  # the shared embedding's own bucket, the last one of the first stage and the first of the last
            sizes = [total - last, last] if buffer["param"][-last:].abs().min() > 0 else [last, total - last]
            buffers[key] = {
                name: [torch.nn.functional.pad(t, (0, -len(t) % 128)) for t in flat.split(sizes)]
                for name, flat in buffer.items()
            }


@pytest.mark.parametrize("claim", [0, -1, 1 << 40, "2", 2.5, None])
def test_degrees_that_cannot_be(copied: Callable[[str], tuple[Path, Case]], claim: Any) -> None:
    path, case = copied("single")
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"):
        change(path / ITERATION / "mp_rank_00" / "model_optim_rng.pt", lambda s, n=name: setattr(s["args"], n, claim))
    assert reads(lazyckpt.open(path), case) == set(case.truth["weights"])


def test_degrees_that_most_of_the_checkpoint_is_missing_for(copied: Callable[[str], tuple[Path, Case]]) -> None:
    path, _ = copied("tp2_gelu_tied")
    for file in path.glob("*/*/model_optim_rng.pt"):
        change(file, lambda state: setattr(state["args"], "tensor_model_parallel_size", 100_000))
    with pytest.raises(lazyckpt.CorruptError, match="tp=100000"):
        lazyckpt.open(path)


def test_optimizers_files_that_are_all_missing_or_of_another_kind(copied: Callable[[str], tuple[Path, Case]]) -> None:
    path, case = copied("tp2_dp2_distopt")
    for file in path.glob("*/*/distrib_optim.pt"):
        file.unlink()
    view = lazyckpt.open(path)
    assert [f"mp_rank_{tp:02d}/distrib_optim.pt is missing" in line for tp, line in enumerate(view.problems)] == [
        True
    ] * 2
    for tp in range(2):
        for dp in range(2):
            folder = path / ITERATION / f"mp_rank_{tp:02d}_{dp:03d}"
            folder.mkdir()
            torch.save({}, folder / "optim.pt")
    view = lazyckpt.open(path)
    assert [line.code for line in view.problems] == ["undecided-layout"] * 2
    assert reads(view, case) == set(case.truth["weights"])
