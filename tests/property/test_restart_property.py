"""Restart accounting against an independent model of the table, and what holds for any history of failures."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from supervisor.service.restart import CLEAR, Backoff, Decision, Degrade, Policy, RestartNow, failed, settle

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
        account, decision = failed(
            POLICY, account, was_ready=True, healthy_since=now - gap if healthy else None, now=now
        )
        assert decision == expected
        if decision == Degrade():
            return


@given(st.lists(st.floats(0, 599.9), min_size=5, max_size=40))
def test_a_service_that_is_never_healthy_and_fails_twice_in_a_window_always_ends_degraded(gaps: list[float]) -> None:
    account, decision = failed(POLICY, CLEAR, was_ready=True, healthy_since=None, now=0.0)
    account, decision = failed(POLICY, account, was_ready=True, healthy_since=None, now=1.0)
    now = 1.0
    for gap in gaps:
        if decision == Degrade():
            break
        now += gap
        account, decision = failed(POLICY, account, was_ready=True, healthy_since=None, now=now)
    assert decision == Degrade()
    assert account.failures == 5


seconds = st.sampled_from([0.0, 0.5, 1.0, 4.9, 5.0, 5.1, 30.0, 99.9, 100.0, 101.0])


class Accounting(RuleBasedStateMachine):
    """Any policy, failures, healthy times and resets in any order. The reference keeps the moments of all failures
    since the count was last clear, and reads the answer off the whole list each time; the account keeps four numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.account = CLEAR
        self.failures: list[float] = []
        self.ready: list[bool] = []
        """For each failure: its run had become ready."""
        self.decision: Decision | None = None

    @initialize(
        window=st.sampled_from([1.0, 5.0, 100.0]),
        backoff=st.lists(st.sampled_from([1.0, 2.0, 60.0]), min_size=1, max_size=4),
        healthy=st.sampled_from([1.0, 5.0, 100.0]),
    )
    def configured(self, window: float, backoff: list[float], healthy: float) -> None:
        self.policy = Policy(window, tuple(backoff), healthy)

    def expected(self) -> Decision:
        """The table of docs/services.md, Restart: at once, until two failures lie within a window or one is of a run
        that never became ready; from that one on a pause for each, whatever the time between; when the pauses are
        used up, degraded."""
        distances = [later - earlier for earlier, later in zip(self.failures, self.failures[1:], strict=False)]
        close = next(
            (
                number
                for number, distance in enumerate(distances, 1)
                if distance < self.policy.window or not self.ready[number]
            ),
            None,
        )
        if close is None:
            return RestartNow()
        pauses = len(self.failures) - close
        return Backoff(self.policy.backoff[pauses - 1]) if pauses <= len(self.policy.backoff) else Degrade()

    @precondition(lambda self: self.decision != Degrade())
    @rule(later=seconds, ready=st.booleans(), healthy=st.none() | seconds)
    def fails(self, later: float, ready: bool, healthy: float | None) -> None:
        """`healthy`: of the time since the last failure, the last so many seconds were."""
        self.now += later
        since = None if healthy is None or not ready else self.now - min(healthy, later)
        if since is not None and self.now - since >= self.policy.healthy:
            self.failures.clear()
            self.ready.clear()
        self.failures.append(self.now)
        self.ready.append(ready)
        self.account, self.decision = failed(
            self.policy, self.account, was_ready=ready, healthy_since=since, now=self.now
        )
        assert self.decision == self.expected()

    @rule()
    def is_reset_by_an_operator(self) -> None:
        self.account, self.decision = CLEAR, None
        self.failures.clear()
        self.ready.clear()

    @invariant()
    def what_is_shown_is_what_was_counted(self) -> None:
        assert self.account.failures == len(self.failures)
        assert self.account.degraded == (self.decision == Degrade())

    @invariant()
    def time_without_health_clears_nothing(self) -> None:
        if self.failures:
            assert settle(self.policy, self.account, healthy_since=None, now=self.now + 1e9) == self.account


TestAccounting = Accounting.TestCase
TestAccounting.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
