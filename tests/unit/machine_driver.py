"""Drives `machine.step` by hand: a machine, its time, and short ways to say what the store shows."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from election import events as e
from election import machine
from election.phases import Inputs, StandingBy, State
from election.record import LeaderRecord, TermRecord, View
from election.timing import Timing

A = TypeVar("A")
TTL = 9


def leader_record(instance: str = "other", nonce: str = "n0") -> LeaderRecord:
    return LeaderRecord(
        node=f"node-of-{instance}",
        instance=instance,
        token=None,
        state="active",
        since="",
        renewed_at="",
        nonce=nonce,
        lease_ttl_s=TTL,
        url="",
        version="1",
    )


def term_record(instance: str = "other", *, ended: str | None = None, ttl_s: int = TTL) -> TermRecord:
    return TermRecord(instance=instance, node=f"node-of-{instance}", ttl_s=ttl_s, began="then", ended=ended)


def view(
    leader_mod: int = 0,
    term_mod: int = 0,
    *,
    instance: str = "other",
    nonce: str = "n0",
    lease: int = 70,
    ended: str | None = None,
    ttl_s: int = TTL,
    revision: int = 0,
) -> View:
    """Both records of `instance`; a mod_revision of 0 means that the key is absent."""
    return View(
        leader=leader_record(instance, nonce) if leader_mod else None,
        leader_mod=leader_mod,
        leader_lease=lease if leader_mod else 0,
        term=term_record(instance, ended=ended, ttl_s=ttl_s) if term_mod else None,
        term_mod=term_mod,
        revision=revision or max(leader_mod, term_mod, 1),
    )


def put(mod: int, *, is_leader: bool = True, lease: int = 70, previous: int | None = 0) -> e.Heard:
    return e.Heard(is_leader, mod, deleted=False, lease=lease, previous_mod_revision=previous)


def deletion(mod: int, previous: int | None, *, is_leader: bool = True) -> e.Heard:
    return e.Heard(is_leader, mod, deleted=True, lease=0, previous_mod_revision=previous)


def only(kind: type[A], actions: Iterable[object]) -> A:
    """The one action of this kind."""
    (found,) = [action for action in actions if isinstance(action, kind)]
    return found


def kinds(actions: Iterable[object]) -> list[str]:
    return [type(action).__name__ for action in actions]


def alarms(actions: Iterable[object]) -> list[str]:
    return [action.kind for action in actions if isinstance(action, e.Alarm)]


@dataclass
class Driver:
    """A machine with TTL 9: refresh 4.5, give-up 7.5, kill 8, switch 8.5, retry 0.5, verify 0.5, verify limit 1."""

    state: State = field(default_factory=lambda: State(StandingBy()))
    fit: bool = True
    alive: bool = True
    timing: Timing = field(default_factory=lambda: Timing(TTL))
    ids: int = 0

    def at(self, now: float, event: e.Event | None = None) -> list[e.Action]:
        """What `event` leads to at `now`; without one, what the time leads to."""
        self.ids += 1
        inputs = Inputs(self.fit, self.alive, f"id{self.ids}")
        self.state, actions = machine.step(self.state, event or e.Tick(), now, inputs, self.timing)
        return actions

    def viewed(self, now: float, shown: View, sent_at: float | None = None) -> list[e.Action]:
        return self.at(now, e.Viewed(shown, now if sent_at is None else sent_at))

    def claims_at(self, now: float) -> bool:
        """Whether time alone leads to a claim at `now`."""
        return "Claim" in kinds(self.at(now))

    def claims_from(self, when: float) -> bool:
        """Whether it claims at `when`, and not a moment earlier."""
        return not self.claims_at(when - 0.001) and self.claims_at(when)
