"""Virtual time: hours in milliseconds, the same steps every time, and an error in place of a hang."""

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from election.clock import DeadlockError, VirtualClock, virtual_loop


def run(main: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=virtual_loop) as runner:
        return runner.run(main)


def clock() -> VirtualClock:
    return VirtualClock(asyncio.get_running_loop())


def test_a_day_passes_at_once_and_to_the_second() -> None:
    async def sleep() -> float:
        started = clock().now()
        await asyncio.sleep(3 * 86400)
        return clock().now() - started

    before = time.monotonic()
    assert run(sleep()) == pytest.approx(3 * 86400, abs=1e-6)
    assert time.monotonic() - before < 60


def test_sleepers_wake_in_the_order_of_their_deadlines() -> None:
    woken: list[tuple[float, str]] = []

    async def sleep_until(deadline: float, name: str) -> None:
        await clock().sleep_until(deadline)
        woken.append((clock().now(), name))

    async def main() -> None:
        await asyncio.gather(*(sleep_until(1000 + after, f"after {after}") for after in (30, 10, 20, 10.5, -5)))

    run(main())
    assert [name for _, name in woken] == ["after -5", "after 10", "after 10.5", "after 20", "after 30"]
    assert [moment for moment, _ in woken] == pytest.approx([1000, 1010, 1010.5, 1020, 1030])


def test_time_stands_still_while_anything_can_run() -> None:
    async def main() -> float:
        timer = asyncio.create_task(asyncio.sleep(1))
        for _ in range(1000):
            await asyncio.sleep(0)
        assert not timer.done()
        return clock().now()

    assert run(main()) == 1000


def test_a_timeout_ends_a_wait_at_its_virtual_moment() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(7.5):
                await asyncio.Event().wait()
        return clock().now()

    assert run(main()) == pytest.approx(1007.5)


def test_a_deadlock_is_an_error_that_names_who_waits() -> None:
    async def wait_for_ever() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        await asyncio.create_task(wait_for_ever(), name="the stuck one")

    with pytest.raises(DeadlockError, match=r"the stuck one waits in .*wait_for_ever"):
        run(main())


def test_machines_on_one_loop_have_clocks_of_their_own_that_can_be_set() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        here, there = VirtualClock(loop), VirtualClock(loop, offset=500.0, wall_offset=0.0)
        assert there.now() - here.now() == 500
        deadline = there.now() + 60
        await there.sleep_until(deadline)
        assert there.now() == pytest.approx(deadline)
        assert here.now() == pytest.approx(1060)
        before = there.now()
        there.wall_offset -= 3600
        assert there.now() == before
        assert there.wall() == pytest.approx(1060 - 3600)

    run(main())


@pytest.mark.virtual_time
async def test_a_marked_test_runs_in_virtual_time() -> None:
    before = time.monotonic()
    await asyncio.sleep(3600)
    assert time.monotonic() - before < 60


async def test_an_unmarked_test_runs_on_boot_time() -> None:
    assert asyncio.get_running_loop().time() == pytest.approx(time.clock_gettime(time.CLOCK_BOOTTIME), abs=60)
