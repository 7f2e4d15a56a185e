"""The election under random faults in virtual time: never two, tokens rise, and somebody leads once faults stop."""

import asyncio

import pytest

from election import events
from election.phases import Holding, StandingBy
from election.store import ErrorClass, StoreError
from election.stores.memory import ApplyLate, Call, Fail, LoseReply
from tests.simulation.world import KEYS, Node, World

pytestmark = pytest.mark.virtual_time


async def test_a_cluster_without_a_past_waits_one_ttl_and_then_has_one_leader() -> None:
    world = World(seed=1)
    world.start()
    try:
        began = world.now()
        await world.until_led(within=12.0)
        waited = world.now() - began
        assert 9.0 <= waited <= 10.5  # an absent term is no proof that nobody runs (rule 8)
    finally:
        await world.stop()


async def test_a_standby_takes_over_between_one_ttl_and_half_a_second_more_after_the_last_refresh() -> None:
    world = World(seed=2)
    world.start()
    try:
        first = await world.until_led(within=12.0)
        await world.watch_for(20.0)
        assert first.elector is not None
        phase = first.elector.state.phase
        await first.kill()
        second = await world.until_led(within=12.0)
        assert second is not first
        taken = second.running
        assert taken is not None
        assert isinstance(phase, Holding)
        assert 9.0 <= taken.began - (phase.t0 - first.clock.offset) <= 9.5 + 0.5
    finally:
        await world.stop()


async def test_the_services_of_a_stopped_supervisor_are_ended_before_anybody_else_may_claim() -> None:
    world = World(seed=3)
    world.start()
    try:
        first = await world.until_led(within=12.0)
        assert first.elector is not None
        first.elector.gate.clear()
        stopped = first.running
        second = await world.until_led_by_another(first, within=15.0)
        assert stopped is not None
        assert stopped.ended is not None
        assert second.running is not None
        assert stopped.ended < second.running.began
        first.elector.gate.set()
        await world.watch_for(20.0)
        assert world.leader() is second
    finally:
        await world.stop()


async def test_a_stand_down_in_good_order_lets_the_next_node_in_at_once() -> None:
    world = World(seed=4)
    world.start()
    try:
        first = await world.until_led(within=12.0)
        assert first.elector is not None
        first.elector.post(events.StandDown("as told"))
        await world.until_gone(first, within=5.0)
        await world.until_led(within=2.0)
    finally:
        await world.stop()


async def test_a_healthy_cluster_never_changes_its_leader() -> None:
    world = World(seed=5)
    world.start()
    try:
        first = await world.until_led(within=12.0)
        await world.watch_for(300.0)
        assert [interval.node for interval in world.intervals] == [first.name]
        assert not any(node.alarms for node in world.nodes)
    finally:
        await world.stop()


async def test_a_late_claim_that_finds_the_leader_key_gone_does_not_pass_over_another_nodes_term() -> None:
    """Rule 8: the claim is guarded by the term key too. The other holder is cut off, so nothing tells it."""
    world = World(seed=6)
    late, prompt, _ = world.nodes
    late.store.inject(ApplyLate(0.3), on="commit")
    prompt.take_over_takes = 0.0
    world.nodes[2].store.cut_off()
    world.start()
    try:
        await world.until(lambda: world.leader() is not None, 12.0, "led")
        assert world.leader() is prompt
        prompt.store.cut_off()
        world.admin.delete(KEYS.leader)
        await world.watch_for(5.0)
        assert [interval.node for interval in world.intervals] == [prompt.name]
    finally:
        await world.stop()


async def test_a_leader_key_that_vanished_in_a_version_never_seen_restarts_the_wait() -> None:
    """Rule 8b: the standbys missed the last refresh, so their wait would be over while the holder may still act."""
    world = World(seed=7)
    world.start()
    try:
        first = await world.until_led(within=12.0)
        await world.until_refreshed(first)
        await world.watch_for(1.0)
        others = [node for node in world.nodes if node is not first]
        for node in others:
            node.store.cut_off()
        refreshed = await world.until_refreshed(first)
        first.store.cut_off()
        world.revoke_all()
        for node in others:
            node.store.reconnect()
        second = await world.until_led_by_another(first, within=12.0)
        assert second.running is not None
        assert second.running.began >= refreshed + 9.0
    finally:
        await world.stop()


async def test_an_answer_that_lay_unread_in_a_stopped_process_extends_nothing() -> None:
    """Rule 2, Patroni PR 2969: the deadline counts from before the send, however late the answer is handled."""
    world = World(seed=8)
    world.start()
    try:
        first = await world.until_led(within=12.0)
        for node in world.nodes:
            node.take_over_takes = 0.0
        await world.until_refreshed(first)
        first.store.held = 1.8
        refreshed = await world.until_refreshed(first)
        assert first.elector is not None
        first.elector.gate.clear()
        await world.watch_for(1.75)
        first.store.cut_off()
        await world.watch_for(0.1)
        first.elector.gate.set()
        second = await world.until_led_by_another(first, within=12.0)
        assert world.intervals[0].ended is not None
        assert world.intervals[0].ended <= refreshed + world.timing.switch
        assert second.running is not None
        assert second.running.began >= refreshed + 9.0 - 0.01
    finally:
        await world.stop()


@pytest.mark.parametrize("lost", [False, True], ids=["slow", "lost"])
async def test_a_claim_whose_answer_is_slow_or_lost_counts_from_before_its_send(lost: bool) -> None:
    """Rules 2 and 7. The oracle looks at the keeper's deadlines."""
    world = World(seed=15)
    for node in world.nodes:
        if lost:
            node.store.inject(LoseReply(), on="commit")
        else:
            node.store.slow = 0.3
    world.start()
    try:
        await world.until_led(within=12.0)
        await world.watch_for(0.0)
    finally:
        await world.stop()


async def test_an_orderly_end_that_arrives_in_somebody_elses_term_is_refused() -> None:
    """Rule 11: the end is guarded by the term. It comes from a node that was cut off; the new holder is cut off now."""
    world = World(seed=9)
    world.start()
    try:
        first = await world.until_led(within=12.0)
        first.store.cut_off()
        second = await world.until_led_by_another(first, within=12.0)
        second.store.cut_off()
        first.store.reconnect()
        await world.watch_for(5.0)
        assert [interval.node for interval in world.intervals] == [first.name, second.name]
        assert first.elector is not None
        assert isinstance(first.elector.state.phase, StandingBy)
    finally:
        await world.stop()


async def test_deleting_everything_below_the_prefix_lets_nobody_in_at_once() -> None:
    """Rule 8a: an absent term is no end. The holder is cut off, so nothing tells it."""
    world = World(seed=10)
    world.start()
    try:
        first = await world.until_led(within=12.0)
        await world.until_refreshed(first)
        first.store.cut_off()
        deleted = world.now()
        world.delete_prefix()
        second = await world.until_led_by_another(first, within=12.0)
        assert second.running is not None
        assert second.running.began >= deleted + 9.0
    finally:
        await world.stop()


async def test_a_claim_that_arrives_long_after_it_was_abandoned_makes_nobody_a_holder() -> None:
    """Rule 7. An election of etcd lengthens its lease, and the node sees the record just before others may claim."""
    world = World(seed=11)
    late, *others = world.nodes
    late.store.inject(ApplyLate(2.0), on="commit")
    for node in world.nodes:
        node.take_over_takes = 0.0
    for node in others:
        node.store.cut_off()
    world.start()
    try:
        await world.until_claiming(late)
        await world.watch_for(0.45)  # it has read back, and given the claim up
        late.store.cut_off()
        for node in others:
            node.store.reconnect()
        await world.watch_for(2.05)
        assert world.leader() is None
        world.admin.restart_leases()
        await world.watch_for(7.5)
        blocked: list[Call] = ["keepalive", "grant", "commit"]
        for call in blocked:
            for _ in range(100):
                late.store.inject(Fail(StoreError(ErrorClass.TRANSIENT, "as told")), on=call)
        late.store.reconnect()  # from here on it reads, and cannot refresh
        await world.watch_for(12.0)
        assert world.leader() in others
    finally:
        await world.stop()


async def test_the_keeper_starts_nothing_for_a_request_of_a_term_that_is_over() -> None:
    """Rule 16: the dead supervisor's last requests reach its keeper when another node leads already."""
    world = World(seed=12)
    world.start()
    try:
        first = await world.until_led(within=12.0)
        assert first.running is not None
        token = first.running.token
        await first.kill()
        await world.until_led_by_another(first, within=12.0)
        for late in (token, token - 1):
            with pytest.raises(ConnectionError):
                first.keeper_arm(late, first.clock.now() + 1.0)
            assert not first.keeper_start(late)
        await world.watch_for(0.0)
    finally:
        await world.stop()


async def test_the_keeper_takes_no_lower_token_while_a_term_is_armed() -> None:
    """Rule 16: tokens only rise."""
    world = World(seed=13)
    world.start()
    try:
        first = await world.until_led(within=12.0)
        assert first.running is not None
        token = first.running.token
        with pytest.raises(ConnectionError):
            first.keeper_arm(token - 1, first.clock.now() + 100.0)
        assert first.ledger.term is not None
        assert first.ledger.term.token == token
        assert not first.keeper_start(token - 1)
        await world.watch_for(0.0)
    finally:
        await world.stop()


async def test_a_node_told_to_stand_down_before_its_switch_is_set_starts_nothing_and_lets_others_in() -> None:
    world = World(seed=18)
    world.start()
    try:
        await world.until(lambda: any(isinstance(node.phase, Holding) for node in world.nodes), 12.0, "held", 0.0001)
        told = next(node for node in world.nodes if isinstance(node.phase, Holding))
        assert told.elector is not None
        assert told.ledger.term is None
        told.elector.post(events.StandDown("as told"))
        await world.until_led(within=6.0)
    finally:
        await world.stop()


async def test_a_switchover_ends_the_term_for_its_target_and_nobody_else_claims_before() -> None:
    world = World(seed=21)
    world.start()
    try:
        first = await world.until_led(within=12.0)
        for target in [node for node in world.nodes if node is not first]:
            before = world.now()
            world.ask_for_switchover(target)
            await world.until(lambda: world.leader() is target, 6.0, f"led by {target.name}", step=0.02)  # noqa: B023
            await world.until_led(within=1.0)
            assert world.now() - before < 4.0
            assert KEYS.switchover not in world.admin._data.entries
    finally:
        await world.stop()


@pytest.mark.parametrize("bump", [0, 1000])
async def test_a_backup_restored_under_a_running_holder_lets_nobody_in_on_an_end_of_old(bump: int) -> None:
    """Rule 21: the backup was made between two terms, so it says that the last term ended in good order."""
    world = World(seed=22)
    world.start()
    try:
        first = await world.until_led(within=12.0)
        assert first.elector is not None
        backups = []
        world.admin._data.listeners.append(lambda change: backups.append(world.backup()))
        first.elector.post(events.StandDown("as told"))
        await world.until_gone(first, within=5.0)
        await world.until_led(within=5.0)
        backup = next(found for found in backups if KEYS.leader not in found[0])
        await world.watch_for(3 * world.timing.ttl)
        running = world.intervals[-1]
        world.restore(backup, bump)
        await world.watch_for(world.timing.ttl - 0.5)
        assert world.intervals[-1] is running
        assert running.ended is not None
        await world.watch_for(2.0)
        assert (world.leader() is not None) == (bump > 0)  # else the store is below the highest token seen
        assert all(any("history-went-back" in alarm for alarm in node.alarms) for node in world.nodes) == (bump == 0)
    finally:
        await world.stop()


@pytest.mark.parametrize("seed", range(60))
async def test_random_faults_never_give_two_holders_and_somebody_leads_once_they_stop(seed: int) -> None:
    world = World(seed)
    world.start()
    try:
        for _ in range(12):
            await world.break_something()
            await world.watch_for(world.random.random() * 1.2 * world.timing.ttl)
        await world.watch_for(3.5 * world.timing.ttl)
        await world.until_led(within=3 * world.timing.ttl)
    finally:
        await world.stop()


async def test_a_supervisor_restarted_within_its_authority_goes_on_with_the_same_term() -> None:
    """Rule 15: its services never ended, and its standbys wait on from the refresh that it sends at once."""
    world = World(seed=6)
    world.start()
    try:
        first = await world.until_led(within=12.0)
        await world.until_refreshed(first)
        term = first.disk.term
        await first.kill()
        await world.watch_for(2.0)
        first.start()
        assert await world.until_led(within=0.5) is first
        assert first.disk.term == term
        await world.watch_for(100.0)
        assert [interval.node for interval in world.intervals] == [first.name]
    finally:
        await world.stop()


async def test_a_resumed_term_that_cannot_be_refreshed_ends_by_the_deadlines_of_its_last_refresh() -> None:
    world = World(seed=7)
    world.start()
    try:
        first = await world.until_led(within=12.0)
        t0 = await world.until_refreshed(first)
        await world.watch_for(0.1)  # the keeper is armed with it
        await first.kill()
        first.store.cut_off()
        await world.watch_for(1.0)
        first.start()
        await world.until_gone(first, within=world.timing.ttl)
        ended = world.intervals[0].ended
        assert ended is not None
        assert ended <= t0 + world.timing.kill + 0.01  # by the supervisor itself, before the keeper has to
        assert await world.until_led(within=12.0) is not first
    finally:
        await world.stop()


async def test_a_term_lost_while_its_supervisor_was_dead_is_ended_at_once_and_not_resumed() -> None:
    world = World(seed=8)
    world.start()
    try:
        first = await world.until_led(within=12.0)
        await first.kill()
        world.revoke_all()
        first.start()
        await world.until_gone(first, within=3.0)
    finally:
        await world.stop()


@pytest.mark.parametrize("seed", range(100, 120))
async def test_supervisors_that_crash_all_the_time_never_make_two_holders(seed: int) -> None:
    world = World(seed)
    world.start()
    try:
        for _ in range(30):
            for node in world.nodes:
                if node.elector is not None and world.random.random() < 0.5:
                    await node.kill()
                    asyncio.get_running_loop().call_later(world.random.random() * 6, _start_again, node)
            if world.random.random() < 0.3:
                await world.break_something()
            await world.watch_for(world.random.random() * world.timing.ttl)
        await world.watch_for(3.5 * world.timing.ttl)
        await world.until_led(within=3 * world.timing.ttl)
    finally:
        await world.stop()


def _start_again(node: Node) -> None:
    if node.elector is None:
        node.start()
