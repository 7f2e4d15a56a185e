"""The restart table of docs/services.md, Restart, row by row."""

from supervisor.service.restart import CLEAR, Account, Backoff, Decision, Degrade, Policy, RestartNow, failed, settle

POLICY = Policy()


def play(*times: float, healthy_since: float | None = None) -> list[Decision]:
    account, decisions = CLEAR, []
    for now in times:
        account, decision = failed(POLICY, account, was_ready=True, healthy_since=healthy_since, now=now)
        decisions.append(decision)
    return decisions


def test_the_table_row_by_row() -> None:
    decisions = play(0, 10, 50, 120, 250)
    assert decisions == [RestartNow(), Backoff(30), Backoff(60), Backoff(120), Degrade()]


def test_a_second_failure_outside_the_window_is_again_a_first() -> None:
    assert play(0, 300) == [RestartNow(), RestartNow()]
    assert play(0, 299.9) == [RestartNow(), Backoff(30)]


def test_once_in_backoff_no_window_counts() -> None:
    """xbuddy 1801: with a window as long as the restart takes, the limiter never tripped."""
    decisions = play(0, 10, 10 + 400, 10 + 800, 10 + 1200)
    assert decisions == [RestartNow(), Backoff(30), Backoff(60), Backoff(120), Degrade()]


def test_ten_healthy_minutes_clear_the_count() -> None:
    account = Account(last_failure=1000, backoffs=3, failures=4)
    assert settle(POLICY, account, healthy_since=1100, now=1699.9) == account
    assert settle(POLICY, account, healthy_since=1100, now=1700) == CLEAR
    assert failed(POLICY, account, was_ready=True, healthy_since=1100, now=1700)[1] == RestartNow()
    assert failed(POLICY, account, was_ready=True, healthy_since=1100, now=1699.9)[1] == Degrade()


def test_time_without_health_clears_nothing() -> None:
    account = Account(last_failure=0, backoffs=2, failures=3)
    assert failed(POLICY, account, was_ready=True, healthy_since=None, now=1e6)[1] == Backoff(120)


def test_the_failures_are_counted_for_display() -> None:
    account = CLEAR
    for now in (0.0, 10.0, 50.0, 120.0, 250.0):
        account, _ = failed(POLICY, account, was_ready=True, healthy_since=None, now=now)
    assert account.failures == 5


def test_other_pauses_can_be_configured() -> None:
    policy = Policy(window=10, backoff=(1,), healthy=5)
    account, first = failed(policy, CLEAR, was_ready=True, healthy_since=None, now=0)
    account, second = failed(policy, account, was_ready=True, healthy_since=None, now=1)
    account, third = failed(policy, account, was_ready=True, healthy_since=None, now=100)
    assert [first, second, third] == [RestartNow(), Backoff(1), Degrade()]


def test_a_service_that_is_never_ready_is_degraded_however_long_it_takes_to_fail() -> None:
    """xbuddy 1801: with a time to become ready that is longer than the window, each failure would be a first one."""
    account, decisions = CLEAR, []
    for number in range(5):
        account, decision = failed(POLICY, account, was_ready=False, healthy_since=None, now=600.0 * number)
        decisions.append(decision)
    assert decisions == [RestartNow(), Backoff(30), Backoff(60), Backoff(120), Degrade()]
