"""Restart accounting against an independent model of the table, and what holds for any history of failures."""

from hypothesis import given
from hypothesis import strategies as st

from supervisor.service.restart import CLEAR, Backoff, Degrade, Policy, RestartNow, failed

POLICY = Policy()
gaps = st.lists(st.tuples(st.floats(0, 1500), st.booleans()), min_size=1, max_size=60)


@given(gaps)
def test_the_accounting_agrees_with_the_table(history: list[tuple[float, bool]]) -> None:
    """Each step: time since the last failure, and whether all of it was healthy."""
    account, now, stage, last = CLEAR, 0.0, 0, float("-inf")
    for gap, healthy in history:
        now += gap
        if healthy and gap >= 600:
            stage, last = 0, float("-inf")
        if stage == 0:
            expected: object = RestartNow() if now - last >= 300 else Backoff(30)
            stage = 0 if now - last >= 300 else 1
        elif stage < 3:
            expected, stage = Backoff({1: 60.0, 2: 120.0}[stage]), stage + 1
        else:
            expected = Degrade()
        last = now
        account, decision = failed(POLICY, account, healthy_since=now - gap if healthy else None, now=now)
        assert decision == expected
        if decision == Degrade():
            return


@given(st.lists(st.floats(0, 599.9), min_size=5, max_size=40))
def test_a_service_that_is_never_healthy_and_fails_twice_in_a_window_always_ends_degraded(gaps: list[float]) -> None:
    account, decision = failed(POLICY, CLEAR, healthy_since=None, now=0.0)
    account, decision = failed(POLICY, account, healthy_since=None, now=1.0)
    now = 1.0
    for gap in gaps:
        if decision == Degrade():
            break
        now += gap
        account, decision = failed(POLICY, account, healthy_since=None, now=now)
    assert decision == Degrade()
    assert account.failures == 5
