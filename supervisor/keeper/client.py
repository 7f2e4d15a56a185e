"""The supervisor's side of the keeper's control socket (asyncio).

Deadlines are absolute boot-time seconds: the running loop's `time()` must be the boot-time clock. Every call has one;
a keeper that gives no answer is gone, and the caller acts on it (rule 16: no acknowledgement, no start).
"""

import asyncio
import contextlib
import json
import os
import resource
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from supervisor.keeper.protocol import CONTROL_SOCKET, MAX_PACKET

_LOG = "keeper.log"
_FILES_LIMIT = resource.getrlimit(resource.RLIMIT_NOFILE)
"""As this process was started with: the supervisor raises its own, services must not inherit that (select(2))."""
_PROGRAM = Path(__file__).with_name("__main__.py")


class KeeperRefused(Exception):  # noqa: N818 - an answer, not a failure of the keeper
    """The keeper said no: `error` is the word of protocol.py, `fields` the rest of its answer."""

    def __init__(self, error: str, fields: dict[str, Any]) -> None:
        super().__init__(f"{error}: {fields.get('message', '')}")
        self.error = error
        self.fields = fields


class KeeperGone(Exception):  # noqa: N818
    """No answer by the deadline, or the connection is broken. What was asked may or may not have happened."""


class KeeperSilent(KeeperGone):
    """No answer by the deadline, on a connection that stands."""


class KeeperClient:
    """One connection. Made by `connect` or `spawn`."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._number = 0
        self.closed = asyncio.Event()
        """Set the moment the connection breaks, whoever broke it."""
        self.on_event: Callable[[dict[str, Any]], None] | None = None
        """Called in the loop with each event: {"event": name, …}."""
        self._loop.add_reader(sock.fileno(), self._readable)

    @classmethod
    async def connect(cls, run: Path) -> "KeeperClient":
        """Connect to the keeper of this run folder. Raises KeeperGone when none answers there."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MAX_PACKET)
            sock.connect(os.fspath(run / CONTROL_SOCKET))
        except OSError as error:
            sock.close()
            raise KeeperGone(f"{run / CONTROL_SOCKET}: {error}") from error
        return cls(sock)

    async def call(self, op: str, *, deadline: float, fds: Sequence[int] = (), **fields: Any) -> dict[str, Any]:
        """One request; its answer without `id` and `ok`. Raises KeeperRefused, KeeperGone, ValueError (too large)."""
        if self.closed.is_set():
            raise KeeperGone(f"{op}: the connection to the keeper is closed")
        self._number += 1
        number = self._number
        data = json.dumps({"op": op, "id": number, **fields}).encode()
        if len(data) > MAX_PACKET:
            raise ValueError(f"{op}: {len(data)} bytes, the limit is {MAX_PACKET}")
        self._waiting[number] = future = self._loop.create_future()
        try:
            async with asyncio.timeout_at(deadline):
                await self._send(data, list(fds))
                answer = await future
        except TimeoutError:
            raise KeeperSilent(f"{op}: no answer by the deadline") from None
        finally:
            self._waiting.pop(number, None)
        return _fields(answer)

    async def close(self) -> None:
        """Close the connection; the keeper and its term go on."""
        self._break()

    async def _send(self, data: bytes, fds: list[int]) -> None:
        while not self.closed.is_set():
            try:
                socket.send_fds(self._sock, [data], fds, socket.MSG_NOSIGNAL)
                return
            except BlockingIOError:
                await asyncio.sleep(
                    0.002
                )  # its queue is full; writability of datagram sockets is not told apart by size
            except OSError as error:
                self._break()
                raise KeeperGone(f"send: {error}") from error
        raise KeeperGone("the connection to the keeper is closed")

    def _readable(self) -> None:
        for _ in range(64):
            try:
                data = self._sock.recv(MAX_PACKET)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._break()
                return
            self._packet(json.loads(data))

    def _packet(self, packet: dict[str, Any]) -> None:
        if "event" in packet:
            if self.on_event is not None:
                self.on_event(packet)
            return
        future = self._waiting.get(packet.get("id", -1))
        if future is not None and not future.done():
            future.set_result(packet)

    def _break(self) -> None:
        if self.closed.is_set():
            return
        self.closed.set()
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(KeeperGone("the connection to the keeper broke"))


async def spawn(
    run: Path, cgroup: str | None, group: str | None, *, deadline: float, hardware: str | None = None
) -> KeeperClient:
    """Start a keeper that outlives us and connect to it. `cgroup` None: weak containment. `hardware`: its option.

    It has a session of its own, no fds of ours, and its stderr is `<run>/keeper.log`. Raises KeeperGone with the last
    lines of that log when it does not come up by `deadline` (boot-time seconds).
    """
    containment = ["--weak"] if cgroup is None else ["--cgroup", cgroup]
    permitted = [] if group is None else ["--group", group]
    watchdog = [] if hardware is None else ["--hardware", hardware]
    options = ["--run", str(run), *containment, *permitted, *watchdog, "--detach"]
    command = [sys.executable, "-I", "-S", str(_PROGRAM), *options]
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    log = os.open(run / _LOG, flags, 0o640)
    try:
        began = os.fstat(log).st_size
        starter = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=_environment(),
            preexec_fn=_restore_files_limit,
        )
    finally:
        os.close(log)
    try:
        async with asyncio.timeout_at(deadline):
            status = await starter.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            starter.kill()
        await starter.wait()
        raise KeeperGone(f"the keeper did not come up by the deadline: {_tail(run / _LOG, began)}") from None
    if status != 0:
        raise KeeperGone(f"the keeper could not start: {_tail(run / _LOG, began)}")
    return await KeeperClient.connect(run)


def _fields(answer: dict[str, Any]) -> dict[str, Any]:
    fields = {key: value for key, value in answer.items() if key not in ("id", "ok", "error")}
    if answer.get("ok") is True:
        return fields
    raise KeeperRefused(str(answer.get("error", "?")), fields)


def _restore_files_limit() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, _FILES_LIMIT)


def _environment() -> dict[str, str]:
    """Next to nothing: services get their environment from the request, and the C locale keeps the keeper small."""
    return {"PATH": os.defpath, "LC_ALL": "C.UTF-8"}


def _tail(path: Path, begin: int) -> str:
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(begin)
        return file.read()[-2000:].decode("utf-8", "replace").strip() or "it said nothing"
    return "it said nothing"
