"""runit: runsvdir, and a runsv beside each service."""

import shlex
from pathlib import Path

from benchmarks.peers.peer import PEERS, STOP_SECONDS, Peer, unpacked_environment, write_script


class Runit(Peer):
    name = "runit"

    @classmethod
    def binary(cls) -> Path:
        return PEERS / "apt/usr/bin/runsvdir"

    def variables(self) -> dict[str, str]:
        return unpacked_environment()

    def configure(self) -> None:
        for service in self.services:
            write_script(self.folder / "sv" / service.name / "run", f"exec {shlex.join(service.command)}")

    def command(self) -> list[str]:
        return [str(self.binary()), "-P", str(self.folder / "sv")]

    def stop_command(self, service: str) -> list[str]:
        return self._sv("force-stop", service)

    def restart_command(self, service: str) -> list[str]:
        return self._sv("force-restart", service)

    def _sv(self, what: str, service: str) -> list[str]:
        program = self.binary().with_name("sv")
        return [str(program), "-w", str(STOP_SECONDS), what, str(self.folder / "sv" / service)]
