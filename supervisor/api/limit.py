"""No more connections than the supervisor can afford: each costs a file descriptor, and it needs those to see anything.

What is refused is closed at once; a load balancer asks again, and the unix socket has a limit of its own.
"""

import asyncio
from collections.abc import Callable

from aiohttp import web

MOST = 200
"""Connections at a time of one listener."""

SETTLED = 1.0
"""Seconds after which a handler that was made has got its connection."""


class _Refused(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


def limited(server: web.Server, most: int = MOST) -> Callable[[], asyncio.BaseProtocol]:
    """A protocol factory for one listener of `server`."""
    loop = asyncio.get_running_loop()
    ours: dict[web.RequestHandler, float] = {}
    """With the time at which each was made: it has no transport before its connection, nor after it."""

    def make() -> asyncio.BaseProtocol:
        if len(ours) >= most:
            gone = [one for one, made in ours.items() if one.transport is None and loop.time() - made > SETTLED]
            for one in gone:
                del ours[one]
        if len(ours) >= most:
            return _Refused()
        handler = server()
        ours[handler] = loop.time()
        return handler

    return make
