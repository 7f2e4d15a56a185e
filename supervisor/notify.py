"""For services written in Python: tell gpuward how they are (sd_notify(3)). Standard library only, never blocks.

    from supervisor.notify import gpu_section, heartbeat, ready

    ready()                      # readiness: {notify: true}
    heartbeat()                  # at least every `heartbeat`
    with gpu_section():          # at most `max_gpu_section`
        model.generate(...)

Without $NOTIFY_SOCKET, or when nobody reads it, nothing happens.
"""

import contextlib
import itertools
import os
import socket
from collections.abc import Iterator

_numbers = itertools.count(1)


def notify(*lines: str) -> bool:
    """Send `NAME=value` lines as one message. False: it was not taken."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path:
        return False
    address = "\0" + path[1:] if path.startswith("@") else path
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as sock:
            sock.sendto("\n".join(lines).encode(), address)
    except OSError:
        return False
    return True


def ready(status: str = "") -> bool:
    """The service can do its work."""
    return notify("READY=1", *([f"STATUS={status}"] if status else []))


def heartbeat() -> bool:
    """The service lives."""
    return notify("WATCHDOG=1")


@contextlib.contextmanager
def gpu_section() -> Iterator[None]:
    """Work on the GPU that must come to an end. Sections of several threads, or within one another, are told apart."""
    name = f"X_GPU_SECTION_ID={next(_numbers)}"
    notify("X_GPU_SECTION=begin", name)
    try:
        yield
    finally:
        notify("X_GPU_SECTION=end", name)
