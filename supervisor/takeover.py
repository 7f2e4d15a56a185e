"""Take-over and stand-down as lists of steps: each bounded, timed, logged and shown.

    take-over   gpu-state → reset (only if it needs one) → persistence → foreign-processes → lock-files → services
    stand-down  services → term → lock-files

A failing service never fails a take-over; a step that fails or hangs does, and the node hands over to the next one.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field

from election.clock import Clock

TOTAL = 30.0
"""Seconds for a whole take-over, resets excluded (rule 13)."""
RESET = 120.0
"""Seconds for a reset: typically seconds, 60–120 s are to be allowed (gpu-facts, "Reset")."""


class TakeOverError(Exception):
    """A step that failed or did not end in time."""

    def __init__(self, step: str, why: str) -> None:
        super().__init__(f"step {step}: {why}")
        self.step = step


@dataclass(frozen=True)
class Step:
    """`work` gets its own deadline (boot-time seconds) and raises whatever it likes."""

    name: str
    work: Callable[[float], Awaitable[None]]
    limit: float
    """Seconds for this step alone."""
    counted: bool = True
    """Part of the total."""


@dataclass
class Progress:
    """Seconds that each finished step took, in order."""

    steps: dict[str, float] = field(default_factory=dict)
    now_at: str = ""

    @property
    def total(self) -> float:
        return sum(self.steps.values())


async def run_steps(steps: Iterable[Step], clock: Clock, progress: Progress, total: float = TOTAL) -> None:
    """One after another, each within its limit and what is left of `total` seconds. Raises `TakeOverError`."""
    left = total
    for step in steps:
        began = clock.now()
        deadline = began + (min(step.limit, left) if step.counted else step.limit)
        progress.now_at = step.name
        try:
            async with asyncio.timeout(deadline - began):
                await step.work(deadline)
        except TimeoutError as error:
            raise TakeOverError(step.name, f"not done within {deadline - began:.1f} s") from error
        except Exception as error:  # whatever it was, the node must hand over
            raise TakeOverError(step.name, str(error) or repr(error)) from error
        took = clock.now() - began
        progress.steps[step.name] = round(took, 4)
        left -= took if step.counted else 0.0
    progress.now_at = ""


def describe(steps: Mapping[str, float]) -> str:
    """`gpu-state 3 ms, lock-files 2 ms, …` for the log."""
    return ", ".join(f"{name} {seconds * 1000:.0f} ms" for name, seconds in steps.items())
