"""etcd's JSON gateway on the wire: our requests as its JSON, its JSON as our results. Pure.

Keys and values are base64, int64 are strings, and zero values are left out (protobuf's JSON mapping; etcd
`api/etcdserverpb/rpc.proto`). Whatever does not have the expected form raises `MalformedError`.
"""

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from typing import Any

from election.store import Change, Committed, Delete, Entry, Granted, LeaseIs, ModIs, Put, Snapshot, Txn

type_names = {dict: "an object", list: "a list", bool: "true or false"}


class MalformedError(Exception):
    """What came back is not what etcd would say; the text names the field."""


def encode(data: bytes) -> str:
    return base64.b64encode(data).decode()


def range_end(prefix: bytes) -> bytes:
    """The first key after all that begin with `prefix` (etcd clientv3 `GetPrefixRangeEnd`)."""
    stripped = prefix.rstrip(b"\xff")
    return stripped[:-1] + bytes([stripped[-1] + 1]) if stripped else b"\0"


def key_range(key: str, prefix: bool) -> dict[str, Any]:
    raw = key.encode()
    return {"key": encode(raw), **({"range_end": encode(range_end(raw))} if prefix else {})}


def read_request(keys: Sequence[str], prefix: bool) -> dict[str, Any]:
    """One transaction of linearizable ranges: every key at the same revision."""
    return {"success": [{"request_range": key_range(key, prefix)} for key in keys]}


def txn_request(txn: Txn) -> dict[str, Any]:
    return {
        "compare": [compare for guard in txn.guards for compare in _compares(guard)],
        "success": [_operation(operation) for operation in txn.operations],
    }


def _compares(guard: ModIs | LeaseIs) -> list[dict[str, Any]]:
    key = encode(guard.key.encode())
    if isinstance(guard, ModIs):
        return [{"key": key, "target": "MOD", "result": "EQUAL", "mod_revision": str(guard.mod_revision)}]
    # An absent key compares like one with lease 0, so its presence is a compare of its own.
    return [
        {"key": key, "target": "CREATE", "result": "GREATER", "create_revision": "0"},
        {"key": key, "target": "LEASE", "result": "EQUAL", "lease": str(guard.lease)},
    ]


def _operation(operation: Put | Delete) -> dict[str, Any]:
    key = encode(operation.key.encode())
    if isinstance(operation, Delete):
        return {"request_delete_range": {"key": key}}
    return {"request_put": {"key": key, "value": encode(operation.value), "lease": str(operation.lease)}}


def watch_request(prefix: str, start_revision: int) -> dict[str, Any]:
    """`start_revision` 0: from now on."""
    created = {**key_range(prefix, True), "prev_kv": True, "progress_notify": True}
    return {"create_request": {**created, "start_revision": str(start_revision)}}


def document(raw: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(raw)
    except ValueError as error:
        raise MalformedError(f"not JSON: {raw[:80]!r}") from error
    if not isinstance(parsed, dict):
        raise MalformedError(f"found {str(parsed)[:80]}, expected an object")
    return parsed


def number(fields: Mapping[str, Any], name: str) -> int:
    """An int64, as string or number; 0 where it is left out."""
    value = fields.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise MalformedError(f"{name}: found {str(value)[:80]}, expected a number")
    try:
        return int(value)
    except ValueError as error:
        raise MalformedError(f"{name}: found {str(value)[:80]!r}, expected a number") from error


def _part(fields: Mapping[str, Any], name: str, kind: type[Any]) -> Any:
    value = fields.get(name, kind())
    if not isinstance(value, kind):
        raise MalformedError(f"{name}: found {str(value)[:80]}, expected {type_names[kind]}")
    return value


def part(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    """An object; empty where it is left out."""
    value: dict[str, Any] = _part(fields, name, dict)
    return value


def parts(fields: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """A list of objects; empty where it is left out."""
    values: list[Any] = _part(fields, name, list)
    for value in values:
        if not isinstance(value, dict):
            raise MalformedError(f"{name}: found {str(value)[:80]}, expected objects in the list")
    return values


def flag(fields: Mapping[str, Any], name: str) -> bool:
    return bool(_part(fields, name, bool))


def _data(fields: Mapping[str, Any], name: str) -> bytes:
    value = fields.get(name, "")
    try:
        return base64.b64decode(value, validate=True)
    except (TypeError, ValueError, binascii.Error) as error:
        raise MalformedError(f"{name}: found {str(value)[:80]!r}, expected base64") from error


def _key(fields: Mapping[str, Any]) -> str:
    # A key that is no UTF-8 was not written by us; it must not stop us from reading the others.
    return _data(fields, "key").decode(errors="replace")


def revision(reply: Mapping[str, Any]) -> int:
    """The store's revision in the header of a reply; every real reply has one."""
    found = number(part(reply, "header"), "revision")
    if found < 1:
        raise MalformedError(f"header.revision: found {found}, expected 1 or more")
    return found


def snapshot(reply: Mapping[str, Any], ranges: int) -> Snapshot:
    answers = parts(reply, "responses")
    if len(answers) != ranges:
        raise MalformedError(f"responses: found {len(answers)}, expected {ranges}")
    found = []
    for answer in answers:
        answered = part(answer, "response_range")
        if flag(answered, "more"):
            raise MalformedError("response_range.more: found true, expected all keys")
        found += [_entry(stored) for stored in parts(answered, "kvs")]
    return Snapshot(tuple(found), revision(reply))


def _entry(stored: Mapping[str, Any]) -> Entry:
    mod_revision = number(stored, "mod_revision")
    if mod_revision < 1:
        raise MalformedError(f"mod_revision: found {mod_revision}, expected 1 or more")
    return Entry(_key(stored), _data(stored, "value"), mod_revision, number(stored, "lease"))


def committed(reply: Mapping[str, Any]) -> Committed:
    return Committed(flag(reply, "succeeded"), revision(reply))


def granted(reply: Mapping[str, Any]) -> Granted:
    lease, ttl = number(reply, "ID"), number(reply, "TTL")
    if lease == 0 or ttl < 1:
        raise MalformedError(f"found lease {lease} with TTL {ttl}, expected a lease of 1 s or more")
    return Granted(lease, ttl)


def seconds_left(reply: Mapping[str, Any], lease: int) -> int:
    """Of a keepalive: 0 or less says that the lease is gone."""
    result = part(reply, "result")
    revision(result)
    if number(result, "ID") != lease:
        raise MalformedError(f"ID: found {number(result, 'ID')}, expected {lease}")
    return number(result, "TTL")


def changes(result: Mapping[str, Any]) -> list[Change]:
    """The events of one message of a watch."""
    return [_change(event) for event in parts(result, "events")]


def _change(event: Mapping[str, Any]) -> Change:
    kind, stored, before = event.get("type", "PUT"), part(event, "kv"), event.get("prev_kv")
    if kind not in ("PUT", "DELETE"):
        raise MalformedError(f"type: found {str(kind)[:80]!r}, expected PUT or DELETE")
    mod_revision = number(stored, "mod_revision")
    if mod_revision < 1:
        raise MalformedError(f"kv.mod_revision: found {mod_revision}, expected 1 or more")
    if before is not None:
        previous: int | None = number(part(event, "prev_kv"), "mod_revision")
    else:
        fresh = kind == "PUT" and number(stored, "create_revision") == mod_revision
        previous = 0 if fresh else None  # None: the version before was compacted away
    if kind == "DELETE":
        return Change(_key(stored), mod_revision, None, 0, previous)
    return Change(_key(stored), mod_revision, _data(stored, "value"), number(stored, "lease"), previous)
