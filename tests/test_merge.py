"""Merge rules: shards cut by numpy as each rule says, laid into flat ZeRO partitions, and read as one tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lazyckpt
from lazyckpt.core.dtypes import F32
from lazyckpt.core.extents import Extent, Hole
from lazyckpt.core.placement import Rank
from lazyckpt.core.specs import TensorSpec
from lazyckpt.formats.shared.flat import FlatFragments, Partition
from lazyckpt.io.storage.local import LocalStore
from lazyckpt.layouts.families import family_rules
from lazyckpt.layouts.merge import Source, decide, user_rules
from lazyckpt.layouts.universal import universal_rules

from .algebra import Array, index, keys, often


@st.composite
def cuts(draw: st.DrawFn, n: int, ranks: int) -> list[int]:
    """Widths that add up to n, some of them 0."""
    at = sorted(draw(st.lists(st.integers(0, n), min_size=ranks - 1, max_size=ranks - 1)))
    return [b - a for a, b in zip([0, *at], [*at, n], strict=True)]


def split(array: Array, dim: int, widths: Sequence[int]) -> list[Array]:
    return np.split(array, np.cumsum(widths)[:-1], axis=dim)


@st.composite
def sharded(draw: st.DrawFn) -> tuple[Array, list[Array], dict[str, Any] | str]:
    """(the tensor, what each rank holds, the rule in the words of `rules=`)."""
    ranks = draw(st.integers(2, 4))
    shape = [draw(st.integers(1, 6)) for _ in range(draw(st.integers(1, 3)))]
    kind = draw(st.sampled_from(["replicated", "column", "row", "swiglu", "parts", "widths", "vocabulary"]))
    dim = {"row": 1, "column": 0, "swiglu": 0, "vocabulary": 0}.get(kind, draw(st.integers(0, len(shape) - 1)))
    if dim >= len(shape):
        shape.append(3)
    if kind in ("swiglu", "parts"):
        count = 2 if kind == "swiglu" else draw(st.integers(1, 3))
        piece = ranks * draw(st.integers(1, 2))
        shape[dim] = count * piece
    if kind == "widths":
        sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
        widths = [draw(cuts(n, ranks)) for n in sizes]
        shape[dim] = sum(sizes)
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    if kind == "widths":
        fused = [split(p, dim, w) for p, w in zip(split(array, dim, sizes), widths, strict=True)]
        held = [np.concatenate([p[r] for p in fused], dim) for r in range(ranks)]
        return array, held, {"cat": dim, "widths": widths} | draw(st.sampled_from([{}, {"parts": sizes}]))
    if kind == "replicated":
        return array, [array] * ranks, "replicated"
    if kind in ("swiglu", "parts"):
        fused = [split(p, dim, [piece // ranks] * ranks) for p in split(array, dim, [piece] * count)]
        held = [np.concatenate([p[r] for p in fused], dim) for r in range(ranks)]
        return array, held, "swiglu" if kind == "swiglu" else {"cat": dim, "parts": [piece] * count}
    held = split(array, dim, draw(cuts(shape[dim], ranks)))
    if kind == "vocabulary":
        rows = draw(st.integers(1, shape[0]))
        return array[:rows], held, {"cat": 0, "rows": rows}
    return array, held, kind


def laid_out(folder: Path, held: Sequence[Array], dp: int, whole: bool) -> tuple[list[Any], int]:
    """Every rank's shard in a file: as ZeRO-3 cuts it (whole=False), or in the middle of ZeRO-2's flat buffer."""
    local = []
    for r, shard in enumerate(held):
        flat = shard.ravel()
        before = 3 if whole else 0
        width = -(-(len(flat) + before) // dp) if whole else -(-len(flat) // dp)
        buffer = np.full(width * dp, -7, np.float32)
        buffer[before : before + len(flat)] = flat
        parts = []
        for d in range(dp):
            path = f"tp{r}_dp{d}.bin"
            (folder / path).write_bytes(b"x" + buffer[d * width : (d + 1) * width].tobytes())
            parts.append(Partition(Extent(path, 1, torch.float32, (width,), (1,)), Rank(tp=r, dp=d)))
        local.append(FlatFragments(shard.shape, width, tuple(parts), within=before if whole else None))
    return local, len(held)


@pytest.mark.slow
@often
@given(st.data())
def test_any_slice_of_any_merge_of_zero(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    array, held, rule = data.draw(sharded())
    folder = tmp_path_factory.mktemp("merge")
    local, _ = laid_out(folder, held, data.draw(st.integers(1, 3)), data.draw(st.booleans()))
    merged = decide("w", [h.shape for h in held], [user_rules({"*": rule})])
    assert merged.shape == array.shape
    assert "rules['*']" in merged.rule
    fragments = merged.join(local)
    assert [f.rank for f in fragments] == [fragments[n].rank for n in range(len(fragments))]
    tensor = lazyckpt.LazyTensor(LocalStore(folder), TensorSpec("w", merged.shape, torch.float32, fragments))
    assert np.array_equal(tensor.numpy(), array)
    key = data.draw(keys(array.shape))
    assert np.array_equal(tensor[key].numpy(), index(array, key))


def test_the_mean_of_drifted_copies(tmp_path: Path) -> None:
    held = [np.float32([1, 2, 3]), np.float32([3, 2, 7])]
    local, _ = laid_out(tmp_path, held, 2, False)
    merged = decide("norm", [(3,), (3,)], [user_rules({"norm": "average"})])
    spec = merged.tensor("norm", F32, local)
    assert lazyckpt.LazyTensor(LocalStore(tmp_path), spec).numpy().tolist() == [2, 2, 5]


def test_shards_that_differ_along_one_dimension_are_cut_along_it() -> None:
    merged = decide("w", [(3, 4), (3, 5)], [])
    assert merged.shape == (3, 9)
    assert "inferred" in merged.rule


@pytest.mark.parametrize("shapes", [[(3, 4), (3, 4)], [(3, 4), (4, 5)], [(3,), (3, 1)]])
def test_what_nothing_tells_is_not_guessed(shapes: list[tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match="nothing tells"):
        decide("w", shapes, [])


def test_rules_that_do_not_fit_say_so() -> None:
    cases: list[tuple[Any, list[tuple[int, ...]], str]] = [
        ({"cat": 0, "widths": [[2, 1], [1, 1]]}, [(3,), (3,)], "3 wide"),
        ({"cat": 0, "widths": [[2, 1, 1], [1, 1, 1]]}, [(3,), (2,)], "3 wide"),
        ("replicated", [(2,), (3,)], "differ"),
        ("row", [(2,), (2,)], "no dimension 1"),
        ("column", [(2, 3), (2, 4)], "do not fit"),
        ("swiglu", [(3,), (3,)], "not 2 equal parts"),
        ({"cat": 0, "parts": [3, 2]}, [(2,), (3,)], "evenly"),
        ({"cat": 0, "rows": 9}, [(2, 2), (2, 2)], "9 rows"),
    ]
    for rule, shapes, words in cases:
        with pytest.raises(ValueError, match=words):
            decide("w", shapes, [user_rules({"w": rule})])


@pytest.mark.parametrize(
    "rule",
    ["diagonal", {"cat": "0"}, {"cat": 0, "colour": 1}, 7, {"cat": -1}, {"cat": True}, {"parts": 2},
     {"cat": 0, "parts": 0}, {"cat": 0, "parts": []}, {"cat": 0, "parts": "22"}, {"cat": 0, "parts": [2.0]},
     {"cat": 0, "widths": []}, {"cat": 0, "widths": [2, 1]}, {"cat": 0, "rows": 0}, {"cat": 0, "rows": "9"},
     {"cat": 0, "parts": [4], "widths": [[2, 1]]}],
)  # fmt: skip
def test_words_that_are_no_rule(rule: Any) -> None:
    with pytest.raises(lazyckpt.FormatError, match="not understood"):
        user_rules({"w": rule})


INFO = {
    "universal_checkpoint_version": 0.4,
    "original_vocab_size": 5,
    "vocabulary_parameter_patterns": ["tied_modules.embed.word_embeddings.weight"],
    "tp_replicated_parameter_patterns": [r"\d+.input_layernorm.weight"],
    "parameter_to_average_patterns": [r"\d+.drift"],
    "parameter_with_row_parallelism_patterns": [r"\d+.self_attention.dense.weight"],
    "parameter_with_2_sub_params_cat_dim_0": [r"\d+.mlp.dense_h_to_4h.weight"],
    "parameter_with_sub_params": [{"patterns": [r"\d+.qkv"], "shape": ((4, 2, 2), -1), "partition_dim": 0}],
    "sub_param_shard_widths": {r"\d+.qkv": [[3, 1], [1, 1], [2, 0]]},
}


@pytest.mark.parametrize(
    ("name", "shapes", "shape", "parts", "words"),
    [
        ("tied_modules.embed.word_embeddings.weight", [(3, 2)] * 2, (5, 2), 2, "original_vocab_size"),
        ("2.input_layernorm.weight", [(4,)] * 2, (4,), 0, "tp_replicated"),
        ("2.drift", [(4,)] * 2, (4,), 0, "average"),
        ("2.self_attention.dense.weight", [(4, 3)] * 2, (4, 6), 2, "row_parallelism"),
        ("2.mlp.dense_h_to_4h.weight", [(6, 3)] * 2, (12, 3), 4, "2_sub_params"),
        ("2.mlp.dense_h_to_4h.bias", [(6,)] * 2, (12,), 2, "the default"),
        ("2.qkv", [(6, 2), (2, 2)], (8, 2), 5, "parameter_with_sub_params"),
        ("1.position_embeddings.weight", [(4, 3)] * 2, (4, 3), 0, "family"),
    ],
)
def test_what_universal_checkpoint_info_says(
    name: str, shapes: list[tuple[int, ...]], shape: tuple[int, ...], parts: int, words: str
) -> None:
    merged = decide(name, shapes, [universal_rules(INFO, family_rules())])
    assert merged.shape == shape
    assert sum(len(placement.parts or ()) for placement in merged.placements) == parts
    assert words in merged.rule


def test_the_user_is_heard_before_the_checkpoint() -> None:
    sources = [user_rules({"*layernorm*": "column"}), universal_rules(INFO, family_rules())]
    assert decide("2.input_layernorm.weight", [(4,), (4,)], sources).shape == (8,)


def affine(scale: float | None = None, version: int = 1) -> Source:
    """Two heads of two rows each, dealt out in turn: rank 0 has the first row of both, rank 1 the second."""
    piece: Callable[[int], dict[str, Any]] = lambda r: {  # noqa: E731
        "shape": [2, 1, 3], "source": [3 * r, [6, 3, 1]], "dest": [0, [3, 3, 1]], "locations": [r],
        **({} if scale is None else {"scale": scale}),
    }  # fmt: skip
    ranks = {r: {"shard_shape": [2, 3], "pieces": [piece(r)]} for r in range(2)}
    params = {"^w$": {"logical_shape": [4, 3], "ranks": ranks}}
    return universal_rules({"affine_map": {"version": version, "params": params}}, family_rules())


def test_an_affine_map_places_piece_by_piece(tmp_path: Path) -> None:
    array = np.arange(12, dtype=np.float32).reshape(4, 3)
    local, _ = laid_out(tmp_path, [array[[0, 2]], array[[1, 3]]], 2, True)
    merged = decide("w", [(2, 3), (2, 3)], [affine()])
    spec = TensorSpec("w", merged.shape, torch.float32, merged.join(local))
    assert np.array_equal(lazyckpt.LazyTensor(LocalStore(tmp_path), spec).numpy(), array)


def test_an_affine_map_that_is_not_known_is_refused() -> None:
    for source, words in ((affine(scale=0.5), "scales"), (affine(version=2), "version 2")):
        with pytest.raises(ValueError, match=words):
            decide("w", [(2, 3), (2, 3)], [source])


def test_a_lost_partition_is_named_and_the_rest_reads(tmp_path: Path) -> None:
    array = np.arange(24, dtype=np.float32).reshape(8, 3)
    local, _ = laid_out(tmp_path, [array[:4], array[4:]], 2, False)
    lost = Partition(Hole("tp1_dp1.bin", "tp1_dp1.bin is missing"), Rank(tp=1, dp=1))
    local[1] = FlatFragments((4, 3), local[1].width, (local[1].partitions[0], lost))
    merged = decide("w", [(4, 3), (4, 3)], [user_rules({"w": "column"})])
    spec = TensorSpec("w", merged.shape, torch.float32, merged.join(local))
    tensor = lazyckpt.LazyTensor(LocalStore(tmp_path), spec)
    assert np.array_equal(tensor[:6].numpy(), array[:6])
    with pytest.raises(lazyckpt.MissingFileError, match="tp1_dp1"):
        tensor[:7]
