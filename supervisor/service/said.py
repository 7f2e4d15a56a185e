"""What the processes of one run of a service have said by sd_notify. Pure: the time is passed in."""

from collections.abc import Container, Mapping
from dataclasses import dataclass, field

MOST_SECTIONS = 256
"""GPU sections that are remembered at a time; a service that begins more without end is its own fault."""
LONGEST_MORE = 3600.0
"""Seconds that one EXTEND_TIMEOUT_USEC may give."""


@dataclass
class Said:
    """Boot-time seconds."""

    ready: bool = False
    status: str = ""
    """For people."""
    heard_at: float | None = None
    """The last WATCHDOG=1, or when it became ready."""
    more_until: float = 0.0
    """It asked for more time to start."""
    sections: dict[tuple[int, str], float] = field(default_factory=dict)
    """(pid, id) → since when a GPU section goes on."""

    def forget_all_but(self, pids: Container[int]) -> None:
        """Sections of processes that have ended are over."""
        self.sections = {key: since for key, since in self.sections.items() if key[0] in pids}

    def take(self, pid: int, fields: Mapping[str, str], now: float) -> None:
        """One message of this process."""
        self.ready = self.ready or fields.get("READY") == "1"
        self.status = fields.get("STATUS", self.status)
        if fields.get("WATCHDOG") == "1":
            self.heard_at = now
        more = fields.get("EXTEND_TIMEOUT_USEC", "")
        if more.isascii() and more.isdigit():
            self.more_until = max(self.more_until, now + min(int(more) / 1e6, LONGEST_MORE))
        key = (pid, fields.get("X_GPU_SECTION_ID", ""))
        if fields.get("X_GPU_SECTION") == "begin" and len(self.sections) < MOST_SECTIONS:
            self.sections[key] = now  # begun again: the end of the first one was lost
        elif fields.get("X_GPU_SECTION") == "end":
            self.sections.pop(key, None)
