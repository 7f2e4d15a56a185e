"""Requests to the daemon of this machine, through its unix socket. Standard library only."""

import http.client
import json
import socket
from pathlib import Path
from typing import Any

from supervisor.cli.exits import NO_DAEMON, NOT_ALLOWED, NOT_NOW, UNKNOWN, fail
from supervisor.cli.output import plain

API_SOCKET = "api.sock"
"""In the run folder; as in supervisor.api.unix, which imports more than a command needs."""
TIMEOUT = 5.0
"""Seconds, for the connection and for each piece of an answer."""
MAX_ANSWER = 32 * 1024 * 1024
"""Bytes: a log's 2 MiB, each of them escaped in JSON."""
EXITS = {403: NOT_ALLOWED, 404: UNKNOWN, 409: NOT_NOW, 412: NOT_NOW, 503: NO_DAEMON}

Answer = dict[str, Any]


class _Connection(http.client.HTTPConnection):
    """HTTP through a unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=TIMEOUT)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(TIMEOUT)
        self.sock.connect(bytes(self._path))


class Daemon:
    """The daemon with this run folder. Its refusals end the command: one line on stderr, and the exit code."""

    def __init__(self, run: Path) -> None:
        self._path = run / API_SOCKET

    def ask(self, method: str, path: str, *, body: Answer | None = None, optional: bool = False) -> Answer:
        """What it answers with 200 or 202. Refused what is `optional`: {}."""
        try:
            status, content = self._exchange(method, path, None if body is None else json.dumps(body))
            answer = json.loads(content)
            if not isinstance(answer, dict):
                raise ValueError("what answers there is not gpuward")
        except PermissionError:
            fail(f"not allowed to use {self._path}: be root or a member of `admin_group`", NOT_ALLOWED)
        except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
            why = "no answer in time" if isinstance(error, TimeoutError) else getattr(error, "strerror", None) or error
            fail(f"no daemon answers at {self._path}: {plain(why)}", NO_DAEMON)
        if status not in (200, 202):
            if optional:
                return {}
            fail(plain(answer.get("error", f"the daemon said {status}")), EXITS.get(status, 1))
        return answer

    def _exchange(self, method: str, path: str, body: str | None) -> tuple[int, bytes]:
        connection = _Connection(self._path)
        try:
            connection.request(method, path, body, headers={"Accept": "application/json"})
            with connection.getresponse() as response:
                return response.status, response.read(MAX_ANSWER)
        finally:
            connection.close()
