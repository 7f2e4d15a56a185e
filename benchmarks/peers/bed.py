"""The place of a comparison: one folder and one cgroup, gone at the end, however that comes."""

import itertools
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

from benchmarks.peers import guardian
from benchmarks.peers.peer import Peer
from benchmarks.peers.service import BenchmarkError, Service, compiled, until
from supervisor.cgroup import Group, mount_point

START_SECONDS = 180.0
"""Limit for the start of all services; monit takes a minute for 200."""
_MEMORY = Path("/dev/shm")


class Bed:
    """All files lie on a tmpfs where there is one: for every peer alike, a disk is not what is measured."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._numbers = itertools.count()

    @cached_property
    def program(self) -> Path:
        """The service. Raises BenchmarkError where there is no compiler."""
        return compiled(self.folder)

    @property
    def group(self) -> str:
        """The cgroup that is removed with it."""
        return f"/{self.folder.name}"

    def services(self, count: int, **extra: Sequence[str]) -> list[Service]:
        """For one peer: so many plain ones, s0 …, and one more for each keyword: its name, its further arguments."""
        folder = self.folder / f"{next(self._numbers)}" / "stamps"
        folder.mkdir(parents=True)
        names: dict[str, Sequence[str]] = {f"s{number}": () for number in range(count)}
        return [Service(name, self.program, folder, tuple(words)) for name, words in (names | extra).items()]

    @contextmanager
    def running(self, kind: type[Peer], services: Sequence[Service]) -> Iterator[tuple[Peer, float]]:
        """A peer with all its services started, and the seconds that took. Raises BenchmarkError."""
        peer = kind(services[0].folder.parent, services)
        try:
            peer.configure()
            began = time.monotonic_ns()
            peer.start()
            waiting = list(services)

            def started() -> bool:
                while waiting and waiting[-1].started(began) is not None:  # one file a look: this is to cost nothing
                    waiting.pop()
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
    place = Bed(folder)
    group = place.group if os.geteuid() == 0 and mount_point() is not None else None
    guard = guardian.start(folder, group)
    try:
        if group is not None:
            Group.open(group, make=True).close()
        yield place
    finally:
        guardian.dismiss(guard)
