"""Stores on etcd for tests, and servers that only look like it."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer

from election.clock import BootClock
from election.store import ErrorClass, Put, StoreError, Txn
from election.stores.etcd_access import Access
from election.stores.etcd_http import EtcdStore
from supervisor.demo.etcd_cluster import EtcdCluster
from tests.bed.keeper import PATIENCE

CLOCK = BootClock()
NOTHING = Access()
Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def soon(seconds: float = PATIENCE) -> float:
    """A deadline."""
    return CLOCK.now() + seconds


@asynccontextmanager
async def store_on(*endpoints: str, access: Access = NOTHING) -> AsyncIterator[EtcdStore]:
    store = EtcdStore(endpoints, clock=CLOCK, access=access)
    try:
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def server(handler: Handler) -> AsyncIterator[str]:
    """An HTTP server on loopback that answers every POST with `handler`; its address."""
    app = web.Application()
    app.router.add_post("/{path:.*}", handler)
    async with TestServer(app) as running:
        yield str(running.make_url("")).rstrip("/")


@asynccontextmanager
async def raw_server(answer: Answer, context: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """Reads the head of each request, and answers with whatever `answer` writes, HTTP or not; its host and port."""
    serving: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            try:
                await reader.readuntil(b"\r\n\r\n")
                await answer(writer)
            finally:
                writer.close()
                await writer.wait_closed()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.add(asyncio.create_task(serve(reader, writer)))

    listener = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=context)
    async with listener:
        yield f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    for task in serving:
        task.cancel()
    await asyncio.gather(*serving, return_exceptions=True)


async def passed_through(request: web.Request, to: str) -> web.StreamResponse:
    """What the real etcd at `to` answers, as it comes."""
    body = await request.read()
    async with aiohttp.request("POST", to + request.path, data=body, headers=request.headers) as answer:
        response = web.StreamResponse(status=answer.status, headers={"Content-Type": "application/json"})
        await response.prepare(request)
        with contextlib.suppress(aiohttp.ClientError, OSError):
            async for data in answer.content.iter_any():
                await response.write(data)
        return response


async def put(store: EtcdStore, key: str, value: bytes = b"x", deadline: float | None = None) -> int:
    return (await store.commit(Txn((), (Put(key, value),)), deadline=deadline or soon())).revision


async def works_again(store: EtcdStore, key: str, within: float = PATIENCE) -> float:
    """Seconds until a put succeeds."""
    start = CLOCK.now()
    while not await succeeds(store, key):
        assert CLOCK.now() - start < within
        await asyncio.sleep(0.02)
    return CLOCK.now() - start


async def succeeds(store: EtcdStore, key: str) -> bool:
    try:
        await put(store, key, deadline=soon(2.0))
    except StoreError as error:
        if error.kind is not ErrorClass.TRANSIENT:
            raise
        return False
    return True


def in_order(cluster: EtcdCluster, first: int) -> list[str]:
    """The endpoints, beginning with that of one member."""
    return cluster.endpoints[first:] + cluster.endpoints[:first]
