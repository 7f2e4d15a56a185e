"""One supervisor that is compared: how it is configured, started, asked, and ended."""

import os
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from benchmarks.peers.service import Service, running
from supervisor import proc
from supervisor.demo import cleanup

PEERS = Path(__file__).parents[2] / ".cache/peers"
"""Where tools/install-peers.sh puts them."""
STOP_SECONDS = 2
"""From SIGTERM to SIGKILL, for all alike."""


class Peer(ABC):
    """One supervisor with its services, everything of both in `folder`; `end` leaves none of their processes.

    All of them name something below the folder in their environment or arguments, and are found by that.
    """

    name: ClassVar[str]
    restartable: ClassVar[bool] = True
    """It can be killed and started again while its services go on."""

    def __init__(self, folder: Path, services: Sequence[Service]) -> None:
        self.folder, self.services = folder, list(services)
        self.process: subprocess.Popen[bytes] | None = None

    @classmethod
    @abstractmethod
    def binary(cls) -> Path:
        """What must be there for it."""

    @classmethod
    def unavailable(cls) -> str | None:
        """Why it cannot be run here."""
        return None if os.access(cls.binary(), os.X_OK) else f"{cls.binary().name} is not in .cache/peers"

    @abstractmethod
    def configure(self) -> None:
        """Write its files; before the first start."""

    @abstractmethod
    def command(self) -> list[str]:
        """What starts it."""

    @abstractmethod
    def stop_command(self, service: str) -> list[str]:
        """What stops one service and waits until that is done, where it can wait."""

    @abstractmethod
    def restart_command(self, service: str) -> list[str]:
        """What restarts one service, by SIGKILL if it does not end by SIGTERM."""

    def variables(self) -> dict[str, str]:
        """What it needs in its environment."""
        return {}

    def environment(self) -> dict[str, str]:
        return {"PATH": os.environ["PATH"], "PEER_FOLDER": f"{self.folder}/", **self.variables()}

    def start(self) -> None:
        """Does not wait. Again: it is started beside what an earlier run left."""
        with (self.folder / "out").open("ab") as output:
            self.process = subprocess.Popen(
                self.command(),
                cwd=self.folder,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def ask(self, command: list[str]) -> "subprocess.Popen[bytes]":
        """Runs one of the commands above; does not wait."""
        with (self.folder / "asked").open("ab") as output:
            return subprocess.Popen(
                command,
                cwd=self.folder,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def pids(self) -> dict[str, list[int]]:
        """The live processes of its services, by name: more than one where something runs twice."""
        return running(self.services[0].folder)

    def own(self) -> list[int]:
        """All of its processes, its services aside."""
        theirs = {pid for pids in self.pids().values() for pid in pids}
        return [pid for pid, _ in cleanup.processes_of(self.folder) if pid not in theirs]

    def kill(self) -> None:
        """SIGKILL to all of its own processes at once, and to no service."""
        targets = [(pid, found.start_ticks) for pid in self.own() if (found := proc.stat(pid)) is not None]
        for pid, ticks in targets:
            proc.kill(pid, ticks)
        if self.process is not None:
            self.process.wait()

    def end(self) -> None:
        """SIGKILL to everything of it."""
        cleanup.kill_all(self.folder)
        if self.process is not None:
            self.process.wait()

    def said(self) -> str:
        """The end of its output."""
        path = self.folder / "out"
        return path.read_text(errors="replace")[-2000:] if path.exists() else ""


def unpacked_environment() -> dict[str, str]:
    """For programs out of Debian's packages, unpacked by tools/install-peers.sh."""
    apt = PEERS / "apt"
    libraries = [str(path) for base in ("usr/lib", "lib") for path in (apt / base).glob("*-linux-gnu*")]
    programs = [str(apt / folder) for folder in ("usr/bin", "usr/sbin", "sbin", "bin")]
    return {
        "PATH": os.pathsep.join([*programs, os.environ["PATH"]]),
        "LD_LIBRARY_PATH": os.pathsep.join(libraries),
    }


def write_script(path: Path, text: str) -> None:
    """An executable shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
