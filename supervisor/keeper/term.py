"""Who may start what, and until when: pure decisions over (token, deadline, now). No clock, no process.

A term is armed by its fencing token with an absolute deadline. Tokens only rise. Once a term ends (asked for, or by
the switch at its deadline) its token is over for good, with every lower one, also for the next keeper (rule 16).
"""

from typing import NamedTuple


class Term(NamedTuple):
    """The term that may run now, or that is being ended."""

    token: int
    deadline_ns: int
    ending: bool = False


class Ledger(NamedTuple):
    """All that decides: the highest token that is over, and the present term."""

    over: int = 0
    term: Term | None = None


class Refusal(NamedTuple):
    """Why not. `error` is the word of the protocol, `message` is for people."""

    error: str
    message: str


def arm(ledger: Ledger, token: int, deadline_ns: int, now_ns: int) -> Ledger | Refusal:
    """Start a term, or move the deadline of the armed one on; never back."""
    term = ledger.term
    if token <= ledger.over:
        return Refusal("over", f"token {token} is over, and so is every one up to {ledger.over}")
    if term is not None and term.token != token:
        return Refusal("other-term", f"term {term.token} is {'ending' if term.ending else 'armed'}")
    if deadline_ns <= now_ns:
        return Refusal("deadline", f"the deadline passed {(now_ns - deadline_ns) / 1e9:.3f} s ago")
    if term is not None and term.deadline_ns <= now_ns:
        return Refusal("over", f"the deadline of term {token} has passed; its switch is due")
    if term is not None and deadline_ns < term.deadline_ns:
        return Refusal("deadline", f"{(term.deadline_ns - deadline_ns) / 1e9:.3f} s before the present one")
    return ledger._replace(term=Term(token, deadline_ns))


def admit(ledger: Ledger, token: int | None, now_ns: int) -> Refusal | None:
    """May a process be started (token given), or a job enter (token None: whatever term is armed), now?"""
    term = ledger.term
    if token is not None and token <= ledger.over:
        return Refusal("over", f"token {token} is over, and so is every one up to {ledger.over}")
    if term is None:
        return Refusal("no-term", "this node does not lead: no term is armed")
    if token is not None and token != term.token:
        return Refusal("no-term", f"term {term.token} is armed, not {token}")
    if term.ending:
        return Refusal("over", f"term {term.token} is ending")
    if term.deadline_ns <= now_ns:
        return Refusal("deadline", f"the deadline passed {(now_ns - term.deadline_ns) / 1e9:.3f} s ago")
    return None


def switch_due(ledger: Ledger, now_ns: int) -> bool:
    """Must the switch fire now?"""
    term = ledger.term
    return term is not None and not term.ending and term.deadline_ns <= now_ns


def begin_end(ledger: Ledger, token: int) -> Ledger | Refusal:
    """The term ends: from here on its token is over. A token that was never armed is over by this too."""
    term = ledger.term
    if term is not None and term.token != token:
        if token <= ledger.over:
            return ledger
        return Refusal("other-term", f"term {term.token} is armed, not {token}")
    return Ledger(over=max(ledger.over, token), term=None if term is None else term._replace(ending=True))


def finish_end(ledger: Ledger) -> Ledger:
    """Nothing of the term is left that could do anything."""
    return ledger._replace(term=None)


def end_step(populated: bool, now_ns: int, by_ns: int) -> str:
    """What the ending of a term does next: `remove`, `wait`, or, at `by_ns`, `freeze` (rule 11).

    `freeze`: what is left is frozen and named, and the term is over all the same.
    """
    if not populated:
        return "remove"
    return "wait" if now_ns < by_ns else "freeze"
