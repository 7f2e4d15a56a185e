"""One thread, one epoll. A handler that fails is logged; the loop goes on."""

import contextlib
import os
import select
import sys
import time
import traceback
from collections.abc import Callable

from supervisor.keeper.kernel import boot_ns
from supervisor.keeper.pace import STOPPED_NS, TICKS_NS, Slowest

Handler = Callable[[int], None]
"""Called with the epoll events of its fd. May be called without cause: fds are reused within one round."""


class Loop:
    """Calls handlers of fds that are ready."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, Handler] = {}
        self.tick = Slowest(TICKS_NS)
        """By how much a timer can have been late: how late the kernel woke us, or how long we did not look."""
        self._woke_ns = time.monotonic_ns()

    def add(self, fd: int, handler: Handler, events: int = select.EPOLLIN) -> None:
        """Watch an fd."""
        self._handlers[fd] = handler
        self._epoll.register(fd, events)

    def change(self, fd: int, events: int) -> None:
        """Watch for other events from now on."""
        self._epoll.modify(fd, events)

    def remove(self, fd: int | None) -> None:
        """Watch it no longer; to be called before the fd is closed."""
        if fd is not None and self._handlers.pop(fd, None) is not None:
            with contextlib.suppress(OSError):  # closed before
                self._epoll.unregister(fd)

    def once(self, timeout_s: float) -> None:
        """One round: wait at most `timeout_s`, then call what is ready."""
        asked = time.monotonic_ns()
        ready = self._epoll.poll(timeout_s)
        woke = time.monotonic_ns()
        late = 0 if ready else woke - asked - int(timeout_s * 1e9)
        self._measure(max(late, asked - self._woke_ns))
        self._woke_ns = woke
        for fd, events in ready:
            handler = self._handlers.get(fd)
            if handler is not None:
                guard(handler, events)

    def _measure(self, late_ns: int) -> None:
        if late_ns < STOPPED_NS:
            self.tick.add(late_ns, boot_ns())


def guard(action: Callable[..., object], *args: object) -> bool:
    """Call it; log what it raises. The edge of every task of the keeper: False when it failed."""
    try:
        action(*args)
    except Exception:  # noqa: BLE001 - the keeper must outlive every surprise
        _log_once(traceback.format_exc())
        return False
    return True


_SAME_AGAIN_NS = 60 * 10**9
_said: dict[str, int] = {}


def _log_once(text: str) -> None:
    """What fails in every turn is said once a minute: the log lies in the run folder, which is memory."""
    now = boot_ns()
    if now - _said.get(text, -_SAME_AGAIN_NS) < _SAME_AGAIN_NS:
        return
    if len(_said) > 100:
        _said.clear()
    _said[text] = now
    log(text)


def log(text: str) -> None:
    """To stderr (`<run>/keeper.log`); a full disk must not stop the keeper."""
    try:
        os.write(sys.stderr.fileno(), f"keeper[{os.getpid()}]: {text.rstrip()}\n".encode("utf-8", "replace"))
    except (OSError, ValueError, AttributeError):
        return


def rearm(events_fd: int) -> None:
    """Read cgroup.events once, so that the next change wakes us again (kernfs poll)."""
    try:
        os.pread(events_fd, 4096, 0)
    except OSError:
        return
