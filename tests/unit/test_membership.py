"""One supervisor per node name (rule 17; Patroni 1804)."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from election.clock import VirtualClock
from election.membership import MemberRecord, Membership, NameTakenError
from election.record import Keys
from election.store import Committed, ErrorClass, Put, StoreError, Txn
from election.stores.memory import Fail, LoseReply, MemoryStore
from election.timing import Timing

pytestmark = pytest.mark.virtual_time

KEYS = Keys("unit")
KEY = KEYS.member("a")
TIMING = Timing(9)


def member(boot_id: str = "boot1", run_id: str = "run1", *, ttl_s: int = 9, role: str = "standby") -> MemberRecord:
    return MemberRecord.model_validate(
        {
            "role": role,
            "boot_id": boot_id,
            "run_id": run_id,
            "ttl_s": ttl_s,
            "unfit_because": [],
            "gpus": [],
            "services": {},
            "url": "http://a",
            "version": "1",
            "renewed_at": "",
        }
    )


class Store(MemoryStore):
    """Lets something happen just before the next commit."""

    before_commit: Callable[[], None] | None = None

    async def commit(self, txn: Txn, *, deadline: float) -> Committed:
        first, self.before_commit = self.before_commit, None
        if first is not None:
            first()
            await asyncio.sleep(0.01)
        return await super().commit(txn, deadline=deadline)


@dataclass
class Bed:
    clock: VirtualClock
    store: Store
    says: MemberRecord = field(default_factory=member)
    reports: list[str] = field(default_factory=list)
    member: Membership = field(init=False)

    def __post_init__(self) -> None:
        report = self.reports.append
        self.member = Membership("a", KEYS, TIMING, self.store, self.clock, lambda: self.says, report)

    async def pass_time(self, seconds: float) -> None:
        await self.clock.sleep_until(self.clock.now() + seconds)

    async def write(self, value: bytes, lease: int = 0) -> None:
        """As somebody else would."""
        txn = Txn((), (Put(KEY, value, lease),))
        await self.store.handle().commit(txn, deadline=self.clock.now() + 1.0)

    async def keep_writing(self, value: bytes, every: float) -> None:
        while True:
            await self.write(value)
            await self.pass_time(every)

    async def time_to_register(self) -> float:
        began = self.clock.now()
        await self.member.register()
        return self.clock.now() - began

    @property
    def stands(self) -> Any:
        entry = self.store._data.entries.get(KEY)
        return None if entry is None else json.loads(entry.value)

    @property
    def revision(self) -> int:
        return self.store._data.entries[KEY].mod_revision


@pytest.fixture
async def bed() -> AsyncIterator[Bed]:
    clock = VirtualClock(asyncio.get_running_loop())
    made = Bed(clock, Store(clock))
    yield made
    await made.store.close()


@asynccontextmanager
async def going_on(work: Coroutine[Any, Any, None]) -> AsyncIterator["asyncio.Task[None]"]:
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, NameTakenError):
            await task


# --- registering


async def test_where_no_record_stands_it_is_written_at_once_under_a_lease(bed: Bed) -> None:
    assert await bed.time_to_register() == 0.0
    assert bed.stands["run_id"] == "run1"
    assert bed.store._data.entries[KEY].lease in bed.store._data.leases


async def test_a_restart_in_the_same_run_folder_takes_its_record_over_at_once(bed: Bed) -> None:
    """Rule 17: same boot, and the flock of the run folder obtained."""
    await bed.write(member(role="leader").model_dump_json().encode())
    assert await bed.time_to_register() == 0.0
    assert bed.stands["role"] == "standby"


@pytest.mark.parametrize(
    "other", [member(run_id="run2"), member(boot_id="boot2"), member("boot2", "run2")], ids=["run", "boot", "both"]
)
async def test_a_record_of_another_run_or_boot_that_is_refreshed_refuses_the_name(
    bed: Bed, other: MemberRecord
) -> None:
    """Rule 17: also on the same machine, with two run folders."""
    async with going_on(bed.keep_writing(other.model_dump_json().encode(), every=4.5)):
        await bed.pass_time(0.1)
        with pytest.raises(NameTakenError, match=r"another supervisor named 'a' is alive.*another `node` name"):
            await bed.member.register()
    assert bed.stands["run_id"] == other.run_id, "untouched"


async def test_an_abandoned_record_is_replaced_after_one_ttl_and_the_wait_is_reported(bed: Bed) -> None:
    """Rule 17."""
    await bed.write(member("boot2", "run2").model_dump_json().encode())
    assert await bed.time_to_register() == pytest.approx(9.0)
    assert bed.stands["run_id"] == "run1"
    assert bed.reports == ["a member record of node 'a' stands already; waiting up to 9 s for it to go"]


async def test_the_wait_is_the_larger_of_our_ttl_and_the_records(bed: Bed) -> None:
    """Rule 17."""
    await bed.write(member("boot2", "run2", ttl_s=20).model_dump_json().encode())
    assert await bed.time_to_register() == pytest.approx(20.0)


async def test_a_record_that_goes_meanwhile_ends_the_wait(bed: Bed) -> None:
    await bed.write(member("boot2", "run2").model_dump_json().encode())
    asyncio.get_running_loop().call_later(3.0, bed.store.delete, KEY)
    assert 3.0 <= await bed.time_to_register() <= 3.0 + TIMING.verify


@pytest.mark.parametrize("value", [b"garbage", b"{}", b"\xff"])
async def test_a_damaged_record_is_waited_out_like_anothers(bed: Bed, value: bytes) -> None:
    await bed.write(value)
    assert await bed.time_to_register() == pytest.approx(9.0)
    assert bed.stands["run_id"] == "run1"


async def test_a_supervisor_that_is_faster_is_not_overwritten_and_no_lease_is_left(bed: Bed) -> None:
    """Between our look and our write another one registers."""
    other = member("boot2", "run2").model_dump_json().encode()
    begin = asyncio.Event()

    async def register_faster() -> None:
        await begin.wait()
        await bed.keep_writing(other, every=3.0)

    async with going_on(register_faster()):
        bed.store.before_commit = begin.set
        with pytest.raises(NameTakenError):
            await bed.member.register()
        assert bed.stands["run_id"] == "run2"
        assert bed.store._data.leases == {}


async def test_a_registration_whose_answer_is_lost_is_recognised_as_our_own(bed: Bed) -> None:
    bed.store.inject(LoseReply(), on="commit")
    assert await bed.time_to_register() < 2.0
    assert bed.stands["run_id"] == "run1"


async def test_an_unreachable_store_is_reported_once_per_reason_and_tried_for_ever(bed: Bed) -> None:
    bed.store.cut_off()
    async with going_on(bed.member.register()) as task:
        await bed.pass_time(600.0)
        assert len(bed.reports) == 1
        for _ in range(5):
            bed.store.inject(Fail(StoreError(ErrorClass.AUTH, "the password is wrong")))
        bed.store.reconnect()
        await bed.pass_time(2.0)
        assert len(bed.reports) == 2
        assert "the password is wrong" in bed.reports[1]
        await bed.pass_time(5.0)
        assert task.done()
    assert bed.stands["run_id"] == "run1"


async def test_a_store_that_goes_away_during_the_wait_makes_it_longer_only(bed: Bed) -> None:
    """Rule 17: a refresh meanwhile would have gone unseen."""
    await bed.write(member("boot2", "run2").model_dump_json().encode())
    asyncio.get_running_loop().call_later(5.0, bed.store.cut_off)
    asyncio.get_running_loop().call_later(7.0, bed.store.reconnect)
    assert await bed.time_to_register() >= 9.0


# --- running


async def test_the_record_stays_as_long_as_the_supervisor_runs(bed: Bed) -> None:
    await bed.member.register()
    lease = bed.store._data.entries[KEY].lease
    async with going_on(bed.member.run()):
        for _ in range(50):
            await bed.pass_time(1.0)
            assert bed.store._data.entries[KEY].lease == lease
    await bed.pass_time(9.1)
    assert bed.stands is None, "and not a TTL longer"


async def test_a_change_is_written_soon_and_no_change_is_not(bed: Bed) -> None:
    await bed.member.register()
    async with going_on(bed.member.run()):
        await bed.pass_time(0.1)
        before = bed.revision
        bed.says = member().model_copy(update={"renewed_at": "later"})
        bed.member.poke()
        await bed.pass_time(0.5)
        assert bed.revision == before
        bed.says = member(role="leader")
        bed.member.poke()
        await bed.pass_time(0.1)
        assert bed.stands["role"] == "leader"


async def test_a_record_that_expired_is_written_again(bed: Bed) -> None:
    await bed.member.register()
    async with going_on(bed.member.run()):
        await bed.pass_time(0.1)
        bed.store.kill_lease(bed.store._data.entries[KEY].lease)
        await bed.pass_time(TIMING.refresh + 0.1)
        assert bed.stands["run_id"] == "run1"
        await bed.pass_time(3 * TIMING.ttl)
        assert bed.stands["run_id"] == "run1"


async def test_a_record_deleted_by_hand_is_written_again(bed: Bed) -> None:
    await bed.member.register()
    async with going_on(bed.member.run()):
        await bed.pass_time(0.1)
        bed.store.delete(KEY)
        await bed.pass_time(TIMING.refresh + 0.1)
        assert bed.stands["run_id"] == "run1"


async def test_a_name_taken_while_our_record_was_gone_ends_the_run(bed: Bed) -> None:
    """Rule 17."""
    await bed.member.register()
    async with going_on(bed.member.run()) as task:
        await bed.pass_time(0.1)
        bed.store.kill_lease(bed.store._data.entries[KEY].lease)
        async with going_on(bed.keep_writing(member("boot2", "run2").model_dump_json().encode(), every=4.5)):
            with pytest.raises(NameTakenError):
                await asyncio.wait_for(asyncio.shield(task), 3 * TIMING.ttl)
            assert bed.stands["run_id"] == "run2"


async def test_a_failed_refresh_is_reported_and_tried_again_before_the_record_expires(bed: Bed) -> None:
    await bed.member.register()
    async with going_on(bed.member.run()):
        await bed.pass_time(0.1)
        bed.store.cut_off()
        await bed.pass_time(TIMING.refresh + 1.0)
        bed.store.reconnect()
        await bed.pass_time(TIMING.ttl)
        assert bed.stands["run_id"] == "run1"
        assert bed.reports[0].startswith("the member record was not written: ")


async def test_leaving_takes_the_record_away(bed: Bed) -> None:
    await bed.member.register()
    await bed.member.leave()
    assert bed.stands is None


async def test_leaving_without_a_store_says_that_the_record_expires(bed: Bed) -> None:
    await bed.member.register()
    bed.store.cut_off()
    await bed.member.leave()
    assert bed.reports[0].startswith("the member record stays until it expires")


async def test_leaving_before_registering_does_nothing(bed: Bed) -> None:
    await bed.member.leave()
    assert bed.reports == []
