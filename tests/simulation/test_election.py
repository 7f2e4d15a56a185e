"""The election under random faults in virtual time: never two, tokens rise, and somebody leads once faults stop."""

import pytest

from election import events
from tests.simulation.world import World

pytestmark = pytest.mark.virtual_time


async def test_a_cluster_without_a_past_waits_one_ttl_and_then_has_one_leader() -> None:
    world = World(seed=1)
    world.start()
    try:
        began = world.nodes[0].clock.now()
        await world.until_led(within=12.0)
        waited = world.nodes[0].clock.now() - began
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
        assert 9.0 <= taken.began - phase.t0 <= 9.5 + 0.5  # type: ignore[union-attr]
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
