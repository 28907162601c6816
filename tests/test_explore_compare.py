"""What the explorer's pages of comparisons and runs ask, and the numbers behind them."""

from __future__ import annotations

import json
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lazyckpt
from lazyckpt.explore.api import Explorer
from lazyckpt.explore.endpoints.compare import REPORT
from lazyckpt.explore.query import Cancelled
from lazyckpt.explore.subject import Subject
from lazyckpt.exploring import subject_of

Tensors = dict[str, torch.Tensor]
STEPS = (10, 20, 40)


def asked(explorer: Explorer, path: str, /, **values: str) -> Any:
    answer = explorer.answer(path, values)
    assert answer.status == 200, answer.body
    return json.loads(answer.body)


def tile(explorer: Explorer, **values: str) -> tuple[dict[str, Any], dict[str, Any]]:
    answer = explorer.answer("compare/tile", values)
    assert answer.status == 200, answer.body
    length = int.from_bytes(answer.body[:4], "little")
    header = json.loads(answer.body[4 : 4 + length])
    arrays = {}
    for one in header["arrays"]:
        at = 4 + length + one["offset"]
        arrays[one["name"]] = np.frombuffer(answer.body, one["dtype"], prod(one["shape"]), at).reshape(one["shape"])
    return header, arrays


def model(seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    found = {
        f"layers.{n}.{w}.weight": torch.randn(12, 8, generator=generator) for n in range(3) for w in ("up", "down")
    }
    return found | {"emb.weight": torch.randn(20, 8, generator=generator), "norm.bias": torch.zeros(8)}


@pytest.fixture
def pair() -> tuple[Tensors, Tensors]:
    a = model()
    b = {name: t + 0.01 * torch.randn(t.shape, generator=torch.Generator().manual_seed(1)) for name, t in a.items()}
    b["layers.1.up.weight"] = a["layers.1.up.weight"]
    b["layers.2.up.weight"] = b["layers.2.up.weight"].bfloat16()
    b["emb.weight"] = torch.ones(24, 8)
    b["added"] = torch.ones(2)
    a["dropped"] = torch.ones(3)
    return a, b


@pytest.fixture
def comparison(tmp_path: Path, pair: tuple[Tensors, Tensors]) -> Explorer:
    for name, tensors in zip("ab", pair, strict=True):
        torch.save(tensors, tmp_path / f"{name}.pt")
    return Explorer(subject_of(tmp_path / "a.pt", tmp_path / "b.pt"))


def test_names_dtypes_and_shapes_are_compared_unread(comparison: Explorer, pair: tuple[Tensors, Tensors]) -> None:
    found = asked(comparison, "compare")
    assert found["names"] == len(pair[0].keys() | pair[1].keys())
    assert sorted(map(tuple, found["changed"])) == [
        ("added", "only in b", None, "f32[2]"),
        ("dropped", "only in a", "f32[3]", None),
        ("emb.weight", "shape", "f32[20, 8]", "f32[24, 8]"),
        ("layers.2.up.weight", "dtype", "f32[12, 8]", "bf16[12, 8]"),
    ]
    assert found["counts"] == {"only in a": 1, "only in b": 1, "shape": 1, "dtype": 1}
    assert found["both"] == 7
    assert found["nbytes"] == 6 * 12 * 8 * 8 - 12 * 8 * 2 + 8 * 8
    assert found["layers"] == [0, 1, 2]


def test_a_prefix_in_front_of_all_names_is_told(tmp_path: Path) -> None:
    torch.save(model(), tmp_path / "a.pt")
    torch.save({f"model.{name}": t for name, t in model().items()}, tmp_path / "b.pt")
    found = asked(Explorer(subject_of(tmp_path / "a.pt", tmp_path / "b.pt")), "compare")
    assert found["prefix"] == ["model", len(model())]


def test_distances_are_those_of_torch(comparison: Explorer, pair: tuple[Tensors, Tensors]) -> None:
    found = asked(comparison, "compare/differences")
    rows = {row["name"]: row for row in found["rows"]}
    assert found["high"] == len(rows) == len(pair[0].keys() | pair[1].keys())
    about = asked(comparison, "compare")
    for name in ("layers.0.up.weight", "layers.2.up.weight", "layers.0.down.weight"):
        x, y = (side[name].double().flatten() for side in pair)
        row = rows[name]
        assert row["relative"] == pytest.approx(float((x - y).norm() / x.norm()), rel=1e-12)
        assert row["cosine"] == pytest.approx(float(torch.dot(x, y) / x.norm() / y.norm()), rel=1e-12)
        assert row["max_abs"] == float((x - y).abs().max())
        assert about["kinds"][row["kind"]] == name.replace(f".{row['layer']}.", ".*.")
    assert rows["layers.1.up.weight"]["status"] == "equal"
    assert rows["norm.bias"]["relative"] is None  # the first one is zero
    assert rows["norm.bias"]["norm_b"] > 0
    assert rows["emb.weight"]["status"] == "shape"


def test_a_large_comparison_comes_in_parts(
    comparison: Explorer, pair: tuple[Tensors, Tensors], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = asked(comparison, "compare/differences")["rows"]
    monkeypatch.setattr("lazyckpt.explore.endpoints.compare._AT_ONCE", 1000)
    rows, low = [], 0
    while low < len(whole):
        part = asked(Explorer(comparison.subject), "compare/differences", low=str(low))
        assert part["high"] > low
        low = part["high"]
        rows += part["rows"]
    assert rows == whole


def test_the_picture_is_of_the_signed_difference(comparison: Explorer, pair: tuple[Tensors, Tensors]) -> None:
    name = "layers.2.up.weight"
    truth = (pair[0][name].double() - pair[1][name].double()).numpy()
    header, arrays = tile(comparison, name=name)
    assert header["single"]
    assert np.array_equal(arrays["mean"], truth)
    header, arrays = tile(comparison, name=name, rows="4", cols="2", r0="4", r1="12")
    cells = truth[4:].reshape(4, 2, 2, 4)
    assert np.allclose(arrays["mean"], cells.mean((1, 3)), rtol=1e-12)
    assert np.array_equal(arrays["max"], cells.max((1, 3)))
    assert np.array_equal(arrays["min"], cells.min((1, 3)))


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.int64, torch.int32),
        (torch.uint8, torch.uint8),
        (torch.bool, torch.bool),
        (torch.float8_e4m3fn, torch.half),
    ],
    ids=str,
)
def test_the_picture_takes_any_real_numbers(tmp_path: Path, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    a, b = (torch.arange(12).sub(k).abs().reshape(3, 4).to(dtype) for k, dtype in zip((0, 5), dtypes, strict=True))
    torch.save({"w": a}, tmp_path / "a.pt")
    torch.save({"w": b}, tmp_path / "b.pt")
    _, arrays = tile(Explorer(subject_of(tmp_path / "a.pt", tmp_path / "b.pt")), name="w")
    assert np.array_equal(arrays["mean"], (a.double() - b.double()).numpy())


def test_what_cannot_be_compared_is_an_error(comparison: Explorer, tmp_path: Path) -> None:
    for values, status in (({"name": "emb.weight"}, 400), ({"name": "added"}, 404), ({}, 400)):
        assert comparison.answer("compare/tile", values).status == status
    assert comparison.answer("compare", {"state": "exp_avg"}).status == 404
    assert comparison.answer("compare/differences", {"low": "1000"}).status == 400
    alone = Explorer(Subject(lazyckpt.open(tmp_path / "a.pt")))
    for path in ("compare", "compare/differences", "compare/tile", "run", "run/course"):
        assert alone.answer(path, {"name": "x", "kind": "x"}).status == 400


@pytest.mark.parametrize("path", ["compare/differences", "compare/tile"])
def test_a_comparison_ends_when_it_is_no_longer_wanted(comparison: Explorer, path: str) -> None:
    with pytest.raises(Cancelled):
        comparison.answer(path, {"name": "layers.0.up.weight"}, lambda: False)


# -- runs


@pytest.fixture
def steps() -> dict[int, Tensors]:
    found = {step: model() for step in STEPS}
    for n, step in enumerate(STEPS):
        for name, t in found[step].items():
            t += n * 0.1 * torch.randn(t.shape, generator=torch.Generator().manual_seed(n)) if "bias" not in name else 0
    return found


@pytest.fixture
def run(tmp_path: Path, steps: dict[int, Tensors]) -> Explorer:
    for step, tensors in steps.items():
        (tmp_path / "run" / f"step_{step}").mkdir(parents=True)
        torch.save(tensors, tmp_path / "run" / f"step_{step}" / "model.pt")
    return Explorer(subject_of(tmp_path / "run"))


def test_a_tensor_of_a_run_minus_that_of_the_step_before(run: Explorer, steps: dict[int, Tensors]) -> None:
    before, last = STEPS[-2:]
    facts = asked(run, "tensor", name="emb.weight", of="change")
    assert facts["derived"] == [{"of": "change", "label": f"change since {before}"}]
    wanted = steps[last]["emb.weight"].double() - steps[before]["emb.weight"].double()
    assert torch.equal(eval(facts["python"], {"lazyckpt": lazyckpt, "torch": torch})[...], wanted)
    shown = asked(run, "tensor/values", name="emb.weight", of="change", r0="3", r1="4", c0="0", c1="8")["values"]
    assert [float(one) for one in shown[0]] == pytest.approx(wanted[3].tolist(), rel=1e-6)
    assert not asked(run, "tensor", name="emb.weight", step=str(STEPS[0]))["derived"]
    assert run.answer("tensor", {"name": "emb.weight", "of": "change", "step": str(STEPS[0])}).status == 400


def test_two_steps_of_a_run_are_compared(run: Explorer, steps: dict[int, Tensors]) -> None:
    first, before, last = STEPS
    assert asked(run, "compare")["steps"] == [last, before]
    assert asked(run, "compare", step=str(first))["steps"] == [first, before]
    found = asked(run, "compare", step=str(last), **{"with": str(first)})
    assert (found["steps"], found["names"], found["both"]) == ([last, first], 8, 8)
    a, b = (eval(one, {"lazyckpt": lazyckpt}) for one in found["python"])
    assert torch.equal(a["emb.weight"][...], steps[last]["emb.weight"])
    assert torch.equal(b["emb.weight"][...], steps[first]["emb.weight"])
    rows = asked(run, "compare/differences", step=str(last), **{"with": str(first)})["rows"]
    for row in rows:
        x, y = steps[last][row["name"]], steps[first][row["name"]]
        if "bias" in row["name"]:
            assert row["status"] == "equal"
        else:
            assert row["relative"] == pytest.approx(_relative(x, y))
    assert asked(run, "compare/differences", step=str(first))["rows"][0]["relative"] == pytest.approx(
        _relative(steps[first]["emb.weight"], steps[before]["emb.weight"])
    )
    values = {"name": "emb.weight", "step": str(first), "with": str(last), "rows": "20", "cols": "8"}
    wanted = steps[first]["emb.weight"].double() - steps[last]["emb.weight"].double()
    assert np.array_equal(tile(run, **values)[1]["mean"], wanted.numpy())
    assert run.answer("compare", {"with": "11"}).status == 400
    assert run.answer("compare", {"step": "11"}).status == 400


def test_a_report_of_a_run_compares_its_last_two_steps(run: Explorer) -> None:
    wanted = {(one.path, *one.values.items()) for one in REPORT(run.subject)}
    assert ("compare",) in wanted
    assert ("compare/differences", ("low", "0")) in wanted


def test_a_run_lists_its_steps_and_kinds(run: Explorer) -> None:
    found = asked(run, "run")
    assert found["steps"] == list(STEPS)
    kinds = {one["kind"]: one for one in found["kinds"]}
    assert set(kinds) == {"emb.weight", "layers.*.up.weight", "layers.*.down.weight", "norm.bias"}
    assert kinds["layers.*.up.weight"]["layers"] == 3
    assert kinds["layers.*.up.weight"]["nbytes"] == 3 * 12 * 8 * 4


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / a.double().norm())


def _cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.cosine_similarity(a.double().flatten(), b.double().flatten(), dim=0))


def test_courses_are_those_of_torch(run: Explorer, steps: dict[int, Tensors]) -> None:
    line = [steps[step]["layers.1.up.weight"] for step in STEPS]
    truth = {
        "norm": [float(t.double().norm()) for t in line],
        "drift": [_relative(line[0], t) for t in line[1:]],
        "change": [_relative(a, b) for a, b in pairwise(line)],
        "towards": [_cosine(t, line[-1]) for t in line],
    }
    for quantity, expected in truth.items():
        found = asked(run, "run/course", kind="layers.*.up.weight", quantity=quantity)
        assert found["steps"] == list(STEPS[-len(expected) :])
        assert found["layers"] == [0, 1, 2]
        assert found["values"][1] == pytest.approx(expected, rel=1e-9)
        assert found["alone"] is None
    alone = asked(run, "run/course", kind="emb.weight")
    assert alone["alone"] == pytest.approx([float(steps[step]["emb.weight"].double().norm()) for step in STEPS])


def test_the_course_of_a_kind_that_a_run_lacks_is_an_error(run: Explorer) -> None:
    assert run.answer("run/course", {"kind": "nothing"}).status == 400
    assert run.answer("run/course", {"kind": "emb.weight", "state": "nothing"}).status == 400
    assert run.answer("run/course", {}).status == 400
    assert run.answer("run/course", {"kind": "emb.weight", "quantity": "nothing"}).status == 400


def test_a_step_that_cannot_be_read_leaves_a_gap(run: Explorer, tmp_path: Path) -> None:
    asked(run, "run")
    (tmp_path / "run" / "step_20" / "model.pt").unlink()
    found = asked(run, "run/course", kind="emb.weight")
    assert found["steps"] == list(STEPS)
    assert [value is None for value in found["alone"]] == [False, True, False]
    again = asked(Explorer(subject_of(tmp_path / "run")), "run/course", kind="emb.weight")
    assert again["steps"] == [10, 40]


def test_a_course_ends_when_it_is_no_longer_wanted(run: Explorer) -> None:
    with pytest.raises(Cancelled):
        run.answer("run/course", {"kind": "emb.weight"}, lambda: False)
