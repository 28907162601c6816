"""Recipes: transformers and peft load what they write and compute the same; parts cost their own bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import lazyckpt
from lazyckpt import DataError, DestinationError, FormatError, MissingFileError, TensorNotFoundError, recipes
from lazyckpt.recipes import parts
from lazyckpt.testing import counting
from lazyckpt.testing.oracle import same

from .conftest import Checkpoints, need
from .writers import Case, bit_equal
from .writers.megatron_core import CASES, MegatronSpec

KINDS = ("zero3", "dcp", "ranks")


@pytest.fixture(scope="session")
def models(checkpoints: Checkpoints) -> Path:
    """What tests/writers/deepspeed_hf.py writes, NAME/ckpt and NAME/truth.pt."""
    return checkpoints("models")


def loaded(folder: Path, family: str = "Llama") -> Any:
    """The model of transformers; nothing may be missing, left over or of another shape."""
    import transformers

    model, info = getattr(transformers, f"{family}ForCausalLM").from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model


def as_held(model: Any, truth: dict[str, Any]) -> None:
    """The weights bit for bit, and so the logits."""
    for name, p in model.named_parameters(remove_duplicate=False):
        same(p.detach(), truth["weights"][name], name)
    with torch.no_grad():
        torch.testing.assert_close(model(truth["ids"]).logits, truth["logits"], rtol=1e-5, atol=1e-5)


# -- folders for transformers


@pytest.mark.slow
@pytest.mark.parametrize("size", ["5GB", "20KB"], ids=["one file", "shards"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_loads_it(models: Path, tmp_path: Path, kind: str, tied: bool, size: str) -> None:
    name = f"{kind}_tied" if tied else kind
    written = recipes.to_hf(models / name / "ckpt", tmp_path / "hf", max_shard_size=size)
    assert sorted(written) == sorted((tmp_path / "hf").iterdir())
    assert ("model.safetensors.index.json" in {p.name for p in written}) == (size != "5GB")
    model = loaded(tmp_path / "hf")
    as_held(model, torch.load(models / name / "truth.pt"))
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    names: set[str] = set()
    for path in tmp_path.glob("hf/*.safetensors"):
        names |= load_file(path).keys()
        with safe_open(path, "pt") as f:
            assert f.metadata()["format"] == "pt"
    assert ("lm_head.weight" in names) != tied and "model.embed_tokens.weight" in names


@pytest.mark.slow
@pytest.mark.parametrize("size", ["5GB", "5KB"], ids=["one file", "shards"])
@pytest.mark.parametrize(("name", "family"), [("llama_sharded", "Llama"), ("llama_single", "Llama"),
                                              ("bin_sharded", "Llama"), ("mixtral", "Mixtral")])  # fmt: skip
def test_from_hugging_face(
    huggingface_cases: dict[str, Case], tmp_path: Path, name: str, family: str, size: str
) -> None:
    """`to_safetensors` alone writes what `from_pretrained` takes; the recipe brings the config along."""
    case = huggingface_cases[name]
    written = recipes.to_hf(case.path, tmp_path / "hf", max_shard_size=size)
    beside = {p.name for p in case.path.iterdir() if p.name in ("config.json", "generation_config.json")}
    assert {p.name for p in written if "model" not in p.name} == beside >= {"config.json"}
    model = loaded(tmp_path / "hf", family)
    if family == "Llama":
        for n, p in model.named_parameters(remove_duplicate=False):
            same(p.detach(), case.truth["weights"][n], n)
    view = lazyckpt.open(case.path)
    view.to_safetensors(tmp_path / "plain", max_shard_size=size)
    assert [p.name for p in tmp_path.glob("plain/*.json")] == [p.name for p in tmp_path.glob("hf/*.index.json")]
    (tmp_path / "plain" / "config.json").write_bytes((case.path / "config.json").read_bytes())
    again = loaded(tmp_path / "plain", family)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))
    if name == "llama_sharded" and size != "5GB":  # as transformers' own index
        index = "model.safetensors.index.json"
        theirs, ours = (json.loads((at / index).read_text()) for at in (case.path, tmp_path / "hf"))
        assert ours["weight_map"].keys() == theirs["weight_map"].keys()
        assert ours["metadata"]["total_size"] == theirs["metadata"]["total_size"]


@pytest.mark.slow
def test_16_bits_of_zero3(models: Path, tmp_path: Path) -> None:
    recipes.zero3_to_hf(models / "zero3" / "ckpt", tmp_path / "hf", dtype=torch.bfloat16)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"
    model = loaded(tmp_path / "hf")
    truth = torch.load(models / "zero3" / "truth.pt")["weights"]
    for name, p in model.named_parameters(remove_duplicate=False):
        same(p.detach(), truth[name].bfloat16(), name)


@pytest.mark.slow
def test_tags_and_what_is_none(models: Path, tmp_path: Path) -> None:
    src = models / "zero3" / "ckpt"
    recipes.zero3_to_hf(next(src.glob("global_step*")), tmp_path / "hf")  # config.json stands above the tag
    as_held(loaded(tmp_path / "hf"), torch.load(models / "zero3" / "truth.pt"))
    with pytest.raises(FormatError, match=r"'dcp', not 'deepspeed': to_hf"):
        recipes.zero3_to_hf(models / "dcp" / "ckpt", tmp_path / "no")
    with pytest.raises(FormatError, match="not 'megatron'"):
        recipes.torch_dist_to_hf(src, tmp_path / "no")
    with pytest.raises(DestinationError, match="wants a folder"):
        recipes.to_hf(src, tmp_path / "no.safetensors")
    with pytest.raises(MissingFileError, match=r"no config\.json"):
        recipes.to_hf(src, tmp_path / "no", config=tmp_path)
    torch.save({"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"params": [0]}]}, tmp_path / "o.pt")
    with pytest.raises(FormatError, match="holds no weights"):
        recipes.to_hf(tmp_path / "o.pt", tmp_path / "no")
    assert not (tmp_path / "no").exists()


def test_a_lost_shard(huggingface_cases: dict[str, Case], tmp_path: Path) -> None:
    """What cannot even be described would be missing from the folder without a word."""
    for path in huggingface_cases["llama_sharded"].path.iterdir():
        if "00002-of" not in path.name:
            (tmp_path / path.name).write_bytes(path.read_bytes())
    with pytest.raises(MissingFileError, match="00002-of"):
        recipes.to_hf(tmp_path, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_tied_names_that_differ(models: Path, tmp_path: Path) -> None:
    """transformers would tie neither of them, or lose one."""
    for name, config in (("dcp", "dcp_tied"), ("zero3", "zero3_tied")):
        with pytest.raises(DataError, match=r"'lm_head\.weight' to 'model\.embed_tokens\.weight'.*tie_word_embeddings"):
            recipes.to_hf(models / name / "ckpt", tmp_path / "hf", config=models / config / "ckpt" / "config.json")
    assert not (tmp_path / "hf").exists()


def test_the_files_beside(models: Path, tmp_path: Path) -> None:
    src = models / "ranks" / "ckpt"
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_bytes((src / "huggingface" / "config.json").read_bytes())
    (base / "tokenizer.json").write_text("{}")
    (base / "merges.txt").write_text("a b")
    (base / "modeling_own.py").write_text("raise SystemExit")
    (base / "model.safetensors").write_text("another's")
    written = recipes.to_hf(src, tmp_path / "hf", config=base)
    assert [p.name for p in written] == ["model.safetensors", "config.json", "tokenizer.json", "merges.txt"]
    assert (tmp_path / "hf" / "merges.txt").read_text() == "a b"
    with pytest.raises(DestinationError, match="exists already"):
        recipes.to_hf(src, tmp_path / "hf", config=base)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "tokenizer.json").write_text("mine")
    with pytest.raises(DestinationError, match=r"tokenizer\.json exists already"):
        recipes.to_hf(src, tmp_path / "other", config=base)
    assert [p.name for p in (tmp_path / "other").iterdir()] == ["tokenizer.json"]
    recipes.to_hf(src, tmp_path / "other", config=base, overwrite=True)
    with pytest.raises(DestinationError, match="that the configuration is read from"):
        recipes.to_hf(src, base, config=base, overwrite=True)
    assert (base / "model.safetensors").read_text() == "another's"


def config_of(spec: MegatronSpec) -> tuple[str, Any]:
    """The family at Hugging Face that is built so, and its configuration."""
    import transformers

    family = "Qwen3" if spec.qk_norm else "Qwen2" if spec.qkv_bias else "Llama"
    config = getattr(transformers, f"{family}Config")(
        vocab_size=spec.vocab, hidden_size=spec.hidden, intermediate_size=spec.ffn, num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads, num_key_value_heads=spec.groups or spec.heads, rms_norm_eps=1e-5,
        head_dim=spec.hidden // spec.heads, tie_word_embeddings=spec.tied,
    )  # fmt: skip
    config.architectures = [f"{family}ForCausalLM"]
    return family, config


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dist", "legacy"])
@pytest.mark.parametrize("name", ["single", "pp2_tied_bf16", "pp2_vpp2", "tp2_pp2_bf16", "tp2_dp2_distopt"])
def test_the_logits_of_megatron(megatron_folder: Path, tmp_path: Path, name: str, kind: str) -> None:
    """The parallel model's, from the model of transformers; the vocabulary is padded to 64 rows there."""
    need("transformers")
    family, config = config_of(CASES[name])
    config.save_pretrained(tmp_path / "config")
    recipes.torch_dist_to_hf(megatron_folder / name / kind, tmp_path / "hf", config=tmp_path / "config")
    model = loaded(tmp_path / "hf", family)
    truth = torch.load(megatron_folder / name / "logits.pt")
    with torch.no_grad():
        logits = model(truth["tokens"]).logits.float()
    wanted = truth["logits"][..., : CASES[name].vocab].float()
    assert (logits - wanted).abs().max() / wanted.abs().max() < (0.03 if CASES[name].bf16 else 1e-5)


@pytest.mark.parametrize(
    ("name", "words"),
    [("tp2_mla", "no architecture.*rename"), ("tp2_dp2_mtp_distopt", "as a whole.*rename")],
)
def test_what_megatron_has_and_hugging_face_has_not(
    megatron_folder: Path, tmp_path: Path, name: str, words: str
) -> None:
    """Latent attention without norms; a layer of Llama that predicts further tokens."""
    with pytest.raises(FormatError, match=words):
        recipes.torch_dist_to_hf(megatron_folder / name / "dist", tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_padding_that_the_user_tells_of(megatron_folder: Path) -> None:
    name = "embedding.word_embeddings.weight"
    for kind in ("dist", "legacy"):
        path = megatron_folder / "single" / kind
        whole = lazyckpt.open(path)
        view = lazyckpt.open(path, rules={name: {"cat": 0, "rows": 61}})
        assert whole[name].shape == (64, 16) and view[name].shape == (61, 16) and not view.problems
        for state, part in view.states.items():
            if state != "step":
                same(part[name][...], whole.states[state][name][:61], state)
                same(part[name][-3:, 1], whole.states[state][name][58:61, 1], state)
        assert "3 are padding" in view[name].explain()
    with pytest.raises(FormatError, match="not understood"):
        lazyckpt.open(megatron_folder / "single" / "dist", rules={name: {"rows": 61}})


def test_dcp_to_safetensors_is_the_one_of_distributed() -> None:
    """tests/test_convert.py writes all of DCP's dtypes with it."""
    from lazyckpt.distributed import dcp_to_safetensors

    assert recipes.dcp_to_safetensors is dcp_to_safetensors


def test_integers_and_bools_of_dcp(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    state = {"w": torch.randn(3, 2), "ids": torch.arange(5), "small": torch.arange(4, dtype=torch.int8),
             "mask": torch.tensor([True, False])}  # fmt: skip
    dcp.save({"model": state}, checkpoint_id=tmp_path / "dcp")
    found = load_file(recipes.dcp_to_safetensors(tmp_path / "dcp", tmp_path / "out.safetensors"))
    assert found.keys() == state.keys() and all(bit_equal(found[n], t) for n, t in state.items())


# -- parts


def test_one_layer_reads_its_own_bytes(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finding it reads no data, writing it its bytes once, and nothing else of the files; under ZeRO-3, too."""
    states = {f"model.layers.{n}.{w}": torch.randn(64, 40 + n) for n in range(12) for w in ("up.weight", "down.weight")}
    states["model.embed.weight"] = torch.randn(5000, 64)
    (tmp_path / "hf").mkdir()
    save_file(states, tmp_path / "hf" / "model.safetensors")
    seen: list[counting.Counts] = []

    def opened(path: Path) -> lazyckpt.CheckpointView:
        view, counts = counting.opened(path)
        counts.clear()
        seen.append(counts)
        return view

    monkeypatch.setattr(parts, "CheckpointView", opened)
    part = recipes.one_layer(tmp_path / "hf", 11)
    assert sorted(part) == ["down.weight", "up.weight"] and seen[-1].bytes == 0
    part.to_safetensors(tmp_path / "layer.safetensors")
    assert seen[-1].bytes == part.nbytes == 2 * 64 * 51 * 4
    same(load_file(tmp_path / "layer.safetensors")["up.weight"], states["model.layers.11.up.weight"], "up")
    part = recipes.one_layer(models / "zero3" / "ckpt", 1)
    before = seen[-1].bytes
    truth = torch.load(models / "zero3" / "truth.pt")["weights"]
    for name, t in part.to("cpu").items():
        same(t, truth[f"model.layers.1.{name}"], name)
    assert len(part) == 9 and before == 0
    assert part.nbytes <= seen[-1].bytes <= part.nbytes + 4096  # gaps between fragments that are read along


def test_layers_that_are_not_there_or_twice(tmp_path: Path) -> None:
    names = [f"{side}.block.{n}.layer.{m}.w" for side in ("encoder", "decoder") for n in range(2) for m in range(2)]
    torch.save({name: torch.ones(2) for name in names}, tmp_path / "t5.pt")
    with pytest.raises(TensorNotFoundError, match=r"several layers 1: encoder\.block\.1, decoder\.block\.1"):
        recipes.one_layer(tmp_path / "t5.pt", 1)
    with pytest.raises(TensorNotFoundError, match=r"no layer 7; there are 4, under decoder\.block, encoder\.block"):
        recipes.one_layer(tmp_path / "t5.pt", 7)
    torch.save({"h.10.w": torch.ones(1), "h.1.w": torch.zeros(1), "head": torch.ones(2)}, tmp_path / "gpt.pt")
    same(recipes.one_layer(tmp_path / "gpt.pt", 1)["w"][...], torch.zeros(1), "h.1")


@pytest.mark.slow
def test_peft_loads_the_adapter(models: Path, tmp_path: Path) -> None:
    """DoRA and a module to save, trained under ZeRO-3, whose checkpoint has the base model, too."""
    need("peft")
    import peft

    folder = models / "zero3_lora"
    written = recipes.adapters(folder / "ckpt", tmp_path / "adapter", config=folder / "config")
    assert [p.name for p in written] == ["adapter_model.safetensors", "adapter_config.json"]
    truth = torch.load(folder / "truth.pt")
    model = peft.PeftModel.from_pretrained(loaded(folder / "base"), tmp_path / "adapter")
    as_held(model, truth)
    wanted = peft.get_peft_model_state_dict(model)
    found = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert found.keys() == wanted.keys() and all(bit_equal(found[n], t) for n, t in wanted.items())
    assert lazyckpt.open(tmp_path / "adapter").meta["adapter_config"]["r"] == 3


@pytest.mark.slow
@pytest.mark.parametrize("method", ["LoraConfig", "IA3Config", "LoHaConfig", "LoKrConfig", "OFTConfig", "BOFTConfig"])
def test_the_names_of_peft(tmp_path: Path, method: str) -> None:
    """Two adapters on an embedding, a linear layer and a head of its own; saved by torch, wrapped as trainers do."""
    need("peft")
    import peft

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    options = {"oft_block_size": 4, "r": 0} if method == "OFTConfig" else {}
    options |= {"boft_block_size": 4} if method == "BOFTConfig" else {}
    config = getattr(peft, method)(target_modules=["up"], modules_to_save=["head"],
                                   **({"feedforward_modules": []} if method == "IA3Config" else options))  # fmt: skip
    model = peft.get_peft_model(Net(), config)
    model.add_adapter("second", config)
    torch.save({"model": {f"module.{n}": t for n, t in model.state_dict().items()}}, tmp_path / "t.pt")
    for adapter in ("default", "second"):
        recipes.adapters(tmp_path / "t.pt", tmp_path / adapter, adapter=adapter)
        found = load_file(tmp_path / adapter / "adapter_model.safetensors")
        wanted = peft.get_peft_model_state_dict(model, adapter_name=adapter)
        assert found.keys() == wanted.keys()
        assert all(bit_equal(found[n], t) for n, t in wanted.items())


def test_adapters_by_hand(tmp_path: Path) -> None:
    """PEFT's documented format (docs/source/developer_guides/checkpoint.md), without peft."""
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    state = {
        f"{layer}.base_layer.weight": torch.randn(4, 4),
        f"{layer}.lora_A.default.weight": torch.randn(2, 4),
        f"{layer}.lora_B.default.weight": torch.randn(4, 2),
        f"{layer}.lora_A.other.weight": torch.randn(3, 4),
        "base_model.model.score.original_module.weight": torch.randn(2, 4),
        "base_model.model.score.modules_to_save.default.weight": torch.randn(2, 4),
    }
    torch.save(state, tmp_path / "t.pt")
    written = recipes.adapters(tmp_path / "t.pt", tmp_path / "adapter")
    assert [p.name for p in written] == ["adapter_model.safetensors"]
    found = load_file(written[0])
    assert found.keys() == {f"{layer}.lora_A.weight", f"{layer}.lora_B.weight", "base_model.model.score.weight"}
    same(found[f"{layer}.lora_A.weight"], state[f"{layer}.lora_A.default.weight"], "A")
    head = "base_model.model.score"
    same(found[f"{head}.weight"], state[f"{head}.modules_to_save.default.weight"], "score")
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    again = recipes.adapters(tmp_path / "adapter", tmp_path / "bf16", dtype=torch.bfloat16)  # what the Trainer leaves
    assert [p.name for p in again] == ["adapter_model.safetensors", "adapter_config.json"]
    assert {n: t.dtype for n, t in load_file(again[0]).items()} == dict.fromkeys(found, torch.bfloat16)
    with pytest.raises(TensorNotFoundError, match=r"no adapter 'third'; there is: default, other"):
        recipes.adapters(tmp_path / "t.pt", tmp_path / "no", adapter="third")
    torch.save({"w": torch.ones(2)}, tmp_path / "base.pt")
    with pytest.raises(TensorNotFoundError, match="no name is one of PEFT's"):
        recipes.adapters(tmp_path / "base.pt", tmp_path / "no")
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "bias": "all"}')
    with pytest.raises(DataError, match="bias='all'"):
        recipes.adapters(tmp_path / "t.pt", tmp_path / "no", config=tmp_path)
    assert not (tmp_path / "no").exists()


# -- what training leaves behind


@pytest.mark.parametrize("name", ["verl_fsdp2", "accelerate_sharded", "accelerate_local", "tensor_parallel"])
@pytest.mark.parametrize("file", ["out.safetensors", "out.pt"])
def test_rank_files_as_one(rank_cases: dict[str, Case], tmp_path: Path, name: str, file: str) -> None:
    case = rank_cases[name]
    path = recipes.fsdp_ranks_to_file(case.path, tmp_path / file)
    found = load_file(path) if path.suffix == ".safetensors" else torch.load(path)
    assert path == tmp_path / file and found.keys() == case.truth["weights"].keys()
    for n, t in case.truth["weights"].items():
        same(found[n], t, n)


def test_rank_files_that_do_not_make_one(rank_cases: dict[str, Case], tmp_path: Path) -> None:
    case = rank_cases["accelerate_local"]
    folder = tmp_path / "ranks"
    folder.mkdir()
    for path in case.path.glob("*.bin"):
        (folder / path.name).write_bytes(path.read_bytes())
    with pytest.raises(FormatError, match=r"_flat_param' is made of is not known.*'flat'"):
        recipes.fsdp_ranks_to_file(folder, tmp_path / "out.pt")
    with pytest.raises(FormatError, match="no folder of FSDP's rank files"):
        save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
        recipes.fsdp_ranks_to_file(tmp_path / "model.safetensors", tmp_path / "out.pt")
    with pytest.raises(DestinationError, match="no file of weights"):
        recipes.fsdp_ranks_to_file(case.path, tmp_path / "folder")
    assert not (tmp_path / "out.pt").exists()


def test_resume_zero(zero_cases: dict[str, Case], tmp_path: Path) -> None:
    """tests/test_to_universal.py trains on from such folders, on other ranks."""
    case = zero_cases["zero2_bf16_dp3"]
    lines = recipes.resume_zero(case.path, tmp_path / "universal")
    assert lines == {"checkpoint": {"load_universal": True}}
    view = lazyckpt.open(tmp_path / "universal")
    assert (tmp_path / "universal" / "latest_universal").is_file() or view.format == "deepspeed-universal"
    for state in ("fp32", "exp_avg", "exp_avg_sq"):
        for name, t in case.truth[state].items():
            if name in view.states[state]:
                same(view.states[state][name][...], t, (state, name))
        assert set(case.truth[state]) <= set(view.states[state]) | set(view.aliases)


def test_moments_over_time(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    truth = []
    for step in (10, 20, 30):
        model(torch.randn(5, 6)).square().sum().backward()
        optimizer.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, tmp_path / f"step_{step}.pt")
        slots = optimizer.state[model[0].weight]
        truth.append((model[0].weight.detach().clone(), slots["exp_avg"].clone(), slots["exp_avg_sq"].clone()))
    moments = recipes.moments_over_time(tmp_path, "0.weight")
    assert list(moments.data_vars) == ["weights", "exp_avg", "exp_avg_sq"]  # Adam's count of steps has no such shape
    assert moments["exp_avg"].dims == ("step", "d4", "d6") and moments["step"].values.tolist() == [10, 20, 30]
    for n, state in enumerate(("weights", "exp_avg", "exp_avg_sq")):
        assert np.array_equal(moments[state].values, torch.stack([t[n] for t in truth]).numpy())
    assert np.array_equal(moments["exp_avg"].sel(step=20).values[1:, ::2], truth[1][1][1:, ::2].numpy())
    norms = (moments["exp_avg"] ** 2).sum(("d4", "d6")) ** 0.5
    assert np.allclose(norms, [t[1].norm() for t in truth])
    torch.save({"model": model.state_dict()}, tmp_path / "step_40.pt")  # without its optimizer
    moments = recipes.moments_over_time(tmp_path, "0.weight")
    assert moments["weights"].sizes["step"] == 4 and moments["step_exp_avg"].values.tolist() == [10, 20, 30]
    with pytest.raises(TensorNotFoundError, match=r"no tensor or prefix '0\.wait'"):
        recipes.moments_over_time(tmp_path, "0.wait")
    with pytest.raises(DataError, match="'0' is a prefix"):
        recipes.moments_over_time(tmp_path, "0")


def test_moments_of_zero(zero_cases: dict[str, Case], tmp_path: Path) -> None:
    """Steps on different numbers of ranks are one series."""
    for step, name in ((1, "zero3_bf16_dp2"), (2, "zero3_bf16_dp2")):
        (tmp_path / f"checkpoint-{step}").symlink_to(zero_cases[name].path)
    truth = zero_cases["zero3_bf16_dp2"].truth
    name = max(truth["exp_avg"], key=lambda n: truth["exp_avg"][n].numel())
    moments = recipes.moments_over_time(tmp_path, name)
    for state in ("fp32", "exp_avg", "exp_avg_sq"):
        assert np.array_equal(moments[state].values, torch.stack([truth[state][name]] * 2).numpy())
