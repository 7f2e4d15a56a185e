"""The steps of a take-over, whichever of them fails or hangs (rule 13)."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from election.clock import VirtualClock
from supervisor.takeover import TOTAL, Progress, Step, TakeOverError, describe, run_steps

pytestmark = pytest.mark.virtual_time
NAMES = ("gpu-state", "reset", "persistence", "foreign-processes", "lock-files", "services")

Work = Callable[[float], Awaitable[None]]


async def fails(by: float) -> None:
    raise OSError("as told")


async def hangs(by: float) -> None:
    await asyncio.Event().wait()


def takes(seconds: float) -> Work:
    async def work(by: float) -> None:
        await asyncio.sleep(seconds)

    return work


def clock() -> VirtualClock:
    return VirtualClock(asyncio.get_running_loop())


@pytest.mark.parametrize("broken", NAMES)
@pytest.mark.parametrize(("how", "why"), [(fails, "as told"), (hangs, "not done within 2.0 s")])
async def test_a_step_that_fails_or_hangs_ends_the_take_over_there_and_none_after_it_begins(
    broken: str, how: Work, why: str
) -> None:
    steps = [Step(name, how if name == broken else takes(0.1), limit=2.0) for name in NAMES]
    progress = Progress()
    with pytest.raises(TakeOverError, match=f"step {broken}: {why}") as error:
        await run_steps(steps, clock(), progress)
    assert error.value.step == progress.now_at == broken
    assert list(progress.steps) == list(NAMES[: NAMES.index(broken)])


async def test_all_steps_together_have_a_deadline_and_a_reset_does_not_count() -> None:
    steps = [
        Step("reset", takes(100.0), limit=120.0, counted=False),
        *(Step(name, takes(8.0), 15.0) for name in "abcd"),
    ]
    began = clock().now()
    with pytest.raises(TakeOverError, match=r"step d: not done within 6\.0 s"):
        await run_steps(steps, clock(), Progress())
    assert clock().now() - began == pytest.approx(100.0 + TOTAL)


async def test_a_step_is_told_when_it_must_be_done_and_each_finished_one_is_timed() -> None:
    told: list[float] = []

    async def work(by: float) -> None:
        told.append(by - clock().now())
        await asyncio.sleep(0.25)

    progress = Progress()
    await run_steps([Step("one", work, limit=5.0), Step("two", work, limit=90.0)], clock(), progress)
    assert told == pytest.approx([5.0, TOTAL - 0.25])
    assert describe(progress.steps) == "one 250 ms, two 250 ms"
    assert (progress.total, progress.now_at) == (0.5, "")
