"""Packets on SOCK_SEQPACKET sockets: JSON objects, with fds beside them.

A peer that does not read loses its connection in the end; it never blocks us.
"""

import array
import contextlib
import json
import os
import select
import socket
from collections import deque
from collections.abc import Callable
from typing import Any

from supervisor.keeper.loop import Loop
from supervisor.keeper.protocol import MAX_PACKET

_MAX_FDS = 64
_MAX_QUEUE = 4096  # packets kept for a peer that is stopped; then it has to connect anew and ask
Packet = dict[str, Any]


class Connection:
    """One peer. `on_packet(packet | None, fds)`: None for what is no JSON object. `on_close` once."""

    def __init__(
        self,
        sock: socket.socket,
        loop: Loop,
        on_packet: Callable[["Connection", Packet | None, list[int]], None],
        on_close: Callable[["Connection"], None],
    ) -> None:
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MAX_PACKET)
        self.sock = sock
        self._loop = loop
        self._on_packet = on_packet
        self._on_close = on_close
        self._queue: deque[bytes] = deque()
        self.open = True
        loop.add(sock.fileno(), self._ready)

    def send(self, packet: Packet, fds: tuple[int, ...] = ()) -> bool:
        """Send now, or later if the peer is slow (without fds only); False when the connection is gone."""
        if not self.open:
            return False
        data = json.dumps(packet).encode()
        if self._queue and not fds:
            return self._enqueue(data)
        try:
            if fds:
                socket.send_fds(self.sock, [data], list(fds))
            else:
                self.sock.send(data, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            if not fds:
                return self._enqueue(data)
            self.close()
        except OSError:
            self.close()
        return self.open

    def close(self) -> None:
        """Close it."""
        if self.open:
            self.open = False
            self._loop.remove(self.sock.fileno())
            self.sock.close()
            self._on_close(self)

    def _enqueue(self, data: bytes) -> bool:
        if len(self._queue) >= _MAX_QUEUE:
            self.close()
            return False
        self._queue.append(data)
        self._loop.change(self.sock.fileno(), select.EPOLLIN | select.EPOLLOUT)
        return True

    def _ready(self, events: int) -> None:
        if events & select.EPOLLOUT:
            self._flush()
        if self.open and events & ~select.EPOLLOUT:
            self._receive()

    def _flush(self) -> None:
        while self._queue:
            try:
                self.sock.send(self._queue[0], socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except OSError:
                self.close()
                return
            self._queue.popleft()
        self._loop.change(self.sock.fileno(), select.EPOLLIN)

    def _receive(self) -> None:
        try:
            data, fds, flags = receive(self.sock)
        except BlockingIOError:
            return
        except OSError:
            self.close()
            return
        if not data and not fds:
            self.close()
            return
        whole = not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)
        try:
            self._on_packet(self, parse(data) if whole else None, fds)
        finally:
            for fd in fds:
                with contextlib.suppress(OSError):
                    os.close(fd)


def receive(sock: socket.socket) -> tuple[bytes, list[int], int]:
    """One packet, its fds (close-on-exec) and the message flags. Raises OSError, BlockingIOError."""
    size = array.array("i").itemsize * _MAX_FDS
    data, ancillary, flags, _ = sock.recvmsg(MAX_PACKET, socket.CMSG_SPACE(size), socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return data, list(fds), flags


def parse(data: bytes) -> Packet | None:
    """A JSON object, or None. Absurd nesting and absurd numbers count as nonsense."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def listen(path: str, mode: int, gid: int | None) -> socket.socket:
    """A listening socket with these rights from its first moment on. Replaces what is there: we have the run folder."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    before = os.umask(0o777)
    try:
        sock.bind(path)
    finally:
        os.umask(before)
    if gid is not None:
        os.chown(path, -1, gid)
    os.chmod(path, mode)
    sock.listen(128)
    return sock
