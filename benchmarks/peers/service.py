"""The tiny C service that every peer runs, and what is seen of it from outside: its stamps and its processes."""

import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from supervisor import proc

SOURCE = Path(__file__).with_name("service.c")
PAUSE = 0.004
"""Seconds between two looks for a stamp: what is measured is the time in it, not when it was seen."""


class BenchmarkError(Exception):
    """Something did not happen in time; says what."""


def until(look: Callable[[], bool], within: float, what: str) -> None:
    """Raises BenchmarkError where `look` is not true within so many seconds."""
    if not came(look, within):
        raise BenchmarkError(f"{what}: not within {within:g} s")


def came(look: Callable[[], bool], within: float) -> bool:
    """Whether `look` is true within so many seconds."""
    end = time.monotonic() + within
    while not look():
        if time.monotonic() > end:
            return False
        time.sleep(PAUSE)
    return True


def compiled(folder: Path) -> Path:
    """The program, made in `folder`. Raises BenchmarkError where there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise BenchmarkError("no C compiler (cc or gcc): the services of this benchmark are a C program")
    program = folder / "service"
    subprocess.run([compiler, "-O2", "-Wall", "-static", "-o", program, SOURCE], check=True)
    return program


@dataclass(frozen=True)
class Service:
    """`extra`: further arguments, see service.c."""

    name: str
    program: Path
    folder: Path
    extra: tuple[str, ...] = ()

    @property
    def command(self) -> list[str]:
        return [str(self.program), str(self.folder), self.name, *self.extra]

    def stamps(self) -> list[tuple[int, int]]:
        """(pid in its own namespace, start in CLOCK_MONOTONIC nanoseconds) of every start so far, the last one last."""
        return stamps(self.folder / self.name)

    def told(self, name: str) -> int | None:
        """What it has written to the file NAME-… beside its stamps."""
        rows = stamps(self.folder / f"{self.name}-{name}")
        return rows[-1][1] if rows else None

    def started(self, after: int) -> int | None:
        """The first start after this moment, in nanoseconds."""
        return next((at for _, at in self.stamps() if at > after), None)


def stamps(path: Path) -> list[tuple[int, int]]:
    if not path.exists():
        return []
    rows = (line.split() for line in path.read_text().splitlines())
    return [(int(row[0]), int(row[1])) for row in rows if len(row) == 2]


def running(folder: Path) -> dict[str, list[int]]:
    """Pids of the live processes of all services with this folder, by name, as this pid namespace sees them."""
    found: dict[str, list[int]] = {}
    wanted = bytes(folder)
    for pid in proc.all_pids():
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if len(words) > 3 and words[1] == wanted and words[0].endswith(b"/service"):
            found.setdefault(words[2].decode(), []).append(pid)
    return found
