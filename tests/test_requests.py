"""How wanted runs of bytes become requests, and where the bytes of an answer go."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyckpt import FormatError
from lazyckpt.core.requests import GAP, NEAR, Policy, cut, join
from lazyckpt.io.pool import run
from lazyckpt.io.tasks import Fetch
from lazyckpt.testing.remote import Served

runs = st.lists(st.tuples(st.integers(0, 50_000), st.integers(1, 3_000)), min_size=1, max_size=60)
policies = st.builds(
    Policy,
    over_read=st.sampled_from([1.0, 1.2, 3.0]),
    gap=st.sampled_from([None, 0, 700, 5_000]),
    most=st.sampled_from([1, 5, 1000]),
    largest=st.sampled_from([500, 4_000, 1 << 20]),
    smallest=st.sampled_from([1, 1_000]),
    concurrency=st.sampled_from([1, 3, 64]),
)


def sorted_runs(found: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    offsets, lengths = (np.array(column, np.int64) for column in zip(*sorted(found), strict=True))
    return offsets, lengths


@given(runs, policies)
def test_every_piece_lies_in_one_request(found: list[tuple[int, int]], policy: Policy) -> None:
    offsets, lengths = sorted_runs(found)
    size = min(policy.largest, 2_000)
    offsets, lengths, _, _ = cut(offsets, lengths, np.arange(len(offsets)), np.zeros(len(offsets), np.int64), size)
    order = np.argsort(offsets, kind="stable")
    offsets, lengths = offsets[order], lengths[order]
    requests = list(join(offsets, lengths, policy, size))
    assert [r.first for r in requests] == [0, *(r.last for r in requests[:-1])]
    assert requests[-1].last == len(offsets)
    for r in requests:
        assert (offsets[r.first : r.last] >= r.start).all()
        assert (offsets[r.first : r.last] + lengths[r.first : r.last]).max() == r.stop
        assert r.stop - r.start <= policy.largest


@given(runs)
def test_the_gaps_that_are_read_are_few(found: list[tuple[int, int]]) -> None:
    offsets, lengths = sorted_runs(found)
    read = sum(r.stop - r.start for r in join(offsets, lengths, Policy(), 1 << 20))
    near = sum(g for g in np.maximum(offsets[1:] - np.maximum.accumulate(offsets + lengths)[:-1], 0) if g <= NEAR)
    wanted = len({byte for offset, length in found for byte in range(offset, offset + length)})
    assert read <= 1.2 * (wanted + near)


def test_many_far_runs_are_joined_where_requests_cost_more() -> None:
    offsets = np.arange(10_000, dtype=np.int64) * 4_096
    lengths = np.full(10_000, 4, np.int64)
    joined = list(join(offsets, lengths, Policy(), 1 << 20))
    assert len(joined) == -(-(9_999 * 4_096 + 4) // Policy().largest)
    far = list(join(offsets * 16, lengths, Policy(), 1 << 20))
    assert GAP < 4_096 * 16 and len(far) == 10_000
    assert len(list(join(offsets[:1000], lengths[:1000], Policy(), 1 << 20))) == 1_000
    assert len(list(join(offsets[:1000], lengths[:1000], Policy(gap=4_096), 1 << 20))) == 1


@given(runs, policies, st.integers(1, 5))
def test_bytes_go_where_they_belong(found: list[tuple[int, int]], policy: Policy, fetches: int) -> None:
    content = np.random.default_rng(0).integers(0, 256, 60_000, np.uint8).tobytes()
    store = Served({"a": content, "b": content[::-1]}, policy)
    tasks, expected = [], []
    for n in range(fetches):
        own, path = found[n::fetches], "ab"[n % 2]
        if not own:
            continue
        offsets, lengths = (np.array(column, np.int64) for column in zip(*own, strict=True))
        at = np.cumsum(lengths) - lengths
        memory = memoryview(bytearray(int(lengths.sum())))
        fetch = Fetch(store, path, offsets, lengths, at, memory)
        tasks.append((fetch.nbytes, fetch))
        whole = store.content[path]
        expected.append((memory, b"".join(whole[o : o + n] for o, n in own)))
    run(tasks)
    for memory, wanted in expected:
        assert bytes(memory) == wanted
    assert store.io.requests == len(store.log) and store.io.bytes == sum(stop - start for _, start, stop in store.log)


def test_equal_runs_are_copied_at_once() -> None:
    content = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8).tobytes()
    store = Served({"a": content}, Policy(gap=1 << 12), piece=10_007)
    offsets = np.arange(500, dtype=np.int64) * 2_001 + 3
    lengths = np.full(500, 33, np.int64)
    memory = memoryview(bytearray(500 * 33))
    fetch = Fetch(store, "a", offsets, lengths, np.arange(500, dtype=np.int64) * 33, memory)
    run([(fetch.nbytes, fetch)])
    assert bytes(memory) == b"".join(content[o : o + 33] for o in offsets.tolist())
    assert len(store.log) == 1


@pytest.mark.parametrize(
    "options", [{"gaps": 1}, {"concurrency": 0}, {"over_read": 0.5}, {"deadline": "long"}, {"largest": True}]
)
def test_options_that_do_not_exist(options: dict[str, object]) -> None:
    with pytest.raises(FormatError, match=r"storage_options\['requests'\]"):
        Policy.of(options)
