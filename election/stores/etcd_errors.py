"""What etcd's errors mean to the election (rule 9). Pure: one function from a gRPC status to an `ErrorClass`.

Texts and codes: etcd `api/v3rpc/rpctypes/error.go` and `server/lease/lessor.go`; several causes share a code, so the
text decides where it is known, and the code where it is not.
"""

from election.store import ErrorClass

NOT_FOUND, PERMISSION_DENIED, UNIMPLEMENTED, UNAVAILABLE, UNAUTHENTICATED = 5, 7, 12, 14, 16
"""gRPC status codes (grpc `doc/statuscodes.md`)."""

OLD_TOKEN = ("invalid auth token", "revision of auth store is old", "revision in header is old", "user name is empty")
"""Texts that a new authentication can answer: tokens end by their time (--auth-token-ttl, 300 s without use), and with
each change of users and roles. etcd says them before it applies anything (`server/auth/store.go`,
`server/etcdserver/apply_auth.go`), so the request may be sent again."""

COMMON_NAME = "commonname of client sending a request against gateway will be ignored"
"""Etcd with users and --client-cert-auth refuses each request of a certificate with a CN (`server/embed/serve.go`)."""

_LOST = ("requested lease not found",)
_NO_SPACE = ("database space exceeded",)
_AUTH = (
    *OLD_TOKEN,
    COMMON_NAME,
    "authentication failed",
    "authentication is not enabled",
    "invalid auth management",
    "permission denied",
    "user name not found",
)
_ELSEWHERE = ("no leader", "not leader", "not a primary lessor", "leader changed", "server stopped", "not a voting")


def classify(code: int, text: str) -> ErrorClass:
    """The class of one etcd error. Unknown is transient."""
    lower = text.lower()
    for kind, texts in ((ErrorClass.LOST, _LOST), (ErrorClass.NO_SPACE, _NO_SPACE), (ErrorClass.AUTH, _AUTH)):
        if any(known in lower for known in texts):
            return kind
    if code in (PERMISSION_DENIED, UNAUTHENTICATED):
        return ErrorClass.AUTH
    if code == UNIMPLEMENTED:
        return ErrorClass.UNSUPPORTED
    return ErrorClass.TRANSIENT


def another_may_know(code: int, text: str) -> bool:
    """Is it this member's trouble, so that the next one may well answer at once?"""
    return code == UNAVAILABLE or any(known in text.lower() for known in _ELSEWHERE)


ADVICE = {
    ErrorClass.LOST: "the lease expired or was revoked: take a new one",
    ErrorClass.TRANSIENT: "`etcdctl endpoint status --cluster` shows the members",
    ErrorClass.AUTH: "docs/etcd.md shows what etcd and this node need",
    ErrorClass.NO_SPACE: "compact and defragment etcd, then `etcdctl alarm disarm`; or raise --quota-backend-bytes; "
    "docs/etcd.md has the commands",
    ErrorClass.UNSUPPORTED: "name the port for clients; it must be etcd 3.4 or later, with --enable-grpc-gateway=true",
}
"""What to do, by class: the end of every message, unless `advice` knows better."""

_NO_TLS = "no TLS is spoken there: write http:// in `election.etcd.endpoints`, or turn on TLS in etcd"
_ADVICE = {
    "authentication failed": "check `election.etcd.user` and `password_file`; `etcdctl user list` shows the users, "
    "`etcdctl user passwd USER` sets a password",
    "authentication is not enabled": "`etcdctl auth enable`, or take `user` and `password_file` out of `election.etcd`",
    "permission denied": "the user needs a role (`etcdctl user grant-role USER ROLE`) with "
    "`etcdctl role grant-permission ROLE --prefix=true readwrite /gpuward/CLUSTER/`",
    "user name is empty": "this etcd has users: set `election.etcd.user` and `password_file`",
    "certificate has expired": "renew the certificate of this member; or the clock of this machine is wrong",
    "certificate is not yet valid": "look at the clock of this machine, and of the one that made the certificate",
    "mismatch, certificate is not valid": "the certificate of this member must have the endpoint's host as "
    "subjectAltName",
    "certificate verify failed": "`election.etcd.ca_file` must hold the CA that signed the certificate of this member",
    "alert certificate required": "this etcd wants a client certificate: set `election.etcd.cert_file` and `key_file`",
    "alert certificate expired": "renew the certificate in `election.etcd.cert_file`; or the member's clock is wrong",
    "alert": "etcd does not take our certificate: `election.etcd.cert_file` must be valid and signed by etcd's "
    "--trusted-ca-file, with clientAuth among its uses; etcd's log says more",
    COMMON_NAME: "make the certificate in `election.etcd.cert_file` anew with a subject without CN, such as /O=gpuward",
    "remote error: tls": "etcd's gateway shows the member's own certificate to the member: it needs clientAuth among "
    "its uses, not serverAuth alone",
    "server disconnected": "if this etcd has TLS, write https:// in `election.etcd.endpoints`",
    "closed in the tls handshake": _NO_TLS,
    "wrong_version_number": _NO_TLS,
    "record layer failure": _NO_TLS,
}
"""What to do, by a part of the text; the first one that is found."""


def advice(kind: ErrorClass, text: str) -> str:
    """What to do about a failure with this text."""
    lower = text.lower()
    return next((known for part, known in _ADVICE.items() if part in lower), ADVICE[kind])
