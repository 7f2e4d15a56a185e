"""The sentence on why a node is where it is."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from election.events import Term
from election.phases import Holding, StandingBy, Watched
from election.record import View
from supervisor.api.status import _waiting, state_and_why
from supervisor.node import Node

NOTHING = View(None, 0, 0, None, 0, 5)
TTL = 6


def node(
    phase: Any, services: tuple[dict[str, Any], ...] = (), unfit: tuple[str, ...] = (), now: float = 100.0
) -> Node:
    """As much of one as the sentence is made from."""
    runners = {row["name"]: SimpleNamespace(spec=SimpleNamespace(priority=row.get("priority", 0))) for row in services}
    made = SimpleNamespace(
        elector=SimpleNamespace(state=SimpleNamespace(phase=phase, node="n1")),
        services=SimpleNamespace(snapshot=lambda: list(services), runners=runners),
        unfit_because=lambda: list(unfit),
        timing=SimpleNamespace(ttl=TTL),
        clock=SimpleNamespace(now=lambda: now),
    )
    return cast(Node, made)


@pytest.mark.parametrize(("waited", "said"), [(2.5, "2.5 of 6 s"), (8.5, "6.0 of 6 s")])
def test_a_standby_never_waits_for_longer_than_the_ttl(waited: float, said: str) -> None:
    phase = StandingBy(Watched(NOTHING, unchanged_since=100.0 - waited))
    assert state_and_why(node(phase))[1] == f"nobody leads; waiting out one TTL, {said} so far"


def test_an_unfit_node_says_what_makes_it_unfit_and_not_what_it_waits_for() -> None:
    phase = StandingBy(Watched(NOTHING, unchanged_since=90.0))
    assert state_and_why(node(phase, unfit=("GPU 0 is lost", "no keeper"))) == (None, "GPU 0 is lost")


def test_a_holder_says_how_many_of_its_services_run() -> None:
    states = ("running", "unready", "draining", "backoff", "waiting-lock")
    phase = Holding(Term("i", 7, 1), t0=99.0, claimed_at=90.0, stage="active")
    services = tuple({"name": state, "state": state} for state in states)
    assert state_and_why(node(phase, services)) == ("active", "holds the lock; 3 of 5 services run")


def test_who_waits_for_a_lock_stands_in_the_order_of_priority_and_then_of_waiting() -> None:
    rows = [("low", -1, 900), ("late", 0, 3), ("early", 0, 5), ("high", 9, 1)]
    services: list[dict[str, Any]] = [
        {"name": name, "state": "waiting-lock", "gpu": 0, "priority": priority, "for_s": seconds}
        for name, priority, seconds in rows
    ]
    services += [{"name": "runs", "state": "running", "gpu": 0, "for_s": 1}]
    services += [{"name": "elsewhere", "state": "waiting-lock", "gpu": 1, "for_s": 1}]
    assert _waiting(node(StandingBy(), tuple(services)), 0) == ["high", "early", "late", "low"]
