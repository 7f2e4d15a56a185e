"""The phases of the election machine: plain frozen values. `election.machine` has the picture."""

from dataclasses import dataclass, replace

from election import events as e
from election.record import LeaderState, View

NEVER = float("inf")
GONE_KEPT = 32
"""Instances of our own remembered as gone; only the last one can still stand in the term key."""
HEARD_KEPT = 16
"""Changes remembered between two reads; more are simply read anew, which only makes the wait longer."""


@dataclass(frozen=True)
class Inputs:
    """What the node says of itself at the moment of a decision."""

    fit: bool
    """May claim (rule 12)."""
    alive: bool
    """Main loop, watchdog and service monitor have shown life (rule 4)."""
    fresh_id: str
    """Never used before: becomes the instance of a claim, or the nonce of a refresh."""


@dataclass(frozen=True)
class Watched:
    """A standby's view of both keys, and since when it stands (rule 8b)."""

    view: View
    unchanged_since: float
    """Arrival of the first reply or event that showed this version of both keys."""


@dataclass(frozen=True)
class StandingBy:
    watched: Watched | None = None
    reading: bool = False
    stale: bool = False
    """Something was heard since the last read was sent: no claim on what it shows."""
    next_read: float = 0.0
    next_claim: float = 0.0
    heard: tuple[tuple[int, float], ...] = ()
    """(mod_revision, arrival) of writes heard by the watch."""
    vanished: int = 0
    """The version of the leader key that a heard deletion removed."""
    told: tuple[str, ...] = ()
    """Alarms already raised about this view."""


@dataclass(frozen=True)
class Claiming:
    instance: str
    before: StandingBy
    """To go back to, if it comes to nothing: the wait goes on from where it was."""
    lease: int = 0
    t0: float = 0.0
    reading_back: bool = False
    next_read: float = NEVER


@dataclass(frozen=True)
class Holding:
    term: e.Term
    t0: float
    """Taken before the last successful refresh was sent; every deadline counts from it."""
    claimed_at: float
    """Taken before the claim was sent: no answer to an older read says anything about this term."""
    stage: LeaderState = "taking-over"
    because: str = ""
    """Of the standing down."""
    resumed: bool = False
    """An earlier run of this supervisor began it."""
    armed: bool = False
    """The keeper has acknowledged a deadline of this term."""
    refreshing: bool = False
    recorded: bool = False
    """A refresh has written the token into the leader record."""
    next_refresh: float = 0.0
    asked: tuple[int, float] | None = None
    """(mod_revision, since when it is known) of a request to switch over."""
    unanswered: tuple[tuple[str, float], ...] = ()
    """(nonce, t0) of attempts without an answer: one of them read back confirms it (rule 3)."""
    reading: bool = False
    read_again: bool = False
    next_read: float = 0.0
    suspect_since: float = NEVER
    suspect_until: float = NEVER


@dataclass(frozen=True)
class Fencing:
    term: e.Term
    why: str


@dataclass(frozen=True)
class Ending:
    term: e.Term
    because: str
    until: float
    sending: bool = False
    next_send: float = 0.0


@dataclass(frozen=True)
class Left:
    """Stood down for good."""


Phase = StandingBy | Claiming | Holding | Fencing | Ending | Left


@dataclass(frozen=True)
class State:
    phase: Phase
    floor: int = 0
    """Highest token ever seen; nobody claims or starts below it (rule 6)."""
    node: str = ""
    """This one."""
    claim_delay: float = 0.0
    """Seconds by which it claims later than it could, for nodes of a higher priority (rule 12)."""
    revision: int = 0
    """The store's, as the last read showed it: a lower one means that it was restored (rule 21)."""
    noted_at: float = NEVER
    """When the revision was last kept on disk; NEVER: nobody keeps it."""
    distrusted: tuple[int, int] | None = None
    """`View.signature` that a restored store showed: it proves no end."""
    gone: tuple[str, ...] = ()
    """The latest instances of this node's own journal; nothing of them can run any more (rule 8c)."""
    leaving: bool = False

    def without(self, instance: str) -> "State":
        """The same with one more instance that is gone."""
        return replace(self, gone=(*self.gone, instance)[-GONE_KEPT:])


Step = tuple[State, list[e.Action]]
"""What one event leads to."""
