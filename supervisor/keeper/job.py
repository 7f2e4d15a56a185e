"""The caller's side of keeper.sock: ask for a GPU's lock and become a fenced job. Blocking, without retries."""

import json
import os
import socket
from typing import Any

from supervisor.keeper.protocol import JOB_SOCKET

_PATIENCE_S = 2.0
"""For each answer. The keeper answers within a turn of its loop; one that does not gives no authority."""


class Denied(Exception):  # noqa: N818 - an answer
    """No lock: `reason` busy, no-authority, no-such-gpu or malformed; `holder` if it is busy and known."""

    def __init__(self, reason: str, message: str, holder: dict[str, Any] | None = None) -> None:
        super().__init__(message or reason)
        self.reason = reason
        self.holder = holder


class Entry:
    """The lock: `fd` is flocked. In mode `scope` the connection stays open for `leave`."""

    def __init__(self, fd: int, token: int, sock: socket.socket) -> None:
        self.fd = fd
        self.token = token
        self._sock = sock

    def leave(self) -> None:
        """Give the lock back: our fd first, then the keeper's duplicate. Never raises for a keeper that is gone."""
        os.close(self.fd)
        try:
            self._sock.send(b'{"op": "leave"}')
            self._sock.recv(4096)
        except OSError:
            pass
        finally:
            self._sock.close()

    def close_connection(self) -> None:
        """For mode `exec`: the connection has done its work."""
        self._sock.close()


def enter(run: str, gpu: int, mode: str, command: str) -> Entry:
    """Ask the keeper of this run folder for the lock of `gpu`. Raises Denied."""
    path = f"{run}/{JOB_SOCKET}"
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    sock.settimeout(_PATIENCE_S)
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
        return Entry(fds[0], answer["token"], sock)
    sock.close()
    raise Denied(str(answer.get("reason")), str(answer.get("message", "")), answer.get("holder"))
