"""Decides who may act: (state, event, now) -> (state, actions). Pure; the simulation and the daemon run this very code.

    standing by --claim--> claiming --> holding --lost, given up--> fencing --all gone--> ending --> standing by
                              |            '--stand down (still refreshed), all gone--------^
                              '--refused, abandoned--> standing by

What it guarantees, given that the keeper ends the services at the acknowledged deadline: no two nodes run services of
one cluster at one instant. What it does not give: a bound on processes that survive SIGKILL, or on clocks that are
wrong by more than `Timing.clock_error`.
"""

from dataclasses import replace

from election import candidate, holder
from election import events as e
from election.phases import NEVER, Claiming, Ending, Fencing, Holding, Inputs, Left, StandingBy, State, Step
from election.timing import Timing

REVISION_EVERY = 60.0
"""Seconds between two writes of the store's revision to disk, at least."""


def step(state: State, event: e.Event, now: float, inputs: Inputs, timing: Timing) -> Step:
    """What follows from `event` at `now` (boot-time seconds). Total: what means nothing in a phase changes nothing."""
    if isinstance(event, e.StandDown) and event.leave:
        state = replace(state, leaving=True)
    noted: list[e.Action] = []
    if isinstance(event, e.Viewed):
        state, event, noted = _note(state, event, now, timing)
    state, actions = _dispatch(state, event, now, inputs, timing)
    if state.leaving and isinstance(state.phase, StandingBy):
        state = replace(state, phase=Left())
    return state, noted + actions


def _note(state: State, event: e.Viewed, now: float, timing: Timing) -> tuple[State, e.Event, list[e.Action]]:
    """What a node must not forget of a view. A revision below the last one means that the store was restored, since
    reads are linearizable and sent one after the other: the holder fences, and the old history proves no end to
    anybody (rule 21). What is on disk follows a TTL later: a restart before that finds the same."""
    view, noted = event.view, list[e.Action]()
    if view.term_mod > state.floor:
        state = replace(state, floor=view.term_mod)
        noted.append(e.NoteToken(view.term_mod))
    went_back = view.revision < state.revision
    if went_back:
        why = f"the store went back from revision {state.revision} to {view.revision}: was it restored from a backup?"
        state = replace(state, noted_at=now, distrusted=view.signature)
        noted.append(e.Alarm("history-went-back", why))
    elif now >= state.noted_at + max(timing.ttl, REVISION_EVERY):
        state = replace(state, noted_at=now)
        noted.append(e.NoteRevision(view.revision))
    state = replace(state, revision=view.revision)
    return state, e.FenceNow(why) if went_back and isinstance(state.phase, Holding) else event, noted


def _dispatch(state: State, event: e.Event, now: float, inputs: Inputs, timing: Timing) -> Step:
    match state.phase:
        case StandingBy() as phase if not state.leaving:
            return candidate.standing_by(state, phase, event, now, inputs, timing)
        case Claiming() as phase:
            return candidate.claiming(state, phase, event, now, timing)
        case Holding() as phase:
            return holder.holding(state, phase, event, now, inputs, timing)
        case Fencing() as phase:
            return holder.fencing(state, phase, event, now, timing)
        case Ending() as phase:
            return holder.ending(state, phase, event, now, timing)
        case _:
            return state, []


def authority_until(state: State, timing: Timing) -> float:
    """Until when (boot-time seconds) this node may act, as far as it knows; -inf where it may not."""
    return state.phase.t0 + timing.give_up if isinstance(state.phase, Holding) else -NEVER


def leads(state: State, now: float, timing: Timing) -> bool:
    """Holding and active, its token on record, its authority not run out: what `/leader` answers."""
    phase = state.phase
    return (
        isinstance(phase, Holding)
        and phase.stage == "active"
        and phase.recorded
        and now < authority_until(state, timing)
    )


def wake_at(state: State, timing: Timing) -> float:
    """The next moment (boot-time seconds) at which a `Tick` can change something."""
    match state.phase:
        case StandingBy() as s:
            claim = NEVER if s.stale else max(candidate.claim_at(s, state, timing)[0], s.next_claim)
            return min(NEVER if s.reading else s.next_read, claim)
        case Claiming(reading_back=True) as s:
            return min(s.next_read, s.t0 + timing.give_up)
        case Holding() as s:
            refresh = NEVER if s.refreshing else s.next_refresh
            read = NEVER if s.reading else s.next_read
            return min(refresh, read, s.suspect_until, s.t0 + timing.give_up)
        case Ending() as s:
            return NEVER if s.sending else s.next_send
        case _:
            return NEVER
