"""The explorer's answers about layers, the optimizer's last step and experts, against what torch computes."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import lazyckpt
from lazyckpt import demo
from lazyckpt.explore.api import Explorer
from lazyckpt.explore.query import Cancelled
from lazyckpt.explore.subject import Subject
from lazyckpt.inspect.expert_likeness import expert_likeness, nearest_experts
from lazyckpt.inspect.expert_norms import expert_norms


def asked(explorer: Explorer, path: str, **values: str) -> Any:
    answer = explorer.answer(path, values)
    assert answer.status == 200, answer.body
    return json.loads(answer.body)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> lazyckpt.CheckpointView:
    folder = tmp_path_factory.mktemp("layers")
    demo.write(folder)
    return lazyckpt.open(folder / "zero3")


def test_quantities_are_those_of_torch(trained: lazyckpt.CheckpointView) -> None:
    for state in trained.states:
        found = asked(Explorer(Subject(trained)), "layers", state=state)
        tensors = trained.states[state].once()[0]
        seen = 0
        for n, kind in enumerate(found["kinds"]):
            for k, layer in enumerate(found["layers"]):
                name = kind.replace("*", str(layer))
                if "*" not in kind or name not in tensors:
                    continue
                wanted = tensors[name][...].double()
                assert found["values"]["rms"][n][k] == pytest.approx(float(wanted.square().mean().sqrt()))
                assert found["values"]["zeros"][n][k] == pytest.approx(float((wanted == 0).double().mean()))
                seen += 1
        assert seen or state == "step"
        own = found["relative"]["rms"]
        for row, unit, scaled in zip(found["values"]["rms"], own["units"], own["values"], strict=True):
            some = [(value, one) for value, one in zip(row, scaled, strict=True) if value != "NaN" and value > 0]
            assert [unit * 2**one for _, one in some] == pytest.approx([value for value, _ in some])
            assert not some or min(some)[0] <= unit <= max(some)[0]
        assert found["relative"]["mean"]["unit"] == "largest" and "zeros" not in found["relative"]
        for name, count, zeros in found["zeros"]:
            assert (count, zeros) == (tensors[name].numel(), int((tensors[name][...] == 0).sum()))


def test_the_last_step_is_that_of_updates(trained: lazyckpt.CheckpointView) -> None:
    found = asked(Explorer(Subject(trained)), "updates")
    table = trained.updates().table()
    assert {row[0]: row[3] for row in found["rows"]} == {
        trained.full_name(row.name): pytest.approx(row.ratio) for row in table
    }


def test_the_last_step_of_a_tensor_is_that_of_the_view(trained: lazyckpt.CheckpointView) -> None:
    explorer = Explorer(Subject(trained))
    updates = trained.updates()
    name = next(iter(updates))
    facts = asked(explorer, "tensor", name=name, of="update")
    assert facts["of"] == "update" and {"of": "update", "label": "last step"} in facts["derived"]
    read = eval(facts["python"], {"lazyckpt": lazyckpt})  # the line that the page shows
    assert torch.equal(read[...], updates[name][...])
    shown = asked(explorer, "tensor/values", name=name, of="update", r0="0", r1="1", c0="0", c1="2")["values"]
    assert [float(one) for one in shown[0]] == pytest.approx(
        read[...].reshape(read.shape[0], -1)[0, :2].tolist(), rel=1e-6
    )
    state = next(one for one in trained.states if one not in ("weights", "fp32"))
    assert explorer.answer("tensor", {"name": name, "of": "change"}).status == 400
    assert not asked(explorer, "tensor", name=name, state=state)["derived"]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    tensors = {"model.norm.weight": torch.ones(8)}
    for layer in range(2):
        for expert in range(4):
            for kind in ("up_proj", "down_proj"):
                tensors[f"model.layers.{layer}.mlp.experts.{expert}.{kind}.weight"] = torch.randn(16, 8)
    for kind in ("up_proj", "down_proj"):
        tensors[f"model.layers.1.mlp.experts.2.{kind}.weight"].zero_()
        tensors[f"model.layers.0.mlp.experts.1.{kind}.weight"] = (
            2 * tensors[f"model.layers.0.mlp.experts.0.{kind}.weight"]
        )
    return tensors


def saved(tensors: dict[str, torch.Tensor], path: Path) -> lazyckpt.CheckpointView:
    torch.save(tensors, path)
    return lazyckpt.open(path)


def together(tensors: dict[str, torch.Tensor], layer: int, expert: int) -> torch.Tensor:
    start = f"model.layers.{layer}.mlp.experts.{expert}."
    return torch.cat([t.double().flatten() for name, t in tensors.items() if name.startswith(start)])


def test_experts_have_norms_and_angles(mixture: dict[str, torch.Tensor], tmp_path: Path) -> None:
    explorer = Explorer(Subject(saved(mixture, tmp_path / "model.pt")))
    found = asked(explorer, "experts")
    assert (found["layers"], found["experts"], found["dead"]) == (["0", "1"], [0, 1, 2, 3], [["1", 2]])
    for layer in range(2):
        for expert in range(4):
            wanted = float(together(mixture, layer, expert).norm())
            assert found["norms"][layer][expert] == pytest.approx(wanted)
    alike = asked(explorer, "experts/likeness", layer="0")
    assert alike["exact"]
    assert alike["read"] == alike["nbytes"] == 4 * 2 * 16 * 8 * 4
    for a in range(4):
        for b in range(4):
            x, y = together(mixture, 0, a), together(mixture, 0, b)
            assert alike["cosines"][a][b] == pytest.approx(float(torch.cosine_similarity(x, y, dim=0)))
    assert asked(explorer, "experts/likeness", layer="1")["cosines"][2][0] == "NaN"


def test_the_most_alike_expert_is_that_of_the_cosines(mixture: dict[str, torch.Tensor], tmp_path: Path) -> None:
    view = saved(mixture, tmp_path / "model.pt")
    explorer = Explorer(Subject(view))
    listed = asked(explorer, "experts/layers")
    assert listed == {"layers": ["0", "1"], "experts": [0, 1, 2, 3], "reads": [4 * 2 * 16 * 8 * 4] * 2}
    whole = nearest_experts(view)
    for n, layer in enumerate(listed["layers"]):
        cosines = asked(explorer, "experts/likeness", layer=layer)["cosines"]
        found = asked(explorer, "experts/nearest", layer=layer)
        for expert, (other, cosine) in enumerate(zip(found["nearest"], found["cosines"], strict=True)):
            others = {k: x for k, x in enumerate(cosines[expert]) if k != expert and x != "NaN"}
            assert other == max(others, key=lambda k: others[k], default=None)
            assert cosine == (others[other] if others else "NaN")
            assert whole.values[n, expert] == pytest.approx(float(cosine), nan_ok=True)
    assert asked(explorer, "experts/nearest", layer="0")["nearest"][:2] == [1, 0]  # one is twice the other
    assert explorer.answer("experts/nearest", {"layer": "7"}).status == 400


def test_a_layer_of_unlike_shapes_does_not_hide_the_others(mixture: dict[str, torch.Tensor], tmp_path: Path) -> None:
    odd = mixture | {"model.layers.1.mlp.experts.0.up_proj.weight": torch.ones(3, 8)}
    found = nearest_experts(saved(odd, tmp_path / "model.pt"))
    assert found.marks == {("1", expert): "?" for expert in range(4)}
    assert found.values[0, 0] == pytest.approx(1)


def test_a_layer_that_cannot_be_read_does_not_hide_the_others(mixture: dict[str, torch.Tensor], tmp_path: Path) -> None:
    files: tuple[dict[str, torch.Tensor], ...] = ({}, {})
    for name, t in mixture.items():
        files[".layers.1." in name][name] = t
    paths = [tmp_path / f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    for path, tensors in zip(paths, files, strict=True):
        save_file(tensors, path)
    view = lazyckpt.open(tmp_path)
    os.truncate(paths[1], paths[1].stat().st_size - 8)  # it is a ChangedFileError, which is no DataError
    found = nearest_experts(view)
    assert set(found.marks.values()) == {"?"}
    assert {layer for layer, _ in found.marks} == {"1"}
    assert found.values[0, 0] == pytest.approx(1)


def test_hostile_numbers_of_experts_take_little_memory(tmp_path: Path) -> None:
    one = torch.ones(1)
    stack = {"model.layers.0.mlp.experts.up_proj": one.expand(1 << 24, 2), "w": one}
    view = saved(stack, tmp_path / "stack.pt")
    with pytest.raises(lazyckpt.DataError, match="no tensor of this view is of an expert"):
        expert_norms(view, progress=False)
    many = dict.fromkeys((f"layers.0.mlp.experts.{n}.up_proj.weight" for n in range(3000)), view["w"])
    with pytest.raises(lazyckpt.DataError, match="has 3,000 experts"):
        expert_likeness(many, 0)
    wide = dict.fromkeys((f"layers.{n}.mlp.experts.{n}.up_proj.weight" for n in range(5000)), view["w"])
    for grid in (nearest_experts, expert_norms):
        with pytest.raises(lazyckpt.DataError, match="5,000 layers by 5,000 experts"):
            grid(wide)


def test_stacked_experts_are_those_of_single_ones(mixture: dict[str, torch.Tensor], tmp_path: Path) -> None:
    stacked = {
        f"model.layers.{layer}.mlp.experts.{kind}": torch.stack(
            [mixture[f"model.layers.{layer}.mlp.experts.{e}.{kind}.weight"] for e in range(4)]
        )
        for layer in range(2)
        for kind in ("up_proj", "down_proj")
    }
    one = Explorer(Subject(saved(mixture, tmp_path / "a.pt")))
    two = Explorer(Subject(saved(stacked, tmp_path / "b.pt")))
    assert asked(two, "experts")["norms"] == [pytest.approx(row) for row in asked(one, "experts")["norms"]]
    first, second = (asked(explorer, "experts/likeness", layer="0")["cosines"] for explorer in (one, two))
    assert second == [pytest.approx(row) for row in first]


def test_stacks_of_layers_are_told_apart(mixture: dict[str, torch.Tensor], tmp_path: Path) -> None:
    experts = {name: t for name, t in mixture.items() if ".experts." in name}
    two = {f"{stack}.{name}": t + n for n, stack in enumerate(("talker", "thinker")) for name, t in experts.items()}
    explorer = Explorer(Subject(saved(two | {"draft.experts.3.w": torch.full((4,), 2.0)}, tmp_path / "model.pt")))
    found = asked(explorer, "experts")
    assert found["layers"] == ["draft", *(f"t{it}er.model.layers.{n}" for it in ("alk", "hink") for n in range(2))]
    assert found["norms"][0] == ["NaN", "NaN", "NaN", 4.0]
    assert found["norms"][3][1] == pytest.approx(float((together(mixture, 0, 1) + 1).norm()))
    assert found["dead"] == [["talker.model.layers.1", 2]]
    alike = asked(explorer, "experts/likeness", layer="thinker.model.layers.1")
    x, y = (together(mixture, 1, n) + 1 for n in (0, 3))
    assert alike["cosines"][0][3] == pytest.approx(float(torch.cosine_similarity(x, y, dim=0)))


def test_large_layers_are_sampled(mixture: dict[str, torch.Tensor], tmp_path: Path) -> None:
    view = saved(mixture, tmp_path / "model.pt")
    found = expert_likeness(view, 0, most=1024)
    assert not found.exact
    assert found.read <= 1024 < found.nbytes
    assert found.cosines[0, 1] == pytest.approx(1)
    assert not math.isclose(found.cosines[0, 2], 1, abs_tol=1e-3)


@pytest.mark.parametrize("path", ["layers", "updates", "experts", "experts/likeness", "experts/nearest"])
def test_work_ends_when_nobody_waits(
    path: str, trained: lazyckpt.CheckpointView, mixture: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    view = saved(mixture, tmp_path / "model.pt") if path.startswith("experts") else trained
    with pytest.raises(Cancelled):
        Explorer(Subject(view)).answer(path, {}, lambda: False)
