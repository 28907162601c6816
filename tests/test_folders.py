"""Which checkpoint a folder opens as: the newest of a run, the only one there is, or none where nothing tells."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import lazyckpt
from lazyckpt import CorruptError, FormatError, LazyckptError, MissingFileError


def write(folder: Path, *names: str) -> Path:
    """A file for each name, all elements of its one tensor the position of the name."""
    for number, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {"w": torch.full((2,), float(number))}
        if name.lower().endswith(".safetensors"):
            save_file(tensors, path)
        else:
            torch.save(tensors, path)
    return folder


def which(folder: Path, **options: str) -> float:
    return float(lazyckpt.open(folder, **options)["w"][0])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("names", "newest"),
    [
        ([f"ckpt_{n}.pt" for n in (10, 20, 60, 100)], 3),
        ([f"model_step_{n}.safetensors" for n in (1000, 200, 30)], 0),
        ([f"checkpoint-{n}/model.safetensors" for n in (500, 1000)], 1),
        ([f"step-{n}/model.safetensors" for n in (7, 70, 8)], 1),
        ([f"epoch_{n}/model.safetensors" for n in (0, 11, 2)], 1),
        (["epoch=0-step=50.ckpt", "epoch=1-step=100.ckpt", "epoch=1-step=100-v1.ckpt"], 2),
        (["epoch=0-val_loss=0.91.ckpt", "epoch=1-val_loss=0.17.ckpt"], 1),
        (["ckpt_10.pt", "ckpt_20.pt", "best.pt", "optimizer_step_30.pt"], 1),
        (["iter_5.PT", "iter_10.PT"], 1),
    ],
)
def test_a_run_opens_as_its_newest(tmp_path: Path, names: list[str], newest: int) -> None:
    write(tmp_path, *names)
    for n, name in enumerate(names):  # times say nothing: the files were copied
        os.utime(tmp_path / name.split("/")[0], (1000 - n, 1000 - n))
    assert which(tmp_path) == newest
    for n, name in enumerate(names):
        assert which(tmp_path, tag=name.split("/")[0]) == n


def test_the_newest_that_can_be_read(tmp_path: Path) -> None:
    write(tmp_path, "ckpt_1.pt", "ckpt_2.pt", "ckpt_3.pt")
    whole = (tmp_path / "ckpt_3.pt").read_bytes()
    (tmp_path / "ckpt_3.pt").write_bytes(whole[: len(whole) // 2])
    view = lazyckpt.open(tmp_path)
    assert float(view["w"][0]) == 1
    assert any((line.code, line.path) == ("skipped-checkpoint", "ckpt_3.pt") for line in view.problems)
    with pytest.raises(LazyckptError):
        lazyckpt.open(tmp_path, tag="ckpt_3.pt")


@pytest.mark.parametrize(
    "names",
    [
        ["checkpoint-500/model.safetensors", "epoch_3/model.safetensors"],  # steps and epochs are not the same count
        ["ckpt_10.pt", "ckpt_10_ema.pt", "ckpt_20.pt"],
        ["ckpt_9e5.pt", "ckpt_1e6.pt"],
        ["step-1.5.pt", "step-1.25.pt"],
        ["run_a_step_10.pt", "run_b_step_20.pt"],
    ],
)
def test_names_that_do_not_tell_the_newest(tmp_path: Path, names: list[str]) -> None:
    write(tmp_path, *names)
    with pytest.raises(FormatError) as error:
        lazyckpt.open(tmp_path)
    for name in names:
        assert name.split("/")[0] in str(error.value)
    assert which(tmp_path, tag=names[1].split("/")[0]) == 1


def test_two_saves_of_one_step_are_told(tmp_path: Path) -> None:
    view = lazyckpt.open(write(tmp_path, "ckpt_5.pt", "ckpt_5.ckpt"))
    assert len(view.problems) == 1 and "ckpt_5.pt" in view.problems[0] and "ckpt_5.ckpt" in view.problems[0]


@pytest.mark.parametrize(
    "names",
    [
        ["alice.safetensors", "bob.safetensors"],
        ["model_100.safetensors", "model_200.safetensors"],
        ["model_1.safetensors", "model_2.safetensors"],  # numbered as accelerate does, but no first one
        ["model-00001-of-00002.safetensors", "model-00003-of-00003.safetensors"],
        ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "adapter.safetensors"],
        ["one.pt", "two.pt"],
    ],
)
def test_files_that_names_do_not_join_are_not_merged(tmp_path: Path, names: list[str]) -> None:
    write(tmp_path, *names)
    for n, name in enumerate(names):  # without a clash of names nothing else would stop it
        tensors = {f"only{n}": torch.ones(1), "w": torch.full((2,), float(n))}
        save_file(tensors, tmp_path / name) if name.endswith("safetensors") else torch.save(tensors, tmp_path / name)
    with pytest.raises(FormatError) as error:
        lazyckpt.open(tmp_path)
    text = str(error.value)
    assert all(name in text for name in names) and "tag=" in text and len(text) < 500
    for n, name in enumerate(names):
        assert which(tmp_path, tag=name) == n


def test_files_of_one_stem_that_share_no_name_are_not_merged(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "french.safetensors")
    save_file({"b": torch.ones(1)}, tmp_path / "german.safetensors")
    with pytest.raises(FormatError):
        lazyckpt.open(tmp_path)
    with pytest.raises(FormatError):
        lazyckpt.open(tmp_path, format="huggingface")


@pytest.mark.parametrize("pattern", ["model-{:05}-of-00003.safetensors", "weights_rank{}.safetensors"])
def test_shards_that_their_names_join(tmp_path: Path, pattern: str) -> None:
    for n in (1, 2, 3):
        save_file({f"t{n}": torch.full((1,), float(n))}, tmp_path / pattern.format(n))
    assert list(lazyckpt.open(tmp_path)) == ["t1", "t2", "t3"]


def test_lost_shards_of_a_set_without_an_index_are_told(tmp_path: Path) -> None:
    for n in (1, 3):
        save_file({f"t{n}": torch.ones(1)}, tmp_path / f"model-{n:05}-of-00003.safetensors")
        assert any(line.code == "missing-file" for line in lazyckpt.open(tmp_path).problems)


def test_the_only_checkpoint_of_a_folder(tmp_path: Path) -> None:
    assert which(write(tmp_path / "file", "x.pt")) == 0
    assert which(write(tmp_path / "upper", "UPPER.PT")) == 0
    assert which(write(tmp_path / "below", "final/model.safetensors")) == 0
    for folder in ("file", "upper", "below"):
        (tmp_path / folder / "log.txt").write_text("no checkpoint")
        (tmp_path / folder / "logs").mkdir()
        view = lazyckpt.open(tmp_path / folder)
        assert view.problems == () and next(iter(view.files)) in view.explain()


def test_a_folder_of_torchs_distributed_checkpoint_in_a_folder(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "run" / "step.ckpt", no_dist=True)
    assert list(lazyckpt.open(tmp_path / "run")) == ["w"]


def test_an_empty_path_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(write(tmp_path, "model.safetensors"))
    for open_it in (lazyckpt.open, lazyckpt.open_run):
        with pytest.raises(MissingFileError):
            open_it("")
    assert list(lazyckpt.open(".")) == ["w"]


def test_an_unknown_path_takes_three_lines(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing")
    (tmp_path / "empty").mkdir()
    for path in (tmp_path, tmp_path / "notes.txt", tmp_path / "empty"):
        with pytest.raises(FormatError) as error:
            lazyckpt.open(path)
        assert len(str(error.value)) < 300 and str(path) in str(error.value) and "formats" in str(error.value)
    with pytest.raises(FormatError) as error:
        lazyckpt.open(tmp_path, format="nonsense")
    assert len(str(error.value)) < 480


@pytest.mark.parametrize("inside", ["torch", "safetensors"])
def test_a_shard_of_another_kind_than_its_name_says(tmp_path: Path, inside: str) -> None:
    name = "model.safetensors" if inside == "torch" else "pytorch_model.bin"
    if inside == "torch":
        torch.save({"w": torch.ones(2)}, tmp_path / name)
    else:
        save_file({"w": torch.ones(2)}, tmp_path / name)
    for path in (tmp_path, tmp_path / name):
        assert lazyckpt.open(path)["w"][...].tolist() == [1, 1]
    assert any(name in line for line in lazyckpt.open(tmp_path).problems)


def test_a_tag_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError) as error:
        lazyckpt.open(write(tmp_path, "one.pt", "two.pt"), tag="three.pt")
    assert "one.pt" in str(error.value) and "two.pt" in str(error.value)


def test_rules_of_the_wrong_type_are_the_callers_mistake(tmp_path: Path) -> None:
    write(tmp_path, "x.pt")
    for rules in (3, ["*"], {3: "row"}):
        with pytest.raises(TypeError):
            lazyckpt.open(tmp_path, rules=rules)  # type: ignore[arg-type]


# -- whatever a parser raises


class _Plugin:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def load(self) -> object:
        from lazyckpt.formats.reader import Reader

        def read(source: object) -> object:
            raise self.error

        return Reader("broken", "files that break it", lambda source: source.path.endswith(".broken"), read)  # type: ignore[arg-type]


ERRORS = (
    KeyError("k"),
    RecursionError(),
    MemoryError(),
    OverflowError("x"),
    TypeError("y"),
    UnicodeError(),
    EOFError(),
)


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_what_a_reader_raises_is_a_corrupt_error_with_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr("lazyckpt.formats.registry._points", lambda: [_Plugin(error)])
    (tmp_path / "x.broken").write_bytes(b"12345678")
    with pytest.raises(CorruptError) as found:
        lazyckpt.open(tmp_path / "x.broken")
    assert found.value.__cause__ is error
    assert "x.broken" in str(found.value) and "broken" in str(found.value)


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), PermissionError(13, "no"), MissingFileError("gone"), ImportError("no package")]
)
def test_what_is_no_fault_of_a_parser_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    monkeypatch.setattr("lazyckpt.formats.registry._points", lambda: [_Plugin(error)])
    (tmp_path / "x.broken").write_bytes(b"12345678")
    with pytest.raises(type(error)) as found:
        lazyckpt.open(tmp_path / "x.broken")
    assert found.value is error


@pytest.mark.parametrize("dtype", [torch.bool, torch.float8_e4m3fn])
def test_elements_that_cannot_be_negated_are_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(sys.modules["torch._utils"], "get_tensor_metadata", lambda tensor: {"neg": True})
    torch.save({"w": torch.zeros(4).to(dtype)}, tmp_path / "x.pt")
    try:
        view = lazyckpt.open(tmp_path / "x.pt", cache=False)
    except LazyckptError:
        return
    for read in (lambda: view["w"][...], lambda: view["w"][0:2], lambda: view.to("cpu"), lambda: view["w"].numpy()):
        with pytest.raises(LazyckptError):
            read()


def test_shards_of_torch_files_whose_names_say_so_are_one_model(tmp_path: Path) -> None:
    for n in (1, 2):
        torch.save({f"w{n}": torch.full((3,), float(n))}, tmp_path / f"pytorch_model-0000{n}-of-00002.bin")
    view = lazyckpt.open(tmp_path)
    assert {name: t[0].item() for name, t in view.items()} == {"w1": 1.0, "w2": 2.0}
    (tmp_path / "pytorch_model-00001-of-00002.bin").unlink()
    assert lazyckpt.open(tmp_path).problems  # a shard is lost


def test_steps_of_one_file_each(tmp_path: Path) -> None:
    for step in (1, 2):
        (tmp_path / f"step_{step}").mkdir()
        torch.save({"w": torch.full((2,), float(step))}, tmp_path / f"step_{step}" / "model.pt")
    assert lazyckpt.open(tmp_path)["w"][0] == 2
    assert lazyckpt.open(tmp_path, tag="step_1")["w"][0] == 1
