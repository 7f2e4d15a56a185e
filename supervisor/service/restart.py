"""Restart accounting (docs/services.md, Restart): what follows a failure. Pure; times are boot-time seconds passed in.

| failure | what follows |
|---|---|
| 1st in the window (5 min) | restart at once |
| 2nd in the window, or of a run that never became ready | backoff 30 s |
| each one from here, whatever the time between (no window) | 60 s, 120 s |
| the next | degraded, until an operator resets it |

A limiter whose window is as short as a start takes never trips (xbuddy 1801). So a failure is the first one again only
for a run that had become ready, and once in backoff the count is consecutive.
Only an uninterrupted healthy time (10 min) or an operator's reset clears it.
"""

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class Policy:
    """Seconds. The defaults are the contract of docs/services.md, Restart."""

    window: float = 300.0
    backoff: tuple[float, ...] = (30.0, 60.0, 120.0)
    healthy: float = 600.0


@dataclass(frozen=True)
class Account:
    """What is remembered of a service's failures."""

    last_failure: float | None = None
    backoffs: int = 0
    """How many pauses it has been given in a row."""
    failures: int = 0
    """Since the count was last clear: for display."""
    degraded: bool = False


@dataclass(frozen=True)
class RestartNow:
    pass


@dataclass(frozen=True)
class Backoff:
    seconds: float
    """From the moment of the failure."""


@dataclass(frozen=True)
class Degrade:
    pass


Decision: TypeAlias = RestartNow | Backoff | Degrade

CLEAR = Account()


def settle(policy: Policy, account: Account, *, healthy_since: float | None, now: float) -> Account:
    """The account as it stands at `now` for a service that has been healthy since `healthy_since` (None: is not)."""
    if healthy_since is None or now - healthy_since < policy.healthy:
        return account
    return CLEAR


def failed(
    policy: Policy, account: Account, *, was_ready: bool, healthy_since: float | None, now: float
) -> tuple[Account, Decision]:
    """Count a failure at `now`. `was_ready`: the run that failed had become ready. Operator restarts are no failures:
    they never come here."""
    account = settle(policy, account, healthy_since=healthy_since, now=now)
    failures = account.failures + 1
    last = account.last_failure
    first = last is None or (was_ready and now - last >= policy.window)
    if account.backoffs == 0 and first:
        return Account(last_failure=now, failures=failures), RestartNow()
    if account.backoffs >= len(policy.backoff):
        return Account(now, account.backoffs, failures, degraded=True), Degrade()
    return Account(now, account.backoffs + 1, failures), Backoff(policy.backoff[account.backoffs])
