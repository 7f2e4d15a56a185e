"""Who connects and says nothing does not keep a load balancer from its answer. Real sockets, a small limit."""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from supervisor.api.limit import MOST, PATIENCE, limited
from tests.bed.keeper import PATIENCE as GUARD
from tests.bed.nodes import LONG_TTL, Make

HEAD = b"GET /quick HTTP/1.1\r\nHost: x\r\n"
SLOW = b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n"
FEW = 5
SHORT = 0.4
"""Seconds of patience, for the tests of it."""
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Listening:
    """A server with two pages: `/quick`, and `/slow`, which answers when `go` is set."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self._begun = asyncio.Semaphore(0)
        self.port = 0
        self._writers: list[asyncio.StreamWriter] = []

    async def quick(self, request: web.Request) -> web.Response:
        return web.Response(text="quick")

    async def slow(self, request: web.Request) -> web.Response:
        self._begun.release()
        await self.go.wait()
        return web.Response(text="slow")

    async def until_begun(self, count: int) -> None:
        async with asyncio.timeout(GUARD):
            for _ in range(count):
                await self._begun.acquire()

    async def connect(self, data: bytes = b"") -> Streams:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self._writers.append(writer)
        writer.write(data)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        return reader, writer

    async def ask(self) -> bytes:
        """A whole answer on a connection of its own; empty: it was closed."""
        reader, writer = await self.connect(HEAD + b"Connection: close\r\n\r\n")
        try:
            async with asyncio.timeout(GUARD):
                return await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.close()

    async def hang_up(self) -> None:
        for writer in self._writers:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


@contextlib.asynccontextmanager
async def listening(most: int, patience: float) -> AsyncIterator[Listening]:
    pages = Listening()
    app = web.Application()
    app.router.add_get("/quick", pages.quick)
    app.router.add_get("/slow", pages.slow)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    assert runner.server is not None
    factory = limited(runner.server, most, patience)
    limited(runner.server, most, patience)  # of another listener of the same server, as a node has two
    server = await asyncio.get_running_loop().create_server(factory, "127.0.0.1", 0)
    pages.port = server.sockets[0].getsockname()[1]
    try:
        yield pages
    finally:
        await pages.hang_up()
        server.close()
        await runner.cleanup()


async def closed(streams: Streams, within: float = GUARD) -> bool:
    """True once the other end has closed; nothing else may come before."""
    try:
        async with asyncio.timeout(within):
            return await streams[0].read(1) == b""
    except ConnectionError:
        return True
    except TimeoutError:
        return False


@pytest.mark.parametrize("said", [b"", HEAD], ids=["nothing", "half a head"])
async def test_connections_that_ask_for_nothing_give_way_oldest_first(said: bytes) -> None:
    async with listening(FEW, 60) as pages:
        idle = [await pages.connect(said) for _ in range(FEW)]
        assert (await pages.ask()).endswith(b"quick")
        assert await closed(idle[0])
        assert not await closed(idle[1], 0.1)
        for _ in range(3 * FEW):
            idle.append(await pages.connect(said))
        assert (await pages.ask()).endswith(b"quick")


@pytest.mark.parametrize("said", [b"", HEAD], ids=["nothing", "half a head"])
async def test_who_has_not_sent_a_whole_head_in_time_is_closed(said: bytes) -> None:
    async with listening(FEW, SHORT) as pages:
        began = time.monotonic()
        idle = await pages.connect(said)
        assert await closed(idle)
        assert time.monotonic() - began > SHORT * 0.9


async def test_a_head_that_comes_byte_by_byte_does_not_buy_more_time() -> None:
    async with listening(FEW, SHORT) as pages:
        began = time.monotonic()
        reader, writer = await pages.connect(HEAD + b"X-Long: ")
        with contextlib.suppress(ConnectionError):
            while not reader.at_eof() and time.monotonic() - began < GUARD:
                writer.write(b"a")
                await writer.drain()
                await asyncio.sleep(SHORT / 8)
        assert time.monotonic() - began < GUARD


async def test_the_time_between_two_requests_of_a_connection_is_limited_too() -> None:
    patience = 5 * SHORT
    async with listening(FEW, patience) as pages:
        streams = await pages.connect()
        for _ in range(5):  # together longer than the patience
            await asyncio.sleep(patience / 4)
            streams[1].write(HEAD + b"\r\n")
            assert b"200 OK" in await streams[0].readuntil(b"quick")
        began = time.monotonic()
        assert await closed(streams)
        assert time.monotonic() - began > patience * 0.9


async def test_a_request_in_progress_neither_gives_way_nor_runs_out_of_time() -> None:
    async with listening(FEW, SHORT) as pages:
        slow = [await pages.connect(SLOW) for _ in range(FEW)]
        await pages.until_begun(FEW)
        assert await pages.ask() == b""  # all are busy: the new one is refused
        await asyncio.sleep(2 * SHORT)
        pages.go.set()
        for reader, _ in slow:
            async with asyncio.timeout(GUARD):
                assert b"200 OK" in await reader.readuntil(b"slow")
        assert (await pages.ask()).endswith(b"quick")


async def test_connections_that_are_closed_at_once_are_not_counted_for_ever() -> None:
    async with listening(FEW, 60) as pages:
        for _ in range(4 * FEW):
            (await pages.connect())[1].close()
        slow = await pages.connect(SLOW)
        await pages.until_begun(1)
        slow[1].close()
        for _ in range(4 * FEW):
            assert (await pages.ask()).endswith(b"quick")


def test_a_node_tells_who_leads_whatever_else_is_connected(make_node: Make) -> None:
    node = make_node(ttl=LONG_TTL).after_an_orderly_end()
    node.start().until_leading()
    host, port = node.config["api"]["listen"].split(":")
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(MOST + 50)]
        for one in idle[50:]:
            one.sendall(b"GET /lead")
        assert node.leads()
        idle[-1].settimeout(PATIENCE + GUARD)
        assert idle[-1].recv(1) == b""
    assert node.leads()
