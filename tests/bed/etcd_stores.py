"""Stores on etcd for tests, and servers that only look like it."""

import asyncio
import contextlib
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
