"""What trainers write around weights: the contract on what each of them wrote itself, names of states, damage."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import lazyckpt
from lazyckpt.errors import LazyckptError, MissingFileError
from lazyckpt.testing import contract
from lazyckpt.testing.contract import Check
from lazyckpt.testing.oracle import same

from .writers import Case


@pytest.mark.product
@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
def test_contract(trainer_case: Case, check: Check) -> None:
    check(trainer_case)


def test_format_and_problems(trainer_case: Case) -> None:
    view = contract.open_case(trainer_case)
    assert view.format == trainer_case.info["format"]
    assert view.problems == ()


def _copied(case: Case, tmp_path: Path) -> Path:
    return Path(shutil.copytree(case.path, tmp_path / "copy"))


def _as_held(view: lazyckpt.CheckpointView, case: Case) -> int:
    """What has a name has the right one; -> how many states stand under numbers."""
    left = 0
    for state, truth in case.truth.items():
        for name, t in view.states[state].items():
            if name in truth:
                same(t[...], truth[name], (state, name))
            else:
                assert name.rpartition(".")[2].isdecimal() and state != "weights", (state, name)
                left += 1
        assert len(view.states[state]) == len(truth)
    return left


# -- runs, and what stands beside the weights


def test_a_run_opens_its_newest_checkpoint(trainer_cases: dict[str, Case], tmp_path: Path) -> None:
    case = trainer_cases["trainer_llama"]
    view = lazyckpt.open(case.path)
    assert Path(view.root).name == "checkpoint-4" and view.meta["step"] == 4
    assert lazyckpt.open(case.path / "checkpoint-4").meta["step"] == 4
    older = torch.load(case.path.parent / "older.pt")
    for opened in (lazyckpt.open(case.path, tag="checkpoint-2"), lazyckpt.open(case.path / "checkpoint-2")):
        for state, table in older.items():
            for name, tensor in table.items():
                same(opened.states[state][name][...], tensor, (state, name))
    with pytest.raises(MissingFileError, match="checkpoint-4, checkpoint-2"):
        lazyckpt.open(case.path, tag="checkpoint-3")


@pytest.mark.parametrize("how", ["not finished", "damaged"])
def test_a_save_that_was_interrupted_is_passed_over(trainer_cases: dict[str, Case], tmp_path: Path, how: str) -> None:
    folder = _copied(trainer_cases["trainer_llama"], tmp_path)
    newest = folder / "checkpoint-4"
    if how == "not finished":
        (newest / "trainer_state.json").unlink()
    else:
        for file in newest.iterdir():
            file.write_bytes(file.read_bytes()[:7])
    view = lazyckpt.open(folder)
    assert Path(view.root).name == "checkpoint-2"
    assert any(
        line.path == "checkpoint-4" and line.code in ("skipped-checkpoint", "unfinished-save") for line in view.problems
    )


def test_what_stands_beside_the_weights_is_in_meta(trainer_cases: dict[str, Case]) -> None:
    meta: Any = lazyckpt.open(trainer_cases["trainer_llama"].path).meta
    assert [len(group["params"]) for group in meta["optimizer"]["param_groups"]] == [15, 13]
    assert meta["scheduler"]["last_epoch"] == 4 and meta["trainer_state"]["global_step"] == 4
    assert meta["config"]["model_type"] == "llama"
    assert "TrainingArguments" in repr(meta["training_args"])
    assert repr(meta["rng_state"]["cpu"]) == "<tensor 'rng_state.pth/cpu'>"
    view = lazyckpt.open(trainer_cases["accelerate_fsdp2"].path)
    assert view.meta["scheduler"]["step_size"] == 2 and view.meta["random_states_1"]["step"] == 5
    assert view.meta["optimizer"]["param_groups"][0]["lr"] == 0.01


def test_raw_names(trainer_cases: dict[str, Case]) -> None:
    view = lazyckpt.open(trainer_cases["accelerate_fsdp1"].path)
    assert {"model.emb.weight", "optimizer.state.emb.weight.exp_avg"} < set(view.stored)
    view = lazyckpt.open(trainer_cases["trainer_llama"].path)
    assert {"model.norm.weight", "optimizer.pt/state.0.exp_avg", "rng_state.pth/cpu"} < set(view.stored)
    q = view.states["exp_avg"]["model.layers.0.self_attn.q_proj.weight"]
    assert "optimizer.pt/state.1.exp_avg" in q.explain()


def test_lightning_callbacks_and_parameters(trainer_cases: dict[str, Case]) -> None:
    meta: Any = lazyckpt.open(trainer_cases["lightning_two_optimizers"].path).meta
    assert meta["hyper_parameters"] == {"width": 7} and "fit_loop" in meta["loops"]
    meta = lazyckpt.open(trainer_cases["lightning_fsdp"].path).meta
    assert (meta["epoch"], meta["global_step"]) == (2, 9)
    assert meta["optimizer_0"]["param_groups"][0]["lr"] == 0.01
    view = lazyckpt.open(trainer_cases["fabric_sharded"].path)
    assert view.meta["iteration"] == 7 and "meta.pt/ema" in view.stored and "ema" not in list(view)


def test_lightning_with_deepspeed(trainer_cases: dict[str, Case]) -> None:
    case = trainer_cases["lightning_deepspeed"]
    for path in (case.path, case.path / "checkpoint"):
        view = lazyckpt.open(path)
        assert view.format == "deepspeed-zero2"
        for state, truth in case.truth.items():
            for name, tensor in truth.items():
                same(view.states[state][name][...], tensor, (state, name))
        assert view.meta["loops"] == {"fit_loop": {"total": 3}}
        assert "_forward_module.first.weight" in view.states["fp32"]["first.weight"].explain()


# -- numbers of optimizers


@pytest.mark.parametrize(
    ("name", "left"), [("trainer_bert_frozen", 21), ("accelerate_safetensors", 3 * 4), ("accelerate_two", 3)]
)
def test_numbers_are_never_guessed(trainer_cases: dict[str, Case], name: str, left: int) -> None:
    view = lazyckpt.open(trainer_cases[name].path)
    assert _as_held(view, trainer_cases[name]) == left
    (line,) = view.problems
    assert line.code == "undecided-name"


def test_the_order_of_a_file_is_not_that_of_the_modules(trainer_cases: dict[str, Case], tmp_path: Path) -> None:
    """Without the model's type nobody knows which of four square matrices is which."""
    folder = _copied(trainer_cases["trainer_llama"], tmp_path)
    (folder / "checkpoint-4" / "config.json").unlink()
    view = lazyckpt.open(folder)
    case = trainer_cases["trainer_llama"]
    assert set(view.states["exp_avg"]) & set(case.truth["exp_avg"]) == {"model.embed_tokens.weight"}
    same(view.states["exp_avg"]["model.embed_tokens.weight"][...],
         case.truth["exp_avg"]["model.embed_tokens.weight"], "embedding")  # fmt: skip


# -- damage


def _checkpoint(case: Case, tmp_path: Path) -> Path:
    folder = _copied(case, tmp_path)
    return folder / "checkpoint-4" if (folder / "checkpoint-4").is_dir() else folder


@pytest.mark.parametrize("name", ["trainer_llama", "accelerate_bin", "accelerate_fsdp1", "accelerate_fsdp2_full"])
def test_without_the_optimizer(trainer_cases: dict[str, Case], tmp_path: Path, name: str) -> None:
    folder = _checkpoint(trainer_cases[name], tmp_path)
    for path in folder.glob("optimizer*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    view = lazyckpt.open(folder)
    assert list(view.states) == ["weights"]
    assert any(line.code == "missing-optimizer" for line in view.problems)
    for key, tensor in trainer_cases[name].truth["weights"].items():
        same(view[key][...], tensor, key)


@pytest.mark.parametrize("name", ["trainer_llama", "accelerate_bin", "accelerate_fsdp1", "accelerate_fsdp2_full"])
def test_without_the_weights(trainer_cases: dict[str, Case], tmp_path: Path, name: str) -> None:
    folder = _checkpoint(trainer_cases[name], tmp_path)
    for path in (*folder.glob("*model*"),):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    view = lazyckpt.open(folder)
    assert "weights" not in view.states and len(view.states["exp_avg"]) == len(trainer_cases[name].truth["exp_avg"])
    assert any(line.code == "missing-weights" for line in view.problems)


@pytest.mark.parametrize(
    ("name", "member"),
    [
        ("trainer_llama", "optimizer.pt"),
        ("trainer_llama", "rng_state.pth"),
        ("trainer_llama", "config.json"),
        ("accelerate_fsdp1", "optimizer_0/.metadata"),
        ("accelerate_fsdp1", "random_states_1.pkl"),
        ("fabric_sharded", "meta.pt"),
    ],
)
def test_a_truncated_member_spoils_nothing_else(
    trainer_cases: dict[str, Case], tmp_path: Path, name: str, member: str
) -> None:
    folder = _checkpoint(trainer_cases[name], tmp_path)
    file = folder / member
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    view = lazyckpt.open(folder)
    assert any(member.split("/")[0] in line and line.code == "unreadable-file" for line in view.problems)
    for key, tensor in trainer_cases[name].truth["weights"].items():
        if key != "lm_head.weight":
            same(view[key][...], tensor, key)


def test_truncated_weights(trainer_cases: dict[str, Case], tmp_path: Path) -> None:
    folder = _checkpoint(trainer_cases["trainer_llama"], tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    view = lazyckpt.open(folder)
    assert any(line.code == "unreadable-file" for line in view.problems)
    assert len(view.states["exp_avg"]) == 28


def test_a_folder_without_its_metadata(trainer_cases: dict[str, Case], tmp_path: Path) -> None:
    folder = _copied(trainer_cases["accelerate_fsdp1"], tmp_path)
    (folder / "optimizer_0" / ".metadata").unlink()
    view = lazyckpt.open(folder)
    assert any("optimizer_0" in line and line.code == "missing-file" for line in view.problems)
    (folder / "pytorch_model_fsdp_0" / ".metadata").unlink()
    assert len(lazyckpt.open(folder)) == 0


def test_weights_of_two_kinds(trainer_cases: dict[str, Case], tmp_path: Path) -> None:
    case = trainer_cases["accelerate_fsdp1"]
    folder = _copied(case, tmp_path)
    shutil.copy(trainer_cases["accelerate_safetensors"].path / "model.safetensors", folder)
    view = lazyckpt.open(folder)
    assert any(line.code == "other-checkpoint" and "pytorch_model_fsdp_0" in line for line in view.problems)
    assert _as_held(view, case) == 0
    shutil.copy(trainer_cases["accelerate_safetensors"].path / "optimizer.bin", folder)
    view = lazyckpt.open(folder)
    assert any((line.code, line.path) == ("other-checkpoint", "optimizer.bin") for line in view.problems)
    assert _as_held(view, case) == 0


def test_adapters(trainer_cases: dict[str, Case], tmp_path: Path) -> None:
    """What peft saves (peft/utils/save_and_load.py): names without the adapter's, sorted."""
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_%s.weight"
    weights = {name % "A": torch.randn(2, 6), name % "B": torch.randn(4, 2)}
    save_file(weights, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2}')
    (tmp_path / "trainer_state.json").write_text('{"global_step": 3}')
    slots = {n: {"exp_avg": t + 1} for n, t in enumerate(weights.values())}
    torch.save({"state": slots, "param_groups": [{"params": [0, 1]}]}, tmp_path / "optimizer.pt")
    view = lazyckpt.open(tmp_path)
    assert view.format == "hf-trainer" and view.problems == () and view.meta["step"] == 3
    assert view.meta["adapter_config"]["r"] == 2
    for stored, tensor in weights.items():
        short = stored.removeprefix("base_model.model.")
        same(view[short][...], tensor, short)
        same(view.states["exp_avg"][short][...], tensor + 1, short)
        assert stored in view[short].explain()


def test_files_of_ones_own(trainer_cases: dict[str, Case], tmp_path: Path) -> None:
    """model.pt beside optimizer.pt: the order is that of the state dict."""
    case = trainer_cases["accelerate_bin"]
    shutil.copy(case.path / "pytorch_model.bin", tmp_path / "model.pt")
    shutil.copy(case.path / "optimizer.bin", tmp_path / "optimizer.pt")
    assert _as_held(lazyckpt.open(tmp_path), case) == 0


def test_a_file_that_no_folder_has_is_not_taken_for_one(tmp_path: Path) -> None:
    """Numbers of epochs or ranks are not those of models."""
    for n in range(2):
        torch.save({"w": torch.zeros(2)}, tmp_path / f"model_{n}.pt")
        torch.save({"state": {}}, tmp_path / f"optimizer_{n}.pt")
    with pytest.raises(lazyckpt.errors.FormatError, match=r"model_0\.pt"):
        lazyckpt.open(tmp_path)


def test_nothing_that_can_be_read(trainer_cases: dict[str, Case], tmp_path: Path) -> None:
    folder = _copied(trainer_cases["accelerate_bin"], tmp_path)
    for file in folder.iterdir():
        file.write_bytes(b"")
    with pytest.raises(LazyckptError):
        lazyckpt.open(folder)


# -- PyTorch's own trainers


def test_steps_of_torchtitan(trainer_cases: dict[str, Case], tmp_path: Path) -> None:
    case = trainer_cases["torchtitan"]
    view = lazyckpt.open(case.path)
    assert Path(view.root).name == "step-2"
    meta: Any = view.meta
    assert (
        meta["train_state"]["ntokens_seen"] == 700
        and repr(meta["train_state"]["step"]) == "<tensor 'train_state.step'>"
    )
    older = lazyckpt.open(case.path, tag="step-1")
    assert not torch.equal(older["emb.weight"][...], case.truth["weights"]["emb.weight"])
    folder = _copied(case, tmp_path)
    (folder / "step-2" / ".metadata").unlink()
    (folder / "step-11").mkdir()
    view = lazyckpt.open(folder)
    assert Path(view.root).name == "step-1"
    assert any((line.code, line.path) == ("skipped-checkpoint", "step-2") for line in view.problems)
    assert Path(lazyckpt.open(trainer_cases["torchtitan_last"].path, tag="step-1").root).name == "step-1"


def test_epochs_of_torchtune(trainer_cases: dict[str, Case]) -> None:
    case = trainer_cases["torchtune"]
    view = lazyckpt.open(case.path)
    assert view.meta["epochs_run"] == 2
    same(view.stored["epoch_1/adapter_model.pt/layers.0.attn.q_proj.lora_a.weight"][...],
         torch.arange(6.0).view(2, 3) + 1, "adapter")  # fmt: skip
    older = torch.load(case.path.parent / "older.pt")
    view = lazyckpt.open(case.path, tag="epoch_0")
    for name, tensor in older["weights"].items():
        same(view[name][...], tensor, name)
    assert any(line.code == "step-mismatch" and "tag='epoch_1'" in line for line in view.problems)
    with pytest.raises(MissingFileError, match="epoch_0, epoch_1"):
        lazyckpt.open(case.path, tag="epoch_7")
    assert Path(lazyckpt.open(trainer_cases["torchtune_distributed"].path).root).name == "dist_epoch_10"


def test_converted_weights_are_not_what_the_optimizer_had(trainer_cases: dict[str, Case]) -> None:
    """Rows of queries and keys stand in another order in the layout of transformers."""
    case = trainer_cases["torchtune_converted"]
    view = lazyckpt.open(case.path)
    assert "model.layers.0.self_attn.q_proj.weight" in view
    assert list(view.states["exp_avg"]) == [str(n) for n in range(7)]
    assert any(line.code == "undecided-name" for line in view.problems)
    for number, tensor in enumerate(case.truth["exp_avg"].values()):
        same(view.states["exp_avg"][str(number)][...], tensor, number)


def test_a_file_of_torch_checkpointing_says_that_it_is_a_part(trainer_cases: dict[str, Case], tmp_path: Path) -> None:
    folder = _copied(trainer_cases["torch_checkpointing_safetensors"], tmp_path)
    file = next(folder.glob("*_0.safetensors"))
    assert [p.code for p in lazyckpt.open(file).problems] == ["part-of-checkpoint"]
    (folder / "metadata.pkl").unlink()
    assert lazyckpt.open(file).problems == ()


def test_an_optimizer_of_another_step_is_told_by_its_learning_rates(
    trainer_cases: dict[str, Case], tmp_path: Path
) -> None:
    folder = max(_copied(trainer_cases["trainer_llama"], tmp_path).rglob("optimizer.pt")).parent
    assert not lazyckpt.open(folder).problems
    state = torch.load(folder / "optimizer.pt", weights_only=True)
    for group in state["param_groups"]:
        group["lr"] = 0.125
    torch.save(state, folder / "optimizer.pt")
    assert [p.code for p in lazyckpt.open(folder).problems] == ["inconsistent-metadata"]


@pytest.mark.parametrize("left", ["optimizer.pt", "scheduler.pt", "both", "counters"])
def test_files_of_another_step_at_a_constant_rate_are_told(
    trainer_cases: dict[str, Case], tmp_path: Path, left: str
) -> None:
    """The files of checkpoint-2 in checkpoint-4, with the rates that the scheduler of checkpoint-4 has set."""
    run = _copied(trainer_cases["trainer_llama"], tmp_path)
    new, old = run / "checkpoint-4", run / "checkpoint-2"
    assert not lazyckpt.open(new).problems
    files = {name: torch.load(old / name, weights_only=True) for name in ("optimizer.pt", "scheduler.pt")}
    rates = torch.load(new / "scheduler.pt", weights_only=True)["_last_lr"]
    files["scheduler.pt"]["_last_lr"] = rates
    for group, rate in zip(files["optimizer.pt"]["param_groups"], rates, strict=True):
        group["lr"] = rate
    if left == "counters":  # as optimizers with numbers for counters write them
        for state in files["optimizer.pt"]["state"].values():
            state["step"] = 2
    for name in ["optimizer.pt"] if left == "counters" else list(files) if left == "both" else [left]:
        torch.save(files[name], new / name)
    told = [(p.code, p.path) for p in lazyckpt.open(new).problems]
    wanted = {"both": ["scheduler.pt"], "counters": ["optimizer.pt"]}.get(left, [left])
    assert told == [("step-mismatch", path) for path in wanted]


class _Arguments:
    """What training_args.bin holds, as far as it matters here."""

    fp16: bool


@pytest.mark.parametrize("scheduler", [3, 4])
def test_steps_that_were_skipped_with_fp16_are_none_of_another_save(
    trainer_cases: dict[str, Case], tmp_path: Path, scheduler: int
) -> None:
    """By versions of transformers that save no scaler. The schedulers of the oldest count such steps."""
    folder = _copied(trainer_cases["trainer_llama"], tmp_path) / "checkpoint-4"
    files = {name: torch.load(folder / name, weights_only=True) for name in ("optimizer.pt", "scheduler.pt")}
    files["scheduler.pt"]["last_epoch"] = scheduler
    for state in files["optimizer.pt"]["state"].values():
        state["step"] = torch.tensor(3.0)
    for name, held in files.items():
        torch.save(held, folder / name)
    assert {p.code for p in lazyckpt.open(folder).problems} == {"step-mismatch"}
    arguments = _Arguments()
    arguments.fp16 = True
    torch.save(arguments, folder / "training_args.bin")
    assert not any(p.code == "step-mismatch" for p in lazyckpt.open(folder).problems)


def test_shards_of_torch_checkpointing(trainer_cases: dict[str, Case], tmp_path: Path) -> None:
    case = trainer_cases["torch_checkpointing_safetensors"]
    view = lazyckpt.open(case.path)
    assert view.meta["train"] == {"step": 3, "rank": 0} and view.meta["train_1"]["rank"] == 1
    assert "model_1.safetensors/emb.weight" in view.stored
    folder = _copied(case, tmp_path)
    (folder / "model_1.safetensors").unlink()
    view = lazyckpt.open(folder)
    assert any("model_1.safetensors" in line for line in view.problems)
    with pytest.raises(MissingFileError, match=r"model_1\.safetensors"):
        view["emb.weight"][...]
    whole = case.truth["weights"]["emb.weight"]
    same(view["emb.weight"][: len(whole) // 2], whole[: len(whole) // 2], "what is there")
    same(view["ids"][...], case.truth["weights"]["ids"], "a replica")


def _many() -> list[Any]:
    """A few objects that expand to a billion."""
    found: list[Any] = [1]
    for _ in range(9):
        found = [found] * 10
    return found


HOSTILE_METADATA = ["truncated", "another", "escaping", "shape", "deep", "many", "itself", "many as a path"]


@pytest.mark.parametrize("what", HOSTILE_METADATA)
def test_hostile_metadata_of_torch_checkpointing(trainer_cases: dict[str, Case], tmp_path: Path, what: str) -> None:
    folder = _copied(trainer_cases["torch_checkpointing_safetensors"], tmp_path)
    file = folder / "metadata.pkl"
    root = pickle.loads(file.read_bytes())
    item = root["metadata"]["model"]
    if what == "another":
        root = {"model": 5}
    elif what == "escaping":
        item["rank_to_layout_info"][1]["file_path"] = "../model_1.safetensors"
    elif what == "shape":
        for groups in item["nested_path_to_metadata"].values():
            groups[0]["sharding_metadata"]["data"]["global_shape"] = [1 << 40, 6]
    elif what == "deep":
        item["nested_path_to_metadata"]["[" * 100_000] = []
    elif what in ("many", "itself"):
        inner: list[Any] = _many() if what == "many" else []
        inner.append(inner if what == "itself" else 1)
        for groups in item["nested_path_to_metadata"].values():
            groups[0]["sharding_metadata"]["data"]["more"] = inner
    elif what == "many as a path":
        item["rank_to_layout_info"][1]["file_path"] = _many()
    data = pickle.dumps(root)
    file.write_bytes(data[: len(data) // 2] if what == "truncated" else data)
    with pytest.raises(lazyckpt.errors.CorruptError):
        lazyckpt.open(folder)
