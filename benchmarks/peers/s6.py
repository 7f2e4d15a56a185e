"""s6: s6-svscan, and an s6-supervise beside each service."""

import os
import shlex
from pathlib import Path

from benchmarks.peers.peer import PEERS, STOP_SECONDS, Peer, write_script

_SEEN = 'mount -t overlay -o lowerdir="$1":/usr none /usr && shift && exec "$@"'
"""Debian's s6 looks for its programs in /usr/bin and for its library by no variable: in a mount namespace of its own
both are there."""


class S6(Peer):
    name = "s6"

    @classmethod
    def binary(cls) -> Path:
        return PEERS / "apt/usr/bin/s6-svscan"

    @classmethod
    def unavailable(cls) -> str | None:
        return super().unavailable() or (None if os.geteuid() == 0 else "needs root, for a mount namespace")

    def configure(self) -> None:
        for service in self.services:
            folder = self.folder / "sv" / service.name
            write_script(folder / "run", f"exec {shlex.join(service.command)}")
            (folder / "timeout-kill").write_text(f"{STOP_SECONDS * 1000}\n")

    def command(self) -> list[str]:
        return self._in_view("s6-svscan", "-c", str(len(self.services) + 10), str(self.folder / "sv"))

    def stop_command(self, service: str) -> list[str]:
        return self._svc(service, "-wD", "-d")

    def restart_command(self, service: str) -> list[str]:
        return self._svc(service, "-wr", "-r")

    def _svc(self, service: str, *what: str) -> list[str]:
        wait = str(STOP_SECONDS * 2000)
        return self._in_view("s6-svc", *what, "-T", wait, str(self.folder / "sv" / service))

    def _in_view(self, *command: str) -> list[str]:
        return ["unshare", "--mount", "sh", "-c", _SEEN, "sh", str(PEERS / "apt/usr"), *command]
