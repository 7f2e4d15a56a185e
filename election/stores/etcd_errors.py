"""What etcd's errors mean to the election (rule 9). Pure: one function from a gRPC status to an `ErrorClass`.

Texts and codes: etcd `api/v3rpc/rpctypes/error.go` and `server/lease/lessor.go`; several causes share a code, so the
text decides where it is known, and the code where it is not.
"""

from election.store import ErrorClass

NOT_FOUND, PERMISSION_DENIED, UNIMPLEMENTED, UNAVAILABLE, UNAUTHENTICATED = 5, 7, 12, 14, 16
"""gRPC status codes (grpc `doc/statuscodes.md`)."""

_LOST = ("requested lease not found",)
_NO_SPACE = ("database space exceeded",)
_AUTH = (
    "authentication failed",
    "authentication is not enabled",
    "invalid auth token",
    "invalid auth management",
    "permission denied",
    "revision in header is old",
    "revision of auth store is old",
    "user name is empty",
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
    ErrorClass.TRANSIENT: "it is tried again; `etcdctl endpoint status --cluster` shows the members",
    ErrorClass.AUTH: "check the etcd user, its role and its password",
    ErrorClass.NO_SPACE: "compact and defragment etcd, then `etcdctl alarm disarm`; or raise --quota-backend-bytes",
    ErrorClass.UNSUPPORTED: "name the port for clients; it must be etcd 3.5 or later, with --enable-grpc-gateway=true",
}
"""What to do, by class: the end of every message."""
