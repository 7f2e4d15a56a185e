"""What `/status` says: one JSON object, made from what is known. Nothing here waits, or shows a command or a secret."""

from typing import Any

from election.candidate import barred
from election.phases import Claiming, Ending, Fencing, Holding, Left, StandingBy
from election.record import SettingsRecord
from supervisor.node import Node
from supervisor.service.states import State
from supervisor.version import VERSION

RUN = (State.RUNNING, State.UNREADY, State.DRAINING)
"""States of a service that has come up and has not begun to end."""


def status(node: Node) -> dict[str, Any]:
    """The whole of it; times are seconds or UTC."""
    state, why = state_and_why(node)
    return {
        "version": VERSION,
        "cluster": node.config.cluster,
        "node": node.config.node,
        "role": node.role(),
        "state": state,
        "why": why,
        "unfit_because": node.unfit_because(),
        "ttl_s": node.timing.ttl,
        "term": _term(node),
        "leader": _leader(node),
        **operators_words(node),
        "containment": "process-group" if node.folder.cgroup is None else "cgroup",
        "keeper": _keeper(node),
        "gpus": [_gpu(node, index) for index in node.config.gpu_indexes],
        "services": node.services.snapshot(),
        "takeovers": list(node.takeovers),
        "events": list(node.events)[-50:],
        "alarms": list(node.alarms)[-50:],
    }


def operators_words(node: Node) -> dict[str, Any]:
    """What operators have asked of the cluster, as the last answered read showed it."""
    seen = node.elector.seen
    asked = None if seen is None else seen.switchover
    return settings_answer(node.elector.settings) | {"switchover": None if asked is None else asked.model_dump()}


def settings_answer(settings: SettingsRecord) -> dict[str, Any]:
    """What stands until an operator takes it back."""
    return {
        "paused": None if settings.paused is None else settings.paused.model_dump(),
        "excluded": {name: mark.model_dump() for name, mark in settings.excluded.items()},
    }


def switchover_now(node: Node) -> dict[str, Any]:
    """What comes of a request to switch over."""
    return {"node": node.config.node, "switchover": operators_words(node)["switchover"], "leader": _leader(node)}


def state_and_why(node: Node) -> tuple[str | None, str]:
    """The state of the term, and one sentence on why the node is where it is. Without a term: why it may not claim, or
    what its claim waits for."""
    match node.elector.state.phase:
        case Holding(stage=stage, because=because):
            if stage == "taking-over":
                return stage, f"at step {node.progress.now_at or 'arming the keeper'}"
            return stage, because or _holding(node)
        case Fencing(why=why):
            return "fencing", why
        case Ending(because=because):
            return "ending", because
        case Claiming():
            return None, "claiming"
        case StandingBy() as phase:
            return None, next(iter(node.unfit_because()), "") or _barred(node, phase) or _standing_by(node, phase)
        case Left():
            return None, "leaving"


def _holding(node: Node) -> str:
    states = [row["state"] for row in node.services.snapshot()]
    return f"holds the lock; {sum(state in RUN for state in states)} of {len(states)} services run"


def _barred(node: Node, phase: StandingBy) -> str:
    return "" if phase.watched is None else barred(phase.watched.view, node.elector.state.node)


def _standing_by(node: Node, phase: StandingBy) -> str:
    if phase.watched is None:
        seen_at, now = node.elector.seen_at, node.clock.now()
        silent = f" for {now - seen_at:.0f} s" if node.elector.seen is not None else ""
        return f"waits for an answer of the store, which has given none{silent or ' yet'}: its endpoints may be down"
    view, unchanged = phase.watched.view, node.clock.now() - phase.watched.unchanged_since
    if view.leader is not None:
        leads = "leads" if unchanged <= node.timing.ttl else "led"
        return f"{view.leader.node} {leads}; its last refresh was seen {unchanged:.1f} s ago"
    if view.term is not None and view.term.ended is not None:
        return "nobody leads; the last term ended in good order"
    waited = min(unchanged, node.timing.ttl)
    return f"nobody leads; waiting out one TTL, {waited:.1f} of {node.timing.ttl} s so far"


def _term(node: Node) -> dict[str, Any] | None:
    phase = node.elector.state.phase
    if not isinstance(phase, Holding | Fencing | Ending):
        return None
    left = phase.t0 + node.timing.ttl - node.clock.now() if isinstance(phase, Holding) else 0.0
    term = phase.term
    return {
        "token": term.token,
        "instance": term.instance,
        "since": term.began,
        "lease_left_s": round(max(0.0, left), 1),
    }


def _leader(node: Node) -> dict[str, Any] | None:
    """By our own last refresh while we hold the lock, else as the last answered read showed it."""
    elector, now = node.elector, node.clock.now()
    seen_at, leader = elector.seen_at, elector.seen.leader if elector.seen else None
    if isinstance(elector.state.phase, Holding) and elector.state.phase.recorded:
        seen_at, leader = elector.state.phase.t0, elector.written
    if leader is None:
        return None
    return {
        "node": leader.node,
        "instance": leader.instance,
        "token": leader.token,
        "state": leader.state,
        "since": leader.since,
        "renewed_at": leader.renewed_at,
        "url": leader.url,
        "seen_s_ago": round(now - seen_at, 1),
    }


def _keeper(node: Node) -> dict[str, Any] | None:
    if not node.keeper.connected:
        return None
    hello = node.keeper.hello
    return {key: hello.get(key) for key in ("pid", "rss_bytes", "memory_locked", "tick_s", "kill_s", "hardware")}


def _gpu(node: Node, index: int) -> dict[str, Any]:
    gpu = node.gpus.get(index)
    return {
        "index": index,
        "uuid": gpu.uuid if gpu else None,
        "device": str(gpu.device) if gpu else None,
        "state": str(gpu.verdict) if gpu else "unknown",
        "lock": {
            "path": str(node.config.lock_file(index)),
            "holder": node.holders.get(index),
            "waiting": _waiting(node, index),
        },
    }


def _waiting(node: Node, index: int) -> list[str]:
    """Services that wait for the lock of this GPU, the next one first: by priority, then who waits longest."""
    waiting = [row for row in node.services.snapshot() if row["state"] == State.WAITING_LOCK and row["gpu"] == index]
    waiting.sort(key=lambda row: (-node.services.runners[row["name"]].spec.priority, -row["for_s"]))
    return [row["name"] for row in waiting]
