"""What the outside observer of `gpuward demo` counts."""

import pytest

from supervisor.demo.observer import Process, Sample, account, kill_pending, parse_environ, parse_stat

A = Process(1, "node1", 5, started=0.0)
B = Process(2, "node2", 9, started=1.005)


def sample(at: float, *processes: Process) -> Sample:
    return Sample(at, frozenset(processes))


def test_one_node_after_the_other_is_no_overlap_and_the_gap_is_what_lies_between() -> None:
    total = account([sample(0.0, A), sample(0.5, A), sample(1.0), sample(1.02, B)])
    assert total.overlap == 0
    assert total.gap == pytest.approx(1.005 - 0.5)


def test_an_overlap_counts_from_the_start_of_the_second_nodes_process_not_from_when_it_was_seen() -> None:
    total = account([sample(1.0, A), sample(1.02, A, B), sample(1.04, A, B), sample(1.06, B)])
    assert total.overlap == pytest.approx(0.02 + 0.015)


def test_one_single_sample_with_two_nodes_is_an_overlap() -> None:
    assert account([sample(1.0), sample(1.005, A, B), sample(1.02, B)]).overlap > 0
    assert account([sample(1.01, A, B)]).overlap > 0


def test_a_hand_over_between_two_samples_is_no_overlap() -> None:
    assert account([sample(1.0, A), sample(1.02, B)]).overlap == 0


def test_a_gap_that_is_still_open_at_the_end_counts() -> None:
    assert account([sample(0.0, A), sample(0.5), sample(3.0)]).gap == pytest.approx(3.0)


def test_time_before_the_first_process_is_no_gap() -> None:
    assert account([sample(0.0), sample(9.0), sample(9.01, Process(3, "node1", 1, started=9.01))]).gap == 0


def test_late_samples_are_listed_with_their_length() -> None:
    total = account([sample(0.0, A), sample(0.02, A), sample(0.32, A)])
    assert total.longest == pytest.approx(0.3)
    assert total.result()["late"] == [{"at": 0.02, "s": 0.3}]


def test_intervals_are_per_node_and_token_and_break_where_no_process_was_seen() -> None:
    again = Process(4, "node1", 11, started=2.0)
    total = account([sample(0.0, A), sample(0.5, A), sample(1.0), sample(2.02, again)])
    found = [(i.node, i.token, i.first, i.last) for i in total.intervals]
    assert found == [("node1", 5, 0.0, 0.5), ("node1", 11, 2.0, 2.02)]


def test_the_command_name_in_stat_may_hold_parentheses_and_spaces() -> None:
    numbers = " ".join(str(n) for n in range(4, 17))  # fields 4 to 16
    assert parse_stat(f"7 (a) R (b) D {numbers} 17 18 19 3 21 4242 23".encode()) == ("D", 4242, 3)


def test_only_processes_that_name_a_node_and_lie_in_the_demos_folder_count() -> None:
    ours = b"PATH=/bin\0GPUWARD_NODE=node2\0GPUWARD_FENCING_TOKEN=17\0GPUWARD_RUN_DIR=/tmp/d/node2/run\0"
    assert parse_environ(ours, b"/tmp/d/") == ("node2", 17)
    assert parse_environ(ours, b"/tmp/other/") is None
    assert parse_environ(b"GPUWARD_DEMO=/tmp/d/node2/\0", b"/tmp/d/") is None


def test_a_pending_sigkill_is_seen_for_the_thread_and_for_the_process() -> None:
    assert kill_pending(b"Name:\tx\nSigPnd:\t0000000000000100\nShdPnd:\t0000000000000000\n")
    assert kill_pending(b"SigPnd:\t0000000000000000\nShdPnd:\t0000000000000100\n")
    assert not kill_pending(b"SigPnd:\t0000000000004000\nShdPnd:\t0000000000000001\nSigBlk:\t0000000000000100\n")
