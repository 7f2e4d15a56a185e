"""When a database that fills up, or a certificate near its end, is told of."""

import asyncio
from pathlib import Path

import pytest

from election.clock import BootClock
from election.stores.etcd_access import Access
from election.stores.etcd_http import EndpointStatus, EtcdStore
from election.stores.memory import MemoryStore
from supervisor import storewatch
from supervisor.storewatch import dangers

GIB = 1 << 30


def test_a_database_is_told_of_from_80_percent_on_and_etcds_own_quota_wins() -> None:
    def kinds(size: float, quota: int) -> list[str]:
        status = EndpointStatus("http://a", db_size=int(size * GIB), quota=quota)
        return [kind for kind, _ in dangers([status], 2 * GIB).values()]

    assert kinds(1.59, 0) == []
    assert kinds(1.61, 0) == ["store-filling"]
    assert kinds(1.61, 8 * GIB) == []
    assert kinds(0.81, 1 * GIB) == ["store-filling"]


def test_the_alarm_of_a_full_etcd_is_told_once_for_all_members_with_the_way_out() -> None:
    says = ("memberID:42 alarm:NOSPACE ",)
    found = dangers([EndpointStatus(name, alarms=says) for name in ("http://a", "http://b")], GIB)
    ((kind, text),) = found.values()
    assert kind == "store-full"
    assert "alarm disarm" in text


def test_members_without_answer_are_no_danger_of_this_kind() -> None:
    assert dangers([EndpointStatus("http://a", error="no connection")], GIB) == {}


class Told(EtcdStore):
    """An etcd of one member whose sizes are told one after the other; `over` once all are."""

    def __init__(self, access: Access, *sizes: int) -> None:
        super().__init__(["http://a"], clock=BootClock(), access=access)
        self.sizes, self.over = list(sizes), asyncio.Event()

    async def status(self, *, deadline: float) -> tuple[EndpointStatus, ...]:
        if self.sizes:
            return (EndpointStatus("http://a", db_size=self.sizes.pop(0)),)
        self.over.set()
        return ()


async def alarms_of(store: Told, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(storewatch, "EVERY", 0.01)
    found: list[str] = []
    looking = asyncio.create_task(
        storewatch.watch_store(store, 100, BootClock(), lambda kind, text: found.append(f"{kind}: {text}"))
    )
    await store.over.wait()
    looking.cancel()
    await asyncio.gather(looking, return_exceptions=True)
    return found


async def test_each_danger_is_told_when_it_begins_and_told_again_only_after_it_was_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = await alarms_of(Told(Access(), 90, 91, 92, 50, 95, 96), monkeypatch)
    assert [text.partition(":")[0] for text in found] == ["store-filling", "store-filling"]
    assert "90 of 100 bytes" in found[0]
    assert "95 of 100 bytes" in found[1]


async def test_files_that_cannot_be_used_are_told_of_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = await alarms_of(Told(Access(ca_file=tmp_path / "none"), 1, 1, 1), monkeypatch)
    assert found == [f"store-files: {tmp_path}/none: as CA it cannot be read: No such file or directory"]


async def test_a_store_that_is_no_etcd_is_not_looked_at() -> None:
    await storewatch.watch_store(MemoryStore(BootClock()), 100, BootClock(), lambda kind, text: None)
