"""The lock store on etcd 3.4 or later, through its JSON gateway.

One session, several endpoints. A call that fails or gets no answer costs at most its own deadline, and the next call
goes to the next endpoint (rule 10). Within one call another endpoint is tried only where nothing can be applied
twice: the request never left, or it is a read, a keepalive or a revocation. A commit or a grant that may have been
applied is never repeated here. It has no thread and refreshes nothing by itself.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from election.clock import Clock
from election.store import Change, Committed, ErrorClass, Granted, Snapshot, StoreError, Txn
from election.stores import etcd_wire as wire
from election.stores.etcd_access import Access
from election.stores.etcd_errors import ADVICE, advice
from election.stores.etcd_transport import RefusedError, Transport
from election.stores.etcd_watch import Watch

T = TypeVar("T")


@dataclass(frozen=True)
class EndpointStatus:
    """What one member says of itself; with `error` set, the rest is 0 or empty."""

    endpoint: str
    version: str = ""
    db_size: int = 0
    """Bytes, as allocated: what the quota is compared with."""
    quota: int = 0
    """Bytes; 0: this etcd does not tell it (before 3.6)."""
    leader: int = 0
    """Member id; 0: it sees none."""
    member: int = 0
    alarms: tuple[str, ...] = ()
    error: str | None = None


class EtcdStore:
    """`LockStore` on etcd. `endpoints`: client addresses such as `http://10.0.0.1:2379`, at least one, else
    `ValueError`; for `https://` and users see `access`. Belongs to the event loop in which it is first used; close it
    there."""

    def __init__(self, endpoints: Sequence[str], *, clock: Clock, access: Access = Access()) -> None:  # noqa: B008
        if isinstance(endpoints, str) or not endpoints:
            raise ValueError(f"etcd endpoints: found {endpoints!r}, expected a list of at least one")
        for endpoint in endpoints:
            if not endpoint.startswith(("http://", "https://")):
                raise ValueError(f"etcd endpoint: found {endpoint!r}, expected http://HOST:PORT or https://HOST:PORT")
        self._transport = Transport([endpoint.rstrip("/") for endpoint in endpoints], clock, access)
        self.access = access
        self._clock = clock

    async def read(self, keys: Sequence[str], *, prefix: bool = False, deadline: float) -> Snapshot:
        """See `LockStore`. Linearizable: etcd asks the quorum before it answers."""
        return await self._call(
            f"read of {', '.join(keys)}",
            "/v3/kv/txn",
            wire.read_request(keys, prefix),
            lambda reply: wire.snapshot(reply, len(keys)),
            deadline,
        )

    async def commit(self, txn: Txn, *, deadline: float) -> Committed:
        """See `LockStore`. Sent once: without an answer it may have been applied, or may still be."""
        what = f"transaction on {', '.join(operation.key for operation in txn.operations)}"
        request = wire.txn_request(txn)
        return await self._call(what, "/v3/kv/txn", request, wire.committed, deadline, once=True)

    async def grant(self, ttl: int, *, deadline: float) -> Granted:
        """See `LockStore`. Sent once; a lease whose id never arrived expires by itself."""
        what, request = f"grant of a lease of {ttl} s", {"TTL": str(ttl)}
        return await self._call(what, "/v3/lease/grant", request, wire.granted, deadline, once=True)

    async def keepalive(self, lease: int, *, deadline: float) -> int:
        """See `LockStore`."""
        what = f"keepalive of lease {lease:x}"

        def left(reply: Mapping[str, Any]) -> int:
            return wire.seconds_left(reply, lease)

        seconds = await self._call(what, "/v3/lease/keepalive", {"ID": str(lease)}, left, deadline)
        if seconds <= 0:
            raise StoreError(ErrorClass.LOST, f"{what}: etcd has no such lease; {ADVICE[ErrorClass.LOST]}")
        return seconds

    async def revoke(self, lease: int, *, deadline: float) -> None:
        """See `LockStore`."""
        what = f"revocation of lease {lease:x}"
        try:
            await self._call(what, "/v3/lease/revoke", {"ID": str(lease)}, wire.revision, deadline)
        except StoreError as error:
            if error.kind is not ErrorClass.LOST:
                raise

    def watch(self, prefix: str) -> AsyncGenerator[Change | None, None]:
        """See `LockStore`. Rests on one member at a time, and not on the one that calls go to."""
        return Watch(self._transport, prefix).changes()

    async def status(self, *, deadline: float) -> tuple[EndpointStatus, ...]:
        """What each member says of itself, in the order of the endpoints. Failures stand in `error`."""
        asked = (self._status(index, deadline) for index in range(len(self._transport.endpoints)))
        return tuple(await asyncio.gather(*asked))

    async def close(self) -> None:
        """Connections are closed and watches end. Fine to repeat."""
        await self._transport.close()

    async def _call(
        self,
        what: str,
        path: str,
        body: Mapping[str, Any],
        parse: Callable[[Mapping[str, Any]], T],
        deadline: float,
        *,
        once: bool = False,
    ) -> T:
        """Try the endpoints in turn, each at most once, as far as the module's rule allows."""
        tried: list[str] = []
        while True:
            index = self._transport.current
            try:
                return parse(await self._transport.ask(index, path, body, deadline))
            except wire.MalformedError as error:
                failure = RefusedError(ErrorClass.TRANSIENT, f"nonsense: {error}", elsewhere=True)
            except RefusedError as refused:
                failure = refused
            tried.append(f"{self._transport.endpoints[index]}: {failure}")
            if failure.elsewhere or failure.kind in (ErrorClass.TRANSIENT, ErrorClass.UNSUPPORTED):
                self._transport.leave(index)
            more = len(tried) < len(self._transport.endpoints) and self._clock.now() < deadline
            if not (more and failure.elsewhere and not (once and failure.sent)):
                text = f"{what}: {'; '.join(tried)}; {advice(failure.kind, str(failure))}"
                raise StoreError(failure.kind, text, sent=failure.sent)

    async def _status(self, index: int, deadline: float) -> EndpointStatus:
        endpoint = self._transport.endpoints[index]
        try:
            reply = await self._transport.ask(index, "/v3/maintenance/status", {}, deadline)
            alarms = reply.get("errors", [])
            return EndpointStatus(
                endpoint,
                version=str(reply.get("version", "")),
                db_size=wire.number(reply, "dbSize"),
                quota=wire.number(reply, "dbSizeQuota"),
                leader=wire.number(reply, "leader"),
                member=wire.number(wire.part(reply, "header"), "member_id"),
                alarms=tuple(str(alarm) for alarm in alarms) if isinstance(alarms, list) else (str(alarms),),
            )
        except (RefusedError, wire.MalformedError) as error:
            return EndpointStatus(endpoint, error=str(error))
