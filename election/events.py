"""What the machine is told (events) and what it wants done (actions).

An action that names a call (`Read`, `Claim`, `Refresh`, `Arm`, `End`) is answered by exactly one event. `now`
in `machine.step` is the moment at which the event arrived; times inside events are taken before the send (rule 2).
"""

from dataclasses import dataclass
from typing import Literal

from election.record import LeaderState, SwitchoverRecord, View
from election.store import ErrorClass


@dataclass(frozen=True)
class Term:
    """One term of ours, from the claim to the orderly end."""

    instance: str
    token: int
    lease: int
    began: str = ""
    """Wall-clock time of the claim, for display."""


# --- events


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True)
class Viewed:
    """A read was answered."""

    view: View
    sent_at: float
    target: "Target | None" = None
    """What the target of a pending switchover says of itself; None: not looked at."""


@dataclass(frozen=True)
class Target:
    """The node that is to take the lock over, by its member record."""

    ready: bool
    """It could lead, and has said so of this very request."""
    unfit: str
    """Why it could not; empty: it could, or has not answered yet."""


@dataclass(frozen=True)
class ReadFailed:
    why: str
    sent_at: float


@dataclass(frozen=True)
class Heard:
    """The watch told of a change of the leader key or the term key."""

    is_leader: bool
    mod_revision: int
    deleted: bool
    lease: int
    previous_mod_revision: int | None


@dataclass(frozen=True)
class Changed:
    """The watch told of a change of another key that matters here: an operator's word, or the target's answer to it."""


@dataclass(frozen=True)
class Gap:
    """The watch began, or began again: changes may have gone unheard."""


@dataclass(frozen=True)
class Claimed:
    """The claim was applied; `t0` was taken before it was sent."""

    term: Term
    t0: float


@dataclass(frozen=True)
class ClaimFailed:
    instance: str
    lease: int
    """0: none was granted."""
    t0: float
    outcome: Literal["refused", "not sent", "ambiguous"]
    """Ambiguous: it may have been applied, or may be yet."""
    why: str


@dataclass(frozen=True)
class Refreshed:
    """One attempt, both calls, succeeded."""

    nonce: str
    t0: float


@dataclass(frozen=True)
class RefreshFailed:
    nonce: str
    t0: float
    kind: ErrorClass
    """LOST also for a failed compare."""
    why: str


@dataclass(frozen=True)
class Armed:
    """The keeper acknowledged this deadline."""

    token: int
    deadline: float


@dataclass(frozen=True)
class ArmFailed:
    token: int
    why: str


@dataclass(frozen=True)
class TookOver:
    token: int


@dataclass(frozen=True)
class TakeOverFailed:
    token: int
    why: str


@dataclass(frozen=True)
class Gone:
    """Every process of the term has ended (or has SIGKILL pending and is frozen), its cgroup is removed or barred."""

    token: int
    proven: bool = True
    """False: it cannot be shown (weak containment whose keeper died), so no orderly end may be recorded."""


@dataclass(frozen=True)
class Ended:
    """The orderly end is on record, or the term key is no longer ours (`overtaken`)."""

    token: int
    overtaken: bool


@dataclass(frozen=True)
class EndFailed:
    token: int
    why: str


@dataclass(frozen=True)
class Suspect:
    """The clock stepped or the loop overslept (rule 18): what we believe may be old."""

    why: str


@dataclass(frozen=True)
class StandDown:
    """Give the term up in good order; with `leave`, take no other."""

    because: str
    leave: bool = False


@dataclass(frozen=True)
class FenceNow:
    """The term cannot be kept safe, say because the keeper is gone: no grace."""

    why: str


Event = (
    Tick
    | Viewed
    | ReadFailed
    | Heard
    | Changed
    | Gap
    | Claimed
    | ClaimFailed
    | Refreshed
    | RefreshFailed
    | Armed
    | ArmFailed
    | TookOver
    | TakeOverFailed
    | Gone
    | Ended
    | EndFailed
    | Suspect
    | StandDown
    | FenceNow
)

# --- actions


@dataclass(frozen=True)
class Read:
    """All of `record.Keys.read`, in one transaction."""


@dataclass(frozen=True)
class Claim:
    """Grant a lease, write the instance to the journal, then claim, guarded by what `seen` saw."""

    instance: str
    seen: tuple[int, int, int, int]
    """`View.versions`."""
    why: str


@dataclass(frozen=True)
class Refresh:
    """Keepalive and guarded rewrite under one deadline, t0 + attempt."""

    term: Term
    nonce: str
    t0: float
    stage: LeaderState


@dataclass(frozen=True)
class Arm:
    """The keeper's switch: start it or move it on."""

    term: Term
    deadline: float


@dataclass(frozen=True)
class TakeOver:
    term: Term
    resumed: bool = False
    """It goes on from an earlier run of this supervisor: what runs is adopted, not started (rule 15)."""


@dataclass(frozen=True)
class EndServices:
    """SIGTERM, each service's stop_timeout, SIGKILL; then the term's cgroup and the lock files are removed. `kill_at`
    (absolute) cuts every stop_timeout short; None: no authority is at stake. It may come again, with an earlier one."""

    term: Term
    kill_at: float | None
    why: str


@dataclass(frozen=True)
class End:
    """Write "end begun", then the orderly end."""

    term: Term
    because: str


@dataclass(frozen=True)
class Revoke:
    lease: int


@dataclass(frozen=True)
class NoteToken:
    """Keep the highest token ever seen on disk (rule 6)."""

    token: int


@dataclass(frozen=True)
class NoteRevision:
    """Keep the store's revision on disk, to know a restored store by (rule 21)."""

    revision: int


@dataclass(frozen=True)
class RefuseSwitchover:
    """Answer a request that is not carried out."""

    asked: SwitchoverRecord
    switchover_mod: int
    why: str


@dataclass(frozen=True)
class Alarm:
    kind: str
    text: str


@dataclass(frozen=True)
class Note:
    """One line for the log and the status."""

    text: str


Action = (
    Read
    | Claim
    | Refresh
    | Arm
    | TakeOver
    | EndServices
    | End
    | Revoke
    | NoteToken
    | NoteRevision
    | RefuseSwitchover
    | Alarm
    | Note
)
