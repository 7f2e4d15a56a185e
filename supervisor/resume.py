"""May a restarted supervisor go on with the term of its earlier run (rule 15)? Pure.

The rest of the rule is the elector's: nothing follows but a guarded refresh, and every deadline of the old term holds
until that has succeeded.
"""

from election.events import Term
from election.timing import Timing
from supervisor.keeper import term as keeper_term


def resume_from(remembered: Term, floor: int, armed: keeper_term.Term, now: float, timing: Timing) -> float | None:
    """When the last refresh of the term was sent (boot-time seconds), which the keeper's deadline tells; None: it is
    not to be resumed. `remembered` is of this boot and this home, under this TTL, and its end was not begun."""
    if armed.token != remembered.token or armed.ending or floor > remembered.token:
        return None
    t0 = armed.deadline_ns / 1e9 - timing.switch
    return t0 if t0 <= now < t0 + timing.give_up else None
