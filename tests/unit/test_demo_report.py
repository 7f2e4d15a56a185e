"""What a demo says of itself, from what it saw."""

from typing import Any

import pytest

from election.record import LeaderRecord, TermRecord, View, timestamp
from supervisor.demo import faults, report
from supervisor.demo.command import run_demo
from supervisor.demo.report import Seen
from supervisor.demo.watch import Term, note_terms

OBSERVED: dict[str, Any] = {"overlap_s": 0.0, "gap_s": 9.4, "samples": 2000, "longest_gap_s": 0.04, "late": []}
FIRST = Term(5, "node1", "node1-a", since=100.0, renewed_at=109.5)
SECOND = Term(9, "node2", "node2-b", since=118.7, renewed_at=123.2)


def seen(**changes: Any) -> Seen:
    values: dict[str, Any] = {
        "fault": "kill-node",
        "takeovers_expected": 1,
        "store": "local",
        "ttl": 9,
        "containment": "cgroup",
        "services_expected": 8,
        "terms": [FIRST, SECOND],
        "works": {9: {"work_s": 0.11, "steps": {"start": 0.08}}},
        "observer": OBSERVED,
        "running": 8,
        "complete": "node2",
    }
    return Seen(**values | changes)


def test_a_takeover_counts_from_the_last_refresh_of_the_old_term() -> None:
    (takeover,) = report.summarize(seen())["takeovers"]
    assert takeover == {
        "from": "node1",
        "to": "node2",
        "token": 9,
        "detected_s": 9.2,
        "work_s": 0.11,
        "steps": {"start": 0.08},
    }


def test_the_first_claim_is_no_takeover() -> None:
    assert report.summarize(seen(terms=[FIRST], takeovers_expected=0))["takeovers"] == []


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"observer": OBSERVED | {"overlap_s": 0.02}}, "two nodes had service processes at once"),
        ({"takeovers_expected": 0}, "1 take-overs, expected 0"),
        ({"terms": [FIRST]}, "0 take-overs, expected 1"),
        ({"complete": None, "running": 7}, "7 of 8 run"),
        ({"trouble": "no etcd"}, "no etcd"),
    ],
)
def test_it_is_ok_only_without_overlap_with_the_expected_takeovers_and_all_services(
    changes: dict[str, Any], why: str
) -> None:
    assert report.summarize(seen())["ok"]
    case = seen(**changes)
    result = report.summarize(case)
    assert not result["ok"]
    assert why in "; ".join(report.failures(result, case.takeovers_expected))


def test_people_see_the_figures_of_each_takeover_and_the_verdict() -> None:
    text = "\n".join(report.lines(report.summarize(seen()), "it works", 1))
    assert "claimed 9.20 s after the last refresh, 110 ms of work" in text
    assert text.endswith("ok")


def view_of(leader: LeaderRecord | None, term: TermRecord | None, mod: int) -> View:
    return View(leader, mod if leader else 0, 1 if leader else 0, term, mod if term else 0, mod)


def leader_of(node: str, since: float, renewed: float) -> LeaderRecord:
    return LeaderRecord(
        node=node,
        instance=f"{node}-a",
        token=None,
        state="active",
        since=timestamp(since),
        renewed_at=timestamp(renewed),
        nonce="n",
        lease_ttl_s=9,
        url="http://127.0.0.1:1",
        version="0",
    )


def test_terms_and_their_last_refresh_are_read_from_the_store() -> None:
    terms: list[Term] = []
    first = TermRecord(instance="node1-a", node="node1", ttl_s=9, began=timestamp(100.0))
    second = TermRecord(instance="node2-a", node="node2", ttl_s=9, began=timestamp(120.0))
    note_terms(terms, view_of(leader_of("node1", 100.0, 100.0), first, 4))
    note_terms(terms, view_of(leader_of("node1", 100.0, 104.5), first, 4))
    note_terms(terms, view_of(None, first, 4))  # the key expired; no refresh, no new term
    note_terms(terms, view_of(leader_of("node2", 120.0, 120.0), second, 9))
    note_terms(terms, view_of(None, second.model_copy(update={"ended": timestamp(121.0)}), 12))
    assert terms == [
        Term(4, "node1", "node1-a", since=100.0, renewed_at=104.5),
        Term(9, "node2", "node2-a", since=120.0, renewed_at=120.0),
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("redis", "none", 60, 9, "text"), "expected one of local, etcd"),
        (("local", "earthquake", 60, 9, "text"), "expected one of none, kill-supervisor"),
        (("local", "etcd-down", 60, 9, "text"), "needs --store etcd"),
        (("local", "none", 60, 5, "text"), "expected 6 s or more"),
        (("local", "kill-node", 5, 9, "text"), "too short"),
        (("local", "none", 60, 9, "xml"), "expected one of text, json"),
    ],
)
def test_wrong_use_says_what_was_expected_and_starts_nothing(
    arguments: tuple[str, str, float, int, str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_demo(*arguments) == 2
    assert said in capfd.readouterr().err


def test_each_fault_has_a_name_of_its_own_says_what_it_proves_and_fits_into_the_default_demo() -> None:
    made = [faults.make(name) for name in faults.NAMES]
    assert len({fault.name for fault in made}) == len(made) == 9
    assert all(fault.proves.endswith(".") for fault in made)
    assert max(fault.needs(9) for fault in made) <= 40
