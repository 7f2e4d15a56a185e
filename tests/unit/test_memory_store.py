"""The store in memory in virtual time, and the faults that it can be told to have."""

import asyncio
from contextlib import aclosing

import pytest

from election.clock import VirtualClock
from election.store import Change, ErrorClass, Put, StoreError, Txn
from election.stores.memory import ApplyLate, Fail, LoseReply, MemoryStore

pytestmark = pytest.mark.virtual_time


@pytest.fixture
async def clock() -> VirtualClock:
    return VirtualClock(asyncio.get_running_loop())


@pytest.fixture
async def store(clock: VirtualClock) -> MemoryStore:
    return MemoryStore(clock)


async def put(store: MemoryStore, deadline: float, value: bytes = b"x", lease: int = 0) -> None:
    await store.commit(Txn((), (Put("/a", value, lease),)), deadline=deadline)


async def value(store: MemoryStore, clock: VirtualClock) -> bytes | None:
    entry = (await store.read(["/a"], deadline=clock.now() + 1)).get("/a")
    return entry.value if entry else None


async def test_a_client_that_is_cut_off_waits_until_its_deadline_while_others_work(
    store: MemoryStore, clock: VirtualClock
) -> None:
    other = store.handle()
    store.cut_off()
    start = clock.now()
    with pytest.raises(StoreError) as caught:
        await put(store, start + 2.5)
    assert caught.value.kind is ErrorClass.TRANSIENT
    assert clock.now() == pytest.approx(start + 2.5)
    assert await value(other, clock) is None
    store.reconnect()
    await put(store, clock.now() + 1)
    assert await value(other, clock) == b"x"


async def test_a_watch_of_a_client_that_was_cut_off_misses_what_happened_and_says_so(
    store: MemoryStore, clock: VirtualClock
) -> None:
    other = store.handle()
    async with aclosing(store.watch("/")) as watch:
        assert await anext(watch) is None
        store.cut_off()
        await put(other, clock.now() + 1, b"missed")
        store.reconnect()
        await put(other, clock.now() + 1, b"heard")
        assert await anext(watch) is None
        assert await anext(watch) == Change("/a", 3, b"heard", 0, 2)


async def test_a_lost_reply_is_applied_although_its_caller_hears_nothing(
    store: MemoryStore, clock: VirtualClock
) -> None:
    store.inject(LoseReply(), on="commit")
    assert await value(store, clock) is None
    with pytest.raises(StoreError) as caught:
        await put(store, clock.now() + 1)
    assert caught.value.sent
    assert await value(store, clock) == b"x"


async def test_a_late_call_is_applied_after_its_caller_gave_up(store: MemoryStore, clock: VirtualClock) -> None:
    store.inject(ApplyLate(after=10))
    start = clock.now()
    with pytest.raises(StoreError):
        await put(store, start + 2)
    await clock.sleep_until(start + 9.9)
    assert await value(store, clock) is None
    await clock.sleep_until(start + 10.1)
    assert await value(store, clock) == b"x"


async def test_an_injected_error_is_raised_once_and_nothing_is_applied(store: MemoryStore, clock: VirtualClock) -> None:
    store.inject(Fail(StoreError(ErrorClass.NO_SPACE, "full")))
    with pytest.raises(StoreError, match="full"):
        await put(store, clock.now() + 1)
    assert await value(store, clock) is None
    await put(store, clock.now() + 1)


async def test_a_lease_ends_at_its_moment_and_watchers_hear_of_it_then(store: MemoryStore, clock: VirtualClock) -> None:
    lease = (await store.grant(90, deadline=clock.now() + 1)).lease
    start = clock.now()
    await put(store, start + 1, lease=lease)
    async with aclosing(store.watch("/")) as watch:
        assert await anext(watch) is None
        await clock.sleep_until(start + 60)
        assert await store.keepalive(lease, deadline=clock.now() + 1) == 90
        assert await anext(watch) == Change("/a", 3, None, 0, 2)
        assert clock.now() == pytest.approx(start + 150)


async def test_an_election_of_etcd_starts_every_lease_anew(store: MemoryStore, clock: VirtualClock) -> None:
    lease = (await store.grant(90, deadline=clock.now() + 1)).lease
    start = clock.now()
    await put(store, start + 1, lease=lease)
    await clock.sleep_until(start + 89)
    store.restart_leases()
    await clock.sleep_until(start + 178)
    assert await value(store, clock) == b"x"
    await clock.sleep_until(start + 180)
    assert await value(store, clock) is None


async def test_a_key_deleted_and_a_lease_killed_by_hand_are_told_to_watchers(
    store: MemoryStore, clock: VirtualClock
) -> None:
    lease = (await store.grant(90, deadline=clock.now() + 1)).lease
    async with aclosing(store.watch("/")) as watch:
        assert await anext(watch) is None
        for by_hand in ("delete", "kill the lease"):
            await put(store, clock.now() + 1, lease=lease)
            if by_hand == "delete":
                store.delete("/a")
            else:
                store.kill_lease(lease)
            came, gone = await anext(watch), await anext(watch)
            assert came is not None
            assert gone is not None
            assert (gone.value, gone.previous_mod_revision) == (None, came.mod_revision)


async def test_a_handle_keeps_its_deadlines_on_a_clock_of_its_own(store: MemoryStore, clock: VirtualClock) -> None:
    ahead = VirtualClock(asyncio.get_running_loop(), offset=500)
    other = store.handle(ahead)
    other.cut_off()
    start = clock.now()
    with pytest.raises(StoreError):
        await put(other, ahead.now() + 3)
    assert clock.now() == pytest.approx(start + 3)
