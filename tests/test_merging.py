"""Merges: equal to mergekit's, independent of cuts, and with errors that say what is wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import lazyckpt
from lazyckpt.cli.program import app
from lazyckpt.core.ops.ranking import mask_key, positions, random_mask
from lazyckpt.derive.settings import depths
from lazyckpt.recipes import merge_to_hf, read_merge
from lazyckpt.testing import opened

from .writers import mergekit_merges

GOLDEN = Path(__file__).parent / "golden" / "mergekit"
CASES: dict[str, dict[str, Any]] = json.loads((GOLDEN / "cases.json").read_text())
# mergekit rounds each step to float32, in an order of its own. The largest difference, relative to the largest value.
CLOSE = 4e-7
Models = dict[str, lazyckpt.CheckpointView]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(GOLDEN)


@pytest.fixture(scope="module")
def truth() -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / "truth.safetensors")


@pytest.fixture(scope="module")
def models() -> Models:
    return {name: lazyckpt.open(GOLDEN / name) for name in ("base", "a", "b")}


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).abs().max() / b.double().abs().max())


def same(found: lazyckpt.CheckpointView, truth: dict[str, torch.Tensor], case: str) -> None:
    wanted = {name.partition("/")[2]: t for name, t in truth.items() if name.startswith(f"{case}/")}
    assert set(found) == set(wanted)
    for name, t in wanted.items():
        t_found = found[name][...]
        assert t_found.dtype == t.dtype
        assert difference(t_found, t) <= (CLOSE if t.dtype == torch.float32 else 2**-8), name


def test_the_recorded_merges_are_those_of_the_script() -> None:
    assert CASES == mergekit_merges.CASES
    assert json.loads((GOLDEN / "writers.json").read_text())["mergekit"] == "0.1.5"


@pytest.mark.parametrize("case", CASES)
def test_merge_files_give_what_mergekit_gives(case: str, here: None, truth: dict[str, torch.Tensor]) -> None:
    merge = read_merge(CASES[case])
    same(merge.view, truth, case)
    assert not [p for p in merge.view.problems if p.code != "unused-rule"]


CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("base a b", {"weights": [0.2, 0.6, 0.9]}),
    "linear_sum": ("base a b", {"weights": [0.2, 0.6, 0.9], "normalize": False}),
    "linear_filters": (
        "a b",
        {"weights": [{"*self_attn*": [0, 0.5, 0.3, 0.7, 1], "*mlp*": [1, 0.5], "*": 0.4}, [0.3, 2]]},
    ),
    "linear_bf16": ("base a b", {"weights": [0.2, 0.6, 0.9], "dtype": torch.bfloat16}),
    "slerp": ("a b", {"t": {"*self_attn*": [0, 0.5, 0.3, 0.7, 1], "*mlp*": [1, 0.5], "*": 0.4}}),
    "slerp_models": ("a", {"method": "slerp", "t": 0.3, "base": "b"}),
    "nuslerp": ("a b", {"weights": [0.6, 0.9]}),
    "multislerp_base": ("a b", {"method": "multislerp", "weights": [0.6, 0.9], "base": "base"}),
    "karcher": ("base a b", {}),
    "model_stock": ("a base b", {"base": "base"}),
    "task_arithmetic": ("a b", {"weights": [0.6, 0.9], "base": "base", "lambda_": 0.7, "normalize": True}),
    "ties": ("a b", {"weights": [0.6, 0.9], "base": "base", "density": 0.45, "lambda_": 1.25}),
    "dare_ties": ("a b", {"weights": [0.6, 0.9], "base": "base", "density": [0.6, 0.6], "seed": 5}),
    "breadcrumbs": ("a b", {"weights": [0.6, 0.9], "base": "base", "density": 0.7, "gamma": 0.1}),
    "breadcrumbs_ties": (
        "a b",
        {"weights": [0.6, 0.9], "base": "base", "density": 0.5, "gamma": [[0.3, 0.0], [0.3, 0.0]]},
    ),
}


@pytest.mark.parametrize("case", CALLS)
def test_calls_give_what_mergekit_gives(case: str, models: Models, truth: dict[str, torch.Tensor]) -> None:
    names, options = CALLS[case]
    options = {"method": case.partition("_b")[0] if case.startswith("linear") else case, **options}
    if case.startswith("linear"):
        options["method"] = "linear"
    if "base" in options:
        options["base"] = models[options["base"]]
    same(lazyckpt.merge([models[name] for name in names.split()], **options), truth, case)


METHODS: dict[str, dict[str, Any]] = {
    "linear": {},
    "slerp": {"t": 0.3},
    "nuslerp": {"based": True},
    "multislerp": {},
    "karcher": {},
    "model_stock": {"based": True},
    "task_arithmetic": {"based": True},
    "ties": {"based": True, "density": 0.4},
    "dare_ties": {"based": True, "density": 0.4},
    "dare_linear": {"based": True, "density": 0.4, "seed": 3},
    "breadcrumbs": {"based": True, "density": 0.5, "gamma": 0.2},
    "breadcrumbs_ties": {"based": True, "density": 0.5, "gamma": 0.2, "consensus": "count"},
}


@pytest.mark.parametrize("method", METHODS)
@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_a_part_is_the_part_of_the_whole(method: str, models: Models, data: st.DataObject) -> None:
    options = dict(METHODS[method])
    base = models["base"] if options.pop("based", False) else None
    view = lazyckpt.merge([models["a"], models["b"]], method=method, base=base, **options)
    name = data.draw(st.sampled_from(["model.layers.1.mlp.up_proj.weight", "lm_head.weight"]))
    rows, columns = view[name].shape
    axis = lambda n: st.one_of(  # noqa: E731
        st.integers(0, n - 1), st.slices(n), st.lists(st.integers(0, n - 1), min_size=1, max_size=4)
    )
    first = data.draw(axis(rows))
    second = data.draw(st.one_of(st.integers(0, columns - 1), st.slices(columns)))
    whole = view[name][...].numpy()
    found = lazyckpt.merge([models["a"], models["b"]], method=method, base=base, **options)[name][first, second]
    assert np.array_equal(found.numpy(), whole[first, second])


def test_large_tensors_are_cut_without_a_difference(tmp_path: Path) -> None:
    """Tensors of several blocks, with many equal magnitudes; the reference sorts the whole."""
    rng = torch.Generator().manual_seed(1)
    base = torch.randint(-64, 64, (1500, 1000), generator=rng) / 64
    other = base + torch.randint(-9, 10, base.shape, generator=rng) / 16
    for name, t in (("base", base), ("other", other)):
        save_file({"w": t}, tmp_path / f"{name}.safetensors")
    views = {name: lazyckpt.open(tmp_path / f"{name}.safetensors") for name in ("base", "other")}
    ties = lazyckpt.merge([views["other"]], method="ties", base=views["base"], density=0.37)["w"]
    delta = (other - base).flatten()
    kept = delta.abs().argsort(descending=True, stable=True)[: int(0.37 * delta.numel())]
    wanted = torch.zeros_like(delta)
    wanted[kept] = delta[kept]
    whole = ties[...]
    assert torch.equal(whole, base + wanted.reshape(base.shape))
    assert torch.equal(ties[700:702], whole[700:702])
    crumbs = lazyckpt.merge([views["other"]], method="breadcrumbs", base=views["base"], density=0.4, gamma=0.21)["w"]
    ranks = delta.abs().argsort(stable=True)
    count = delta.numel()
    start = count - int(0.4 * count) - int(0.21 * count)
    wanted = torch.zeros_like(delta)
    kept = ranks[start : start + int(0.4 * count)]
    wanted[kept] = delta[kept]
    assert torch.equal(crumbs[...], base + wanted.reshape(base.shape))


def test_float64_and_extreme_values_are_ranked(tmp_path: Path) -> None:
    rng = torch.Generator().manual_seed(2)
    delta = torch.randn(400, dtype=torch.float64, generator=rng) * 10 ** torch.linspace(-300, 300, 400).double()
    delta[7] = float("inf")
    save_file({"w": torch.zeros_like(delta)}, tmp_path / "base.safetensors")
    save_file({"w": delta}, tmp_path / "other.safetensors")
    base, other = (lazyckpt.open(tmp_path / f"{name}.safetensors") for name in ("base", "other"))
    for density in (0.0, 0.001, 0.5, 0.9975, 1.0):
        found = lazyckpt.merge([other], method="task_arithmetic", base=base)["w"].dtype
        assert found == torch.float64
        t = lazyckpt.merge([other], method="ties", base=base, density=density)["w"][...]
        kept = delta.abs().argsort(descending=True, stable=True)[: max(1, int(density * 400)) if density else 0]
        assert sorted(t.nonzero().flatten().tolist()) == sorted(kept.tolist())


def test_random_masks_follow_the_specification() -> None:
    for seed, number, name in ((0, 0, "w"), (5, 2, "model.layers.1.mlp.up_proj.weight")):
        wanted = mergekit_merges.mask(seed, number, name, 60, 0.3)
        places = positions((5, 12), (range(5), range(12)))
        assert random_mask(mask_key(seed, number, name), places, 0.3).flatten().tolist() == wanted
    keep = random_mask(mask_key(1, 0, "w"), torch.arange(200_000), 0.25)
    assert abs(float(keep.double().mean()) - 0.25) < 0.005  # five standard deviations


def test_slerp_of_a_view_with_itself(models: Models) -> None:
    one = models["a"]
    name = next(iter(one))
    same = lazyckpt.merge([one, one], method="slerp", t=0.25)[name][...]
    assert torch.equal(same, one[name][...] * 0.75 + one[name][...] * 0.25)


def test_settings_by_name_and_layer(models: Models) -> None:
    view = lazyckpt.merge([models["a"], models["b"]], weights=[{"*.mlp.*": [0, 1], "*": 1}, 1], normalize=False)
    up = [view[f"model.layers.{n}.mlp.up_proj.weight"].explain() for n in range(4)]
    assert ["weights=(0.0, 1.0)" in up[0], "weights=(1.0, 1.0)" in up[3]] == [True, True]
    with pytest.raises(lazyckpt.DataError, match=r"'t' has no value for 'lm_head.weight'"):
        lazyckpt.merge([models["a"], models["b"]], method="slerp", t={"*layers*": 0.5})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "fisher"}, "there is no method 'fisher'"),
        ({"method": "ties"}, "needs a base"),
        ({"method": "ties", "base": "base", "gamma": 1}, "no parameter 'gamma'"),
        ({"method": "linear", "base": "base"}, "has no base"),
        ({"weights": [1, 2, 3]}, "3 entries for 2 models"),
        ({"weights": [1, -1]}, "sum to 0"),
        ({"method": "multislerp", "weights": [1, -1]}, "sum to 0"),
        ({"weights": [float("nan"), 1]}, "'weight' of .*finite"),
        ({"weights": ["much", 1]}, "'weight' of .*much"),
        ({"method": "nuslerp", "nuslerp_row_wise": True}, "whole tensors only"),
        ({"method": "model_stock", "base": "base", "filter_wise": True}, "whole tensors only"),
        ({"method": "slerp"}, "'t' has no value"),
        ({"method": "karcher", "weights": [1, 1]}, "has no weights"),
        ({"method": "ties", "base": "base", "density": 50}, "'density' of .*50 is not between 0 and 1"),
        ({"method": "breadcrumbs", "base": "base", "gamma": [-0.1, 0]}, "'gamma' of .*not between"),
        ({"method": "slerp", "t": float("nan")}, "nan is not finite"),
        ({"method": "dare_ties", "base": "base", "seed": float("inf")}, "inf is not finite"),
        ({"dtype": torch.int8}, "is floating-point"),
        ({"method": "della"}, "mergekit's method 'della' is not supported"),
    ],
)
def test_errors_of_calls(models: Models, options: dict[str, Any], message: str) -> None:
    if "base" in options:
        options = {**options, "base": models[options["base"]]}
    with pytest.raises(lazyckpt.DataError, match=message):
        lazyckpt.merge([models["a"], models["b"]], **options)


def test_what_is_no_view_is_an_error(models: Models) -> None:
    with pytest.raises(TypeError, match=r"takes views, not .a\.safetensors.*lazyckpt\.open"):
        lazyckpt.merge(["a.safetensors", models["b"]])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="takes views, not 'base'"):
        lazyckpt.merge([models["a"], models["b"]], method="ties", base="base")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a list of views"):
        lazyckpt.mean(models["a"])  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["della", "della_linear", "sce", "nearswap", "arcee_fusion"])
def test_methods_that_are_not_computed_are_named(models: Models, name: str) -> None:
    with pytest.raises(lazyckpt.DataError, match=f"method '{name}' is not supported.*linear.*slerp.*ties"):
        lazyckpt.merge([models["a"], models["b"]], method=name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"merge_method": "sce"}, "'sce' is not supported"),
        ({"tokenizer_source": "union"}, "tokenizer_source is not supported"),
        ({"models": None}, "either models or slices"),
        ({"slices": [{"sources": []}]}, "either models or slices"),
        ({"model": 1}, "'model' is not known"),
        ({"models": [{"model": "a+lora"}]}, "LoRA"),
        ({"models": [{"parameters": {}}]}, "a source has no model"),
        ({"models": [{"model": "nothing"}]}, "nothing"),
        ({"parameters": {"weight": [{"filter": "mlp", "worth": 1}]}}, "a condition is a table"),
        ({"dtype": "float17"}, "float17"),
        ({"models": None, "slices": [{"sources": [{"model": "a", "layer_range": [2, 2]}]}]}, "has no layer"),
        ({"out_dtype": "int8"}, "dtype=.*int8: the result of a merge is floating-point"),
    ],
)
def test_errors_of_merge_files(here: None, change: dict[str, Any], message: str) -> None:
    case = {"merge_method": "linear", "models": [{"model": "a"}], "parameters": {"weight": 1}, **change}
    with pytest.raises(lazyckpt.LazyckptError, match=message):
        read_merge(case)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"merge_method": "sce"}, "merge.yml: .*'sce' is not supported"),
        ({"dtype": "float17"}, "merge.yml: .*float17"),
        ({"parameters": {"weight": "much"}}, "merge.yml: the parameter 'weight' of "),
        ({"parameters": {}}, "merge.yml: the parameter 'weight' has no value"),
        ({"parameters": {"weight": 0}}, "merge.yml: linear: the weights of .* sum to 0"),
        ({"merge_method": "slerp"}, "merge.yml: slerp needs a base model"),
    ],
)
def test_errors_name_the_merge_file(here: None, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    case = {"merge_method": "linear", "models": [{"model": "a"}], "parameters": {"weight": 1}, **change}
    (tmp_path / "merge.yml").write_text(json.dumps(case))  # JSON is YAML
    with pytest.raises(lazyckpt.DataError, match=message):
        read_merge(tmp_path / "merge.yml")


def test_names_and_shapes_that_differ_are_listed(tmp_path: Path, models: Models) -> None:
    tensors = load_file(GOLDEN / "a" / "model.safetensors")
    del tensors["model.norm.weight"]
    tensors["lm_head.weight"] = torch.zeros(14, 8)
    save_file(tensors, tmp_path / "model.safetensors")
    other = lazyckpt.open(tmp_path)
    with pytest.raises(
        lazyckpt.DataError, match=r"lacks 'model.norm.weight'; shapes differ: 'lm_head.weight' is 12x8 and"
    ):
        lazyckpt.merge([models["a"], other])
    file = {"merge_method": "linear", "models": [{"model": str(GOLDEN / "a")}, {"model": str(tmp_path)}]}
    with pytest.raises(lazyckpt.DataError, match="vocabularies are not merged"):
        read_merge({**file, "parameters": {"weight": 1}})
    kept = lazyckpt.merge([models["a"], other], missing="keep")
    assert torch.equal(kept["lm_head.weight"][...], models["a"]["lm_head.weight"][...])
    assert "model.norm.weight" not in lazyckpt.merge([models["a"], other], missing="skip")
    config = {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(lazyckpt.DataError, match=r"is quantized: take view\.dequantize"):
        read_merge({**file, "parameters": {"weight": 1}})


def test_a_folder_for_transformers(here: None, tmp_path: Path, truth: dict[str, torch.Tensor]) -> None:
    out = tmp_path / "out"
    (tmp_path / "config.yml").write_text(json.dumps(CASES["passthrough"]))  # JSON is YAML
    files = merge_to_hf(tmp_path / "config.yml", out)
    assert {path.name for path in files} == {"model.safetensors", "config.json"}
    config = json.loads((out / "config.json").read_text())
    assert config["num_hidden_layers"] == 8
    same(lazyckpt.open(out), truth, "passthrough")
    with pytest.raises(lazyckpt.DestinationError):
        merge_to_hf(tmp_path / "config.yml", out)


def test_the_command(here: None, tmp_path: Path, truth: dict[str, torch.Tensor]) -> None:
    def call(*args: str) -> Any:
        return CliRunner().invoke(app, ["merge", *args])

    (tmp_path / "config.yml").write_text(json.dumps(CASES["ties"]))
    out = str(tmp_path / "out")
    dry = call(str(tmp_path / "config.yml"), out, "--dry-run")
    assert dry.exit_code == 0 and "ties" in dry.output and not (tmp_path / "out").exists()
    done = call(str(tmp_path / "config.yml"), out, "--json")
    assert done.exit_code == 0 and json.loads(done.output)["plan"]["models"] == ["base", "a", "b"]
    same(lazyckpt.open(out), truth, "ties")
    second = str(tmp_path / "second")
    done = call("b", "a", "--method", "slerp", "--set", "t=0.3", "-o", second)
    assert done.exit_code == 0, done.output
    same(lazyckpt.open(second), truth, "slerp_models")
    third = str(tmp_path / "third")
    options = ("--base", "base", "--weight", "0.6", "--weight", "0.9", "--set", "density=0.45", "--set", "lambda=1.25")
    assert call("a", "b", "--method", "ties", *options, "-o", third, "-q").exit_code == 0
    same(lazyckpt.open(third), truth, "ties")
    assert call("a", "b").exit_code == 2
    counted = ("--base", "base", "--method", "ties", "--set", "consensus=count", "--dry-run", "-o", "fourth")
    assert call("a", "b", *counted).exit_code == 0
    for says, *wrong in (
        ("--weight", "--method", "ties", "--base", "base", "--set", "weight=0.3"),
        ("'densty'|densty: ties has no such parameter", "--method", "ties", "--base", "base", "--set", "densty=0.5"),
        ("slerp has no weights", "--method", "slerp", "--set", "t=0.3", "--weight", "0.5"),
        ("floating-point", "--dtype", "int8"),
    ):
        refused = call("a", "b", *wrong, "-o", str(tmp_path / "fifth"))
        assert refused.exit_code == 2 and re.search(says, refused.output), refused.output
    assert not (tmp_path / "fifth").exists()


def test_codes_that_are_kept_are_not_converted(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2), "codes": torch.ones(3).to(torch.float8_e4m3fn)}, tmp_path / "a.safetensors")
    save_file({"w": torch.ones(2)}, tmp_path / "b.safetensors")
    views = [lazyckpt.open(tmp_path / f"{name}.safetensors") for name in "ab"]
    assert lazyckpt.merge(views, missing="keep")["codes"].dtype == torch.float8_e4m3fn
    with pytest.raises(lazyckpt.DataError, match="'codes', which is f8_e4m3: its scales may be other tensors"):
        lazyckpt.merge(views, missing="keep", dtype=torch.bfloat16)


def test_memory_and_bytes_of_a_merge(tmp_path: Path) -> None:
    """A row of a linear merge reads a row of each model."""
    for name in "ab":
        save_file({"w": torch.randn(64, 256)}, tmp_path / f"{name}.safetensors")
    (a, counts_a), (b, counts_b) = (opened(tmp_path / f"{name}.safetensors") for name in "ab")
    t = lazyckpt.merge([a, b], weights=[0.3, 0.7])["w"]
    counts_a.clear(), counts_b.clear()
    t[5]
    assert (counts_a.bytes, counts_b.bytes) == (1024, 1024)


def test_models_that_mergekit_cannot_read(megatron_cases: Any, dcp_cases: Any, zero_cases: Any) -> None:
    """A merge file that names folders of Megatron, DCP and ZeRO."""
    for path in (megatron_cases["single"].path, dcp_cases["fsdp2"].path, zero_cases["zero3_bf16_dp2"].path):
        models = [
            {"model": str(path), "parameters": {"weight": [0.25, 1]}},
            {"model": f"{path}/", "parameters": {"weight": 0.5}},
        ]
        merge = read_merge({"merge_method": "linear", "models": models, "parameters": {"normalize": False}})
        view = lazyckpt.open(path)
        if view.format.startswith("megatron"):
            view = view.rename("hf")
        assert set(merge.view) == set(view)
        depth = depths(view)
        for name, t in view.items():
            if t.dtype.is_floating_point:
                wide = t[...].to(torch.float64 if t.dtype == torch.float64 else torch.float32)
                weight = 0.75 + 0.75 * depth(merge.view.owner(name))
                found = merge.view[name][...]
                assert found.dtype == t.dtype
                assert torch.allclose(found.to(wide.dtype), wide * weight, rtol=1e-2, atol=0), name


def test_names_that_one_model_lacks(tmp_path: Path) -> None:
    for n in (1, 2):
        one = tmp_path / f"m{n}"
        one.mkdir()
        more = {"b.weight": torch.ones(3), "c.weight": torch.ones(2)} if n == 2 else {"c.weight": torch.zeros(4)}
        save_file({"a.weight": torch.full((2, 2), float(n)), **more}, one / "model.safetensors")
        (tmp_path / "run").mkdir(exist_ok=True)
        torch.save(
            {"a": torch.full((2,), float(n)), **({"b": torch.ones(2)} if n == 2 else {})}, tmp_path / f"run/step_{n}.pt"
        )
    call = ["merge", str(tmp_path / "m1"), str(tmp_path / "m2"), "-q", "-o"]
    told = CliRunner().invoke(app, [*call, str(tmp_path / "out")])
    assert told.exit_code == 2 and "--missing skip" in told.output and not (tmp_path / "out").exists()
    for how, names in (("skip", {"a.weight"}), ("keep", {"a.weight", "b.weight", "c.weight"})):
        assert CliRunner().invoke(app, [*call, str(tmp_path / how), "--missing", how]).exit_code == 0
        view = lazyckpt.open(tmp_path / how)
        assert set(view) == names and (view["a.weight"][...] == 1.5).all()
        assert how == "skip" or view["c.weight"].shape == (4,)
    call = ["convert", str(tmp_path / "run"), str(tmp_path / "mean.safetensors"), "--average", "all", "-q"]
    assert CliRunner().invoke(app, call).exit_code == 2
    assert CliRunner().invoke(app, [*call, "--missing", "skip"]).exit_code == 0
    assert set(lazyckpt.open(tmp_path / "mean.safetensors")) == {"a"}
