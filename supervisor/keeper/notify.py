"""The notify socket: sd_notify(3) of services, forwarded to the supervisor as `notify` events.

Anybody may write to it (0666), so a message counts only by who sent it: the kernel's SCM_CREDENTIALS name the sender,
and its cgroup names the service. A flood costs a bounded part of our time: the rest of it stays in the socket's queue.
"""

import contextlib
import os
import socket
import struct

from supervisor.keeper.kernel import boot_ns
from supervisor.keeper.loop import Loop, guard
from supervisor.keeper.protocol import MAIN, NOTIFY_FOLDER
from supervisor.keeper.services import Event, Services

KEYS = ("READY", "STATUS", "STOPPING", "WATCHDOG", "EXTEND_TIMEOUT_USEC", "X_GPU_SECTION", "X_GPU_SECTION_ID")
"""What is forwarded; all else is dropped."""
_MAX_MESSAGE = 4096
_MAX_VALUE = 256  # characters
_AT_A_TIME = 32
_REST_NS = 20_000_000


class Notify:
    """The socket. `turn` is called after every round of the loop."""

    def __init__(self, path: str, loop: Loop, services: Services, event: Event) -> None:
        self._loop, self._services, self._event = loop, services, event
        self._resting_until = 0
        self._full = min(_AT_A_TIME, _queue_length())
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._sock.bind(path)
        os.chmod(path, 0o666)
        guard(_link, path)
        loop.add(self._sock.fileno(), self._readable)

    def turn(self, now_ns: int) -> None:
        """Listen again after a rest."""
        if self._resting_until and now_ns >= self._resting_until:
            self._resting_until = 0
            self._loop.add(self._sock.fileno(), self._readable)

    def resting(self) -> bool:
        """The loop must not sleep for long."""
        return self._resting_until != 0

    def _readable(self, _: int) -> None:
        read = 0
        while read < _AT_A_TIME:
            try:
                data, ancillary, flags, _address = self._sock.recvmsg(_MAX_MESSAGE, socket.CMSG_SPACE(12))
            except BlockingIOError:
                break
            read += 1
            pid = _sender(ancillary)
            if pid and not flags & socket.MSG_TRUNC:
                self._forward(pid, parse(data))
        if read >= self._full:  # told after what was read: a section may have begun here whose end is lost
            self._event("notify-lost")
        if read >= _AT_A_TIME:
            self._loop.remove(self._sock.fileno())
            self._resting_until = boot_ns() + _REST_NS

    def _forward(self, pid: int, fields: dict[str, str]) -> None:
        found = self._services.whose(pid) if fields else None
        if found is None:
            return
        service, unit = found
        process = service if unit in (None, MAIN) else service.units.get(unit)
        if process is not None and fields.get("READY") == "1":
            self._services.ready(process)
        self._event("notify", service=service.name, unit=unit, pid=pid, main=service.pid, fields=fields)


def parse(data: bytes) -> dict[str, str]:
    """The known variables of a message; of a name that comes twice the last one."""
    found = {}
    for line in data.decode("utf-8", "replace").splitlines():
        name, equals, value = line.partition("=")
        if equals and name in KEYS:
            found[name] = value[:_MAX_VALUE]
    return found


def _link(path: str) -> None:
    """The socket once more, in a folder of its own: a container has that folder mounted, not all of the run folder, and
    sees the next keeper's socket there too."""
    run, name = os.path.split(path)
    folder = f"{run}/{NOTIFY_FOLDER}"
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder)
    os.chmod(folder, 0o755)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"{folder}/{name}")
    os.link(path, f"{folder}/{name}")


def _sender(ancillary: list[tuple[int, int, bytes]]) -> int:
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS and len(content) >= 12:
            pid: int = struct.unpack("3i", content[:12])[0]
            return pid
    return 0


def _queue_length() -> int:
    """Messages that the kernel keeps before it drops (unix(7)); as many at once, and some may have been lost."""
    try:
        with open("/proc/sys/net/unix/max_dgram_qlen", encoding="ascii") as file:
            return max(1, int(file.read()))
    except (OSError, ValueError):
        return 10
