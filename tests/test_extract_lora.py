"""Adapters out of the difference of two models."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import lazyckpt
from lazyckpt.cli.program import app
from lazyckpt.derive.adapters import extracting
from lazyckpt.errors import DataError, DestinationError

from .test_lora import Net, peft

pytestmark = pytest.mark.filterwarnings("ignore")


def low(shape: tuple[int, ...], rank: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows, columns = shape[0], torch.Size(shape[1:]).numel()
    left, right = torch.randn(rows, rank, generator=generator), torch.randn(rank, columns, generator=generator)
    return (left @ right).reshape(shape)


def two(folder: Path, changes: dict[str, torch.Tensor]) -> tuple[Net, Any, Any, dict[str, torch.Tensor]]:
    net = Net()
    base = {k: v.contiguous() for k, v in net.state_dict().items()}
    tuned = {k: v + changes[k] if k in changes else v for k, v in base.items()}
    save_file(base, folder / "base.safetensors")
    save_file(tuned, folder / "tuned.safetensors")
    opened = (lazyckpt.open(folder / f"{name}.safetensors") for name in ("base", "tuned"))
    return net, *opened, tuned


def test_peft_loads_what_is_extracted(tmp_path: Path) -> None:
    shapes = {name: tuple(t.shape) for name, t in Net().state_dict().items()}
    ranked = {"layers.0.q.weight": 2, "layers.2.o.weight": 3, "conv.weight": 2, "line.weight": 1, "head.weight": 2}
    changes = {name: low(shapes[name], rank, 3) for name, rank in ranked.items()}
    changes["layers.0.q.bias"] = torch.ones(9)
    changes["layers.1.q.bias"] = torch.ones(9)
    net, base, tuned, truth = two(tmp_path, changes)
    report = lazyckpt.extract_lora(tuned, base, tmp_path / "out", rank=6, energy=0.999999, progress=False)
    found = {row.name: row.rank for row in report.tensors}
    assert found == ranked | {"layers.0.q.bias": 0, "layers.1.q.bias": 0}
    assert report.energy > 0.99999
    assert "rank 2" in repr(report)
    model = peft.PeftModel.from_pretrained(copy.deepcopy(net), tmp_path / "out")
    for name, value in model.merge_and_unload().state_dict().items():
        torch.testing.assert_close(value, truth[name], rtol=1e-4, atol=1e-4)
    view = lazyckpt.apply_lora(base, tmp_path / "out")
    for name, value in truth.items():
        torch.testing.assert_close(view[name][...], value, rtol=1e-4, atol=1e-4)


def test_other_modules_are_saved_whole(tmp_path: Path) -> None:
    changes = {
        "layers.0.q.weight": low((9, 6), 1, 0),
        "head.weight": torch.ones(3, 6),
        "embed.weight": torch.ones(11, 6),
    }
    net, base, tuned, truth = two(tmp_path, changes)
    only = lambda name: name.startswith("layers")  # noqa: E731
    report = lazyckpt.extract_lora(tuned, base, tmp_path / "out", rank=1, select=only, progress=False)
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["modules_to_save"] == ["embed", "head"]
    assert config["target_modules"] == ["layers.0.q"]
    assert {row.name for row in report.tensors if not row.rank} == {"embed.weight", "head.weight"}
    model = peft.PeftModel.from_pretrained(copy.deepcopy(net), tmp_path / "out")
    for name, value in model.merge_and_unload().state_dict().items():
        torch.testing.assert_close(value, truth[name], rtol=1e-4, atol=1e-4)
    skipped = lazyckpt.extract_lora(
        tuned, base, tmp_path / "less", rank=1, select="layers.*", others="skip", progress=False
    )
    assert set(skipped.left_out) == {"embed.weight", "head.weight"}
    with pytest.raises(DataError, match="is not decomposed"):
        lazyckpt.extract_lora(tuned, base, tmp_path / "no", select="layers.*", others="error", progress=False)
    assert not (tmp_path / "no").exists()


def test_embeddings_and_transposed_layers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=20, n_positions=8)
    torch.manual_seed(0)
    net = transformers.GPT2LMHeadModel(config)
    net.save_pretrained(tmp_path / "base")
    other = copy.deepcopy(net)
    with torch.no_grad():
        for name in ("transformer.h.0.attn.c_attn.weight", "transformer.h.0.attn.c_proj.weight"):
            one = other.get_parameter(name)
            one += low(tuple(one.shape), 2, 1)
        other.get_parameter("transformer.wpe.weight").add_(1)
    other.save_pretrained(tmp_path / "tuned")
    base, tuned = lazyckpt.open(tmp_path / "base"), lazyckpt.open(tmp_path / "tuned")
    lazyckpt.extract_lora(tuned, base, tmp_path / "out", rank=3, select="*attn*", progress=False)
    model = peft.PeftModel.from_pretrained(copy.deepcopy(net), tmp_path / "out").merge_and_unload()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, other.state_dict()[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(50, 80), (80, 50), (64, 64), (3, 90), (90, 3)])
def test_close_to_the_best_approximation(
    shape: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    matrix = torch.randn(shape) @ torch.diag(0.9 ** torch.arange(shape[1]))
    torch.save({"w": matrix}, tmp_path / "w.pt")
    tensor = lazyckpt.open(tmp_path / "w.pt")["w"]
    s = torch.linalg.svdvals(matrix.double())
    found = extracting.low_rank(tensor, 5, None, 0)
    assert found is not None
    rank = min(5, *shape)
    best = float((s[:rank] ** 2).sum() / (s**2).sum())
    assert best - 0.002 < found.energy <= best + 1e-6
    error = float(torch.linalg.norm(matrix.double() - found.left.double() @ found.right.double()) ** 2 / (s**2).sum())
    assert abs(1 - error - found.energy) < 1e-5
    # in blocks of a few rows, a tensor that is not kept
    monkeypatch.setattr(extracting, "_KEPT", 0)
    monkeypatch.setattr(extracting, "_BLOCK", 4 * shape[1] * 7)
    again = extracting.low_rank(tensor, 5, None, 0)
    assert again is not None
    torch.testing.assert_close(again.left @ again.right, found.left @ found.right, rtol=1e-3, atol=1e-3)


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    _, base, tuned, _ = two(tmp_path, {"layers.0.q.weight": low((9, 6), 3, 0)})
    for name in ("a", "b"):
        lazyckpt.extract_lora(tuned, base, tmp_path / name, rank=2, dtype=torch.bfloat16, progress=False)
    first, second = ((tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("a", "b"))
    assert first == second
    assert {t.dtype for t in load_file(tmp_path / "a" / "adapter_model.safetensors").values()} == {torch.bfloat16}


def test_errors(tmp_path: Path) -> None:
    _, base, tuned, _ = two(tmp_path, {"layers.0.q.weight": low((9, 6), 3, 0)})
    with pytest.raises(DataError, match="do not differ"):
        lazyckpt.extract_lora(base, base, tmp_path / "a", progress=False)
    with pytest.raises(DataError, match="lacks"):
        lazyckpt.extract_lora(tuned, base.select("layers.*"), tmp_path / "a", progress=False)
    with pytest.raises(DataError, match="rank=0"):
        lazyckpt.extract_lora(tuned, base, tmp_path / "a", rank=0, progress=False)
    with pytest.raises(DataError, match="fits no tensor"):
        lazyckpt.extract_lora(tuned, base, tmp_path / "a", select="*.projection.weight", progress=False)
    with pytest.raises(DataError, match="int8"):
        lazyckpt.extract_lora(tuned, base, tmp_path / "a", dtype=torch.int8, progress=False)
    with pytest.raises(TypeError, match="takes views"):
        lazyckpt.extract_lora(str(tmp_path), base, tmp_path / "a", progress=False)  # type: ignore[arg-type]
    lazyckpt.extract_lora(tuned, base, tmp_path / "a", progress=False)
    with pytest.raises(DestinationError):
        lazyckpt.extract_lora(tuned, base, tmp_path / "a", progress=False)
    lazyckpt.extract_lora(tuned, base, tmp_path / "a", overwrite=True, progress=False)


def test_commands(tmp_path: Path) -> None:
    truth = two(tmp_path, {"layers.0.q.weight": low((9, 6), 2, 0)})[3]
    paths = [str(tmp_path / f"{name}.safetensors") for name in ("tuned", "base")]
    out = str(tmp_path / "adapter")
    run = CliRunner().invoke
    plan = json.loads(run(app, ["lora", *paths, out, "--rank", "2", "--dry-run", "--json"]).stdout)
    assert plan["result"] is None
    assert plan["plan"]["weights"] == 13
    assert not (tmp_path / "adapter").exists()
    done = run(app, ["lora", *paths, out, "--rank", "2", "--quiet"])
    assert done.exit_code == 0, done.output
    assert run(app, ["lora", *paths, out, "--rank", "2"]).exit_code == 2
    again = run(app, ["lora", *paths, out, "--rank", "2", "--overwrite"])
    assert "rank 2" in again.output
    assert "100.00% of the energy" in again.output
    merged = str(tmp_path / "merged.safetensors")
    dry = run(app, ["convert", paths[1], merged, "--lora", out, "--dry-run"])
    assert dry.exit_code == 0, dry.output
    assert not Path(merged).exists()
    done = run(app, ["convert", paths[1], merged, "--lora", f"{out}=0.5", "--lora", f"{out}=0.5", "--quiet"])
    assert done.exit_code == 0, done.output
    found = load_file(merged)
    for name, want in truth.items():
        torch.testing.assert_close(found[name], want, rtol=1e-4, atol=1e-4)
    bad = run(app, ["convert", paths[1], str(tmp_path / "x.pt"), "--lora", f"{out}=much"])
    assert bad.exit_code == 2
    assert "ADAPTER=SCALE" in bad.output
    endless = run(app, ["convert", paths[1], str(tmp_path / "x.pt"), "--lora", f"{out}=nan"])
    assert endless.exit_code == 2 and "finite" in endless.output
    assert run(app, ["lora", *paths, out, "--others", "drop"]).exit_code == 2
    assert run(app, ["lora", *paths, out, "--energy", "2", "--dry-run"]).exit_code == 2


def test_no_adapter_in_the_folder_of_a_model(tmp_path: Path) -> None:
    _, base, tuned, _ = two(tmp_path, {"layers.0.q.weight": low((9, 6), 3, 0)})
    with pytest.raises(DestinationError, match="holds the checkpoint that is read"):
        lazyckpt.extract_lora(tuned, base, tmp_path, overwrite=True, progress=False)
    assert not (tmp_path / "adapter_config.json").exists()


def test_the_configuration_of_a_runs_checkpoint(tmp_path: Path) -> None:
    _, base, tuned, _ = two(tmp_path, {"layers.0.q.weight": low((9, 6), 3, 0)})
    lazyckpt.extract_lora(tuned, base, tmp_path / "adapter", rank=2, progress=False)
    step = tmp_path / "run" / "checkpoint-5"
    base.to_safetensors(step / "model.safetensors", progress=False)
    (step / "config.json").write_text('{"model_type": "llama"}')
    (step / "trainer_state.json").write_text('{"global_step": 5}')
    args = ["convert", str(tmp_path / "run"), str(tmp_path / "out"), "--to", "safetensors"]
    done = CliRunner().invoke(app, [*args, "--lora", str(tmp_path / "adapter"), "--quiet"])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "out" / "config.json").exists()
