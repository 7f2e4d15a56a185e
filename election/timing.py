"""All times of the election, derived from the TTL by one formula and validated together.

t0 is the boot-time clock read just before the last successful refresh was sent. With d = max(0.5 s, TTL/18):

    TTL 90   TTL 9   TTL 6   after t0, the holder
    60       4.5     1.5     refreshes, and retries until it gives up
    75       7.5     4.5     gives up for good: SIGTERM to the services            TTL − 3d
    80       8       5       kills what is left                                    TTL − 2d
    85       8.5     5.5     the keeper's switch ends whatever still lives         TTL − d
    90       9       6       the earliest moment at which anybody else may claim

What this does not give: a bound for processes that survive SIGKILL, or for clocks wrong by more than
`clock_error`.
"""

from dataclasses import dataclass, field, replace

CLOCK_ERROR = 0.001
"""Largest rate error of a clock, as a fraction (rule 22). NTP-disciplined clocks stay under 500 ppm (adjtimex(2))."""
TICK = 0.2
"""Seconds by which a timer may fire late (rule 22); the larger of this and what was measured counts."""
KILL_TIME = 0.2
"""Seconds from cgroup.kill to an empty cgroup (rule 22); the larger of this and what was measured counts."""
LIFE = 2.0
"""Seconds within which main loop, watchdog and service monitor must have shown life (rule 4), and a clock step or
a late loop that calls for a verify at once (rule 18)."""
SHORTEST_TTL = 6
"""Seconds. Below it the steps between give-up and TTL are shorter than a kill needs."""
RISKY_TTL = 18
"""Seconds. An etcd election takes 1–2 s; below this TTL one lost attempt and one election can cost the lease."""


class TimingError(ValueError):
    """The times do not add up; the message shows the sum."""


@dataclass(frozen=True)
class Timing:
    """Seconds after t0, and periods in seconds, for one TTL. Raises `TimingError` where they do not add up."""

    ttl: int
    clock_error: float = CLOCK_ERROR
    tick: float = TICK
    kill_time: float = KILL_TIME

    refresh: float = field(init=False)
    give_up: float = field(init=False)
    kill: float = field(init=False)
    switch: float = field(init=False)
    retry: float = field(init=False)
    """From the start of one attempt to the start of the next."""
    attempt: float = field(init=False)
    """One attempt, both calls of it."""
    verify: float = field(init=False)
    """Between verifies of the holder and between polls of a standby."""
    verify_limit: float = field(init=False)
    """A verify that rule 18 calls for must succeed within this."""

    def __post_init__(self) -> None:
        if isinstance(self.ttl, bool) or not isinstance(self.ttl, int):
            raise TimingError(f"ttl: found {self.ttl!r}, expected a whole number of seconds")
        if self.ttl < SHORTEST_TTL:
            raise TimingError(f"ttl: found {self.ttl} s, expected {SHORTEST_TTL} s or more")
        step = max(0.5, self.ttl / 18)
        give_up = self.ttl - 3 * step
        derived = {
            "switch": self.ttl - step,
            "kill": self.ttl - 2 * step,
            "give_up": give_up,
            "refresh": min(self.ttl * 2 / 3, give_up - max(3.0, self.ttl / 6)),
            "retry": max(0.5, self.ttl / 30),
            "attempt": max(0.5, self.ttl / 30) * 5 / 6,
            "verify": step,
            "verify_limit": self.ttl / 9,
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)
        if not self.spent <= self.available:
            raise TimingError(f"the times do not add up: {self.sum()}")

    @property
    def spent(self) -> float:
        """The latest moment, on a perfect clock, at which the old holder's services are gone."""
        return (self.switch + self.tick) / (1 - self.clock_error) + self.kill_time

    @property
    def available(self) -> float:
        """The earliest moment, on a perfect clock, at which another node may claim."""
        return self.ttl / (1 + self.clock_error)

    def measured(self, tick: float, kill_time: float) -> "Timing":
        """With what was measured, where that is slower (rule 22). Raises `TimingError` where it no longer adds up."""
        if tick <= self.tick and kill_time <= self.kill_time:
            return self
        return replace(self, tick=max(self.tick, tick), kill_time=max(self.kill_time, kill_time))

    def sum(self) -> str:
        """The inequality of rule 22 with its numbers, for people."""
        return (
            f"(switch {self.switch:g} + tick {self.tick:g}) / (1 - {self.clock_error:g}) + kill {self.kill_time:g}"
            f" = {self.spent:.3f} s, which must not exceed TTL {self.ttl} / (1 + {self.clock_error:g})"
            f" = {self.available:.3f} s"
        )

    def warnings(self) -> list[str]:
        """What works but deserves a second thought."""
        if self.ttl >= RISKY_TTL:
            return []
        return [
            f"ttl {self.ttl} s is below {RISKY_TTL} s: an etcd election takes 1–2 s, "
            "and one beside a lost attempt can cost the lease"
        ]
