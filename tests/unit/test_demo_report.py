"""What a demo says of itself, from what it saw."""

import asyncio
import io
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from election.clock import boot_time
from election.record import LeaderRecord, TermRecord, View, timestamp
from supervisor.demo import etcd_cluster, faults, report, view
from supervisor.demo.command import run_demo
from supervisor.demo.etcd_cluster import EtcdClusterError, find_binaries
from supervisor.demo.report import Seen
from supervisor.demo.watch import Event, Term, Watcher, note_terms

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


def test_people_are_told_what_weak_containment_means() -> None:
    weak = report.summarize(seen(containment="process-group"))
    assert weak["containment"] == "process-group"
    assert "containment    process-group: no cgroup" in "\n".join(report.lines(weak, "it works", 1))


def test_lines_stand_in_the_order_in_which_it_happened() -> None:
    shown = io.StringIO()
    screen = view.Plain(shown)

    async def play() -> None:
        start = boot_time()
        screen.notice(Event(start, "before"))
        assert "before" in shown.getvalue()
        async with screen.live(cast(Watcher, None)):
            screen.notice(Event(start + 0.02, "later"))
            screen.notice(Event(start + 0.01, "sooner"))
            assert "sooner" not in shown.getvalue()
            screen.show_until(start + 0.03)
            assert "later" in shown.getvalue()
            screen.notice(Event(boot_time(), "last"))

    asyncio.run(play())
    assert re.findall(r"[a-z]{3,}", shown.getvalue()) == ["before", "sooner", "later", "last"]


@pytest.mark.parametrize("columns", [80, 120])
def test_a_picture_fits_the_terminal_and_shows_the_last_events(columns: int) -> None:
    console = Console(file=io.StringIO(), width=columns, height=24, force_terminal=True)
    screen = view.Terminal(console, "gpuward demo: store local, fault kill-node, TTL 9 s")
    for number in range(20):
        screen.notice(Event(number, f"event {number} " + "x" * 100))
    why = "holds the lock; 8 of 8 services run, and much more is said about it than any terminal has columns for" * 2
    services = [{"name": f"turn-{number}", "state": "waiting-lock"} for number in range(8)]
    term = {"token": 12, "lease_left_s": 5.0}
    status = {"role": "leader", "state": "active", "term": term, "why": why, "services": services}
    node = SimpleNamespace(running=True, turns=lambda: 123, turns_file=Path("/nonexistent"))
    nodes = {f"node{number}": node for number in (1, 2, 3)}
    watcher = SimpleNamespace(
        cluster=SimpleNamespace(nodes=nodes),
        statuses={"node1": status, "node2": status | {"state": None, "term": None}, "node3": None},
        observed={"node1": [1]},
        active=lambda: "node1",
    )
    lines = console.render_lines(screen._picture(cast(Watcher, watcher)))
    text = ["".join(segment.text for segment in line) for line in lines]
    assert len(text) <= 23
    assert [number for number in range(20) if any(f"event {number} " in line for line in text)][-6:] == [*range(14, 20)]
    assert sum("holds the lock; 8" in line for line in text) == 2
    assert "lease left" in "".join(text)
    assert "5.0 s" in "".join(text)
    assert ("turns" in "".join(text)) == (columns >= 100)


@pytest.mark.parametrize("checkout", [True, False])
def test_the_installer_of_etcd_is_named_in_a_checkout_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkout: bool
) -> None:
    script = tmp_path / "tools/install-etcd.sh"
    if checkout:
        script.parent.mkdir()
        script.touch()
    monkeypatch.setattr(etcd_cluster, "INSTALLER", script)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("GPUWARD_ETCD_DIR", raising=False)
    with pytest.raises(EtcdClusterError, match="or name their folder in GPUWARD_ETCD_DIR") as caught:
        find_binaries()
    assert ("install-etcd.sh" in str(caught.value)) == checkout
    monkeypatch.setenv("GPUWARD_ETCD_DIR", "/nowhere")
    with pytest.raises(EtcdClusterError, match=r"in /nowhere \(GPUWARD_ETCD_DIR\): "):
        find_binaries()


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


def test_a_fault_that_needs_root_is_refused_at_once_without(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert run_demo("local", "disk-full", 60, 9, "text") == 2
    assert "needs root" in capfd.readouterr().err


def test_each_fault_has_a_name_of_its_own_says_what_it_proves_and_fits_into_the_default_demo() -> None:
    made = [faults.make(name) for name in faults.NAMES]
    assert len({fault.name for fault in made}) == len(made)
    assert all(fault.proves.endswith(".") for fault in made)
    assert max(fault.needs(9) for fault in made) <= 40
