"""Models with other layers and experts."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import lazyckpt
import lazyckpt.demo
from lazyckpt.errors import DataError
from lazyckpt.recipes import to_hf
from lazyckpt.testing import opened


def model(folder: Path, layers: int = 4, **config: Any) -> lazyckpt.CheckpointView:
    torch.manual_seed(0)
    tensors = {"model.embed_tokens.weight": torch.randn(8, 4), "model.norm.weight": torch.randn(4)}
    for n in range(layers):
        tensors[f"model.layers.{n}.mlp.up_proj.weight"] = torch.randn(6, 4)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"num_hidden_layers": layers, **config}))
    return lazyckpt.open(folder, cache=False)


def mixture(folder: Path, stacked: bool, layers: int = 2, experts: int = 4, **config: Any) -> lazyckpt.CheckpointView:
    torch.manual_seed(0)
    tensors = {"model.norm.weight": torch.randn(4)}
    for n in range(layers):
        start = f"model.layers.{n}.mlp"
        tensors |= {f"{start}.router.weight": torch.randn(experts, 4), f"{start}.router.bias": torch.randn(experts)}
        if stacked:
            tensors[f"{start}.experts.gate_up_proj"] = torch.randn(experts, 4, 6)
            tensors[f"{start}.experts.gate_up_proj_bias"] = torch.randn(experts, 6)
        else:
            for e in range(experts):
                tensors[f"{start}.experts.{e}.up_proj.weight"] = torch.randn(6, 4)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"num_local_experts": experts, "num_experts_per_tok": 2, **config}))
    return lazyckpt.open(folder, cache=False)


def test_layers_are_dropped_repeated_and_numbered_anew(tmp_path: Path) -> None:
    view = model(tmp_path / "m", layer_types=["a", "b", "c", "d"], mlp_only_layers=[1, 3])
    deep = view.layers(range(3), [1, 3])
    assert list(deep) == [
        "model.embed_tokens.weight",
        *(f"model.layers.{n}.mlp.up_proj.weight" for n in range(5)),
        "model.norm.weight",
    ]
    for new, old in enumerate([0, 1, 2, 1, 3]):
        a, b = (v[f"model.layers.{n}.mlp.up_proj.weight"] for v, n in ((deep, new), (view, old)))
        assert torch.equal(a[...], b[...])
    assert deep.meta["config"]["num_hidden_layers"] == 5
    assert deep.meta["config"]["layer_types"] == ["a", "b", "c", "b", "d"]
    assert deep.meta["config"]["mlp_only_layers"] == [1, 3, 4]
    assert view.meta["config"]["num_hidden_layers"] == 4
    assert not deep.aliases
    to_hf(deep, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_hidden_layers"] == 5
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(written[name], deep[name][...]) for name in deep)
    assert len(written) == len(deep)


def test_layers_of_the_moments_follow(tmp_path: Path) -> None:
    zipfile.ZipFile(Path(lazyckpt.demo.__file__).parent / "zero3.zip").extractall(tmp_path)
    view = lazyckpt.open(tmp_path / "zero3")
    found = view.layers(1)
    assert set(found.states) == set(view.states)
    for state, side in view.states.items():
        names = [name for name in side if ".layers.1." in f".{name}"]
        assert names or not len(side)
        for name in names:
            new = name.replace("layers.1.", "layers.0.").replace("h.1.", "h.0.")
            assert torch.equal(found.states[state][new][...], side[name][...])
            assert name not in found.states[state]


def test_nothing_is_read(tmp_path: Path) -> None:
    model(tmp_path / "m")
    view, counts = opened(tmp_path / "m")
    counts.clear()
    deep = view.layers(range(4), range(4))
    assert len(deep) == 10
    assert not counts.requests
    deep["model.layers.7.mlp.up_proj.weight"][0]
    assert counts.bytes == 4 * 4


def test_layers_that_are_not_there(tmp_path: Path) -> None:
    view = model(tmp_path / "m")
    with pytest.raises(DataError, match="no layer 4"):
        view.layers(range(5))
    with pytest.raises(DataError, match="no layers are named"):
        view.layers()
    dense = model(tmp_path / "d", first_k_dense_replace=1)
    assert dense.layers(0, 2).meta["config"]["first_k_dense_replace"] == 1
    with pytest.raises(DataError, match="first_k_dense_replace"):
        dense.layers(2, 0)
    two = {"a.layers.0.w": torch.zeros(1), "b.layers.0.w": torch.zeros(1), "b.layers.1.w": torch.ones(1)}
    save_file(two, tmp_path / "two.safetensors")
    view = lazyckpt.open(tmp_path / "two.safetensors")
    with pytest.raises(DataError, match="2 stacks"):
        view.layers(0)
    assert list(view.layers(1, stack="b.layers")) == ["a.layers.0.w", "b.layers.0.w"]


def test_layers_of_multi_token_prediction_stay_behind(tmp_path: Path) -> None:
    view = model(tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text()) | {"num_hidden_layers": 3}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    view = lazyckpt.open(tmp_path / "m", cache=False)
    short = view.layers(2)
    assert short.meta["config"]["num_hidden_layers"] == 1
    last = "model.layers.3.mlp.up_proj.weight"
    assert torch.equal(short["model.layers.1.mlp.up_proj.weight"][...], view[last][...])


@pytest.mark.parametrize("stacked", [False, True])
def test_experts_are_kept_in_the_given_order(stacked: bool, tmp_path: Path) -> None:
    view = mixture(tmp_path / "m", stacked)
    kept = {0: [3, 0], 1: [1, 2]}
    less = view.keep_experts(kept)
    assert less.meta["config"]["num_local_experts"] == 2
    assert torch.equal(less["model.norm.weight"][...], view["model.norm.weight"][...])
    for n, chosen in kept.items():
        start = f"model.layers.{n}.mlp"
        for name in (f"{start}.router.weight", f"{start}.router.bias"):
            assert torch.equal(less[name][...], view[name][...][chosen])
            assert torch.equal(less[name][1], view[name][...][chosen[1]])
        if stacked:
            for name in (f"{start}.experts.gate_up_proj", f"{start}.experts.gate_up_proj_bias"):
                assert torch.equal(less[name][...], view[name][...][chosen])
        else:
            for new, old in enumerate(chosen):
                a, b = (v[f"{start}.experts.{e}.up_proj.weight"] for v, e in ((less, new), (view, old)))
                assert torch.equal(a[...], b[...])
            assert f"{start}.experts.2.up_proj.weight" not in less
    other = view.drop_experts({0: [1, 2], 1: [0, 3]})
    assert set(other) == set(less)
    to_hf(less, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_local_experts"] == 2


def test_a_row_of_kept_experts_reads_it_alone(tmp_path: Path) -> None:
    mixture(tmp_path / "m", True)
    view, counts = opened(tmp_path / "m")
    less = view.keep_experts([3, 0])
    counts.clear()
    less["model.layers.0.mlp.experts.gate_up_proj"][1, 2]
    assert counts.bytes == 6 * 4


def test_experts_that_cannot_be_dropped(tmp_path: Path) -> None:
    view = mixture(tmp_path / "m", False)
    with pytest.raises(DataError, match="all need the same number"):
        view.drop_experts({0: [1]})
    with pytest.raises(DataError, match="sends each token to 2"):
        view.keep_experts([1])
    with pytest.raises(DataError, match="0 to 3"):
        view.keep_experts([1, 4])
    with pytest.raises(DataError, match="layer 7 has no experts"):
        view.drop_experts({7: [1]})
    with pytest.raises(DataError, match="has no experts"):
        model(tmp_path / "dense").drop_experts([0])
    grouped = mixture(tmp_path / "g", False, n_group=2)
    with pytest.raises(DataError, match="2 groups"):
        grouped.drop_experts([0])


SMALL = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 32,
}  # fmt: skip


@pytest.mark.parametrize("router", ["normal", "zeros"])
@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Qwen3"])
def test_an_upcycled_model_computes_the_same(kind: str, router: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    dense = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**SMALL)).eval()
    dense.save_pretrained(tmp_path / "dense")
    view = lazyckpt.open(tmp_path / "dense", cache=False).upcycle(4, top_k=2, router=router, seed=3)
    to_hf(view, tmp_path / "moe")
    moe, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "moe", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert type(moe).__name__ == ("Qwen3MoeForCausalLM" if kind == "Qwen3" else "MixtralForCausalLM")
    ids = torch.arange(8)[None]
    with torch.no_grad():
        torch.testing.assert_close(moe.eval()(ids).logits, dense(ids).logits, rtol=1e-4, atol=1e-5)
    gates = [view[name][...].float() for name in view if name.endswith(".gate.weight")]
    assert len(gates) == 2
    if router == "zeros":
        assert not any(gate.any() for gate in gates)
    else:
        assert all(0.01 < float(gate.std()) < 0.03 for gate in gates)
        assert not torch.equal(*gates)


def test_what_cannot_be_upcycled(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="llama, mistral, qwen3"):
        model(tmp_path / "a", model_type="gpt2").upcycle(4)
    with pytest.raises(DataError, match="top_k"):
        model(tmp_path / "b", model_type="llama").upcycle(2, top_k=3)
    with pytest.raises(DataError, match="router"):
        model(tmp_path / "c", model_type="llama").upcycle(2, router="ones")


def test_fewer_layers_run_in_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**SMALL | {"num_hidden_layers": 4})
    dense = transformers.Qwen3ForCausalLM(config).eval()
    dense.save_pretrained(tmp_path / "dense")
    to_hf(lazyckpt.open(tmp_path / "dense").layers(0, 3, 3), tmp_path / "less")
    less, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "less", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert len(less.model.layers) == 3
    for name, value in dense.model.layers[3].state_dict().items():
        assert torch.equal(less.model.layers[2].state_dict()[name], value)
