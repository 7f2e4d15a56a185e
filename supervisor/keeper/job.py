"""The caller's side of keeper.sock: ask for a GPU's lock and become a fenced job. Blocking, without retries."""

import contextlib
import json
import os
import socket
import time
from typing import Any

from supervisor.keeper.protocol import JOB_SOCKET

_PATIENCE_S = 2.0
"""For each answer. The keeper answers within a turn of its loop; one that does not gives no authority."""
_AGAIN_S = 0.05


class Denied(Exception):  # noqa: N818 - an answer
    """No lock: `reason` busy, no-authority, no-such-gpu or malformed; `holder` if it is busy and known."""

    def __init__(self, reason: str, message: str, holder: dict[str, Any] | None = None) -> None:
        super().__init__(message or reason)
        self.reason = reason
        self.holder = holder


class Entry:
    """The lock: `fd` is flocked. In mode `scope` the connection stays open for `leave`."""

    def __init__(self, fd: int, token: int, sock: socket.socket, path: str, gpu: int) -> None:
        self.fd = fd
        self.token = token
        self._sock = sock
        self._path = path
        self._gpu = gpu

    def leave(self) -> None:
        """Give the lock back: our fd first, then the keeper's duplicate. A keeper that took the place of ours is told
        anew. Never raises for a keeper that is gone."""
        os.close(self.fd)
        until = time.monotonic() + _PATIENCE_S
        while not self._say_leave() and time.monotonic() < until:
            self._sock.close()
            time.sleep(_AGAIN_S)
            self._sock = _socket()
            with contextlib.suppress(OSError):
                self._sock.connect(self._path)
        self._sock.close()

    def _say_leave(self) -> bool:
        try:
            self._sock.send(json.dumps({"op": "leave", "gpu": self._gpu}).encode())
            return bool(self._sock.recv(4096))
        except OSError:
            return False

    def close_connection(self) -> None:
        """For mode `exec`: the connection has done its work."""
        self._sock.close()


def enter(run: str, gpu: int, mode: str, command: str) -> Entry:
    """Ask the keeper of this run folder for the lock of `gpu`. Raises Denied."""
    path = f"{run}/{JOB_SOCKET}"
    sock = _socket()
    try:
        sock.connect(path)
        sock.send(json.dumps({"op": "enter", "gpu": gpu, "command": command[:200], "mode": mode}).encode())
        data, fds, _, _ = socket.recv_fds(sock, 65536, 1)
    except OSError as error:
        sock.close()
        raise Denied("no-authority", f"no keeper answers at {path}: {error}") from None
    hung_up = {"reason": "no-authority", "message": f"{path}: the keeper hung up"}
    answer: dict[str, Any] = json.loads(data) if data else hung_up
    if answer.get("ok") is True and fds:
        os.set_inheritable(fds[0], False)
        return Entry(fds[0], answer["token"], sock, path, gpu)
    sock.close()
    raise Denied(str(answer.get("reason")), str(answer.get("message", "")), answer.get("holder"))


def _socket() -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    sock.settimeout(_PATIENCE_S)
    return sock
