"""What the explorer answers about one tensor, without a browser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import lazyckpt
from lazyckpt.explore.api import Explorer
from lazyckpt.explore.query import Cancelled
from lazyckpt.explore.subject import Subject
from lazyckpt.testing import opened


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    q = torch.randn(32, 24).bfloat16()
    q[3, 5], q[6, 7], q[9, 1] = float("nan"), float("inf"), 50.0
    return {
        "model.layers.0.self_attn.q_proj.weight": q,
        "experts": torch.randn(3, 8, 6),
        "norm": torch.randn(300),
        "codes": torch.randint(-128, 128, (5, 4), dtype=torch.int8),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
    }


@pytest.fixture
def explorer(tmp_path: Path, weights: dict[str, torch.Tensor]) -> Explorer:
    torch.save(weights, tmp_path / "model.pt")
    return Explorer(Subject(lazyckpt.open(tmp_path / "model.pt"), title=str(tmp_path / "model.pt")))


Q = "model.layers.0.self_attn.q_proj.weight"


def asked(explorer: Explorer, path: str, **values: Any) -> Any:
    answer = explorer.answer(path, {key: str(value) for key, value in values.items()})
    assert answer.status == 200, answer.body
    return json.loads(answer.body)


def packed(explorer: Explorer, path: str, **values: Any) -> tuple[Any, dict[str, NDArray[Any]]]:
    answer = explorer.answer(path, {key: str(value) for key, value in values.items()})
    assert answer.status == 200, answer.body
    length = int.from_bytes(answer.body[:4], "little")
    header = json.loads(answer.body[4 : 4 + length])
    arrays = {}
    for one in header["arrays"]:
        count = int(np.prod(one["shape"]))
        found = np.frombuffer(answer.body, one["dtype"], count, 4 + length + one["offset"])
        arrays[one["name"]] = found.reshape(one["shape"])
    return header, arrays


def test_the_facts_of_a_tensor(explorer: Explorer, weights: dict[str, torch.Tensor]) -> None:
    for name, tensor in weights.items():
        facts = asked(explorer, "tensor", name=name)
        assert (facts["shape"], facts["dtype"]) == (list(tensor.shape), str(tensor.dtype))
        (held,) = facts["ranges"] if tensor.numel() else [{"nbytes": 0}]
        assert held["nbytes"] == facts["nbytes"] == tensor.nbytes
        assert facts["bits"] == (tensor.itemsize <= 2)
        read = eval(facts["python"], {"lazyckpt": lazyckpt})  # the line that the page shows
        assert torch.equal(read[...].nan_to_num(), tensor.nan_to_num())
        layout = asked(explorer, "tensor/layout", name=name)
        assert len(layout["labels"]) == (1 if tensor.numel() else 0)
    assert asked(explorer, "tensor", name="norm")["wrap"] == 32
    assert explorer.answer("tensor", {"name": "nothing"}).status == 404


def test_attention_has_heads(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    config = {
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_size": 24,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({Q: weights[Q], Q.replace("q_proj", "k_proj"): torch.ones(16, 24)}, tmp_path / "model.safetensors")
    explorer = Explorer(Subject(lazyckpt.open(tmp_path)))
    assert asked(explorer, "tensor", name=Q)["heads"] == {
        "dim": 0, "slices": [[f"head {n}", 8 * n, 8 * n + 8] for n in range(4)],
    }  # fmt: skip
    heads = asked(explorer, "tensor", name=Q.replace("q_proj", "k_proj"))["heads"]
    assert heads["slices"] == [["group 0", 0, 8], ["group 1", 8, 16]]


def test_tiles_and_norms_equal_torch(explorer: Explorer, weights: dict[str, torch.Tensor]) -> None:
    header, arrays = packed(explorer, "tensor/tile", name="experts", rows=4, cols=3, dims="1,2", at="0:1")
    truth = weights["experts"][1].reshape(4, 2, 3, 2).double().numpy()
    assert header["exact"]
    assert not header["single"]
    np.testing.assert_allclose(arrays["mean"], truth.mean((1, 3)), rtol=1e-6)
    np.testing.assert_array_equal(arrays["min"], truth.min((1, 3)))
    np.testing.assert_array_equal(arrays["max"], truth.max((1, 3)))
    header, arrays = packed(explorer, "tensor/tile", name=Q, r0=2, r1=10, c0=4, c1=9)
    assert header["single"]
    assert set(arrays) == {"mean", "nan", "inf"}
    part = weights[Q][2:10, 4:9].float().numpy()
    np.testing.assert_array_equal(arrays["mean"], np.where(np.isfinite(part), part, np.nan))
    assert (arrays["nan"].sum(), arrays["inf"].sum()) == (1, 1)
    _, sides = packed(explorer, "tensor/norms", name="experts", dims="1,2")
    np.testing.assert_allclose(sides["rows"], weights["experts"].double().norm(dim=(0, 2)), rtol=1e-12)
    _, arrays = packed(explorer, "tensor/tile", name="norm", wrap=32, rows=10, cols=32)
    assert np.isnan(arrays["mean"]).sum() == 20


def test_what_values_are(explorer: Explorer, weights: dict[str, torch.Tensor]) -> None:
    found = asked(explorer, "tensor/outliers", name=Q, count=1)
    assert found["largest"] == [[[9, 1], 50.0]]
    assert found["odd"] == [[[3, 5], "NaN"]]
    assert (found["nan"], found["posinf"]) == (1, 1)
    histogram = asked(explorer, "tensor/histogram", name="experts", bins=10)
    assert sum(histogram["counts"]) == 144
    assert histogram["exact"]
    spectrum = asked(explorer, "tensor/spectrum", name="experts", at="0:2")["values"]
    np.testing.assert_allclose(spectrum, torch.linalg.svdvals(weights["experts"][2].double()), rtol=1e-6)
    bits = asked(explorer, "tensor/bits", name="codes")
    assert bits["exponents"] is None
    assert bits["ones"][0] == (weights["codes"] < 0).double().mean()


def test_values_are_exact_text(explorer: Explorer, weights: dict[str, torch.Tensor]) -> None:
    rows = asked(explorer, "tensor/values", name=Q, r0=2, r1=5, c0=4, c1=8)["values"]
    read = torch.tensor([[float(text) for text in row] for row in rows]).bfloat16()
    assert torch.equal(read.nan_to_num(), weights[Q][2:5, 4:8].nan_to_num())
    assert asked(explorer, "tensor/values", name="codes")["values"][1][2] == str(weights["codes"][1, 2].item())
    assert asked(explorer, "tensor/values", name="scalar")["values"] == [["2.5"]]
    wrapped = asked(explorer, "tensor/values", name="norm", wrap=32, r0=9, r1=10)["values"]
    assert [float(text) for text in wrapped[0]] == [float(str(x)) for x in weights["norm"][288:].numpy()]
    turned = asked(explorer, "tensor/values", name="experts", dims="2,0", at="1:4")["values"]
    assert np.float32(turned[5][2]) == weights["experts"][2, 4, 5].numpy()


@pytest.mark.parametrize(
    ("path", "values"),
    [
        ("tensor/tile", {"rows": "0"}), ("tensor/tile", {"r0": "40"}), ("tensor/tile", {"r0": "9", "r1": "3"}),
        ("tensor/tile", {"dims": "0"}), ("tensor/tile", {"dims": "0,2"}), ("tensor/tile", {"at": "x:1"}),
        ("tensor/tile", {"wrap": "4"}), ("tensor/tile", {"how": "median"}), ("tensor/tile", {"exact": "maybe"}),
        ("tensor/histogram", {"bins": "0"}), ("tensor/bits", {"name": "experts"}),
        ("tensor/spectrum", {"name": "norm"}),
        ("tensor/values", {"name": "experts"}), ("tensor/outliers", {"count": "100000"}),
    ],
)  # fmt: skip
def test_bad_parameters_are_refused(explorer: Explorer, path: str, values: dict[str, str]) -> None:
    answer = explorer.answer(path, {"name": Q, **values})
    assert answer.status == 400, answer.body


def test_a_tile_reads_its_bytes_and_is_kept(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    torch.save(weights, tmp_path / "model.pt")
    view, counts = opened(tmp_path / "model.pt")
    explorer = Explorer(Subject(view))
    view[Q][0]
    counts.clear()
    packed(explorer, "tensor/tile", name=Q, r0=4, r1=12, c0=2, c1=10)
    assert counts.bytes == 8 * 8 * 2
    packed(explorer, "tensor/tile", name=Q, r0=4, r1=12, c0=2, c1=10)
    assert counts.bytes == 8 * 8 * 2


def test_nobody_waits_for_a_cancelled_answer(explorer: Explorer) -> None:
    for path in ("tile", "histogram", "norms", "bits", "outliers", "spectrum"):
        with pytest.raises(Cancelled):
            explorer.answer(f"tensor/{path}", {"name": Q}, lambda: False)


def test_the_nearest_tokens_of_a_row(tmp_path: Path) -> None:
    table = torch.randn(50, 12)
    table[7] = 3 * table[4] + 0.01
    table[9] = 0
    torch.save({"embed": table}, tmp_path / "model.pt")
    words = {f"word{n}": n for n in range(49)}
    about = {"model": {"vocab": words}, "added_tokens": [{"id": 49, "content": "</s>"}]}
    explorer = Explorer(Subject(lazyckpt.open(tmp_path / "model.pt")))
    assert asked(explorer, "tensor/neighbours", name="embed", row=4, count=3)["token"] is None
    (tmp_path / "tokenizer.json").write_text(json.dumps(about))
    explorer = Explorer(Subject(lazyckpt.open(tmp_path / "model.pt")))
    found = asked(explorer, "tensor/neighbours", name="embed", token="word4", count=49)
    cosines = torch.nn.functional.cosine_similarity(table[4].double(), table.double(), dim=1).tolist()
    order = sorted((n for n in range(50) if n not in (4, 9)), key=lambda n: -cosines[n])
    assert (found["row"], found["token"]) == (4, "word4")
    assert [row for row, _, _ in found["nearest"]] == order
    assert found["nearest"][0][2] == "word7"
    assert {token for row, _, token in found["nearest"] if row == 49} == {"</s>"}
    np.testing.assert_allclose([c for _, c, _ in found["nearest"]], [cosines[n] for n in order], rtol=1e-12)
    for values in ({"row": "9"}, {"row": "50"}, {"token": "no such"}):
        assert explorer.answer("tensor/neighbours", {"name": "embed", **values}).status == 400
    (tmp_path / "tokenizer.json").write_text("[]")
    explorer = Explorer(Subject(lazyckpt.open(tmp_path / "model.pt")))
    assert explorer.answer("tensor/neighbours", {"name": "embed"}).status == 422
