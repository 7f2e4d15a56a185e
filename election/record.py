"""What stands in the store: keys, records, and the transactions that change them.

Everything below `/gpuward/<cluster>/` is a supported interface for `etcdctl get --prefix`: every value is a JSON
object, and field names change only with a major version. Nothing here ever carries a command, an environment, a path or
a user.
"""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from election.store import Delete, Entry, LeaseIs, ModIs, Put, Snapshot, Txn

LeaderState = Literal["taking-over", "active", "standing-down"]
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
    """Leader key and term key as one linearizable read found them. A record that cannot be read is None beside a
    mod_revision > 0: it counts as a record that does not change (rule 8b), and `damage` says what is wrong."""

    leader: LeaderRecord | None
    leader_mod: int
    """0: absent."""
    leader_lease: int
    term: TermRecord | None
    term_mod: int
    revision: int
    damage: tuple[str, ...] = ()

    @property
    def signature(self) -> tuple[int, int]:
        """Differs whenever either key was written, deleted or made in between."""
        return (self.leader_mod, self.term_mod)


def view(snapshot: Snapshot, keys: Keys) -> View:
    """Both keys, parsed."""
    leader, term = snapshot.get(keys.leader), snapshot.get(keys.term)
    damage: list[str] = []
    return View(
        leader=_parse(leader, LeaderRecord, damage),
        leader_mod=leader.mod_revision if leader else 0,
        leader_lease=leader.lease if leader else 0,
        term=_parse(term, TermRecord, damage),
        term_mod=term.mod_revision if term else 0,
        revision=snapshot.revision,
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


def claim(keys: Keys, seen: tuple[int, int], leader: LeaderRecord, term: TermRecord, lease: int) -> Txn:
    """Guarded by both mod_revisions of the one read that allowed it (rule 8)."""
    return Txn(
        guards=(ModIs(keys.leader, seen[0]), ModIs(keys.term, seen[1])),
        operations=(Put(keys.leader, leader.to_json(), lease), Put(keys.term, term.to_json())),
    )


def refresh(keys: Keys, leader: LeaderRecord, lease: int) -> Txn:
    """Guarded by "the key is attached to our lease" (rule 3)."""
    return Txn(guards=(LeaseIs(keys.leader, lease),), operations=(Put(keys.leader, leader.to_json(), lease),))


def end(keys: Keys, token: int, term: TermRecord) -> Txn:
    """The orderly end (rule 11), guarded by the term still being ours; deletes the leader key, whatever it holds."""
    return Txn(guards=(ModIs(keys.term, token),), operations=(Delete(keys.leader), Put(keys.term, term.to_json())))
