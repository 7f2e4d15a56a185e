"""Holding, fencing and ending a term: refresh, verify, give up, and how it passes on (rules 3-5, 9, 11, 18). Pure."""

from dataclasses import replace

from election import events as e
from election.phases import NEVER, Ending, Fencing, Holding, Inputs, StandingBy, State, Step
from election.store import ErrorClass
from election.timing import Timing

READY_WITHIN = 5.0
"""Seconds within which the target of a switchover must have said that it could lead."""


def resumed(term: e.Term, t0: float, now: float) -> Holding:
    """Of an earlier run of this supervisor (rule 15): nothing follows from it but a guarded refresh, with every
    deadline of the term's last one. Only when that has succeeded is the keeper armed, and the services adopted."""
    return Holding(term, t0, claimed_at=now, resumed=True, next_refresh=now, next_read=now)


def holding(state: State, s: Holding, event: e.Event, now: float, inputs: Inputs, timing: Timing) -> Step:
    if now >= s.t0 + timing.give_up:  # final, whatever has just arrived
        return _fence(state, s, f"no refresh for {now - s.t0:.1f} s: giving up for good", now, timing, at_once=False)
    match event:
        case e.Refreshed() | e.RefreshFailed() | e.Viewed() | e.ReadFailed() | e.Heard() | e.Changed() | e.Gap():
            result = _from_store(state, s, event, now, timing)
        case _:
            result = _from_node(state, s, event, now, timing)
    state, actions = result
    if isinstance(state.phase, Holding):
        return _on_schedule(state, state.phase, actions, now, inputs, timing)
    return state, actions


def _from_store(state: State, s: Holding, event: e.Event, now: float, timing: Timing) -> Step:
    match event:
        case e.Refreshed():
            s = replace(s, refreshing=False, recorded=True)
            return _confirmed(state, s, event.t0, timing)
        case e.RefreshFailed(kind=ErrorClass.LOST):
            return _fence(state, s, f"the lock is lost: {event.why}", now, timing, at_once=True)
        case e.RefreshFailed():
            unanswered = (*s.unanswered, (event.nonce, event.t0))
            retry_at = max(now, event.t0 + timing.retry)
            s = replace(s, refreshing=False, unanswered=unanswered, next_refresh=retry_at)
            return replace(state, phase=s), [e.Note(f"refresh failed, will be retried: {event.why}")]
        case e.Viewed():
            return _verify(state, s, event, now, timing)
        case e.ReadFailed():
            s = replace(s, reading=False, read_again=False, next_read=now + min(timing.retry, timing.verify))
            return replace(state, phase=s), []
        case e.Heard() if _foreign(s, event):
            return replace(state, phase=replace(s, read_again=s.reading, next_read=now)), []
        case e.Changed() | e.Gap():
            return replace(state, phase=replace(s, read_again=s.reading, next_read=now)), []
        case _:
            return state, []


def _from_node(state: State, s: Holding, event: e.Event, now: float, timing: Timing) -> Step:
    token = s.term.token
    match event:
        case e.Armed(token=t) if t == token and not s.armed:
            taking_over = s.stage == "taking-over"
            return replace(state, phase=replace(s, armed=True)), [e.TakeOver(s.term, s.resumed)] if taking_over else []
        case e.ArmFailed(token=t) if t == token:
            return _fence(state, s, f"the keeper's switch could not be set: {event.why}", now, timing, at_once=True)
        case e.TookOver(token=t) if t == token and s.stage == "taking-over":
            return replace(state, phase=replace(s, stage="active", next_refresh=now)), []
        case e.TakeOverFailed(token=t) if t == token and s.stage == "taking-over":
            return _stand_down(state, s, f"take-over failed: {event.why}", now)
        case e.StandDown() if s.stage != "standing-down":
            return _stand_down(state, s, event.because, now)
        case e.FenceNow():
            return _fence(state, s, event.why, now, timing, at_once=True)
        case e.Gone(token=t, proven=proven) if t == token and s.stage == "standing-down":
            return end(state, s.term, s.because, now, timing) if proven else _unproven(state, s.term, now)
        case e.Suspect():
            limit = min(now + timing.verify_limit, s.suspect_until)
            s = replace(s, suspect_since=now, suspect_until=limit, read_again=s.reading, next_read=now)
            return replace(state, phase=s), [e.Note(f"verifying at once: {event.why}")]
        case _:
            return state, []


def _on_schedule(state: State, s: Holding, actions: list[e.Action], now: float, inputs: Inputs, timing: Timing) -> Step:
    """What is due by time alone, whatever the event was."""
    if now >= s.suspect_until:
        state, more = _fence(state, s, "the lock could not be verified in time", now, timing, at_once=True)
        return state, actions + more
    if not s.refreshing and now >= s.next_refresh and inputs.alive:
        s = replace(s, refreshing=True)
        actions = [*actions, e.Refresh(s.term, inputs.fresh_id, now, s.stage)]
    elif not s.reading and now >= s.next_read:
        s = replace(s, reading=True, read_again=False)
        actions = [*actions, e.Read()]
    return replace(state, phase=s), actions


def _confirmed(state: State, s: Holding, t0: float, timing: Timing) -> Step:
    """An attempt is known to have been applied. A change of stage meanwhile keeps its earlier refresh."""
    if t0 < s.t0:
        return replace(state, phase=s), []
    unanswered = tuple(pair for pair in s.unanswered if pair[1] > t0)
    if s.next_refresh <= t0:
        s = replace(s, next_refresh=t0 + timing.refresh)
    s = replace(s, t0=t0, unanswered=unanswered)
    return replace(state, phase=s), [e.Arm(s.term, t0 + timing.switch)]


def _verify(state: State, s: Holding, event: e.Viewed, now: float, timing: Timing) -> Step:
    """Rule 5. A verify extends nothing, except that our own nonce in it confirms that nonce's attempt (rule 3)."""
    view = event.view
    if event.sent_at < s.claimed_at:
        return state, []
    if view.term_mod != s.term.token:
        return _fence(state, s, "the term is no longer ours", now, timing, at_once=True)
    if view.leader_mod == 0:
        return _fence(state, s, "our leader key is gone", now, timing, at_once=True)
    if view.leader_lease != s.term.lease or view.leader is None or view.leader.instance != s.term.instance:
        return _fence(state, s, "the leader key is not ours", now, timing, at_once=True)
    if event.sent_at >= s.suspect_since:
        s = replace(s, suspect_since=NEVER, suspect_until=NEVER)
    next_read = now if s.read_again else now + timing.verify
    s = replace(s, reading=False, read_again=False, next_read=next_read)
    t0 = dict(s.unanswered).get(view.leader.nonce)
    state, actions = replace(state, phase=s), list[e.Action]()
    if t0 is not None:
        state, actions = _confirmed(state, replace(s, recorded=True), t0, timing)
    assert isinstance(state.phase, Holding)
    state, more = _switch_over(state, state.phase, event, now)
    return state, actions + more


def _switch_over(state: State, s: Holding, event: e.Viewed, now: float) -> Step:
    """Rule 12: the term ends for a target that has just said that it could lead, and not for another."""
    asked, target, mod = event.view.pending, event.target, event.view.switchover_mod
    if asked is None or target is None or s.stage != "active":
        return state, []
    if target.ready:
        return _stand_down(state, s, f"switchover to {asked.target}, asked for on {asked.on}", now)
    since = s.asked[1] if s.asked is not None and s.asked[0] == mod else now
    state = replace(state, phase=replace(s, asked=(mod, since)))
    if target.unfit:
        return state, [e.RefuseSwitchover(asked, mod, f"{asked.target} cannot lead: {target.unfit}")]
    if now >= since + READY_WITHIN:
        why = f"{asked.target} has not said within {READY_WITHIN:g} s that it is ready"
        return state, [e.RefuseSwitchover(asked, mod, why)]
    return state, []


def _foreign(s: Holding, event: e.Heard) -> bool:
    if event.is_leader:
        return event.deleted or event.lease != s.term.lease
    return event.mod_revision != s.term.token


def _stand_down(state: State, s: Holding, because: str, now: float) -> Step:
    """In good order: the lock is refreshed on until everything is gone."""
    s = replace(s, stage="standing-down", because=because, next_refresh=now)
    return replace(state, phase=s), [e.EndServices(s.term, None, because)]


def _fence(state: State, s: Holding, why: str, now: float, timing: Timing, *, at_once: bool) -> Step:
    kill_at = now if at_once else s.t0 + timing.kill
    return replace(state, phase=Fencing(s.term, why)), [
        e.Alarm("fenced", why),
        e.EndServices(s.term, kill_at, why),
    ]


def fencing(state: State, s: Fencing, event: e.Event, now: float, timing: Timing) -> Step:
    match event:
        case e.Gone(token=t, proven=proven) if t == s.term.token:
            return end(state, s.term, s.why, now, timing) if proven else _unproven(state, s.term, now)
        case _:
            return state, []


def end(state: State, term: e.Term, because: str, now: float, timing: Timing) -> Step:
    """Nothing of the term is left: say so on record, which lets the others in at once (rules 8a, 11)."""
    phase = Ending(term, because, until=now + timing.ttl, sending=True)
    return replace(state, phase=phase).without(term.instance), [e.End(term, because)]


def _unproven(state: State, term: e.Term, now: float) -> Step:
    """Something may have got away: nobody is let in early, this node included; the others wait the term out (8b)."""
    note = e.Note("no orderly end is recorded: that nothing is left cannot be proven")
    return replace(state, phase=StandingBy(next_read=now)), [note]


def ending(state: State, s: Ending, event: e.Event, now: float, timing: Timing) -> Step:
    match event:
        case e.Ended(token=t) if t == s.term.token:
            text = "the term had passed on already" if event.overtaken else "orderly end recorded"
            return _stand_by(state, s, now, text)
        case e.EndFailed(token=t) if t == s.term.token and now >= s.until:
            return _stand_by(state, s, now, f"orderly end not recorded: {event.why}")
        case e.EndFailed(token=t) if t == s.term.token:
            s = replace(s, sending=False, next_send=now + timing.retry)
            return replace(state, phase=s), [e.Note(f"orderly end not recorded yet: {event.why}")]
        case e.Tick() if not s.sending and now >= s.next_send:
            return replace(state, phase=replace(s, sending=True)), [e.End(s.term, s.because)]
        case _:
            return state, []


def _stand_by(state: State, s: Ending, now: float, text: str) -> Step:
    return replace(state, phase=StandingBy(next_read=now)), [e.Note(text), e.Revoke(s.term.lease)]
