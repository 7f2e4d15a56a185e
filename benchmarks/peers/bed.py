"""The place of a comparison: one folder and one cgroup, gone at the end, however that comes."""

import contextlib
import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.peers.peer import Peer
from benchmarks.peers.service import BenchmarkError, Service, compiled, until
from supervisor.cgroup import Group
from supervisor.demo import cleanup

START_SECONDS = 180.0
"""Limit for the start of all services; monit takes a minute for 200."""
_MEMORY = Path("/dev/shm")


class Bed:
    """All files lie on a tmpfs where there is one: for every peer alike, a disk is not what is measured."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.program = compiled(folder)
        self._numbers = itertools.count()

    def services(self, count: int, **extra: Sequence[str]) -> list[Service]:
        """So many plain ones, s0 …, and one more for each keyword: its name, and its further arguments."""
        folder = Path(tempfile.mkdtemp(dir=self.folder, prefix="stamps-"))
        names: dict[str, Sequence[str]] = {f"s{number}": () for number in range(count)}
        return [Service(name, self.program, folder, tuple(words)) for name, words in (names | extra).items()]

    @contextmanager
    def running(self, kind: type[Peer], services: Sequence[Service]) -> Iterator[tuple[Peer, float]]:
        """A peer with all its services started, and the seconds that took. Raises BenchmarkError."""
        peer = kind(self.folder / f"{kind.name}-{next(self._numbers)}", services)
        try:
            began = time.monotonic_ns()
            peer.start()
            waiting = list(services)

            def started() -> bool:
                waiting[:] = [service for service in waiting if service.started(began) is None]
                return not waiting

            try:
                until(started, START_SECONDS, f"{kind.name}: the start of {len(services)} services")
            except BenchmarkError as error:
                raise BenchmarkError(f"{error}; it said: {peer.said()}") from None
            last = max(service.started(began) or began for service in services)
            yield peer, (last - began) / 1e9
        finally:
            peer.end()


@contextmanager
def bed() -> Iterator[Bed]:
    """A guardian beside it removes everything also where this process is killed."""
    folder = Path(tempfile.mkdtemp(prefix="gpuward-peers-", dir=_MEMORY if os.access(_MEMORY, os.W_OK) else None))
    group = f"/{folder.name}" if os.geteuid() == 0 else None
    guardian = cleanup.start_guardian(folder, group, dict(os.environ))
    try:
        if group is not None:
            with contextlib.suppress(FileNotFoundError):
                Group.open(group, make=True).close()
        yield Bed(folder)
    finally:
        cleanup.dismiss(guardian)
        shutil.rmtree(folder, ignore_errors=True)
