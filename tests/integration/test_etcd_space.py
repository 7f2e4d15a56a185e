"""A real etcd that runs full: told before, known when it is, and left again."""

import asyncio
import json
from collections.abc import Callable

import pytest

from election.clock import BootClock
from election.store import ErrorClass, StoreError
from election.stores.etcd_http import EtcdStore
from supervisor import storewatch
from supervisor.demo.etcd_cluster import EtcdCluster
from tests.bed.etcd import etcd_cluster
from tests.bed.etcd_stores import CLOCK, put, soon, store_on
from tests.bed.keeper import PATIENCE
from tests.bed.nodes import Make

QUOTA = 1 << 20


async def grow(store: EtcdStore, until: Callable[[], bool]) -> None:
    """One value after another over the same key: what compaction and defragmentation can free again."""
    deadline = CLOCK.now() + PATIENCE
    while not until():
        await put(store, "/big", bytes(20_000))
        await asyncio.sleep(0.02)
        assert CLOCK.now() < deadline


@pytest.mark.parametrize("older", [False, True], ids=["3.5", "3.4"])
async def test_an_etcd_that_fills_up_is_told_of_before_and_when_it_is_full_and_recovers_by_the_documented_way(
    monkeypatch: pytest.MonkeyPatch, older: bool
) -> None:
    monkeypatch.setattr(storewatch, "EVERY", 0.05)
    told: list[str] = []
    with etcd_cluster(1, [f"--quota-backend-bytes={QUOTA}"], older=older) as cluster:
        async with store_on(*cluster.endpoints) as store:
            looking = asyncio.create_task(
                storewatch.watch_store(store, QUOTA, BootClock(), lambda kind, text: told.append(kind))
            )
            await grow(store, lambda: bool(told))
            assert told == ["store-filling"]
            with pytest.raises(StoreError) as caught:
                await grow(store, lambda: False)
            assert caught.value.kind is ErrorClass.NO_SPACE
            await seen(lambda: told == ["store-filling", "store-full"])
            await asyncio.to_thread(make_room, cluster)
            await put(store, "/big", b"")
            statuses = await store.status(deadline=soon())
            assert storewatch.dangers(statuses, QUOTA) == {}
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)


async def seen(look: Callable[[], bool]) -> None:
    deadline = CLOCK.now() + PATIENCE
    while not look():
        assert CLOCK.now() < deadline
        await asyncio.sleep(0.02)


def make_room(cluster: EtcdCluster) -> None:
    revision = json.loads(cluster.etcdctl("get", "/big", "--write-out=json"))["header"]["revision"]
    cluster.etcdctl("compact", str(revision), "--physical=true")
    cluster.etcdctl("defrag")
    cluster.etcdctl("alarm", "disarm")


def test_a_node_raises_the_alarm_at_its_start(make_node: Make) -> None:
    with etcd_cluster(1) as cluster:
        for _ in range(45):
            cluster.etcdctl("put", "/big", "x" * 20_000)
        node = make_node(store="etcd", etcd={"endpoints": cluster.endpoints, "quota": QUOTA})
        node.start()
        (alarm,) = node.until(lambda: (node.status() or {}).get("alarms"))
        assert alarm["kind"] == "store-filling"
        assert f"of {QUOTA} bytes" in alarm["text"]
