"""Standing by and claiming: when may a node claim (rule 8), and what if the claim gets no answer (rule 7)? Pure."""

from dataclasses import replace

from election import events as e
from election.holder import end
from election.phases import HEARD_KEPT, NEVER, Claiming, Holding, Inputs, StandingBy, State, Step, Watched
from election.record import Mark, View
from election.timing import Timing

OVERDUE = 10.0
"""Seconds beyond a TTL without a refresh after which a standby raises an alarm (rule 19)."""


def standing_by(state: State, s: StandingBy, event: e.Event, now: float, inputs: Inputs, timing: Timing) -> Step:
    actions: list[e.Action] = []
    match event:
        case e.Viewed():
            s, actions = _look(s, event.view, now, timing)
        case e.ReadFailed():
            s = replace(s, reading=False, next_read=now + timing.retry)
        case e.Heard():
            s = _hear(s, event, now)
        case e.Changed():
            s = replace(s, stale=True, next_read=now)
        case e.Gap():
            s = replace(s, vanished=0, stale=True, next_read=now)
        case _:
            pass
    s, alarms = _complain(state, s, now, timing)
    return _advance(replace(state, phase=s), s, now, inputs, actions + alarms, timing)


def claimable(s: StandingBy, state: State, timing: Timing) -> tuple[float, str]:
    """From when on the old holder is known to be gone (boot-time seconds), and by which part of rule 8.

    A term older than one that this node has seen comes out of a backup, and proves no end (rule 21).
    """
    if s.watched is None or s.watched.view.revision < state.floor:
        return NEVER, ""
    view = s.watched.view
    if view.term is not None and view.term_mod >= state.floor and view.signature != state.distrusted:
        if view.leader_mod == 0 and view.term.ended is not None:
            return -NEVER, "the last term ended in good order (8a)"
        if view.term.instance in state.gone:
            return -NEVER, "the last term was this node's own, and nothing of it is left (8c)"
    ttl = _ttl(view, timing)
    return s.watched.unchanged_since + ttl, f"nobody has refreshed for {ttl} s (8b)"


def barred(view: View, node: str) -> str:
    """Why operators do not want this node to claim, for people; empty: they do not mind."""
    if view.settings.paused is not None:
        return f"the cluster is paused {_told(view.settings.paused)}: nobody takes over until `gpuward resume`"
    if node in view.settings.excluded:
        told = _told(view.settings.excluded[node])
        return f"{node} is excluded {told}: it does not lead until `gpuward include {node}`"
    return ""


def _told(mark: Mark) -> str:
    because = f" ({mark.because})" if mark.because else ""
    return f"since {mark.since}{because}"


def claim_at(s: StandingBy, state: State, timing: Timing) -> tuple[float, str]:
    """From when on this node may claim (boot-time seconds): `claimable`, and what operators want (rule 12)."""
    when, why = claimable(s, state, timing)
    if s.watched is None or when == NEVER or barred(s.watched.view, state.node):
        return NEVER, why
    asked, ended = s.watched.view.pending, s.watched.view.leader_mod == 0 and when == -NEVER
    if asked is None or not ended:
        delay = state.claim_delay
    elif asked.target == state.node:
        delay, why = 0.0, f"{why}, and a switchover names this node"
    else:
        delay = max(asked.hold_back_s, state.claim_delay)
    return max(when, s.watched.unchanged_since) + delay, why


def _ttl(view: View, timing: Timing) -> int:
    """The larger of our own setting and the old holder's."""
    return max(timing.ttl, view.term.ttl_s if view.term else 0)


def _advance(state: State, s: StandingBy, now: float, inputs: Inputs, actions: list[e.Action], timing: Timing) -> Step:
    """Claim if it is time, else read if it is time. A claim does not wait for a read that is under way: its guards do
    what the read would do."""
    when, why = claim_at(s, state, timing)
    if inputs.fit and not s.stale and s.watched is not None and now >= max(when, s.next_claim):
        seen = s.watched.view.versions
        before = replace(s, reading=False)
        return replace(state, phase=Claiming(inputs.fresh_id, before)), [*actions, e.Claim(inputs.fresh_id, seen, why)]
    if not s.reading and now >= s.next_read:
        s = replace(s, reading=True, stale=False)
        actions = [*actions, e.Read()]
    return replace(state, phase=s), actions


def _look(s: StandingBy, view: View, now: float, timing: Timing) -> tuple[StandingBy, list[e.Action]]:
    before = s.watched
    went_back = before is not None and view.revision < before.view.revision
    changed = before is None or before.view.versions != view.versions
    since = now if before is None or went_back else _unchanged_since(s, before, view, now)
    actions: list[e.Action] = [e.Alarm("damaged-record", text) for text in view.damage] if changed else []
    return (
        replace(
            s,
            watched=Watched(view, since),
            reading=False,
            next_read=now if s.stale else now + timing.verify,
            heard=() if went_back else tuple(pair for pair in s.heard if pair[0] > view.revision),
            vanished=0,
            told=() if changed else s.told,
        ),
        actions,
    )


def _unchanged_since(s: StandingBy, watched: Watched, view: View, now: float) -> float:
    """Rule 8b. A revision is never used twice, so a version that was heard and is still there has stood since then."""
    before, since = watched.view, watched.unchanged_since
    if view.signature == before.signature:
        return since
    if view.leader_mod == 0:
        last_seen_vanished = s.vanished != 0 and s.vanished == before.leader_mod
        return since if last_seen_vanished and view.term_mod == before.term_mod else now
    heard = dict(s.heard)
    for old, new in ((before.leader_mod, view.leader_mod), (before.term_mod, view.term_mod)):
        if old != new:
            since = max(since, heard.get(new, now))
    return since


def _hear(s: StandingBy, event: e.Heard, now: float) -> StandingBy:
    s = replace(s, stale=True, next_read=now)
    if not event.deleted:
        return replace(s, heard=(*s.heard, (event.mod_revision, now))[-HEARD_KEPT:])
    if event.is_leader:
        return replace(s, vanished=event.previous_mod_revision or 0)
    return s


def _complain(state: State, s: StandingBy, now: float, timing: Timing) -> tuple[StandingBy, list[e.Action]]:
    if s.watched is None:
        return s, []
    alarms = {}
    revision = s.watched.view.revision
    if revision < state.floor:
        alarms["history-went-back"] = (
            f"the store is at revision {revision}, below token {state.floor} which this node has seen: was it restored "
            "from a backup, or replaced, or is this node's memory wrong? It claims nothing until the store is past that"
        )
    overdue = _ttl(s.watched.view, timing) + OVERDUE
    if now > s.watched.unchanged_since + overdue:
        alarms["nobody-leads"] = f"no refresh for more than {overdue:g} s, and nobody took over"
    new = [kind for kind in alarms if kind not in s.told]
    return replace(s, told=(*s.told, *new)), [e.Alarm(kind, alarms[kind]) for kind in new]


def claiming(state: State, s: Claiming, event: e.Event, now: float, timing: Timing) -> Step:
    match event:
        case e.Claimed(term=term, t0=t0) if term.instance == s.instance:
            return _begin(state, term, t0, now, timing)
        case e.Heard():
            return replace(state, phase=replace(s, before=_hear(s.before, event, now))), []
        case e.Changed():
            return replace(state, phase=replace(s, before=replace(s.before, stale=True, next_read=now))), []
        case e.Gap():
            return replace(state, phase=replace(s, before=replace(s.before, vanished=0))), []
        case e.ClaimFailed(instance=s.instance, outcome="ambiguous"):
            reading = replace(s, lease=event.lease, t0=event.t0, reading_back=True)
            note = e.Note(f"the claim got no answer ({event.why}); reading back")
            return replace(state, phase=reading), [note, e.Read()]
        case e.ClaimFailed(instance=s.instance, outcome="refused"):
            return _abandon(state, s, event.lease, event.why, now, claim_again=now)
        case e.ClaimFailed(instance=s.instance):
            return _abandon(state, s, event.lease, event.why, now, claim_again=now + timing.retry)
        case e.Viewed() if s.reading_back:
            return _read_back(state, s, event.view, now, timing)
        case e.ReadFailed() if s.reading_back:
            return replace(state, phase=replace(s, next_read=now + timing.retry)), []
        case e.Tick() if s.reading_back and now >= s.t0 + timing.give_up:
            return _abandon(state, s, s.lease, "the claim could not be read back in time", now, claim_again=now)
        case e.Tick() if s.reading_back and now >= s.next_read:
            return replace(state, phase=replace(s, next_read=NEVER)), [e.Read()]
        case _:
            return state, []


def _read_back(state: State, s: Claiming, view: View, now: float, timing: Timing) -> Step:
    leader, term = view.leader, view.term
    attached = leader is not None and view.leader_lease == s.lease and leader.instance == s.instance
    if attached and term is not None and term.instance == s.instance:
        return _begin(state, e.Term(s.instance, view.term_mod, s.lease, term.began), s.t0, now, timing)
    return _abandon(state, s, s.lease, "the claim was not applied", now, claim_again=now + timing.retry)


def _abandon(state: State, s: Claiming, lease: int, why: str, now: float, *, claim_again: float) -> Step:
    """It may still arrive: with its lease revoked it cannot be applied, and its instance is never adopted (rule 7).
    Nothing was ever started under that instance, so it counts as gone."""
    phase = replace(s.before, stale=True, next_read=now, next_claim=claim_again)
    actions: list[e.Action] = [e.Note(f"claim abandoned: {why}")]
    return replace(state, phase=phase).without(s.instance), [*actions, *([e.Revoke(lease)] if lease else [])]


def _begin(state: State, term: e.Term, t0: float, now: float, timing: Timing) -> Step:
    floor = max(state.floor, term.token)
    noted = replace(state, floor=floor)
    if term.token < floor:
        why = f"token {term.token} is below {floor}, which this node has seen"
    elif now >= t0 + timing.give_up:
        why = "the claim was answered after its deadline"
    elif state.leaving:
        why = "this node is leaving"
    else:
        holding = Holding(term, t0, claimed_at=t0, next_refresh=now, next_read=now + timing.verify)
        actions: list[e.Action] = [e.NoteToken(floor), e.Arm(term, t0 + timing.switch)]
        return replace(noted, phase=holding), actions
    return end(noted, term, why, now, timing)
