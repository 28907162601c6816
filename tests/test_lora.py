"""Adapters in the weights of a model, against `merge_and_unload` of PEFT."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import lazyckpt
from lazyckpt.errors import DataError, FormatError
from lazyckpt.testing import opened

peft = pytest.importorskip("peft")
Conv1D = pytest.importorskip("transformers.pytorch_utils").Conv1D

pytestmark = pytest.mark.filterwarnings("ignore")


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(nn.ModuleDict({"q": nn.Linear(6, 9), "o": nn.Linear(9, 6)}) for _ in range(3))
        self.turned = Conv1D(10, 6)
        self.square = Conv1D(6, 6)
        self.conv = nn.Conv2d(4, 5, 3)
        self.point = nn.Conv2d(4, 6, 1)
        self.line = nn.Conv1d(4, 5, 3)
        self.head = nn.Linear(6, 3)
        self.to(dtype)
        for one in self.parameters():
            one.requires_grad_(False).normal_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def adapted(net: nn.Module, config: Any, folder: Path, dtype: torch.dtype | None = None, **how: Any) -> Path:
    """Write an adapter with random weights."""
    model = peft.get_peft_model(copy.deepcopy(net), config)
    generator = torch.Generator().manual_seed(7)
    for name, one in model.named_parameters():
        if any(word in name for word in ("lora_", "hada_", "lokr_", "modules_to_save")) or one.requires_grad:
            with torch.no_grad():
                one.copy_(torch.randn(one.shape, generator=generator) * 0.3 + ("magnitude" in name))
                if dtype is not None:
                    one.data = one.data.to(dtype)
    model.save_pretrained(folder, **how)
    return folder


def merged(net: nn.Module, *folders: Path) -> dict[str, torch.Tensor]:
    """The weights by PEFT."""
    model = peft.PeftModel.from_pretrained(copy.deepcopy(net), folders[0], adapter_name="a0")
    for n, folder in enumerate(folders[1:], 1):
        model.load_adapter(folder, f"a{n}")
    names = [f"a{n}" for n in range(len(folders))]
    return dict(model.merge_and_unload(adapter_names=names).state_dict())


def saved(net: nn.Module, path: Path, prefix: str = "") -> lazyckpt.CheckpointView:
    save_file({prefix + k: v.contiguous() for k, v in net.state_dict().items()}, path)
    return lazyckpt.open(path, cache=False)


def compare(view: lazyckpt.CheckpointView, truth: dict[str, torch.Tensor], base: nn.Module, changed: int) -> None:
    """Compare with PEFT's weights: float32 within a few roundings, 16-bit floats within one of the result."""
    original = base.state_dict()
    assert set(view) == set(truth)
    found = 0
    for name, want in truth.items():
        got = view[name][...]
        assert got.dtype == want.dtype
        assert got.shape == want.shape
        same = name in original and original[name].shape == want.shape and torch.equal(want, original[name])
        found += not same
        if same:
            assert torch.equal(got, want), name
        else:
            # a result next to a rounding boundary may fall on either side, as the float32 sums differ
            eps = torch.finfo(got.dtype).eps
            torch.testing.assert_close(
                got.float(), want.float(), rtol=eps if got.dtype.itemsize == 2 else 1e-5, atol=2e-5
            )
            if got.dtype.itemsize == 2:
                assert (got != want).sum() <= 0.02 * got.numel() + 1, name
    assert found == changed


LORA = {"r": 4, "lora_alpha": 6, "target_modules": ["q", "o"]}
EVERY = ["q", "o", "embed", "turned", "square", "conv", "point", "line"]
CASES: dict[str, tuple[Any, int]] = {
    "lora": (lambda: peft.LoraConfig(**LORA), 6),
    "rslora": (lambda: peft.LoraConfig(**LORA, use_rslora=True), 6),
    "patterns": (
        lambda: peft.LoraConfig(
            **LORA, rank_pattern={"layers.1.q": 2, "o": 3}, alpha_pattern={r"layers.[02].q": 32, "o": 5}
        ),
        6,
    ),
    "layers_to_transform": (lambda: peft.LoraConfig(**LORA, layers_to_transform=[1], layers_pattern="layers"), 2),
    "every module": (lambda: peft.LoraConfig(r=3, lora_alpha=5, target_modules=EVERY), 12),
    "fan_in_fan_out": (lambda: peft.LoraConfig(r=3, target_modules=["square"], fan_in_fan_out=True), 1),
    "dora": (lambda: peft.LoraConfig(r=3, lora_alpha=5, target_modules=EVERY, use_dora=True), 12),
    "modules_to_save": (lambda: peft.LoraConfig(**LORA, modules_to_save=["head"]), 8),
    "bias": (lambda: peft.LoraConfig(**LORA, bias="lora_only"), 12),
    "bias all": (lambda: peft.LoraConfig(**LORA, bias="all"), 18),
    "lora_bias": (lambda: peft.LoraConfig(**LORA, lora_bias=True), 12),
    "loha": (lambda: peft.LoHaConfig(r=4, alpha=6, target_modules=["q", "o", "conv", "point", "line"]), 9),
    "loha effective": (
        lambda: peft.LoHaConfig(r=4, alpha=6, target_modules=["conv", "line"], use_effective_conv2d=True), 2
    ),
    "lokr": (lambda: peft.LoKrConfig(r=1, alpha=6, target_modules=["q", "o", "conv", "point", "line"]), 9),
    "lokr both": (
        lambda: peft.LoKrConfig(
            r=1, alpha=6, target_modules=["q", "o", "conv"], decompose_both=True, use_effective_conv2d=True
        ),
        7,
    ),
    "lokr whole": (lambda: peft.LoKrConfig(r=64, alpha=6, target_modules=["q", "o"], decompose_factor=3), 6),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_equals_peft(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    config, changed = CASES[case]
    net = Net(dtype)
    folder = adapted(net, config(), tmp_path / "adapter")
    compare(lazyckpt.apply_lora(saved(net, tmp_path / "base.safetensors"), folder), merged(net, folder), net, changed)


class Experts(nn.Module):
    def __init__(self, transposed: bool, square: bool) -> None:
        super().__init__()
        inner = 6 if square else 7
        up, down = (3, 2 * inner, 6), (3, 6, inner)
        if transposed:
            up, down = (3, 6, 2 * inner), (3, inner, 6)
            self.is_transposed = True
        self.gate_up_proj = nn.Parameter(torch.empty(up))
        self.down_proj = nn.Parameter(torch.empty(down))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Mixture(nn.Module):
    def __init__(self, transposed: bool, square: bool, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"q": nn.Linear(6, 9), "experts": Experts(transposed, square)}) for _ in range(2)
        )
        self.to(dtype)
        for one in self.parameters():
            one.requires_grad_(False).normal_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_stacked_experts(transposed: bool, square: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    net = Mixture(transposed, square, dtype)
    config = peft.LoraConfig(
        r=2,
        lora_alpha=3,
        target_modules=["q"],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
        rank_pattern={"experts.down_proj": 4},
    )
    folder = adapted(net, config, tmp_path / "adapter")
    compare(lazyckpt.apply_lora(saved(net, tmp_path / "base.safetensors"), folder), merged(net, folder), net, 6)


def test_square_experts_alone_are_refused(tmp_path: Path) -> None:
    net = Mixture(True, True, torch.float32)
    config = peft.LoraConfig(r=2, target_modules=[], target_parameters=["experts.down_proj"])
    folder = adapted(net, config, tmp_path / "adapter")
    with pytest.raises(DataError, match="square"):
        lazyckpt.apply_lora(saved(net, tmp_path / "base.safetensors"), folder)


# PEFT takes DoRA's norms of a 16-bit weight from which the first adapter was subtracted again, with a rounding
@pytest.mark.parametrize(
    ("dtype", "dora"), [(torch.float32, False), (torch.float32, True), (torch.bfloat16, False), (torch.float16, False)]
)
def test_several_adapters(dtype: torch.dtype, dora: bool, tmp_path: Path) -> None:
    net = Net(dtype)
    first = adapted(net, peft.LoraConfig(**LORA, use_dora=dora), tmp_path / "a")
    second = adapted(net, peft.LoraConfig(r=2, lora_alpha=9, target_modules=["q"], use_dora=dora), tmp_path / "b")
    view = lazyckpt.apply_lora(saved(net, tmp_path / "base.safetensors"), [first, second])
    compare(view, merged(net, first, second), net, 6)


def test_scale_multiplies_the_own_scale(tmp_path: Path) -> None:
    net = Net()
    folder = adapted(net, peft.LoraConfig(**LORA), tmp_path / "adapter")
    base = saved(net, tmp_path / "base.safetensors")
    model = peft.PeftModel.from_pretrained(copy.deepcopy(net), folder)
    for module in model.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            module.scale_layer(0.25)
    compare(lazyckpt.apply_lora(base, folder, 0.25), dict(model.merge_and_unload().state_dict()), net, 6)
    none = lazyckpt.apply_lora(base, folder, 0)
    assert all(torch.equal(none[name][...], base[name][...]) for name in base)


def test_tied_names_change_together(tmp_path: Path) -> None:
    torch.manual_seed(0)
    a, b, w = torch.randn(2, 8), torch.randn(5, 2), torch.randn(5, 8)
    torch.save({"embed.weight": w, "head.weight": w}, tmp_path / "base.pt")
    save_file(
        {"base_model.model.head.lora_A.weight": a, "base_model.model.head.lora_B.weight": b}, tmp_path / "a.safetensors"
    )
    view = lazyckpt.apply_lora(
        lazyckpt.open(tmp_path / "base.pt"), tmp_path / "a.safetensors", config={"r": 2, "lora_alpha": 4}
    )
    assert view.owner("head.weight") == view.owner("embed.weight")
    torch.testing.assert_close(view["head.weight"][...], w + 2 * b @ a)


@pytest.mark.parametrize("format", ["bin", "view"])
@pytest.mark.parametrize("outer", ["", "model.", "model.language_model.", "language_model.model."])
def test_modules_around_the_model(outer: str, format: str, tmp_path: Path) -> None:
    net = Net()
    how = {"safe_serialization": False} if format == "bin" else {}
    folder: Any = adapted(net, peft.LoraConfig(**LORA), tmp_path / "adapter", **how)
    base = saved(net, tmp_path / "base.safetensors", outer)
    view = lazyckpt.apply_lora(base, lazyckpt.open(folder) if format == "view" else folder)
    truth = {outer + name: t for name, t in merged(net, folder).items()}
    for name in base:
        torch.testing.assert_close(view[name][...], truth[name])


def by_hand(base: dict[str, torch.Tensor], name: str, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    w = base[name]
    return w + scale * (b.flatten(1) @ a.flatten(1)).reshape(w.shape)


NAMES = "down_blocks.0.attn1.to_q", "down_blocks.0.attn1.to_out.0", "mid_block.conv", "text_model.layers.0.mlp.fc1"
KOHYA = {
    NAMES[0]: "lora_unet_down_blocks_0_attn1_to_q",
    NAMES[1]: "lora_unet_down_blocks_0_attn1_to_out_0",
    NAMES[2]: "lora_unet_mid_block_conv",
    NAMES[3]: "lora_te_text_model_layers_0_mlp_fc1",
}
OLD = {
    NAMES[0]: "unet.down_blocks.0.attn1.processor.to_q_lora",
    NAMES[1]: "unet.down_blocks.0.attn1.processor.to_out_lora",
    NAMES[2]: "unet.mid_block.conv.lora",
    NAMES[3]: "text_encoder.text_model.layers.0.mlp.fc1.lora_linear_layer",
}


@pytest.mark.parametrize("pipeline", [False, True])
@pytest.mark.parametrize("style", ["kohya", "diffusers", "old diffusers"])
def test_names_of_image_models(style: str, pipeline: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    part = lambda name: ("text_encoder." if name.startswith("text") else "unet.") if pipeline else ""  # noqa: E731
    shapes = dict(zip(NAMES, [(8, 6), (6, 8), (5, 4, 3, 3), (7, 6)], strict=True))
    base = {f"{part(name)}{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
    other = {"text_encoder_2.text_model.layers.0.mlp.fc1.weight": torch.randn(9, 6)} if pipeline else {}
    save_file(base | other, tmp_path / "base.safetensors")
    tensors, truth = {}, dict(other)
    for name, shape in shapes.items():
        ones = (1,) * (len(shape) - 2)
        a, b = torch.randn(2, *shape[1:]), torch.randn(shape[0], 2, *ones)
        alpha = 1.0 if style == "kohya" else 2.0
        if style == "kohya":
            tensors |= {f"{KOHYA[name]}.lora_down.weight": a, f"{KOHYA[name]}.lora_up.weight": b}
            tensors[f"{KOHYA[name]}.alpha"] = torch.tensor(alpha)
        elif style == "diffusers":
            full = f"{'text_encoder.' if name.startswith('text') else 'unet.'}{name}"
            tensors |= {f"{full}.lora_A.weight": a, f"{full}.lora_B.weight": b}
        else:
            tensors |= {f"{OLD[name]}.down.weight": a, f"{OLD[name]}.up.weight": b}
        full = f"{part(name)}{name}.weight"
        truth[full] = by_hand(base, full, a, b, alpha / 2)
    save_file(tensors, tmp_path / "lora.safetensors")
    view = lazyckpt.apply_lora(lazyckpt.open(tmp_path / "base.safetensors"), tmp_path / "lora.safetensors")
    for name, want in truth.items():
        torch.testing.assert_close(view[name][...], want)


def test_mid_of_kohya(tmp_path: Path) -> None:
    torch.manual_seed(0)
    w, down, mid, up = (
        torch.randn(5, 4, 3, 3),
        torch.randn(2, 4, 1, 1),
        torch.randn(2, 2, 3, 3),
        torch.randn(5, 2, 1, 1),
    )
    save_file({"conv.weight": w}, tmp_path / "base.safetensors")
    stem = "lora_unet_conv"
    tensors = {"lora_down.weight": down, "lora_mid.weight": mid, "lora_up.weight": up, "alpha": torch.tensor(1.0)}
    save_file({f"{stem}.{k}": v for k, v in tensors.items()}, tmp_path / "lora.safetensors")
    view = lazyckpt.apply_lora(lazyckpt.open(tmp_path / "base.safetensors"), tmp_path / "lora.safetensors")
    # LyCORIS, lycoris/functional/general.py rebuild_tucker
    delta = torch.einsum("i j k l, i p, j r -> p r k l", mid, up[:, :, 0, 0].T, down[:, :, 0, 0])
    torch.testing.assert_close(view["conv.weight"][...], w + 0.5 * delta)


def test_what_fits_nothing_is_listed(tmp_path: Path) -> None:
    net = Net()
    folder = adapted(net, peft.LoraConfig(**LORA, modules_to_save=["head"]), tmp_path / "adapter")
    less = {k: v for k, v in net.state_dict().items() if not k.startswith("layers.1.q")}
    save_file(less, tmp_path / "less.safetensors")
    with pytest.raises(DataError, match=r"layers.1.q.lora_A.weight"):
        lazyckpt.apply_lora(lazyckpt.open(tmp_path / "less.safetensors"), folder)
    wrong = dict(net.state_dict()) | {"layers.0.q.weight": torch.zeros(9, 7)}
    save_file({k: v.contiguous() for k, v in wrong.items()}, tmp_path / "wrong.safetensors")
    with pytest.raises(DataError, match=r"layers.0.q .*\(9, 7\)"):
        lazyckpt.apply_lora(lazyckpt.open(tmp_path / "wrong.safetensors"), folder)
    with pytest.raises(DataError, match="holds no adapter"):
        lazyckpt.apply_lora(lazyckpt.open(tmp_path / "wrong.safetensors"), tmp_path / "less.safetensors")
    coded = dict(net.state_dict()) | {"layers.0.q.weight": torch.zeros(9, 6, dtype=torch.int8)}
    save_file({k: v.contiguous() for k, v in coded.items()}, tmp_path / "coded.safetensors")
    with pytest.raises(DataError, match="dequantize"):
        lazyckpt.apply_lora(lazyckpt.open(tmp_path / "coded.safetensors"), folder)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"peft_type": "IA3"}, "IA3"),
        ({"init_lora_weights": "pissa"}, "pissa"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"lora_alpha": "four"}, "'four': no finite number"),
        ({"rank_pattern": {"layers": [1]}, "r": 1, "lora_alpha": [1]}, "no finite number"),
        ({"alora_invocation_tokens": [1, 2]}, "cannot be merged"),  # as PEFT says
    ],
)
def test_settings_that_are_refused(setting: dict[str, Any], message: str, tmp_path: Path) -> None:
    net = Net()
    folder = adapted(net, peft.LoraConfig(**LORA), tmp_path / "adapter")
    config = json.loads((folder / "adapter_config.json").read_text())
    with pytest.raises(lazyckpt.LazyckptError, match=message):
        lazyckpt.apply_lora(saved(net, tmp_path / "b.safetensors"), folder, config=config | setting)


def test_configurations_that_are_no_table_are_refused(tmp_path: Path) -> None:
    net = Net()
    folder = adapted(net, peft.LoraConfig(**LORA), tmp_path / "adapter")
    base = saved(net, tmp_path / "b.safetensors")
    with pytest.raises(FormatError, match="not a table"):
        lazyckpt.apply_lora(base, folder, config="adapter_config.json")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="takes views"):
        lazyckpt.apply_lora("base", folder)  # type: ignore[arg-type]


def test_a_file_without_config_is_refused(tmp_path: Path) -> None:
    net = Net()
    folder = adapted(net, peft.LoraConfig(**LORA), tmp_path / "adapter")
    (folder / "adapter_config.json").unlink()
    with pytest.raises(DataError, match=r"adapter_config\.json"):
        lazyckpt.apply_lora(saved(net, tmp_path / "b.safetensors"), folder / "adapter_model.safetensors")


def test_a_row_reads_a_row_of_the_base_and_of_b(tmp_path: Path) -> None:
    out, inner, rank = 64, 512, 4
    torch.manual_seed(0)
    w, a, b = torch.randn(out, inner), torch.randn(rank, inner), torch.randn(out, rank)
    save_file({"q.weight": w}, tmp_path / "base.safetensors")
    save_file({"q.lora_A.weight": a, "q.lora_B.weight": b}, tmp_path / "lora.safetensors")
    base, counts = opened(tmp_path / "base.safetensors")
    adapter, more = opened(tmp_path / "lora.safetensors")
    view = lazyckpt.apply_lora(base, adapter, config={"r": rank, "lora_alpha": rank})
    counts.clear()
    more.clear()
    row = view["q.weight"][5]
    torch.testing.assert_close(row, w[5] + b[5] @ a)
    assert counts.bytes == inner * 4
    assert more.bytes == rank * 4 + rank * inner * 4


@pytest.mark.parametrize("case", ["every module", "dora", "loha effective", "lokr both"])
def test_slices_equal_the_whole(case: str, tmp_path: Path) -> None:
    net = Net(torch.bfloat16)
    folder = adapted(net, CASES[case][0](), tmp_path / "adapter")
    view = lazyckpt.apply_lora(saved(net, tmp_path / "base.safetensors"), folder)
    for name, tensor in view.items():
        whole = tensor[...]
        assert torch.equal(tensor[1:3], whole[1:3]), name
        assert torch.equal(tensor[..., ::2], whole[..., ::2]), name
        assert torch.equal(tensor[torch.tensor([2, 0])], whole[torch.tensor([2, 0])]), name


def test_a_folder_for_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**small, **heads))
    model.save_pretrained(tmp_path / "base")
    folder = adapted(model, peft.LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"]), tmp_path / "adapter")
    lazyckpt.recipes.to_hf(lazyckpt.apply_lora(lazyckpt.open(tmp_path / "base"), folder), tmp_path / "out")
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    truth = peft.PeftModel.from_pretrained(model, folder).merge_and_unload()
    for name, want in truth.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], want, rtol=1e-5, atol=1e-6)


def test_the_result_is_written_and_opened(tmp_path: Path) -> None:
    net = Net(torch.bfloat16)
    folder = adapted(net, peft.LoraConfig(**LORA, use_dora=True), tmp_path / "adapter")
    view = lazyckpt.apply_lora(saved(net, tmp_path / "base.safetensors"), folder)
    view.to_safetensors(tmp_path / "out.safetensors", progress=False)
    found = load_file(tmp_path / "out.safetensors")
    assert set(found) == set(view)
    assert all(torch.equal(found[name], view[name][...]) for name in view)
