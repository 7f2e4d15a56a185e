"""The supervisor's own log, to stderr. It never raises and never waits: a log that cannot be written must not stop what
is logged. Lines that do not go out are counted, and the next one that does is preceded by their number.
"""

import logging
import os
import select
import sys

import structlog

AT_ONCE = 4096
"""Bytes that a pipe takes without waiting once poll(2) calls it writable: PIPE_BUF of pipe(7)."""


class LogStream:
    """A text file for structlog, on a file descriptor that may be a full disk, or a pipe that nobody reads."""

    def __init__(self, fd: int, encoding: str = "utf-8") -> None:
        self._fd = fd
        self._encoding = encoding
        self._lost = 0
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)

    def write(self, text: str) -> None:
        """One or more whole lines."""
        if self._lost and self._sent(f"{self._lost} lines of this log could not be written\n"):
            self._lost = 0
        if self._lost or not self._sent(text):
            self._lost += 1

    def flush(self) -> None:
        """Nothing is kept back."""

    def _sent(self, text: str) -> bool:
        """False: not all of it, so it counts as lost."""
        data = memoryview(text.encode(self._encoding, errors="backslashreplace"))
        try:
            while data:
                if not self._poll.poll(0):
                    return False
                data = data[os.write(self._fd, data[:AT_ONCE]) :]
        except OSError:
            return False
        return True


def log_to_stderr() -> None:
    """Lines for people on a terminal, JSON otherwise."""
    people, encoding = sys.stderr.isatty(), sys.stderr.encoding.lower()
    json = structlog.processors.JSONRenderer(ensure_ascii=encoding != "utf-8")
    stream = LogStream(sys.stderr.fileno(), encoding)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.dev.ConsoleRenderer() if people else json,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.WriteLoggerFactory(stream),  # type: ignore[arg-type]
    )
