"""What etcd's answers mean: its error texts by class, and answers that it would never give."""

import base64
import json
from typing import Any

import pytest

from election.store import Change, Entry, ErrorClass, LeaseIs, Snapshot, Txn
from election.stores import etcd_wire as wire
from election.stores.etcd_errors import ADVICE, advice, another_may_know, classify
from election.stores.etcd_transport import RefusedError, describe, interpret


@pytest.mark.parametrize(
    ("code", "text", "kind"),
    [
        (5, "etcdserver: requested lease not found", ErrorClass.LOST),
        (2, "etcdserver: requested lease not found", ErrorClass.LOST),
        (8, "etcdserver: mvcc: database space exceeded", ErrorClass.NO_SPACE),
        (8, "etcdserver: too many requests", ErrorClass.TRANSIENT),
        (14, "etcdserver: request timed out", ErrorClass.TRANSIENT),
        (14, "etcdserver: no leader", ErrorClass.TRANSIENT),
        (14, "etcdserver: leader changed", ErrorClass.TRANSIENT),
        (2, "lease: not a primary lessor", ErrorClass.TRANSIENT),
        (4, "context deadline exceeded", ErrorClass.TRANSIENT),
        (16, "etcdserver: invalid auth token", ErrorClass.AUTH),
        (3, "etcdserver: authentication failed, invalid user ID or password", ErrorClass.AUTH),
        (3, "etcdserver: user name is empty", ErrorClass.AUTH),
        (3, "etcdserver: revision of auth store is old", ErrorClass.AUTH),
        (3, "etcdserver: revision in header is old", ErrorClass.AUTH),
        (7, "etcdserver: permission denied", ErrorClass.AUTH),
        (12, "unknown service etcdserverpb.Lease", ErrorClass.UNSUPPORTED),
        (9, "something that nobody has seen before", ErrorClass.TRANSIENT),
        (0, "", ErrorClass.TRANSIENT),
    ],
)
def test_every_error_of_etcd_has_its_class(code: int, text: str, kind: ErrorClass) -> None:
    assert classify(code, text) is kind


def test_a_path_that_is_not_there_is_answered_with_the_port_for_clients() -> None:
    with pytest.raises(RefusedError, match="clients use port 2379") as caught:
        interpret(404, b"404 page not found\n")
    assert "--enable-grpc-gateway" not in str(caught.value)  # that advice ends the message, once
    assert "--enable-grpc-gateway" in ADVICE[caught.value.kind]


def test_a_closed_port_is_told_without_a_word_on_tls() -> None:
    said = "Cannot connect to host 127.0.0.1:1 ssl:default [Connect call failed ('127.0.0.1', 1)]"
    assert describe(OSError(said)) == "Cannot connect to host 127.0.0.1:1 [Connect call failed ('127.0.0.1', 1)]"


def test_there_is_advice_for_every_class() -> None:
    assert set(ADVICE) == set(ErrorClass)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('connection error: desc = "error reading server preface: remote error: tls: bad certificate"', "clientAuth"),
        ("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: certificate has expired", "renew"),
        ("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: certificate is not yet valid", "clock"),
        ("certificate verify failed: IP address mismatch, certificate is not valid for '10.0.0.1'", "subjectAltName"),
        ("certificate verify failed: self-signed certificate in certificate chain", "`election.etcd.ca_file` must"),
        ("etcdserver: permission denied", "grant-permission"),
        ("etcdserver: invalid auth management", "docs/etcd.md"),
    ],
)
def test_what_to_do_depends_on_what_was_said(text: str, part: str) -> None:
    assert part in advice(ErrorClass.AUTH, text)


@pytest.mark.parametrize(
    ("code", "text", "elsewhere"),
    [
        (14, "etcdserver: no leader", True),
        (2, "lease: not a primary lessor", True),
        (14, "etcdserver: server stopped", True),
        (5, "etcdserver: requested lease not found", False),
        (8, "etcdserver: mvcc: database space exceeded", False),
        (7, "etcdserver: permission denied", False),
    ],
)
def test_only_a_members_own_trouble_sends_us_to_the_next_one(code: int, text: str, elsewhere: bool) -> None:
    assert another_may_know(code, text) is elsewhere


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (404, b"404 page not found\n", ErrorClass.UNSUPPORTED),
        (404, b'{"code":5, "message":"Not Found"}', ErrorClass.UNSUPPORTED),
        (404, b'{"code":5, "message":"etcdserver: requested lease not found"}', ErrorClass.LOST),
        (503, b'{"error":{"code":14,"message":"etcdserver: no leader"}}\n', ErrorClass.TRANSIENT),
        (200, b'{"error":{"grpc_code":16,"message":"etcdserver: invalid auth token"}}', ErrorClass.AUTH),
        (307, b"", ErrorClass.TRANSIENT),
        (200, b"<html>", ErrorClass.TRANSIENT),
        (500, b'{"header":{}}', ErrorClass.TRANSIENT),
        (200, b'{"error":"odd"}', ErrorClass.TRANSIENT),
    ],
)
def test_an_answer_with_an_error_in_any_form_is_refused_with_its_class(
    status: int, body: bytes, kind: ErrorClass
) -> None:
    with pytest.raises(RefusedError) as caught:
        interpret(status, body)
    assert caught.value.kind is kind


def coded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


HEADER = {"revision": "7"}


def answered(*stored: Any, **more: Any) -> dict[str, Any]:
    return {"header": HEADER, "responses": [{"response_range": {"kvs": list(stored), **more}}]}


def test_zero_values_that_etcd_leaves_out_are_zero() -> None:
    assert wire.snapshot(answered({"key": coded("/a"), "mod_revision": "5"}), 1) == Snapshot(
        (Entry("/a", b"", 5, 0),), 7
    )


@pytest.mark.parametrize(
    "reply",
    [
        {},
        {"header": HEADER},
        {"header": {"revision": True}, "responses": [{}]},
        {"header": {"revision": "0"}, "responses": [{}]},
        {"header": HEADER, "responses": [7]},
        {"header": HEADER, "responses": [{"response_range": []}]},
        answered("text"),
        answered({"key": 7, "mod_revision": "5"}),
        answered({"key": "%%%", "mod_revision": "5"}),
        answered({"key": coded("/a"), "mod_revision": "five"}),
        answered({"key": coded("/a")}),
        answered({"key": coded("/a"), "mod_revision": "5", "lease": None}),
        answered(more=True),
        answered(more="yes"),
    ],
)
def test_a_read_that_etcd_would_never_answer_like_this_is_malformed(reply: dict[str, Any]) -> None:
    with pytest.raises(wire.MalformedError):
        wire.snapshot(reply, 1)


def test_an_event_tells_what_it_replaced_or_that_nobody_knows() -> None:
    def event(kind: str, created: int, before: int | None) -> dict[str, Any]:
        stored = {"key": coded("/a"), "mod_revision": "9", "create_revision": str(created)}
        found: dict[str, Any] = {"type": kind, "kv": stored}
        return found | ({"prev_kv": {"key": coded("/a"), "mod_revision": str(before)}} if before else {})

    events = [event("PUT", 9, None), event("PUT", 3, 8), event("PUT", 3, None), event("DELETE", 0, 8)]
    assert wire.changes({"events": events}) == [
        Change("/a", 9, b"", 0, 0),
        Change("/a", 9, b"", 0, 8),
        Change("/a", 9, b"", 0, None),
        Change("/a", 9, None, 0, 8),
    ]


@pytest.mark.parametrize(("prefix", "end"), [(b"/a/", b"/a0"), (b"a\xff", b"b"), (b"\xff\xff", b"\0"), (b"", b"\0")])
def test_a_prefix_ends_where_etcds_own_client_says(prefix: bytes, end: bytes) -> None:
    assert wire.range_end(prefix) == end


def test_a_lease_guard_asks_for_presence_too() -> None:
    request = wire.txn_request(Txn((LeaseIs("/a", 0),), ()))
    assert [compare["target"] for compare in request["compare"]] == ["CREATE", "LEASE"]
    json.dumps(request)
