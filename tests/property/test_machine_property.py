"""The election machine under any events in any order: total, and true to its two hardest promises."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from election import events as e
from election import machine
from election.phases import GONE_KEPT, HEARD_KEPT, NEVER, Claiming, Holding, Inputs, StandingBy, State
from election.record import View
from election.store import ErrorClass
from election.timing import Timing
from tests.unit.machine_driver import view

TIMING = Timing(9)
SMALL = st.integers(0, 4)
TIMES = st.floats(0, 60)
INSTANCES = st.sampled_from(["id1", "id2", "id3", "other"])
NONCES = st.sampled_from(["id1", "id2", "id3", "n0"])
WHY = st.just("as told")
TERMS = st.builds(e.Term, INSTANCES, SMALL, SMALL)


@st.composite
def views(draw: st.DrawFn) -> View:
    shown = view(
        draw(SMALL),
        draw(SMALL),
        instance=draw(INSTANCES),
        nonce=draw(NONCES),
        lease=draw(SMALL),
        ended=draw(st.sampled_from([None, "now"])),
        ttl_s=draw(st.sampled_from([6, 9, 20])),
        revision=draw(SMALL),
    )
    return draw(st.sampled_from([shown, replace(shown, leader=None), replace(shown, term=None, damage=("damaged",))]))


EVENTS: st.SearchStrategy[e.Event] = st.one_of(
    st.builds(e.Tick),
    st.builds(e.Viewed, views(), TIMES),
    st.builds(e.ReadFailed, WHY, TIMES),
    st.builds(e.Heard, st.booleans(), SMALL, st.booleans(), SMALL, st.one_of(st.none(), SMALL)),
    st.builds(e.Gap),
    st.builds(e.Claimed, TERMS, TIMES),
    st.builds(e.ClaimFailed, INSTANCES, SMALL, TIMES, st.sampled_from(["refused", "not sent", "ambiguous"]), WHY),
    st.builds(e.Refreshed, NONCES, TIMES),
    st.builds(e.RefreshFailed, NONCES, TIMES, st.sampled_from(ErrorClass), WHY),
    st.builds(e.Armed, SMALL, TIMES),
    st.builds(e.ArmFailed, SMALL, WHY),
    st.builds(e.TookOver, SMALL),
    st.builds(e.TakeOverFailed, SMALL, WHY),
    st.builds(e.Gone, SMALL),
    st.builds(e.Ended, SMALL, st.booleans()),
    st.builds(e.EndFailed, SMALL, WHY),
    st.builds(e.Suspect, WHY),
    st.builds(e.StandDown, WHY, st.booleans()),
    st.builds(e.FenceNow, WHY),
)
STARTS = st.one_of(
    st.just(State(StandingBy())),
    st.builds(lambda term, t0: State(Holding(term, t0, claimed_at=t0), floor=term.token), TERMS, st.floats(0, 5)),
    st.builds(lambda instance: State(Claiming(instance, StandingBy())), INSTANCES),
)
STEPS = st.lists(st.tuples(EVENTS, st.floats(0, 3), st.booleans(), st.booleans()), max_size=40)


@settings(max_examples=400, deadline=None)
@given(STARTS, STEPS)
def test_any_events_in_any_order_lead_somewhere_and_to_nothing_forbidden(
    state: State, steps: list[tuple[e.Event, float, bool, bool]]
) -> None:
    """No TakeOver but in answer to Armed of that very token, no Claim while unfit, no Refresh while not alive, no End
    before Gone, and a state whose size does not grow with what happens."""
    now = 0.0
    failures = 0
    for number, (event, later, fit, alive) in enumerate(steps):
        now += later
        failures += isinstance(event, e.RefreshFailed)
        before = state
        state, actions = machine.step(state, event, now, Inputs(fit, alive, f"id{number % 4}"), TIMING)
        assert state.floor >= before.floor
        for action in actions:
            _allowed(action, event, before, now, fit=fit, alive=alive)
        assert machine.wake_at(state, TIMING) <= NEVER
        _bounded(state, failures)


def _allowed(action: e.Action, event: e.Event, before: State, now: float, *, fit: bool, alive: bool) -> None:
    match action:
        case e.TakeOver(term):
            assert isinstance(event, e.Armed)
            assert event.token == term.token
            assert isinstance(before.phase, Holding)
            assert now < before.phase.t0 + TIMING.give_up
        case e.Claim():
            assert fit
            assert not before.leaving
        case e.Refresh():
            assert alive
        case e.End(term) if isinstance(before.phase, Holding):
            assert event == e.Gone(term.token)
            assert before.phase.stage == "standing-down"
        case e.Arm(_, deadline):
            assert deadline > now


def _bounded(state: State, failures: int) -> None:
    assert len(state.gone) <= GONE_KEPT
    phase = state.phase
    if isinstance(phase, Claiming):
        phase = phase.before
    if isinstance(phase, StandingBy):
        assert len(phase.heard) <= HEARD_KEPT
        assert len(phase.told) <= 2
    if isinstance(phase, Holding):
        assert len(phase.unanswered) <= failures


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["lost answer", "refreshed", "read back"]), st.floats(0, 0.5)), max_size=60))
def test_attempts_without_an_answer_do_not_pile_up(steps: list[tuple[str, float]]) -> None:
    """As many as fit between two confirmed ones, at one per `retry`."""
    state, now = State(Holding(e.Term("me", 2, 7), 0.0, claimed_at=0.0, armed=True), floor=2), 0.0
    for number, (outcome, later) in enumerate(steps):
        now += later
        state, actions = machine.step(state, e.Tick(), now, Inputs(True, True, f"n{number}"), TIMING)
        for action in actions:
            if isinstance(action, e.Refresh):
                answer: e.Event = e.Refreshed(action.nonce, action.t0)
                if outcome != "refreshed":
                    answer = e.RefreshFailed(action.nonce, action.t0, ErrorClass.TRANSIENT, "")
                state, _ = machine.step(state, answer, now, Inputs(True, True, "x"), TIMING)
                if outcome == "read back":
                    shown = view(3, 2, instance="me", lease=7, nonce=action.nonce)
                    state, _ = machine.step(state, e.Viewed(shown, now), now, Inputs(True, True, "y"), TIMING)
        if isinstance(state.phase, Holding):
            assert len(state.phase.unanswered) <= TIMING.give_up / TIMING.retry
