"""The short form of `make chaos`: the most telling faults, each once, on real etcd with real cuts."""

import os
import shutil
from pathlib import Path

import pytest

from supervisor.cgroup import mount_point
from tests.acceptance.test_demo import slot
from tests.chaos.bed import tool
from tests.chaos.faults import ALONE, NAMES, Excuse, go_together
from tests.chaos.many import play
from tests.chaos.oracle import Interval, moved, out_of_bounds, overlaps, tokens_rise

__all__ = ["slot"]  # a fixture: not more than two clusters at a time

pytestmark = pytest.mark.timeout(400)
ONE = Interval("n1", 5, 10.0, 20.0)


def missing() -> str:
    """What this machine lacks for a real cut; empty: nothing."""
    if os.geteuid() != 0 or mount_point() is None:
        return "root and a writable cgroup2 mount"
    try:
        for name in ("nft", "xtables-legacy-multi"):
            tool(name)
    except OSError as error:
        return str(error)
    return "" if shutil.which("unshare") else "unshare"


TAKEOVERS = {
    "cut-from-etcd": 1,
    "deaf": 1,
    "isolate-node": 1,
    "isolate-member": 0,
    "slow": 0,
    "freeze-node": 1,
    "stop-supervisor-and-keeper": 1,
}


@pytest.mark.skipif(bool(missing()), reason=f"needs {missing()}")
def test_faults_of_network_and_node_never_make_two_and_services_run_again() -> None:
    """One after the other on the same three nodes."""
    result, timeline = play(7, "--each", "--faults", ",".join(TAKEOVERS), "--lasts", "1.6")
    assert result["ok"], (result, timeline)
    assert result["not_done"] == []
    assert dict(zip(result["faults"], result["takeovers_by_step"], strict=True)) == TAKEOVERS, (result, timeline)
    assert all(6.0 <= takeover["detected_s"] <= 10.0 for takeover in result["takeovers"]), result


@pytest.mark.skipif(bool(missing()), reason=f"needs {missing()}")
def test_a_random_sequence_of_faults_alone_and_in_pairs_never_makes_two() -> None:
    result, timeline = play(20261201, "--steps", "2")
    assert result["ok"], (result, timeline)


# --- the oracle


def test_an_overlap_of_a_millisecond_is_found_and_touching_is_none() -> None:
    assert overlaps([ONE, Interval("n2", 6, 20.0, 30.0)], []) == {}
    found = overlaps([ONE, Interval("n2", 6, 19.999, 30.0)], [])
    assert list(found) == [""]
    assert found[""] == pytest.approx(0.001)


def test_overlaps_on_one_node_are_none_and_each_pair_of_nodes_counts() -> None:
    assert overlaps([ONE, Interval("n1", 6, 12.0, 30.0)], []) == {}
    assert overlaps([ONE, Interval("n2", 6, 12.0, 13.0), Interval("n3", 7, 12.0, 13.0)], []) == {"": 3.0}


def test_a_frozen_node_does_nothing_and_what_it_does_after_the_thaw_counts_by_itself() -> None:
    frozen, thawed = Excuse("frozen", "n1", 12.0, 19.0), Excuse("thawed", "n1", 19.0, 20.0)
    assert overlaps([ONE, Interval("n2", 6, 13.0, 18.0)], [frozen]) == {}
    assert overlaps([ONE, Interval("n2", 6, 13.0, 19.5)], [frozen, thawed]) == {"thawed": 0.5}
    assert overlaps([ONE, Interval("n2", 6, 11.0, 19.5)], [frozen]) == {"": 1.5}


def test_an_excuse_covers_its_own_node_and_time_alone() -> None:
    excuse = Excuse("both-stopped", "n1", 12.0, 18.0)
    assert overlaps([ONE, Interval("n2", 6, 13.0, 17.0)], [excuse]) == {"both-stopped": 4.0}
    assert overlaps([ONE, Interval("n2", 6, 13.0, 19.0)], [excuse]) == {"": 6.0}
    assert overlaps([Interval("n3", 5, 10.0, 20.0), Interval("n2", 6, 13.0, 17.0)], [excuse]) == {"": 4.0}


def test_an_exception_excuses_no_more_than_its_own_time() -> None:
    excuse = Excuse("both-stopped", "n1", 12.0, 18.0)
    assert out_of_bounds({"both-stopped": 5.9, "": 1.0}, [excuse]) == []
    assert out_of_bounds({"both-stopped": 6.1}, [excuse]) == ["both-stopped: 6.100 s of overlap in 6.000 s"]


def test_how_long_it_took_until_another_node_ran_counts_from_the_fault() -> None:
    found = [ONE, Interval("n2", 6, 25.0, 40.0), Interval("n2", 7, 41.0, 60.0)]
    assert moved(found, [15.0, 39.0]) == [10.0, None]


def test_supervisor_and_keeper_of_a_node_are_not_disabled_by_two_faults_at_once() -> None:
    assert not go_together("kill-supervisor", "stop-keeper")
    assert not go_together("freeze-node", "kill-node")
    assert not go_together("kill-supervisor-and-keeper", "stop-supervisor")
    assert not go_together("kill-node", "unkillable-holder")
    assert go_together("kill-supervisor", "cut-from-etcd")
    assert NAMES.keys() > ALONE


def test_tokens_that_fall_or_belong_to_two_nodes_are_found() -> None:
    later = Interval("n2", 6, 21.0, 22.0)
    assert tokens_rise([later, ONE])
    assert not tokens_rise([ONE, Interval("n2", 4, 21.0, 22.0)])
    assert not tokens_rise([ONE, Interval("n2", 5, 21.0, 22.0)])


def test_everything_that_a_run_needs_from_the_project_is_there() -> None:
    assert (Path(__file__).parents[2] / "tools/install-containers.sh").read_text().count("nftables") == 1
