"""What the keeper measures of itself (rule 22)."""

from supervisor.keeper.pace import Slowest

MS = 1_000_000
SPAN_NS = 10 * 10**9


def test_the_slowest_counts_and_a_faster_one_after_it_changes_nothing() -> None:
    slowest = Slowest(SPAN_NS)
    slowest.add(300 * MS, now_ns=10)
    slowest.add(20 * MS, now_ns=11)
    assert slowest.value_s(12) == 0.3


def test_what_was_measured_counts_for_one_span_at_least_and_two_at_most() -> None:
    slowest = Slowest(SPAN_NS)
    slowest.add(300 * MS, now_ns=SPAN_NS - 1)
    slowest.add(20 * MS, now_ns=SPAN_NS + 1)
    assert slowest.value_s(2 * SPAN_NS - 1) == 0.3
    assert slowest.value_s(2 * SPAN_NS) == 0.02
    assert slowest.value_s(3 * SPAN_NS) == 0


def test_after_a_long_silence_nothing_old_counts() -> None:
    slowest = Slowest(SPAN_NS)
    slowest.add(300 * MS, now_ns=1)
    assert slowest.value_s(50 * SPAN_NS) == 0
