"""The times of rule 22 and of the table "Timing" of the rules."""

import pytest

from election.timing import CLOCK_ERROR, Timing, TimingError


@pytest.mark.parametrize(
    ("ttl", "refresh", "give_up", "kill", "switch"),
    [(90, 60, 75, 80, 85), (9, 4.5, 7.5, 8, 8.5), (6, 1.5, 4.5, 5, 5.5)],
)
def test_the_documented_table_row_by_row(ttl: int, refresh: float, give_up: float, kill: float, switch: float) -> None:
    timing = Timing(ttl)
    assert (timing.refresh, timing.give_up, timing.kill, timing.switch) == (refresh, give_up, kill, switch)


def test_the_periods_scale_with_the_ttl_down_to_half_a_second() -> None:
    long, short = Timing(90), Timing(6)
    assert (long.retry, long.attempt, long.verify, long.verify_limit) == (3.0, 2.5, 5.0, 10.0)
    assert (short.retry, short.verify) == (0.5, 0.5)
    assert short.attempt == pytest.approx(0.5 * 5 / 6)
    assert short.verify_limit == pytest.approx(6 / 9)


def test_for_every_ttl_the_steps_come_in_order_and_at_least_three_attempts_fit_in() -> None:
    for ttl in range(6, 400):
        t = Timing(ttl)
        assert 0 < t.refresh < t.give_up < t.kill < t.switch < t.ttl, ttl
        assert t.attempt < t.retry, ttl
        assert t.refresh + 3 * t.retry <= t.give_up, ttl


def test_the_services_are_gone_before_anybody_else_may_claim() -> None:
    """Rule 22, with the clock error on both sides against us."""
    for ttl in range(6, 400):
        t = Timing(ttl)
        gone_at_the_latest = (t.switch + t.tick) / (1 - CLOCK_ERROR) + t.kill_time
        claimed_at_the_earliest = t.ttl / (1 + CLOCK_ERROR)
        assert gone_at_the_latest <= claimed_at_the_earliest, ttl


@pytest.mark.parametrize("found", [5, 0, -9])
def test_a_ttl_below_six_is_refused_with_the_limit(found: int) -> None:
    with pytest.raises(TimingError, match=f"found {found} s, expected 6 s or more"):
        Timing(found)


@pytest.mark.parametrize("found", [9.0, "9", True, None])
def test_a_ttl_that_is_no_whole_number_is_refused(found: object) -> None:
    with pytest.raises(TimingError, match="whole number"):
        Timing(found)  # type: ignore[arg-type]


def test_times_that_do_not_add_up_are_refused_with_the_sum() -> None:
    with pytest.raises(TimingError, match=r"switch 8\.5 \+ tick 0\.2.*must not exceed TTL 9"):
        Timing(9, kill_time=0.4)


def test_what_was_measured_counts_where_it_is_slower_than_the_least() -> None:
    assert Timing(90).measured(tick=0.01, kill_time=3) == Timing(90, kill_time=3)
    with pytest.raises(TimingError, match=r"tick 0\.3.*must not exceed TTL 9"):
        Timing(9).measured(tick=0.3, kill_time=0.01)


@pytest.mark.parametrize(
    ("clock_error", "tick", "kill_time"), [(0.02, 0.2, 0.2), (0.001, 0.5, 0.2), (0.001, 0.2, 0.31)]
)
def test_each_of_clock_error_tick_and_kill_time_counts(clock_error: float, tick: float, kill_time: float) -> None:
    with pytest.raises(TimingError):
        Timing(9, clock_error, tick, kill_time)


def test_a_ttl_below_eighteen_is_allowed_with_a_warning() -> None:
    assert Timing(18).warnings() == []
    (warning,) = Timing(17).warnings()
    assert "etcd election takes" in warning
