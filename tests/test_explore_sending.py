"""Files that are computed while they are sent: bounded memory, shared blocks, slow and vanishing readers."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from starlette.responses import Response

from lazyckpt.explore.blocks import Shared
from lazyckpt.explore.sending import Room, Streams, bounded

from .lanes import rounds

ROOM = 1 << 20
CONTENT = random.Random(1).randbytes(5 << 20)


def shared(fill: Callable[[int, memoryview], None] | None = None, tag: str = "a") -> Shared:
    def plain(begin: int, target: memoryview) -> None:
        target[:] = CONTENT[begin : begin + len(target)]

    return Shared(len(CONTENT), tag, "application/octet-stream", fill or plain)


async def taken(streams: Streams, file: Shared, begin: int, end: int, pause: float = 0.0) -> bytes:
    found = bytearray()
    async for piece in streams.pieces(file, begin, end):
        found += piece
        await asyncio.sleep(pause)
    return bytes(found)


@pytest.mark.parametrize("seed", range(rounds(2)))
def test_every_reader_gets_its_bytes_in_bounded_memory(seed: int) -> None:
    chosen = random.Random(seed)

    async def main() -> None:
        streams = Streams(ROOM)
        files = [shared(tag=str(n)) for n in range(3)]

        async def read() -> None:
            begin, end = sorted(chosen.sample(range(len(CONTENT) + 1), 2))
            pause = chosen.choice((0, 0, 0, 0.02))
            if pause:
                end = min(end, begin + (1 << 20))
            assert await taken(streams, chosen.choice(files), begin, end, pause) == CONTENT[begin:end]
            assert streams.used <= ROOM

        await asyncio.wait_for(asyncio.gather(*(read() for _ in range(40))), 60)
        assert streams.used == 0

    asyncio.run(main())


def test_a_block_is_computed_once_for_all_who_wait_for_it() -> None:
    calls = []

    def fill(begin: int, target: memoryview) -> None:
        calls.append(begin)
        target[:] = CONTENT[begin : begin + len(target)]

    async def main() -> None:
        streams = Streams(ROOM)
        found = await asyncio.gather(*(taken(streams, shared(fill), 0, 500_000) for _ in range(20)))
        assert set(found) == {CONTENT[:500_000]}

    asyncio.run(main())
    assert len(calls) == 1


def test_readers_that_take_nothing_do_not_stop_the_others() -> None:
    async def main() -> None:
        streams = Streams(ROOM)
        asleep = [streams.pieces(shared(tag=f"slow {n}"), 0, len(CONTENT)) for n in range(10)]
        firsts = await asyncio.wait_for(asyncio.gather(*(anext(one) for one in asleep)), 20)
        assert await asyncio.wait_for(taken(streams, shared(), 0, len(CONTENT)), 20) == CONTENT
        for first, one in zip(firsts, asleep, strict=True):  # what was dropped is read again
            rest = [piece async for piece in one]
            assert b"".join([first, *rest]) == CONTENT
        assert streams.used == 0

    asyncio.run(main())


def test_what_is_in_memory_does_not_wait_for_a_slow_disk() -> None:
    answers = threading.Event()

    def slow(begin: int, target: memoryview) -> None:
        answers.wait(20)

    async def main() -> None:
        streams = Streams(ROOM)
        tasks = [asyncio.create_task(taken(streams, shared(slow, str(n)), 0, 100)) for n in range(4)]
        await asyncio.sleep(0.01)
        text = Shared(len(CONTENT), "text", "text/plain", CONTENT)
        assert await asyncio.wait_for(taken(streams, text, 7, 400_000), 10) == CONTENT[7:400_000]
        answers.set()
        await asyncio.gather(*tasks)

    asyncio.run(main())


def test_errors_reach_all_who_wait_and_the_next_asks_anew() -> None:
    broken = True

    def fill(begin: int, target: memoryview) -> None:
        if broken:
            raise OSError("lost")
        target[:] = CONTENT[begin : begin + len(target)]

    async def main() -> None:
        nonlocal broken
        streams = Streams(ROOM)
        found = await asyncio.gather(*(taken(streams, shared(fill), 0, 100) for _ in range(5)), return_exceptions=True)
        assert all(isinstance(one, OSError) for one in found)
        assert streams.used == 0
        broken = False
        assert await taken(streams, shared(fill), 0, 100) == CONTENT[:100]

    asyncio.run(main())


def test_readers_that_leave_make_room() -> None:
    async def main() -> None:
        streams = Streams(ROOM)
        tasks = [asyncio.create_task(taken(streams, shared(tag=str(n)), 0, len(CONTENT), 0.01)) for n in range(12)]
        await asyncio.sleep(0.1)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert await taken(streams, shared(), 0, len(CONTENT)) == CONTENT
        assert streams.used == 0

    asyncio.run(main())


def test_answers_that_nobody_takes_are_bounded() -> None:
    async def main() -> None:
        room = Room(300_000)
        gone = asyncio.Event()
        taken: list[bytes] = []
        most = 0

        async def client(n: int) -> None:
            nonlocal most
            response = await bounded(Response(bytes([n]) * 100_000, headers={"X-A": "b"}), room)
            found = b""

            async def send(message: Any) -> None:
                nonlocal found, most
                most = max(most, room.used)
                if n < 3:  # these leave after a while, having taken nothing
                    await gone.wait()
                    raise ConnectionError
                found += message.get("body", b"")

            with suppress(ConnectionError):
                await response({"type": "http", "method": "GET"}, None, send)  # type: ignore[arg-type]
            taken.append(found)

        clients = asyncio.gather(*(client(n) for n in range(9)))
        await asyncio.sleep(0.01)
        assert not taken
        gone.set()
        await asyncio.wait_for(clients, 10)
        assert sorted(taken) == [b""] * 3 + [bytes([n]) * 100_000 for n in range(3, 9)]
        assert (most, room.used) == (300_000, 0)

    asyncio.run(main())


def test_answers_do_not_wait_for_clients_that_take_nothing() -> None:
    async def main() -> None:
        room = Room(100, patience=0.05)
        started = asyncio.get_running_loop().time()
        await asyncio.wait_for(asyncio.gather(*(room.take(60) for _ in range(200))), 5)
        assert asyncio.get_running_loop().time() - started >= 0.05  # the first of them did wait
        assert room.used == 12_000
        for _ in range(200):
            room.give(60)
        assert room.used == 0

    asyncio.run(main())
