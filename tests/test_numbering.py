"""Names that DeepSpeed's files do not list: the search over orders, and the stages of a pipeline."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from lazyckpt.formats.deepspeed.pipeline import stage_names
from lazyckpt.formats.deepspeed.plainopt import match, numbered_groups
from lazyckpt.formats.shared.numbering import Effort, assign
from lazyckpt.io.containers.pickle.rebuild import StoredStorage, StoredTensor

Shape = tuple[int, ...]


def _names(names: Any, groups: Any) -> Any:
    found = assign(names, [[None if s is None else {s} for s in group] for group in groups])
    return found and found.names


def test_numbered_parameters_are_named_where_there_is_one_way() -> None:
    names = [("emb", (5, 2)), ("pos", (9,)), ("a.w", (2, 2)), ("a.b", (2,)), ("b.w", (2, 2)), ("b.b", (2,))]
    decay: list[Shape | None] = [(5, 2), (2, 2), (2, 2)]
    weights = ["emb", "a.w", "b.w"]
    assert _names(names, [decay, [(2,), (2,)]]) == [weights, ["a.b", "b.b"]]
    assert _names(names, [decay, [(2,)]]) == [weights, [None]]  # one of the biases is frozen: which?
    assert _names(names, [decay, [(2,), None]]) == [weights, ["a.b", "b.b"]]
    assert _names(names, [decay, [None, (2,)]]) == [weights, [None, None]]  # pos or a bias, then either
    assert _names(names, [[(7,)]]) is None


@given(st.data())
def test_a_name_is_given_if_it_is_the_same_in_every_way(data: st.DataObject) -> None:
    """Against all ways, one by one."""
    kinds = st.sampled_from([(1,), (2,), (3,)])
    shapes = data.draw(st.lists(kinds, min_size=1, max_size=6))
    owner = [data.draw(st.integers(-1, 1)) for _ in shapes]  # the group that each is in, or none
    groups: list[list[Shape | None]] = [[s for s, o in zip(shapes, owner, strict=True) if o == g] for g in (0, 1)]
    for group in groups:
        for n in range(len(group)):
            if data.draw(st.integers(0, 4)) == 0:
                group[n] = None
    ways = []
    for way in itertools.product((-1, 0, 1), repeat=len(shapes)):
        taken = [[n for n, o in enumerate(way) if o == g] for g in (0, 1)]
        if all(
            len(t) == len(g) and all(w in (None, shapes[n]) for n, w in zip(t, g, strict=True))
            for t, g in zip(taken, groups, strict=True)
        ):
            ways.append(taken)
    expected = [
        [str(ways[0][g][n]) if len({w[g][n] for w in ways}) == 1 else None for n in range(len(groups[g]))]
        for g in (0, 1)
    ]
    assert _names([(str(n), s) for n, s in enumerate(shapes)], groups) == expected


def test_a_large_model_in_two_groups_is_no_trouble() -> None:
    names: list[tuple[str, Shape]] = [("embed", (1000, 64))]
    for n in range(400):
        names += [(f"{n}.{k}", s) for k, s in (("q", (64, 64)), ("o", (64, 64)), ("up", (64, 99)), ("ln", (64,)))]
    decay = [n for n, s in names if len(s) > 1]
    plain = [n for n, s in names if len(s) == 1]
    shapes = dict(names)
    assert _names(names, [[shapes[n] for n in decay], [shapes[n] for n in plain]]) == [decay, plain]


def _optimizer(shapes: list[Shape], **group: Any) -> dict[str, Any]:
    storage = StoredStorage("0", torch.float32, 100, "cpu")
    dtype = torch.float32
    state = {n: {"exp_avg": StoredTensor(storage, dtype, 0, s, (1,) * len(s))} for n, s in enumerate(shapes)}
    return {"state": state, "param_groups": [{"params": list(state), **group}]}


def test_names_that_the_groups_list_are_taken() -> None:
    names = {"a": (2,), "b": (2,), "frozen": (3,), "none": (0, 2)}
    listed = numbered_groups(_optimizer([(2,), (2,)], param_names=["b", "frozen", "none", "a"]))
    found = match(names, listed)
    assert found is not None and found.names == [["b", "a"]]
    for wrong in (["b"], ["b", "b"], ["b", "x"], ["b", 3], ["b", "frozen"]):
        names = {"a": (2,), "b": (2,), "c": (3,)}
        found = match(names, numbered_groups(_optimizer([(2,), (2,), (3,)], param_names=wrong)))
        assert found is not None and found.names == [["a", "b", "c"]], wrong  # by order


def test_groups_of_experts_have_experts_only() -> None:
    names = {"w": (2,), "m.deepspeed_experts.0.w": (2,)}
    optimizer = _optimizer([(2,)])
    optimizer["param_groups"].append({"params": [1], "moe": True})
    optimizer["state"][1] = optimizer["state"][0]
    found = match(names, numbered_groups(optimizer))
    assert found is not None and found.names == [["w"], ["m.deepspeed_experts.0.w"]]


def test_pipeline_stages_are_found_from_their_optimizers() -> None:
    layers: list[dict[str, Shape]] = [{f"{n}.w": (3, 2), f"{n}.b": (3,)} for n in range(4)]
    optimizer = numbered_groups(_optimizer([(3, 2), (3,), (3, 2), (3,)]))
    found = stage_names([optimizer, optimizer], layers, {}, Effort())
    assert found == [{**layers[0], **layers[1]}, {**layers[2], **layers[3]}]
    assert stage_names([optimizer, numbered_groups(_optimizer([(3, 2)]))], layers, {}, Effort()) is None


def test_a_frozen_layer_between_stages_may_be_in_either() -> None:
    layers: list[dict[str, Shape]] = [{"0.w": (3, 2)}, {"1.frozen": (7,)}, {"2.w": (3, 2)}]
    one = numbered_groups(_optimizer([(3, 2)]))
    found = stage_names([one, one], layers, {}, Effort())
    assert found is not None and [("0.w" in f, "2.w" in f) for f in found] == [(True, False), (False, True)]
