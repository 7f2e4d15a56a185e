"""The keeper's decisions about terms, deadlines and tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.keeper import term
from supervisor.keeper.term import Ledger, Refusal, Term

S = 1_000_000_000


def _error(decided: object) -> str | None:
    return decided.error if isinstance(decided, Refusal) else None


def test_a_term_is_armed_and_its_deadline_moves_on() -> None:
    ledger = term.arm(Ledger(), 5, 10 * S, now_ns=1 * S)
    assert ledger == Ledger(0, Term(5, 10 * S))
    assert isinstance(ledger, Ledger)
    assert term.arm(ledger, 5, 12 * S, now_ns=2 * S) == Ledger(0, Term(5, 12 * S))


@pytest.mark.parametrize(
    ("ledger", "token", "deadline", "error"),
    [
        (Ledger(over=5), 5, 10 * S, "over"),
        (Ledger(over=5), 4, 10 * S, "over"),
        (Ledger(term=Term(5, 10 * S)), 6, 20 * S, "other-term"),
        (Ledger(term=Term(5, 10 * S)), 5, 9 * S, "deadline"),
        (Ledger(term=Term(5, 1 * S)), 5, 9 * S, "over"),
        (Ledger(), 5, 2 * S, "deadline"),
    ],
)
def test_arming_is_refused(ledger: Ledger, token: int, deadline: int, error: str) -> None:
    assert _error(term.arm(ledger, token, deadline, now_ns=2 * S)) == error


@pytest.mark.parametrize(
    ("ledger", "token", "error"),
    [
        (Ledger(), 5, "no-term"),
        (Ledger(), None, "no-term"),
        (Ledger(over=5, term=Term(5, 9 * S, ending=True)), 5, "over"),
        (Ledger(over=5, term=Term(5, 9 * S, ending=True)), None, "over"),
        (Ledger(term=Term(5, 9 * S)), 4, "no-term"),
        (Ledger(term=Term(5, 9 * S)), 6, "no-term"),
        (Ledger(term=Term(5, 2 * S)), 5, "deadline"),
        (Ledger(term=Term(5, 2 * S)), None, "deadline"),
        (Ledger(term=Term(5, 9 * S)), 5, None),
        (Ledger(term=Term(5, 9 * S)), None, None),
    ],
)
def test_what_may_start(ledger: Ledger, token: int | None, error: str | None) -> None:
    assert _error(term.admit(ledger, token, now_ns=2 * S)) == error


def test_ending_frees_the_place_only_when_it_is_finished() -> None:
    ending = term.begin_end(Ledger(term=Term(5, 9 * S)), 5)
    assert ending == Ledger(5, Term(5, 9 * S, ending=True))
    assert isinstance(ending, Ledger)
    assert _error(term.arm(ending, 6, 9 * S, 1 * S)) == "other-term"
    assert term.finish_end(ending) == Ledger(5, None)
    assert _error(term.begin_end(Ledger(term=Term(5, 9 * S)), 6)) == "other-term"
    assert term.begin_end(Ledger(), 7) == Ledger(7, None)


def test_an_ending_waits_then_freezes_but_removes_whenever_it_is_empty() -> None:
    assert term.end_step(True, now_ns=1, by_ns=2) == "wait"
    assert term.end_step(True, now_ns=2, by_ns=2) == "freeze"
    assert term.end_step(False, now_ns=1, by_ns=2) == "remove"
    assert term.end_step(False, now_ns=3, by_ns=2) == "remove"


_steps = st.lists(st.tuples(st.sampled_from(["arm", "end", "finish", "fire"]), st.integers(1, 6), st.integers(0, 30)))


@given(_steps)
def test_a_token_that_is_over_is_never_admitted_again(steps: list[tuple[str, int, int]]) -> None:
    ledger, over = Ledger(), 0
    for now, (what, token, ahead) in enumerate(steps):
        if what == "arm":
            decided = term.arm(ledger, token, now + ahead, now)
        elif what == "end":
            decided = term.begin_end(ledger, token)
        elif what == "fire" and ledger.term is not None and term.switch_due(ledger, now):
            decided = term.begin_end(ledger, ledger.term.token)
        elif what == "finish" and ledger.term is not None and ledger.term.ending:
            decided = term.finish_end(ledger)
        else:
            continue
        ledger = decided if isinstance(decided, Ledger) else ledger
        assert ledger.over >= over
        over = ledger.over
        for candidate in range(1, over + 1):
            assert term.admit(ledger, candidate, now) is not None
        if term.admit(ledger, None, now) is None:
            assert ledger.term is not None
            assert ledger.term.token > over
            assert ledger.term.deadline_ns > now
