"""A watch on a real etcd goes on for ever, and says when it may have missed something."""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import pytest
from aiohttp import web
from structlog.testing import capture_logs

from election.store import Change, StoreError
from election.stores import etcd_watch
from election.stores.etcd_http import EtcdStore
from supervisor.demo.etcd_cluster import EtcdCluster
from tests.bed.etcd import etcd_cluster
from tests.bed.etcd_stores import CLOCK, in_order, passed_through, put, server, soon, store_on, works_again
from tests.bed.keeper import PATIENCE


@pytest.fixture
def root() -> str:
    """A prefix that no other test uses."""
    return f"/etcd/{uuid.uuid4().hex}/"


async def until_none(watch: AsyncGenerator[Change | None, None], within: float = PATIENCE) -> None:
    async with asyncio.timeout(within):
        while await anext(watch) is not None:
            pass


async def until_change(watch: AsyncGenerator[Change | None, None], value: bytes) -> None:
    async with asyncio.timeout(PATIENCE):
        while (change := await anext(watch)) is None or change.value != value:
            pass


async def eventually(seen: Callable[[], bool], within: float = PATIENCE) -> None:
    deadline = soon(within)
    while not seen():
        assert CLOCK.now() < deadline
        await CLOCK.sleep_until(CLOCK.now() + 0.02)


async def test_a_watch_survives_the_death_of_its_member_and_of_the_leader(own_etcd: EtcdCluster, root: str) -> None:
    leader = own_etcd.leader()
    async with store_on(*in_order(own_etcd, leader)) as store, aclosing(store.watch(root)) as watch:
        await until_none(watch)
        own_etcd.kill(leader)
        await works_again(store, root + "a")
        await until_none(watch)
        await put(store, root + "a", b"after")
        await until_change(watch, b"after")


async def test_a_watch_leaves_a_stopped_member_and_tells_what_happened_meanwhile(
    own_etcd: EtcdCluster, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_watch, "SILENCE", 0.4)
    monkeypatch.setattr(etcd_watch, "CREATE", 0.4)
    member = (own_etcd.leader() + 1) % 3
    async with store_on(*in_order(own_etcd, member)) as store, aclosing(store.watch(root)) as watch:
        await until_none(watch)
        own_etcd.stop(member)
        async with store_on(*in_order(own_etcd, (member + 1) % 3)) as other:
            revision = await put(other, root + "a", b"meanwhile")
        await read_by_another_member(store, root)
        async with asyncio.timeout(PATIENCE):
            assert await anext(watch) is None
            assert await anext(watch) == Change(root + "a", revision, b"meanwhile", 0, 0)


async def read_by_another_member(store: EtcdStore, root: str) -> None:
    """The first read asks the stopped member, and costs its deadline."""
    with pytest.raises(StoreError, match="no answer by the deadline"):
        await store.read([root], deadline=soon(0.3))
    await store.read([root], deadline=soon())


async def test_a_watch_whose_member_hangs_is_told_of_a_change_a_silence_after_a_read_has_shown_it(
    own_etcd: EtcdCluster, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the real times: silence 5 s, and the creation that the stopped member does not answer 2 s."""
    member = (own_etcd.leader() + 1) % 3
    async with store_on(*in_order(own_etcd, member)) as store, aclosing(store.watch(root)) as watch:
        await until_none(watch)
        told = asyncio.ensure_future(anext(watch))
        own_etcd.stop(member)
        async with store_on(*in_order(own_etcd, (member + 1) % 3)) as other:
            await put(other, root + "a", b"meanwhile")
        await read_by_another_member(store, root)
        shown = CLOCK.now()
        async with asyncio.timeout(PATIENCE):
            assert await told is None
        assert CLOCK.now() - shown < etcd_watch.SILENCE + etcd_watch.CREATE + 3


async def test_a_watch_where_nothing_changes_is_not_made_anew(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_watch, "SILENCE", 0.05)
    made = []
    with etcd_cluster(1) as cluster:

        async def count(request: web.Request) -> web.StreamResponse:
            made.append(request.path)
            return await passed_through(request, cluster.endpoints[0])

        async with server(count) as endpoint, store_on(endpoint) as store, aclosing(store.watch(root)) as watch:
            await until_none(watch)
            told = asyncio.ensure_future(anext(watch))
            await asyncio.wait([told], timeout=0.5)
            for _ in range(5):
                await store.read([root], deadline=soon())
                await asyncio.wait([told], timeout=0.1)
            assert made.count("/v3/watch") == 1
            async with store_on(*cluster.endpoints) as other:
                await put(other, "/elsewhere")
            await store.read([root], deadline=soon())
            await eventually(lambda: made.count("/v3/watch") == 2)
            told.cancel()
            await asyncio.gather(told, return_exceptions=True)


async def test_a_watch_leaves_a_member_that_lost_its_leader_and_comes_back(own_etcd: EtcdCluster, root: str) -> None:
    leader = own_etcd.leader()
    others = [(leader + 1) % 3, (leader + 2) % 3]
    async with store_on(own_etcd.endpoints[leader]) as store, aclosing(store.watch(root)) as watch:
        await until_none(watch)
        with capture_logs() as logs:
            for member in others:
                own_etcd.kill(member)
            again = asyncio.create_task(until_none(watch))
            await eventually(lambda: any("no leader" in line["cause"] for line in logs))
        own_etcd.restart(*others)
        await again
        await put(store, root + "a", b"after")
        await until_change(watch, b"after")


async def test_a_quiet_watch_is_made_anew_without_losing_or_repeating_anything(
    etcd: EtcdCluster, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_watch, "SILENCE", 0.02)
    async with store_on(*etcd.endpoints) as store, aclosing(store.watch(root)) as watch:
        await until_none(watch)

        async def write() -> list[int]:
            revisions = []
            for count in range(40):
                await put(store, "/elsewhere")
                revisions.append(await put(store, root + "a"))
                await asyncio.sleep(0.001 * (7 * count % 45))
            return revisions

        writing = asyncio.create_task(write())
        async with asyncio.timeout(PATIENCE):
            changes = [await anext(watch) for _ in range(40)]
        assert [change.mod_revision if change else None for change in changes] == await writing


async def test_a_watch_whose_place_was_compacted_away_says_so_and_goes_on(
    own_etcd: EtcdCluster, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with store_on(*own_etcd.endpoints) as store, aclosing(store.watch(root)) as watch:
        monkeypatch.setattr(etcd_watch, "SILENCE", 0.3)
        await until_none(watch)
        await put(store, root + "a", b"first")
        await until_change(watch, b"first")
        for _ in range(5):
            last = await put(store, "/elsewhere")
        await asyncio.to_thread(own_etcd.etcdctl, "compact", str(last))
        await until_none(watch)
        await put(store, root + "a", b"second")
        await until_change(watch, b"second")


async def test_a_watch_on_something_that_is_not_etcd_keeps_trying_without_haste(root: str) -> None:
    asked: list[float] = []

    async def nonsense(request: web.Request) -> web.Response:
        assert request.path == "/v3/watch"
        asked.append(CLOCK.now())
        return web.json_response({"result": {"created": "perhaps"}})

    async with server(nonsense) as endpoint, store_on(endpoint) as store, aclosing(store.watch(root)) as watch:
        told = asyncio.ensure_future(anext(watch))
        await eventually(lambda: len(asked) == 5)
        assert not told.done()
        told.cancel()
        await asyncio.gather(told, return_exceptions=True)
    assert asked[4] - asked[0] > 1.3  # after 0.1, 0.2, 0.4 and 0.8 s
