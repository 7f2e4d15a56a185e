"""What stands in the store: shapes, damage, and the guards of the three transactions."""

import json

import pytest

from election import record
from election.record import Keys, LeaderRecord, TermRecord
from election.store import Delete, Entry, LeaseIs, ModIs, Put, Snapshot
from tests.unit.machine_driver import leader_record, term_record

KEYS = Keys("prod")
LEADER, TERM = "/gpuward/prod/leader", "/gpuward/prod/term"


def shown(leader: bytes | None, term: bytes | None) -> record.View:
    entries = []
    if leader is not None:
        entries.append(Entry(LEADER, leader, 12, 70))
    if term is not None:
        entries.append(Entry(TERM, term, 5, 0))
    return record.view(Snapshot(tuple(entries), 20), KEYS)


def test_the_keys_are_those_that_are_documented() -> None:
    assert (KEYS.leader, KEYS.term) == (LEADER, TERM)
    assert KEYS.member("a") == "/gpuward/prod/members/a"
    assert KEYS.history(7) == "/gpuward/prod/history/7"


def test_the_fields_are_those_that_are_documented() -> None:
    assert list(json.loads(leader_record().to_json())) == (
        ["node", "instance", "token", "state", "since", "renewed_at", "nonce", "lease_ttl_s", "url", "version"]
    )
    assert list(json.loads(term_record().to_json())) == ["instance", "node", "ttl_s", "began", "ended", "because"]


def test_records_read_back_as_they_were_written() -> None:
    view = shown(leader_record("x").to_json(), term_record("x", ended="now").to_json())
    assert view.leader == leader_record("x")
    assert view.term == term_record("x", ended="now")
    assert (view.leader_mod, view.leader_lease, view.term_mod, view.revision) == (12, 70, 5, 20)
    assert view.damage == ()


def test_absent_keys_have_revision_zero_and_are_no_damage() -> None:
    view = shown(None, None)
    assert (view.leader, view.leader_mod, view.leader_lease, view.term, view.term_mod) == (None, 0, 0, None, 0)
    assert view.signature == (0, 0)
    assert view.damage == ()


def test_a_field_that_is_not_known_yet_is_ignored() -> None:
    value = json.loads(term_record().to_json()) | {"colour": "green"}
    assert shown(None, json.dumps(value).encode()).term == term_record()


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\xff\xfe",
        b"null",
        b"[]",
        b'"leader"',
        b"{}",
        b'{"instance": "x"',
        b"[" * 50_000,
        term_record().to_json().replace(b'"ttl_s":9', b'"ttl_s":"9"'),
        term_record().to_json().replace(b'"ttl_s":9', b'"ttl_s":0'),
        term_record().to_json().replace(b'"ttl_s":9', b'"ttl_s":999999999'),
        term_record().to_json().replace(b'"ttl_s":9', b'"ttl_s":NaN'),
        term_record().to_json().replace(b'"ended":null', b'"ended":true'),
        term_record().to_json().replace(b'"instance":"other"', b'"instance":""'),
    ],
)
def test_a_damaged_term_is_none_beside_its_revision_and_the_damage_names_key_and_value(value: bytes) -> None:
    view = shown(None, value)
    assert view.term is None
    assert view.signature == (0, 5)
    (text,) = view.damage
    assert text.startswith(f"{TERM} (mod_revision 5): ")
    assert len(text) < 700


def test_a_damaged_leader_keeps_its_revision_and_its_lease() -> None:
    view = shown(b"garbage", term_record().to_json())
    assert (view.leader, view.leader_mod, view.leader_lease) == (None, 12, 70)
    assert view.term == term_record()
    assert "garbage" in view.damage[0]


def test_the_claim_is_guarded_by_all_that_was_read_and_only_the_leader_key_hangs_on_the_lease() -> None:
    """Rules 8 and 12."""
    leader, term = leader_record("me"), term_record("me")
    txn = record.claim(KEYS, (12, 5, 3, 0), leader, term, lease=7)
    assert txn.guards == (ModIs(LEADER, 12), ModIs(TERM, 5), ModIs(KEYS.settings, 3), ModIs(KEYS.switchover, 0))
    puts = (Put(LEADER, leader.to_json(), 7), Put(TERM, term.to_json(), 0))
    assert txn.operations == (*puts, Delete(KEYS.switchover))


def test_the_refresh_is_guarded_by_our_lease_and_leaves_the_term_alone() -> None:
    """Rules 3 and 6: the term's revision is the token, so no refresh may touch it."""
    txn = record.refresh(KEYS, leader_record("me"), lease=7)
    assert txn.guards == (LeaseIs(LEADER, 7),)
    assert txn.operations == (Put(LEADER, leader_record("me").to_json(), 7),)


def test_the_orderly_end_is_guarded_by_our_token_and_deletes_the_leader_key_whatever_it_holds() -> None:
    """Rule 11."""
    txn = record.end(KEYS, 5, term_record("me", ended="now"))
    assert txn.guards == (ModIs(TERM, 5),)
    assert txn.operations == (Delete(LEADER), Put(TERM, term_record("me", ended="now").to_json(), 0))


def test_time_stamps_read_back() -> None:
    assert record.timestamp(1_800_000_000.25) == "2027-01-15T08:00:00.250Z"
    assert record.parse_timestamp(record.timestamp(1_800_000_000.25)) == 1_800_000_000.25
    with pytest.raises(ValueError, match="soon"):
        record.parse_timestamp("soon")


def test_records_carry_no_command_environment_path_or_user() -> None:
    fields = {*LeaderRecord.model_fields, *TermRecord.model_fields}
    assert not fields & {"command", "cmd", "argv", "env", "environment", "path", "cwd", "user", "uid", "pid"}
