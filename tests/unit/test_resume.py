"""May a restarted supervisor go on with its term (rule 15)?"""

import pytest

from election.events import Term
from election.timing import Timing
from supervisor.keeper.term import Term as Armed
from supervisor.resume import resume_from

TIMING = Timing(9)
TERM = Term("me", 50, 7, "then")
T0 = 1000.0


def armed(token: int = 50, t0: float = T0, *, ending: bool = False) -> Armed:
    return Armed(token, int((t0 + TIMING.switch) * 1e9), ending)


def test_the_last_refresh_is_told_by_the_deadline_that_the_keeper_has() -> None:
    assert resume_from(TERM, 50, armed(), T0 + 3, TIMING) == pytest.approx(T0)


@pytest.mark.parametrize(
    ("floor", "kept", "now", "why"),
    [
        (50, armed(49), T0 + 3, "another term"),
        (50, armed(51), T0 + 3, "another term"),
        (50, armed(ending=True), T0 + 3, "it is being ended"),
        (51, armed(), T0 + 3, "a higher token was seen"),
        (50, armed(), T0 + TIMING.give_up, "it should have given up"),
        (50, armed(), T0 + TIMING.ttl, "its deadline has passed"),
        (50, armed(t0=T0 + 60), T0, "a deadline further away than any refresh could set it"),
    ],
)
def test_it_is_not_resumed_if(floor: int, kept: Armed, now: float, why: str) -> None:
    assert resume_from(TERM, floor, kept, now, TIMING) is None, why
