"""The face: names and how they resolve, selections, states, and which reader reads a path."""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyckpt
from lazyckpt import CheckpointView, LazyTensor
from lazyckpt.testing.oracle import same

from . import processes
from .writers import Case

LAYERS = (0, 1, 2, 10)


def _state() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)

    def fresh(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g)

    state = {"model.embed.weight": fresh(11, 6).bfloat16()}
    for n in LAYERS:
        state |= {f"model.layers.{n}.attn.{p}.weight": fresh(6, 6) for p in "qkv"}
        state |= {f"model.layers.{n}.mlp.up.weight": fresh(13, 6), f"model.layers.{n}.mlp.down.weight": fresh(6, 13)}
        state |= {f"model.layers.{n}.norm.weight": fresh(6)}
    state |= {"model.norm.weight": fresh(6), "extra.layers.0.mlp.up.weight": fresh(2, 2), "step": torch.tensor(5)}
    state["head.weight"] = state["model.embed.weight"]
    return state


@pytest.fixture(scope="module")
def truth() -> dict[str, torch.Tensor]:
    return _state()


@pytest.fixture(scope="module")
def path(truth: dict[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("view") / "model.pt"
    torch.save(truth, path)
    return path


@pytest.fixture
def view(path: Path) -> CheckpointView:
    return lazyckpt.open(path)


# -- three ways to resolve


def test_a_full_name_is_a_tensor(view: CheckpointView, truth: dict[str, torch.Tensor]) -> None:
    for name, whole in truth.items():
        t = view[name]
        assert isinstance(t, LazyTensor) and t.name == name
        same(t[...], whole, name)


def test_a_prefix_is_a_view_of_relative_names(view: CheckpointView, truth: dict[str, torch.Tensor]) -> None:
    for prefix in ("model", "model.layers", "model.layers.1", "model.layers.1.mlp", "model.layers.1.mlp.up", "extra"):
        part = view[prefix]
        assert isinstance(part, CheckpointView)
        below = {n.removeprefix(prefix + "."): t for n, t in truth.items() if n.startswith(prefix + ".")}
        assert set(part) == set(below) and len(part) == len(below)
        for name, whole in below.items():
            same(part[name][...], whole, (prefix, name))
            assert part[name].name == f"{prefix}.{name}", "a tensor knows its full name"
        assert part.to().keys() == below.keys()
        assert part.numel == sum(t.numel() for t in below.values())
        assert part.nbytes == sum(t.nbytes for t in below.values())


def test_steps_lead_where_the_path_does(view: CheckpointView) -> None:
    at_once, stepwise = view["model.layers.1"], view["model"]["layers"]["1"]
    assert list(at_once) == list(stepwise)
    assert view["model"]["layers.1.mlp.up.weight"].name == "model.layers.1.mlp.up.weight"


def test_a_unique_inner_path_resolves(view: CheckpointView, truth: dict[str, torch.Tensor]) -> None:
    t = view["layers.1.mlp.up.weight"]
    assert isinstance(t, LazyTensor) and t.name == "model.layers.1.mlp.up.weight"
    same(t[2:4], truth["model.layers.1.mlp.up.weight"][2:4], "inner")
    part = view["layers.10.attn"]
    assert isinstance(part, CheckpointView) and set(part) == {"q.weight", "k.weight", "v.weight"}
    assert view["embed.weight"].name == "model.embed.weight"
    assert view["model"]["10.norm.weight"].name == "model.layers.10.norm.weight"


def test_several_places_are_listed(view: CheckpointView) -> None:
    with pytest.raises(lazyckpt.TensorNotFoundError) as error:
        _ = view["layers.0.mlp.up"]
    assert "'model.layers.0.mlp.up'" in str(error.value) and "'extra.layers.0.mlp.up'" in str(error.value)
    assert "layers.1" not in str(error.value)
    for path, count in (("mlp", 5), ("norm.weight", 5), ("up.weight", 5), ("layers", 2), ("weight", 28)):
        with pytest.raises(KeyError) as listing:
            _ = view[path]
        assert repr(path) in str(listing.value) and str(count) in str(listing.value)
    with pytest.raises(KeyError) as relative:
        _ = view["model"]["mlp"]
    assert "'layers.10.mlp'" in str(relative.value) and "model.layers" not in str(relative.value)


@pytest.mark.parametrize(
    "wrong", ["model.lay", "odel", "ayers.1.mlp", "layers.1.ml", "model.layers.3", "weights", "", "."]
)
def test_only_whole_components_count(view: CheckpointView, wrong: str) -> None:
    if wrong in ("", "."):
        assert list(view[wrong]) == list(view)
        return
    with pytest.raises(lazyckpt.TensorNotFoundError) as error:
        _ = view[wrong]
    assert isinstance(error.value, KeyError) and repr(wrong) in str(error.value)
    assert wrong not in view and view.get(wrong) is None


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("model.layers.0.mlp.upp.weight", "model.layers.0.mlp.up.weight"),
        ("model.layers.10.attn.q.wieght", "model.layers.10.attn.q.weight"),
        ("model.layres.10", "model.layers.10"),
        ("modle", "model"),
        ("head.weights", "head.weight"),
    ],
)
def test_near_misses_are_named(view: CheckpointView, wrong: str, near: str) -> None:
    with pytest.raises(lazyckpt.TensorNotFoundError) as error:
        _ = view[wrong]
    assert repr(near) in str(error.value) and repr(wrong) in str(error.value)
    assert not str(error.value).startswith(('"', "'")) or "there is no" in str(error.value), "a sentence, not its repr"


def test_near_misses_of_a_part_are_relative(view: CheckpointView) -> None:
    with pytest.raises(lazyckpt.TensorNotFoundError) as error:
        _ = view["model.layers.1"]["mlp.upp.weight"]
    assert "'mlp.up.weight'" in str(error.value) and "model" not in str(error.value)


@pytest.mark.parametrize("key", [0, None, ("model", "embed"), slice(None), b"head.weight"])
def test_names_are_strings(view: CheckpointView, key: Any) -> None:
    with pytest.raises(lazyckpt.LazyckptError) as error:
        _ = view[key]
    assert isinstance(error.value, KeyError)
    assert key not in view


def test_the_nearer_reading_of_a_path_wins(tmp_path: Path) -> None:
    """A full name before a prefix, a prefix before an inner path."""
    tree = {"a": torch.zeros(1), "a.b": torch.ones(1), "c.a": torch.full((1,), 2.0), "x.c.d": torch.full((1,), 3.0)}
    torch.save(tree, tmp_path / "x.pt")
    view = lazyckpt.open(tmp_path / "x.pt")
    assert view["a"].item() == 0
    assert list(view["c"]) == ["a"], "not the c inside x"
    assert view["c.d"].item() == 3 and view["a.b"].item() == 1
    assert view["b"].item() == 1


# -- select


def test_select_by_glob(view: CheckpointView, truth: dict[str, torch.Tensor]) -> None:
    norms = view.select("*.norm.weight")
    assert set(norms) == {n for n in truth if n.endswith(".norm.weight")}, "a star crosses dots"
    for name in norms:
        same(norms[name][...], truth[name], name)
    assert set(view.select("model.layers.?.mlp.up.weight")) == {f"model.layers.{n}.mlp.up.weight" for n in (0, 1, 2)}
    assert set(view.select("*.[01].attn.q.*")) == {f"model.layers.{n}.attn.q.weight" for n in (0, 1)}
    assert list(view.select("head.weight")) == ["head.weight"]
    assert list(view.select("head")) == [] == list(view.select("nothing*"))


def test_select_by_regex_and_function(view: CheckpointView, truth: dict[str, torch.Tensor]) -> None:
    assert set(view.select(re.compile(r"layers\.1\."))) == {n for n in truth if "layers.1." in n}
    assert set(view.select(re.compile(r"^layers"))) == set()
    assert set(view.select(lambda name: "10" in name)) == {n for n in truth if "10" in n}
    assert list(view.select(str.isidentifier)) == ["step"]


def test_selections_chain_and_keep_the_order(view: CheckpointView) -> None:
    part = view.select("*.mlp.*").select(re.compile("up")).select(lambda n: n.startswith("model"))
    assert list(part) == [n for n in view if re.fullmatch(r"model.*\.mlp\.up\..*", n)]
    below = part["model.layers"]
    assert set(below) == {f"{n}.mlp.up.weight" for n in LAYERS}
    again = view["model.layers"].select("1*.mlp.up.*")
    assert set(again) == {"1.mlp.up.weight", "10.mlp.up.weight"}, "names of this view, as they are in it"
    assert again["10.mlp.up.weight"].name == "model.layers.10.mlp.up.weight"
    with pytest.raises(lazyckpt.TensorNotFoundError):
        _ = part["model.layers.0.mlp.down.weight"]
    with pytest.raises(lazyckpt.TensorNotFoundError):
        _ = part["step"]


def test_a_tied_tensor_counts_once_in_every_part(view: CheckpointView, truth: dict[str, torch.Tensor]) -> None:
    embedding = truth["head.weight"]
    for names in (["head.weight"], ["model.embed.weight"], ["head.weight", "model.embed.weight"]):
        part = view.select(names.__contains__)
        assert list(part.to()) == list(part) and set(part) == set(names)
        assert (part.numel, part.nbytes) == (embedding.numel(), embedding.nbytes), names
    assert "head.weight" in view.aliases
    assert list(view["head"]) == ["weight"] and view["head"].numel == embedding.numel()


def test_an_empty_part(view: CheckpointView) -> None:
    part = view.select(lambda name: False)
    assert (len(part), list(part), part.to(), part.numel, part.nbytes) == (0, [], {}, 0, 0)
    assert repr(part) and part.tree() and part.explain() and dict(part.files) == {}


# -- states and stored


def test_states_of_a_part(zero_cases: dict[str, Case]) -> None:
    case = zero_cases["zero2_bf16_dp2"]
    view = lazyckpt.open(case.path)
    part = view["blocks.0"]
    assert list(part.states) == list(view.states)
    assert list(view.states)[:2] == ["weights", "fp32"]
    for state in ("weights", "fp32", "exp_avg", "exp_avg_sq"):
        below = part.states[state]
        assert isinstance(below, CheckpointView) and below.state == state
        assert set(below) == {n.removeprefix("blocks.0.") for n in case.truth[state] if n.startswith("blocks.0.")}
        for name in below:
            same(below[name][...], case.truth[state][f"blocks.0.{name}"], (state, name))
    chosen = view.select("*.ln.*").states["exp_avg"]
    assert set(chosen) == {n for n in case.truth["exp_avg"] if ".ln." in n}
    assert set(view.states["exp_avg"].states["fp32"]) == set(view.states["fp32"]), "from one state to another"
    assert view.states.get("nothing") is None and "nothing" not in view.states
    with pytest.raises(lazyckpt.TensorNotFoundError, match=r"no state 'exp_av'; there are: .*exp_avg"):
        view.states["exp_av"]
    assert set(part.states["exp_avg"].select("fc*").states["weights"]) == {"fc1.weight", "fc1.bias", "fc2.weight"}
    with pytest.raises(lazyckpt.TensorNotFoundError, match=r"no state 'no such state'; there are: weights, fp32, "):
        _ = view.states["no such state"]
    assert view.states.get("no such state") is None
    with pytest.raises(TypeError):
        view.states["more"] = view  # type: ignore[index]


def test_a_name_of_another_state_is_pointed_to(zero_cases: dict[str, Case]) -> None:
    view = lazyckpt.open(zero_cases["zero2_bf16_dp2"].path)
    with pytest.raises(lazyckpt.TensorNotFoundError) as error:
        _ = view.states["exp_avg"]["anchor"]  # frozen: it has weights only
    assert "weights" in str(error.value)


def test_stored_keeps_raw_names_and_hides_nothing(tmp_path: Path, zero_cases: dict[str, Case]) -> None:
    torch.save([torch.zeros(1), {"a": torch.ones(2)}], tmp_path / "x.pt")
    assert list(lazyckpt.open(tmp_path / "x.pt").stored) == ["0", "1.a"]
    view = lazyckpt.open(zero_cases["zero2_bf16_dp2"].path)
    raw = view.stored
    t = raw["mp_rank_00_model_states.pt/module.embed.weight"]
    same(t[...], view["embed.weight"][...], "embed")
    assert list(view["blocks"].stored) == list(raw)
    part = raw.select("*rank_1_*exp_avg_sq")
    assert part and all(name.startswith("bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt/") for name in part)
    assert raw["mp_rank_00_model_states.pt/module.blocks.0"].to().keys() == view["blocks.0"].to().keys()


# -- a mapping, and a completer


def test_it_is_a_mapping(view: CheckpointView, truth: dict[str, torch.Tensor]) -> None:
    assert isinstance(view, Mapping)
    assert list(view) == list(view.keys()) == [name for name, _ in view.items()]
    assert set(dict(view)) == set(truth) and len(view) == len(truth)
    assert all(name in view for name in truth) and "model" in view and "layers.1" in view
    step = view.get("step")
    assert step is not None and step.item() == 5 and view.get("model.missing", 3) == 3
    assert {view: 1}[view] == 1 and view != lazyckpt.open("/" / Path(view.root) / "model.pt")
    with pytest.raises(TypeError):
        view["step"] = torch.zeros(1)  # type: ignore[index]


def test_completions_are_names_and_prefixes(view: CheckpointView) -> None:
    found = view._ipython_key_completions_()
    assert len(found) == len(set(found))
    assert set(view) <= set(found)
    for prefix in ("model", "model.layers", "model.layers.10", "model.layers.10.mlp", "extra.layers.0"):
        assert prefix in found
    for name in found:
        _ = view[name]  # every one of them leads somewhere
    assert "0.mlp.up" in view["model.layers"]._ipython_key_completions_()


def test_tree_and_repr(view: CheckpointView) -> None:
    text = view.tree()
    for word in ("embed", "layers", "10", "mlp", "bf16 [11, 6]", "f32 [13, 6]", "i64 []"):
        assert word in text
    one = view.tree(depth=1)
    assert len(one.splitlines()) == 4 and "attn" not in one
    assert len(view.tree(depth=2).splitlines()) < len(text.splitlines())
    assert text.index("layers") < text.index("  2 ") < text.index("  10 "), "natural order"
    assert repr(view).startswith("torch | ") and view.tree(depth=1).splitlines()[0] in repr(view).splitlines()[1]
    assert "head.weight" in view.explain() or "model.pt" in view.explain()


def test_a_large_view_prints_few_lines(tmp_path: Path) -> None:
    torch.save({f"layers.{n}.{m}.w": torch.zeros(1) for n in range(40) for m in range(40)}, tmp_path / "x.pt")
    view = lazyckpt.open(tmp_path / "x.pt")
    assert len(repr(view).splitlines()) < 60
    assert len(view.tree().splitlines()) > 1600


@pytest.mark.slow
def test_it_travels_to_another_process(view: CheckpointView, truth: dict[str, torch.Tensor], tmp_path: Path) -> None:
    parts = {
        "tensor": view["layers.1.mlp.up.weight"],
        "slice": view["head.weight"].lazy[::-2, 1],
        "view": view["model.layers"],
    }
    (tmp_path / "parts.pkl").write_bytes(pickle.dumps(parts))
    code = """if True:
        import pickle, sys, torch
        parts = pickle.load(open(sys.argv[1], "rb"))
        torch.save({"t": parts["tensor"][...], "s": parts["slice"][...], "v": parts["view"].to()}, sys.argv[2])
    """
    done = processes.run("-c", code, tmp_path / "parts.pkl", tmp_path / "out.pt")
    assert done.returncode == 0, done.stderr
    out = torch.load(tmp_path / "out.pt")
    same(out["t"], truth["model.layers.1.mlp.up.weight"], "tensor")
    same(out["s"], truth["head.weight"].flip(0)[::2, 1], "slice")
    assert len(out["v"]) == 24
    for name, tensor in out["v"].items():
        same(tensor, truth[f"model.layers.{name}"], name)


def test_other_sides_are_made_once(view: CheckpointView) -> None:
    """So that ``view.stored[name]`` in a loop does not look through the files each time."""
    assert view.stored is view.stored
    assert all(side is view.states[state] for state, side in view.states.items())
    part = view.select("*")
    assert part.stored is part.stored and list(part.stored) == list(view.stored)
