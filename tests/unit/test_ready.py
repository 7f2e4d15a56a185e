"""When a service counts as ready, and when it is too late: in virtual time."""

import asyncio

from election.clock import VirtualClock, virtual_loop
from supervisor.config.service import Liveness, Readiness
from supervisor.service.ready import Alive, IsReady, NoLookError, Ready, TooLate

NEVER = float("-inf")


def test_one_that_speaks_for_itself_is_too_late_when_its_time_is_over_unless_its_word_may_be_lost() -> None:
    loop = virtual_loop()
    clock = VirtualClock(loop)
    ready = Ready(Readiness(notify=True, timeout=10.0), 5.0, clock)

    async def look() -> str | None:
        raise AssertionError

    ready.begin(clock.now(), look, lambda trouble: None)
    began = clock.now()
    assert ready.decide(began + 9.9, lost_at=NEVER) is None
    assert ready.decide(began + 10, lost_at=NEVER) == TooLate("not ready within 10 s (it has not said READY=1)")
    assert isinstance(ready.decide(began + 10, lost_at=began + 1), IsReady)
    ready.said.ready = True
    assert ready.decide(began, lost_at=NEVER) == IsReady("it said READY=1")
    loop.close()


def test_one_that_cannot_be_looked_at_is_not_too_late_until_a_look_has_failed() -> None:
    """What is unknown kills nothing."""
    loop = virtual_loop()
    clock = VirtualClock(loop)
    ready = Ready(Readiness(tcp="127.0.0.1:9", timeout=10.0), 5.0, clock)
    can_look = False

    async def look() -> str | None:
        if not can_look:
            raise NoLookError("no keeper")
        return "connection refused"

    async def scene() -> None:
        nonlocal can_look
        ready.begin(clock.now(), look, ready.seen)
        for _ in range(20):
            await asyncio.sleep(5)
            assert ready.decide(clock.now(), lost_at=NEVER) is None
        can_look = True
        await asyncio.sleep(3)
        assert ready.limit >= clock.now() - 10
        await clock.sleep_until(ready.limit)
        assert ready.decide(clock.now(), lost_at=NEVER) == TooLate("not ready within 10 s (connection refused)")
        ready.end()

    loop.run_until_complete(scene())
    loop.close()


def test_a_look_that_ends_long_after_its_time_counts_for_nothing() -> None:
    """We stood still: what it found by then, nobody knows."""
    loop = virtual_loop()
    clock = VirtualClock(loop)
    alive = Alive(Liveness(tcp="127.0.0.1:9", every=20.0, timeout=5.0, failures=1), clock)
    takes = 8.0

    async def look() -> str | None:
        await asyncio.sleep(takes)
        return "no answer within 5 s"

    async def scene() -> None:
        nonlocal takes
        alive.begin(look, lambda: False)
        await asyncio.sleep(15)
        assert alive.failed == ""
        takes = 5.0
        await asyncio.sleep(15)
        assert alive.failed == "1 looks in a row failed: no answer within 5 s"
        alive.end()

    loop.run_until_complete(scene())
    loop.close()
