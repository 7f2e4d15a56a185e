"""What operators ask of a cluster: decided on what stands there, and written only over that (rule 12)."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from election import requests
from election.clock import VirtualClock
from election.membership import MemberRecord
from election.record import Keys, Mark, SettingsRecord, SwitchoverRecord, View
from election.requests import Cluster, RefusedError, Requests
from election.store import Delete, ErrorClass, Put, StoreError, Txn
from election.stores.memory import Fail, MemoryStore
from tests.unit.machine_driver import leader_record, term_record

pytestmark = pytest.mark.virtual_time
KEYS = Keys("prod")
MARK = Mark(since="now", on="n9", because="as told")


def member(role: str = "standby", *unfit: str) -> MemberRecord:
    fields: dict[str, Any] = {"boot_id": "b", "run_id": "r", "ttl_s": 9, "gpus": (), "services": {}}
    return MemberRecord(role=role, unfit_because=unfit, url="", version="1", renewed_at="", **fields)  # type: ignore[arg-type]


def cluster(*, state: str = "active", ended: str | None = None, **changed: Any) -> Cluster:
    leader = leader_record().model_copy(update={"node": "n1", "state": state})
    fields: dict[str, Any] = {"leader": leader, "leader_mod": 7, "term": term_record(ended=ended), "term_mod": 5}
    shown = View(leader_lease=70, revision=9, **(fields | changed))
    members = {"n1": member("leader"), "n2": member(), "n3": member("unfit", "GPU 0 is lost"), "n4": member("excluded")}
    return Cluster(shown, members)


def request(**changed: Any) -> SwitchoverRecord:
    fields: dict[str, Any] = {"target": "n2", "instance": "other", "hold_back_s": 10.0, "asked": "then", "on": "n9"}
    return SwitchoverRecord(**(fields | changed))


@pytest.mark.parametrize(
    ("found", "target", "kind", "why"),
    [
        (cluster(leader=None), "n2", "precondition", "nobody leads"),
        (cluster(ended="now"), "n2", "precondition", "nobody leads"),
        (cluster(), "n1", "conflict", "n1 leads already"),
        (cluster(state="taking-over"), "n2", "conflict", "n1 is taking-over"),
        (cluster(switchover=request()), "n2", "conflict", "a switchover to n2 is under way"),
        (cluster(settings=SettingsRecord(paused=MARK)), "n2", "conflict", "gpuward resume"),
        (cluster(settings=SettingsRecord(excluded={"n2": MARK})), "n2", "precondition", "gpuward include n2"),
        (cluster(), "n7", "unknown", "members are: n1, n2, n3, n4"),
        (cluster(), "n3", "precondition", "GPU 0 is lost"),
        (cluster(), "n4", "precondition", "it is excluded"),
    ],
)
def test_a_switchover_that_cannot_be_is_refused_with_the_reason(
    found: Cluster, target: str, kind: str, why: str
) -> None:
    with pytest.raises(RefusedError, match=why) as refused:
        requests.switchover(found, target, MARK)
    assert refused.value.kind == kind


@pytest.mark.parametrize("standing", [None, request(refused="no"), request(instance="older")])
def test_a_request_names_the_term_and_takes_the_place_of_one_that_is_over(standing: SwitchoverRecord | None) -> None:
    made = requests.switchover(cluster(switchover=standing), "n2", MARK)
    assert (made.target, made.instance, made.on, made.refused) == ("n2", "other", "n9", None)


def test_a_word_given_twice_keeps_the_first_mark_and_one_taken_back_leaves_nothing() -> None:
    later = Mark(since="later", on="n8")
    paused = requests.paused(SettingsRecord(), MARK)
    both = requests.excluded(requests.paused(paused, later), "n2", MARK)
    assert requests.excluded(both, "n2", later) == both
    assert requests.included(both, "n3") == both
    assert requests.included(requests.resumed(both), "n2") == SettingsRecord()


def clock() -> VirtualClock:
    return VirtualClock(asyncio.get_running_loop())


class _Overtaken(MemoryStore):
    """Somebody else writes between the read and the write."""

    before: Callable[[], Txn]
    times = 0

    async def commit(self, txn: Txn, *, deadline: float) -> Any:
        if self.times > 0:
            self.times -= 1
            await super().commit(self.before(), deadline=deadline)
        return await super().commit(txn, deadline=deadline)


async def stand(store: MemoryStore, found: Cluster) -> None:
    assert found.view.leader is not None
    assert found.view.term is not None
    puts = [Put(KEYS.leader, found.view.leader.to_json()), Put(KEYS.term, found.view.term.to_json())]
    puts += [Put(KEYS.member(name), row.model_dump_json().encode()) for name, row in found.members.items()]
    puts.append(Put(KEYS.member("odd"), b"not a member"))
    await store.commit(Txn((), tuple(puts)), deadline=1e9)


async def test_a_change_that_is_overtaken_is_decided_anew_on_what_stands_there_then() -> None:
    store = _Overtaken(clock())
    store.before = lambda: Txn((), (Put(KEYS.settings, SettingsRecord(excluded={"n3": MARK}).to_json()),))
    store.times = 1
    asking = Requests(KEYS, store, clock(), "n1")
    changed, now = await asking.change(lambda settings: requests.paused(settings, MARK), deadline=1e9)
    found = (await asking.cluster(deadline=1e9)).view.settings
    assert changed
    assert found == now == SettingsRecord(paused=MARK, excluded={"n3": MARK})
    assert await asking.change(lambda settings: requests.paused(settings, MARK), deadline=1e9) == (False, now)


async def test_a_switchover_is_written_only_into_the_term_that_it_was_decided_on() -> None:
    store = _Overtaken(clock())
    asking = Requests(KEYS, store, clock(), "n1")
    await stand(store, cluster())
    store.before = lambda: Txn((), (Put(KEYS.term, term_record("other", ended="now").to_json()), Delete(KEYS.leader)))
    store.times = 1
    with pytest.raises(RefusedError, match="nobody leads"):
        await asking.switch_over("n2", deadline=1e9)
    assert (await asking.cluster(deadline=1e9)).view.switchover is None


async def test_what_changes_all_the_time_is_a_conflict_and_a_silent_store_is_an_error() -> None:
    store = _Overtaken(clock())
    asking = Requests(KEYS, store, clock(), "n1")
    store.before = lambda: Txn((), (Put(KEYS.settings, SettingsRecord().to_json()),))
    store.times = 99
    with pytest.raises(RefusedError, match="ask again"):
        await asking.change(lambda settings: requests.paused(settings, MARK), deadline=1e9)
    store.inject(Fail(StoreError(ErrorClass.TRANSIENT, "as told")), on="read")
    with pytest.raises(StoreError) as error:
        await asking.change(requests.resumed, deadline=1e9)
    assert not error.value.sent, "a read has changed nothing"
