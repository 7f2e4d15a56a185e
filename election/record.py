"""What stands in the store: keys, records, and the transactions that change them.

Everything below `/gpuward/<cluster>/` is a supported interface for `etcdctl get --prefix`: every value is a JSON
object, and field names change only with a major version. Nothing here ever carries a command, an environment, a path or
a user.
"""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from election.store import Delete, Entry, LeaseIs, ModIs, Put, Snapshot, Txn

LeaderState = Literal["taking-over", "active", "standing-down"]
LONGEST_REASON = 500
"""Characters of what an operator gives as a reason."""
LONGEST_TTL = 86_400
"""Seconds. A `ttl_s` above a day is taken for damage, not for a wish."""

Name = Annotated[str, StringConstraints(min_length=1, max_length=255)]


def timestamp(wall: float) -> str:
    """Wall-clock seconds as people read them: UTC, milliseconds. For display only."""
    return datetime.fromtimestamp(wall, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def parse_timestamp(text: str) -> float:
    """The inverse of `timestamp`; raises ValueError."""
    return datetime.fromisoformat(text).timestamp()


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    def to_json(self) -> bytes:
        return self.model_dump_json().encode()


_R = TypeVar("_R", bound=_Record)


class LeaderRecord(_Record):
    """Under the holder's lease. Rewritten by every refresh."""

    node: Name
    instance: Name
    token: int | None
    """The fencing token; null from the claim to the first refresh, since the claim cannot know it."""
    state: LeaderState
    since: str
    renewed_at: str
    nonce: str
    """A new one each time: by it a refresh whose answer was lost is recognised (rule 3)."""
    lease_ttl_s: int
    url: str
    version: str


class TermRecord(_Record):
    """Under no lease. Written only at the claim and at the orderly end, so its mod_revision is the fencing token."""

    instance: Name
    node: Name
    ttl_s: Annotated[int, Field(ge=1, le=LONGEST_TTL)]
    began: str
    ended: str | None = None
    because: str | None = None


class Mark(_Record):
    """Who asked for something, and when."""

    since: str
    on: Name
    """The node on which it was asked for."""
    because: Annotated[str, Field(max_length=LONGEST_REASON)] = ""


class SettingsRecord(_Record):
    """What operators have asked of the whole cluster."""

    paused: Mark | None = None
    """Nobody claims; who holds the lock goes on."""
    excluded: dict[Name, Mark] = {}
    """Nodes that do not claim."""


class SwitchoverRecord(_Record):
    """A request to pass the lock on to one node. The claim that follows deletes it."""

    target: Name
    instance: Name
    """Of the term that is to end: the request means nothing to a later one."""
    hold_back_s: Annotated[float, Field(ge=0, le=60)]
    """For so long after the end the others leave the claim to the target."""
    asked: str
    on: Name
    refused: str | None = None
    """Why the holder did not do it: then it is over."""


@dataclass(frozen=True)
class Keys:
    """The keys of one cluster."""

    cluster: str

    @property
    def prefix(self) -> str:
        return f"/gpuward/{self.cluster}/"

    @property
    def leader(self) -> str:
        return self.prefix + "leader"

    @property
    def term(self) -> str:
        return self.prefix + "term"

    @property
    def settings(self) -> str:
        return self.prefix + "config"

    @property
    def switchover(self) -> str:
        return self.prefix + "switchover"

    @property
    def read(self) -> list[str]:
        """What the machine looks at, in one transaction."""
        return [self.leader, self.term, self.settings, self.switchover]

    @property
    def members(self) -> str:
        return self.prefix + "members/"

    def member(self, node: str) -> str:
        return self.members + node

    @property
    def histories(self) -> str:
        return self.prefix + "history/"

    def history(self, token: int) -> str:
        return f"{self.histories}{token}"


@dataclass(frozen=True)
class View:
    """What one linearizable read found. A leader or term record that cannot be read is None beside a mod_revision > 0:
    it counts as a record that does not change (rule 8b). Settings or a switchover that cannot be read count as none.
    `damage` says what is wrong."""

    leader: LeaderRecord | None
    leader_mod: int
    """0: absent."""
    leader_lease: int
    term: TermRecord | None
    term_mod: int
    revision: int
    damage: tuple[str, ...] = ()
    settings: SettingsRecord = field(default_factory=SettingsRecord)
    settings_mod: int = 0
    switchover: SwitchoverRecord | None = None
    switchover_mod: int = 0

    @property
    def signature(self) -> tuple[int, int]:
        """Differs whenever leader key or term key was written, deleted or made in between."""
        return (self.leader_mod, self.term_mod)

    @property
    def versions(self) -> tuple[int, int, int, int]:
        """The same for all keys of `Keys.read`, in its order."""
        return (self.leader_mod, self.term_mod, self.settings_mod, self.switchover_mod)

    @property
    def pending(self) -> SwitchoverRecord | None:
        """A request to pass on the term that stands there."""
        asked = self.switchover
        if asked is None or asked.refused is not None or self.term is None or asked.instance != self.term.instance:
            return None
        return asked


def view(snapshot: Snapshot, keys: Keys) -> View:
    """All of `Keys.read`, parsed."""
    leader, term = snapshot.get(keys.leader), snapshot.get(keys.term)
    settings, switchover = snapshot.get(keys.settings), snapshot.get(keys.switchover)
    damage: list[str] = []
    return View(
        leader=_parse(leader, LeaderRecord, damage),
        leader_mod=leader.mod_revision if leader else 0,
        leader_lease=leader.lease if leader else 0,
        term=_parse(term, TermRecord, damage),
        term_mod=term.mod_revision if term else 0,
        revision=snapshot.revision,
        settings=_parse(settings, SettingsRecord, damage) or SettingsRecord(),
        settings_mod=settings.mod_revision if settings else 0,
        switchover=_parse(switchover, SwitchoverRecord, damage),
        switchover_mod=switchover.mod_revision if switchover else 0,
        damage=tuple(damage),
    )


def _parse(entry: Entry | None, kind: type[_R], damage: list[str]) -> _R | None:
    if entry is None:
        return None
    try:
        return kind.model_validate_json(entry.value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the whole value"
        damage.append(
            f"{entry.key} (mod_revision {entry.mod_revision}): {where}: {first['msg']}; found "
            f"{entry.value[:80].decode('utf-8', 'backslashreplace')!r}"
        )
        return None


def claim(keys: Keys, seen: tuple[int, int, int, int], leader: LeaderRecord, term: TermRecord, lease: int) -> Txn:
    """Guarded by the mod_revisions of the one read that allowed it (rule 8), operators' words included: a pause that
    has been answered stops it. A request to switch over ends with it (rule 12)."""
    return Txn(
        guards=tuple(ModIs(key, mod) for key, mod in zip(keys.read, seen, strict=True)),
        operations=(
            Put(keys.leader, leader.to_json(), lease),
            Put(keys.term, term.to_json()),
            Delete(keys.switchover),
        ),
    )


def refresh(keys: Keys, leader: LeaderRecord, lease: int) -> Txn:
    """Guarded by "the key is attached to our lease" (rule 3)."""
    return Txn(guards=(LeaseIs(keys.leader, lease),), operations=(Put(keys.leader, leader.to_json(), lease),))


def refuse(keys: Keys, switchover_mod: int, asked: SwitchoverRecord, why: str) -> Txn:
    """The holder's answer to a request that it does not carry out."""
    refused = asked.model_copy(update={"refused": why})
    return Txn((ModIs(keys.switchover, switchover_mod),), (Put(keys.switchover, refused.to_json()),))


def end(keys: Keys, token: int, term: TermRecord) -> Txn:
    """The orderly end (rule 11), guarded by the term still being ours; deletes the leader key, whatever it holds."""
    return Txn(guards=(ModIs(keys.term, token),), operations=(Delete(keys.leader), Put(keys.term, term.to_json())))
