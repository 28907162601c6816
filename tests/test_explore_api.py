"""The explorer's API: answers about real checkpoints, without a browser and without a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import lazyckpt
from lazyckpt.explore.api import Answer, Explorer
from lazyckpt.explore.packing import pack, to_json
from lazyckpt.explore.query import Cancelled, Query
from lazyckpt.explore.subject import Subject


def asked(explorer: Explorer, path: str, **values: str) -> Any:
    answer = explorer.answer(path, values)
    assert answer.status == 200, answer.body
    return json.loads(answer.body)


@pytest.fixture
def explorer(tmp_path: Path) -> Explorer:
    weights = {f"layers.{n}.mlp.weight": torch.randn(4, 8) for n in range(3)} | {"norm.weight": torch.ones(8)}
    torch.save(weights, tmp_path / "model.pt")
    return Explorer(Subject(lazyckpt.open(tmp_path / "model.pt")))


def test_about_says_what_the_subject_is(explorer: Explorer) -> None:
    found = asked(explorer, "about")
    assert (found["api"], found["kind"], found["steps"]) == (1, "checkpoint", [])
    (side,) = found["sides"]
    assert (side["numel"], side["nbytes"], side["tensors"], side["files"]) == (104, 416, 4, 1)


def test_unknown_paths_and_parameters_are_answers(explorer: Explorer) -> None:
    def error(answer: Answer) -> tuple[int, str]:
        return answer.status, json.loads(answer.body)["error"]["kind"]

    assert error(explorer.answer("no/such\npath", {})) == (404, "NotFound")
    assert error(explorer.answer("tree", {"state": "moments"})) == (404, "TensorNotFoundError")
    assert error(explorer.answer("tree", {"side": "b"})) == (400, "DataError")
    assert error(explorer.answer("tree", {"side": "c"})) == (400, "DataError")


def test_parameters_are_checked() -> None:
    query = Query({"n": "12", "bad": "1e3", "big": "9" * 5000, "far": "-1"})
    assert query.number("n", 0, 0, 20) == 12
    assert query.number("other", 7, 0, 20) == 7
    for name in ("bad", "big", "far"):
        with pytest.raises(lazyckpt.DataError):
            query.number(name, 0, 0, 20)
    with pytest.raises(Cancelled):
        Query({}, lambda: False).check()


def test_json_is_valid_whatever_the_values() -> None:
    value = {"a": [float("nan"), float("-inf"), 1.5], "b": "lone \udc80 surrogate", "c": {"d": float("inf")}}
    body = to_json(value)
    assert json.loads(body.decode("utf-8")) == {
        "a": ["NaN", "-Infinity", 1.5],
        "b": "lone \udc80 surrogate",
        "c": {"d": "Infinity"},
    }


def test_packed_arrays_are_aligned() -> None:
    arrays: dict[str, NDArray[Any]] = {
        "a": np.arange(3, dtype=np.uint8),
        "b": np.arange(6, dtype=np.float32).reshape(2, 3),
    }
    body = pack({"low": 1.5}, arrays)
    length = int.from_bytes(body[:4], "little")
    header = json.loads(body[4 : 4 + length])
    assert header["low"] == 1.5
    assert (4 + length) % 8 == 0
    for one in header["arrays"]:
        assert one["offset"] % 8 == 0
        start = 4 + length + one["offset"]
        count = int(np.prod(one["shape"]))
        found = np.frombuffer(body, one["dtype"], count, start).reshape(one["shape"])
        assert np.array_equal(found, arrays[one["name"]])
