"""What every lock store promises (`election.store`), on each of them: in memory, in a file, on real etcds."""

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path

import pytest

from election.clock import BootClock
from election.store import (
    Change,
    Committed,
    Delete,
    ErrorClass,
    LeaseIs,
    LockStore,
    ModIs,
    Put,
    StoreError,
    Txn,
)
from election.stores.etcd_http import EtcdStore
from election.stores.local import LocalStore
from election.stores.memory import MemoryStore
from supervisor.demo.etcd_cluster import EtcdCluster
from tests.bed.etcd import etcd_cluster
from tests.bed.keeper import PATIENCE

CLOCK = BootClock()
Watch = AsyncGenerator[Change | None, None]


def soon(seconds: float = PATIENCE) -> float:
    return CLOCK.now() + seconds


@pytest.fixture
def root() -> str:
    """A prefix that no other test uses."""
    return f"/conformance/{uuid.uuid4().hex}/"


@pytest.fixture(scope="session")
def older_etcd() -> Iterator[EtcdCluster]:
    with etcd_cluster(older=True) as cluster:
        yield cluster


@pytest.fixture(params=["memory", "local", "etcd", "etcd 3.4"])
async def stores(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[tuple[LockStore, LockStore]]:
    """Two clients of the same data."""
    pair: tuple[LockStore, LockStore]
    if request.param == "memory":
        first = MemoryStore(CLOCK)
        pair = (first, first.handle())
    elif request.param == "local":
        pair = (LocalStore(tmp_path / "lock.db", clock=CLOCK), LocalStore(tmp_path / "lock.db", clock=CLOCK))
    else:
        endpoints = request.getfixturevalue("etcd" if request.param == "etcd" else "older_etcd").endpoints
        pair = (EtcdStore(endpoints, clock=CLOCK), EtcdStore(endpoints[::-1], clock=CLOCK))
    yield pair
    for store in pair:
        await store.close()


@pytest.fixture
def store(stores: tuple[LockStore, LockStore]) -> LockStore:
    return stores[0]


@pytest.fixture
def other(stores: tuple[LockStore, LockStore]) -> LockStore:
    return stores[1]


async def put(store: LockStore, key: str, value: bytes = b"x", lease: int = 0) -> Committed:
    return await store.commit(Txn((), (Put(key, value, lease),)), deadline=soon())


async def value_of(store: LockStore, key: str) -> bytes | None:
    entry = (await store.read([key], deadline=soon())).get(key)
    return entry.value if entry else None


async def take(watch: Watch, count: int) -> list[Change | None]:
    async with asyncio.timeout(PATIENCE):
        return [await anext(watch) for _ in range(count)]


async def test_a_put_guarded_by_absence_succeeds_only_once(store: LockStore, other: LockStore, root: str) -> None:
    def claim(value: bytes) -> Txn:
        return Txn((ModIs(root + "leader", 0),), (Put(root + "leader", value),))

    assert (await store.commit(claim(b"first"), deadline=soon())).succeeded
    assert not (await other.commit(claim(b"second"), deadline=soon())).succeeded
    assert await value_of(other, root + "leader") == b"first"


async def test_a_guard_on_the_mod_revision_fails_after_any_change(store: LockStore, root: str) -> None:
    seen = (await put(store, root + "a")).revision
    await put(store, root + "a")
    done = await store.commit(Txn((ModIs(root + "a", seen),), (Delete(root + "a"),)), deadline=soon())
    assert not done.succeeded
    assert await value_of(store, root + "a") == b"x"


async def test_a_guard_on_a_revision_fails_for_a_key_that_is_absent(store: LockStore, root: str) -> None:
    txn = Txn((ModIs(root + "a", 1),), (Put(root + "b", b"x"),))
    assert not (await store.commit(txn, deadline=soon())).succeeded


async def test_a_lease_guard_holds_only_for_that_lease(store: LockStore, root: str) -> None:
    ours, theirs = await store.grant(60, deadline=soon()), await store.grant(60, deadline=soon())
    await put(store, root + "a", lease=ours.lease)
    for lease, expected in ((theirs.lease, False), (0, False), (ours.lease, True)):
        txn = Txn((LeaseIs(root + "a", lease),), (Put(root + "b", b"x"),))
        assert (await store.commit(txn, deadline=soon())).succeeded is expected, lease


async def test_a_lease_guard_fails_for_an_absent_key_even_for_no_lease(store: LockStore, root: str) -> None:
    txn = Txn((LeaseIs(root + "a", 0),), (Put(root + "b", b"x"),))
    assert not (await store.commit(txn, deadline=soon())).succeeded
    await put(store, root + "a")
    assert (await store.commit(txn, deadline=soon())).succeeded


async def test_one_failing_guard_keeps_every_operation_from_happening(store: LockStore, root: str) -> None:
    before = await put(store, root + "a")
    guards = (ModIs(root + "a", before.revision), ModIs(root + "term", 7))
    txn = Txn(guards, (Put(root + "a", b"new"), Put(root + "b", b"new")))
    assert await store.commit(txn, deadline=soon()) == Committed(False, before.revision)
    snapshot = await store.read([root], prefix=True, deadline=soon())
    assert [(entry.key, entry.value) for entry in snapshot.entries] == [(root + "a", b"x")]


async def test_all_operations_of_a_transaction_happen_at_its_revision(store: LockStore, root: str) -> None:
    before = await put(store, root + "old")
    txn = Txn((), (Put(root + "a", b"1"), Put(root + "b", b"2"), Delete(root + "old")))
    done = await store.commit(txn, deadline=soon())
    assert done == Committed(True, before.revision + 1)
    snapshot = await store.read([root + "a", root + "b", root + "old"], deadline=soon())
    assert [(entry.key, entry.mod_revision) for entry in snapshot.entries] == [
        (root + "a", done.revision),
        (root + "b", done.revision),
    ]
    assert snapshot.revision == done.revision


async def test_revisions_rise_with_changes_and_only_with_them(store: LockStore, other: LockStore, root: str) -> None:
    first = (await put(store, root + "a")).revision
    failed = await other.commit(Txn((ModIs(root + "a", 0),), (Put(root + "a", b"y"),)), deadline=soon())
    nothing = await other.commit(Txn((), (Delete(root + "absent"),)), deadline=soon())
    read = await other.read([root + "a"], deadline=soon())
    assert (failed.revision, nothing.revision, read.revision) == (first, first, first)
    assert nothing.succeeded
    assert (await put(other, root + "b")).revision == first + 1


async def test_a_put_without_lease_detaches_the_key(store: LockStore, root: str) -> None:
    lease = (await store.grant(60, deadline=soon())).lease
    await put(store, root + "a", lease=lease)
    await put(store, root + "b", lease=lease)
    await put(store, root + "a", b"mine for good")
    await store.revoke(lease, deadline=soon())
    snapshot = await store.read([root], prefix=True, deadline=soon())
    assert [(entry.key, entry.lease) for entry in snapshot.entries] == [(root + "a", 0)]


async def test_a_put_under_another_lease_moves_the_key_to_it(store: LockStore, root: str) -> None:
    old, new = await store.grant(60, deadline=soon()), await store.grant(60, deadline=soon())
    await put(store, root + "a", lease=old.lease)
    await put(store, root + "a", lease=new.lease)
    await store.revoke(old.lease, deadline=soon())
    entry = (await store.read([root + "a"], deadline=soon())).get(root + "a")
    assert entry is not None
    assert entry.lease == new.lease


async def test_a_lease_is_granted_with_the_ttl_that_was_asked(store: LockStore) -> None:
    granted = await store.grant(90, deadline=soon())
    assert granted.ttl == 90
    assert granted.lease != 0
    assert 89 <= await store.keepalive(granted.lease, deadline=soon()) <= 90


async def test_an_expired_lease_takes_its_keys_and_a_watcher_hears_of_it(
    store: LockStore, other: LockStore, root: str
) -> None:
    lease = (await store.grant(3, deadline=soon())).lease
    async with aclosing(other.watch(root)) as watch:
        assert await take(watch, 1) == [None]
        written = (await put(store, root + "a", lease=lease)).revision
        came, gone = await take(watch, 2)
        assert came == Change(root + "a", written, b"x", lease, 0)
        assert gone is not None
        assert (gone.key, gone.value, gone.lease) == (root + "a", None, 0)
        assert gone.previous_mod_revision == written
        assert gone.mod_revision > written
    assert await value_of(store, root + "a") is None
    with pytest.raises(StoreError) as caught:
        await store.keepalive(lease, deadline=soon())
    assert caught.value.kind is ErrorClass.LOST


async def test_a_lease_that_is_kept_alive_outlives_its_ttl(store: LockStore, root: str) -> None:
    lease = (await store.grant(4, deadline=soon())).lease
    start = CLOCK.now()
    await put(store, root + "a", lease=lease)
    for moment in (1.8, 3.6, 5.4):
        await CLOCK.sleep_until(start + moment)
        assert await store.keepalive(lease, deadline=soon()) == 4
    assert await value_of(store, root + "a") == b"x"


@pytest.mark.parametrize("how", ["revoked", "never granted"])
async def test_a_lease_that_is_not_there_is_lost(store: LockStore, root: str, how: str) -> None:
    lease = 0x1234567
    if how == "revoked":
        lease = (await store.grant(60, deadline=soon())).lease
        await store.revoke(lease, deadline=soon())
    for call in (store.keepalive(lease, deadline=soon()), put(store, root + "a", lease=lease)):
        with pytest.raises(StoreError) as caught:
            await call
        assert caught.value.kind is ErrorClass.LOST
        assert f"{lease:x}" in str(caught.value) or root in str(caught.value)
    assert await value_of(store, root + "a") is None


async def test_a_transaction_whose_guard_fails_does_not_look_at_its_lease(store: LockStore, root: str) -> None:
    txn = Txn((ModIs(root + "a", 7),), (Put(root + "a", b"x", 0x1234567),))
    assert not (await store.commit(txn, deadline=soon())).succeeded


async def test_revoking_twice_is_fine_and_keys_go_at_the_first(store: LockStore, root: str) -> None:
    lease = (await store.grant(60, deadline=soon())).lease
    await put(store, root + "a", lease=lease)
    await store.revoke(lease, deadline=soon())
    assert await value_of(store, root + "a") is None
    await store.revoke(lease, deadline=soon())


async def test_reading_by_prefix_finds_what_is_below_it_and_nothing_else(store: LockStore, root: str) -> None:
    for name in ("members/b", "members/a", "membersx", "m"):
        await put(store, root + name)
    below = await store.read([root + "members/"], prefix=True, deadline=soon())
    assert [entry.key for entry in below.entries] == [root + "members/a", root + "members/b"]
    exact = await store.read([root + "members/"], deadline=soon())
    assert exact.entries == ()


async def test_several_keys_are_read_at_one_revision(store: LockStore, other: LockStore, root: str) -> None:
    keys = [root + "leader", root + "term"]

    async def write() -> None:
        for count in range(30):
            value = str(count).encode()
            await store.commit(Txn((), (Put(keys[0], value), Put(keys[1], value))), deadline=soon())

    writing = asyncio.create_task(write())
    while not writing.done():
        snapshot = await other.read(keys, deadline=soon())
        assert len({(entry.value, entry.mod_revision) for entry in snapshot.entries}) <= 1
    await writing


async def test_values_of_any_bytes_and_keys_of_any_text_come_back(store: LockStore, root: str) -> None:
    values = {root + "empty": b"", root + "binary": bytes(range(256)), root + "ключ 钥匙": b"{}"}
    for key, value in values.items():
        await put(store, key, value)
    snapshot = await store.read([root], prefix=True, deadline=soon())
    assert {entry.key: entry.value for entry in snapshot.entries} == values


async def test_a_watch_says_none_and_then_every_change_in_order(store: LockStore, other: LockStore, root: str) -> None:
    await put(store, root + "before")
    async with aclosing(other.watch(root)) as watch:
        assert await take(watch, 1) == [None]
        first = (await put(store, root + "a", b"1")).revision
        await put(store, root.replace("/conformance/", "/elsewhere/"))
        second = (await put(store, root + "a", b"2")).revision
        both = Txn((), (Put(root + "b", b"3"), Delete(root + "a")))
        third = (await store.commit(both, deadline=soon())).revision
        changes = await take(watch, 4)
    assert changes == [
        Change(root + "a", first, b"1", 0, 0),
        Change(root + "a", second, b"2", 0, first),
        Change(root + "b", third, b"3", 0, 0),
        Change(root + "a", third, None, 0, second),
    ]


async def test_nothing_that_happens_after_the_first_none_is_missed(
    store: LockStore, other: LockStore, root: str
) -> None:
    for _ in range(5):
        async with aclosing(other.watch(root)) as watch:
            assert await take(watch, 1) == [None]
            revisions = [(await put(store, root + "a")).revision for _ in range(10)]
            changes = await take(watch, 10)
            assert [change.mod_revision for change in changes if change] == revisions


async def test_the_same_store_hears_its_own_changes(store: LockStore, root: str) -> None:
    async with aclosing(store.watch(root)) as watch:
        assert await take(watch, 1) == [None]
        revision = (await put(store, root + "a")).revision
        assert await take(watch, 1) == [Change(root + "a", revision, b"x", 0, 0)]


async def test_of_twenty_claims_at_once_exactly_one_wins(
    stores: tuple[LockStore, LockStore], store: LockStore, root: str
) -> None:
    seen = (await put(store, root + "term")).revision
    guards = (ModIs(root + "leader", 0), ModIs(root + "term", seen))

    async def claim(number: int) -> bool:
        value = str(number).encode()
        txn = Txn(guards, (Put(root + "leader", value), Put(root + "term", value)))
        return (await stores[number % 2].commit(txn, deadline=soon())).succeeded

    won = await asyncio.gather(*(claim(number) for number in range(20)))
    assert won.count(True) == 1
    winner = str(won.index(True)).encode()
    snapshot = await store.read([root], prefix=True, deadline=soon())
    assert [entry.value for entry in snapshot.entries] == [winner, winner]


async def test_a_call_whose_deadline_has_passed_is_not_sent(store: LockStore, root: str) -> None:
    with pytest.raises(StoreError) as caught:
        await store.commit(Txn((), (Put(root + "a", b"late"),)), deadline=CLOCK.now() - 0.1)
    assert caught.value.kind is ErrorClass.TRANSIENT
    assert not caught.value.sent
    assert await value_of(store, root + "a") is None


async def test_closing_a_store_ends_its_watches_and_refuses_calls(store: LockStore, root: str) -> None:
    watch = store.watch(root)
    assert await take(watch, 1) == [None]
    waiting = asyncio.create_task(anext(watch, "ended"))
    await asyncio.sleep(0)
    await store.close()
    assert await asyncio.wait_for(waiting, PATIENCE) == "ended"
    with pytest.raises(StoreError) as caught:
        await store.read([root], deadline=soon())
    assert caught.value.kind is ErrorClass.TRANSIENT
    await store.close()
