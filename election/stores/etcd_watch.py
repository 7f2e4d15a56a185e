"""A watch on etcd that goes on for ever: it resumes where it was, leaves silent or broken members, and says when
events may have been lost.

etcd tells nothing on a quiet stream for ten minutes (its --experimental-watch-progress-notify-interval), so a dead
connection cannot be told from a quiet one. A stream that was silent for `SILENCE` is therefore made anew, from the
revision after the last event, where the answer to another call has shown that the store went on meanwhile: nothing is
lost by it, and a dead member shows at once. Where nothing has changed a dead stream misses nothing.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import structlog

from election.store import Change, ErrorClass
from election.stores import etcd_wire as wire
from election.stores.etcd_errors import classify
from election.stores.etcd_transport import Messages, RefusedError, Transport

SILENCE = 5.0
"""Seconds without a message after which a stream is made anew, if there could have been one."""
CREATE = 2.0
"""Seconds within which a member must have confirmed a new stream."""
SHORTEST_PAUSE, LONGEST_PAUSE = 0.1, 2.0
"""Seconds between a failed stream and the next try; doubled each time."""

log = structlog.get_logger()


class Watch:
    """One watch. `changes` may be iterated once."""

    def __init__(self, transport: Transport, prefix: str) -> None:
        self._transport = transport
        self._prefix = prefix
        self._index = transport.current
        self._next_revision = 0
        """0: from now on."""
        self._told = 0
        """The store's revision up to which this stream tells or has told what there is."""
        self._gap = True
        self._pause = SHORTEST_PAUSE

    async def changes(self) -> AsyncGenerator[Change | None, None]:
        while not self._transport.closed:
            try:
                async with self._created() as messages:
                    if self._gap:
                        self._gap = False
                        yield None
                    while True:
                        for change in self._events(await self._message(messages)):
                            yield change
            except TimeoutError:
                continue
            except (RefusedError, wire.MalformedError) as error:
                await self._fail(error)

    @asynccontextmanager
    async def _created(self) -> AsyncIterator[Messages]:
        """A stream that its member has confirmed. Silence before that is a failure."""
        deadline = self._transport.clock.now() + CREATE
        request = wire.watch_request(self._prefix, self._next_revision)
        async with self._transport.stream(self._index, "/v3/watch", request, deadline) as messages:
            try:
                result = wire.part(await messages.next(deadline), "result")
            except TimeoutError as error:
                raise RefusedError(ErrorClass.TRANSIENT, f"no watch within {CREATE:g} s") from error
            if not wire.flag(result, "created"):
                raise wire.MalformedError("created: found false, expected true")
            self._refuse_canceled(result)
            self._place(wire.revision(result))
            self._told = wire.revision(result)
            self._pause = SHORTEST_PAUSE
            yield messages

    def _place(self, revision: int) -> None:
        """The store stands at `revision`: the stream tells what comes after it, or resumes before."""
        if self._next_revision == 0:
            self._next_revision = revision + 1
        elif revision < self._next_revision - 1:
            # This member is behind, or etcd was restored from a snapshot: what it tells next may skip events.
            raise self._lost_track(f"the store is at revision {revision}, before {self._next_revision - 1}")

    async def _message(self, messages: Messages) -> dict[str, Any]:
        """The next one. Raises `TimeoutError` after a silence in which the store went on."""
        while True:
            try:
                result = wire.part(await messages.next(self._transport.clock.now() + SILENCE), "result")
            except TimeoutError:
                if self._transport.revision > self._told:
                    raise
                continue
            self._refuse_canceled(result)
            return result

    def _events(self, result: dict[str, Any]) -> list[Change]:
        found = wire.changes(result)
        if found:
            self._next_revision = found[-1].mod_revision + 1
        elif "events" not in result and not wire.flag(result, "created"):
            # A progress notification: all up to its revision has been told (etcd docs, "Watch API").
            self._next_revision = max(self._next_revision, wire.revision(result) + 1)
        self._told = max(self._told, self._next_revision - 1)
        return found

    def _refuse_canceled(self, result: dict[str, Any]) -> None:
        if not wire.flag(result, "canceled"):
            return
        if compacted := wire.number(result, "compact_revision"):
            raise self._lost_track(f"compacted at revision {compacted}")
        why = str(result.get("cancel_reason"))
        raise RefusedError(classify(0, why), f"canceled: {why}")

    def _lost_track(self, why: str) -> RefusedError:
        self._next_revision = 0
        return RefusedError(ErrorClass.TRANSIENT, why)

    async def _fail(self, error: Exception) -> None:
        """On to the next member, after a pause; what happens meanwhile is told from the old revision on."""
        if self._transport.closed:
            return
        endpoint = self._transport.endpoints[self._index]
        log.debug("watch moves on", prefix=self._prefix, endpoint=endpoint, cause=str(error), pause=self._pause)
        self._gap = True
        self._index = self._transport.after(self._index)
        await asyncio.sleep(self._pause)
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
