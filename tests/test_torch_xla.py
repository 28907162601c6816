"""Folders of torch_xla's FSDP, as `XlaFullyShardedDataParallel` cuts and names tensors (its own code needs XLA)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import lazyckpt
from lazyckpt import testing
from lazyckpt.errors import CorruptError, FormatError, MissingFileError
from lazyckpt.testing.oracle import same

WORLD = 3
SHAPES = {"0.weight": (5, 7), "0.bias": (5,), "1.weight": (3, 5), "1.scale": (1,), "2.weight": (400,)}


def _piece(tensor: torch.Tensor, rank: int, along_rows: bool) -> torch.Tensor:
    """`_get_shard`: padded to a multiple of the ranks (times 128 elements of a flat tensor)."""
    whole, multiple = (tensor, WORLD) if along_rows else (tensor.reshape(-1), WORLD * 128)
    rest = -len(whole) % multiple
    padded = torch.cat([whole, whole.new_full((rest, *whole.shape[1:]), torch.nan)])
    size = len(padded) // WORLD
    return padded[rank * size : (rank + 1) * size].clone()


def _modules(flat: bool) -> dict[str, dict[str, tuple[str, ...]]]:
    """Module -> name of its piece -> the parameters in it; the inner module 1 is wrapped itself."""
    inner = ("1.weight", "1.scale")
    outer = tuple(name for name in SHAPES if name not in inner)
    if flat:
        return {"": {"_fpw_module.flat_param_0": outer}, "_fsdp_wrapped_module.1": {"_fpw_module.flat_param_0": inner}}
    return {
        "": {name: (name,) for name in outer},
        "_fsdp_wrapped_module.1": {name.removeprefix("1."): (name,) for name in inner},
    }


def write(
    folder: Path, flat: bool = False, along_rows: bool = False, name: str = "final_rank-{:08d}-of-{:08d}.pth"
) -> Any:
    """Write a save of all ranks; return the tensors by state."""
    g = torch.Generator().manual_seed(3)
    truth = {
        state: {own: torch.randn(shape, generator=g) for own, shape in SHAPES.items()}
        for state in ("weights", "exp_avg", "exp_avg_sq")
    }
    mean = torch.randn(5, generator=g)
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(WORLD):
        model: dict[str, torch.Tensor] = {}
        states: dict[int, dict[str, torch.Tensor]] = {}
        info: dict[str, Any] = {}
        flatten: dict[str, Any] = {}
        for module, pieces in _modules(flat).items():
            prefix = f"{module}." if module else ""
            for own, names in pieces.items():
                joined = own.replace("_fpw_module.", "")
                original = f"_fsdp_wrapped_module.{joined}"
                key = f"_fsdp_shard.{original}".replace(".", "_FSDP_SHARD_SEPARATOR_")

                def whole(state: str, names: tuple[str, ...] = names) -> torch.Tensor:
                    held = [truth[state][one] for one in names]
                    return torch.cat([one.reshape(-1) for one in held]) if flat else held[0]

                model[prefix + key] = _piece(whole("weights"), rank, along_rows)
                size = whole("weights").size()
                info.setdefault(module, {})[key] = {"_orig_size": size, "_orig_name": original}
                if flat:
                    inside = [one.removeprefix("1.") if module else one for one in names]
                    shapes = [torch.Size(SHAPES[one]) for one in names]
                    flatten[prefix + original] = (inside, shapes, [prod(shape) for shape in shapes])
                moments = {kind: _piece(whole(kind), rank, along_rows) for kind in ("exp_avg", "exp_avg_sq")}
                states[len(states)] = {"step": torch.tensor(4.0), **moments}
        model["_fsdp_wrapped_module.bn.running_mean"] = mean.bfloat16() if rank == 0 else mean + rank
        checkpoint = {
            "model": model,
            "shard_metadata": {
                "shard_info": info,
                "flatten_info": flatten,
                "buffer_info": {"_fsdp_wrapped_module.bn.running_mean": {"_orig_dtype": torch.float32}},
                "world_size": WORLD,
                "rank": rank,
            },
            "optimizer": {"state": states, "param_groups": [{"lr": 0.1, "params": list(range(len(states)))}]},
            "epoch": 2,
        }
        torch.save(checkpoint, folder / name.format(rank, WORLD))
    truth["weights"]["bn.running_mean"] = mean.bfloat16().float()
    truth["step"] = dict.fromkeys(SHAPES, torch.tensor(4.0))
    return truth


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> testing.Case:
    folder = tmp_path_factory.mktemp("xla") / "save"
    return testing.Case(folder, write(folder, flat=True), {"format": "torch-xla"})


def _equal(view: lazyckpt.CheckpointView, truth: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    for state, table in truth.items():
        assert set(view.states[state]) == set(table)
        for name, tensor in table.items():
            t = view.states[state][name]
            same(t[...], tensor, (state, name))
            if tensor.ndim:
                same(t[-1:], tensor[-1:], (state, name))
            if tensor.ndim > 1:
                same(t[1:, 2], tensor[1:, 2], (state, name))


@pytest.mark.parametrize(("flat", "along_rows"), [(False, False), (True, False), (False, True)])
def test_parameters_and_states_are_whole(tmp_path: Path, flat: bool, along_rows: bool) -> None:
    truth = write(tmp_path / "save", flat, along_rows)
    view = lazyckpt.open(tmp_path / "save")
    assert (view.format, view.mesh.dp, view.meta["epoch"]) == ("torch-xla", WORLD, 2)
    assert view.problems == ()
    _equal(view, truth)
    alone = lazyckpt.open(tmp_path / "save" / f"final_rank-00000001-of-{WORLD:08d}.pth")
    assert "part-of-checkpoint" in {problem.code for problem in alone.problems}
    assert "torch_xla" in str(view["0.weight"].explain())
    view.to_safetensors(tmp_path / "out.safetensors")
    _equal(lazyckpt.open(tmp_path / "out.safetensors"), {"weights": truth["weights"]})


@pytest.mark.parametrize("check", testing.CHECKS, ids=lambda check: check.__name__)
def test_contract(check: Callable[[testing.Case], None], saved: testing.Case) -> None:
    check(saved)


def test_files_of_the_trainer(tmp_path: Path) -> None:
    """The Trainer writes model and optimizer into files of their own."""
    truth = write(tmp_path / "whole")
    for rank in range(WORLD):
        state = torch.load(tmp_path / "whole" / f"final_rank-{rank:08d}-of-{WORLD:08d}.pth")
        about = state["shard_metadata"]
        torch.save(
            {"model": state["model"], "shard_metadata": about}, tmp_path / f"rank{rank}-of-{WORLD}-pytorch_model.bin"
        )
        torch.save(
            {"optimizer": state["optimizer"], "shard_metadata": about}, tmp_path / f"rank{rank}-of-{WORLD}-optimizer.pt"
        )
    view = lazyckpt.open(tmp_path)
    assert view.problems == ()
    _equal(view, truth)


def test_optimizers_beside_gathered_weights_are_told(tmp_path: Path) -> None:
    for rank in range(2):
        torch.save({"optimizer": {}, "shard_metadata": {}}, tmp_path / f"rank{rank}-of-2-optimizer.pt")
    torch.save({"w": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    (tmp_path / "trainer_state.json").write_text('{"global_step": 4}')
    view = lazyckpt.open(tmp_path)
    assert list(view) == ["w"] and [problem.code for problem in view.problems] == ["ignored-file"]


def test_a_lost_rank_leaves_holes(tmp_path: Path) -> None:
    truth = write(tmp_path)
    (tmp_path / f"final_rank-00000001-of-{WORLD:08d}.pth").unlink()
    view = lazyckpt.open(tmp_path)
    assert [problem.code for problem in view.problems] == ["missing-file"]
    same(view["0.bias"][...], truth["weights"]["0.bias"], "all of it is on rank 0")
    same(view["2.weight"][:256], truth["weights"]["2.weight"][:256], "rank 0")
    same(view["2.weight"][:100], truth["weights"]["2.weight"][:100], "rank 0")
    with pytest.raises(MissingFileError, match="rank 1"):
        view["2.weight"][200:300]


def test_files_of_other_saves(tmp_path: Path) -> None:
    write(tmp_path)
    first = tmp_path / f"final_rank-00000000-of-{WORLD:08d}.pth"
    (tmp_path / "final_rank-00000000-of-00000008.pth").write_bytes(first.read_bytes())
    view = lazyckpt.open(tmp_path)
    assert [problem.code for problem in view.problems] == ["left-over-file"]
    write(tmp_path, name="epoch_1_rank-{}-of-{}.pth")
    with pytest.raises(FormatError, match="saves"):
        lazyckpt.open(tmp_path)


def test_other_names_of_ranks(tmp_path: Path) -> None:
    truth = write(tmp_path, name="epoch_1_rank_{}.ckpt")
    view = lazyckpt.open(tmp_path)
    assert view.format == "torch-xla" and view.problems == ()
    _equal(view, truth)
    (tmp_path / "epoch_1_rank_2.ckpt").unlink()
    assert [problem.code for problem in lazyckpt.open(tmp_path).problems] == ["missing-file"]
    write(tmp_path, name="epoch_2_rank_{}.ckpt")
    with pytest.raises(FormatError, match="2 saves"):
        lazyckpt.open(tmp_path)


def test_two_files_of_one_rank_are_an_error(tmp_path: Path) -> None:
    write(tmp_path)
    first, second = (tmp_path / f"final_rank-0000000{n}-of-{WORLD:08d}.pth" for n in (0, 1))
    second.write_bytes(first.read_bytes())
    with pytest.raises(CorruptError, match="rank 0"):
        lazyckpt.open(tmp_path)


def test_files_that_were_swapped_are_sorted_by_their_own_rank(tmp_path: Path) -> None:
    truth = write(tmp_path)
    paths = [tmp_path / f"final_rank-0000000{n}-of-{WORLD:08d}.pth" for n in (0, 1)]
    contents = [path.read_bytes() for path in paths]
    for path, content in zip(paths, reversed(contents), strict=True):
        path.write_bytes(content)
    view = lazyckpt.open(tmp_path)
    assert {problem.code for problem in view.problems} == {"misnamed-file"}
    _equal(view, truth)


def test_groups_of_parameters_are_not_guessed(tmp_path: Path) -> None:
    write(tmp_path)
    for path in tmp_path.iterdir():
        state = torch.load(path)
        state["optimizer"]["param_groups"] = [{"lr": 0.1, "params": [0, 1]}, {"lr": 0.2, "params": [2, 3, 4]}]
        torch.save(state, path)
    view = lazyckpt.open(tmp_path)
    assert [problem.code for problem in view.problems] == ["undecided-name"]
    assert list(view.states) == ["weights"] and any(".exp_avg" in name for name in view.stored)


@pytest.mark.parametrize(
    "change",
    [
        lambda about: about.pop("shard_info"),
        lambda about: about.update(rank=7),
        lambda about: about.update(world_size=WORLD + 1),
        lambda about: about["shard_info"][""].popitem(),
        lambda about: next(iter(about["shard_info"][""].values())).update(_orig_size=(1 << 40,)),
        lambda about: next(iter(about["shard_info"][""].values())).update(_orig_size="large"),
        lambda about: about.update(flatten_info=5),
    ],
)
def test_metadata_that_cannot_be_right(tmp_path: Path, change: Any) -> None:
    write(tmp_path, flat=True)
    for path in tmp_path.iterdir():
        state = torch.load(path)
        change(state["shard_metadata"])
        torch.save(state, path)
    with pytest.raises(CorruptError):
        lazyckpt.open(tmp_path)


def test_other_files_of_such_names_are_named(tmp_path: Path) -> None:
    for rank in range(2):
        torch.save({"w": torch.ones(2)}, tmp_path / f"x_rank-{rank}-of-2.pt")
    with pytest.raises(FormatError, match="shard_metadata"):
        lazyckpt.open(tmp_path)


def test_names_of_ranks_beside_other_weights_do_not_tell(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    for rank in range(2):
        torch.save({"rng": torch.ones(2)}, tmp_path / f"rng_rank{rank}-of-2.pt")
    assert list(lazyckpt.open(tmp_path)) == ["w"]
    for path in tmp_path.glob("rng_*"):
        path.unlink()
    truth = write(tmp_path)
    _equal(lazyckpt.open(tmp_path), truth)


def test_a_second_model_does_not_replace_the_first(tmp_path: Path) -> None:
    truth = write(tmp_path)
    for path in list(tmp_path.iterdir()):
        state = torch.load(path)
        state["model"] = {name: tensor * 0 for name, tensor in state["model"].items()}
        torch.save({**state, "epoch": 7}, path.with_name(f"{path.stem}-ema.pth"))
    view = lazyckpt.open(tmp_path)
    assert [problem.code for problem in view.problems] == ["other-checkpoint"]
    assert view.meta["epoch"] == 2 and any("-ema.pth/" in name for name in view.stored)
    _equal(view, truth)


def test_pieces_under_another_key_are_an_error(tmp_path: Path) -> None:
    write(tmp_path)
    for path in tmp_path.iterdir():
        state = torch.load(path)
        state["net"] = state.pop("model")
        torch.save(state, path)
    with pytest.raises(FormatError, match="'net'"):
        lazyckpt.open(tmp_path)


def test_partial_checkpoints_of_sagemaker_are_named(tmp_path: Path) -> None:
    for name in ("model_0_0.pt", "model_0_1.pt", "optimizer_states_0_0.pt", "user_content.pt", "smp_config.pt"):
        torch.save({"w": torch.ones(2)}, tmp_path / name)
    with pytest.raises(FormatError, match="SageMaker"):
        lazyckpt.open(tmp_path)
    same(lazyckpt.open(tmp_path / "model_0_0.pt")["w"][...], torch.ones(2), "one rank")
