"""No more connections than the supervisor can afford: each costs a file descriptor, and it needs those to see anything.

Whoever has not sent the whole head of a request within PATIENCE is closed, and at the limit the one that has waited
longest without a request gives way to the new one: so a load balancer is answered, whoever else connects and says
nothing. Refused is only who comes while every connection has a request in progress; each of those ends by itself.
"""

import asyncio
from collections.abc import Callable

from aiohttp import web

MOST = 200
"""Connections at a time of one listener."""
PATIENCE = 10.0
"""Seconds for the whole head of a request, from the connection or from the request before."""


def limited(server: web.Server, most: int = MOST, patience: float = PATIENCE) -> Callable[[], asyncio.BaseProtocol]:
    """A protocol factory for one listener of `server`, to be made before anybody connects."""
    listener = _Listener(server, most, patience)
    return lambda: _Connection(listener)


class _Listener:
    """The connections of one."""

    def __init__(self, server: web.Server, most: int, patience: float) -> None:
        self.server, self.most, self.patience = server, most, patience
        self.loop = asyncio.get_running_loop()
        self.connections: dict[web.RequestHandler, _Connection] = {}
        self.waiting: dict[_Connection, None] = {}
        """Without a request in progress, the longest wait first."""
        handle = server.request_handler

        async def handle_and_count(request: web.BaseRequest) -> web.StreamResponse:
            connection = self.connections.get(request.protocol)
            if connection is None:  # another listener's
                return await handle(request)
            connection.stop_waiting()
            try:
                return await handle(request)
            finally:
                connection.wait()

        server.request_handler = handle_and_count

    def make_room(self) -> bool:
        """False: every connection has a request in progress."""
        if len(self.connections) >= self.most and self.waiting:
            next(iter(self.waiting)).abort()
        return len(self.connections) < self.most


class _Connection(asyncio.Protocol):
    """In front of aiohttp's handler, to which it passes everything on. Without one: it was refused, or is over."""

    def __init__(self, listener: _Listener) -> None:
        self._listener = listener
        self._handler: web.RequestHandler | None = None
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def wait(self) -> None:
        """For the head of a request, from now on."""
        self.stop_waiting()
        if self._handler in self._listener.connections:
            self._listener.waiting[self] = None
            self._timer = self._listener.loop.call_later(self._listener.patience, self.abort)

    def stop_waiting(self) -> None:
        """A request is in progress, or the connection is over."""
        self._listener.waiting.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def abort(self) -> None:
        """Close it now, whatever has not been sent."""
        self._forget()
        if self._transport is not None:
            self._transport.abort()

    def _forget(self) -> None:
        self.stop_waiting()
        if self._handler is not None:
            self._listener.connections.pop(self._handler, None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if not self._listener.make_room():
            transport.abort()
            return
        self._handler = self._listener.server()
        self._listener.connections[self._handler] = self
        self._handler.connection_made(transport)
        self.wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        if self._handler is not None:
            self._handler.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._handler is not None:
            self._handler.data_received(data)

    def eof_received(self) -> bool | None:
        if self._handler is not None:
            self._handler.eof_received()
        return None

    def pause_writing(self) -> None:
        if self._handler is not None:
            self._handler.pause_writing()

    def resume_writing(self) -> None:
        if self._handler is not None:
            self._handler.resume_writing()
